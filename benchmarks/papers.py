"""The evaluations of Torpor and Tangram with the scheduling core that serves: tables, figures, and goals.

All of it is simulated (docs/simulator.md); docs/papers.md says with which parameters and what came out. A run's result
is remembered under what it depends on, the core's sources included: what was interrupted goes on where it was, and what
has changed is made again. ``--write`` writes the tables into docs/papers.md and the figures into docs/figures.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import papers_beyond, papers_tangram, papers_tangram_kv, papers_torpor, papers_torpor_gpus
from benchmarks.papers_cache import Remembered, make
from benchmarks.papers_figures import COMPLIANT, KINDS, Figure, Point, Results, Setting, saturation
from benchmarks.papers_plots import draw
from benchmarks.papers_tables import goal_table, tables, write
from benchmarks.report import Goal, arguments, report

ROOT: Final = Path(__file__).parents[1]

TRACE: Final = ROOT / "build" / "papers" / "torpor_samples_203f_31min.csv.gz"

IMPORTANCE: Final = (
    *("12", "8", "9", "10", "t13", "t12a", "t12b", "t8", "t9", "11", "exact12", "exact", "memory"),
    *("14a", "14b", "orders", "sharing", "14x3", "bands", "bound", "64", "choices"),
)
"""In this order they are made."""

FIGURES: Final[dict[str, Figure]] = {
    name: figure
    for name in IMPORTANCE
    for module in (papers_torpor, papers_torpor_gpus, papers_tangram, papers_tangram_kv, papers_beyond)
    for figure in module.FIGURES
    if figure.name == name
}

MISSING: Final = (
    "{path}: the trace is not there; give its path with --trace: tools/samples.npy of github.com/FCSLab/torpor (commit "
    "1484e74, MIT licence, (c) 2025 FCSLab) as CSV, with a header func,m0,...,m30 and a line for each of 203 functions"
)


def main(args: argparse.Namespace) -> None:
    if not args.trace.is_file():
        sys.exit(MISSING.format(path=args.trace))
    names = list(FIGURES) if args.figures is None else args.figures.split(",")
    if unknown := [name for name in names if name not in FIGURES]:
        sys.exit(f"--figures: {unknown[0]} is unknown; write some of {','.join(FIGURES)}")
    seeds = 1 if args.quick else args.seeds
    setting = Setting(trace=str(args.trace.resolve()), folder=args.cache.parent, seeds=seeds, quick=args.quick)
    points = {name: FIGURES[name].points(setting) for name in names}
    known = Remembered(args.cache)
    until_s = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    if not args.known:
        make([point.run for name in names for point in points[name]], known, args.jobs, until_s)
    results = {name: Results(points[name], known.found) for name in names}
    made = {name: tables(FIGURES[name], results[name]) for name in names if results[name].runs}
    for name, text in made.items():
        print(f"\n{FIGURES[name].title} (simulated). {seeds_of(results[name])}\n\n{text}")
    reached = goals(results)
    if args.write:
        (ROOT / "docs" / "figures").mkdir(exist_ok=True)
        for name in made:
            draw(FIGURES[name], results[name], ROOT / "docs" / "figures" / f"papers-{name}.png")
        heads = {name: f"{seeds_of(results[name])}\n\n{text}" for name, text in made.items()}
        if {"10", "11"} <= made.keys():  # what the goals are of
            heads["goals"] = goal_table(reached)
        for name in write(ROOT / "docs" / "papers.md", heads):
            print(f"docs/papers.md has no place for figure {name}", file=sys.stderr)
    report(reached, args, {"figures": {name: summary(points[name], known.found) for name in made}})


def seeds_of(results: Results) -> str:
    """How many, as a sentence."""
    counts = {len(runs) for runs in results.runs.values()}
    few = f", {min(counts)} at some points" if len(counts) > 1 else ""
    return f"{max(counts)} seed{'s' if max(counts) > 1 else ''}{few}."


def summary(points: Sequence[Point], known: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every run's result with its place in the figure."""
    return [
        {"arm": point.arm, "arrivals": point.kind, "x": point.x, "seed": point.run.seed, **known[point.run.key]}
        for point in points
        if point.run.key in known
    ]


def goals(results: Mapping[str, Results]) -> list[Goal]:
    """The numbers to reach, of the figures that were made."""
    found: list[Goal] = []
    for kind, name in KINDS.items():
        for figure, x, least in (("10", 160, 1.0), ("11", 560, 0.98)):
            if figure in results and (kind, "default", x) in results[figure].runs:
                # the least of the seeds
                measured = min(results[figure].values(kind, "default", x, COMPLIANT))
                text = f"compliant of {x} functions, default, {name}, worst seed"
                found.append(Goal(name=text, goal=f">= {least:.0%}", measured=measured, met=measured >= least))
        if "11" not in results or (kind, "torpor", 720) not in results["11"].runs:
            continue
        fig_11 = results["11"]
        ratio = saturation(fig_11, kind, "default") / saturation(fig_11, kind, "torpor")
        text = f"functions of which 80 % comply, default ÷ torpor, {name}"
        found.append(Goal(name=text, goal=">= 1.15", measured=round(ratio, 3), met=ratio >= 1.15))
        worse = len(papers_torpor.worse(fig_11, kind))
        text = f"numbers of functions at which the default is below torpor, {name}"
        found.append(Goal(name=text, goal="0", measured=worse, met=not worse))
    return found


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__ or "")
    made.add_argument("--figures", help=f"some of {','.join(FIGURES)}")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--trace", type=Path, default=TRACE, help="requests per minute of functions, as CSV")
    made.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at the same time")
    made.add_argument("--minutes", type=float, help="begin no run after these")
    made.add_argument("--cache", type=Path, default=ROOT / "build" / "papers" / "runs.jsonl")
    made.add_argument("--known", action="store_true", help="simulate nothing: show what is remembered")
    made.add_argument("--write", action="store_true", help="into docs/papers.md and docs/figures")
    return made


if __name__ == "__main__":
    main(parser().parse_args())
