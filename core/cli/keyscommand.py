"""`dormouse keys`: through the node if it runs, else on its state directory, under the lock that a node would have."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dormouse.core import exposure
from dormouse.core.audit import Audit
from dormouse.core.config import NodeConfig
from dormouse.core.directories import lock, open_directory
from dormouse.core.exposure import UNTIL_FIRST
from dormouse.core.keys import KeyFile, shown
from dormouse.core.node import nodeprocess
from dormouse.core.node.adminclient import PATIENCE_S, AdminClient
from dormouse.core.node.refusals import CallRefused, Unreachable
from dormouse.core.paths import StatePaths
from dormouse.core.users import user_name
from dormouse.schemas.admin import Wish
from dormouse.schemas.errors import ConfigError


def wish_of(options: dict[str, Any]) -> Wish:
    """The key that the command's options ask for; an option that is not given keeps its default. Raises ConfigError."""
    try:
        return msgspec.convert({name: value for name, value in options.items() if value not in ((), None)}, Wish)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


@dataclass(frozen=True)
class Target:
    """The node that the command's options name."""

    run: str | None
    node: str | None
    file: str | None

    @property
    def client(self) -> AdminClient:
        run = Path(self.run) if self.run is not None else self.config.run_directory
        return AdminClient(run, PATIENCE_S)

    @property
    def state(self) -> StatePaths:
        """The state directory of the node when it does not run. Raises Unreachable if nothing says where that is."""
        if self.run is not None and self.file is None:
            raise Unreachable(f"no node answers in {self.run}; give --config NODE.toml to work without it")
        return StatePaths(self.config.state_directory)

    @property
    def config(self) -> NodeConfig:
        return nodeprocess.config_of(self.file, self.node)


@contextmanager
def offline(state: StatePaths) -> Iterator[KeyFile]:
    """The keys of a node that does not run. Raises ConfigError."""
    try:
        fd = open_directory(state.state, "state directory", 0o700, links=True)
        assert fd is not None
        try:
            lock(fd, state.state, "state directory")
            state.make()
            yield KeyFile(state.keys)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"{state.keys}: {error.strerror}; nothing was changed") from error


def closes(target: Target) -> bool:
    """Whether a key, the first one, ends that anybody of this machine invokes without one."""
    with suppress(Unreachable):
        return bool(target.client.status()["node"]["without_key"] == UNTIL_FIRST)
    with offline(target.state) as keys:
        return exposure.without_key(target.config.node, keys.wanted) == UNTIL_FIRST


def create(target: Target, options: dict[str, Any]) -> dict[str, Any]:
    wish = wish_of(options)
    with suppress(Unreachable):
        return target.client.create_key(wish)
    state = target.state
    with offline(state) as keys:
        key, token = keys.create(wish, user_name(), time.time())
        Audit(state.audit).write(user_name(), "the state directory", "keys create", key.id, "ok")
    return {"key": token, **shown(key)}


def ls(target: Target) -> list[dict[str, Any]]:
    with suppress(Unreachable):
        return target.client.list_keys()
    with offline(target.state) as keys:
        return [shown(key) for key in keys.all()]


def revoke(target: Target, name: str) -> dict[str, Any]:
    with suppress(Unreachable):
        return target.client.revoke_key(name)
    state = target.state
    with offline(state) as keys:
        key = keys.revoke(name, time.time())
        outcome = "ok" if key else "unknown_key"
        Audit(state.audit).write(user_name(), "the state directory", "keys revoke", name, outcome)
    if key is None:
        raise CallRefused(404, "unknown_key", f"there is no key {name!r}; `dormouse keys ls` shows them")
    return shown(key)
