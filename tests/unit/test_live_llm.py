"""What the comparisons of a live node with the simulator ask, tell the simulator, and count."""

import csv
import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.live_llm import Outcome, compare, simulated, specs, with_deadlines, world_of
from benchmarks.live_llm_fit import Base, Calibration
from benchmarks.live_llm_node import Asked, Heard, World, load, lone
from benchmarks.serverless_lora_live import scaled
from benchmarks.serverless_lora_live import world_of as two_backbones
from dormouse.controller.simulator.streams.cost import StepCost

MB = 1_000_000
COST = StepCost(fixed_s=0.02, per_sequence_s=0.001, per_prompt_s=0.001)


def calibration(world: World) -> Calibration:
    """A base of 270 MB, adapters of 1 MB."""
    return Calibration(
        bases={name: Base(cost=COST, factor=1.0, before_s=0.004) for name in world.bases.values()},
        runs_s=[(0.1,)] * world.functions,
        nbytes={each.name: (270 + (each.adapter is not None)) * MB for each in world.models}
        | {f"f{number}": 10 * MB for number in range(world.functions)},
        gpu_nbytes=2000 * MB,
    )


def worlds() -> dict[str, World]:
    return {isolation: world_of(Path("x"), 3, isolation) for isolation in ("tenant", "function")}


def test_a_base_and_its_adapters_share_bytes_and_with_tenant_a_runtime() -> None:
    for isolation, group in (("tenant", "chat"), ("function", "")):
        models = specs(worlds()[isolation], calibration(worlds()[isolation]), [])
        llms = [spec.llm for spec in models if spec.llm is not None]
        assert [llm.adapter_nbytes for llm in llms] == [0, MB, MB, MB]
        assert {llm.group for llm in llms} == {group}
        assert {(spec.base, spec.base_nbytes) for spec in models} == {("chat", 270 * MB)}


def test_streams_share_steps_with_tenant_and_take_turns_with_function() -> None:
    """Prompts of ten tokens: 0.004 s before the first step. It takes 0.03 s, and a step with three of them 0.05 s."""
    firsts = {}
    for isolation, world in worlds().items():
        asked = [Asked(1.0, model.name, 10, 1) for model in world.models]
        found = simulated(world, calibration(world), asked, 0)
        assert found.names == [each.name for each in asked]
        firsts[isolation] = sorted(found.first_s.tolist())
    assert firsts["tenant"] == pytest.approx([0.034, 0.084, 0.084, 0.084])
    assert firsts["function"] == pytest.approx([0.034, 0.064, 0.094, 0.124])


def test_without_adapters_there_are_functions_and_a_model_that_shares_nothing() -> None:
    world = world_of(Path("x"), 0, "tenant")
    *functions, chat = specs(world, calibration(world), [])
    assert [spec.name for spec in functions] == ["f0", "f1", "f2", "f3"]
    assert (chat.base_nbytes, chat.nbytes) == (0, 270 * MB)
    asked = load(world, 7, 100.0, 0.5, 1.0)
    assert {each.name for each in asked if not each.prompt} == {"f0", "f1", "f2", "f3"}
    found = simulated(world, calibration(world), asked, 0)
    assert len(found.first_s) == sum(each.prompt > 0 for each in asked)


def test_more_adapters_than_there_are_is_refused() -> None:
    with pytest.raises(SystemExit, match="--adapters is 99"):
        world_of(Path("x"), 99, "tenant")


def test_every_model_is_asked_and_each_length_alone() -> None:
    world = worlds()["tenant"]
    names = {each.name for each in world.models}
    assert {each.name for each in load(world, 7, 100.0, 1.0, 1.0)} == names
    assert {(each.name, each.prompt) for each in lone(world)} == {(name, n) for name in names for n in (16, 200, 60)}


def stream(name: str, first_s: float, tpot_s: float) -> Heard:
    return Heard(name, 0.0, 10, 3, [first_s, first_s + tpot_s, first_s + 2 * tpot_s], True)


def test_deadlines_are_times_of_lone_streams_and_late_is_what_misses_one() -> None:
    world = worlds()["tenant"]
    world = replace(world, models=world.models[:2])
    names = [model.name for model in world.models]
    world = with_deadlines(world, [stream(name, 0.1, 0.02) for name in names], (2.0, 3.0), (1.5,))
    assert [model.ttft_s for model in world.models] == pytest.approx([0.2, 0.3])
    assert [model.tpot_s for model in world.models] == pytest.approx([0.03, 0.03])
    outcome = Outcome(names * 2, np.array([0.25, 0.25, 0.1, np.inf]), np.array([0.02, 0.02, 0.04, np.inf]))
    found = outcome.figures(world)
    assert (found["late_ttft"], found["late_tpot"], found["late"]) == (0.5, 0.5, 0.75)
    assert found["ttft_p50_ms"] == pytest.approx(250)


def test_goals_are_of_ratios_and_of_points() -> None:
    world = with_deadlines(worlds()["tenant"], [stream("chat", 0.1, 0.02)], (2.0,), (2.0,))
    live = Outcome(["chat"] * 100, np.linspace(0.1, 0.3, 100), np.full(100, 0.02))
    near = Outcome(["chat"] * 100, live.first_s * 1.01, live.tpot_s)
    far = Outcome(["chat"] * 100, live.first_s * 1.3, live.tpot_s)
    keys = ("ttft_p50_ms", "tpot_p50_ms", "late_ttft")
    assert [goal.met for goal in compare("", world, live, [near], keys)[0]] == [True, True, True]
    assert [goal.met for goal in compare("", world, live, [far], keys)[0]] == [False, True, False]


def test_a_class_of_arrivals_is_scaled_down_to_the_wanted_rate(tmp_path: Path) -> None:
    """Its bursts stay where they are: all arrivals are in the first tenth here."""
    with gzip.open(tmp_path / "azure_func2019_3x8_4h_arrivals.csv.gz", "wt", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["class", "idx", "func", "window", "t_s"])
        rows.writerows(["Bursty", number % 8, "x", 0, number * 1.44] for number in range(1000))
    world = two_backbones(Path("x"), 1)
    asked = scaled(tmp_path, "Bursty", world, ((60, 40), (100_000, 40)), 0.5, 120.0, 7)
    assert len(asked) == 60
    assert max(each.at_s for each in asked) <= 12.0
    assert {(each.prompt, each.output) for each in asked} == {(60, 40)}
    adapters = {model.name for model in world.models if model.adapter is not None}
    assert {each.name for each in asked} == adapters
    assert len(adapters) == 8
    assert [world.bases[name] for name in sorted(adapters)] == ["bfloat16"] * 4 + ["float32"] * 4
