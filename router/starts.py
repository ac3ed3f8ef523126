"""Starts instances: collects the resources of each (its log, its secrets, its folder, its libraries), and has one of
the two zygotes fork it. The policy decides when one starts.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any

from msgspec import structs

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.state import RouterState
from dormouse.core.masking import SecretMask
from dormouse.core.times import utc
from dormouse.router.admin.environments import Environments
from dormouse.router.admin.snapshots import Snapshots
from dormouse.router.admin.vault import Vault, variables_file
from dormouse.router.instances.functionlog import FunctionLogs
from dormouse.router.instances.instances import Instances
from dormouse.router.instances.logpipe import LogPipe
from dormouse.router.instances.plain import PlainZygote
from dormouse.router.instances.zygote import ZygoteLink
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError, PeerLost


class InstanceStarts:
    """``dispatch`` passes an event to the policy: that one could not be started, or prints."""

    def __init__(
        self,
        picture: RouterState,
        instances: Instances,
        logs: FunctionLogs,
        vault: Vault,
        snapshots: Snapshots,
        environments: Environments,
        zygote: ZygoteLink,
        plain: PlainZygote,
        dispatch: Callable[[e.Event], None],
        log: Any,
    ) -> None:
        self._picture, self._instances, self._logs, self._vault = picture, instances, logs, vault
        self._snapshots, self._environments = snapshots, environments
        self._zygote, self._plain = zygote, plain
        self._dispatch, self._log = dispatch, log

    def start(self, name: str, spec: m.FunctionSpec, device: m.DeviceInfo, check: str = "") -> None:
        if spec.environment and self._environments.of(spec.environment) is None:
            self._failed(name, ": its libraries are not there for this version of torch; deploy it again")
            return
        try:
            log = self._logs.begin(spec.name, spec.tenant)
            secrets = self._vault.values(spec)
            variables = variables_file(spec, secrets)
        except ConfigError as error:
            self._failed(name, f": {error}")
            return
        except OSError as error:
            self._failed(name, f" ({error.filename}: {error.strerror}; free space on the disk of [node] state)")
            return
        try:
            host = self._instances.open(name, spec)
        except (OSError, PeerLost) as error:
            if variables >= 0:
                os.close(variables)
            self._failed(name, f" ({error}; free space, and inodes, in [node] run)")
            return
        starts = f"--- instance {name} of version {spec.version} starts, {utc(time.time())}\n"
        log.write(starts.encode(), name)
        host.mask = SecretMask(secrets)
        pipe = host.log_pipe = LogPipe(log, partial(self._printed, name), copy(host.mask), name, host.running)
        folder = self._snapshots.tree(spec.name, spec.snapshot)
        own = self._environments.site(spec.environment) if spec.environment else ""
        fork = self._instances.fork_message(host, spec, str(folder), device, variables >= 0, own)
        fork = structs.replace(fork, check=check)
        fds = (pipe.write_fd, host.arena.fd, variables)[: 2 + fork.variables]
        environment = self._environments.of(spec.environment)
        if environment is None or self._zygote.modules.isdisjoint(environment.names):
            self._zygote.post(fork, fds)
        else:
            self._plain.fork(fork, fds)
        pipe.handed()
        if variables >= 0:
            os.close(variables)
        self._log.info("instance_starts", instance=name, function=spec.name, version=spec.version)

    def _failed(self, name: str, why: str) -> None:
        self._dispatch(e.InstanceExited(name, f"could not be started{why}"))

    def _printed(self, name: str) -> None:
        instance = self._picture.instances.get(name)
        if instance is not None and instance.state.loads:
            self._dispatch(e.Printed(name))

    def begin_log(self, spec: m.FunctionSpec) -> None:
        """Another tenant has the name from now on, and may not see earlier output."""
        self._logs.remove(spec.name)
        for name, instance in self._picture.instances.items():
            host = self._instances.hosts.get(name)
            alike = (instance.spec.name, instance.spec.tenant) == (spec.name, spec.tenant)
            if alike and host is not None and host.log_pipe is not None:
                with suppress(OSError):  # a full disk: its output is lost, and nothing else
                    host.log_pipe.log = self._logs.of(spec.name)
