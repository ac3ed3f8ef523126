"""What every benchmark shares: its command line, its table of goals, its JSON file and its exit status.

A benchmark measures, then ends with ``report(goals, args, extra)``. Nothing here measures anything.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One number that was to be reached; ``goal`` says in words what ``measured`` had to be, e.g. ``">= 0.80"``."""

    name: str
    goal: str
    measured: float | int | str
    met: bool


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark takes; add your own before ``parse_args``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: to see that it runs, not to quote")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a goal is missed")
    return parser


def machine() -> dict[str, Any]:
    """What a number must be quoted with."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_nbytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def report(goals: Sequence[Goal], args: argparse.Namespace, extra: dict[str, Any] | None = None) -> None:
    """Print the table, write ``--out``, leave with status 1 if ``--check`` was given and a goal was missed.

    Args:
        extra: everything measured, for the JSON file; must be serialisable.
    """
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "command": " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
            "quick": args.quick,
            "machine": machine(),
            "goals": [asdict(goal) for goal in goals],
            **(extra or {}),
        }
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    rows = [("name", "goal", "measured", "met")]
    rows += [(goal.name, goal.goal, _show(goal.measured), "yes" if goal.met else "NO") for goal in goals]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if args.check and not all(goal.met for goal in goals):
        sys.exit(1)


def _show(value: float | int | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
