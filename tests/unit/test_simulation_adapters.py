"""Simulated functions with adapters over one base: what is shared, what a runtime costs, and what scenarios may say."""

import copy
from typing import Any

import msgspec
import pytest
from streams_world import COST, MB, kinds, made, run, watched

from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.simulator.main import simulate
from dormouse.controller.simulator.scenario import POLICIES, parse_scenario
from dormouse.controller.simulator.streams.model import Lengths, LlmSpec
from dormouse.core.decisions.scheduling import events as ev
from dormouse.schemas.errors import ConfigError


def adapted(group: str = "", prompt: int = 100, context_mb: int = 0, start_s: float = 0.0) -> ModelSpec:
    """300 MB of base and 50 of its own. A stream alone takes 0.12 s to its first token, 0.02 for each further one."""
    length = Lengths(mean=prompt, most=prompt), Lengths(mean=11, most=11)
    spec = LlmSpec(
        kv_nbytes=1000, cost=COST, ttft_s=1.0, tpot_s=0.1, prompt=length[0], output=length[1], idle_s=2.0,
        adapter_nbytes=50 * MB, group=group, context_nbytes=context_mb * MB, start_s=start_s,
    )  # fmt: skip
    return ModelSpec(
        name="chat", nbytes=350 * MB, base="base", base_nbytes=300 * MB, segment_nbytes=50 * MB, run_s=0.3, llm=spec
    )


def test_the_second_function_over_a_base_copies_its_adapter_alone() -> None:
    """At 1 GB/s: 0.35 s, then 0.05 s, which the prefill of 0.12 s hides."""
    simulation = made([adapted(), adapted()])
    _, streams = run(simulation, (0.0, 0), (1.0, 1))
    assert streams.first_s.tolist() == pytest.approx([0.35, 0.12])
    assert simulation.host_nbytes == (300 + 50 + 50) * MB
    assert {model.nbytes for model in simulation.core.models.values()} == {350 * MB}
    assert simulation.gpus[0].residency.occupied_nbytes == 400 * MB


def test_functions_of_a_group_have_one_runtime_and_one_batch() -> None:
    """The first computes its tokens from 1.12 s on, in steps of 0.02; the second comes in the midst of one, and its
    prompt is in the next, in which the first has a token, too.
    """
    simulation = made([adapted("t"), adapted("t")])
    log = watched(simulation)
    _, streams = run(simulation, (0.0, 0), (1.0, 0), (1.15, 1))
    assert streams.first_s.tolist() == pytest.approx([0.4, 0.12, 0.13])
    assert streams.over_s.tolist()[1] == pytest.approx(0.16 + 0.12 + 7 * 0.02)
    assert simulation.host_nbytes == 400 * MB
    assert len(kinds(log, ev.Asked)) == 1


def test_without_a_group_the_turn_goes_from_one_to_the_other() -> None:
    simulation = made([adapted(), adapted()])
    log = watched(simulation)
    run(simulation, (0.0, 0), (1.0, 0), (1.15, 1))
    assert len(kinds(log, ev.Asked)) == 2
    assert kinds(log, ev.TurnWanted)


def test_a_runtime_starts_once_on_a_gpu() -> None:
    """After the seat was left its process is there still."""
    _, streams = run(made([adapted(context_mb=100, start_s=1.0)]), (0.0, 0), (10.0, 0), (20.0, 0))
    assert streams.first_s.tolist() == pytest.approx([1.12, 0.12, 0.12])


def test_a_process_needs_room_and_ends_where_that_is_short() -> None:
    """In 600 MB are a base, two adapters and one context of 150: the other's process ends for it, and starts anew."""
    simulation = made([adapted(context_mb=150, start_s=1.0), adapted(context_mb=150, start_s=1.0)], mb=600)
    _, streams = run(simulation, (0.0, 0), (10.0, 0), (20.0, 1), (30.0, 1), (40.0, 0))
    assert streams.first_s.tolist() == pytest.approx([1.12, 0.12, 1.12, 0.12, 1.12])
    assert list(simulation.gpus[0].contexts) == ["f0"]
    assert simulation.gpus[0].stats.free_nbytes == (600 - 150 - 400) * MB


def test_what_a_lost_gpu_had_started_is_gone() -> None:
    fault = Fault(gpu=0, at_s=10.0, back_s=11.0)
    _, streams = run(made([adapted(context_mb=100, start_s=1.0)], fault), (0.0, 0), (20.0, 0))
    assert streams.first_s.tolist() == pytest.approx([1.12, 1.12])


# --- scenarios

LLM: dict[str, Any] = {
    "kv": "100KB", "step": "20ms", "per_prompt": "0.5ms", "prompt": 100, "output": 40, "ttft": "500ms",
    "tpot": "60ms", "adapter": "26MB",
}  # fmt: skip

TREE: dict[str, Any] = {
    "gpus": {"count": 1, "memory": "2GB", "link": "1GB"},
    "arrivals": {"process": "poisson", "rate": 20, "minutes": 2},
    "models": [
        {"name": "chat", "size": "300MB", "functions": 2, "llm": LLM},
        {"name": "math", "size": "300MB", "llm": {**LLM, "base": "chat", "output": 20}},
    ],
}


def tree(at: int = 1, **changes: Any) -> dict[str, Any]:
    changed = copy.deepcopy(TREE)
    changed["models"][at]["llm"] |= changes
    return changed


def test_functions_of_two_entries_share_a_base_and_a_runtime() -> None:
    scenario = parse_scenario(TREE, "x")
    assert [(m.nbytes, m.base, m.base_nbytes) for m in scenario.models] == [(326 * MB, "models[0]", 300 * MB)] * 3
    assert {m.llm.group for m in scenario.models if m.llm is not None} == {"/models[0]"}
    report = simulate(scenario, "default", POLICIES["default"], 1)
    assert [each.name for each in report.streams] == ["chat", "math"]
    assert sum(each.streams for each in report.streams) == report.requests


def test_isolation_and_tenants_part_runtimes() -> None:
    for changed, groups in (
        (tree(isolation="function"), {"/models[0]", ""}),
        (tree(tenant="b"), {"/models[0]", "b/models[0]"}),
    ):
        models = parse_scenario(changed, "x").models
        assert {m.llm.group for m in models if m.llm is not None} == groups


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (tree(base="nobody"), "models[1].llm.base is 'nobody'; write the name of another entry"),
        (tree(base="math"), "models[1].llm.base is 'math'; write the name of another entry"),
        (tree(at=0, base="math"), "models[0].llm.base is 'math'; write the name of another entry"),
        (tree(kv="50KB"), "models[1].llm.kv is '50KB'; write '100KB', as chat has"),
        (tree(isolation="none"), "models[1].llm.isolation is 'none'; write one of"),
        (tree(adapter=0), "models[1].llm.base is 'chat'; write llm.adapter"),
        (tree(at=0, adapter=0, tenant="a"), "models[0].llm.tenant is 'a'; write llm.adapter"),
        (tree(adapter="-1MB"), "models[1].llm.adapter"),
        (tree(context_memory="1.7GB"), "models[1].llm.kv"),
        (tree(at=0, adapter="850MB"), "gpus.memory is 2,000,000,000; chat's runtime, with the base, 3 adapters"),
        (tree(start="soon"), "models[1].llm.start is 'soon'"),
        (tree(at=1, step_tokens=1024), "models[1].llm.step_tokens is 1024; write 256, as chat has"),
    ],
)
def test_bad_values_are_named(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_scenario(changed, "x")
    assert says in str(refused.value)


def test_another_size_or_a_shared_part_is_refused() -> None:
    for key, value, says in (("size", "200MB", "models[1].size is '200MB'"), ("shared", 0.5, "models[1].shared is")):
        changed = tree()
        changed["models"][1][key] = value
        with pytest.raises(ConfigError) as refused:
            parse_scenario(changed, "x")
        assert says in str(refused.value)


def test_simulated_steps_have_their_budget_in_what_is_learned() -> None:
    """A prompt of 600 tokens in one step: 0.02 s, and 1 ms for each token."""
    alone = adapted(prompt=600)
    assert alone.llm is not None
    model = msgspec.structs.replace(alone, llm=msgspec.structs.replace(alone.llm, step_tokens=1024))
    log = watched(simulation := made([model]))
    _, streams = run(simulation, (0.0, 0), (3.0, 0))
    assert streams.first_s[1] == pytest.approx(0.62)
    assert {event.times.step_tokens for _, event, _ in log if isinstance(event, ev.StepsTimed)} == {1024}


def test_a_run_with_adapters_is_the_same_twice() -> None:
    scenario = parse_scenario(tree(isolation="function", context_memory="100MB", start="300ms"), "x")
    reports = [simulate(scenario, "default", POLICIES["default"], 1) for _ in range(2)]
    one, two = (msgspec.structs.astuple(report.streams[0]) for report in reports)
    assert one == two
    assert reports[0].streams[0].failed == 0
