"""The command line's connection to a node: packets over its admin socket (schemas/admin.py), files as descriptors."""

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from dormouse.core import folder
from dormouse.core.folder import FunctionFolder
from dormouse.core.links.fds import MAX_PACKET_NBYTES, PacketSocket
from dormouse.core.node import nodeprocess
from dormouse.core.node.refusals import CallRefused, Unreachable
from dormouse.core.secretfile import MAX_NBYTES
from dormouse.schemas import admin as a
from dormouse.schemas.errors import LocalProtocolError, PeerLost, RemoteProtocolError

CONNECT_S: Final = 5.0
CALL_S: Final = 60.0
PATIENCE_S: Final = 20.0
"""For a node that starts, or whose router is being replaced, as clients over TCP wait; people's commands have it."""

_POLL_S: Final = 0.1

T = TypeVar("T")


class AdminClient:
    """Calls to one node. ``run`` is its run directory; ``patience_s`` how long to wait for a living one to listen,
    ``call_s`` for the answer to what takes no time.
    """

    def __init__(self, run: Path, patience_s: float = 0.0, call_s: float = CALL_S) -> None:
        self.run = run
        self._patience_s, self._call_s = patience_s, call_s
        self._path = str(run / "admin")

    def functions(self) -> list[dict[str, Any]]:
        return self.listed()["functions"]

    def listed(self) -> dict[str, list[dict[str, Any]]]:
        """The functions, and the loads in progress."""
        return self._asked(a.Functions(), dict[str, list[dict[str, Any]]])

    def status(self) -> dict[str, Any]:
        return self._asked(a.Status(), dict[str, Any])

    def usage(self, since_s: float, name: str) -> dict[str, Any]:
        """The use of functions since then, in seconds of the Unix clock."""
        return self._asked(a.Usage(since_s=since_s, name=name), dict[str, Any])

    def policy(self, changes: dict[str, str | int | float | bool]) -> dict[str, Any]:
        """The scheduler's settings, changed so."""
        return self._asked(a.Policy(changes=changes), dict[str, Any])

    def dashboard(self) -> str:
        """A link to it, good once and for a minute."""
        return self._asked(a.OpenDashboard(), dict[str, str])["url"]

    def end_dashboards(self) -> int:
        """Returns the number of sessions that there were."""
        return self._asked(a.OpenDashboard(end=True), dict[str, int])["ended"]

    def drain(self, undo: bool = False) -> bool:
        """Whether it has drained, once nothing runs any more; with ``undo`` at once."""
        with self._conversation(None) as conversation:
            answer = b"".join(conversation.ask(a.Drain(undo=undo)))
        return msgspec.json.decode(answer, type=dict[str, bool])["drained"]

    def drain_gpu(self, gpu: int, undo: bool = False, waits: bool = False) -> dict[str, Any]:
        """Returns its state then; with ``waits``, once nothing of the node is there any more."""
        with self._conversation(None if waits else PATIENCE_S) as conversation:
            answer = b"".join(conversation.ask(a.DrainGpu(gpu=gpu, undo=undo, waits=waits)))
        return msgspec.json.decode(answer, type=dict[str, Any])

    def restart(self, name: str) -> None:
        """New instances of it."""
        self._call(a.Restart(name=name))

    def versions(self, name: str) -> list[dict[str, Any]]:
        """The newest first, which is served."""
        return self._asked(a.Versions(name=name), dict[str, list[dict[str, Any]]])["versions"]

    def roll_back(self, name: str, version: int) -> dict[str, Any]:
        """To an earlier version, 0 for the one before; waits until it has loaded."""
        with self._conversation(None) as conversation:
            answer = b"".join(conversation.ask(a.Rollback(name=name, version=version)))
        return msgspec.json.decode(answer, type=dict[str, Any])

    def traffic(self, name: str, shares: dict[int, int]) -> dict[str, Any]:
        """Returns the per cent of each version; waits until they are served."""
        with self._conversation(None) as conversation:
            answer = b"".join(conversation.ask(a.Traffic(name=name, shares=shares)))
        return msgspec.json.decode(answer, type=dict[str, Any])

    def pin(self, name: str, pinned: bool) -> None:
        self._call(a.Pin(name=name, pinned=pinned))

    def detach(self, name: str, body: bytes, kind: str = "") -> dict[str, Any]:
        """A job of this request."""
        pieces = self._pieces(a.Invoke(name=name, kind=kind, detach=True), body)
        return msgspec.json.decode(b"".join(said.data for said in pieces), type=dict[str, Any])

    def schema(self, name: str) -> dict[str, Any]:
        """The schema of its requests and answers."""
        return self._asked(a.Schema(name=name), dict[str, Any])

    def jobs(self, name: str = "") -> list[dict[str, Any]]:
        """The newest first."""
        found: list[dict[str, Any]] = self._asked(a.ListJobs(name=name), dict[str, Any])["jobs"]
        return found

    def job(self, id: str, wait_s: int = 0) -> dict[str, Any]:
        """Its state, at the latest after so long."""
        with self._conversation(None if wait_s else self._call_s) as conversation:
            return msgspec.json.decode(b"".join(conversation.ask(a.AskJob(id=id, wait_s=wait_s))), type=dict[str, Any])

    def cancel(self, id: str, forget: bool = False) -> dict[str, Any]:
        """Returns its state then; with ``forget``, of one that has ended."""
        return self._asked(a.CancelJob(id=id, forget=forget), dict[str, Any])

    def result(self, id: str) -> tuple[str, bytes]:
        """The answer of a job that has ended, and its content type, "" for JSON."""
        with self._conversation(None) as conversation:
            said = list(conversation.asked(a.JobResult(id=id)))
        return said[0].kind if said else "", b"".join(piece.data for piece in said)

    def remove(self, name: str) -> None:
        self._call(a.Remove(name=name))

    def list_keys(self) -> list[dict[str, Any]]:
        return self._asked(a.Keys(), list[dict[str, Any]])

    def create_key(self, wish: a.Wish) -> dict[str, Any]:
        """The key is in what comes back, and can be had this once."""
        return self._asked(a.CreateKey(wish=wish), dict[str, Any])

    def revoke_key(self, name: str) -> dict[str, Any]:
        return self._asked(a.RevokeKey(id=name), dict[str, Any])

    def secrets(self, tenant: str = "") -> list[dict[str, Any]]:
        """Their names; of all tenants, if none is named."""
        return self._asked(a.Secrets(tenant=tenant), dict[str, list[dict[str, Any]]])["secrets"]

    def set_secret(self, tenant: str, name: str, value: str) -> dict[str, Any]:
        return self._asked(a.SetSecret(tenant=tenant, name=name, value=value), dict[str, Any])

    def remove_secret(self, tenant: str, name: str) -> dict[str, Any]:
        return self._asked(a.RemoveSecret(tenant=tenant, name=name), dict[str, Any])

    def invoke(self, name: str, body: bytes) -> bytes:
        """The whole answer."""
        return b"".join(piece for _, piece in self.stream(name, body))

    def stream(self, name: str, body: bytes, kind: str = "") -> Generator[tuple[str, bytes], None, None]:
        """The answer in pieces, each with its content type, "" for JSON; ``kind`` is the body's."""
        for said in self._pieces(a.Invoke(name=name, kind=kind), body):
            yield said.kind, said.data

    def _pieces(self, act: a.Invoke, body: bytes) -> Generator[a.Said, None, None]:
        fd = os.memfd_create("body", os.MFD_CLOEXEC)
        with open(fd, "wb") as file:
            file.write(body)
            file.flush()
            with self._conversation(None) as conversation:
                yield from conversation.asked(act, [fd])

    def logs(
        self, name: str, lines: int, follow: bool, since_s: float = 0.0, marks: bool = False
    ) -> Generator[bytes, None, None]:
        """The log in pieces, from then on; without end if ``follow``."""
        with self._conversation(None if follow else CALL_S) as conversation:
            yield from conversation.ask(a.Logs(name=name, lines=lines, follow=follow, since_s=since_s, marks=marks))

    def requests(self, name: str, kind: Literal["", "slow", "failed", "cold"], most: int) -> list[dict[str, Any]]:
        """The last requests."""
        act = a.RecentRequests(name=name, kind=kind, most=most)
        return self._asked(act, dict[str, list[dict[str, Any]]])["requests"]

    def deploy(
        self,
        name: str,
        found: FunctionFolder,
        options: dict[str, Any],
        printed: Callable[[bytes], None] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Waits until it has loaded; ``printed`` is called with what it prints meanwhile. ``more``: as Deploy has it.
        Raises folder.NoFunction, OSError too.
        """
        with self._conversation(None) as conversation:
            options = {each: list(value) if isinstance(value, tuple) else value for each, value in options.items()}
            file, logs = folder.options_file(found), printed is not None
            conversation.say(a.Deploy(name=name, entry=found.entry, options=options, file=file, logs=logs, **more))
            travelling = folder.files(found)
            while batch := list(islice(travelling, a.MAX_FILES)):
                try:
                    conversation.say(a.Files(names=[each for each, _ in batch]), [fd for _, fd in batch])
                finally:
                    for _, fd in batch:
                        os.close(fd)
            answer = b""
            for said in conversation.asked(a.Finish()):
                if said.kind == a.LOG and printed is not None:
                    printed(said.data)
                else:
                    answer += said.data
            return msgspec.json.decode(answer, type=dict[str, Any])

    def _asked(self, act: a.Act, kind: type[T]) -> T:
        return msgspec.json.decode(self._call(act), type=kind)

    def _call(self, act: a.Act) -> bytes:
        with self._conversation(self._call_s) as conversation:
            return b"".join(conversation.ask(act))

    @contextmanager
    def _conversation(self, timeout_s: float | None) -> Iterator["_Conversation"]:
        """Raises CallRefused and Unreachable, also when its body does."""
        welcomed = False
        try:
            sock = self._connected()
            try:
                conversation = _Conversation(sock)
                welcome = conversation.hear()
                if not isinstance(welcome, a.Welcome) or welcome.protocol != a.PROTOCOL:
                    raise RemoteProtocolError("it is of another version; use its own command, or restart it")
                sock.sock.settimeout(timeout_s)
                welcomed = True
                yield conversation
            finally:
                sock.close()
        except (PeerLost, RemoteProtocolError) as error:
            pid = nodeprocess.running_pid(self.run) if isinstance(error, PeerLost) else None
            if welcomed:
                text = f"the node in {self.run} ended, or was stopped, before it had answered ({error})"
                raise Unreachable(f"{text}; what was asked for may have been done, or begun") from error
            if pid is not None:
                text = f"the node in {self.run} runs (pid {pid}) but is not ready ({error}); try again in a moment"
                raise Unreachable(text) from error
            why = "" if isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError) else f" ({error})"
            text = f"no node answers in {self.run}{why}; start one with `dormouse up`, or name another with --run"
            raise Unreachable(text) from error

    def _connected(self) -> PacketSocket[a.FromNode, a.ToNode]:
        """Raises PeerLost."""
        end_s = time.monotonic() + self._patience_s
        while True:
            try:
                return PacketSocket.connect(self._path, a.FromNode, min(CONNECT_S, self._call_s))
            except PeerLost:
                if time.monotonic() >= end_s or nodeprocess.running_pid(self.run) is None:
                    raise
                time.sleep(_POLL_S)


class _Conversation:
    """Messages sent and received on one connection. Raises CallRefused, PeerLost, RemoteProtocolError."""

    def __init__(self, sock: PacketSocket[a.FromNode, a.ToNode]) -> None:
        self._sock = sock

    def hear(self) -> a.FromNode:
        packet = self._sock.recv()
        if packet is None:
            raise PeerLost("it hung up")
        if isinstance(packet[0], a.Refused):
            said = packet[0]
            raise CallRefused(said.status, said.code, said.text, said.of_function)
        return packet[0]

    def say(self, message: a.ToNode, fds: list[int] | None = None) -> None:
        """Until the node has taken it."""
        self._send(message, fds)
        if not isinstance(self.hear(), a.Taken):
            raise RemoteProtocolError("it said something else than that it has taken the files")

    def ask(self, message: a.ToNode) -> Iterator[bytes]:
        """The answer's pieces."""
        return (said.data for said in self.asked(message))

    def asked(self, message: a.ToNode, fds: list[int] | None = None) -> Iterator[a.Said]:
        """The same, with what kind they are of."""
        self._send(message, fds)
        while not isinstance(said := self.hear(), a.Done):
            if not isinstance(said, a.Said):
                raise RemoteProtocolError("it said something else than an answer")
            yield said

    def _send(self, message: a.ToNode, fds: list[int] | None) -> None:
        try:
            self._sock.send(message, fds)
        except LocalProtocolError:
            text = (
                f"what is asked has more than {MAX_PACKET_NBYTES:,} bytes; a secret may have {MAX_NBYTES:,}, and so "
                "may a deploy's variables: put what is larger into a file"
            )
            raise CallRefused(413, "body_too_large", text) from None
