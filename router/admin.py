"""Administration: deploy, list, remove, logs, status. What is done, whoever asks and over whichever transport.

:meth:`Admin.call`, :meth:`Admin.deploying`, :meth:`Admin.invoke` and :meth:`Admin.logs` are the only ways in; each
asks router/access.py and router/tenancy.py first, and changes leave a line in the audit log. Nothing here is on a
request's path. router/adminsocket.py and router/adminhttp.py are the transports.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, assert_never

from msgspec import structs

from dormouse.core.config import parse_duration_ms, parse_nbytes
from dormouse.core.keys import shown
from dormouse.router import access, archive, failures, queueing, tenancy
from dormouse.router import events as e
from dormouse.router.access import Caller
from dormouse.router.bodies import Body
from dormouse.router.http import HttpError, checked, refuse
from dormouse.router.replicas import limit
from dormouse.router.snapshots import Upload, disk_full
from dormouse.router.state import State
from dormouse.router.stats import FunctionStats
from dormouse.schemas import admin as a
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import FunctionSpec

if TYPE_CHECKING:
    from dormouse.router.main import Router

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
        entry=act.entry,
        snapshot="",
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


Called = a.Remove | a.Restart | a.Functions | a.Status | a.Keys | a.CreateKey | a.RevokeKey


class _Audited:
    """What is known of an act when its line is written."""

    def __init__(self, name: str) -> None:
        self.name = name

    def more(self, caller: Caller) -> dict[str, Any]:
        return {"uid": caller.uid} if caller.uid is not None else {"tenant": caller.tenant}


@contextmanager
def _told() -> Iterator[None]:
    """What goes wrong with the file of keys, as an answer."""
    try:
        yield
    except ConfigError as error:
        raise refuse(400, "bad_request", str(error)) from None
    except OSError as error:
        text = f"the file of keys cannot be written: {error.strerror}; nothing was changed; free space on its disk"
        raise refuse(507, "not_kept", text) from None


class Deploying:
    """A deploy whose files are coming in. ``may`` raises HttpError if it may not be any more.

    ``handed``: what becomes of the snapshot is not for us to say; if the node ends now, its catalogue will.
    """

    def __init__(self, router: "Router", spec: FunctionSpec, upload: Upload, may: Callable[[], None]) -> None:
        self.upload = upload
        self.handed = False
        self._router = router
        self._spec = spec
        self._may = may

    async def take(self, names: list[str], fds: list[int]) -> None:
        """Some files. Raises HttpError."""
        await self._router.keeping(self.upload.take, names, fds)

    @asynccontextmanager
    async def spool(self, nbytes: int) -> AsyncGenerator["Spool", None]:
        """Where an archive of so many bytes waits until it is whole. Raises HttpError."""
        snapshots = self._router.snapshots
        if nbytes > snapshots.most_nbytes:
            raise refuse(413, "folder_too_large", f"an archive of {nbytes:,} bytes (limits.folder); send less")
        snapshots.refuse_if_full(2 * nbytes)  # and once more as a snapshot
        half = snapshots.half()
        file = await self._router.keeping(open, half, "wb")
        try:
            yield Spool(self._router, self.upload, half, file)
        finally:
            file.close()
            half.unlink(missing_ok=True)

    async def finish(self) -> Any:
        """All files are here: load it. Raises HttpError."""
        await self._router.keeping(self.upload.finish, self._spec.entry)
        self._may()  # while they came, the name may have been taken
        self.handed = True
        settled = await self._router.deploy(structs.replace(self._spec, snapshot=self.upload.snapshot))
        if settled.failure is not None:
            self.handed = False
            raise HttpError(settled.failure)
        assert settled.spec is not None
        return {"name": settled.spec.name, "version": settled.spec.version}


class Spool:
    """An archive that is coming in."""

    def __init__(self, router: "Router", upload: Upload, path: Path, file: BinaryIO) -> None:
        self._router = router
        self._upload = upload
        self._path = path
        self._file = file

    async def write(self, data: bytes) -> None:
        try:
            await self._router.keeping(self._file.write, data)
        except OSError as error:
            raise disk_full() from error

    async def unpack(self) -> None:
        """It is whole. Raises HttpError."""
        try:
            await self._router.keeping(self._file.flush)
        except OSError as error:
            raise disk_full() from error
        most_members = 2 * self._router.snapshots.most_files
        await self._router.keeping(archive.unpack, self._path, self._upload, most_members)


class Admin:
    """The acts."""

    def __init__(self, router: "Router") -> None:
        self._router = router

    async def call(self, caller: Caller, act: Called) -> Any:
        """Do it; the answer is what JSON can say. Raises HttpError."""
        match act:
            case a.Remove(name=name):
                with self._audited(caller, act, name):
                    await self._permit_informed(caller, act)
                    self._must_see(caller, name)
                    settled = await self._router.remove(name)
                    if settled.failure is not None:
                        raise HttpError(settled.failure)
                return {"removed": name}
            case a.Restart(name=name):
                with self._audited(caller, act, name):
                    await self._permit_informed(caller, act)
                    self._must_see(caller, name)
                    settled = await self._router.restart(name)
                    if settled.failure is not None:
                        raise HttpError(settled.failure)
                return {"restarted": name}
            case a.Functions():
                await self._permit_informed(caller, act)
                rows = self._functions()
                return {"functions": [row for row in rows if caller.sees(row["name"], row["tenant"])]}
            case a.Status():
                self._permit(caller, act)
                return tenancy.part_of(caller, await self._status())
            case a.Keys():
                self._permit(caller, act)
                return [shown(key) for key in self._router.keys.all()]
            case a.CreateKey(wish=wish):
                with self._audited(caller, act, wish.note) as audited:
                    self._permit(caller, act)
                    with _told():  # on the disk before it is shown: a few milliseconds, in which nothing else is done
                        key, token = self._router.keys.create(wish, caller.name, time.time())
                    audited.name = key.id
                return {"key": token, **shown(key)}
            case a.RevokeKey(id=name):
                with self._audited(caller, act, name):
                    self._permit(caller, act)
                    with _told():
                        revoked = self._router.keys.revoke(name, time.time())
                    if revoked is None:
                        raise refuse(404, "unknown_key", f"there is no key {name!r}; `dormouse keys ls` shows them")
                return shown(revoked)
            case _:
                assert_never(act)

    def _permit(self, caller: Caller, act: a.Act) -> None:
        if (refusal := access.permit(caller, act)) is not None:
            raise refuse(refusal.status, refusal.code, refusal.text)

    async def _permit_informed(self, caller: Caller, act: a.Act) -> None:
        """For acts whose answer the catalogue decides. Raises HttpError."""
        self._permit(caller, act)
        if not await self._router.knows_catalogue():  # what lies there may be a function's, or nobody's
            raise HttpError(failures.starting())

    def _must_see(self, caller: Caller, name: str) -> None:
        """Of what it may not know of, a caller is told what it would be told if there were no such thing."""
        if not tenancy.sees(caller, self._router.policy.picture, name):
            raise HttpError(queueing.absent(self._router.policy.picture, name))

    @contextmanager
    def _audited(self, caller: Caller, act: a.Act, name: str) -> Iterator["_Audited"]:
        """Writes the act's line when it has ended, however."""
        audited = _Audited(name)
        outcome = "unknown"  # the node was stopped meanwhile
        try:
            yield audited
            outcome = "ok"
        except HttpError as error:
            outcome = error.failure.code
            raise
        finally:
            word = access.OF_SOCKET[type(act)].value
            self._router.audit.write(caller.name, caller.origin, word, audited.name, outcome, **audited.more(caller))
            if (trouble := self._router.audit.trouble) is not None:
                self._router.log.error("audit_log_lost_a_line", trouble=trouble)

    @asynccontextmanager
    async def deploying(self, caller: Caller, act: a.Deploy) -> AsyncGenerator[Deploying, None]:
        """A deploy that may be, for its files. Given up, it leaves nothing. Raises HttpError."""
        with self._audited(caller, act, act.name):
            spec = await self._spec(caller, act)
            begun = await self._router.keeping(self._router.snapshots.begin, act.name)
            deploying = Deploying(self._router, spec, begun, lambda: self._may_deploy(caller, spec))
            try:
                yield deploying
            finally:
                if not deploying.handed:
                    await asyncio.shield(self._router.keeping(begun.give_up))

    async def _spec(self, caller: Caller, act: a.Deploy) -> FunctionSpec:
        """Before its files are sent: whether it may be, and what it will be. Raises HttpError."""
        await self._permit_informed(caller, act)
        try:
            spec = spec_of(act)
        except ConfigError as error:
            raise refuse(400, "bad_request", str(error)) from None
        if caller.tenant is not None and spec.tenant == a.Settings().tenant:  # it was not said
            spec = structs.replace(spec, tenant=caller.tenant)
        self._may_deploy(caller, spec)
        return spec

    def _may_deploy(self, caller: Caller, spec: FunctionSpec) -> None:
        if (failure := tenancy.deploy_refusal(caller, self._router.policy.picture, spec)) is not None:
            raise HttpError(failure)

    async def invoke(self, caller: Caller, act: a.Invoke, body: Body) -> bytes:
        """One request; cancelled, it is left. Raises HttpError. The body is its own."""
        try:
            await self._permit_informed(caller, act)
            picture = self._router.policy.picture
            if not tenancy.serves(caller, picture, act.name):
                raise HttpError(queueing.absent(picture, act.name))
        except BaseException:  # cancelled, too: the caller has left
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
        self._permit(caller, act)
        picture = self._router.policy.picture
        known = tenancy.sees(caller, picture, act.name)
        left = tenancy.sees_all(caller)  # of a function that was removed, or of none: nobody can say whose it is
        if not known and not (
            left and _NAME.fullmatch(act.name) and self._router.state.function_log(act.name).exists()
        ):
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
            state = (
                instance.state.value
                if instance is not None
                else "quarantined"
                if function.quarantine
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
                    "file": spec.entry,
                    "state": state,
                    "error": function.failure.text if function.failure is not None else function.not_deployed or None,
                    "deploying": picture.deploy(name) is not None,
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
        router, picture = self._router, self._router.policy.picture
        host, port = router.http.address
        controller = await router.controller_status()
        counted = controller.get("functions", {})
        return {
            "node": {
                "name": router.config.node.name,
                "address": f"{'https' if router.config.node.tls_cert else 'http'}://{host}:{port}",
                "host": host,
                "port": port,
                "run": str(router.paths.run),
                "state": str(router.state.state),
                "confinement": router.confinement,
                "peers": router.peers,
                "down": router.down,
                "instances": len(picture.instances) + len(picture.sessions),
                "requests_open": len(picture.requests),
                "missing": router.policy.missing(),
            },
            "functions": {row["name"]: counted.get(row["name"], {}) | row for row in self._functions()},
            "gpus": controller.get("gpus", {}),
            "store": controller.get("store", {}),
            "waiting": controller.get("waiting", 0),
            "waits": controller.get("waits", {"oldest": [], "others": {}}),
        }
