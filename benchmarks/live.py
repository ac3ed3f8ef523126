"""A real node beside the simulator: the same requests to 64 functions on two emulated GPUs with limited links.

What the simulator knows of the functions and of the node was measured on other nodes, with random requests of other
seeds, at another rate and not in the test's shares: half of it before the test and half after it, because other work on
the machine comes and goes. The node of the test records what its scheduler is told; the recording is then replayed.
Functions have deadlines of 1 to 5 times their wake, so some miss many; every answer is compared with PyTorch's, and a
request without a right answer has missed.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dormouse.core import openmp

if __name__ == "__main__":
    os.environ |= openmp.WAITING  # as the node has it; its threads and these share the cores

import torch

from benchmarks import live_llm
from benchmarks.live_node import (
    FUNCTIONS,
    LINK_BPS,
    Lease,
    Load,
    Request,
    leases,
    matched,
    native,
    node,
    shape,
    sizes,
)
from benchmarks.models import SHAPES
from benchmarks.report import Goal, arguments, report
from dormouse.controller.recording import Recording
from dormouse.controller.replay import replay
from dormouse.controller.simulator.devices import ModelSpec, OutsideLease
from dormouse.controller.simulator.engine import Simulation
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.policy import DEFAULT

GPU_MIB: Final = 768
PERCENTILE: Final = 90.0
RATE: Final = 12.0  # requests per second of all functions
CALIBRATION_RATE: Final = 10.0
SECONDS: Final = 180.0
CALIBRATION_SECONDS: Final = 50.0  # twice
ROUNDS: Final = 2
WARM_ROUNDS: Final = 2
OF_A_SHAPE: Final = FUNCTIONS // len(SHAPES)
DEADLINES: Final = (1.0, 1.5, 2.5, 5.0)  # of a shape's functions, in wakes of it alone
IN_TIME_GOAL: Final = 0.05
FUNCTION_GOAL: Final = 0.06
LATENCY_GOAL: Final = 0.15


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Leases of functions ``alone``, one request at a time, then of random requests."""

    nbytes: list[int]
    gpu_nbytes: int
    alone: list[Lease]
    pairs: list[tuple[Request, Lease]]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What the simulator is told."""

    models: list[ModelSpec]
    outside: OutsideLease
    gpu_nbytes: int


def poisson(
    seed: int, rate: float, seconds: float, weights: Sequence[float]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    count = int(rng.poisson(rate * seconds))
    shares = np.array(weights) / sum(weights)
    return np.sort(rng.uniform(0.0, seconds, count)), rng.choice(FUNCTIONS, count, p=shares)


def measure(record: Path, seed: int, seconds: float, expected: list[list[list[float]]]) -> Measured:
    """On a node of its own; deadlines are far away there."""
    with node(record, GPU_MIB, [10.0] * FUNCTIONS, PERCENTILE) as running:
        load = Load(running, expected)
        for _ in range(ROUNDS):
            for function in range(FUNCTIONS):
                load.one(function)
                load.one(function)
        requests = load.ask(*poisson(seed, CALIBRATION_RATE, seconds, [1.0] * FUNCTIONS))
    assert not load.wrong, load.wrong[:3]
    recording = Recording(str(record))
    held = leases(recording)
    nbytes, gpu_nbytes = sizes(recording)
    alone = held[FUNCTIONS : len(held) - len(requests)]  # but for what each function needs only once
    return Measured(nbytes=nbytes, gpu_nbytes=gpu_nbytes, alone=alone, pairs=matched(requests, held))


def calibrated(parts: list[Measured]) -> Calibration:
    """From random requests, so that the two GPUs share the cores as they will."""
    pairs = [pair for part in parts for pair in part.pairs]
    nbytes = parts[0].nbytes
    models = [
        _spec(name, nbytes[number], [lease for _, lease in pairs if shape(lease.function) == name])
        for number, name in enumerate(SHAPES)
    ]
    return Calibration(
        models=[models[function % len(SHAPES)] for function in range(FUNCTIONS)],
        outside=_outside([part.pairs for part in parts]),
        gpu_nbytes=parts[0].gpu_nbytes,
    )


def wakes_s(part: Measured) -> list[float]:
    """How long a request of each shape takes alone whose model, or most of it, is copied first."""
    return [
        statistics.median(
            lease.over_s - lease.granted_s
            for lease in part.alone
            if shape(lease.function) == name and lease.copied_nbytes > part.nbytes[number] / 2
        )
        for number, name in enumerate(SHAPES)
    ]


def _spec(name: str, nbytes: int, held: list[Lease]) -> ModelSpec:
    """``extra_s`` makes the mean of the wakes right, whose runs vary as others do; little ones say nothing of it."""
    runs_s = [lease.over_s - lease.granted_s for lease in held if not lease.copied_nbytes]
    over_s, share = [], []
    for lease in held:
        if lease.copied_nbytes < nbytes / 4:
            continue
        copy_s = lease.copied_nbytes / LINK_BPS
        without_s = statistics.mean(max(run_s, copy_s) for run_s in runs_s)
        over_s.append(lease.over_s - lease.granted_s - without_s)
        share.append(lease.copied_nbytes / nbytes)
    return ModelSpec(
        name=name,
        nbytes=nbytes,
        run_s=statistics.mean(runs_s),
        extra_s=max(0.0, statistics.mean(over_s) / statistics.mean(share)),
        runs_s=tuple(runs_s),
    )


def _outside(parts: list[list[tuple[Request, Lease]]]) -> OutsideLease:
    """A request whose function is idle when it comes is asked for at once, another after the lease before it."""
    before, turn, after = [], [], []
    for pairs in parts:
        last: dict[int, Lease] = {}
        for request, lease in pairs:
            previous = last.get(lease.function)
            if previous is None or previous.over_s < request.arrived_s:
                before.append(lease.asked_s - request.arrived_s)
            else:
                turn.append(lease.asked_s - previous.over_s)
            after.append(request.answered_s - lease.over_s)
            last[lease.function] = lease
    return OutsideLease(
        before_s=max(0.0, statistics.mean(before)),
        turn_s=max(0.0, statistics.mean(turn)) if turn else 0.0,
        after_s=statistics.mean(after),
    )


def weights() -> list[float]:
    """The test's functions are not asked alike: those of number 0 four times as often as the last."""
    return [4.0 - 3.0 * (function // len(SHAPES)) / (OF_A_SHAPE - 1) for function in range(FUNCTIONS)]


def deadlines(wakes: list[float]) -> list[float]:
    """To the millisecond, as functions have them; of a shape, the more often asked have the wider ones."""
    return [
        round(wakes[function % len(SHAPES)] * DEADLINES[-1 - function // len(SHAPES) * len(DEADLINES) // OF_A_SHAPE], 3)
        for function in range(FUNCTIONS)
    ]


def live(
    record: Path,
    deadlines_s: list[float],
    load_of: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]],
    expected: list[list[list[float]]],
) -> tuple[list[Request], list[str]]:
    with node(record, GPU_MIB, deadlines_s, PERCENTILE) as running:
        load = Load(running, expected)
        for _ in range(WARM_ROUNDS):
            for function in range(FUNCTIONS):
                load.one(function)
        requests = load.ask(*load_of)
    return requests, load.wrong


def simulated(
    found: Calibration,
    deadlines_s: list[float],
    load_of: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]],
    seed: int,
) -> npt.NDArray[np.float64]:
    """Latency of each request."""
    simulation = Simulation(
        DEFAULT,
        Topology(host_bps=LINK_BPS),
        2,
        found.gpu_nbytes,
        found.models,
        deadlines_s,
        PERCENTILE / 100,
        seed,
        outside=found.outside,
    )
    warm = np.tile(np.arange(FUNCTIONS), WARM_ROUNDS)
    warm_s = np.arange(len(warm)) * 1.0
    times_s, functions = load_of
    latency_s = simulation.run(
        np.concatenate([warm_s, times_s + len(warm)]), np.concatenate([warm, functions]), len(warm)
    )
    return latency_s[len(warm) :]


def summary(
    latency_s: npt.NDArray[np.float64], functions: npt.NDArray[np.int64], deadlines_s: list[float]
) -> dict[str, Any]:
    """Of requests, and by function; one without an answer (inf or nan) is late and has no part in the mean."""
    right = np.isfinite(latency_s)
    in_time = np.where(right, latency_s, np.inf) <= np.array(deadlines_s)[functions]
    asked = [functions == function for function in range(FUNCTIONS)]
    by_function = [float(in_time[mine].mean()) if mine.any() else float("nan") for mine in asked]
    return {
        "requests": len(latency_s),
        "answered": int(right.sum()),
        "in_time": float(in_time.mean()),
        "compliant": sum(share >= PERCENTILE / 100 for share in by_function) / FUNCTIONS,
        "mean_ms": float(latency_s[right].mean() * 1e3),
        "p50_ms": float(np.quantile(latency_s[right], 0.5) * 1e3),
        "p98_ms": float(np.quantile(latency_s[right], 0.98) * 1e3),
        "in_time_by_function": by_function,
        "mean_ms_by_shape": [
            float(latency_s[right & (functions % len(SHAPES) == number)].mean() * 1e3) for number in range(len(SHAPES))
        ],
    }


def main(args: argparse.Namespace) -> None:
    if args.llm:
        return live_llm.main(args)
    torch.set_num_threads(1)
    part = 0.2 if args.quick else 1.0
    expected = native()
    with tempfile.TemporaryDirectory(prefix="dm") as folder:
        records = Path(folder)
        seconds = part * CALIBRATION_SECONDS
        before = measure(records / "before", 1, seconds, expected)
        deadlines_s = deadlines(wakes_s(before))
        load_of = poisson(args.seed, RATE, part * SECONDS, weights())
        requests, wrong = live(records / "test", deadlines_s, load_of, expected)
        after = measure(records / "after", 2, seconds, expected)
        found = calibrated([before, after])
        recording = Recording(str(records / "test"))
        replayed = replay(recording)
        held = leases(recording)
    functions = np.array([request.function for request in requests])
    latency_s = np.array([request.answered_s - request.arrived_s for request in requests])
    real = summary(latency_s, functions, deadlines_s)
    runs = [summary(simulated(found, deadlines_s, load_of, seed), load_of[1], deadlines_s) for seed in range(args.runs)]
    mean = {key: statistics.mean(run[key] for run in runs) for key in ("in_time", "compliant", "mean_ms", "p98_ms")}
    busy = sum(lease.over_s - lease.granted_s for lease in held) / (2 * part * SECONDS)
    for model in found.models[: len(SHAPES)]:
        deviation = statistics.pstdev(model.runs_s)
        print(
            f"{model.name}: {model.nbytes / 1e6:.0f} MB, run {model.run_s * 1e3:.1f} ms (deviation "
            f"{deviation * 1e3:.1f}), a wake adds {model.extra_s * 1e3:.1f} ms"
        )
    outside = {name: f"{value * 1e3:.2f} ms" for name, value in asdict_of(found.outside).items()}
    print(f"outside leases: {outside}; GPUs were leased {busy:.0%} of the time; {len(wrong)} wrong or no answers")
    print(f"live {_line(real)}; simulated {_line(mean)} (mean of {args.runs} seeds)")
    shares = [run["compliant"] for run in runs]
    print(f"functions that comply in each simulation: {min(shares):.1%} to {max(shares):.1%}")
    apart = round(abs(mean["in_time"] - real["in_time"]), 6)
    by_function = np.mean([run["in_time_by_function"] for run in runs], axis=0) - np.array(real["in_time_by_function"])
    by_function_apart = float(np.nanmean(np.abs(by_function)))
    ratio = mean["mean_ms"] / real["mean_ms"]
    goals = [
        Goal(
            name="requests in time, simulated - live, in points",
            goal=f"<= {IN_TIME_GOAL * 100:g}",
            measured=apart * 100,
            met=apart <= IN_TIME_GOAL,
        ),
        Goal(
            name=f"requests in time of each of {FUNCTIONS} functions, mean of |simulated - live|, in points",
            goal=f"<= {FUNCTION_GOAL * 100:g}",
            measured=by_function_apart * 100,
            met=by_function_apart <= FUNCTION_GOAL,
        ),
        Goal(
            name="mean latency, simulated / live",
            goal=f"within {LATENCY_GOAL:.0%}",
            measured=ratio,
            met=abs(ratio - 1.0) <= LATENCY_GOAL,
        ),
        Goal(
            name=f"replay of {replayed.events:,} events, {replayed.actions:,} actions",
            goal="identical",
            measured="identical" if replayed.difference is None else "different",
            met=replayed.difference is None,
        ),
        Goal(name="wrong or missing answers", goal="0", measured=len(wrong), met=not wrong),
    ]
    extra = {
        "calibration_leases": [[asdict(lease) for _, lease in side.pairs] for side in (before, after)],
        "models": [asdict_of(model) for model in found.models[: len(SHAPES)]],
        "outside": asdict_of(found.outside),
        "deadlines_s": deadlines_s,
        "gpu_nbytes": found.gpu_nbytes,
        "busy": busy,
        "wakes_per_request": sum(lease.copied_nbytes > 0 for lease in held) / len(held),
        "live": real,
        "simulated": runs,
        "wrong": wrong,
        "leases": [asdict(lease) for lease in held],
    }
    report(goals, args, extra)


def asdict_of(value: ModelSpec | OutsideLease) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


def _line(found: dict[str, Any]) -> str:
    return (
        f"{found['in_time']:.1%} in time, {found['compliant']:.1%} of functions comply, "
        f"mean {found['mean_ms']:.1f} ms, p98 {found['p98_ms']:.0f} ms"
    )


if __name__ == "__main__":
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=7, help="of the test's requests")
    parser.add_argument("--llm", action="store_true", help="a language model and four functions instead")
    parser.add_argument("--adapters", type=int, default=0, help="with --llm: so many adapters instead of functions")
    parser.add_argument("--load", type=float, default=live_llm.LOAD, help="with --llm: streams that an engine has open")
    parser.add_argument("--isolation", choices=["tenant", "function"], default="tenant", help="of these")
    parser.add_argument("--runs", type=int, default=5, help="simulations, each with a seed of its own")
    found = parser.parse_args()
    if found.adapters and not found.llm:
        parser.error("--adapters is of --llm: write both")
    main(found)
