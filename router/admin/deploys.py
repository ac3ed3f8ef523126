"""Admission of deploys and rollbacks: those that may begin, their settings, and the earlier versions that there are.

The course of one that has begun is deploying.py's.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Protocol

import msgspec
from msgspec import structs

from dormouse.core import notjson, tenants
from dormouse.core.config import NodeConfig
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import splits
from dormouse.core.decisions.requests.policy import RequestPolicy
from dormouse.core.modelfolder import ADAPTER
from dormouse.core.names import base_of
from dormouse.core.quantities import duration
from dormouse.router.access import tenancy
from dormouse.router.access.access import Caller
from dormouse.router.admin import options
from dormouse.router.admin.asks import Asks
from dormouse.router.admin.deploying import Deploying, DeployPlan, noted, spec_of, within_quota
from dormouse.router.admin.environments import Environments
from dormouse.router.admin.history import History, Version
from dormouse.router.admin.keeper import Keeper
from dormouse.router.admin.permits import Permits
from dormouse.router.admin.traffic import Sharing
from dormouse.router.admin.vault import Vault
from dormouse.router.front.exchange import HttpError, refuse
from dormouse.router.front.requests import Requests
from dormouse.router.instances.functionlog import FunctionLogs
from dormouse.schemas import admin as a
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import FunctionSpec
from dormouse.schemas.options import FILE

NOTE_CHARS: Final = 1000
CHECK_NBYTES: Final = 16 << 10


class Node(Protocol):
    """The part of the router that this module uses."""

    config: NodeConfig
    policy: RequestPolicy
    requests: Requests

    def dispatch(self, event: e.Event) -> None: ...


class Deploys:
    """See the module."""

    def __init__(
        self,
        node: Node,
        permits: Permits,
        keeper: Keeper,
        asks: Asks,
        logs: FunctionLogs,
        history: History,
        vault: Vault,
        environments: Environments,
    ) -> None:
        self._config, self._requests, self._picture = node.config, node.requests, node.policy.picture
        self._permits, self._keeper, self._asks, self._logs = permits, keeper, asks, logs
        self._history, self._vault, self._environments = history, vault, environments
        self.traffic = Sharing(self._picture, asks, node.dispatch, history, self._may_serve, node.requests.forget)

    @asynccontextmanager
    async def deploying(self, caller: Caller, act: a.Deploy) -> AsyncGenerator[Deploying, None]:
        """A deploy that may be, for its files. Given up, it leaves nothing. Raises HttpError."""
        with self._permits.audited(caller, act, act.name) as audited:
            await self._permits.may_informed(caller, act)
            planned = partial(self._plan, caller, act)
            first = planned(act.file)
            below = ADAPTER if first.settings.base else ""
            begun = await self._keeper.keeping(self._keeper.snapshots.begin, act.name, below, first.spec.tenant)

            def again(file: str) -> DeployPlan:
                plan = planned(file)
                if plan.spec.tenant != first.spec.tenant:
                    text = f"{FILE} names tenant {plan.spec.tenant!r}; over HTTP that is said beside it: &tenant="
                    raise refuse(400, "bad_request", text)
                return plan

            deploying = Deploying(
                self._keeper,
                self._asks,
                begun,
                again,
                act.file,
                self._environments,
                partial(self._printed, caller, first.spec),
                audited.more,
                self.traffic,
            )
            try:
                yield deploying
            finally:
                if not deploying.handed:
                    await asyncio.shield(self._keeper.keeping(begun.give_up))

    def _printed(self, caller: Caller, spec: FunctionSpec, data: bytes) -> None:
        """Of a build, which may last: another tenant may have the name, and the log, by now."""
        if tenancy.deploy_refusal(caller, self._picture, spec) is None:
            self._logs.begin(spec.name, spec.tenant).write(data)

    @property
    def adapters(self) -> str:
        """Below which folder of this machine a caller may name adapters; "": nowhere."""
        return self._config.node.adapters

    async def models(self, caller: Caller) -> dict[str, str]:
        """The language models that make text which the caller may see, with the base of each that is an adapter."""
        await self._requests.knows_catalogue()
        specs = (function.spec for function in self._picture.functions.values())
        return {
            spec.name: spec.llm.base for spec in specs if spec.llm is not None and caller.sees(spec.name, spec.tenant)
        }

    def has(self, caller: Caller, name: str) -> bool:
        """Whether there is a function of this name that the caller may see, deployed or on its way."""
        return tenancy.sees(caller, self._picture, name)

    def _base(self, caller: Caller, name: str) -> FunctionSpec | None:
        """Over which an adapter is deployed; None with no name. Raises HttpError."""
        if not name:
            return None
        if base_of(name) != name or not tenancy.serves(caller, self._picture, name):
            text = f"there is no function {name[:100]!r} to be the adapter's base; `dormouse ls` says which there are"
            raise refuse(404, "unknown_base", text)
        return self._picture.functions[name].spec

    def _plan(self, caller: Caller, act: a.Deploy, file: str) -> DeployPlan:
        """Whether it may be, and what it will be. Raises HttpError."""
        try:
            if len(act.note) > NOTE_CHARS:
                raise ConfigError(f"the note has {len(act.note):,} characters; write at most {NOTE_CHARS:,}")
            if act.check:
                _expect_json(act.check)
            said, of_file = options.flat(act.options), options.of_file(file)
            before = self._before(caller, act.name, said, of_file)
            settled = options.settle(said, of_file, before, act.reset)
            base = self._base(caller, settled.settings.base)
            try:
                spec = spec_of(act.name, act.entry, settled.settings, self._config.node.isolation, base)
            except ConfigError as error:
                kept = [each for each in settled.kept if each in str(error)]
                if before is None or not kept:
                    raise
                text = f"{error} (kept of version {before.version}: {', '.join(kept)}; --reset ends that)"
                raise ConfigError(text) from None
            if caller.tenant is not None and spec.tenant == a.Settings().tenant:  # it was not given
                spec = structs.replace(spec, tenant=caller.tenant)
            if act.check and spec.llm is not None:
                raise ConfigError("a check is of functions and embeddings: a language model is tried when it loads")
            spec = within_quota(spec, tenants.quota_nbytes(self._config, spec.tenant))
            if act.traffic is None:
                self.traffic.expect_alone(spec)
            else:
                spec = self.traffic.beside(spec, act.traffic)
        except ConfigError as error:
            raise refuse(400, "bad_request", str(error)) from None
        self._may_deploy(caller, spec)
        self._vault.may_use(caller, spec)
        keeps = settled.options | ({} if spec.tenant == a.Settings().tenant else {"tenant": spec.tenant})
        spec = structs.replace(spec, options=keeps, of_file=settled.of_file, note=act.note)
        served = self._served(caller, act.name)
        says = {} if served is None else _says(served, spec) | {"kept": [*settled.kept]}
        return DeployPlan(spec, base, settled.settings, says, act.check, act.traffic)

    def _served(self, caller: Caller, name: str) -> FunctionSpec | None:
        function = self._picture.functions.get(name)
        return function.spec if function is not None and caller.sees(name, function.spec.tenant) else None

    def _before(self, caller: Caller, name: str, said: options.Flat, of_file: options.Flat) -> FunctionSpec | None:
        """The version whose options a new one keeps: of the same tenant, and of the same kind."""
        spec = self._served(caller, name)
        if spec is None:
            return None
        tenant = said.get("tenant", of_file.get("tenant", caller.tenant or spec.tenant))
        same = tenant == spec.tenant and options.kind_of(spec) == options.kind_said(said)
        return spec if same else None

    def _may_deploy(self, caller: Caller, spec: FunctionSpec) -> None:
        """Raises HttpError."""
        if spec.network and not self._config.sandbox.network:
            text = "functions of this node have no network; whoever runs it can allow it: [sandbox] network = true"
            raise refuse(403, "network_refused", text)
        limits = self._config.limits
        for name, limit_ms in (("timeout", limits.timeout_ms), ("load_timeout", limits.load_timeout_ms)):
            if (asked_ms := getattr(spec, f"{name}_ms")) > limit_ms:
                text = f"{name} is {duration(asked_ms)}, but this node allows {duration(limit_ms)} (limits.{name}_ms)"
                raise refuse(400, "bad_request", f"{text}; deploy with a shorter --{name.replace('_', '-')}")
        if (failure := tenancy.deploy_refusal(caller, self._picture, spec, limits.tenant_functions)) is not None:
            raise HttpError(failure)

    def _may_serve(self, caller: Caller, spec: FunctionSpec) -> None:
        """An earlier version. Raises HttpError."""
        self._may_deploy(caller, spec)
        self._vault.has(spec)

    # --- earlier versions

    def versions(self, caller: Caller, name: str) -> list[dict[str, Any]]:
        """For people, the newest first; of those that are served the one with the name, if another one is newer."""
        shares = splits.shares(self._picture, base_of(name))
        rows = [_version(each) for each in reversed(self._versions(caller, name))]
        return [row | {"traffic": shares.get(row["version"])} for row in rows]

    async def roll_back(self, caller: Caller, act: a.Rollback, audited: dict[str, Any]) -> dict[str, Any]:
        """Raises HttpError."""
        served = self.traffic.whole(act.name).spec
        if not act.version and act.name in self._picture.splits:
            return await self._end_split(served, audited)
        earlier = self._versions(caller, act.name)[:-1]
        found = [each for each in earlier if (each.spec.version == act.version if act.version else each.named)]
        if not found:
            kept = ", ".join(str(each.spec.version) for each in earlier) or "none"
            what = f"version {act.version}" if act.version else "earlier version"
            text = f"no {what} of {act.name!r} is kept; there are: {kept} ([limits] versions says how many are kept)"
            raise refuse(404, "unknown_version", text)
        spec = found[-1].spec
        self._may_serve(caller, spec)
        says = _says(self._versions(caller, act.name)[-1].spec, spec)
        version = self.traffic.next_version(act.name)
        settled = await self._asks.change(lambda ask: e.DeployAsked(ask, spec, version=version))
        assert settled.spec is not None
        audited |= options.told_in_audit(settled.spec) | {"copy_of": spec.version}
        answer = {"name": act.name, "version": settled.spec.version, "copy_of": spec.version, **says}
        return answer | noted(settled)

    async def _end_split(self, served: FunctionSpec, audited: dict[str, Any]) -> dict[str, Any]:
        """The newest step was a version that shares the requests: that one is taken back. Raises HttpError."""
        name = served.name
        *_, ended = splits.shares(self._picture, name)
        await self.traffic.end(name)
        audited |= options.told_in_audit(served) | {"ended": ended}
        return {"name": name, "version": served.version, "ended": ended, "changes": []}

    def _versions(self, caller: Caller, name: str) -> list[Version]:
        """Oldest first, without those of another tenant that has had the name."""
        return [each for each in self._history.of(name) if caller.sees(name, each.spec.tenant)]


def _expect_json(check: str) -> None:
    """Raises ConfigError."""
    if len(check.encode()) > CHECK_NBYTES:
        raise ConfigError(f"the check has more than {CHECK_NBYTES:,} bytes; let a smaller request do")
    try:
        msgspec.json.decode(check.encode())
    except msgspec.DecodeError as error:
        why = notjson.cause(check.encode(), str(error))
        raise ConfigError(f"the check is not JSON: {why}; write a request, such as '{{\"x\": 1}}'") from None


def _version(version: Version) -> dict[str, Any]:
    """For people."""
    spec = version.spec
    return {
        "version": spec.version,
        "at": round(version.at, 3) or None,
        "file": spec.entry,
        "tenant": spec.tenant,
        "deadline_ms": spec.deadline_ms,
        "stateless": spec.stateless,
        "idempotent": spec.idempotent,
        "content": spec.content,
        "env": [name for name, _ in spec.env],
        "secrets": list(spec.secrets),
        "environment": spec.environment,
        "network": spec.network,
        "calls": list(spec.calls),
        "note": spec.note,
        "options": options.told(spec),
    }


def _says(before: FunctionSpec, spec: FunctionSpec) -> dict[str, Any]:
    """Changes of the options by a deploy."""
    return {"changes": options.changes(options.had(before), options.had(spec))}
