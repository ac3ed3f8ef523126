"""ServerlessLoRA's batching, and other orders of turns and placement, against what Dormouse does: simulated with the
paper's models, hardware and arrivals (serverless_lora_workload.py says where each number is from).

    python -m benchmarks.serverless_lora --data DIR [--quick] [--out FILE] [--check]

``DIR`` has azure_func2019_3x8_4h_arrivals.csv.gz (class, idx, func, window, t_s: seconds of arrivals of eight functions
of each class) and gsm8k_lengths.csv.gz (id, p_llama2, r_llama2: tokens of prompts and answers). Each arm differs from
Dormouse's policy in one setting; all have the same requests. In full it takes some four minutes of a processor.
"""

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.report import Goal, arguments, report
from benchmarks.serverless_lora_workload import CLASSES, GPU_NBYTES, Pairs, arrivals, lengths, models, topology
from dormouse.controller.simulator.baselines import SimulatedPolicy
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.streams.outcome import tpot_s
from dormouse.core.decisions.scheduling import events as ev
from dormouse.schemas.policy import Policy

OURS: Final = "dormouse"

ARMS: Final[dict[str, Policy]] = {
    OURS: SimulatedPolicy(),
    "turns in turn": SimulatedPolicy(turn_order="fifo"),
    "no affinity": SimulatedPolicy(affinity=False),
    "fill or expire, literally": SimulatedPolicy(batching="fill-or-expire"),
    "batches of 10, 500 ms": SimulatedPolicy(batching="fixed", batch_size=10, batch_delay_ms=500),
    "batches of 20, 1000 ms": SimulatedPolicy(batching="fixed", batch_size=20, batch_delay_ms=1000),
}

NOISE: Final = 0.05
"""By what share an arm may be better than Dormouse and count as equal: p99 of some 2,000 streams are 20 of them."""

WORSE: Final = 0.10


class Load(NamedTuple):
    """``faster``: than the traces were. ``most`` requests are asked at most."""

    name: str
    gpus: int
    faster: float
    gpu_nbytes: int = GPU_NBYTES
    isolation: str = "function"
    most: int = 1 << 30


LOADS: Final = (
    Load("one GPU", 1, 1.5),
    Load("one GPU, crowded", 1, 2.0),
    Load("two GPUs", 2, 3.0),
    Load("two GPUs of 32 GB", 2, 2.0, 32_000_000_000, most=400),
    Load("two GPUs, one runtime for each base", 2, 3.0, isolation="tenant"),
)
"""On two GPUs of 32 GB there is room for one base each: who brings the other one there makes it leave."""


class Outcome(NamedTuple):
    """Of all streams of a run; times in ms, shares of them. ``decision_us`` is None where none was timed."""

    streams: int
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    late_ttft: float
    late_tpot: float
    late: float
    copied_gb: float
    streams_per_s: float
    decision_p99_us: float | None = None


def run(policy: Policy, kind: str, load: Load, data: Path, pairs: Pairs, seed: int = 0, timed: bool = False) -> Outcome:
    """One class of arrivals under one policy."""
    specs = models(pairs, load.isolation)
    asked = arrivals(data, kind, load.faster, load.most, seed)
    llms = [spec.llm for spec in specs if spec.llm is not None]
    ttfts, tpots = np.array([llm.ttft_s for llm in llms]), np.array([llm.tpot_s for llm in llms])
    simulation = Simulation(
        policy, topology(load.gpus), load.gpus, load.gpu_nbytes, specs, ttfts.tolist(), 0.99, seed
    )  # fmt: skip
    took_s = _time_decisions(simulation) if timed else []
    began_s = process_time()
    simulation.run(asked.times_s, asked.functions)
    wall_s = process_time() - began_s
    streams = simulation.streams
    assert streams is not None
    whole = ~np.isnan(streams.over_s)
    first_s, each_s = np.where(whole, streams.first_s, np.inf), tpot_s(streams)
    late_ttft, late_tpot = first_s > ttfts[asked.functions], each_s > tpots[asked.functions]
    ranked = np.sort(first_s) * 1000
    return Outcome(
        len(first_s),
        float(ranked.mean()),
        float(ranked[len(ranked) // 2]),
        float(ranked[int(0.99 * len(ranked))]),
        float(late_ttft.mean()),
        float(late_tpot.mean()),
        float((late_ttft | late_tpot).mean()),
        simulation.host_nbytes / 1e9,
        len(first_s) / wall_s,
        float(np.quantile(took_s, 0.99) * 1e6) if took_s else None,
    )


def _time_decisions(simulation: Simulation) -> list[float]:
    """How long each event of the core takes, from now on."""
    took_s: list[float] = []
    handle = simulation.core.handle

    def timed(event: ev.Event, now_s: float) -> list[ev.Action]:
        began_s = perf_counter()
        actions = handle(event, now_s)
        took_s.append(perf_counter() - began_s)
        return actions

    simulation.core.handle = timed  # type: ignore[method-assign]
    return took_s


def main() -> None:
    parser = arguments(__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="where the arrivals and lengths are")
    args = parser.parse_args()
    pairs = lengths(args.data)
    loads = [load._replace(most=min(load.most, 150)) for load in LOADS] if args.quick else LOADS
    kinds = CLASSES[:1] if args.quick else CLASSES
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for load in loads:
        for kind in kinds:
            case = f"{load.name}, {kind}"
            outcomes = {arm: run(policy, kind, load, args.data, pairs) for arm, policy in ARMS.items()}
            found[case] = {arm: outcome._asdict() for arm, outcome in outcomes.items()}
            _show(case, outcomes)
    speed = run(ARMS[OURS], "Normal", LOADS[-1], args.data, pairs)
    timed = run(ARMS[OURS], "Normal", loads[0], args.data, pairs, timed=True)
    assert timed.decision_p99_us is not None
    print("\nspeed:", speed, "\ndecisions:", timed)
    goals = [_goal(arm, found) for arm in ARMS if arm != OURS]
    goals += [
        Goal(
            name="streams simulated per second of a core (two runtimes, two GPUs)",
            goal=">= 5,000",
            measured=round(speed.streams_per_s),
            met=speed.streams_per_s >= 5000,
        ),
        Goal(
            name="a decision, p99, us (eight runtimes, one GPU)",
            goal="<= 100",
            measured=round(timed.decision_p99_us, 1),
            met=timed.decision_p99_us <= 100,
        ),
    ]
    report(goals, args, {"cases": found, "speed": speed._asdict(), "decisions": timed._asdict()})


def _show(case: str, outcomes: Mapping[str, Outcome]) -> None:
    first = next(iter(outcomes.values()))
    print(f"\n{case}: {first.streams} streams")
    print(f"{'':28}{'TTFT p50':>10}{'p99 ms':>10}{'mean':>10}{'late TTFT':>11}{'TPOT':>7}{'any':>7}{'copied GB':>11}")
    for arm, each in outcomes.items():
        print(
            f"{arm:28}{each.ttft_p50:10.1f}{each.ttft_p99:10.1f}{each.ttft_mean:10.1f}{each.late_ttft:11.1%}"
            f"{each.late_tpot:7.1%}{each.late:7.1%}{each.copied_gb:11.1f}",
            flush=True,
        )


def _goal(arm: str, found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Goal:
    """Nowhere better by more than noise, and somewhere worse by a tenth: by p50 and p99, and points of violations."""
    better, worse = "", ""
    most_better, most_worse = 0.0, 0.0
    for case, arms in found.items():
        ours, theirs = arms[OURS], arms[arm]
        for name in ("ttft_p50", "ttft_p99"):
            change = theirs[name] / ours[name] - 1.0
            if -change > most_better:
                most_better, better = -change, f"{case}: {name} {-change:.0%} less"
            if change > most_worse:
                most_worse, worse = change, f"{case}: {name} {change:.0%} more"
        points = theirs["late"] - ours["late"]
        if -points > most_better:
            most_better, better = -points, f"{case}: {-points:.1%} less late"
        if points > most_worse:
            most_worse, worse = points, f"{case}: {points:.1%} more late"
    return Goal(
        name=f"{arm}, instead of {OURS}",
        goal="nowhere better by more than 5 %, somewhere worse by 10 % or more",
        measured=f"at best {better or 'equal'}; at worst {worse or 'equal'}",
        met=most_better <= NOISE and most_worse >= WORSE,
    )


if __name__ == "__main__":
    main()
