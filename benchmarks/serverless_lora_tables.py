"""ServerlessLoRA's Figures 6 to 12 and Tables 1 to 3 beside what its policies, its baselines and Dormouse do in the
simulator: 16 GPUs, the paper's rates.

    python -m benchmarks.serverless_lora_tables --data DIR [--quick] [--write] [--out FILE]

``DIR`` as for benchmarks.serverless_lora. ``--write`` writes the tables into docs/papers.md and a figure beside it.
What systems and constants are is in serverless_lora_systems.py. In full it takes some six minutes of a processor, with
``--quick`` half a minute.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.papers_tables import write
from benchmarks.report import Goal, arguments, report
from benchmarks.serverless_lora_figures import (
    LIKE,
    ablations,
    breakdown,
    claims,
    means,
    most,
    table_1,
    workload,
)
from benchmarks.serverless_lora_plots import draw
from benchmarks.serverless_lora_published import LESS_COST, LESS_TTFT
from benchmarks.serverless_lora_scaling import full_batches, scaled, show_full, show_scaled, table_2
from benchmarks.serverless_lora_systems import ABLATIONS, IDLE_MODE, SYSTEMS, Constants, Run, run_class
from benchmarks.serverless_lora_workload import CLASSES, lengths

ROOT: Final = Path(__file__).parents[1]

SOME: Final = 600
"""Requests of a point of Fig. 11."""


def main() -> None:
    parser = arguments(__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="where the arrivals and lengths are")
    parser.add_argument("--write", action="store_true", help="into docs/papers.md and docs/figures")
    args = parser.parse_args()
    pairs, count, constants = lengths(args.data), 150 if args.quick else 1 << 30, Constants()
    runs: dict[str, dict[str, Run]] = {}
    for kind in ("Normal",) if args.quick else CLASSES:
        systems = SYSTEMS | ABLATIONS if kind == "Normal" else SYSTEMS | {LIKE: ABLATIONS[LIKE]}
        runs[kind] = {}
        for name, system in systems.items():
            runs[kind][name] = run_class(system, kind, args.data, pairs, count, constants)
            print(f"{kind}, {name}: {runs[kind][name].by['all']}", flush=True)
    normal = runs["Normal"]
    full = full_batches(pairs)
    scaling = scaled(args.data, pairs, 100 if args.quick else SOME, args.quick)
    made = {
        "lora-claims": claims(runs, constants.idle),
        "lora-6": means(runs, "ttft_ms", "Fig. 6, mean TTFT, ms"),
        "lora-7": means(runs, "tpot_ms", "Fig. 7, mean TPOT, ms", 1),
        "lora-8": breakdown(pairs, constants) + "\n\n" + workload(normal, pairs, constants),
        "lora-9": table_1(runs, constants.idle),
        "lora-10": show_full(full) + "\n\n" + ablations(normal, constants.idle),
        "lora-11": show_scaled(scaling),
        "lora-12": means(runs, "late", "Fig. 12, late first tokens"),
    }
    for text in made.values():
        print(f"\n{text}")
    print("\nTable 2:", {name: round(value, 2) for name, value in table_2().items()}, "paper: 73 / 32 = 2.28")
    print("\nwith idle instances at Alibaba's price for idle mode:\n\n" + claims(runs, IDLE_MODE))
    if args.write:
        draw(runs, ROOT / "docs" / "figures" / "papers-lora.png", constants.idle)
        for name in write(ROOT / "docs" / "papers.md", made):
            print(f"docs/papers.md has no place for {name}")
    found: dict[str, Any] = {kind: {name: as_json(each) for name, each in own.items()} for kind, own in runs.items()}
    report(goals(runs, constants.idle), args, {"results": found, "full": full, "scaled": scaling, "table_2": table_2()})


def as_json(run: Run) -> dict[str, Any]:
    return {"by": {of: value._asdict() for of, value in run.by.items()}, **run.held._asdict(), "ended_s": run.ended_s}


def goals(runs: dict[str, dict[str, Run]], idle: float) -> list[Goal]:
    """Dormouse against the paper's policy as it is written, all else equal; and against the paper's baselines."""
    literal, insta = "Eq. 3, else as Dormouse", "InstaInfer-like"

    def slower(systems: Mapping[str, Run], of: str) -> float:
        return systems["Dormouse"].by[of].ttft_ms / systems[literal].by[of].ttft_ms

    def longer(systems: Mapping[str, Run], of: str) -> float:
        return systems["Dormouse"].by[of].e2e_ms / systems[literal].by[of].e2e_ms

    def sooner(systems: Mapping[str, Run], of: str) -> float:
        return 1 - systems["Dormouse"].by[of].ttft_ms / systems[insta].by[of].ttft_ms

    def cheaper(systems: Mapping[str, Run], of: str) -> float:
        return 1 - systems["Dormouse"].cost_cny(idle, of) / systems[insta].cost_cny(idle, of)

    found = []
    for what, value in (("TTFT", slower), ("E2E", longer)):
        ratio, where = most(runs, value)
        name = f"{what}, Dormouse ÷ the paper's policy (Eq. 3), all else equal, at worst"
        found.append(Goal(name=name, goal="< 1", measured=f"{ratio:.3f} ({where})", met=ratio < 1))
    for what, value, least in (("TTFT", sooner, LESS_TTFT), ("cost", cheaper, LESS_COST)):
        less, where = most(runs, value)
        name = f"{what}, Dormouse, less than {insta}'s, at best"
        found.append(Goal(name=name, goal=f">= {least:.0%}", measured=f"{less:.0%} ({where})", met=less >= least))
    return found


if __name__ == "__main__":
    main()
