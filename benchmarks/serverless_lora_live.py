"""ServerlessLoRA's workload, scaled down to this machine: a live node under several policies, beside the simulator with
this machine's coefficients.

    python -m benchmarks.serverless_lora_live --data DIR --kind Bursty [--arms dormouse fifo] [--gpus 1] [--quick]

``DIR`` has what benchmarks/serverless_lora.py reads. Eight functions, four over each of two backbones. The only small
real model at hand is SmolLM2-135M, so its two types stand for two backbones: bf16 and fp32, which share nothing and are
1 : 2 in bytes, as the paper's 7B and 13B are. Four hours of one class of arrivals become `SECONDS`, and as many of
them, drawn evenly, are asked as make the wanted load. Prompts and answers have GSM8K's lengths, of those that are not
longer than `PROMPT` and `OUTPUT` may be; deadlines are the paper's, five times a lone stream's. Arms: ``dormouse``,
``fifo`` (turns in turn), ``tenant`` (one runtime for each backbone), and ``no-affinity``, which wants two GPUs.

A class with two arms takes seven minutes, a further arm two and a half; with --quick, two.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.live_llm import (
    ADAPTERS,
    CALIBRATION_LOAD,
    LOAD,
    Outcome,
    asdict_of,
    compare,
    costs,
    engines,
    real,
    same_actions,
    settled,
    simulated,
    with_deadlines,
)
from benchmarks.live_llm_fit import calibrated
from benchmarks.live_llm_node import OUTPUT, PROMPT, Asked, Measured, Model, World, load, measure
from benchmarks.report import Goal, arguments, report
from benchmarks.serverless_lora_workload import CLASSES, Pairs, arrivals, lengths
from dormouse.controller.simulator.streams.batch import STEP_TOKENS
from dormouse.controller.simulator.streams.cost import StepCost
from examples import smollm2

HOURS: Final = 4.0
SECONDS: Final = 120.0
CALIBRATION_SECONDS: Final = 25.0  # twice
TIMES: Final = (5.0,)
"""A deadline is so many times what a lone stream takes (§6.1)."""

DTYPES: Final = ("bfloat16", "float32")
ARMS: Final[dict[str, dict[str, Any]]] = {
    "dormouse": {},
    "fifo": {"schedule": {"turn_order": "fifo"}},
    "tenant": {"isolation": "tenant"},
    "no-affinity": {"schedule": {"affinity": False}},
}


def world_of(folder: Path, gpus: int) -> World:
    places = sorted(path.parent.absolute() for path in ADAPTERS.glob("*/adapter_config.json"))
    models = [Model(name=dtype, base=dtype, dtype=dtype) for dtype in DTYPES]
    for number, place in enumerate(places):
        dtype = DTYPES[number * len(DTYPES) // len(places)]
        models.append(Model(name=place.name, base=dtype, adapter=place, dtype=dtype))
    return World(folder=folder, models=tuple(models), isolation="function", gpus=gpus, gpu_mib=3072, threads=2 // gpus)


def scaled(data: Path, kind: str, world: World, pairs: Pairs, rate: float, seconds: float, seed: int) -> list[Asked]:
    """One class in so many seconds, ``rate`` streams per second in the mean."""
    whole = arrivals(data, kind, HOURS * 3600 / seconds, seed=seed)
    rng = np.random.default_rng(seed)
    count = min(len(whole.times_s), round(rate * seconds))
    chosen = np.sort(rng.choice(len(whole.times_s), count, replace=False))
    short = [pair for pair in pairs if pair[0] <= PROMPT.most and pair[1] <= OUTPUT.most]
    names = [model.name for model in world.models if model.adapter is not None]
    found = []
    for number in chosen.tolist():
        prompt, output = short[int(rng.integers(len(short)))]
        found.append(Asked(float(whole.times_s[number]), names[int(whole.functions[number])], prompt, output))
    return found


def stream_s(alone: dict[str, StepCost], asked: list[Asked], world: World) -> float:
    """A lone stream, in the mean."""
    took_s = [alone[world.bases[each.name]].stream_s(each.prompt, each.output, STEP_TOKENS) for each in asked]
    return float(np.mean(took_s))


def main(args: argparse.Namespace) -> None:
    if "no-affinity" in args.arms and args.gpus < 2:
        raise SystemExit("no-affinity is an arm of two GPUs; write --gpus 2")
    world = world_of(smollm2.build(Path("build/smollm2")), args.gpus)
    part = 0.2 if args.quick else 1.0
    pairs, early = lengths(args.data), engines(world, 1)
    mean_s = stream_s(costs(early), scaled(args.data, args.kind, world, pairs, 5.0, SECONDS, args.seed), world)
    asked = scaled(args.data, args.kind, world, pairs, args.load / mean_s, part * SECONDS, args.seed)
    tests: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="dm") as place:

        def calibration(name: str, seed: int) -> tuple[World, list[Asked], Measured]:
            load_of = load(world, seed, part * CALIBRATION_SECONDS, CALIBRATION_LOAD / mean_s, 0.0)
            return world, load_of, measure(world, Path(place) / name, load_of, [])

        first = calibration("before", 100)
        world = with_deadlines(world, first[2].alone, TIMES, TIMES)
        worlds = {arm: replace(world, **ARMS[arm]) for arm in args.arms}
        for arm in args.arms:
            tests[arm] = measure(worlds[arm], Path(place) / arm, asked, [])
            print(f"{arm}: {len(tests[arm].streams)} streams", file=sys.stderr, flush=True)
        last = calibration("after", 101)
        records = [Path(place) / name for name in ("before", "after")]
        found = calibrated(world, [first[2], last[2]], records, costs(early, engines(world, 1)))
        found = settled(found, [first, last])
        goals = [same_actions(f"{arm}: ", Path(place) / arm) for arm in args.arms]
    sides, mean = {}, {}
    for arm in args.arms:
        runs = [simulated(worlds[arm], found, asked, seed) for seed in range(args.runs)]
        made, sides[arm] = compare(f"{arm}: ", worlds[arm], real(tests[arm]), runs, ("ttft_p50_ms", "late"))
        goals += made
        mean[arm] = {"live": real(tests[arm]), "simulated": runs[0]}
    for arm in args.arms[1:]:
        goals.append(beside(arm, args.arms[0], mean))
    wrong = [text for each in (first[2], *tests.values(), last[2]) for text in each.wrong]
    goals.append(Goal(name="missing answers", goal="0", measured=len(wrong), met=not wrong))
    extra = {
        "kind": args.kind,
        "streams": len(asked),
        "bases": {name: asdict_of(each) for name, each in found.bases.items()},
        "deadlines_s": {model.name: (model.ttft_s, model.tpot_s) for model in world.models},
        "arms": sides,
        "wrong": wrong,
    }
    report(goals, args, extra)


def beside(arm: str, ours: str, found: dict[str, dict[str, Outcome]]) -> Goal:
    """First tokens of an arm against ours, live and simulated."""
    ratios = {}
    for side in ("live", "simulated"):
        theirs, own = (each[side].first_s[np.isfinite(each[side].first_s)] for each in (found[arm], found[ours]))
        ratios[side] = float(theirs.mean() / own.mean())
    text = f"{ratios['live']:.2f}, simulated {ratios['simulated']:.2f}"
    return Goal(name=f"{arm} / {ours}: first token, mean, live", goal="told", measured=text, met=True)


if __name__ == "__main__":
    parser = arguments((__doc__ or "").partition("\n\n")[0])
    parser.set_defaults(out=Path("build/llm/serverless-lora-live.json"))
    parser.add_argument("--data", type=Path, required=True, help="where the arrivals and lengths are")
    parser.add_argument("--kind", choices=CLASSES, default="Bursty", help="class of arrivals")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["dormouse", "fifo"])
    parser.add_argument("--gpus", type=int, choices=[1, 2], default=1, help="emulated; two have one thread each")
    parser.add_argument("--load", type=float, default=LOAD, help="streams that a lone engine would have open")
    parser.add_argument("--seed", type=int, default=7, help="of lengths, and of which arrivals are asked")
    parser.add_argument("--runs", type=int, default=5, help="simulations, each with a seed of its own")
    main(parser.parse_args())
