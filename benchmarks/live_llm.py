"""A real node with language models beside the simulator: the same streams, and requests to ordinary functions.

``python -m benchmarks.live --llm``. One emulated GPU has SmolLM2 and four functions; or, with ``--adapters N``, SmolLM2
and N adapters over it (examples/adapters), which are all asked at once, with deadlines that some of their streams miss.
Prompts and outputs have random lengths, and arrive at random times. The coefficients of decode steps are of an engine
in this process (benchmarks/llm_fit.py), before and after all nodes. All else that the simulator knows was measured on
other nodes, with requests of other seeds at another rate, half of it before the test and half after it: from the times
at which clients had tokens follow the steps, and from those a factor for what other processes and adapters add, and
what a change of the turn between runtimes costs; from the first tokens of single requests follows what a prompt costs,
and from those and all others what a stream takes outside its steps; from leases follow the functions' run times.

Five minutes; two with --quick.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.live_llm_fit import Calibration, calibrated
from benchmarks.live_llm_node import (
    FUNCTIONS,
    LINK_BPS,
    OUTPUT,
    PROMPT,
    REQUESTS,
    Asked,
    Heard,
    Measured,
    Model,
    World,
    load,
    measure,
)
from benchmarks.live_node import shape
from benchmarks.llm_fit import MeasuredStep, fit, least, measured
from benchmarks.models import native
from benchmarks.report import Goal, report
from dormouse.controller.recording import Recording
from dormouse.controller.replay import replay
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.streams.batch import STEP_TOKENS
from dormouse.controller.simulator.streams.cost import StepCost
from dormouse.controller.simulator.streams.model import LlmSpec
from dormouse.controller.simulator.streams.outcome import tpot_s
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.policy import DEFAULT, changed
from examples import smollm2

SECONDS: Final = 120.0
CALIBRATION_SECONDS: Final = 40.0  # twice
LOAD: Final = 0.7
"""Streams that an engine alone would have open, if it computed one at a time. With more, the queue makes everything of
a small difference. Of runtimes that take turns, each computes for its own: this is more than they can do.
"""

CALIBRATION_LOAD: Final = 0.6
FUNCTION_RATE: Final = 1.0  # of all functions together
ADAPTERS: Final = Path("examples/adapters")
BASE: Final = "chat"
FIRSTS: Final = (1.25, 1.5, 2.0, 3.0)
TOKENS: Final = (1.1, 1.25, 1.5, 2.0)
"""Deadlines of models with adapters: the times of a lone stream's first token and further ones, so many times."""

GOAL: Final = 0.15
POINTS: Final = 0.05
NEAR: Final = 0.05
"""Deadlines lie where streams are. So a share that is late is also told as it would be, were all live times so much
shorter or longer: how many streams lie that near to theirs.
"""

ELEMENT_NBYTES: Final = {"bfloat16": 2, "float32": 4}


def world_of(folder: Path, adapters: int, isolation: str) -> World:
    base = Model(name=BASE, base=BASE)
    if not adapters:
        return World(folder=folder, models=(base,), functions=FUNCTIONS, seat_idle_s=2.0)
    places = sorted(path.parent.absolute() for path in ADAPTERS.glob("*/adapter_config.json"))
    if not 1 <= adapters <= len(places):
        raise SystemExit(f"--adapters is {adapters}; {ADAPTERS} has 1 to {len(places)}")
    some = [Model(name=place.name, base=BASE, adapter=place) for place in places[:adapters]]
    return World(folder=folder, models=(base, *some), isolation=isolation, gpu_mib=2048)


def with_deadlines(
    world: World, lone: Sequence[Heard], firsts: Sequence[float] = FIRSTS, tokens: Sequence[float] = TOKENS
) -> World:
    """So many times what lone streams over the same base took, from model to model."""
    models = []
    for model, first, each in zip(world.models, cycle(firsts), cycle(tokens), strict=False):
        mine = [stream for stream in lone if stream.ended and world.bases[stream.name] == model.base]
        ttft_s = first * statistics.median(stream.first_s for stream in mine)
        models.append(replace(model, ttft_s=ttft_s, tpot_s=each * statistics.median(s.tpot_s for s in mine)))
    return replace(world, models=tuple(models))


def specs(world: World, found: Calibration, asked: Sequence[Asked]) -> list[ModelSpec]:
    """Functions, then models. The first stream of each is not counted."""
    models = [
        ModelSpec(name=f"f{number}", nbytes=found.nbytes[f"f{number}"], run_s=statistics.mean(runs_s), runs_s=runs_s)
        for number, runs_s in enumerate(found.runs_s)
    ]
    shares = len(world.models) > 1
    for model in world.models:
        base, base_nbytes = (
            found.bases[model.base],
            min(found.nbytes[n] for n, b in world.bases.items() if b == model.base),
        )
        spec = LlmSpec(
            kv_nbytes=2 * 30 * 3 * 64 * ELEMENT_NBYTES[model.dtype],  # SmolLM2-135M
            cost=base.cost,
            ttft_s=model.ttft_s,
            tpot_s=model.tpot_s,
            prompt=PROMPT,
            output=OUTPUT,
            pairs=((60, 12), *((each.prompt, each.output) for each in asked if each.name == model.name)),
            in_turn=True,
            idle_s=world.seat_idle_s,
            before_s=base.before_s,
            turn_s=base.turn_s,
            adapter_nbytes=found.nbytes[model.name] - base_nbytes,
            group=model.base if shares and world.isolation == "tenant" else "",
        )
        nbytes = found.nbytes[model.name]
        models.append(
            ModelSpec(
                name=model.name,
                nbytes=nbytes,
                base=model.base if shares else "",
                base_nbytes=base_nbytes if shares else 0,
                run_s=spec.alone_s,
                llm=spec,
            )
        )
    return models


@dataclass(frozen=True)
class Outcome:
    """Of the streams that were asked: which model, first token and each further one in seconds, infinite if none."""

    names: list[str]
    first_s: npt.NDArray[np.float64]
    tpot_s: npt.NDArray[np.float64]

    def slower(self, times: float) -> "Outcome":
        return Outcome(self.names, self.first_s * times, self.tpot_s * times)

    def figures(self, world: World) -> dict[str, float]:
        whole = np.isfinite(self.first_s) & np.isfinite(self.tpot_s)
        first_s, each_s = self.first_s[whole] * 1e3, self.tpot_s[whole] * 1e3
        deadlines = {model.name: (model.ttft_s, model.tpot_s) for model in world.models}
        ttft_s, wanted_s = np.array([deadlines[name] for name in self.names]).T
        late_first, late_each = self.first_s > ttft_s, self.tpot_s > wanted_s
        return {
            "ttft_mean_ms": float(first_s.mean()),
            "ttft_p50_ms": float(np.quantile(first_s, 0.5)),
            "ttft_p99_ms": float(np.quantile(first_s, 0.99)),
            "tpot_mean_ms": float(each_s.mean()),
            "tpot_p50_ms": float(np.quantile(each_s, 0.5)),
            "tpot_p99_ms": float(np.quantile(each_s, 0.99)),
            "late_ttft": float(late_first.mean()),
            "late_tpot": float(late_each.mean()),
            "late": float((late_first | late_each).mean()),
        }


def real(part: Measured) -> Outcome:
    first_s, each_s = ([getattr(stream, name) for stream in part.streams] for name in ("first_s", "tpot_s"))
    return Outcome([stream.name for stream in part.streams], np.array(first_s), np.array(each_s))


def simulated(world: World, found: Calibration, asked: Sequence[Asked], seed: int) -> Outcome:
    """The same requests: lengths are those of the load."""
    models = specs(world, found, asked)
    numbers = {spec.name: number for number, spec in enumerate(models)}
    deadlines_s = [2.0 if spec.llm is None else spec.llm.ttft_s for spec in models]
    policy = changed(DEFAULT, world.schedule)
    simulation = Simulation(
        policy, Topology(host_bps=LINK_BPS), world.gpus, found.gpu_nbytes, models, deadlines_s, 0.95, seed
    )
    warm = np.arange(len(models))
    times_s = np.concatenate([warm * 1.0, np.array([each.at_s for each in asked]) + len(warm)])
    who = np.array([numbers[each.name] for each in asked], np.int64)
    simulation.run(times_s, np.concatenate([warm, who]), len(warm))
    assert simulation.streams is not None
    counted = simulation.streams.part(slice(len(warm), None))
    streams = counted.part(np.flatnonzero(counted.output))
    names = [each.name for each in asked if each.prompt]
    return Outcome(names, np.nan_to_num(streams.first_s, nan=np.inf), tpot_s(streams))


def settled(found: Calibration, runs: Sequence[tuple[World, Sequence[Asked], Measured]]) -> Calibration:
    """What a stream takes outside its steps is more where others compute: its request finds the cores busy, and makes
    the step under way longer. So it is measured there: by so much as first tokens were later on those nodes than in the
    simulator, in the median.
    """
    later_s: dict[str, list[float]] = {base: [] for base in found.bases}
    for world, asked, part in runs:
        live, told = real(part), simulated(world, found, asked, 0)
        for name, live_s, told_s in zip(live.names, live.first_s, told.first_s, strict=True):
            if np.isfinite(live_s) and np.isfinite(told_s):
                later_s[world.bases[name]].append(float(live_s - told_s))
    before_s = {name: found.bases[name].before_s + statistics.median(each or [0.0]) for name, each in later_s.items()}
    bases = {name: replace(base, before_s=max(0.0, before_s[name])) for name, base in found.bases.items()}
    return replace(found, bases=bases)


def engines(world: World, rounds: int) -> dict[str, list[list[MeasuredStep]]]:
    """Steps of an engine of each base, here and alone."""
    found = {
        model.name: measured(world.folder, model.dtype, world.threads, rounds)
        for model in world.models
        if model.adapter is None
    }
    torch.set_num_threads(1)  # the clients' threads must not take the node's cores
    return found


def costs(*rounds: Mapping[str, list[list[MeasuredStep]]]) -> dict[str, StepCost]:
    return {name: fit(least([each for some in rounds for each in some[name]])) for name in rounds[0]}


def compare(
    name: str, world: World, test: Outcome, runs: Sequence[Outcome], keys: Sequence[str]
) -> tuple[list[Goal], Any]:
    """``keys`` of figures are to be as far away as `GOAL` at most."""
    live, each = test.figures(world), [run.figures(world) for run in runs]
    least, most = (test.slower(1 + off).figures(world) for off in (-NEAR, NEAR))
    mean = {key: statistics.mean(run[key] for run in each) for key in live}
    goals = []
    for key in live:
        late = key.startswith("late")
        texts = [f"{side[key]:.1%}" if late else f"{side[key]:.1f}" for side in (live, mean)]
        near = f", {least[key]:.1%} to {most[key]:.1%} with times {NEAR:.0%} off" if late else ""
        print(f"{name}{key}: live {texts[0]}{near}, simulated {texts[1]}", flush=True)
        if key in keys and late:
            text = f"{(mean[key] - live[key]) * 100:+.1f}{near}"
            met = least[key] - POINTS <= mean[key] <= most[key] + POINTS
            told = f"{name}{key}, live {live[key]:.0%}: simulated - live, points"
            goals.append(Goal(name=told, goal="within 5 of what is near", measured=text, met=met))
        elif key in keys:
            ratio, told = mean[key] / live[key], f"{name}{key.removesuffix('_ms')}, simulated / live"
            goals.append(Goal(name=told, goal=f"within {GOAL:.0%}", measured=ratio, met=abs(ratio - 1) <= GOAL))
    return goals, {"live": live, "simulated": each, "live_near": [least, most]}


def same_actions(name: str, record: Path) -> Goal:
    difference = replay(Recording(str(record))).difference
    measured = "identical" if difference is None else str(difference)
    return Goal(name=f"{name}replay", goal="identical", measured=measured, met=difference is None)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    part = 0.2 if args.quick else 1.0
    world = world_of(smollm2.build(Path("build/smollm2")), args.adapters, args.isolation)
    expected = native([shape(number) for number in range(FUNCTIONS)], REQUESTS, True) if world.functions else []
    rounds = 1 if args.quick else 2
    early = engines(world, rounds)
    rate = 1.0 / costs(early)[BASE].stream_s(round(PROMPT.mean), round(OUTPUT.mean), STEP_TOKENS)
    asked = load(world, args.seed, part * SECONDS, args.load * rate, FUNCTION_RATE)
    with tempfile.TemporaryDirectory(prefix="dm") as place:
        records = [Path(place) / name for name in ("before", "test", "after")]
        parts: list[Measured] = []
        others: list[tuple[World, list[Asked], Measured]] = []
        for number, record in enumerate(records):
            load_of = asked
            if record.name != "test":
                seconds = part * CALIBRATION_SECONDS
                load_of = load(world, 100 + number, seconds, CALIBRATION_LOAD * rate, FUNCTION_RATE, apart=True)
            elif args.adapters:
                world = with_deadlines(world, parts[0].alone)
            parts.append(measure(world, record, load_of, expected))
            if load_of is not asked:
                others.append((world, load_of, parts[-1]))
            print(f"{record.name}: {len(parts[-1].streams)} streams", file=sys.stderr, flush=True)
        before, test, after = parts
        alone = costs(early, engines(world, rounds))  # before and after, as all else
        found = settled(calibrated(world, [before, after], [records[0], records[2]], alone), others)
        same = same_actions("", records[1])
    wrong = [text for each in parts for text in each.wrong]
    base = found.bases[BASE]
    times = f"{base.factor:.2f} times what an engine alone takes, {base.before_s * 1e3:.1f} ms before the first"
    times += f", {base.turn_s * 1e3:.2f} ms for a change of the turn"
    print(f"{len(test.streams)} streams, {len(test.latencies)} requests; steps of {base.cost}, {times}")
    outcome = real(test)
    runs = [simulated(world, found, asked, seed) for seed in range(args.runs)]
    keys = ["ttft_p50_ms", "ttft_p99_ms", "tpot_mean_ms", "tpot_p50_ms"]
    keys += ["late_ttft", "late_tpot", "late"] if args.adapters else []
    goals, sides = compare("", world, outcome, runs, keys)
    if args.adapters:
        late = sides["live"]["late"]
        goals.append(Goal(name="streams late, live", goal="some, not all", measured=late, met=0.0 < late < 1.0))
    goals.append(same)
    goals.append(Goal(name="wrong or missing answers", goal="0", measured=len(wrong), met=not wrong))
    extra = {
        "bases": {name: asdict_of(each) for name, each in found.bases.items()},
        "deadlines_s": {model.name: (model.ttft_s, model.tpot_s) for model in world.models},
        **sides,
        "streams": [asdict(stream) for stream in test.streams],
        "function_latencies_s": test.latencies,
        "wrong": wrong,
    }
    report(goals, args, extra)


def asdict_of(base: Any) -> dict[str, Any]:
    cost = {name: getattr(base.cost, name) for name in base.cost.__struct_fields__}
    return {"cost": cost, "factor": base.factor, "before_s": base.before_s, "turn_s": base.turn_s}
