"""Simulated instances that come and go: of a language model, each with a runtime of its own, and of functions whose
requests come in batches. Exact outcomes.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from streams_world import MB, function, kinds, llm, made, run, watched

from dormouse.controller.simulator import extras
from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.main import simulation_of
from dormouse.controller.simulator.scenario import POLICIES, parse_scenario
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import Policy

Log = list[tuple[float, ev.Event, list[ev.Action]]]

BURST = [(0.0, 0), *[(1.0, 0)] * 8]
"""A stream that begins the first lease, then eight: one prompt alone in 0.12 s, others by 256 tokens in 0.276 s."""


def several(most: int = 2, load_s: float = 0.1, **settings: Any) -> ModelSpec:
    spec = llm()
    assert spec.llm is not None
    return replace(spec, llm=replace(spec.llm, **settings), max_instances=most, load_s=load_s)


def known(log: Log) -> list[tuple[float, str]]:
    """The instances that the core has heard of after the beginning, and when."""
    return [(round(at_s, 6), event.instance) for at_s, event, _ in log if isinstance(event, ev.InstanceKnown) if at_s]


def gone(log: Log) -> list[tuple[float, str]]:
    return [(round(at_s, 6), event.instance) for at_s, event, _ in log if isinstance(event, ev.InstanceLost)]


def wakes(log: Log) -> list[tuple[str, int]]:
    """Whom the core has given a lease, and on which GPU."""
    return [(each.instance, each.lease.gpu) for _, _, actions in log for each in actions if isinstance(each, ev.WakeOn)]


# --- language models


def test_first_tokens_that_are_late_have_a_second_runtime_and_their_share_moves_there() -> None:
    """At 1.5 s five have no token after half of their time. When the new instance has loaded, at 1.6 s, there are
    eight streams: the newest four go to it, three of which are in a step. The copy takes until 1.9 s, as the first
    256 tokens do; the others 0.164 s more.
    """
    log = watched(simulation := made([several()], gpus=2))
    _, streams = run(simulation, *BURST)
    assert known(log) == [(1.5, "f0.1")]
    assert wakes(log) == [("f0", 0), ("f0.1", 1)]
    assert streams.first_s.tolist() == pytest.approx([0.3, 0.12, 0.396, 0.396, 0.672, 0.9, 0.9, 1.064, 1.064])
    assert not np.isnan(streams.over_s).any()
    assert streams.preempted.tolist() == [0] * 9


def test_with_one_instance_they_wait_there() -> None:
    _, streams = run(made([several(1)], gpus=2), *BURST)
    assert streams.first_s.tolist() == pytest.approx([0.3, 0.12, *[0.396] * 2, *[0.672] * 3, 0.88, 0.88])


def test_who_stays_waits_for_one_step_of_a_prompt_that_goes() -> None:
    """7,000 tokens are computed before 100, which have more time, by 256 in 0.276 s from 1.12 s on. They go at 6.11 s,
    in the nineteenth of these steps.
    """
    spec = several(ttft_s=10.0, pairs=((100, 11), (100, 1), (100, 11), (7000, 11)), in_turn=True)
    log = watched(simulation := made([spec], gpus=2))
    _, streams = run(simulation, (0.0, 0), (1.0, 0), (1.01, 0), (1.02, 0))
    assert known(log) == [(6.01, "f0.1")]
    assert streams.first_s[2] == pytest.approx(1.12 + 19 * 0.276 + 0.12 - 1.01)


def test_who_comes_goes_to_the_instance_that_has_fewest() -> None:
    """Both have four at 1.7 s. The first one is at the next step's end at 1.712 s, and computes 200 tokens then; in
    the other one all wait for copies, and for those that came before.
    """
    simulation = made([several()], gpus=2)
    *_, streams = run(simulation, *BURST, *[(1.7, 0)] * 4)
    first_s = streams.first_s[9:].tolist()
    assert [first_s[0], first_s[2]] == pytest.approx([0.232, 0.232])
    assert min(first_s[1], first_s[3]) > 0.4


def test_further_tokens_that_are_late_have_a_second_runtime() -> None:
    """0.02 s for each, and 0.01 are wanted. A stream that is alone waits for nobody."""
    log = watched(simulation := made([several(tpot_s=0.01)], gpus=2))
    run(simulation, (0.0, 0), (1.0, 0), (2.0, 0), (2.01, 0))
    assert known(log) == [(2.01, "f0.1")]
    log = watched(simulation := made([several(tpot_s=0.03)], gpus=2))
    run(simulation, (0.0, 0), (1.0, 0), (2.0, 0), (2.01, 0))
    assert known(log) == []


def test_who_has_not_begun_since_its_lease_gets_no_other_one_beside_it() -> None:
    """The model takes 2 s to be there: another would be no sooner. Then first tokens are late again."""
    log = watched(simulation := made([several(seat_s=2.0)], gpus=2))
    run(simulation, *[(0.0, 0)] * 3)
    assert known(log) == [(2.276, "f0.1")]


@pytest.mark.parametrize(("gpus", "others", "comes"), [(1, 0, False), (2, 0, True), (2, 1, False), (3, 1, True)])
def test_another_one_needs_a_gpu_that_nobody_wants(gpus: int, others: int, comes: bool) -> None:
    """Another function computes from 0.9 to 9.9 s."""
    models = [several(), *[function(nbytes=100, run_s=9.0)] * others]
    log = watched(simulation := made(models, gpus=gpus))
    run(simulation, (0.0, 0), *[(0.9, 1 + number) for number in range(others)], *BURST[1:])
    assert [name for at_s, name in known(log) if at_s < 5.0] == ["f0.1"] * comes


def test_the_seat_of_a_model_without_requests_takes_no_gpu_from_others() -> None:
    log = watched(simulation := made([several(), replace(llm(), max_instances=1)], gpus=2))
    run(simulation, (0.0, 0), (0.4, 1), *BURST[1:])
    assert known(log) == [(1.5, "f0.1")]


def test_an_extra_ends_after_half_a_minute_and_its_bytes_are_there_for_the_next() -> None:
    """The base of the first burst is on both GPUs, and so is the second runtime's process; no byte comes again."""
    log = watched(simulation := made([several()], gpus=2))
    _, streams = run(simulation, *BURST, *[(60.0 + at_s, who) for at_s, who in BURST])
    last_s = 1.0 + float(max(streams.over_s[6:9]))
    assert gone(log)[0] == (round(last_s + extras.EXTRA_IDLE_S, 6), "f0.1")
    assert known(log) == [(1.5, "f0.1"), (61.5, "f0.1")]
    assert len(gone(log)) == 2
    assert simulation.host_nbytes == 2 * 300 * MB
    assert "f0.1" not in simulation.core.models


def test_an_extra_that_has_something_to_do_now_and_then_stays() -> None:
    log = watched(simulation := made([several()], gpus=2))
    run(simulation, *BURST, (25.0, 0), (25.01, 0), (50.0, 0), (50.01, 0))
    assert known(log) == [(1.5, "f0.1")]
    assert gone(log)[0][0] > 80.0


@pytest.mark.parametrize("group", ["", "chat"])
def test_the_process_of_a_runtime_ends_with_an_instance_that_has_it_alone(group: str) -> None:
    """With isolation = "function"; that of a tenant's functions stays."""
    spec = replace(several(adapter_nbytes=1 * MB, group=group), base="base", base_nbytes=299 * MB)
    simulation = made([spec], gpus=2)
    run(simulation, *BURST)
    assert ["f0.1" in gpu.contexts for gpu in simulation.gpus] == [False, bool(group)]
    assert simulation.core.gpus[1].runtimes == (("f0.1",) if group else ())


def test_functions_of_a_group_have_a_second_runtime_together() -> None:
    spec = replace(several(adapter_nbytes=1 * MB, group="g"), base="base", base_nbytes=299 * MB)
    log = watched(simulation := made([spec, replace(spec, max_instances=1)], gpus=2))
    _, streams = run(simulation, (0.0, 0), *[(1.0, number % 2) for number in range(8)])
    assert known(log) == [(1.5, "f0.1")]
    assert streams.first_s.tolist() == pytest.approx([0.301, 0.12, 0.396, 0.396, 0.672, 0.901, 0.901, 1.065, 1.065])
    assert simulation.core.models["f0"].nbytes == 301 * MB


def test_both_go_on_when_a_gpu_is_lost() -> None:
    simulation = made([several()], Fault(gpu=1, at_s=1.92, back_s=3.0), gpus=2)
    log = watched(simulation)
    _, streams = run(simulation, *BURST)
    assert wakes(log) == [("f0", 0), ("f0.1", 1), ("f0.1", 0)]
    assert not np.isnan(streams.over_s).any()


def test_a_run_ends_where_no_gpu_is_left() -> None:
    simulation = made([several()], Fault(gpu=0, at_s=1.7), Fault(gpu=1, at_s=1.7), gpus=2)
    _, streams = run(simulation, *BURST)
    assert np.isnan(streams.over_s).tolist() == [False] + [True] * 8


# --- batches


def batched(most: int = 2, deadline_s: float = 0.1, gpus: int = 2, load_s: float = 0.1, **more: Any) -> Simulation:
    spec = ModelSpec(
        name="m", nbytes=100 * MB, run_s=1.0, per_request_s=0.1, batch=2, max_instances=most, load_s=load_s, **more
    )
    return Simulation(Policy(), Topology(host_bps=1e9), gpus, 1000 * MB, [spec], [deadline_s], 0.9, 3)


def ask(simulation: Simulation, *times_s: float) -> list[float]:
    found: list[float] = simulation.run(np.array(times_s), np.zeros(len(times_s), dtype=np.int64)).tolist()
    return found


def batches(log: Log) -> list[tuple[str, int, int]]:
    """Instance, GPU, and how many were in it."""
    every = [each for _, _, actions in log for each in actions if isinstance(each, ev.WakeOn)]
    return [(each.instance, each.lease.gpu, each.requests) for each in every]


STORY = (0.0, 5.0, 5.1, 5.2, 5.3, 5.4)
"""One that tells how long they take; then one that runs, three beside it in its instance, and one that has no room."""


def test_who_has_no_room_in_an_instance_calls_for_another() -> None:
    """It starts at 5.4 s and serves at 5.5 s; the first one's batches end at 6, 7.1 and 8.1 s."""
    log = watched(simulation := batched())
    assert ask(simulation, *STORY) == pytest.approx([1.0, 1.0, 2.0, 1.9, 2.8, 1.1])
    assert known(log) == [(5.4, "f0.1")]
    assert batches(log) == [("f0", 0, 1), ("f0", 0, 1), ("f0.1", 1, 1), ("f0", 0, 2), ("f0", 0, 1)]
    assert gone(log) == [(36.5, "f0.1")]


def test_with_one_instance_it_waits_for_that() -> None:
    log = watched(simulation := batched(most=1))
    assert ask(simulation, *STORY) == pytest.approx([1.0, 1.0, 2.0, 1.9, 2.9, 2.8])
    assert batches(log) == [("f0", 0, 1), ("f0", 0, 1), ("f0", 0, 2), ("f0", 0, 2)]


@pytest.mark.parametrize("why", ["in time", "no GPU", "nobody knows yet"])
def test_no_other_one_starts_that_would_not_help(why: str) -> None:
    simulation = batched(deadline_s=2.0 if why == "in time" else 0.1, gpus=1 if why == "no GPU" else 2)
    log = watched(simulation)
    ask(simulation, *(STORY[1:] if why == "nobody knows yet" else STORY))
    assert known(log) == []


def test_a_request_goes_to_the_instance_that_has_fewest() -> None:
    """From 5.5 s on there are two, the second with one request, to the first one's four."""
    log = watched(simulation := batched())
    ask(simulation, *STORY, 5.6, 5.7, 5.8, 7.0)
    asked = [event for _, event, _ in log if isinstance(event, ev.Asked)]
    assert [each.instance for each in asked] == ["f0", "f0", "f0.1", "f0", "f0.1", "f0", "f0.1"]


def test_the_instances_of_a_function_find_its_bytes() -> None:
    """The first one has been on one GPU when the second comes."""
    log = watched(simulation := batched())
    ask(simulation, *STORY)
    told = [event for at_s, event, _ in log if isinstance(event, ev.Evicted) and at_s == pytest.approx(5.5)]
    assert [(each.gpu, each.resident) for each in told] == [(0, (("f0.1", 100 * MB),))]
    assert kinds(log, ev.ModelSized) == pytest.approx([5.5])


@pytest.mark.parametrize("idempotent", [False, True])
def test_a_gpu_that_is_lost_takes_the_batch_of_one_instance_with_it(idempotent: bool) -> None:
    spec = ModelSpec(
        name="m", nbytes=100 * MB, run_s=1.0, per_request_s=0.1, batch=2, max_instances=2, idempotent=idempotent
    )
    faults = (Fault(gpu=1, at_s=5.6, back_s=6.0),)
    simulation = Simulation(Policy(), Topology(host_bps=1e9), 2, 1000 * MB, [spec], [0.1], 0.9, 3, faults)
    watched(simulation)
    latencies_s = ask(simulation, *STORY)
    assert np.isfinite(latencies_s).tolist() == [True] * 5 + [idempotent]


# --- all together


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Simulation, list[tuple[float, int]], bool]:
    """Models and functions with batches, on few GPUs, which may be lost; and whether they come back."""
    gpus = draw(st.integers(1, 3))
    group = draw(st.sampled_from(["", "g"]))
    chat = several(
        draw(st.sampled_from([0, 2])), tpot_s=draw(st.sampled_from([0.01, 0.1])), ttft_s=0.3, kv_nbytes=10_000
    )
    assert chat.llm is not None
    adapted = replace(chat.llm, adapter_nbytes=1 * MB, group=group, idle_s=draw(st.sampled_from([0.5, 99.0])))
    adapter = replace(chat, base="base", base_nbytes=299 * MB, llm=adapted)
    rows = ModelSpec(
        name="rows", nbytes=300 * MB, run_s=8.0, per_request_s=0.5, batch=2, max_instances=draw(st.integers(0, 3)),
        load_s=0.05, idempotent=draw(st.booleans()),
    )  # fmt: skip
    models = [chat, adapter, replace(adapter, max_instances=1), rows, function(nbytes=200, run_s=0.3)]
    faults, back = [], True
    for gpu in range(gpus):
        if draw(st.integers(0, 3)) == 0:
            at_s = draw(st.floats(0.1, 30.0))
            back_s = draw(st.one_of(st.none(), st.floats(at_s + 0.1, 40.0)))
            faults.append(Fault(gpu=gpu, at_s=at_s, back_s=back_s))
            back = back and back_s is not None
    policy = Policy(preload=draw(st.booleans()), order=draw(st.sampled_from(["fifo", "effort"])))
    simulation = made(models, *sorted(faults, key=lambda fault: fault.at_s), policy=policy, gpus=gpus, mb=700)
    asked = []
    for begins_s in (0.0, 12.0, 200.0):
        when, who = st.floats(begins_s, begins_s + 4.0), st.integers(0, len(models) - 1)
        for at_s, number, count in draw(st.lists(st.tuples(when, who, st.integers(1, 9)), max_size=8)):
            asked += [(at_s, number)] * count
    return simulation, sorted(asked), back or len(faults) < gpus


@given(worlds())
@settings(max_examples=20, deadline=None)
def test_what_holds_whatever_is_asked_of_whom(world: tuple[Simulation, list[tuple[float, int]], bool]) -> None:
    """All that is answered was asked, extras end, and with them what is known of them; a GPU that is there at the end
    leaves nobody waiting.
    """
    simulation, asked, there = world
    log = watched(simulation)
    run(simulation, *asked)
    came, went = [name for _, name in known(log)], [name for _, name in gone(log)]
    models = set(simulation.core.models)
    assert all(came.count(name) - went.count(name) == (name in models) for name in came)
    assert models == set(simulation.gpus[0].residency.models.by_instance)
    if there:
        assert {name for name in models if "." in name} == set()
        assert not simulation.core.waiting


# --- scenarios


def tree(gpus: int = 2, **keys: Any) -> dict[str, Any]:
    model = {"name": "m", "size": "100MB", "run": "100ms", **keys}
    return {"gpus": {"count": gpus, "memory": "1GB"}, "arrivals": {"rate": 600, "minutes": 0.1}, "models": [model]}


LLM = {"kv": "1KB", "step": "20ms", "ttft": "1s", "tpot": "100ms", "prompt": 100, "output": 10}


def model(**keys: Any) -> ModelSpec:
    (found,) = parse_scenario(tree(**keys), "s.toml").models
    return found


def test_a_scenario_has_them() -> None:
    spec = model(batch=8, max_instances=4, load="300ms")
    assert (spec.max_instances, spec.load_s) == (4, 0.3)
    assert (model(batch=8).max_instances, model(batch=8).load_s) == (1, 0.0)
    streams = {"gpus": {"count": 3, "memory": "1GB"}, "arrivals": {"rate": 60, "minutes": 0.1}}
    chat = {"name": "chat", "size": "100MB", "llm": LLM, "max_instances": 0, "load": "1s"}
    scenario = parse_scenario({**streams, "models": [chat]}, "s.toml")
    assert (scenario.models[0].max_instances, scenario.models[0].load_s) == (0, 1.0)
    simulation = simulation_of(scenario, POLICIES["default"], 0)
    assert isinstance(simulation, Simulation)
    assert sorted(simulation.executors._specs) == ["f0", "f0.1", "f0.2"], "as many as GPUs"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"max_instances": 2}, "max_instances is 2; write instances: these come and go only with batch or"),
        ({"batch": 8, "max_instances": 65}, "max_instances is 65; write 1 to 64, or 0 for one for each GPU"),
        ({"batch": 8, "max_instances": -1}, "max_instances is -1; write 1 to 64"),
        ({"batch": 8, "load": "1s"}, "load is '1s'; write max_instances"),
        ({"batch": 8, "instances": 2}, "instances is 2; leave it out, or write max_instances"),
    ],
)
def test_instances_that_cannot_be_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_scenario(tree(**keys), "s.toml")
    assert f"s.toml: models[0].{said}" in str(refused.value)
