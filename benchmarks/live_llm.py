"""A real node with a language model beside the simulator: the same streams, and requests to ordinary functions.

``python -m benchmarks.live --llm``. One emulated GPU has SmolLM2 and four functions. Prompts and outputs have random
lengths, and arrive at random times. The coefficients of decode steps are of an engine in this process
(benchmarks/llm_fit.py), before and after all nodes. All else that the simulator knows was measured on other nodes, with
requests of other seeds at another rate, half of it before the test and half after it: from the times at which clients
had tokens follow the steps, and from those a factor for what other processes add; from the first tokens of single
requests follow what a prompt costs and what a stream takes outside its steps; from leases follow the functions' run
times.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import nnls

from benchmarks.live_llm_node import (
    FUNCTIONS,
    LINK_BPS,
    OUTPUT,
    PROMPT,
    REQUESTS,
    TPOT_S,
    TTFT_S,
    Asked,
    Measured,
    load,
    measure,
)
from benchmarks.live_node import shape
from benchmarks.llm_fit import MeasuredStep, fit, least, measured
from benchmarks.models import native
from benchmarks.report import Goal, report
from dormouse.controller.recording import Recording
from dormouse.controller.replay import replay
from dormouse.controller.scheduling import events as ev
from dormouse.controller.scheduling.topology import Topology
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.streams.batch import STEP_TOKENS
from dormouse.controller.simulator.streams.cost import StepCost
from dormouse.controller.simulator.streams.model import LlmSpec
from dormouse.controller.simulator.streams.serving import Streams
from dormouse.schemas.policy import DEFAULT
from examples import smollm2

SECONDS: Final = 120.0
CALIBRATION_SECONDS: Final = 40.0  # twice
LOAD: Final = 0.7
"""Streams that an engine alone would have open, if it computed one at a time. With more, the queue makes everything of
a small difference.
"""

CALIBRATION_LOAD: Final = 0.6
FUNCTION_RATE: Final = 1.0  # of all functions together
OUTLIER: Final = 4.0
"""So many times the median, and something else than a step lies between two tokens."""

SAME_STEP: Final = 0.25
"""Tokens that clients have within this part of a step's time are of one step."""

GOAL: Final = 0.15


def steps(part: Measured) -> list[MeasuredStep]:
    """From the times at which clients had tokens: a step lies between two such times if a stream has gone on."""
    streams = [*part.alone, *part.streams]
    same_s = SAME_STEP * statistics.median(stream.tpot_s for stream in part.alone)
    ends: list[float] = []
    for at_s in sorted(at_s for stream in streams for at_s in stream.tokens_s):
        if not ends or at_s - ends[-1] > same_s:
            ends.append(at_s)
    at = np.array(ends)
    spans = []
    for stream in streams:
        if stream.ended and len(stream.tokens_s) > 1:
            first, last = np.searchsorted(at, [stream.tokens_s[0], stream.tokens_s[-1]], side="right") - 1
            spans.append((int(first), int(last), stream.prompt))
    found = []
    for index in range(1, len(ends)):
        going = [(first, prompt) for first, last, prompt in spans if first < index <= last]
        prompts = [prompt for first, _, prompt in spans if first == index]
        if going and sum(prompts) <= STEP_TOKENS:
            context = sum(prompt + index - first for first, prompt in going)
            found.append(MeasuredStep(len(going), context, sum(prompts), ends[index] - ends[index - 1]))
    return found


@dataclass(frozen=True, kw_only=True)
class Calibration:
    cost: StepCost
    factor: float
    before_s: float
    runs_s: list[tuple[float, ...]]  # of each function
    nbytes: dict[str, int]
    gpu_nbytes: int


def calibrated(parts: Sequence[Measured], records: Sequence[Path], alone: StepCost) -> Calibration:
    """From two nodes, and an engine that was ``alone``. What other work on the machine adds to a decode step is a
    factor. What a prompt's token costs there, and what a stream takes before its first step, follow from the first
    tokens of single streams: of short prompts and of long ones.
    """
    seen = [step for part in parts for step in steps(part) if not step.prompt]
    ratios = [step.seconds / alone.step_s(*step[:3]) for step in seen]
    most = OUTLIER * statistics.median(ratios)
    some = [step for step, ratio in zip(seen, ratios, strict=True) if ratio < most]
    factor = sum(step.seconds for step in some) / sum(alone.step_s(*step[:3]) for step in some)
    singles = [stream for part in parts for stream in part.alone if stream.ended]
    first_s = np.array([stream.first_s for stream in singles])
    rows = np.array([[1.0, float(stream.prompt)] for stream in singles])
    left_s = np.maximum(first_s - factor * alone.fixed_s, 0.0)
    (before_s, per_prompt_s), _ = nnls(rows / first_s[:, None], left_s / first_s)
    cost = StepCost(
        fixed_s=factor * alone.fixed_s,
        per_sequence_s=factor * alone.per_sequence_s,
        per_context_s=factor * alone.per_context_s,
        per_prompt_s=float(per_prompt_s),
    )
    runs_s: list[list[float]] = [[] for _ in range(FUNCTIONS)]
    for record in records:
        for who, run_s in runs_of(Recording(str(record))):
            runs_s[who].append(run_s)
    nbytes, gpu_nbytes = sizes(Recording(str(records[0])))
    return Calibration(
        cost=cost,
        before_s=float(before_s),
        factor=factor,
        runs_s=[tuple(runs) for runs in runs_s],
        nbytes=nbytes,
        gpu_nbytes=gpu_nbytes,
    )


def runs_of(recording: Recording) -> list[tuple[int, float]]:
    """GPU time of the functions' leases that copied nothing."""
    found, who = [], {}
    owners: dict[tuple[int, int], str] = {}
    for entry in recording.events():
        match entry.event:
            case ev.InstanceKnown(instance=instance, function=name):
                who[instance] = name
            case ev.LeaseOver(gpu=gpu, done=done):
                name = who[owners.pop((gpu, done.serial))]
                if name.startswith("f") and not done.copied_nbytes:
                    found.append((int(name[1:]), done.gpu_us / 1e6))
        for action in entry.actions:
            if isinstance(action, ev.WakeOn):
                owners[action.lease.gpu, action.lease.serial] = action.instance
    return found


def sizes(recording: Recording) -> tuple[dict[str, int], int]:
    """Bytes of each function's model, and of the pool."""
    who, nbytes, capacity = {}, {}, 0
    for entry in recording.events():
        match entry.event:
            case ev.InstanceKnown(instance=instance, function=name):
                who[instance] = name
            case ev.ModelSized(instance=instance, nbytes=size) if instance in who:
                nbytes[who[instance]] = size
            case ev.ExecutorUp(stats=stats):
                capacity = stats.free_nbytes + stats.weights_nbytes + stats.lost_nbytes
    return nbytes, capacity


def simulated(found: Calibration, asked: Sequence[Asked], seed: int) -> Streams:
    """The same requests: lengths are those of the load."""
    streams = [each for each in asked if each.function < 0]
    spec = LlmSpec(
        kv_nbytes=2 * 30 * 3 * 64 * 2,  # SmolLM2-135M in bfloat16
        cost=found.cost,
        ttft_s=TTFT_S,
        tpot_s=TPOT_S,
        prompt=PROMPT,
        output=OUTPUT,
        pairs=((60, 12), *((each.prompt, each.output) for each in streams)),
        in_turn=True,
        before_s=found.before_s,
    )
    chat = ModelSpec(name="chat", nbytes=found.nbytes["chat"], run_s=spec.alone_s, llm=spec)
    models = [
        ModelSpec(name=f"f{number}", nbytes=found.nbytes[f"f{number}"], run_s=statistics.mean(runs_s), runs_s=runs_s)
        for number, runs_s in enumerate(found.runs_s)
    ]
    simulation = Simulation(
        DEFAULT, Topology(host_bps=LINK_BPS), 1, found.gpu_nbytes, [*models, chat],
        [2.0] * FUNCTIONS + [TTFT_S], 0.95, seed,
    )  # fmt: skip
    who = [FUNCTIONS if each.function < 0 else each.function for each in asked]
    warm = np.arange(FUNCTIONS + 1)  # the last one is a stream
    simulation.run(
        np.concatenate([warm * 1.0, np.array([each.at_s for each in asked]) + len(warm)]),
        np.concatenate([warm, np.array(who, np.int64)]),
        len(warm),
    )
    assert simulation.streams is not None
    counted = simulation.streams.part(slice(len(warm), None))
    return counted.part(np.flatnonzero(counted.output))


def figures(first_s: npt.NDArray[np.float64], tpot_s: npt.NDArray[np.float64]) -> dict[str, float]:
    return {
        "ttft_mean_ms": float(first_s.mean() * 1e3),
        "ttft_p50_ms": float(np.quantile(first_s, 0.5) * 1e3),
        "ttft_p99_ms": float(np.quantile(first_s, 0.99) * 1e3),
        "tpot_mean_ms": float(tpot_s.mean() * 1e3),
        "tpot_p50_ms": float(np.quantile(tpot_s, 0.5) * 1e3),
        "tpot_p99_ms": float(np.quantile(tpot_s, 0.99) * 1e3),
        "in_time": float(((first_s <= TTFT_S) & (tpot_s <= TPOT_S)).mean()),
    }


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    part = 0.2 if args.quick else 1.0
    folder = smollm2.build(Path("build/smollm2"))
    expected = native([shape(number) for number in range(FUNCTIONS)], REQUESTS, True)
    rounds = 1 if args.quick else 2
    engine = measured(folder, "bfloat16", 2, rounds)
    torch.set_num_threads(1)  # the clients' threads must not take the node's cores
    alone = fit(least(engine))
    rate = 1.0 / alone.stream_s(round(PROMPT.mean), round(OUTPUT.mean), STEP_TOKENS)
    asked = load(args.seed, part * SECONDS, LOAD * rate, FUNCTION_RATE)
    with tempfile.TemporaryDirectory(prefix="dm") as place:
        records = [Path(place) / name for name in ("before", "test", "after")]
        parts = []
        for number, record in enumerate(records):
            load_of = asked
            if record.name != "test":
                seconds = part * CALIBRATION_SECONDS
                load_of = load(100 + number, seconds, CALIBRATION_LOAD * rate, FUNCTION_RATE, apart=True)
            parts.append(measure(folder, record, load_of, expected))
            print(f"{record.name}: {len(parts[-1].streams)} streams", file=sys.stderr, flush=True)
        before, test, after = parts
        alone = fit(least(engine + measured(folder, "bfloat16", 2, rounds)))  # before and after, as all else
        found = calibrated([before, after], [records[0], records[2]], alone)
        replayed = replay(Recording(str(records[1])))
    wrong = [text for each in parts for text in each.wrong]
    whole = [stream for stream in test.streams if stream.ended and stream.tokens_s]
    real = figures(np.array([each.first_s for each in whole]), np.array([each.tpot_s for each in whole]))
    runs = []
    for seed in range(args.runs):
        streams = simulated(found, asked, seed)
        tpot_s = (streams.over_s - streams.first_s) / np.maximum(1, streams.output - 1)
        runs.append(figures(streams.first_s, tpot_s))
    mean = {key: statistics.mean(run[key] for run in runs) for key in real}
    times = f"{found.factor:.2f} times what an engine alone takes, {found.before_s * 1e3:.1f} ms before the first"
    print(f"{len(whole)} streams, {len(test.latencies)} requests; steps of {found.cost}, {times}")
    goals = []
    for key in ("ttft_p50_ms", "ttft_p99_ms", "tpot_mean_ms", "tpot_p50_ms"):
        ratio = mean[key] / real[key]
        print(f"{key}: live {real[key]:.1f}, simulated {mean[key]:.1f}")
        text, met = f"{key.removesuffix('_ms')}, simulated / live", abs(ratio - 1) <= GOAL
        goals.append(Goal(name=text, goal=f"within {GOAL:.0%}", measured=ratio, met=met))
    same = replayed.difference is None
    goals.append(
        Goal(name="replay", goal="identical", measured="identical" if same else str(replayed.difference), met=same)
    )
    goals.append(Goal(name="wrong or missing answers", goal="0", measured=len(wrong), met=not wrong))
    extra = {
        "cost_s": [getattr(found.cost, name) for name in found.cost.__struct_fields__],
        "factor": found.factor,
        "before_s": found.before_s,
        "live": real,
        "simulated": runs,
        "streams": [asdict(stream) for stream in test.streams],
        "function_latencies_s": test.latencies,
        "wrong": wrong,
    }
    report(goals, args, extra)
