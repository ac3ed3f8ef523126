"""What instances send for their runtimes: whatever cannot be passed on is their mistake."""

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from dormouse.core.links.fds import MAX_PACKET_NBYTES, PacketSocket
from dormouse.gpuserver.executor import ahead
from dormouse.gpuserver.executor.runtimes import INNER_NBYTES, Runtime, Runtimes
from dormouse.schemas import messages as m
from dormouse.schemas.errors import RemoteProtocolError

NOBODY: Any = None


def heard(data: bytes) -> list[Any]:
    """What the instance is answered."""
    answers: list[Any] = []

    class Host:
        def reply(self, instance: str, message: bytes) -> None:
            answers.append(msgspec.msgpack.decode(message, type=m.ExecutorToLlm))

    host: Any = Host()
    Runtimes(host, NOBODY, NOBODY, 1, yield_s=1.0, leave_s=1.0).heard("1-1", data)
    return answers


def test_what_no_packet_can_hold_is_refused() -> None:
    largest = msgspec.msgpack.encode(m.ToRuntime(serial=1, data=bytes(INNER_NBYTES)))
    assert heard(largest) == []  # it waits for its lease
    assert len(msgspec.msgpack.encode(m.ForRuntime(data=bytes(INNER_NBYTES)))) <= MAX_PACKET_NBYTES
    with pytest.raises(RemoteProtocolError, match="at most"):
        heard(msgspec.msgpack.encode(m.ToRuntime(serial=1, data=bytes(INNER_NBYTES + 1))))


@pytest.mark.parametrize("data", [b"", b"\x90", b"\xff" * 100])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        heard(data)


class Executor:
    """Runtimes of which one is there, and what their instance and that one are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[Any] = []
        self.connected = True
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.setblocking(False)
        theirs.setblocking(False)
        self.process: PacketSocket[Any, Any] = PacketSocket(theirs, m.ExecutorToRuntime)
        self.runtimes = Runtimes(self._host(), NOBODY, lambda event: None, 1, yield_s=1.0, leave_s=1.0)

        def spawned(instance: str) -> Runtime:
            found = Runtime(1, instance, PacketSocket(self.ours, m.RuntimeToExecutor))
            self.runtimes._runtimes[instance] = found
            return found

        monkeypatch.setattr(self.runtimes, "_spawn", spawned)

    def _host(self) -> Any:
        executor = self

        class Loop:
            def remove_writer(self, fd: int) -> None: ...

        class Host:
            loop = Loop()

            def reply(self, instance: str, message: bytes) -> None:
                executor.answers.append(msgspec.msgpack.decode(message, type=m.ExecutorToLlm))

            def hears(self, instance: str) -> bool:
                return executor.connected

        return Host()

    def say(self, serial: int, data: bytes, instance: str = "1-1") -> None:
        self.runtimes.heard(instance, msgspec.msgpack.encode(m.ToRuntime(serial=serial, data=data)))

    def passed(self) -> list[Any]:
        found: list[Any] = []
        while True:
            try:
                packet = self.process.recv()
            except BlockingIOError:
                return found
            assert packet is not None
            found.append(packet[0])


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    made = Executor(monkeypatch)
    yield made
    made.process.close()
    made.ours.close()


def test_what_comes_ahead_of_its_lease_waits_for_it(executor: Executor) -> None:
    """The router may tell an instance of its lease before the controller's wake is here."""
    executor.say(5, b"open")
    executor.say(5, b"submit")
    assert executor.answers == []
    executor.runtimes.tell(5, "1-1", m.TurnBegins())
    executor.say(5, b"more")
    said = [m.TurnBegins(), *(m.ForRuntime(data=data) for data in (b"open", b"submit", b"more"))]
    assert executor.passed() == said
    assert executor.answers == []


def test_what_comes_when_its_lease_is_over_is_answered_so(executor: Executor) -> None:
    executor.runtimes.tell(5, "1-1", m.TurnBegins())
    executor.runtimes.lease_over(5)
    executor.say(5, b"late")
    assert executor.answers == [m.SeatOver(serial=5)] * 2
    assert executor.passed() == [m.TurnBegins()]


@pytest.mark.parametrize("first", [True, False])
def test_a_lease_that_never_begins_is_over_for_who_waits_for_it(executor: Executor, first: bool) -> None:
    if first:
        executor.runtimes.lease_over(5)
    executor.say(5, b"open")
    if not first:
        executor.runtimes.lease_over(5)
    assert executor.answers == [m.SeatOver(serial=5)]
    executor.runtimes.tell(6, "1-1", m.TurnBegins())
    assert executor.passed() == [m.TurnBegins()]


def test_nobody_says_without_bound_what_waits_for_a_lease(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "AHEAD_NBYTES", 10)
    executor.say(5, b"x" * 10)
    with pytest.raises(RemoteProtocolError, match="ahead of a lease"):
        executor.say(5, b"x")


def test_tokens_for_one_who_has_hung_up_are_dropped(executor: Executor) -> None:
    """They would pile up until the instance's death is known, and pass for a fault of the instance."""
    executor.runtimes.tell(5, "1-1", m.TurnBegins())
    runtime = executor.runtimes._runtimes["1-1"]
    for executor.connected in (True, False):
        executor.runtimes._said(runtime, m.FromRuntime(data=b"tokens"), [])
    assert executor.answers == [m.OfRuntime(serial=5, data=b"tokens")]
