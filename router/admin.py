"""Administration: deploy, list, remove, logs, status. What is done, whoever asks and over whichever transport.

:meth:`Admin.call` and :meth:`Admin.logs` are the only ways in, and begin with ``access.permit``. Nothing here is on a
request's path. router/adminsocket.py and router/adminhttp.py are the transports.
"""

import re
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Final, assert_never

from dormouse.core.config import parse_duration_ms, parse_nbytes
from dormouse.router import access, queueing
from dormouse.router import events as e
from dormouse.router.access import Caller
from dormouse.router.bodies import Body
from dormouse.router.http import HttpError, checked, refuse
from dormouse.router.replicas import limit
from dormouse.router.state import State
from dormouse.router.stats import FunctionStats
from dormouse.schemas import admin as a
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import FunctionSpec

if TYPE_CHECKING:
    from dormouse.router.main import Router

SOURCE_NBYTES: Final = 4 << 20
"""Largest function file; it travels in one message and lives in the catalogue."""

MOST: Final = 1_000_000
"""Requests that wait for a function, or its instances: beyond any machine, and well within a message's integers."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def spec_of(act: a.Deploy) -> FunctionSpec:
    """Raises ConfigError naming what is wrong."""
    settings = act.settings
    if not _NAME.fullmatch(act.name):
        raise ConfigError(
            f"{act.name!r} cannot be a function's name; use up to 63 letters, digits, '.', '_', '-', not '.' first"
        )
    if not _NAME.fullmatch(settings.tenant):
        raise ConfigError(
            f"{settings.tenant!r} cannot be a tenant's name; use 1 to 63 letters, digits, '.', '_' and '-'"
        )
    if not 1 <= settings.percentile <= 100:  # 0.98 is a slip
        raise ConfigError(f"percentile is {settings.percentile:g}; write per cent, a number from 1 to 100, such as 98")
    if not 1 <= settings.max_queue <= MOST:
        raise ConfigError(f"max_queue is {settings.max_queue}; write a number from 1 to {MOST:,}")
    if not 0 <= settings.max_instances <= MOST:
        raise ConfigError(
            f"max_instances is {settings.max_instances}; write a number from 1 to {MOST:,}, or 0 for one per GPU"
        )
    if settings.max_instances > 1 and not settings.stateless:
        raise ConfigError(
            f"max_instances is {settings.max_instances}, but only a stateless function can have more than one: deploy "
            "it with stateless (--stateless) if no request changes what later ones see"
        )
    return FunctionSpec(
        name=act.name,
        version=0,
        path=act.path or act.entry,
        source="",
        tenant=settings.tenant,
        deadline_ms=parse_duration_ms(settings.deadline),
        percentile=settings.percentile,
        timeout_ms=parse_duration_ms(settings.timeout),
        load_timeout_ms=parse_duration_ms(settings.load_timeout),
        idempotent=settings.idempotent,
        max_queue=settings.max_queue,
        quota_nbytes=parse_nbytes(settings.quota),
        stateless=settings.stateless,
        max_instances=settings.max_instances,
    )


class Admin:
    """The acts."""

    def __init__(self, router: "Router") -> None:
        self._router = router

    async def call(self, caller: Caller, act: a.Remove | a.Functions | a.Status) -> Any:
        """Do it; the answer is what JSON can say. Raises HttpError."""
        access.permit(caller, act)
        match act:
            case a.Remove(name=name):
                settled = await self._router.remove(name)
                if settled.failure is not None:
                    raise HttpError(settled.failure)
                return {"removed": name}
            case a.Functions():
                return {"functions": self._functions()}
            case a.Status():
                return await self._status()
            case _:
                assert_never(act)

    def begin_deploy(self, caller: Caller, act: a.Deploy) -> FunctionSpec:
        """Before its files are sent: whether it may be, and what it will be. Raises HttpError."""
        access.permit(caller, act)
        try:
            return spec_of(act)
        except ConfigError as error:
            raise refuse(400, "bad_request", str(error)) from None

    async def deploy(self, spec: FunctionSpec) -> Any:
        """What :meth:`begin_deploy` has permitted, with its files. Raises HttpError."""
        settled = await self._router.deploy(spec)
        if settled.failure is not None:
            raise HttpError(settled.failure)
        assert settled.spec is not None
        return {"name": settled.spec.name, "version": settled.spec.version}

    async def invoke(self, caller: Caller, act: a.Invoke, body: Body) -> bytes:
        """One request; cancelled, it is left. Raises HttpError. The body is its own."""
        try:
            access.permit(caller, act)
            picture = self._router.policy.picture
            if act.name not in picture.functions:
                raise HttpError(queueing.absent(picture, act.name))
        except HttpError:
            body.close()
            raise
        request, future = self._router.submit(act.name, checked(body))
        try:
            outcome, data = await future
        finally:
            self._router.leave(request)  # nothing, if it was answered
        if not isinstance(outcome, e.Answer):
            assert isinstance(outcome, e.Fail)
            raise HttpError(outcome.failure)
        return data

    async def logs(self, caller: Caller, act: a.Logs) -> AsyncGenerator[bytes, None]:
        """The log in pieces; without end if ``follow``. Raises HttpError."""
        access.permit(caller, act)
        picture = self._router.policy.picture
        known = act.name in picture.functions or act.name in picture.changes
        if not known and not (_NAME.fullmatch(act.name) and self._router.state.function_log(act.name).exists()):
            raise HttpError(queueing.absent(picture, act.name))
        log = self._router.function_log(act.name)
        if not act.follow:
            yield log.tail(act.lines)
            return
        news = log.follow()
        try:
            yield log.tail(act.lines)
            while True:
                yield await news.get()
        finally:
            log.unfollow(news)

    def _functions(self) -> list[dict[str, Any]]:
        picture = self._router.policy.picture
        rows = []
        for name, function in sorted(picture.functions.items()):
            instance = picture.instances.get(function.instance or "")
            change = picture.changes.get(name)
            state = (
                instance.state.value
                if instance is not None
                else "failed"
                if function.failure is not None
                else "waiting"
            )
            spec = function.spec
            rows.append(
                {
                    "name": name,
                    "version": spec.version,
                    "tenant": spec.tenant,
                    "deadline_ms": spec.deadline_ms,
                    "percentile": spec.percentile,
                    "timeout_ms": spec.timeout_ms,
                    "idempotent": spec.idempotent,
                    "path": spec.path,
                    "state": state,
                    "error": function.failure.text if function.failure is not None else function.not_deployed or None,
                    "deploying": change is not None and change.spec is not None,
                    "instance": function.instance,
                    "instances": {each: picture.instances[each].state.value for each in function.instances},
                    "stateless": spec.stateless,
                    "max_instances": limit(picture, function),
                    "writes": function.writes,
                    "queued": len(function.queue),
                    "running": sum(picture.instances[each].state is State.BUSY for each in function.instances),
                    **self._router.stats.get(name, FunctionStats()).summary(),
                }
            )
        return rows

    async def _status(self) -> dict[str, Any]:
        """The router's picture and the controller's in one: functions by name, GPUs, the store."""
        router = self._router
        host, port = router.http.address
        controller = await router.controller_status()
        counted = controller.get("functions", {})
        return {
            "node": {
                "name": router.config.node.name,
                "address": f"http://{host}:{port}",
                "host": host,
                "port": port,
                "run": str(router.paths.run),
                "state": str(router.state.state),
                "confinement": router.confinement,
                "peers": router.peers,
                "instances": len(router.policy.picture.instances),
                "requests_open": len(router.policy.picture.requests),
                "missing": router.policy.missing(),
            },
            "functions": {row["name"]: counted.get(row["name"], {}) | row for row in self._functions()},
            "gpus": controller.get("gpus", {}),
            "store": controller.get("store", {}),
            "waiting": controller.get("waiting", 0),
            "waits": controller.get("waits", {"oldest": [], "others": {}}),
        }
