"""Which modules of gpuserver run between a lease's Wake and its end, and how long they are.

    python -m benchmarks.lease_modules

Counted by a profiler in the executor's thread and in the compute thread, over the emulated GPU: for a lease without a
command, for one with an END alone whose model is there, and for one whose model has to be brought. The executor's own
module, which has the sockets, is not run here and counts as one more.
"""

import argparse
import inspect
import statistics
import sys
from types import FrameType
from typing import Any

from benchmarks.report import Goal, arguments, report
from benchmarks.wake_world import MIB, World
from dormouse.schemas import messages as m

PREFIX = "dormouse.gpuserver."


def unused(world: World) -> None:
    world.begin()
    world._do(world.leases.dispatch, m.Over(serials=[world.serial]))


def ended(world: World) -> None:
    world.begin()
    world.end()


def brought(world: World) -> None:
    world.wake()
    world.end()


def modules(world: World, lease: Any) -> dict[str, int]:
    """Lines of each module that the lease runs."""
    seen: dict[str, str] = {}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith(PREFIX):
            seen[name] = frame.f_code.co_filename

    world.io.submit(sys.setprofile, profile).result()
    sys.setprofile(profile)
    try:
        lease(world)
    finally:
        sys.setprofile(None)
        world.io.submit(sys.setprofile, None).result()
    lines = {name: len(inspect.getsource(sys.modules[name]).splitlines()) for name in seen}
    return {name.removeprefix(PREFIX): lines[name] for name in sorted(lines)}


def main(args: argparse.Namespace) -> None:
    world = World.of_sizes([MIB] * 4, MIB)
    results: dict[str, dict[str, int]] = {}
    for name, lease in (("its model brought", brought), ("an END alone", ended), ("no command", unused)):
        results[name] = modules(world, lease)
    world.close()
    for name, found in results.items():
        print(f"{name}: {len(found)} modules, median {statistics.median(found.values()):g} lines")
        print("  " + ", ".join(f"{module} {lines}" for module, lines in found.items()))
    count = len(results["an END alone"]) + 1
    longest = max(max(found.values()) for found in results.values())
    goals = [
        Goal(name="modules between Wake and Done, model there", goal="<= 10", measured=count, met=count <= 10),
        Goal(name="longest of them, lines", goal="<= 350", measured=longest, met=longest <= 350),
    ]
    report(goals, args, {"results": results})


if __name__ == "__main__":
    main(arguments(__doc__ or "").parse_args())
