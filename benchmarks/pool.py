"""What one GPU's pool costs: bytes loaded, bytes moved and planning time under each strategy, no memory touched.

Requests are served in ``benchmarks.pool_trace``, blocks are allocated in ``benchmarks.pool_torpor``; here are the time
of one plan, that of one granule, and the goals. Times are this thread's processor time.
"""

import argparse
import gc
import itertools
import math
import random
import statistics
import time

from benchmarks.pool_models import language_models
from benchmarks.pool_torpor import fig13
from benchmarks.pool_trace import SMALL, compare, growing, thread_ms
from benchmarks.report import Goal, arguments, report
from dormouse.core.decisions.memory.freelist import aligned
from dormouse.core.decisions.memory.pools.protocol import Mapping
from dormouse.core.decisions.memory.pools.regions import Regions
from dormouse.gpuserver.device.host.memory import MemfdGranules


def planning(turns: int) -> dict[str, float]:
    """1,000 new tensors into 1,000 regions, 500 free and 500 not: with room to spare, with nearly every free byte
    needed, and with some evicted. Each is the first of its pool, so nothing is warm.
    """
    times: dict[str, list[float]] = {"fits": [], "packed": [], "evicts": []}
    kinds = [("fits", 0.9), ("packed", 0.9995), ("evicts", 1.2)]
    for turn, (kind, taken) in itertools.product(range(turns), kinds):  # in turn: slow moments of the host strike all
        rng = random.Random(turn)
        sizes = [rng.choice([1, 4, 8, 16, 64]) * rng.randint(1, 64) * 64 * 1024 for _ in range(1000)]
        pool = Regions(sum(map(aligned, sizes)))
        pool.place(list(enumerate(sizes)), cost=lambda segment: 1.0)
        pool.drop(range(0, 1000, 2))
        weights = [rng.choice([1, 4, 8, 16, 64]) * rng.randint(1, 64) for _ in range(1000)]
        unit = pool.free_nbytes * taken / sum(weights)
        needs = [(2000 + n, max(512, int(weight * unit) // 512 * 512)) for n, weight in enumerate(weights)]
        price = [rng.random() for _ in range(1000)]
        began = thread_ms()
        pool.place(needs, cost=price.__getitem__)
        times[kind].append(thread_ms() - began)
        pool.check()
    print("\n1,000 tensors in 1,000 regions, ms, least and median:")
    for kind, found in times.items():
        print(f"  {kind:8} {min(found):6.2f} {statistics.median(found):6.2f}", flush=True)
    return {kind: statistics.median(found) for kind, found in times.items()}


def remap_us() -> tuple[float, float]:
    """Microseconds for mapping and for unmapping one populated 2 MiB granule of an emulated GPU on this host."""
    count = 16
    memory = MemfdGranules([(SMALL, count)], 2 * count * SMALL)
    try:
        memory.populate(0, count * SMALL)
        mappings = [Mapping(2 * granule * SMALL, granule, SMALL) for granule in range(count)]
        times = [time.perf_counter()]
        for unmapped, mapped in (([], mappings), (mappings, [])):
            memory.remap(unmapped, mapped)
            times.append(time.perf_counter())
        mapping, unmapping = ((end - begin) / count * 1e6 for begin, end in itertools.pairwise(times))
        return mapping, unmapping
    finally:
        memory.close()


def main(args: argparse.Namespace) -> None:
    gc.freeze()
    count, seeds = (60, 1) if args.quick else (200, 2)
    plan_ms = planning(5 if args.quick else 31)
    table = compare(count, seeds)
    growth = growing(count, 1)
    allocation = fig13(160, 400 if args.quick else 1500)
    map_us, unmap_us = remap_us()
    three = table["L3"]
    gain, merge = three["minimal-cost + partitioned-gain"], three["minimal-cost + global merge"]
    ratio = gain["moved_gb"] / merge["moved_gb"] if merge["moved_gb"] else math.nan
    slowest = max(plan_ms.values())
    mapped = three["pages"]
    goals = [
        Goal(name="moved: partitioned-gain / global merge, L3", goal="<= 0.07", measured=ratio, met=ratio <= 0.07),
        Goal(
            name="loaded / reload-everything, L3",
            goal="<= 0.45",
            measured=gain["loaded_share"],
            met=gain["loaded_share"] <= 0.45,
        ),
        Goal(name="planning 1,000 in 1,000, slowest kind, ms", goal="<= 3", measured=slowest, met=slowest <= 3),
        Goal(
            name="bytes that pages move, GB",
            goal="0",
            measured=mapped["moved_gb"],
            met=mapped["moved_gb"] == 0,
        ),
        Goal(
            name="pages: mapping per wake at an A100's cost, ms",
            goal="-",
            measured=mapped["mapping_ms_per_wake"],
            met=True,
        ),
        Goal(name="pages: lost to granules, MB", goal="-", measured=mapped["lost_mb_mean"], met=True),
        Goal(name="one granule of 2 MiB mapped on this host, us", goal="-", measured=map_us, met=True),
        Goal(name="one granule of 2 MiB unmapped on this host, us", goal="-", measured=unmap_us, met=True),
    ]
    sources = {model.name: {"source": model.source, "nbytes": model.nbytes} for model in language_models()}
    extra = {"arms": table, "fig12b": growth, "fig13": allocation, "planning_ms": plan_ms, "models": sources}
    report(goals, args, extra)


if __name__ == "__main__":
    main(arguments(__doc__.splitlines()[0] if __doc__ else "").parse_args())
