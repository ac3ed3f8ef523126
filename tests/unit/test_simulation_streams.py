"""Simulated language models behind the scheduling core: seats, turns between steps, KV, and lost GPUs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from streams_world import MB, function, kinds, llm, made, run, watched

from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.simulator.streams import model as simulated
from dormouse.core.decisions.leases import reclaim
from dormouse.core.decisions.requests import state as real_router
from dormouse.core.decisions.scheduling import events as ev
from dormouse.gpuserver.runtime import extents as real_extents
from dormouse.schemas.policy import Policy

NAN = float("nan")


def test_it_has_the_numbers_of_real_instances_and_runtimes() -> None:
    assert simulated.IDLE_S == reclaim.REST_S
    assert simulated.MAX_OPEN == real_router.MAX_OPEN
    assert (simulated.EXTENT_NBYTES, simulated.EXTENTS) == (real_extents.EXTENT_NBYTES, real_extents.EXTENTS)


# --- one model


def test_copy_and_prefill_are_beside_each_other() -> None:
    """The copy takes 0.3 s and the prefill 0.12; then 10 steps of 0.02."""
    latencies, streams = run(made([llm()]), (0.0, 0))
    assert latencies == streams.first_s.tolist() == pytest.approx([0.3])
    assert streams.over_s.tolist() == pytest.approx([0.5])


def test_a_long_prefill_hides_the_copy() -> None:
    _, streams = run(made([llm(prompt=250, nbytes=200)]), (0.0, 0))
    assert streams.first_s.tolist() == pytest.approx([0.27])


def test_a_new_seat_takes_its_time_beside_the_copy() -> None:
    _, streams = run(made([llm(seat_s=0.25)]), (0.0, 0), (1.0, 0), (8.0, 0))
    assert streams.first_s.tolist() == pytest.approx([0.37, 0.12, 0.37])


def test_who_joins_waits_for_the_step_under_way_and_shares_the_next() -> None:
    """The first stream's steps end at 0.12, 0.14, 0.16; the second comes at 0.15, and its prefill is until 0.28. In
    that step the first one has a token, too.
    """
    _, streams = run(made([llm()], mb=1000), (0.0, 0), (5.0, 0), (5.15, 0))
    assert streams.first_s.tolist() == pytest.approx([0.3, 0.12, 0.13])
    assert streams.over_s.tolist()[1] == pytest.approx(0.16 + 0.12 + 7 * 0.02)


def test_an_idle_seat_is_left_and_the_weights_stay() -> None:
    simulation = made([llm()])
    log = watched(simulation)
    _, streams = run(simulation, (0.0, 0), (4.0, 0))
    assert streams.first_s.tolist() == pytest.approx([0.3, 0.12])
    assert kinds(log, ev.LeaseOver) == pytest.approx([0.5 + 2.0, 4.32 + 2.0])
    dones = [event.done for _, event, _ in log if isinstance(event, ev.LeaseOver)]
    assert [done.copied_nbytes for done in dones] == [300 * MB, 0]
    assert [done.gpu_us for done in dones] == pytest.approx([320_000, 320_000])
    assert dones[1].stats.free_nbytes == 700 * MB  # KV is gone


def test_a_stream_in_time_keeps_the_seat() -> None:
    simulation = made([llm()])
    log = watched(simulation)
    run(simulation, (0.0, 0), (2.4, 0), (4.6, 0))
    assert kinds(log, ev.LeaseOver) == pytest.approx([4.6 + 0.32 + 2.0])


def test_more_than_an_instance_has_at_once_wait() -> None:
    count = simulated.MAX_OPEN + 3
    simulation = made([llm(prompt=1, output=2)])
    _, streams = run(simulation, *[(0.0, 0)] * count)
    assert not np.isnan(streams.over_s).any()
    # of 128 sequences at once, each has a prompt's step and one more
    assert streams.first_s[-1] > streams.first_s[127]


# --- beside functions


def test_a_function_waits_for_two_steps_at_most() -> None:
    """The stream's steps are 0.02; the function comes while one is under way, and the turn is back after it."""
    simulation = made([llm(output=200), function()])
    log = watched(simulation)
    latencies, streams = run(simulation, (0.0, 1), (1.0, 0), (3.015, 1), (3.9, 1))
    assert 0.1 <= latencies[2] <= 0.1 + 0.04
    assert 0.1 <= latencies[3] <= 0.1 + 0.04
    assert streams.over_s.tolist()[1] == pytest.approx(0.3 + 199 * 0.02 + 0.2)
    assert len(kinds(log, ev.TurnWanted)) == 2
    assert kinds(log, ev.TurnIdle)  # was said after the first step


def test_a_turn_is_not_lost_in_the_middle_of_a_step() -> None:
    """A prompt of 250 tokens is a step of 0.27 s."""
    simulation = made([llm(prompt=250, output=2), function()])
    latencies, streams = run(simulation, (0.0, 0), (1.0, 1), (20.0, 0), (20.1, 1))
    assert streams.first_s.tolist()[2] == pytest.approx(0.27)
    assert latencies[3] == pytest.approx(0.17 + 0.1)
    assert streams.over_s.tolist()[2] == pytest.approx(0.27 + 0.1 + 0.02)


def test_steps_are_brief_for_a_while_after_a_function() -> None:
    """Of a prompt of 100 tokens they take 16 as long as nobody knows what steps cost; before the function, all."""
    simulation = made([llm(), function()])
    _, streams = run(simulation, (0.0, 0), (5.0, 1), (15.04, 0), (30.0, 0))
    assert streams.first_s.tolist()[0] == pytest.approx(0.3 + 0.12 - 0.12)  # beside its copies
    assert streams.first_s.tolist()[2:] == pytest.approx([0.12 + 6 * 0.02, 0.12])


def test_a_turn_in_a_seat_that_it_has_costs_what_was_said() -> None:
    """Each of two has 11 steps, and a change before each but the first of the one that still has the turn."""
    found = []
    for turn_s in (0.0, 0.005):
        each = llm()
        assert each.llm is not None
        each = replace(each, llm=replace(each.llm, turn_s=turn_s, idle_s=60.0))
        simulation = made([each, each])
        _, streams = run(simulation, (0.0, 0), (3.0, 1), (10.0, 0), (10.0, 1))
        found.append(streams)
    before, after = found
    assert (after.first_s - before.first_s)[2:] == pytest.approx([0.005, 0.0])
    assert (after.over_s - before.over_s)[2:] == pytest.approx([21 * 0.005, 20 * 0.005])


def test_an_idle_runtime_costs_a_function_nothing() -> None:
    latencies, _ = run(made([llm(), function()]), (0.0, 1), (1.0, 0), (2.0, 1))
    assert latencies[2] == pytest.approx(0.1)


def test_two_language_models_take_turns_of_steps() -> None:
    simulation = made([llm(output=51), llm(output=51)])
    _, streams = run(simulation, (0.0, 0), (3.0, 1), (10.0, 0), (10.0, 1))
    alone_s = 0.12 + 50 * 0.02
    assert streams.over_s[2] > 1.5 * alone_s
    assert streams.over_s[3] == pytest.approx(2 * alone_s, rel=0.05)


def test_two_turns_share_the_time() -> None:
    simulation = made([llm(output=51), llm(output=51)], policy=Policy(order="fifo", turns=2))
    _, streams = run(simulation, (0.0, 0), (3.0, 1), (10.0, 0), (10.0, 1))
    alone_s = 0.12 + 50 * 0.02
    assert streams.over_s[2:].tolist() == pytest.approx([2 * alone_s] * 2)


# --- memory


def test_a_seat_without_a_turn_is_left_for_who_needs_the_room() -> None:
    """The function needs 800 of 1000 MB: the weights and the KV go, and the stream begins again when it has run."""
    simulation = made([llm(output=200), function(800)])
    log = watched(simulation)
    latencies, streams = run(simulation, (0.0, 0), (1.01, 1))
    assert latencies[1] == pytest.approx(0.8 + 0.01, abs=0.02)
    assert streams.preempted.tolist() == [1, 0]
    assert simulation.host_nbytes > (300 + 800) * MB
    # 0.3 and 35 steps; the function; what is missing is copied beside the prefill of 136 tokens, then 163 steps
    assert streams.over_s[0] == pytest.approx(1.0 + 0.02 + 0.8 + 0.156 + 0.02 * 163, abs=0.2)
    assert len(kinds(log, ev.TurnWanted)) == 1


def test_kv_takes_the_place_of_idle_models() -> None:
    """A token has 1 MB: the stream of 311 needs more than the 200 MB that are free."""
    simulation = made([llm(output=211, kv=MB), function(500)])
    log = watched(simulation)
    _, streams = run(simulation, (0.0, 1), (2.0, 0))
    assert streams.over_s[1] == pytest.approx(0.3 + 210 * 0.02)
    assert kinds(log, ev.Evicted)
    assert simulation.gpus[0].residency.resident_nbytes("f1") < 500 * MB


def test_no_seat_is_left_for_kv_that_is_only_wished() -> None:
    """A token has 1 MB, a block 16. A prompt of 20 needs two blocks and four are asked for: the second model has 36 MB
    free. The first one's next stream finds its seat as it was: a new one would take 0.25 s.
    """
    model = llm(prompt=20, kv=MB, seat_s=0.25)
    _, streams = run(made([model, model], mb=700), (0.0, 0), (1.0, 1), (2.0, 0))
    assert streams.first_s.tolist() == pytest.approx([0.3, 0.3, 0.04])


@pytest.mark.parametrize(("offload", "left"), [("ahead", 0), ("asked", 1), ("never", 7)])
def test_kv_takes_the_place_of_idle_models_ahead_of_its_growth_or_never(offload: str, left: int) -> None:
    """200 MB are free for two streams of 311 tokens of 1 MB, of which the second is preempted, if no more is to be had
    than one needs. A block has 16 tokens, and 4 blocks are asked for.
    """
    simulation = made([llm(output=211, kv=MB), function(500)], policy=Policy(order="fifo", offload=offload))
    _, streams = run(simulation, (0.0, 1), (2.0, 0), (2.0, 0))
    assert not np.isnan(streams.over_s[1:]).any()
    assert streams.preempted.tolist() == [0, 0, int(offload == "never")]
    assert simulation.gpus[0].residency.resident_nbytes("f1") == left * 50 * MB


def test_short_kv_preempts_and_all_streams_end() -> None:
    """700 MB for KV, of 1 MB a token; three streams of 311."""
    simulation = made([llm(output=211, kv=MB)])
    log = watched(simulation)
    _, streams = run(simulation, (0.0, 0), (0.0, 0), (0.0, 0))
    assert streams.preempted.tolist() == [0, 0, 1]
    assert not np.isnan(streams.over_s).any()
    assert log[-1][1].done.stats.free_nbytes == 700 * MB  # type: ignore[union-attr]


def test_a_stream_that_never_fits_fails_and_others_do_not() -> None:
    """800 MB and a token of 8 MB: 25 tokens."""
    simulation = made([llm(prompt=30, output=2, nbytes=800, kv=8 * MB), llm()])
    _, streams = run(simulation, (0.0, 0), (0.5, 0), (1.0, 1))
    assert streams.over_s.tolist() == pytest.approx([NAN, NAN, 0.5], nan_ok=True)


def test_a_model_that_no_gpu_holds_is_refused() -> None:
    _, streams = run(made([llm(nbytes=1200)]), (0.0, 0), (0.5, 0))
    assert np.isnan(streams.first_s).all()


# --- lost GPUs


def test_streams_go_on_elsewhere_from_where_they_were() -> None:
    """Lost at 0.35, 2 tokens after the first: the prefill of 103 tokens is shorter than the copy of 0.3."""
    simulation = made([llm()], Fault(gpu=0, at_s=0.35), gpus=2)
    _, streams = run(simulation, (0.0, 0))
    assert streams.first_s.tolist() == pytest.approx([0.3])
    assert streams.over_s.tolist() == pytest.approx([0.35 + 0.3 + 7 * 0.02])
    assert streams.preempted.tolist() == [0]


def test_a_second_loss_ends_them() -> None:
    faults = Fault(gpu=0, at_s=0.35), Fault(gpu=1, at_s=0.8)
    _, streams = run(made([llm(output=100)], *faults, gpus=3), (0.0, 0), (0.5, 0))
    assert np.isnan(streams.over_s[0])
    assert streams.over_s[1] > 0.3  # it has lost one


# --- whatever comes


REQUESTS = st.lists(st.tuples(st.floats(0.0, 1.5), st.integers(0, 4)), min_size=1, max_size=25)


@settings(max_examples=25, deadline=None)
@given(REQUESTS, st.integers(650, 1400), st.integers(1, 2), st.integers(1, 2), st.sampled_from([1000, 400_000]))
def test_every_stream_ends_and_all_books_agree(
    requests: list[tuple[float, int]], mb: int, gpus: int, turns: int, kv: int
) -> None:
    host = ModelSpec(name="h", nbytes=100 * MB, run_s=0.05, host_s=0.2, segment_nbytes=50 * MB)
    models = [llm(kv=kv), function(), llm(prompt=300, output=60, nbytes=350, kv=kv), function(600, 0.3), host]
    mb += 600 * (turns - 1)  # two that compute make no room for each other
    simulation = made(models, policy=Policy(turns=turns), gpus=gpus, mb=mb)
    log = watched(simulation)
    at_s, asked = 0.0, []
    for gap_s, who in requests:
        at_s += gap_s
        asked.append((at_s, who))
    latencies, streams = run(simulation, *asked)
    assert not np.isnan(latencies).any()
    streamed = streams.output > 0
    assert not np.isnan(streams.over_s[streamed]).any()
    assert (streams.over_s[streamed] >= streams.first_s[streamed] + (streams.output[streamed] - 1) * 0.02 - 1e-9).all()
    assert all(not gpu.leases and not gpu.blocked for gpu in simulation.gpus)
    assert all(gpu.residency.seats.none for gpu in simulation.gpus)
    assert all(segment >= 0 for gpu in simulation.gpus for segment in gpu.residency.pool.segments())  # no KV
    assert sum(isinstance(event, ev.LeaseOver) for _, event, _ in log) == sum(
        isinstance(action, ev.WakeOn) for _, _, actions in log for action in actions
    )
