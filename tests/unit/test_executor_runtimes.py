"""What instances send for their runtimes: whatever cannot be passed on is their mistake."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import structlog

from dormouse.core.decisions.leases import events as e
from dormouse.core.links.fds import MAX_PACKET_NBYTES, PacketSocket
from dormouse.gpuserver.executor import ahead, runtime_processes
from dormouse.gpuserver.executor.runtime_handle import Runtime
from dormouse.gpuserver.executor.runtimes import INNER_NBYTES, Runtimes
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

        def spawned(instance: str, instance_uids: Any) -> Runtime:
            found = Runtime(1, instance, PacketSocket(self.ours, m.RuntimeToExecutor))
            self.runtimes.processes.living.append(found)
            self.runtimes.processes.by_name[instance] = found
            return found

        monkeypatch.setattr(self.runtimes.processes, "spawn", spawned)

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
    executor.runtimes.tell(5, "1-1", "1-1", m.TurnBegins())
    executor.say(5, b"more")
    said = [m.TurnBegins(), *(m.ForRuntime(data=data, serial=5) for data in (b"open", b"submit", b"more"))]
    assert executor.passed() == said
    assert executor.answers == []


def test_what_comes_when_its_lease_is_over_is_answered_so(executor: Executor) -> None:
    executor.runtimes.tell(5, "1-1", "1-1", m.TurnBegins())
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
    executor.runtimes.tell(6, "1-1", "1-1", m.TurnBegins())
    assert executor.passed() == [m.TurnBegins()]


def test_nobody_says_without_bound_what_waits_for_a_lease(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "AHEAD_NBYTES", ahead.MESSAGE_NBYTES + 10)
    executor.say(5, b"x" * 10)
    with pytest.raises(RemoteProtocolError, match="bytes ahead of a lease"):
        executor.say(5, b"x")


def test_messages_without_data_that_wait_for_a_lease_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory, and in number; and what has begun counts no longer."""
    waiting = ahead.AheadOfLease()
    monkeypatch.setattr(ahead, "AHEAD_NBYTES", 3 * ahead.MESSAGE_NBYTES)
    for serial in (5, 6, 7):
        waiting.park("i", m.ToRuntime(serial=serial, data=b""))
    with pytest.raises(RemoteProtocolError, match="bytes ahead of a lease"):
        waiting.park("i", m.ToRuntime(serial=8, data=b""))
    assert waiting.begun("i", 5) == [b""]
    monkeypatch.setattr(ahead, "AHEAD_MESSAGES", 2)
    for serial in (6, 7):
        waiting.park("i", m.ToRuntime(serial=serial, data=b""))
    with pytest.raises(RemoteProtocolError, match="2 messages ahead of a lease"):
        waiting.park("i", m.ToRuntime(serial=8, data=b""))
    waiting.park("other", m.ToRuntime(serial=8, data=b""))


def test_tokens_for_one_who_has_hung_up_are_dropped(executor: Executor) -> None:
    """They would pile up until the instance's death is known, and pass for a fault of the instance."""
    executor.runtimes.tell(5, "1-1", "1-1", m.TurnBegins())
    runtime = executor.runtimes.processes.by_name["1-1"]
    for executor.connected in (True, False):
        executor.runtimes._said(runtime, m.FromRuntime(data=b"tokens", serial=5), [])
    assert executor.answers == [m.OfRuntime(serial=5, data=b"tokens")]


class Forking:
    """Runtimes whose zygote only notes what it is to fork, and that live until they are said to be dead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spawned: list[m.SpawnRuntime] = []
        self.socks: list[socket.socket] = []
        self.events: list[Any] = []
        self.told: list[Any] = []  # the controller
        self.timers: list[tuple[float, Any]] = []  # seconds, and what is done then
        self.soon: list[Any] = []  # what is done next
        forking = self

        class Zygote:
            def __init__(self, *_: Any) -> None: ...
            def warm(self) -> None: ...
            def fork(self, spawn: m.SpawnRuntime, theirs: socket.socket) -> None:
                forking.spawned.append(spawn)
                forking.socks.append(theirs)

        class Device:
            address_nbytes, ordinal, activation_nbytes = 1 << 30, -1, 0
            context_nbytes = beside_nbytes = 0

        class Loop:
            def add_reader(self, *_: Any) -> None: ...
            def remove_reader(self, *_: Any) -> None: ...
            def add_writer(self, *_: Any) -> None: ...
            def remove_writer(self, *_: Any) -> None: ...
            def call_later(self, after_s: float, work: Any, *arguments: Any) -> Any:
                forking.timers.append((after_s, lambda: work(*arguments)))
                return self

            def call_soon(self, work: Any, *arguments: Any) -> None:
                forking.soon.append(lambda: work(*arguments))

            def cancel(self) -> None:
                forking.timers.pop()

        class Host:
            loop = Loop()
            log: Any = structlog.get_logger()

            def reply(self, instance: str, message: bytes) -> None: ...
            def hears(self, instance: str) -> bool:
                return True

            def to_controller(self, message: Any) -> None:
                forking.told.append(message)

        monkeypatch.setattr(runtime_processes, "RuntimeZygote", Zygote)
        monkeypatch.setattr(PacketSocket, "serve", lambda *_: None)
        host: Any = Host()
        device: Any = Device()
        self.device = device
        self.runtimes = Runtimes(host, device, self.events.append, 1, yield_s=1.0, leave_s=1.0, first_uid=90_000)

    def attach(self, instance: str, uid: int) -> None:
        arena = m.Arena(request_nbytes=1, response_nbytes=1, stream_nbytes=1)
        attach = m.AttachInstance(
            instance=instance,
            tenant="t",
            function="f",
            function_version=1,
            directory="/",
            uid=uid,
            arena=arena,
            quota_nbytes=1,
            llm=True,
        )
        self.runtimes.attach(attach)

    def begin(self, serial: int, instance: str, name: str) -> Runtime:
        self.runtimes.tell(serial, instance, name, m.TurnBegins())
        return self.runtimes.processes.by_name[name]

    def close(self) -> None:
        for runtime in self.runtimes.processes.living:
            runtime.connection.close()
        for sock in self.socks:
            sock.close()


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forking]:
    made = Forking(monkeypatch)
    yield made
    made.close()


def test_a_runtime_lives_until_the_last_of_its_instances_is_gone(forking: Forking) -> None:
    for number, instance in enumerate(("1-1", "1-2", "1-3")):
        forking.attach(instance, 61_000 + number)
    shared = forking.begin(1, "1-1", "g")
    assert forking.begin(2, "1-2", "g") is shared
    assert forking.begin(3, "1-3", "1-3") is not shared
    for serial in (1, 2):
        forking.runtimes.lease_over(serial)
    forking.runtimes.detach("1-1")
    assert not shared.ending
    forking.runtimes.detach("1-2")
    assert shared.ending
    assert len(forking.spawned) == 2


def test_where_no_context_has_room_the_one_that_rests_for_longest_ends_first(forking: Forking) -> None:
    """The new one is forked when that is gone: its context would find no memory before."""
    forking.device.context_nbytes, forking.device.beside_nbytes = 100, 399
    for number, instance in enumerate("abcdef"):
        forking.attach(instance, 61_000 + number)
    first, second, third = (forking.begin(number, name, name) for number, name in enumerate("abc"))
    with processes(3) as pidfds:
        for runtime, pidfd in zip((first, second, third), pidfds, strict=True):
            forking.runtimes.processes._spawned(runtime.number, pidfd)
        for serial in (0, 1):
            forking.runtimes.lease_over(serial)
        forking.begin(3, "a", "a")
        forking.runtimes.lease_over(3)  # so b was used longest ago
        forking.runtimes.open("d", "d")
        assert "d" not in forking.runtimes.processes.by_name  # none ends for one that nobody has asked for
        fourth = forking.begin(4, "d", "d")
        assert (first.ending, second.ending, third.ending) == (False, True, False)
        assert len(forking.spawned) == 3
        forking.runtimes.processes._gone(second)
        assert [spawn.number for spawn in forking.spawned] == [1, 2, 3, fourth.number]
        forking.begin(5, "a", "a")
        forking.begin(6, "e", "e")  # nobody rests: CUDA says whether there is room
        assert len(forking.spawned) == 5
        assert not any(each.ending for each in (first, third, fourth))
        forking.runtimes.processes._gone(first)
        forking.runtimes.processes._gone(third)


def test_what_waits_for_room_outlives_the_process_that_would_have_forked_it(forking: Forking) -> None:
    """It is forked by the next one, once, when what the last one has forked is gone."""
    forking.device.context_nbytes, forking.device.beside_nbytes = 100, 299
    for number, instance in enumerate("abc"):
        forking.attach(instance, 61_000 + number)
    first, second = (forking.begin(number, name, name) for number, name in enumerate("ab"))
    with processes(1) as (pidfd,):
        forking.runtimes.processes._spawned(first.number, pidfd)
        forking.runtimes.lease_over(0)
        third = forking.begin(2, "c", "c")
        assert [spawn.number for spawn in forking.spawned] == [first.number, second.number]
        forking.runtimes.processes._zygote_gone()
        assert (first.ending, second.dead, third.dead) == (True, True, False)
        assert forking.events == [e.RuntimeGone("b")]
        forking.runtimes.processes._gone(first)
        assert [spawn.number for spawn in forking.spawned] == [first.number, second.number, third.number]


def test_one_that_is_ended_while_it_waits_for_room_is_never_forked(forking: Forking) -> None:
    forking.device.context_nbytes, forking.device.beside_nbytes = 100, 199
    for number, instance in enumerate("abc"):
        forking.attach(instance, 61_000 + number)
    first = forking.begin(0, "a", "a")
    with processes(1) as (pidfd,):
        forking.runtimes.processes._spawned(first.number, pidfd)
        forking.runtimes.lease_over(0)
        second, third = forking.begin(1, "b", "b"), forking.begin(2, "c", "c")
        assert first.ending
        forking.runtimes.detach("b")
        assert second.ending
        forking.runtimes.processes._gone(first)
        for work in forking.soon:
            work()
        assert second.dead
        assert [spawn.number for spawn in forking.spawned] == [first.number, third.number]


@contextmanager
def processes(count: int) -> Iterator[list[int]]:
    made = [subprocess.Popen(["sleep", "600"]) for _ in range(count)]
    try:
        yield [os.pidfd_open(process.pid) for process in made]
    finally:
        for process in made:
            process.kill()
            process.wait()


def test_one_that_has_served_a_group_is_never_given_to_another(forking: Forking) -> None:
    """Nor is its uid, as long as it lives, though the instance whose it was first may be another's by then."""
    forking.attach("1-1", 61_000)
    first = forking.begin(1, "1-1", "g")
    forking.runtimes.lease_over(1)
    forking.runtimes.detach("1-1")
    forking.attach("1-2", 61_000)
    second = forking.begin(2, "1-2", "h")
    assert second is not first
    assert [spawn.uid for spawn in forking.spawned] == [90_000, 90_001]
    third = forking.begin(3, "1-2", "g")  # what is ending is not the group's again, either
    assert third is not first
    assert [spawn.uid for spawn in forking.spawned] == [90_000, 90_001, 90_002]
    forking.runtimes.processes._gone(first)
    assert forking.events == []  # it had no lease
    forking.begin(4, "1-2", "i")
    assert forking.spawned[-1].uid == 90_000


def test_what_a_runtime_says_reaches_its_own_leases_only(forking: Forking, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[tuple[str, Any]] = []
    monkeypatch.setattr(forking.runtimes, "_answer", lambda instance, message: answers.append((instance, message)))
    for number, instance in enumerate(("1-1", "1-2", "1-3")):
        forking.attach(instance, 61_000 + number)
    shared, other = forking.begin(1, "1-1", "g"), forking.begin(3, "1-3", "h")
    forking.begin(2, "1-2", "g")
    for serial in (1, 2, 3, 4):
        forking.runtimes._said(shared, m.FromRuntime(data=b"x", serial=serial), [])
    assert answers == [("1-1", m.OfRuntime(serial=1, data=b"x")), ("1-2", m.OfRuntime(serial=2, data=b"x"))]
    assert other.serials == {3: "1-3"}


def test_an_instance_speaks_under_its_own_lease_only(forking: Forking) -> None:
    for number, instance in enumerate(("1-1", "1-2")):
        forking.attach(instance, 61_000 + number)
    shared = forking.begin(1, "1-1", "g")
    forking.begin(2, "1-2", "g")
    shared.waiting.clear()
    sent: list[Any] = []
    forking.runtimes.processes.send = lambda runtime, message, fds=None: sent.append(message)  # type: ignore[method-assign]
    for serial in (1, 2):
        forking.runtimes.heard("1-2", msgspec.msgpack.encode(m.ToRuntime(serial=serial, data=b"abort")))
    assert sent == [m.ForRuntime(data=b"abort", serial=2)]


def test_the_death_of_a_runtime_is_told_once_for_all_of_its_leases(forking: Forking) -> None:
    for number, instance in enumerate(("1-1", "1-2")):
        forking.attach(instance, 61_000 + number)
    shared = forking.begin(1, "1-1", "g")
    forking.begin(2, "1-2", "g")
    forking.runtimes.processes._gone(shared)
    assert forking.events == [e.RuntimeGone("g")]
    assert forking.begin(3, "1-1", "g") is not shared


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (m.KvReclaim(nbytes=1), m.KvReturned(extents=[])),
        (m.TurnEnds(), m.TurnGivenBack(wants=True)),
        (m.SeatEnds(), m.SeatLeft()),
    ],
)
def test_a_runtime_that_does_not_give_what_it_owes_is_ended_after_a_bound(
    forking: Forking, asked: Any, answer: Any
) -> None:
    """Also KV memory, which others wait for. Asked twice, it has the time of the first."""
    forking.attach("1-1", 61_000)
    runtime = forking.begin(1, "1-1", "g")
    forking.runtimes.tell(1, "1-1", "g", asked)
    forking.runtimes.tell(1, "1-1", "g", asked)
    assert [after_s for after_s, _ in forking.timers] == [1.0]
    forking.runtimes._said(runtime, answer, [])
    assert (forking.timers, runtime.ending) == ([], False)
    forking.runtimes.tell(1, "1-1", "g", asked)
    ((_, overdue),) = forking.timers
    overdue()
    assert runtime.ending
    forking.runtimes.processes._gone(runtime)
    assert forking.events[-1] == e.RuntimeGone("g")


def test_a_runtime_is_opened_before_it_has_a_lease_and_is_then_the_leases(forking: Forking) -> None:
    forking.runtimes.open("1-1", "g")
    assert forking.spawned == []  # nobody is attached
    forking.attach("1-1", 61_000)
    forking.runtimes.open("1-1", "g")
    forking.runtimes.open("1-1", "g")
    assert len(forking.spawned) == 1
    with subprocess.Popen(["sleep", "600"]) as process:
        forking.runtimes.processes._spawned(forking.spawned[0].number, os.pidfd_open(process.pid))
        (told,) = forking.told  # else the controller would have it opened again
        assert (told.instances, told.pid, told.load is not None) == (["1-1"], process.pid, True)
        runtime = forking.begin(1, "1-1", "g")
        assert len(forking.spawned) == 1
        forking.runtimes.detach("1-1")
        assert runtime.ending
        assert process.wait() == -signal.SIGKILL
