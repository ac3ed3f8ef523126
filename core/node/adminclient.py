"""The command line's way to a node: packets over its admin socket (schemas/admin.py), files as descriptors.

Importing this is cheap on purpose: every `dormouse` command pays for it.
"""

import json
import os
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dormouse.core import folder
from dormouse.core.folder import FunctionFolder

if TYPE_CHECKING:
    from dormouse.core.links.fds import PacketSocket
    from dormouse.schemas import admin as a

CONNECT_S: Final = 5.0
CALL_S: Final = 60.0
PATIENCE_S: Final = 20.0
"""For a node that starts, or whose router is being replaced, as clients over TCP wait; people's commands have it."""

_POLL_S: Final = 0.1


class Unreachable(Exception):
    """No node answers there."""


class CallRefused(Exception):
    """The node answered with an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class AdminClient:
    """Calls to one node. ``run`` is its run directory; ``patience_s`` how long to wait for a living one to listen."""

    def __init__(self, run: Path, patience_s: float = 0.0) -> None:
        self.run = run
        self._patience_s = patience_s
        self._path = str(run / "admin")

    def functions(self) -> list[dict[str, Any]]:
        from dormouse.schemas import admin as a

        rows: list[dict[str, Any]] = json.loads(self._call(a.Functions()))["functions"]
        return rows

    def status(self) -> dict[str, Any]:
        from dormouse.schemas import admin as a

        value: dict[str, Any] = json.loads(self._call(a.Status()))
        return value

    def policy(self, changes: dict[str, str | int | float | bool]) -> dict[str, Any]:
        """The scheduler's settings, changed so."""
        from dormouse.schemas import admin as a

        value: dict[str, Any] = json.loads(self._call(a.Policy(changes=changes)))
        return value

    def restart(self, name: str) -> None:
        """New instances of it."""
        from dormouse.schemas import admin as a

        self._call(a.Restart(name=name))

    def remove(self, name: str) -> None:
        from dormouse.schemas import admin as a

        self._call(a.Remove(name=name))

    def list_keys(self) -> list[dict[str, Any]]:
        from dormouse.schemas import admin as a

        rows: list[dict[str, Any]] = json.loads(self._call(a.Keys()))
        return rows

    def create_key(self, wish: "a.Wish") -> dict[str, Any]:
        """The key is in what comes back, and can be had this once."""
        from dormouse.schemas import admin as a

        made: dict[str, Any] = json.loads(self._call(a.CreateKey(wish=wish)))
        return made

    def revoke_key(self, name: str) -> dict[str, Any]:
        from dormouse.schemas import admin as a

        revoked: dict[str, Any] = json.loads(self._call(a.RevokeKey(id=name)))
        return revoked

    def invoke(self, name: str, body: bytes) -> bytes:
        from dormouse.schemas import admin as a

        fd = os.memfd_create("body", os.MFD_CLOEXEC)
        with open(fd, "wb") as file:
            file.write(body)
            file.flush()
            return self._call(a.Invoke(name=name), None, [fd])

    def logs(self, name: str, lines: int, follow: bool) -> Generator[bytes, None, None]:
        """The log in pieces; without end if ``follow``."""
        from dormouse.schemas import admin as a

        with self._conversation(None if follow else CALL_S) as conversation:
            yield from conversation.ask(a.Logs(name=name, lines=lines, follow=follow))

    def deploy(self, name: str, found: FunctionFolder, settings: dict[str, Any]) -> dict[str, Any]:
        """Waits until it has loaded. Raises folder.NoFunction, OSError too."""
        from dormouse.schemas import admin as a

        with self._conversation(None) as conversation:
            conversation.say(a.Deploy(name=name, entry=found.entry, settings=a.Settings(**settings)))
            travelling = folder.files(found)
            while batch := list(islice(travelling, a.MAX_FILES)):
                try:
                    conversation.say(a.Files(names=[each for each, _ in batch]), [fd for _, fd in batch])
                finally:
                    for _, fd in batch:
                        os.close(fd)
            answer: dict[str, Any] = json.loads(b"".join(conversation.ask(a.Finish())))
            return answer

    def _call(self, act: "a.Act", timeout_s: float | None = CALL_S, fds: list[int] | None = None) -> bytes:
        with self._conversation(timeout_s) as conversation:
            return b"".join(conversation.ask(act, fds))

    @contextmanager
    def _conversation(self, timeout_s: float | None) -> "Iterator[_Conversation]":
        """Raises Refused and Unreachable, also when its body does."""
        from dormouse.schemas import admin as a
        from dormouse.schemas.errors import PeerLost, RemoteProtocolError

        try:
            sock = self._connected()
            try:
                conversation = _Conversation(sock)
                welcome = conversation.hear()
                if not isinstance(welcome, a.Welcome) or welcome.protocol != a.PROTOCOL:
                    raise RemoteProtocolError("it is of another version; use its own command, or restart it")
                sock.sock.settimeout(timeout_s)
                yield conversation
            finally:
                sock.close()
        except PeerLost as error:
            if (pid := self._pid()) is not None:
                text = f"the node in {self.run} runs (pid {pid}) but is not ready ({error}); try again in a moment"
                raise Unreachable(text) from error
            raise self._unreachable(error) from error
        except RemoteProtocolError as error:
            raise self._unreachable(error) from error

    def _connected(self) -> "PacketSocket[a.FromNode, a.ToNode]":
        """Raises PeerLost."""
        from dormouse.core.links.fds import PacketSocket
        from dormouse.schemas import admin as a
        from dormouse.schemas.errors import PeerLost

        end_s = time.monotonic() + self._patience_s
        while True:
            try:
                return PacketSocket.connect(self._path, a.FromNode, CONNECT_S)
            except PeerLost:
                if time.monotonic() >= end_s or self._pid() is None:
                    raise
                time.sleep(_POLL_S)

    def _pid(self) -> int | None:
        from dormouse.core.node import nodeprocess

        return nodeprocess.running_pid(self.run)

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"no node answers in {self.run} ({error}); start one with `dormouse up`, or name another with --run"
        )


class _Conversation:
    """What is said and heard on one connection. Raises Refused, PeerLost, RemoteProtocolError."""

    def __init__(self, sock: "PacketSocket[a.FromNode, a.ToNode]") -> None:
        self._sock = sock

    def hear(self) -> "a.FromNode":
        from dormouse.schemas import admin as a
        from dormouse.schemas.errors import PeerLost

        packet = self._sock.recv()
        if packet is None:
            raise PeerLost("it hung up")
        if isinstance(packet[0], a.Refused):
            raise CallRefused(packet[0].status, packet[0].code, packet[0].text)
        return packet[0]

    def say(self, message: "a.ToNode", fds: list[int] | None = None) -> None:
        """Until the node has taken it."""
        from dormouse.schemas import admin as a
        from dormouse.schemas.errors import RemoteProtocolError

        self._sock.send(message, fds)
        if not isinstance(self.hear(), a.Taken):
            raise RemoteProtocolError("it said something else than that it has taken the files")

    def ask(self, message: "a.ToNode", fds: list[int] | None = None) -> Iterator[bytes]:
        """The answer's pieces."""
        from dormouse.schemas import admin as a
        from dormouse.schemas.errors import RemoteProtocolError

        self._sock.send(message, fds)
        while not isinstance(said := self.hear(), a.Done):
            if not isinstance(said, a.Said):
                raise RemoteProtocolError("it said something else than an answer")
            yield said.data
