"""What it gains to bring models before they are asked for, and to make room before KV needs it (ServerlessLoRA §4.1 and
§4.3), simulated; and how near the greedy choice comes to the exact optimum.

    python -m benchmarks.preloading --data DIR [--quick] [--out FILE] [--check]

``DIR`` has azure_func2019_3x8_4h_arrivals.csv.gz and gsm8k_lengths.csv.gz, as for benchmarks.serverless_lora, and
azure_func2019_500f_8h.csv.gz (trigger, and m480 to m959: requests in each minute). Hardware and language models are
ServerlessLoRA's (serverless_lora_workload.py), ordinary functions have Torpor's models. All arms have the same
requests. In full it takes seven minutes of a processor, with ``--quick`` a quarter of one.

A ratio is the geometric mean of three seeds' ratios, with its standard error beside it: of a mean over seeds, the one
with the longest waits would be most.
"""

import csv
import gzip
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.filling_cases import any_forest, backbones_and_adapters, optimum
from benchmarks.report import Goal, arguments, report
from benchmarks.serverless_lora_workload import GPU_NBYTES, LINK_BPS, Pairs, arrivals, lengths, models
from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.core.decisions.scheduling.filling import fill
from dormouse.core.decisions.scheduling.topology import HOST_BPS, Topology
from dormouse.schemas.policy import Policy

ARMS: Final[dict[str, Policy]] = {
    "both": Policy(preload=True),
    "preloading off": Policy(),
    "offloading when asked": Policy(preload=True, offload="asked"),
    "offloading off": Policy(preload=True, offload="never"),
}
"""``offloading off`` is the paper's NDO: what is idle stays, and KV has what is free."""

NOISE: Final = 0.03
"""By what share a mean differs between orders of the same arrivals; and a ratio by its standard error."""

WORSE: Final = 1.10

TORPOR: Final = (
    *((97e6, 0.007), (170e6, 0.008), (240e6, 0.010), (418e6, 0.012), (436e6, 0.013), (548e6, 0.013)),
    *((1340e6, 0.030), (2560e6, 0.060)),
)
"""Bytes and seconds of a run: sizes of the models of Torpor's Table 4, as papers_parameters.py has them, rounded."""

USERS: Final = ("http", "queue", "event", "orchestration", "storage")
"""Triggers of functions that somebody waits for: no timers."""


BACK_S: Final = 5.0
"""Until another executor drives a GPU whose executor has died: about what the imports take."""


class Load(NamedTuple):
    """A workload: the ``kind`` of arrivals of language models, so many times as fast as they were, over the first of
    two backbones or both, beside so many ordinary functions of 0.1 to 20 requests a minute. ``lost_s``: a GPU is lost
    each time so much has passed, and is back after BACK_S.
    """

    name: str
    kind: str
    faster: float
    gpu_nbytes: int
    backbones: int
    functions: int = 0
    lost_s: float = 0.0
    link_bps: float = LINK_BPS


LOADS: Final = (
    Load("bursts of KV beside 60 functions", "Bursty", 4.0, 32_000_000_000, 1, 60, link_bps=HOST_BPS),
    Load("the same, half as fast, 80 functions", "Bursty", 2.0, 40_000_000_000, 1, 80, link_bps=HOST_BPS),
    Load("two backbones, bursts", "Bursty", 4.0, GPU_NBYTES, 2),
    Load("two backbones, normal", "Normal", 4.0, GPU_NBYTES, 2),
    Load("60 functions, the GPU lost every 5 min", "Normal", 4.0, 48_000_000_000, 1, 60, 300.0, HOST_BPS),
)


class Requests(NamedTuple):
    models: list[ModelSpec]
    times_s: npt.NDArray[np.float64]
    who: npt.NDArray[np.int64]


def requests(load: Load, data: Path, pairs: Pairs, seed: int, share: float) -> Requests:
    """Those of the first ``share`` of the time."""
    asked = arrivals(data, load.kind, load.faster, seed=seed)
    llms = models(pairs)[: 4 * load.backbones]
    until_s = 4 * 3600 / load.faster * share
    mine = (asked.functions < len(llms)) & (asked.times_s < until_s)
    times, who = [asked.times_s[mine]], [asked.functions[mine]]
    ordinary: list[ModelSpec] = []
    for counts in _functions(data, load.functions, int(until_s // 60), seed):
        rng = np.random.default_rng([seed, len(ordinary)])
        at_s = [60.0 * minute + rng.uniform(0.0, 60.0, count) for minute, count in enumerate(counts)]
        times.append(np.concatenate(at_s))
        who.append(np.full(len(times[-1]), len(llms) + len(ordinary), np.int64))
        nbytes, run_s = TORPOR[len(ordinary) % len(TORPOR)]
        ordinary.append(ModelSpec(name="torpor", nbytes=int(nbytes), run_s=run_s, segment_nbytes=64_000_000))
    all_s, all_who = np.concatenate(times), np.concatenate(who)
    order = np.argsort(all_s, kind="stable")
    return Requests(llms + ordinary, all_s[order], all_who[order])


def _functions(data: Path, count: int, minutes: int, seed: int) -> list[npt.NDArray[np.int64]]:
    """Requests in each minute of functions of Azure's day, drawn by the seed."""
    if not count:
        return []
    with gzip.open(data / "azure_func2019_500f_8h.csv.gz", "rt", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["trigger"] in USERS]
    found = [np.array([int(row[f"m{minute}"]) for minute in range(480, 480 + minutes)]) for row in rows]
    found = [counts for counts in found if 0.1 <= counts.mean() <= 20.0]
    chosen = np.random.default_rng(seed).permutation(len(found))[:count]
    return [found[number] for number in chosen]


class Outcome(NamedTuple):
    """``waits_ms``: mean of what requests of ordinary functions took beyond their run. Times to first tokens: mean and
    99th percentile. ``wakes``: of all.
    """

    ttft_ms: float
    ttft_p99_ms: float
    waits_ms: float
    wakes: int
    preempted: int
    preloaded_gb: float


def simulate(policy: Policy, load: Load, asked: Requests, seed: int) -> Outcome:
    known, end_s = asked.models, float(asked.times_s[-1])
    deadlines = [spec.llm.ttft_s if spec.llm is not None else 0.2 for spec in known]
    every = np.arange(load.lost_s, end_s, load.lost_s) if load.lost_s else ()
    faults = [Fault(gpu=0, at_s=float(at_s), back_s=float(at_s) + BACK_S) for at_s in every]
    simulation = Simulation(
        policy, Topology(host_bps=load.link_bps), 1, load.gpu_nbytes, known, deadlines, 0.98, seed, faults
    )
    latency_ms = simulation.run(asked.times_s, asked.who) * 1e3
    llm = np.array([known[who].llm is not None for who in asked.who])
    runs_ms = np.array([known[who].run_s for who in asked.who[~llm]]) * 1e3
    streams, counts = simulation.streams, [each.counts for each in simulation.core.functions.values()]
    return Outcome(
        float(np.nanmean(latency_ms[llm])),
        float(np.nanpercentile(latency_ms[llm], 99)),
        float(np.nanmean(latency_ms[~llm] - runs_ms)) if len(runs_ms) else 0.0,
        simulation.wakes,
        int(streams.preempted.sum()) if streams is not None else 0,
        sum(each.preloaded_nbytes for each in counts) / 1e9,
    )


class Ratio(NamedTuple):
    """``error``: its standard error, by seeds; 0 with one."""

    value: float
    error: float

    @classmethod
    def of(cls, arm: Sequence[float], ours: Sequence[float]) -> "Ratio":
        logs = [math.log(a / b) for a, b in zip(arm, ours, strict=True)]
        value = math.exp(mean(logs))
        return cls(value, value * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0)


def ratios(arm: Sequence[Outcome], ours: Sequence[Outcome]) -> dict[str, Ratio]:
    """Of what arm and Dormouse made their clients wait."""
    found = {"first token": Ratio.of([each.ttft_ms for each in arm], [each.ttft_ms for each in ours])}
    if ours[0].waits_ms:
        found["wait of functions"] = Ratio.of([each.waits_ms for each in arm], [each.waits_ms for each in ours])
    return found


def greedy(cases: int) -> list[Goal]:
    goals = []
    for name, case, least in (
        ("greedy ÷ optimum, backbones and adapters", backbones_and_adapters, 0.95),
        ("greedy ÷ optimum, any forest (mean)", any_forest, 0.95),
    ):
        shares = []
        for seed in range(cases):
            artefacts, room = case(seed)
            if best := optimum(artefacts, room):
                shares.append(sum(each.value for each in fill(artefacts, room)) / best)
        found = mean(shares) if case is any_forest else min(shares)
        goals.append(Goal(name=f"{name}, {cases} cases", goal=">= 0.95", measured=found, met=found >= least))
    return goals


def main() -> None:
    parser = arguments((__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="where the arrivals and lengths are")
    args = parser.parse_args()
    pairs = lengths(args.data)
    seeds, share = (1, 0.25) if args.quick else (3, 1.0)
    goals = greedy(300 if args.quick else 2000)
    measured: dict[str, dict[str, list[Outcome]]] = {}
    for load in LOADS[::2] if args.quick else LOADS:
        print(f"\n{load.name}")
        found: dict[str, list[Outcome]] = {arm: [] for arm in ARMS}
        for seed in range(seeds):
            asked = requests(load, args.data, pairs, seed, share)
            for arm, policy in ARMS.items():
                found[arm].append(simulate(policy, load, asked, seed))
        for arm, outcomes in found.items():
            print(f"  {arm:24}", *(f"{name} {mean(column):.4g}" for name, column in _columns(outcomes)), flush=True)
        measured[load.name] = found
    goals += [goal for arm in list(ARMS)[1:] for goal in _arm(arm, measured)]
    extra = {load: {arm: [each._asdict() for each in got] for arm, got in by.items()} for load, by in measured.items()}
    report(goals, args, {"measured": extra})


def _columns(outcomes: Sequence[Outcome]) -> list[tuple[str, list[float]]]:
    return [(name, [float(getattr(each, name)) for each in outcomes]) for name in Outcome._fields]


def _arm(arm: str, measured: Mapping[str, Mapping[str, Sequence[Outcome]]]) -> list[Goal]:
    found = {
        f"{name} ({load})": ratio
        for load, by in measured.items()
        for name, ratio in ratios(by[arm], by["both"]).items()
    }
    best, worst = min(found, key=lambda key: found[key].value), max(found, key=lambda key: found[key].value)
    least, most = found[best], found[worst]
    wanted = ">= 1.10" if arm != "offloading when asked" else "reported"
    return [
        Goal(
            name=f"{arm}: best, {best} ± {least.error:.3f}",
            goal=f">= {1 - NOISE:.2f} - error",
            measured=least.value,
            met=least.value >= 1 - NOISE - least.error,
        ),
        Goal(
            name=f"{arm}: worst, {worst} ± {most.error:.3f}",
            goal=wanted,
            measured=most.value,
            met=most.value >= WORSE or wanted == "reported",
        ),
    ]


if __name__ == "__main__":
    main()
