"""What the scheduler makes of a link that is too slow for all models, simulated.

Two GPUs of 10 GB are behind one switch of 4 GB/s. Three quarters of the functions have the vision models of Torpor's
Table 4 and 200 ms; a quarter has models of 1.3 to 2.4 GB and a second. Each is asked ten times a minute, by a Poisson
process. The bar is what a policy satisfies that serves the small models only: as if there were no others.
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final

from benchmarks.papers_parameters import GB, MODELS
from benchmarks.report import Goal, arguments, report
from dormouse.controller.simulator.main import simulate
from dormouse.controller.simulator.scenario import POLICIES, parse_scenario

LARGE: Final = ((1.3, 43), (1.6, 55), (2.0, 65), (2.4, 80))
"""Gigabytes and milliseconds that a request runs."""

LINK: Final = 4 * GB
FUNCTIONS: Final = (48, 56, 64, 80)
BAR: Final = 0.9


def models(functions: int, large: bool) -> Iterator[dict[str, Any]]:
    few = functions // 4
    for index, of in enumerate(MODELS[:7]):
        count = (functions - few) // 7 + (index < (functions - few) % 7)
        wake = of.run_ms + of.nbytes / LINK * 1000
        yield {"name": of.name, "size": of.nbytes, "run": of.run_ms, "wake": wake, "deadline": 200, "functions": count}
    for size, run in LARGE if large else ():
        wake = max(run, size * GB / LINK * 1000) + 10
        name, nbytes = f"{size} GB", int(size * GB)
        yield {"name": name, "size": nbytes, "run": run, "wake": wake, "deadline": 1000, "functions": few // 4}


def satisfied(functions: int, policy: str, large: bool, seed: int, minutes: float) -> tuple[int, float]:
    """Functions that comply, and the share of late requests."""
    tree = {
        "gpus": {"count": 2, "memory": 10 * GB, "link": LINK, "switch": LINK},
        "models": list(models(functions, large)),
        "arrivals": {"process": "poisson", "rate": 10.0, "minutes": minutes},
    }
    found = simulate(parse_scenario(tree, "benchmarks.links"), policy, POLICIES[policy], seed)
    return round(found.compliant * found.functions), found.late


def main(args: argparse.Namespace) -> None:
    minutes, seeds = (3.0, range(1)) if args.quick else (10.0, range(3))
    arms = (("default", True), ("feasible", True), ("default", False))
    jobs = [(number, *arm, seed, minutes) for number in FUNCTIONS for arm in arms for seed in seeds]
    with ProcessPoolExecutor(2) as pool:
        found = dict(zip(jobs, pool.map(satisfied, *zip(*jobs, strict=True)), strict=True))
    goals = []
    for number in FUNCTIONS:
        of = {arm: [found[number, *arm, seed, minutes] for seed in seeds] for arm in arms}
        small = min(count for count, _ in of["default", False])
        for arm, name in ((("default", True), "default"), (("feasible", True), "feasible"), (arms[2], "small only")):
            each = ", ".join(f"{count} ({late:.1%} late)" for count, late in of[arm])
            print(f"{number} functions, {name}: {each}", flush=True)
        if number in (64, 80):
            least = min(count for count, _ in of["default", True])
            name = f"functions satisfied of {number}, the least of {len(seeds)} seeds"
            goals.append(Goal(name=name, goal=f">= {BAR * small:g}", measured=least, met=least >= BAR * small))
    report(goals, args, {"runs": [[*job, *result] for job, result in found.items()]})


if __name__ == "__main__":
    main(arguments(__doc__.splitlines()[0] if __doc__ else "").parse_args())
