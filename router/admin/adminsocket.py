"""The transport of administration over ``RUN/admin``: a Unix socket that anyone may reach and few may use.

The kernel identifies the caller of a connection; nothing that it sends is read before it is judged. One act per
connection, one packet of it at a time, so a caller holds no more of the node than one packet's descriptors.
"""

import asyncio
import fcntl
import os
import stat
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import aclosing, nullcontext, suppress
from typing import Any, Final, Protocol

import orjson

from dormouse.core.audit import Audit
from dormouse.core.links.fds import Listener, PacketSocket, close_all
from dormouse.core.logrecords import unmarked
from dormouse.router.access import users
from dormouse.router.access.access import Caller
from dormouse.router.admin.admin import Admin
from dormouse.router.front.bodies import Bodies, Body
from dormouse.router.front.exchange import HttpError, receiving, refuse, too_large
from dormouse.router.front.requests import Requests
from dormouse.schemas import admin as a
from dormouse.schemas.errors import PeerLost, RemoteProtocolError
from dormouse.schemas.messages import Failure

Connection = PacketSocket[a.ToNode, a.FromNode]

MAX_CONNECTIONS: Final = 64
"""At once: people and their scripts, some of which follow logs."""

OWN_CONNECTIONS: Final = 4
"""That each user who may administrate can have whatever the others hold; then there are more."""

SILENT_S: Final = 60.0
"""After which a caller that sends nothing, or reads nothing, is dropped."""

READ_NBYTES: Final = 1 << 20
"""Of a body at once."""

REASON_NBYTES: Final = 40 << 10
"""Of a refusal's text, which must fit one packet: the end of a traceback is what matters."""


class Node(Protocol):
    """The part of the router that this module uses."""

    log: Any
    requests: Requests

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class AdminSocket:
    """The listener and its conversations. ``admins``: the users that `[node] admins` names."""

    def __init__(self, node: Node, admin: Admin, audit: Audit, admins: Iterable[str]) -> None:
        self._node = node
        self._admin = admin
        self._audit = audit
        self._listener: Listener[a.ToNode, a.FromNode] | None = None
        self._open: dict[Connection, int] = {}  # with whose they are
        self._uids = users.admin_uids(os.getuid(), admins)

    def open(self, path: str) -> None:
        # All may connect: else a stranger would be told that there is no node.
        self._listener = Listener(path, a.ToNode, self._connected, mode=0o666)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for connection in self._open:
            connection.close()

    def _connected(self, connection: Connection) -> None:
        connection.sock.setblocking(False)
        caller = users.caller_of(connection.peer[1])
        if caller.uid not in self._uids:
            self._audit.write(caller.name, "unix", "connect", "", "forbidden", uid=caller.uid)
            _dismiss(connection, users.stranger(caller))
        elif len(self._open) >= MAX_CONNECTIONS and (own := self._own(caller)) >= OWN_CONNECTIONS:
            text = (
                f"{len(self._open)} commands are at work on this node, {own} of them user {caller.name!r}'s; end some "
                "(those that follow logs, or wait), or try again later"
            )
            _dismiss(connection, refuse(429, "queue_full", text).failure)
        else:
            self._open[connection] = connection.peer[1]
            self._node.spawn(self._converse(connection, caller))

    def _own(self, caller: Caller) -> int:
        return sum(uid == caller.uid for uid in self._open.values())

    async def _converse(self, connection: Connection, caller: Caller) -> None:
        try:
            await _say(connection, a.Welcome(protocol=a.PROTOCOL))
            async with asyncio.timeout(SILENT_S):
                packet = await _hear(connection)
            if packet is not None:
                await self._act(connection, caller, *packet)
                await _say(connection, a.Done())
        except HttpError as error:
            _dismiss(connection, error.failure)
        except (PeerLost, RemoteProtocolError, TimeoutError):
            pass
        except Exception:
            self._node.log.exception("admin_failed", caller=caller.name)
            _dismiss(connection, refuse(500, "internal", "the node made a mistake; see its router's log").failure)
        finally:
            self._open.pop(connection, None)
            connection.close()

    async def _act(self, connection: Connection, caller: Caller, act: a.ToNode, fds: list[int]) -> None:
        if fds and not isinstance(act, a.Invoke):
            close_all(fds)
            raise _out_of_place()
        match act:
            case a.Deploy():
                await self._deploy(connection, caller, act)
            case a.Invoke():
                try:
                    body = await _body(fds, self._node.requests.body_nbytes, self._node.requests.bodies)
                finally:
                    close_all(fds)
                await self._tell(connection, self._admin.invoking.invoke(caller, act, body))
            case a.JobResult():
                await self._tell(connection, self._admin.invoking.result(caller, act))
            case a.AskJob() | a.Drain() | a.DrainGpu():
                answer = await self._until_gone(connection, self._admin.call(caller, act))
                await _answer(connection, orjson.dumps(answer))
            case a.Logs():
                pieces = self._admin.logs.pieces(caller, act)
                await self._tell(connection, (a.Said(data=piece) async for piece in pieces))
            case a.Files() | a.Finish():
                raise _out_of_place()
            case _:
                await _answer(connection, orjson.dumps(await self._admin.call(caller, act)))

    async def _deploy(self, connection: Connection, caller: Caller, act: a.Deploy) -> None:
        async with self._admin.deploys.deploying(caller, act) as deploying:
            await _say(connection, a.Taken())
            while True:
                async with asyncio.timeout(SILENT_S):
                    packet = await _hear(connection)
                if packet is None:
                    raise PeerLost("the caller left before it had said everything")
                message, fds = packet
                try:
                    if isinstance(message, a.Finish) and not fds:
                        break
                    if not isinstance(message, a.Files):
                        raise _out_of_place()
                    await deploying.take(message.names, fds)
                finally:
                    close_all(fds)
                await _say(connection, a.Taken())
            shows = self._admin.logs.printed(act.name, deploying.upload.tenant) if act.logs else nullcontext()
            with shows as printed:
                finishing = asyncio.ensure_future(deploying.finish())
                try:
                    if printed is not None:
                        await _show(connection, printed, finishing)
                finally:
                    answer = await finishing  # a departed caller has asked for it all the same
            await _answer(connection, orjson.dumps(answer))

    async def _tell(self, connection: Connection, pieces: AsyncGenerator[a.Said, None]) -> None:
        """All of them, until the caller leaves."""

        async def tell() -> None:
            async with aclosing(pieces):
                async for piece in pieces:
                    await _answer(connection, piece.data, piece.kind)

        await self._until_gone(connection, tell())

    async def _until_gone(self, connection: Connection, work: Any) -> Any:
        """``work``, ended when the caller leaves, or sends anything more. Raises PeerLost."""
        doing, left = asyncio.ensure_future(work), asyncio.ensure_future(_hear(connection))
        try:
            await asyncio.wait((doing, left), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise PeerLost("the caller left")
            return doing.result()
        finally:
            for task in (doing, left):
                task.cancel()
            await asyncio.wait((doing, left))
            if not doing.cancelled():
                doing.exception()  # nobody remains to receive it
            with suppress(asyncio.CancelledError, PeerLost, RemoteProtocolError):
                close_all(packet[1] if (packet := left.result()) is not None else [])


async def _show(connection: Connection, printed: asyncio.Queue[bytes], finishing: asyncio.Future[Any]) -> None:
    """Send what is printed until ``finishing`` is done. Callers that do not read are not waited for."""
    while not (finishing.done() and printed.empty()):
        news = asyncio.ensure_future(printed.get())
        await asyncio.wait((news, finishing), return_when=asyncio.FIRST_COMPLETED)
        if news.done():
            await _answer(connection, unmarked(news.result()), a.LOG)
        else:
            news.cancel()


def _out_of_place() -> HttpError:
    return refuse(400, "bad_request", "the caller said what has no place here; use the `dormouse` command")


async def _body(fds: list[int], limit_nbytes: int, bodies: Bodies) -> Body:
    """All of one regular file. Raises HttpError."""
    if len(fds) != 1 or not stat.S_ISREG(os.fstat(fds[0]).st_mode) or not _readable(fds[0]):
        raise refuse(400, "bad_request", "a body is said by one descriptor, of a regular file, open for reading")
    nbytes = os.fstat(fds[0]).st_size
    if nbytes > limit_nbytes:
        raise too_large(limit_nbytes)
    with receiving(bodies) as body:
        while body.nbytes < nbytes:
            piece = await asyncio.to_thread(os.pread, fds[0], min(READ_NBYTES, nbytes - body.nbytes), body.nbytes)
            if not piece:
                raise refuse(400, "bad_request", "the body's file became shorter while it was read")
            await body.add(piece, nbytes)
        return body.complete()


def _readable(fd: int) -> bool:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    return not flags & os.O_PATH and flags & os.O_ACCMODE != os.O_WRONLY


async def _hear(connection: Connection) -> tuple[a.ToNode, list[int]] | None:
    """The next packet, or None at the end. Raises PeerLost, RemoteProtocolError."""
    while True:
        try:
            return connection.recv()
        except BlockingIOError:
            loop = asyncio.get_running_loop()
            await _ready(connection, loop.add_reader, loop.remove_reader)


async def _say(connection: Connection, message: a.FromNode) -> None:
    """Raises PeerLost, TimeoutError."""
    while True:
        try:
            return connection.send(message)
        except BlockingIOError:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(SILENT_S):
                await _ready(connection, loop.add_writer, loop.remove_writer)


async def _ready(connection: Connection, add: Any, remove: Any) -> None:
    ready = asyncio.Event()
    add(connection.sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        remove(connection.sock.fileno())


async def _answer(connection: Connection, data: bytes, kind: str = "") -> None:
    for start in range(0, len(data) or bool(kind), a.PIECE_NBYTES):  # also that a streamed one is empty
        await _say(connection, a.Said(data=data[start : start + a.PIECE_NBYTES], kind=kind))


def _dismiss(connection: Connection, failure: Failure) -> None:
    """Send the last message and close. A caller that has not read the earlier ones does not get it."""
    text = (failure.whole or failure.text).encode()[-REASON_NBYTES:].decode(errors="replace")
    with suppress(PeerLost, BlockingIOError):
        own = failure.own
        connection.send(a.Refused(status=failure.status, code=own or failure.code, text=text, of_function=bool(own)))
    connection.close()
