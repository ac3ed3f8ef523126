"""Control routes: deploy, list, remove, logs, status. Over TCP only from this machine, and never from a web page.

They are for people and for core/cli.py; nothing here is on a request's path.
"""

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

import msgspec

from dormouse.core.config import parse_duration_ms, parse_nbytes
from dormouse.router import queueing
from dormouse.router.http import Exchange, HttpError, refuse
from dormouse.router.replicas import limit
from dormouse.router.state import State
from dormouse.router.stats import FunctionStats
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import FunctionSpec

if TYPE_CHECKING:
    from dormouse.router.main import Router

SOURCE_NBYTES: Final = 4 << 20
"""Largest function file; it travels in one message and lives in the catalogue."""

MOST: Final = 1_000_000
"""Requests that wait for a function, or its instances: beyond any machine, and well within a message's integers."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_FUNCTION: Final = re.compile(r"/admin/functions/([^/]+)")
_LOGS: Final = re.compile(r"/admin/functions/([^/]+)/logs")


class DeployBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``POST /admin/functions`` takes; durations as ``"80ms"`` or a number of milliseconds."""

    name: str
    source: str
    path: str = ""
    deadline: str | int = 1000
    percentile: float = 98.0
    tenant: str = "default"
    timeout: str | int = 60_000
    load_timeout: str | int = 300_000
    idempotent: bool = False
    max_queue: int = 256
    quota: str | int = 1 << 30
    stateless: bool = False
    max_instances: int = 0

    def spec(self) -> FunctionSpec:
        """Raises ConfigError naming what is wrong."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} cannot be a function's name; use up to 63 letters, digits, '.', '_', '-', not '.' first"
            )
        if not _NAME.fullmatch(self.tenant):
            raise ConfigError(
                f"{self.tenant!r} cannot be a tenant's name; use 1 to 63 letters, digits, '.', '_' and '-'"
            )
        if not 1 <= self.percentile <= 100:  # 0.98 is a slip
            raise ConfigError(f"percentile is {self.percentile:g}; write per cent, a number from 1 to 100, such as 98")
        if not 1 <= self.max_queue <= MOST:
            raise ConfigError(f"max_queue is {self.max_queue}; write a number from 1 to {MOST:,}")
        if not 0 <= self.max_instances <= MOST:
            raise ConfigError(
                f"max_instances is {self.max_instances}; write a number from 1 to {MOST:,}, or 0 for one per GPU"
            )
        if self.max_instances > 1 and not self.stateless:
            raise ConfigError(
                f"max_instances is {self.max_instances}, but only a stateless function can have more than one: deploy "
                "it with stateless (--stateless) if no request changes what later ones see"
            )
        return FunctionSpec(
            name=self.name,
            version=0,
            path=self.path or f"{self.name}.py",
            source=self.source,
            tenant=self.tenant,
            deadline_ms=parse_duration_ms(self.deadline),
            percentile=self.percentile,
            timeout_ms=parse_duration_ms(self.timeout),
            load_timeout_ms=parse_duration_ms(self.load_timeout),
            idempotent=self.idempotent,
            max_queue=self.max_queue,
            quota_nbytes=parse_nbytes(self.quota),
            stateless=self.stateless,
            max_instances=self.max_instances,
        )


class Admin:
    """The routes below /admin."""

    def __init__(self, router: "Router") -> None:
        self._router = router

    async def route(self, x: Exchange) -> None:
        client = x.scope.get("client")
        if client is not None and client[0] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
            raise refuse(
                403, "forbidden", "/admin is for this machine only; use the `dormouse` command on the node", close=True
            )
        if client is not None and x.header(b"origin") is not None:
            raise refuse(
                403, "forbidden", "/admin is not for web pages; use the `dormouse` command on the node", close=True
            )
        if x.path == "/admin/functions" and x.method == "POST":
            await self._deploy(x)
        elif x.path == "/admin/functions" and x.method == "GET":
            await x.answer_json(200, {"functions": self._functions()})
        elif (match := _FUNCTION.fullmatch(x.path)) is not None and x.method == "DELETE":
            settled = await self._router.remove(match[1])
            if settled.failure is not None:
                raise HttpError(settled.failure)
            await x.answer_json(200, {"removed": match[1]})
        elif (match := _LOGS.fullmatch(x.path)) is not None and x.method == "GET":
            await self._logs(x, match[1])
        elif x.path == "/admin/status" and x.method == "GET":
            await x.answer_json(200, await self._status())
        else:
            raise refuse(404, "unknown_route", f"there is no {x.method} {x.path}", close=True)

    async def _deploy(self, x: Exchange) -> None:
        body = await x.read(SOURCE_NBYTES, self._router.bodies)
        try:
            spec = msgspec.json.decode(body, type=DeployBody).spec()
        except (msgspec.DecodeError, ConfigError) as error:
            raise refuse(400, "bad_request", str(error)) from None
        settled = await self._router.deploy(spec)
        if settled.failure is not None:
            raise HttpError(settled.failure)
        assert settled.spec is not None
        await x.answer_json(200, {"name": settled.spec.name, "version": settled.spec.version})

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
                    "error": function.failure.text if function.failure is not None else None,
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

    async def _logs(self, x: Exchange, name: str) -> None:
        known = name in self._router.policy.picture.functions or name in self._router.policy.picture.changes
        if not known and not (_NAME.fullmatch(name) and self._router.state.function_log(name).exists()):
            raise HttpError(queueing.absent(self._router.policy.picture, name))
        query = parse_qs(x.scope.get("query_string", b"").decode("latin-1"))
        tail = query.get("tail", ["200"])[0]
        if not tail.isdigit():
            raise refuse(400, "bad_request", f"tail is {tail!r}; write a number of lines")
        log = self._router.function_log(name)
        if query.get("follow", ["0"])[0] != "1":
            await x.answer(200, log.tail(int(tail)), kind=b"text/plain; charset=utf-8")
            return
        news = log.follow()
        gone = asyncio.ensure_future(x.gone())
        try:
            await x.begin(200, [], b"text/plain; charset=utf-8")
            await x.chunk(log.tail(int(tail)))
            while not gone.done():
                item = asyncio.ensure_future(news.get())
                await asyncio.wait((item, gone), return_when=asyncio.FIRST_COMPLETED)
                if not item.done():
                    item.cancel()
                    break
                await x.chunk(item.result())
        finally:
            gone.cancel()
            log.unfollow(news)
