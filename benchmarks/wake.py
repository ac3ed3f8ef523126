"""What a wake costs: bandwidth against plain copies, overlap with execution, and the steps of Torpor's Figure 7.

One process has the executor's engine with its device, and the command stream that the shim recorded of a real model;
slabs, manifest and pool are laid out as store and pool do it. Every turn alternates all sides; ratios of medians are
quoted. Outputs are compared with native PyTorch.
"""

import argparse
import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.report import Goal, arguments, report
from benchmarks.wake_models import MODELS, Recording, record
from benchmarks.wake_world import MIB, Arm, World, shapes
from dormouse.core.decisions.memory.transfer import chunked

WAKE_GOAL = 0.92
OVERLAP_GOAL = 1.10


def plain(world: World) -> float:
    """Seconds for the chunks of the last wake between the same addresses, with nothing around them."""
    base = world.device.storage(0, 1).data_ptr()
    address = world.slab.address
    chunks = [
        (base + chunk.device, address + chunk.start, chunk.nbytes)
        for chunk in chunked(world.copies, world.device.chunk_nbytes)
    ]
    return on_a_thread(lambda: copy_all(chunks))


def copy_all(chunks: list[tuple[int, int, int]]) -> float:
    memmove = ctypes.memmove
    began = time.perf_counter()
    for target, source, nbytes in chunks:
        memmove(target, source, nbytes)
    return time.perf_counter() - began


def on_a_thread(work: Callable[[], float]) -> float:
    """Run like the copy stream: beside a thread that waits."""
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def bandwidth(sizes: Sequence[int], chunk_nbytes: int, turns: int) -> dict[str, float]:
    """Wake against plain copies; medians over alternating turns, the first of each thrown away."""
    world = World.of_sizes(sizes, chunk_nbytes)
    wakes, plains = [], []
    for turn in range(turns + 1):
        wake = world.wake()
        world.end()
        world.sleep()
        alone = plain(world)
        if turn:
            wakes.append(wake)
            plains.append(alone)
    world.close()
    wake, alone = statistics.median(wakes), statistics.median(plains)
    return {
        "nbytes": world.nbytes,
        "wake_ms": wake * 1e3,
        "wake_gb_s": world.nbytes / wake / 1e9,
        "plain_gb_s": world.nbytes / alone / 1e9,
        "ratio": alone / wake,
    }


def overlap(recording: Recording, turns: int, arms: Sequence[Arm]) -> dict[str, Any]:
    """One model over a link at which its copy takes about as long as its run: each part alone, and each arm."""
    probe = World.of_recording(recording, Arm.SEGMENTS, nbytes_s=0)
    probe.wake()
    runs = [probe.run() for _ in range(4)]
    probe.close()
    nbytes_s = recording.nbytes / statistics.median(runs[1:])
    worlds = {arm: World.of_recording(recording, arm, nbytes_s) for arm in arms}
    times: dict[str, list[float]] = {name: [] for name in ("run", "copy", *(arm.value for arm in arms))}
    for turn in range(turns + 1):
        for arm, world in worlds.items():
            took = world.wake_and_run()
            if arm is Arm.SEGMENTS:
                run = world.run()
                world.end()
                world.sleep()
                copy = world.wake()
            world.end()
            world.sleep()
            if turn:
                times[arm.value].append(took)
                if arm is Arm.SEGMENTS:
                    times["run"].append(run)
                    times["copy"].append(copy)
    for world in worlds.values():
        world.close()
    result: dict[str, Any] = {f"{name}_ms": statistics.median(values) * 1e3 for name, values in times.items()}
    longer = max(result["run_ms"], result["copy_ms"])
    result |= {"nbytes": recording.nbytes, "storages": len(recording.storages), "link_gb_s": nbytes_s / 1e9}
    result |= {f"{arm.value}_ratio": result[f"{arm.value}_ms"] / longer for arm in arms}
    return result


def line(values: dict[str, Any]) -> str:
    return "  ".join(f"{key} {value:.4g}" for key, value in values.items())


def main(args: argparse.Namespace) -> None:
    turns = 3 if args.quick else 15
    sizes = shapes((256 if args.quick else 512) * MIB)
    goals, copies = [], {}
    for chunk in (2, 4, 8):
        copies[f"{chunk} MiB chunks"] = bandwidth(sizes, chunk * MIB, turns)
        print(f"{chunk} MiB chunks: {line(copies[f'{chunk} MiB chunks'])}", flush=True)
    main_result = copies["4 MiB chunks"]
    goals.append(
        Goal(
            name=f"a model of {main_result['nbytes'] / MIB:.0f} MiB wakes at / plain copies",
            goal=f">= {WAKE_GOAL}",
            measured=main_result["ratio"],
            met=main_result["ratio"] >= WAKE_GOAL,
        )
    )
    models: dict[str, Any] = {}
    for name in MODELS:
        models[name] = result = overlap(record(name), max(3, turns // 2), list(Arm))
        print(f"{name}: {line(result)}", flush=True)
        goals.append(
            Goal(
                name=f"{name}: wake + run / the longer of both",
                goal=f"<= {OVERLAP_GOAL}",
                measured=result["segments_ratio"],
                met=result["segments_ratio"] <= OVERLAP_GOAL,
            )
        )
        steps = [result[f"{arm.value}_ms"] for arm in Arm]
        goals.append(
            Goal(
                name=f"{name}: whole, + resident, + per parameter, + segments (ms)",
                goal="falling",
                measured=" > ".join(f"{step:.0f}" for step in steps),
                met=steps == sorted(steps, reverse=True),
            )
        )
    report(goals, args, {"copies": copies, "models": models, "turns": turns})


if __name__ == "__main__":
    main(arguments(__doc__.splitlines()[0] if __doc__ else "").parse_args())
