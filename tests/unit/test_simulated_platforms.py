"""What serverless platforms do that a node does not: closed batches, several instances of a function, instances that
end with all that they had, and GPUs that serve nobody while something is brought there. Exact outcomes.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from streams_world import COST, MB, llm, made, run, watched

from dormouse.controller.simulator.baselines import SimulatedPolicy, checked_baseline
from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.simulator.streams.batch import StreamBatch
from dormouse.controller.simulator.streams.stream import Stream
from dormouse.core.decisions.scheduling import events as ev
from dormouse.schemas.errors import ConfigError


def served(**settings: Any) -> ModelSpec:
    """A stream alone takes 0.12 s to its first token, and 0.02 s for each of ten more. Its copy takes 0.3 s."""
    spec = llm()
    assert spec.llm is not None
    return replace(spec, llm=replace(spec.llm, **settings))


def release(**settings: Any) -> SimulatedPolicy:
    return checked_baseline(SimulatedPolicy(order="fifo", release=True, **settings), "x")


# --- closed batches


def test_who_comes_while_a_closed_batch_runs_waits_for_its_end() -> None:
    """Asked at 5.05 s, as the first prompt is computed: after 5.32 s, when the first is over, 0.12 s more."""
    asked = (0.0, 0), (5.0, 0), (5.05, 0)
    _, streams = run(made([served(closed=True)]), *asked)
    assert streams.first_s.tolist()[1:] == pytest.approx([0.12, 0.27 + 0.12])
    _, streams = run(made([served()]), *asked)
    assert streams.first_s.tolist()[1:] == pytest.approx([0.12, 0.07 + 0.12])


def test_a_closed_batch_has_all_that_waited_when_it_began_and_no_more_than_fit() -> None:
    """Two wait for the first to be over, of three; their 200 tokens are one step of 0.22 s."""
    asked = (0.0, 0), (5.0, 0), (5.05, 0), (5.06, 0), (5.07, 0)
    _, streams = run(made([served(closed=True, sequences=2)]), *asked)
    begins_s = 5.32
    second_s = begins_s + 0.22
    assert streams.first_s[2:4].tolist() == pytest.approx([second_s - 5.05, second_s - 5.06])
    assert streams.first_s[4] == pytest.approx(second_s + 10 * 0.02 + 0.12 - 5.07)


@dataclass
class Fed:
    """A closed batch of at most ``most``, which joins at the given steps."""

    most: int
    batch: StreamBatch = field(init=False)

    def __post_init__(self) -> None:
        self.batch = StreamBatch(COST, sequences=self.most, closed=True)
        self.batch.blocks = 1 << 20


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 600), st.integers(1, 9)), max_size=12), st.integers(1, 4))
@settings(max_examples=60)
def test_nobody_joins_a_closed_batch_that_has_begun(asked: list[tuple[int, int, int]], most: int) -> None:
    """Each is (steps since the one before, prompt, output). Between two beginnings nobody is added to the first."""
    fed, over, members = Fed(most), 0, set[int]()
    pending = [Stream(number, prompt, output) for number, (_, prompt, output) in enumerate(asked)]
    gaps = [gap for gap, _, _ in asked]
    while over < len(asked):
        while pending and gaps[len(asked) - len(pending)] <= 0:
            fed.batch.add(pending.pop(0))
        if pending:
            gaps[len(asked) - len(pending)] -= 1
        waiting = {stream.number for stream in list(fed.batch.waiting)[:most]}
        if not fed.batch.running:
            members = waiting
        if fed.batch.plan(lambda blocks, gently: False) is None:
            assert not fed.batch.count
            continue
        running = {each.number for each in (*fed.batch._prefilling, *fed.batch._decoding.values())}
        assert running <= members
        over += len(fed.batch.advance(1).over)
        fed.batch.check()


# --- several instances


def test_a_second_instance_starts_for_who_finds_the_first_busy() -> None:
    """It is on another GPU, with a copy of its own: 0.3 s. Later, both are there."""
    family = [served(closed=True, sequences=1, family="chat", idle_s=99.0)] * 2
    simulation = made(family, gpus=2)
    _, streams = run(simulation, (0.0, 0), (5.0, 0), (5.01, 0), (9.0, 0), (9.01, 0))
    assert streams.first_s.tolist() == pytest.approx([0.3, 0.12, 0.3, 0.12, 0.12])
    assert simulation.host_nbytes == 600 * MB


def test_who_finds_an_instance_that_starts_goes_with_its_first_batch() -> None:
    family = [served(closed=True, sequences=2, family="chat", idle_s=99.0, start_s=1.0)] * 2
    log = watched(simulation := made(family, gpus=2))
    _, streams = run(simulation, (0.0, 0), (0.5, 0), (0.6, 0))
    assert streams.first_s.tolist() == pytest.approx([1.22, 0.72, 1.12])
    wakes = [action.instance for _, _, actions in log for action in actions if isinstance(action, ev.WakeOn)]
    assert wakes == ["f0", "f1"]


def test_without_a_free_instance_the_shortest_line_is_taken() -> None:
    family = [served(closed=True, sequences=1, family="chat", idle_s=99.0)] * 2
    _, streams = run(made(family, gpus=2), (0.0, 0), (0.01, 0), (0.02, 0), (0.03, 0))
    assert streams.first_s[2:].tolist() == pytest.approx([0.5 + 0.12 - 0.02, 0.51 + 0.12 - 0.03])


def test_an_instance_that_is_there_comes_before_one_that_has_ended() -> None:
    """The first has its last answer at 0.5 s and ends at 2.5, the second at 2.8."""
    family = [served(closed=True, sequences=1, family="chat")] * 2
    _, streams = run(made(family, gpus=2, policy=release()), (0.0, 0), (0.3, 0), (2.6, 0))
    assert streams.first_s.tolist() == pytest.approx([0.3, 0.3, 0.12])


# --- instances that end


def test_an_instance_that_ends_leaves_nothing() -> None:
    """It starts anew and copies anew after 2 s without a request; not after one second."""
    simulation = made([served(start_s=1.0)], policy=release())
    _, streams = run(simulation, (0.0, 0), (2.0, 0), (9.0, 0))
    assert streams.first_s.tolist() == pytest.approx([1.12, 0.12, 1.12])
    assert simulation.host_nbytes == 600 * MB
    assert simulation.gpus[0].residency.occupied_nbytes == 0
    _, streams = run(made([served(start_s=1.0)]), (0.0, 0), (2.0, 0), (9.0, 0))
    assert streams.first_s.tolist() == pytest.approx([1.12, 0.12, 0.12])


def test_the_core_knows_that_an_instance_has_ended() -> None:
    """Else it would believe in a warm runtime, and place by that."""
    simulation = made([served(), served()], policy=release())
    log = watched(simulation)
    run(simulation, (0.0, 0), (9.0, 1))
    told = [event.runtimes for at_s, event, _ in log if isinstance(event, ev.RuntimesOn) and at_s < 9.0]
    assert [len(runtimes) for runtimes in told] == [1, 0], "before the next one comes"


def test_a_backbone_stays_while_another_instance_has_a_seat() -> None:
    """The second function asks until 9 s, so the base of 250 MB stays, and 50 MB come for the first again."""
    spec = replace(served(), base="base", base_nbytes=250 * MB)
    simulation = made([spec, spec], policy=release())
    run(simulation, (0.0, 0), *[(1.0 + second, 1) for second in range(9)], (9.5, 0))
    assert simulation.host_nbytes == (300 + 50 + 50) * MB


# --- what is brought ahead and holds the GPU


@pytest.mark.parametrize("holds", [False, True])
def test_where_a_model_is_brought_nobody_computes_until_it_is_there(holds: bool) -> None:
    """A GPU is lost, and back: the first model is brought again, for 0.3 s, when the second is asked for."""
    policy = checked_baseline(SimulatedPolicy(order="fifo", preload=True, preload_holds=holds), "x")
    simulation = made([served(), served()], Fault(gpu=0, at_s=5.0, back_s=6.0), policy=policy)
    log = watched(simulation)
    _, streams = run(simulation, (0.0, 0), (6.2, 1))
    (began_s,) = [at_s for at_s, _, actions in log if any(isinstance(each, ev.PreloadOn) for each in actions)][:1]
    (over_s, over) = next((at_s, event) for at_s, event, _ in log if isinstance(event, ev.PreloadOver))
    assert began_s < 6.2 < began_s + 0.3
    assert over.outcome == ("there" if holds else "yielded")
    assert over_s == pytest.approx(began_s + 0.3 if holds else 6.2)
    assert streams.first_s[1] == pytest.approx(over_s - 6.2 + 0.3)


def test_a_seat_on_a_gpu_that_is_held_computes_when_what_was_brought_is_there() -> None:
    """The second has a seat and nothing to do when the first is brought beside it; then it is asked once more."""
    policy = checked_baseline(SimulatedPolicy(order="fifo", preload=True, preload_holds=True), "x")
    simulation = made([served(), served(idle_s=99.0)], Fault(gpu=0, at_s=5.0, back_s=6.0), policy=policy)
    log = watched(simulation)
    _, streams = run(simulation, (0.0, 0), (6.01, 1), (7.5, 1))
    begun = [at_s for at_s, _, actions in log if any(isinstance(each, ev.PreloadOn) for each in actions)]
    ends = [at_s for at_s, event, _ in log if isinstance(event, ev.PreloadOver)]
    assert begun[-1] < 7.5 < ends[-1] == pytest.approx(begun[-1] + 0.3)
    assert streams.first_s[2] == pytest.approx(ends[-1] - 7.5 + 0.12)


def test_holding_needs_preloading() -> None:
    with pytest.raises(ConfigError, match="preload_holds is true; write preload = true"):
        checked_baseline(SimulatedPolicy(preload_holds=True), "x")
