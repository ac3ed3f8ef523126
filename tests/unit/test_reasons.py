"""Why a request waits, in words: a test for each reason."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.functions import LastEviction
from dormouse.core.decisions.scheduling.keeping import EVICTION_CLASSES
from dormouse.core.decisions.scheduling.reasons import OLDEST, Reasons, evicted
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.schemas.messages import Done, PoolStats, PromptsDue, StepsDue, StepTimes
from dormouse.schemas.policy import EVICTIONS, ORDERS, Policy

MB = 1_000_000
ROOM = PoolStats(free_nbytes=1000 * MB, largest_nbytes=1000 * MB)


@dataclass
class Node:
    """GPUs that hold one model each; a request takes 100 ms, and so does the copy of its model."""

    gpus: int = 1
    policy: Policy = field(default_factory=Policy)
    requests: int = 0

    def __post_init__(self) -> None:
        self.core = Scheduler(seed=1, revoke_s=5.0, max_waiting=9999, policy=self.policy)
        for gpu in range(self.gpus):
            self.core.handle(ev.ExecutorUp(gpu, 1, ROOM), 0.0)

    def ask(self, name: str, at_s: float = 0.0, deadline_s: float = 60.0) -> list[ev.Action]:
        if name not in self.core.models:
            self.core.handle(ev.InstanceKnown(name, name), at_s)
            self.core.handle(ev.ModelSized(name, 1, 1000 * MB), at_s)
            self.core.functions[name].measured(0.1, 0.0)
        self.requests += 1
        return self.core.handle(ev.Asked(self.requests, name, deadline_s, 1), at_s)

    def end(self, gpu: int, at_s: float) -> None:
        running = self.core.gpus[gpu].running
        assert running is not None
        done = Done(
            serial=running.lease.serial,
            outcome="ended",
            gpu_us=0,
            copied_nbytes=0,
            peer_nbytes=0,
            file_nbytes=0,
            resident=[(running.instance, 1000 * MB)],
            peak_activation_nbytes=0,
            version=1,
            stats=ROOM,
        )
        self.core.handle(ev.LeaseOver(gpu, 1, done), at_s)

    def told(self, now_s: float = 0.0) -> dict[str, Any]:
        return Reasons(self.core, now_s).told()

    def why(self, now_s: float = 0.0) -> list[tuple[str, str, str]]:
        return [(row["function"], row["kind"], row["reason"]) for row in self.told(now_s)["oldest"]]


def test_nothing_waits() -> None:
    node = Node()
    node.ask("a")
    assert node.told() == {"oldest": [], "others": {}}


def test_no_gpu() -> None:
    node = Node(gpus=0)
    node.ask("a")
    assert node.why() == [("a", "no_gpu", "no GPU's executor is up")]


def test_its_instance_serves_another() -> None:
    node = Node()
    node.ask("a")
    node.ask("a")
    assert node.why() == [("a", "instance", "its instance serves another request")]


def test_the_only_gpu_is_busy() -> None:
    node = Node()
    for name in "abcd":
        node.ask(name)
    busy = "the only GPU is busy for about 50 ms more"
    assert node.why(0.05) == [
        ("b", "busy", f"{busy}; it comes next"),
        ("c", "busy", f"{busy}; 1 request comes first"),
        ("d", "busy", f"{busy}; 2 requests come first"),
    ]
    assert node.why(0.12)[0][2] == "the only GPU is busy; it comes next"  # nobody knows for how long


def test_requests_are_counted_in_the_policys_order() -> None:
    asked = (("a", 9.0), ("b", 9.0), ("c", 9.0), ("d", 3.0), ("e", 6.0))
    node, by_arrival = Node(gpus=2), Node(gpus=2, policy=Policy(order="fifo"))
    for name, deadline_s in asked:
        node.ask(name, deadline_s=deadline_s)
        by_arrival.ask(name, deadline_s=deadline_s)
    busy = "all 2 GPUs are busy, the first for about 100 ms more"
    assert [(name, text) for name, _, text in node.why()] == [
        ("c", f"{busy}; 2 requests come first"),
        ("d", f"{busy}; it comes next"),
        ("e", f"{busy}; 1 request comes first"),
    ]
    turns = [text.partition("; ")[2] for *_, text in by_arrival.why()]
    assert turns == ["it comes next", "1 request comes first", "2 requests come first"]


def test_requests_whose_instance_is_busy_do_not_come_first() -> None:
    node = Node()
    for name in ("a", "a", "a", "b"):
        node.ask(name)
    (text,) = [text for name, _, text in node.why() if name == "b"]
    assert text.endswith("; it comes next")


def test_it_waits_for_the_gpu_that_has_its_model() -> None:
    """Model a is on the GPU where b runs now; the other GPU is free, but a copy would take longer."""
    node = Node(gpus=2)
    node.ask("b")
    (gpu,) = [number for number, gpu in node.core.gpus.items() if gpu.running is not None]
    running = node.core.gpus[gpu].running
    assert running is not None
    running.ends_s = 0.04
    node.core.handle(ev.InstanceKnown("a", "a"), 0.0)
    node.core.handle(ev.ModelSized("a", 1, 1000 * MB), 0.0)
    node.core.functions["a"].measured(0.1, 0.0)
    node.core.handle(ev.Evicted(gpu, 1, (("a", 1000 * MB),), ROOM), 0.0)
    node.ask("a")
    assert node.why() == [("a", "held", f"GPU {gpu} has its model and is expected to be free in 40 ms")]
    assert node.why(0.05) == [("a", "held", f"GPU {gpu} has its model and is expected to be free any moment")]


def wants_again(node: Node, name: str, at_s: float) -> None:
    """It has a seat without a turn, and commands."""
    (running,) = [running for running in node.core.gpus[0].leases.values() if running.instance == name]
    node.core.handle(ev.TurnWanted(0, 1, running.lease.serial), at_s)


def idles(node: Node, name: str, at_s: float) -> None:
    (running,) = [running for running in node.core.gpus[0].leases.values() if running.instance == name]
    node.core.handle(ev.TurnIdle(0, 1, running.lease.serial), at_s)


def test_it_waits_for_its_turn_again() -> None:
    """It counts among those that come first, and others of its instance still wait for it."""
    node = Node()
    node.ask("a")
    node.ask("b")
    idles(node, "a", 0.02)
    wants_again(node, "a", 0.03)
    node.ask("c", 0.04)
    node.ask("a", 0.05)
    again = "it has a seat on GPU 0 and waits for its turn again, which b has"
    assert node.why(0.06) == [
        ("a", "turn", f"{again} for about 60 ms more"),
        ("c", "busy", "the only GPU is busy for about 60 ms more; 1 request comes first"),
        ("a", "instance", "its instance serves another request"),
    ]
    assert node.why(5.0)[0][2] == again


def test_what_a_runtime_has_to_compute_may_wait_for_so_long() -> None:
    """A prompt of 100 tokens takes 50 ms, and has waited for 0.2 of a second; a token takes 20. Its model is not there:
    its copy takes 100 more.
    """
    node = Node()
    times = StepTimes(step_us=20_000.0, prompt_token_us=300.0, sequence_us=0.0)
    for name in "ab":
        node.ask(name)
        idles(node, name, 0.02)
    node.core.handle(ev.FunctionKnown("a", 1.0, 0.9, 1.0, "", "", 0.1, times), 0.02)
    (lease,) = [lease for lease in node.core.gpus[0].leases.values() if lease.instance == "a"]
    serial = lease.lease.serial
    node.core.handle(ev.TurnBusy(0, 1, next(each.lease.serial for each in node.core.gpus[0].turns)), 0.02)
    node.core.handle(ev.TurnWanted(0, 1, serial, StepsDue(prompts=[], decoding=2)), 0.03)
    assert node.why(0.04)[0][2].endswith("; its tokens can wait 70 ms more")
    prompts = [PromptsDue(serial=serial, tokens=100, waited_us=200_000)]
    node.core.handle(ev.TurnWanted(0, 1, serial, StepsDue(prompts=prompts, decoding=2)), 0.04)
    assert node.why(0.04)[0][2].endswith("; a first token can wait 650 ms more")
    assert node.why(1.04)[0][2].endswith("; a first token will be 350 ms late")


def test_it_waits_for_one_of_two_turns() -> None:
    node = Node(policy=Policy(turns=2))
    for name in "abc":
        node.ask(name)
    idles(node, "a", 0.02)
    wants_again(node, "a", 0.03)
    node.core.gpus[0].turns[0].ends_s = 0.02  # overdue by now; the other is not
    text = "it has a seat on GPU 0 and waits for its turn again: b, c have theirs, the first for about 80 ms more"
    assert node.why(0.04)[0][1:] == ("turn", text)
    node.ask("d", 0.04)
    assert node.why(0.04)[1][2].startswith("the only GPU is busy for about 80 ms more")


def test_a_turn_that_is_not_used_is_free() -> None:
    node = Node()
    node.ask("a")
    idles(node, "a", 0.02)
    assert Reasons(node.core, 0.03)._busy() == "requests before it wait for GPUs that are busy"


def test_late_already() -> None:
    node, by_arrival = Node(), Node(policy=Policy(order="fifo"))
    for each in (node, by_arrival):
        for name, deadline_s in (("a", 9.0), ("b", 0.05), ("c", 9.0)):
            each.ask(name, deadline_s=deadline_s)
    assert node.why() == [
        ("b", "late", "late already: those that can make their deadline come first"),
        ("c", "busy", "the only GPU is busy for about 100 ms more; it comes next"),
    ]
    assert [kind for _, kind, _ in by_arrival.why()] == ["busy", "busy"]


def test_given_up() -> None:
    node = Node()
    node.ask("a")
    node.ask("b")
    node.core.functions["b"].group = 1
    text = "too many of its function's requests were late: those of others come first"
    assert node.why() == [("b", "given_up", text)]
    node.core.functions["b"].given_up = True
    text = "links are too slow for all models, and its needs most: those of others come first"
    assert node.why() == [("b", "given_up", text)]


def impatient() -> Node:
    """Two GPUs, and a function that can wait for 50 ms: the 100 ms of a copy are long."""
    node = Node(gpus=2)
    node.ask("a")
    node.end(0, 0.1)
    function = node.core.functions["a"]
    function.deadline_s = 0.15
    function.ended(False, 0.1)
    assert not node.core._granting._rationing.update(2.0)
    return node


def test_rationed() -> None:
    """One of two that are given up is woken; the other waits until the next may be."""
    node = impatient()
    for name in ("c", "d"):
        node.core.handle(ev.InstanceKnown(name, name), 3.0)
        node.core.handle(ev.ModelSized(name, 1, 1000 * MB), 3.0)
        node.core.functions[name].given_up = True
    rationing = node.core._granting._rationing
    assert any(isinstance(action, ev.WakeOn) for action in node.ask("c", 4.0))
    assert node.ask("d", 4.0) == []
    text = "links are too slow for all models: those that need most, as its 954 MiB, wait"
    assert node.why(4.0) == [("d", "rationed", text)]
    node.core.check()
    assert node.core.next_deadline_s == rationing.next_s > 4.0
    woken = node.core.handle(ev.Tick(), rationing.next_s)
    assert [action.instance for action in woken if isinstance(action, ev.WakeOn)] == ["d"]


def test_all_gpus_but_one_have_long_wakes() -> None:
    node = impatient()
    for name in ("b", "c"):
        node.ask(name, 3.0)
    text = "all GPUs but one wait for long copies, and its own would be another; GPU 0 is expected to be free in 100 ms"
    assert node.why(3.0) == [("c", "held", text)]


def test_overdue() -> None:
    node = Node(policy=Policy(passed_over_ms=2000))
    node.ask("a")
    node.ask("b", deadline_s=1.0)
    assert node.why(1.99)[0][1] == "late"
    text = (
        "the only GPU is busy; it has waited for more than 2 s, and 10% of the GPUs' time is for those that have, "
        "oldest first"
    )
    assert node.why(2.0) == [("b", "overdue", text)]


def test_only_the_oldest_are_told_one_by_one() -> None:
    node = Node()
    for number in range(OLDEST + 31):
        node.ask(f"f{number}", at_s=0.001 * number)
    node.ask("f0", at_s=1.0)
    told = node.told(1.0)
    assert [row["function"] for row in told["oldest"]] == [f"f{number}" for number in range(1, OLDEST + 1)]
    assert told["others"] == {"busy": 30, "instance": 1}
    assert (told["oldest"][0]["waited_ms"], told["oldest"][0]["left_ms"]) == (999.0, 59000.0)


@given(st.sampled_from(ORDERS), st.lists(st.tuples(st.integers(0, 5), st.floats(0.0, 3.0)), max_size=40))
def test_it_changes_nothing_and_everyone_has_a_reason(order: str, asked: list[tuple[int, float]]) -> None:
    """Two schedulers hear the same; one is asked for reasons after every event."""
    node, silent = (Node(gpus=2, policy=Policy(order=order)) for _ in range(2))
    for turn, (who, within_s) in enumerate(asked):
        at_s = 0.05 * turn
        actions = [each.ask(f"f{who}", at_s, at_s + within_s) for each in (node, silent)]
        assert actions[0] == actions[1]
        told = node.told(at_s)
        assert len(told["oldest"]) + sum(told["others"].values()) == len(node.core.waiting)
        assert all(row["reason"] for row in told["oldest"])
        for gpu in (0, 1):
            if turn % 3 == 0 and node.core.gpus[gpu].running is not None:
                node.end(gpu, at_s)
                silent.end(gpu, at_s)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_every_eviction_policy_is_told_in_words(eviction: str) -> None:
    told = evicted(LastEviction(1, 2.0, 300, ""), eviction, 5.5)
    assert told == {"gpu": 1, "ago_s": 3.5, "nbytes": 300, "for": None, "rule": EVICTION_CLASSES[eviction].rule}
    assert evicted(None, eviction, 5.5) is None
