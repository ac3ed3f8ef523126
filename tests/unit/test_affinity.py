"""Where a language model goes: base, adapter and a warm runtime first, by its expected first token. Exact outcomes."""

from typing import Final

import pytest

from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.messages import Done, PoolStats, StepTimes
from dormouse.schemas.policy import Policy

MB: Final = 1_000_000
BASE, ADAPTER = 10_000 * MB, 100 * MB
TIMES: Final = StepTimes(step_us=20_000.0, prompt_token_us=0.0, sequence_us=0.0)
"""A prompt, as any step, takes 20 ms."""


class Node:
    """GPUs over links of 10 GB/s: the base takes 1 s, an adapter 10 ms. ``names`` are functions over one base."""

    def __init__(self, gpus: int, *names: str, affinity: bool = True) -> None:
        policy = Policy(affinity=affinity)
        self.core = Scheduler(seed=1, revoke_s=1.0, max_waiting=99, policy=policy, topology=Topology(host_bps=10e9))
        self.now_s = 0.0
        self.requests = 0
        self.leases: dict[str, ev.WakeOn] = {}
        for gpu in range(gpus):
            self.tell(ev.ExecutorUp(gpu, 1, PoolStats(free_nbytes=80_000 * MB)))
        for name in names:
            self.tell(ev.FunctionKnown(name, 2.0, 0.99, 1.0, "", "", 0.1, TIMES))
            self.tell(ev.InstanceKnown(name, name, "", name))
            self.tell(ev.ModelSized(name, 1, BASE + ADAPTER))

    def tell(self, event: ev.Event) -> list[ev.Action]:
        actions = self.core.handle(event, self.now_s)
        self.core.check()
        return actions

    def there(self, gpu: int, *names: str, nbytes: int = BASE) -> None:
        """So much of their models is on this GPU."""
        self.tell(ev.Evicted(gpu, 1, tuple((name, nbytes) for name in names), PoolStats(free_nbytes=70_000 * MB)))

    def ask(self, name: str) -> ev.WakeOn | None:
        """The lease that it gets, if it gets one now."""
        self.requests += 1
        actions = self.tell(ev.Asked(self.requests, name, self.now_s + 2.0, 1, False))
        wakes = [action for action in actions if isinstance(action, ev.WakeOn)]
        for wake in wakes:
            self.leases[wake.instance] = wake
        return wakes[-1] if wakes else None

    def rests(self, name: str) -> None:
        """It has had its first step."""
        lease = self.leases[name].lease
        self.tell(ev.TurnIdle(lease.gpu, 1, lease.serial))

    def over(self, name: str, gpu_s: float, nbytes: int) -> None:
        lease = self.leases.pop(name).lease
        stats = PoolStats(free_nbytes=60_000 * MB)
        done = Done(
            serial=lease.serial, outcome="ended", gpu_us=int(gpu_s * 1e6), copied_nbytes=0, peer_nbytes=0,
            file_nbytes=0, resident=[(name, nbytes)], peak_activation_nbytes=0, version=1, stats=stats,
        )  # fmt: skip
        self.tell(ev.LeaseOver(lease.gpu, 1, done))


def gpu_of(wake: ev.WakeOn | None) -> int:
    assert wake is not None
    return wake.lease.gpu


def test_it_goes_to_the_base_though_another_has_a_turn_there() -> None:
    """10 ms of copy, 500 of a start and 20 for the prompt, and 20 between steps; elsewhere a second of copy."""
    node = Node(2, "a", "b")
    assert gpu_of(node.ask("a")) == 0
    node.there(0, "a", nbytes=BASE + ADAPTER)
    node.there(0, "b")
    node.rests("a")
    wake = node.ask("b")
    assert gpu_of(wake) == 0
    assert wake is not None
    assert wake.wake_nbytes == ADAPTER
    assert wake.expected_s == pytest.approx(0.5 + 0.02 + 0.02)


def test_without_affinity_a_free_gpu_is_taken_and_all_is_copied() -> None:
    node = Node(2, "a", "b", affinity=False)
    node.ask("a")
    node.there(0, "a", nbytes=BASE + ADAPTER)
    node.there(0, "b")
    node.rests("a")
    wake = node.ask("b")
    assert gpu_of(wake) == 1
    assert wake is not None
    assert wake.wake_nbytes == BASE + ADAPTER


def test_of_two_gpus_with_the_base_that_with_the_adapter_is_taken() -> None:
    node = Node(3, "a")
    node.tell(ev.RuntimesOn(0, 1, ("a",)))
    for gpu, nbytes in ((0, BASE - 2_000 * MB), (1, BASE), (2, BASE + ADAPTER)):
        node.there(gpu, "a", nbytes=nbytes)
    for gpu in (1, 2):
        node.tell(ev.RuntimesOn(gpu, 1, ("a",)))
    assert gpu_of(node.ask("a")) == 2


def test_of_two_gpus_with_all_of_it_that_with_a_warm_runtime_is_taken() -> None:
    node = Node(2, "a")
    for gpu in (0, 1):
        node.there(gpu, "a", nbytes=BASE + ADAPTER)
    node.tell(ev.RuntimesOn(1, 1, ("a",)))
    wake = node.ask("a")
    assert gpu_of(wake) == 1
    assert wake is not None
    assert wake.expected_s == pytest.approx(0.02)


def test_a_warm_runtime_is_worth_no_more_than_its_start() -> None:
    """It takes half a second; the base's copy takes one, and counts twice."""
    node = Node(2, "a")
    node.there(0, "a")
    node.tell(ev.RuntimesOn(1, 1, ("a",)))
    assert gpu_of(node.ask("a")) == 0


def both_compute_for_long() -> Node:
    """Each has 200 s of work in a lease, all of it; GPU 0 has the models of both."""
    node = Node(2, "a", "b")
    for name in ("a", "b"):
        node.ask(name)
        node.now_s += 200.0
        node.rests(name)
        node.over(name, gpu_s=200.0, nbytes=0)
    node.there(0, "a", "b")
    return node


def test_where_others_compute_for_long_it_does_not_stay() -> None:
    """Beside the other it would take twice as long."""
    node = both_compute_for_long()
    assert gpu_of(node.ask("a")) == 0
    node.rests("a")
    assert gpu_of(node.ask("b")) == 1


def test_nobodys_base_goes_for_it_as_long_as_there_is_another_place() -> None:
    """The base is on GPU 0, where another computes for long; GPU 1 is idle, and full."""
    node = both_compute_for_long()
    node.tell(ev.Evicted(1, 1, (), PoolStats(free_nbytes=5_000 * MB)))
    assert gpu_of(node.ask("a")) == 0
    node.rests("a")
    assert gpu_of(node.ask("b")) == 0


def test_unless_its_tokens_would_be_late_there() -> None:
    """Five others have a step of 20 ms each between two of its own, and 100 ms are wanted."""
    node = Node(2, *"abcdef")
    node.core.functions["f"].work_s = 200.0
    node.there(0, *"abcdef")
    node.tell(ev.Evicted(1, 1, (), PoolStats(free_nbytes=5_000 * MB)))
    for name in "abcde":
        assert gpu_of(node.ask(name)) == 0
        node.rests(name)
    assert gpu_of(node.ask("f")) == 1


def test_where_tokens_come_slowly_is_the_second_choice() -> None:
    """Two others have a step of 20 ms each between two of its own, so 60 of the wanted 100 ms; GPU 1 is empty, and its
    copy takes a second. With one other, 40 ms, it stays.
    """
    node = Node(2, *"abc")
    node.there(0, *"abc")
    for name in "ab":
        assert gpu_of(node.ask(name)) == 0
        node.rests(name)
    assert gpu_of(node.ask("c")) == 1


def test_it_is_still_better_than_where_a_base_would_have_to_go() -> None:
    """Though its other tokens, of 200 s of work, come later there: each would have to wait for two others' steps."""
    node = Node(2, *"abc")
    node.core.functions["c"].work_s = 200.0
    node.there(0, *"abc")
    node.tell(ev.Evicted(1, 1, (), PoolStats(free_nbytes=5_000 * MB)))
    for name in "abc":
        assert gpu_of(node.ask(name)) == 0
        node.rests(name)


def test_how_long_a_runtime_takes_to_start_is_learned() -> None:
    """2.02 s to the first step, of which 0.02 are the prompt's; copies had come before. A fifth of the news counts."""
    node = Node(1, "a")
    node.ask("a")
    node.now_s += 2.02
    node.rests("a")
    assert node.core.functions["a"].start_s == pytest.approx(0.5 + 0.2 * 1.5)


def test_what_waited_for_its_copies_says_nothing_of_starts() -> None:
    node = Node(1, "a")
    wake = node.ask("a")
    assert wake is not None
    node.now_s += 1.9
    node.tell(ev.Woken(0, 1, wake.lease.serial, 1_900_000))
    node.now_s += 0.12
    node.rests("a")
    assert node.core.functions["a"].start_s == 0.5


def test_it_waits_for_a_busy_gpu_that_has_the_base() -> None:
    """The other has its first step there, 20 ms long, and may go on for half as long again."""
    node = Node(2, "a", "b")
    node.tell(ev.RuntimesOn(0, 1, ("a", "b")))
    node.there(0, "a", nbytes=BASE + ADAPTER)
    node.there(0, "b")
    assert gpu_of(node.ask("a")) == 0
    assert node.ask("b") is None
    (pause, wake) = node.tell(ev.TurnIdle(0, 1, node.leases["a"].lease.serial))
    assert isinstance(pause, ev.PauseOn)
    assert isinstance(wake, ev.WakeOn)
    assert wake.lease.gpu == 0
