"""Batches of requests in the scheduling core: when one begins, how many are in it, what is learned and counted."""

from itertools import count

import pytest

from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.functions import Function
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.schemas.messages import Done, PoolStats

GIB = 1 << 30
STATS = PoolStats(free_nbytes=4 * GIB, largest_nbytes=4 * GIB)


class Core:
    """A scheduler with one GPU and two functions, whose models are there; each has one instance of its name."""

    def __init__(self, deadline_s: float = 1.0) -> None:
        self.core = Scheduler(seed=1, revoke_s=5.0, max_waiting=4)
        self.now_s = 100.0
        self.requests = 0
        self.waiting: list[int] = []  # of the last wish
        self.numbers = count(1)
        self.instance = "f"  # that asks
        self.tell(ev.ExecutorUp(0, 1, STATS))
        for name in ("f", "other"):
            self.tell(ev.FunctionKnown(name, deadline_s, 0.98, 1.0))
            self.tell(ev.InstanceKnown(name, name))
            self.tell(ev.ModelSized(name, 1, GIB))
            self.tell(ev.Evicted(0, 1, ((name, GIB),), STATS))

    @property
    def function(self) -> Function:
        return self.core.functions["f"]

    def tell(self, event: ev.Event) -> list[ev.Action]:
        actions = self.core.handle(event, self.now_s)
        self.core.check()
        return actions

    def asks(self, *left_s: float, longest_s: float = 0.0, most: int = 8) -> list[ev.Action]:
        """So many requests wait, with so long until their deadlines."""
        self.requests += 1
        self.waiting = []
        wanted = ev.BatchWanted(self.coming(*left_s), most, longest_s)
        return self.tell(ev.Asked(self.requests, self.instance, self.now_s + min(left_s), 1, True, wanted))

    def coming(self, *left_s: float) -> tuple[tuple[int, float], ...]:
        found = tuple((next(self.numbers), self.now_s + each) for each in left_s)
        self.waiting += (number for number, _ in found)
        return found

    def come(self, *left_s: float) -> list[ev.Action]:
        return self.tell(ev.BatchChanged(self.requests, came=self.coming(*left_s)))

    def leave(self, *which: int) -> list[ev.Action]:
        """Of those of the last wish."""
        left = tuple(self.waiting[each] for each in which)
        self.waiting = [number for number in self.waiting if number not in left]
        return self.tell(ev.BatchChanged(self.requests, left=left))

    def busy(self) -> ev.WakeOn:
        """Another's request has the GPU."""
        return woken(self.tell(ev.Asked(900, "other", self.now_s + 1.0, 1)))

    def ends(
        self, wake: ev.WakeOn, took_s: float = 0.0, copied: int = 0, taken: int | None = None, together: int = -1
    ) -> list[ev.Action]:
        """Its instance has ``taken`` all of it, and computed them ``together``, if nothing else is said."""
        actions = self.over(wake, took_s, copied)
        taken = wake.requests if taken is None else taken
        self.tell(ev.Answered(wake.request, True, taken, taken if together < 0 else together))
        return actions

    def over(self, wake: ev.WakeOn, took_s: float = 0.0, copied: int = 0) -> list[ev.Action]:
        """Its executor says so, mostly before its instance does."""
        self.now_s += took_s
        done = Done(
            serial=wake.lease.serial,
            outcome="ended",
            gpu_us=10,
            copied_nbytes=copied,
            peer_nbytes=0,
            file_nbytes=0,
            resident=[],
            peak_activation_nbytes=0,
            version=1,
            stats=STATS,
        )
        return self.tell(ev.LeaseOver(0, 1, done))

    def learns(self, longest_s: float = 0.0, **times: float) -> None:
        """Batches of so many, b1 and so on, take so long: by leases."""
        for name, seconds in times.items():
            size = int(name[1:])
            wake = woken(self.asks(*[60.0] * size, longest_s=longest_s))
            assert wake.requests == size
            self.ends(wake, seconds)


def woken(actions: list[ev.Action]) -> ev.WakeOn:
    (wake,) = [each for each in actions if isinstance(each, ev.WakeOn)]
    return wake


def test_a_batch_begins_at_once_on_a_free_gpu_with_all_that_there_are() -> None:
    assert woken(Core().asks(1.0, 1.0, 1.0)).requests == 3


def test_what_comes_while_a_batch_waits_for_its_gpu_is_in_it() -> None:
    core = Core()
    other = core.busy()
    assert core.asks(1.0) == []
    assert core.come(1.0, 1.0) == []
    assert core.leave(1) == []
    assert core.tell(ev.BatchChanged(core.requests, left=(99,))) == [], "nobody that it knows"
    assert woken(core.ends(other, 0.01)).requests == 2


def test_no_more_than_a_batch_begin_of_those_that_wait() -> None:
    core = Core()
    other = core.busy()
    core.asks(*[1.0] * 3, most=2)
    core.come(1.0)
    core.leave(0)
    assert woken(core.ends(other, 0.01)).requests == 2


def test_what_batches_take_is_learned_from_leases_that_copied_nothing() -> None:
    core = Core()
    core.learns(b1=0.1, b4=0.16)
    batches = core.function.batches
    assert batches is not None
    assert [batches.times.of(size) for size in (1, 2, 4)] == pytest.approx([0.1, 0.12, 0.16])
    assert core.function.best_s == pytest.approx(0.1), "of one request"
    wake = woken(core.asks(*[60.0] * 2))
    core.tell(ev.Woken(0, 1, wake.lease.serial, 9_000_000))
    core.ends(wake, 9.0, copied=GIB)
    assert batches.times.of(2) == pytest.approx(0.12)
    core.ends(woken(core.asks(60.0)), 9.0, together=0)
    assert batches.times.of(1) == pytest.approx(0.1), "its request was tried again"


@pytest.mark.parametrize("instances", [1, 2])
def test_gaps_are_learned_of_each_instance(instances: int) -> None:
    """20 ms from one another: who waits for the next saves 30 ms, if that comes to the same instance."""
    core = Core()
    core.tell(ev.InstanceKnown("g", "f"))
    core.tell(ev.ModelSized("g", 1, GIB))
    core.learns(b1=0.03, b8=0.03)
    for number in range(40):
        core.now_s += 0.02
        core.instance = "fg"[number % instances]
        if begun := core.asks(1.0, longest_s=0.05):
            core.ends(woken(begun), together=0)
        else:
            core.leave(0)
    assert (begun == []) == (instances == 1)


@pytest.mark.parametrize("first", ["executor", "instance"])
def test_times_are_learned_of_as_many_as_were_computed(first: str) -> None:
    """Others of a batch were wrong, or had left when it began: of 4 granted, 3 were taken and 2 computed."""
    core = Core()
    core.learns(b1=0.1)
    wake = woken(core.asks(*[60.0] * 4))
    if first == "executor":
        core.ends(wake, 0.12, taken=3, together=2)
    else:
        core.tell(ev.Answered(wake.request, True, 3, 2))
        assert core.function.served == 1, "it may be late yet"
        core.over(wake, 0.12)
    batches = core.function.batches
    assert batches is not None
    assert batches.times.known == pytest.approx({1: 0.1, 2: 0.12})
    assert core.function.served == 1 + 3


def test_batches_that_served_nobody_teach_nothing() -> None:
    core = Core()
    core.learns(b1=0.1)
    for taken in (0, 1):
        for _ in range(5):
            core.ends(woken(core.asks(60.0)), 0.0002, taken=taken, together=0)
    batches = core.function.batches
    assert batches is not None
    assert batches.times.known == pytest.approx({1: 0.1})
    assert core.function.best_s == pytest.approx(0.1)
    assert core.function.served == 6


def test_a_batch_whose_instance_dies_when_its_lease_is_over_has_failed() -> None:
    core = Core()
    wake = woken(core.asks(1.0, 1.0))
    core.over(wake, 0.1)
    for _ in range(2):
        core.tell(ev.RequestFailed("f", wake.request))
    core.tell(ev.InstanceLost("f"))
    assert (core.function.served, core.function.late) == (2, 2)


def test_a_batch_is_no_larger_than_its_deadlines_allow() -> None:
    core = Core()
    core.learns(b1=0.1, b8=0.8)
    assert woken(core.asks(0.25, 0.25, 0.25, 0.9)).requests == 2


def test_when_a_batch_ends_is_expected_by_its_size() -> None:
    core = Core()
    core.learns(b1=0.1, b8=0.8)
    core.asks(*[5.0] * 4)
    (running,) = core.core.gpus[0].leases.values()
    assert running.ends_s - core.now_s == pytest.approx(0.4)


def gathering() -> Core:
    """A batch takes as long as one request, and requests come together."""
    core = Core()
    core.learns(0.05, b1=0.1, b8=0.1)
    return core


def test_by_batch_wait_a_batch_waits_for_more_without_a_gpu() -> None:
    core = gathering()
    assert core.asks(1.0, longest_s=0.05) == []
    assert core.core.gpus[0].leases == {}
    assert core.core.next_deadline_s == pytest.approx(core.now_s + 0.05)
    core.now_s += 0.05
    assert woken(core.tell(ev.Tick())).requests == 1
    core = gathering()
    assert woken(core.asks(1.0)).requests == 1, "without it, it does not"


def test_a_batch_that_is_full_or_would_be_late_waits_no_longer() -> None:
    core = gathering()
    assert core.asks(1.0, longest_s=0.05) == []
    core.now_s += 0.01
    assert core.come(1.0) == []
    assert core.core.next_deadline_s == pytest.approx(core.now_s + 0.04)
    assert core.leave(0) == []
    assert core.core.next_deadline_s == pytest.approx(core.now_s + 0.05), "the other one has not waited yet"
    assert woken(core.come(*[1.0] * 7)).requests == 8
    core = gathering()
    assert core.asks(0.15, longest_s=5.0) == []
    assert core.core.next_deadline_s == pytest.approx(core.now_s + 0.05), "then two would be late"
    core = gathering()
    assert woken(core.asks(0.1, longest_s=5.0)).requests == 1


def test_who_waits_for_more_may_leave() -> None:
    core = gathering()
    assert core.asks(1.0, longest_s=0.05) == []
    assert core.tell(ev.Released(core.requests)) == []
    assert core.core.next_deadline_s is None
    assert core.asks(1.0, longest_s=0.05) == []
    core.tell(ev.InstanceLost("f"))
    assert core.core.next_deadline_s is None
    core.tell(ev.Tick())
    assert core.core.waiting == {}
    assert core.core.gpus[0].leases == {}


def test_those_that_wait_for_more_count_among_those_that_may_wait() -> None:
    core = gathering()
    for _ in range(4):
        assert core.asks(1.0, longest_s=0.05) == []
    (refused,) = core.asks(1.0, longest_s=0.05)
    assert isinstance(refused, ev.RefuseAsk)


def test_each_request_of_a_batch_is_counted_by_its_own_deadline() -> None:
    core = Core()
    wake = woken(core.asks(0.1, 0.3, 0.3))
    core.ends(wake, 0.2)
    assert (core.function.served, core.function.late) == (3, 1)
    core.tell(ev.RequestFailed("f", wake.request))  # its error is heard of after its lease
    assert (core.function.served, core.function.late) == (3, 2)
    wake = woken(core.asks(1.0, 1.0))
    core.tell(ev.RequestFailed("f", wake.request))
    core.ends(wake, 0.1)
    assert (core.function.served, core.function.late) == (5, 3)


@pytest.mark.parametrize("where", ["gathering", "waiting for its GPU", "not asked yet"])
def test_a_batch_that_has_lost_all_its_requests_gets_no_gpu_and_counts_nothing(where: str) -> None:
    core = gathering()
    before = core.function.served
    if where == "not asked yet":
        core.requests += 1
        actions = core.tell(ev.Asked(core.requests, "f", core.now_s, 1, True, ev.BatchWanted((), 8, 0.05)))
    else:
        other = core.busy() if where == "waiting for its GPU" else None
        assert core.asks(1.0, longest_s=0.0 if other else 0.05) == []
        assert core.come(1.0) == []
        assert core.leave(0) == []
        actions = core.leave(0)
        assert core.tell(ev.BatchChanged(core.requests)) == core.come(1.0) == [], "it is over"
        if other is not None:
            core.ends(other)
    (refused,) = actions
    assert isinstance(refused, ev.RefuseAsk)
    assert (refused.request, refused.failure.code) == (core.requests, "nobody_waits")
    assert core.core.waiting == {}
    assert core.core.next_deadline_s is None
    assert core.core.gpus[0].leases == {}
    assert core.function.served == before
    assert woken(core.asks(1.0, 1.0)).requests == 2


def test_requests_that_come_are_counted_once() -> None:
    core = Core()
    other = core.busy()
    core.asks(1.0, 1.0, most=2)
    core.come(1.0)
    assert core.function.lately(core.now_s) == pytest.approx(3.0)
    core.ends(woken(core.ends(other)))
    left = core.waiting[2:]
    assert core.function.lately(core.now_s) == pytest.approx(3.0)
    again = tuple((number, core.now_s + 1.0) for number in left)
    wanted = ev.BatchWanted((*again, *core.coming(1.0)), 2, 0.0)
    core.tell(ev.Asked(77, "f", core.now_s + 1.0, 1, True, wanted))
    assert core.function.lately(core.now_s) == pytest.approx(4.0)


def test_who_comes_back_after_a_pause_waits_for_others() -> None:
    """Sixteen clients rest for an hour together; the first one that comes back waits for the others."""
    core = gathering()
    for _ in range(3):
        core.now_s += 3600.0
        assert core.asks(1.0, longest_s=0.05, most=16) == []
        core.now_s += 0.001
        assert core.come(*[1.0] * 14) == []
        core.ends(woken(core.come(1.0)), 0.1)


def test_who_comes_alone_after_each_pause_waits_no_more() -> None:
    core = gathering()
    waited = []
    for _ in range(12):
        core.now_s += 60.0
        actions = core.asks(1.0, longest_s=0.05)
        waited.append(actions == [])
        if actions == []:
            core.now_s += 0.05
            actions = core.tell(ev.Tick())
        core.ends(woken(actions), 0.1)
    assert waited == sorted(waited, reverse=True)
    assert (waited[0], waited[-1]) == (True, False)


def test_when_requests_have_come_is_known_by_their_deadlines() -> None:
    """Two are heard of together, when the batch before them has ended. They have come 50 ms apart, which is longer than
    anybody waits.
    """
    core = Core()
    core.learns(0.04, b1=0.1, b2=0.1)
    for _ in range(20):
        core.now_s += 0.1
        core.ends(woken(core.asks(0.91, 0.96, longest_s=0.04, most=2)))
    core.now_s += 0.1
    assert woken(core.asks(1.0, longest_s=0.04, most=2)).requests == 1


def test_answers_under_a_shared_lease_count_by_their_latency() -> None:
    core = Core()
    for latency_s in (0.1, 1.0, 1.1):
        core.tell(ev.RequestAnswered("f", latency_s))
    core.tell(ev.RequestAnswered("gone", 0.1))
    assert (core.function.served, core.function.late) == (3, 1)
