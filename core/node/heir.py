"""The old supervisor's side of an upgrade: starts the successor on request, and carries out the decisions of
succession.py. Owns the socket for requests (RUN/t/replace), the successor's process and the link to it.

The supervisor handles the node's own processes, behind a Protocol.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, assert_never

from dormouse.core.links.fds import Listener, PacketSocket, close_all
from dormouse.core.node import succession as e
from dormouse.core.node.children import sink
from dormouse.core.quantities import ended
from dormouse.schemas import succession as s
from dormouse.schemas.errors import PeerLost, RemoteProtocolError

LAST_NBYTES: Final = 20_000
"""Of the output of a successor that failed."""

LATE_S: Final = 1.0
"""A time limit that is noticed so late: this process was itself stopped. So much longer it waits for what the successor
has said meanwhile.
"""

Asker = PacketSocket[s.Replace, s.SaidToAsker]


class Node(Protocol):
    """The supervisor's part."""

    log: Any
    loop: asyncio.AbstractEventLoop

    def have_router_leave(self, wait_s: float) -> None: ...

    def stop_for_heir(self) -> None:
        """All but zygotes; `Stopped` comes when they are gone."""
        ...

    def refusal(self) -> str:
        """Why it cannot go over just now, or ""."""
        ...

    def estate(self) -> tuple[s.Estate, list[int]]: ...

    def drop_way_back(self) -> None:
        """Raises OSError."""
        ...

    def serve_on(self, anew: bool) -> None: ...

    def retire(self, heir_pid: int) -> None: ...


class HeirProcess:
    """The successor's process. ``on_end(status)`` is called once."""

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        errors: Path,
        on_message: Callable[[s.HeirReady | s.HeirServes], None],
        on_end: Callable[[int], None],
    ) -> None:
        """Raises OSError."""
        self.errors = errors
        self._failure = ""  # why it ends, as it says
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._packets: PacketSocket[s.FromHeir, s.ToHeir] = PacketSocket(ours, s.FromHeir)
        try:
            with theirs, sink(errors) as file:
                self._process = subprocess.Popen(
                    [*command, "--succeed", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    cwd="/",
                )
        except OSError:
            self._packets.close()
            raise

        self._on_message = on_message
        self._packets.serve(self._heard, lambda: None)  # its end is seen by its process
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._ended)

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, message: s.ToHeir, fds: list[int] | None = None) -> None:
        try:
            self._packets.send(message, fds)
        except (PeerLost, BlockingIOError):
            self.kill()

    def kill(self) -> None:
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def said_last(self, status: int) -> str:
        """Why it has ended."""
        if self._failure:
            return self._failure
        try:
            lines = self.errors.read_bytes()[-LAST_NBYTES:].decode(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        try:
            return str(json.loads(lines[-1])["message"])
        except (IndexError, ValueError, KeyError, TypeError):
            return "\n".join(lines[-5:]) or f"it {ended(status)} and said nothing"

    def leave(self) -> None:
        """It is on its own now."""
        self._process.returncode = 0  # no warning about a living child
        self._close()

    def _heard(self, message: s.FromHeir, fds: list[int]) -> None:
        close_all(fds)
        if isinstance(message, s.HeirFailed):
            self._failure = message.text
        elif self._process.poll() is None:  # else its end is what counts, whatever it has said before
            self._on_message(message)

    def _ended(self) -> None:
        status = self._process.wait()
        with suppress(PeerLost, RemoteProtocolError, BlockingIOError):
            while (packet := self._packets.recv()) is not None:  # its last word
                self._heard(*packet)
        self._close()
        self._on_end(status)

    def _close(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._packets.close()


class Heirs:
    """See the module."""

    def __init__(self, node: Node, path: str, environment: Mapping[str, str], errors: Path) -> None:
        """``environment``: a successor's variables beyond ours."""
        self._node = node
        self._environment, self._errors = environment, errors
        self._succession = e.Succession()
        self._heir: HeirProcess | None = None
        self._status = 0  # of the last one that failed
        self._asker: Asker | None = None
        self._command: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._path = path
        self._listener: Listener[s.Replace, s.SaidToAsker] | None = None
        self._listen()

    def handle(self, event: e.SuccessionEvent) -> None:
        before = self._succession.stage
        effects = self._succession.handle(event)
        if self._succession.stage is not before:
            self._node.log.info("succession", stage=self._succession.stage.value)
            if self._succession.stage is not e.Stage.IDLE:  # else it is told why
                self._tell(s.Going(text=self._succession.stage.value))
        for effect in effects:
            self._perform(effect)

    def close(self) -> None:
        """The node ends: a successor that does not have it yet ends too."""
        self._deafen()
        self._set_timer(None)
        if self._heir is not None:
            self._heir.kill()
        if self._asker is not None:
            self._asker.close()

    # --- who asks

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = Listener(self._path, s.Replace, self._connected)

    def _deafen(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _connected(self, asker: Asker) -> None:
        asker.serve(partial(self._asked, asker), partial(self._asker_left, asker))

    def _asked(self, asker: Asker, replace: s.Replace, fds: list[int]) -> None:
        close_all(fds)
        if asker is self._asker:
            return  # it has said all
        if self._succession.stage is not e.Stage.IDLE:
            self._refuse(asker, "the node is being replaced already")
        elif replace.format != s.FORMAT or not replace.command:
            self._refuse(asker, "this node cannot go over to that version: `dormouse down`, and then `up`")
        elif why := self._node.refusal():
            self._refuse(asker, why)
        else:
            self._begin(asker, replace)

    def _begin(self, asker: Asker, replace: s.Replace) -> None:
        self._asker, self._command = asker, replace.command
        self.handle(e.SuccessionAsked(min(max(replace.wait_s, 0.0), e.LONGEST_WAIT_S)))

    def _asker_left(self, asker: Asker) -> None:
        """The handover that it has asked for goes on."""
        if asker is self._asker:
            self._asker = None

    def _refuse(self, asker: Asker, text: str) -> None:
        with suppress(PeerLost, BlockingIOError):
            asker.send(s.NotReplaced(text=text))
        asker.close()

    def _tell(self, said: s.SaidToAsker) -> None:
        if self._asker is not None:
            try:
                self._asker.send(said)
            except (PeerLost, BlockingIOError):
                self._asker.close()
                self._asker = None

    def _answer(self, said: s.SaidToAsker) -> None:
        self._tell(said)
        if self._asker is not None:
            self._asker.close()
            self._asker = None

    # --- what is decided

    def _perform(self, effect: e.SuccessionEffect) -> None:
        match effect:
            case e.StartHeir():
                self._start()
            case e.HaveRouterLeave(wait_s=wait_s):
                self._node.have_router_leave(wait_s)
            case e.StopChildren():
                self._node.stop_for_heir()
            case e.GiveAll():
                assert self._heir is not None
                self._deafen()  # its own is there from now on
                self._heir.say(s.Yours())
            case e.DropWayBack():
                try:
                    self._node.drop_way_back()
                except OSError as error:
                    self.handle(e.WayBackStays(f"the way back from a migration cannot be dropped ({error})"))
                else:
                    self.handle(e.WayBackDropped())
            case e.RetireSelf():
                assert self._heir is not None
                self._set_timer(None)
                heir, self._heir = self._heir, None
                self._node.retire(heir.pid)
                self._answer(s.Replaced(pid=heir.pid))
                heir.leave()
            case e.KillHeir():
                if self._heir is not None:
                    self._heir.kill()
            case e.ServeOn(anew=anew, text=text):
                self._set_timer(None)
                self._heir = None
                self._node.log.error("not_replaced", reason=text, anew=anew)
                self._answer(s.NotReplaced(text=text, status=self._status))
                self._node.serve_on(anew)
                self._listen()
            case e.Within(seconds=seconds):
                self._set_timer(seconds)
            case _:
                assert_never(effect)

    def _start(self) -> None:
        estate, fds = self._node.estate()
        try:
            self._heir = HeirProcess(
                self._command, os.environ | self._environment, self._errors, self._heard, self._ended
            )
        except OSError as error:
            self._status = 1
            self._node.loop.call_soon(self.handle, e.HeirEnded(f"{self._command[0]}: {error.strerror}"))
            return
        self._heir.say(estate, fds)

    def _heard(self, message: s.HeirReady | s.HeirServes) -> None:
        match message:
            case s.HeirReady():
                self.handle(e.HeirImported())
            case s.HeirServes():
                self.handle(e.HeirUp())
            case _:
                assert_never(message)

    def _ended(self, status: int) -> None:
        assert self._heir is not None
        self._status = status
        self.handle(e.HeirEnded(self._heir.said_last(status)))

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            self._timer = self._node.loop.call_later(seconds, self._overdue, self._node.loop.time() + seconds)

    def _overdue(self, since_s: float) -> None:
        if self._node.loop.time() >= since_s + LATE_S:
            self._set_timer(LATE_S)
        else:
            self.handle(e.Overdue())
