"""What one GPU's pool costs: bytes loaded, bytes moved and planning time under each strategy, no memory touched.

The serving pools are driven with the tensors of the eight models of Tangram §5.1 (``benchmarks.pool_models``) by seeded
requests of its four locality classes. A request wakes its model (what is missing is loaded), then takes key-value
blocks for its batch in the same pool, which leave when it ends. Times are this thread's processor time.
"""

import argparse
import ctypes
import dataclasses
import gc
import itertools
import math
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from benchmarks.pool_models import Model, language_models, segments_of, torpor_models
from benchmarks.report import Goal, arguments, report
from dormouse.core.freelist import aligned
from dormouse.gpuserver.pools.buddy import SLOT_NBYTES, Buddy, blocks_of
from dormouse.gpuserver.pools.pages import Pages
from dormouse.gpuserver.pools.protocol import Cost, Plan, Pool, PoolFull
from dormouse.gpuserver.pools.regions import Regions

MIB, GB = 1 << 20, 10**9
POOL_NBYTES: Final = 45 * GB
LOCALITY: Final = {"L1": 0.0, "L2": 0.22, "L3": 0.44, "L4": 0.74}
"""Share of requests for the same model as the one before. L3 ("original") and L4 are those of two samples of the Azure
Functions trace 2019 (eight functions of normal and of bursty arrivals, over four hours each); L1 has none and L2 half
of L3's, as Tangram says.
"""
TOKENS: Final = {"ShareGPT": 502, "GSM8K": 166, "Alpaca": 226, "HumanEval": 221}
"""Mean tokens of a request and its answer (Llama tokenizer) in Tangram's four data sets; drawn exponentially."""
BATCH: Final = 16
KV_SEGMENT_NBYTES: Final = 16 * MIB
LINK: Final = 25 * GB  # bytes per second from the host: the same for all, so it changes no order
LARGE, SMALL = 32 * MIB, 2 * MIB
MAP_S, UNMAP_S = 37.5e-6, 25.6e-6
"""Seconds per granule on an A100: cuMemMap + cuMemSetAccess, and cuMemUnmap of 2 MiB (kvcached's ``bench_vmm``)."""
MALLOC_S, FREE_S = 230e-6, 49e-6
"""Seconds per cudaMalloc and cudaFree, for which the same source's create + map + access, and unmap with vAttention's
23 us of release stand in: not measured here, and a cudaFree also waits for the GPU, which is not counted.
"""


@dataclasses.dataclass
class Result:
    """What one arm did over a sequence of requests."""

    loaded_nbytes: int = 0
    moved_nbytes: int = 0
    evicted_segments: int = 0
    moving_plans: int = 0
    refused: int = 0
    mapped: int = 0
    unmapped: int = 0
    lost_nbytes: list[int] = dataclasses.field(default_factory=list)
    plan_ms: list[float] = dataclasses.field(default_factory=list)

    def note(self, plan: Plan, plan_ms: float) -> None:
        self.moved_nbytes += plan.moved_nbytes
        self.evicted_segments += len(plan.evicted)
        self.moving_plans += bool(plan.moves)
        self.mapped += len(plan.mapped)
        self.unmapped += len(plan.unmapped)
        self.plan_ms.append(plan_ms)

    def summary(self, reload_nbytes: int) -> dict[str, float]:
        times = sorted(self.plan_ms)
        return {
            "loaded_gb": self.loaded_nbytes / GB,
            "loaded_share": self.loaded_nbytes / reload_nbytes,
            "moved_gb": self.moved_nbytes / GB,
            "moving_plans": self.moving_plans,
            "plans": len(times),
            "plan_ms_median": statistics.median(times),
            "plan_ms_p99": times[int(0.99 * (len(times) - 1))],
            "plan_ms_max": times[-1],
            "evicted_segments": self.evicted_segments,
            "refused": self.refused,
            "mapped": self.mapped,
            "mapping_ms_per_wake": (self.mapped * MAP_S + self.unmapped * UNMAP_S) * 1e3 * 2 / len(times),
            "lost_mb_mean": statistics.mean(self.lost_nbytes) / 1e6,
        }


class Costs:
    """The cost of an eviction under a policy; for minimal cost Eq. 2 with each model's decayed share of requests."""

    def __init__(self, owner: dict[int, int], nbytes: dict[int, int], models: int, policy: str) -> None:
        self.owner, self.nbytes, self.policy = owner, nbytes, policy
        self.weight = [1.0] * models
        self.random = random.Random(5)

    def used(self, model: int) -> None:
        self.weight = [weight * 0.95 for weight in self.weight]
        self.weight[model] += 1.0

    def cost(self) -> Cost:
        total = sum(self.weight)
        price = [weight / total / LINK for weight in self.weight]
        if self.policy == "random":
            return lambda segment: self.random.random() * self.nbytes[segment]
        if self.policy == "absolute":  # the paper's order: the pool divides by the size, so it is multiplied by it here
            return lambda segment: price[self.owner[segment]] * self.nbytes[segment] * aligned(self.nbytes[segment])
        return lambda segment: price[self.owner[segment]] * self.nbytes[segment]


def thread_ms() -> float:
    return time.thread_time_ns() / 1e6


def requests(models: Sequence[Model], count: int, repeat: float, seed: int) -> list[tuple[int, int]]:
    """``(model, tokens of its batch)``: the same model again with probability ``repeat``, else another by share."""
    rng = random.Random(seed)
    sequence: list[tuple[int, int]] = []
    for _ in range(count):
        if sequence and rng.random() < repeat:
            model = sequence[-1][0]
        else:
            others = [n for n in range(len(models)) if not sequence or n != sequence[-1][0]]
            model = rng.choices(others, [models[n].share for n in others])[0]
        mean = rng.choice(list(TOKENS.values()))
        sequence.append((model, sum(min(2048, int(rng.expovariate(1 / mean)) + 1) for _ in range(BATCH))))
    return sequence


def drive(pool: Pool, models: Sequence[Model], sequence: Iterable[tuple[int, int]], policy: str) -> Result:
    """Wake, take key-value blocks, and let them go, for each request."""
    result = Result()
    serial = itertools.count(1)
    needs = [[(next(serial), nbytes) for nbytes in model.segments()] for model in models]
    nbytes = {segment: size for need in needs for segment, size in need}
    costs = Costs({s: n for n, need in enumerate(needs) for s, _ in need}, nbytes, len(models), policy)
    for model, tokens in sequence:
        costs.used(model)
        resident = {segment for segment, _ in needs[model] if segment in pool}
        missing = [(segment, size) for segment, size in needs[model] if segment not in resident]
        cost = costs.cost()
        began = thread_ms()
        try:
            plan = pool.place(missing, cost=cost, fixed=resident, tenant="t")
        except PoolFull:  # blocks that are rounded up do not hold the largest model
            result.refused += 1
            result.loaded_nbytes += models[model].nbytes
            continue
        result.note(plan, thread_ms() - began)
        result.loaded_nbytes += sum(size for _, size in missing)
        room = int(0.97 * pool.capacity) - sum(aligned(size) for _, size in needs[model]) - 8 * LARGE
        count = max(0, min(-(-tokens * models[model].kv_nbytes // KV_SEGMENT_NBYTES), room // KV_SEGMENT_NBYTES))
        blocks = [(next(serial), KV_SEGMENT_NBYTES) for _ in range(count)]
        fixed = {segment for segment, _ in needs[model]}
        began = thread_ms()
        plan = pool.place(blocks, cost=cost, fixed=fixed, tenant="t")
        result.note(plan, thread_ms() - began)
        result.lost_nbytes.append(pool.lost_nbytes)
        pool.drop([segment for segment, _ in blocks])
        pool.forget([segment for segment, _ in blocks])
    pool.check()
    return result


def pages(capacity: int) -> Pages:
    """One eighth of the memory in small granules."""
    small = capacity // 8 // SMALL
    return Pages([(LARGE, (capacity - small * SMALL) // LARGE), (SMALL, small)], 64 * capacity)


ARMS: Final[dict[str, tuple[Callable[[], Pool], str]]] = {
    "random + global merge": (lambda: Regions(POOL_NBYTES, "global"), "random"),
    "minimal-cost + global merge": (lambda: Regions(POOL_NBYTES, "global"), "minimal"),
    "minimal-cost + Algorithm 1 alone": (lambda: Regions(POOL_NBYTES, "algorithm-1"), "minimal"),
    "minimal-cost + partitioned-gain": (lambda: Regions(POOL_NBYTES), "minimal"),
    "absolute cost + global merge": (lambda: Regions(POOL_NBYTES, "global"), "absolute"),
    "absolute cost + partitioned-gain": (lambda: Regions(POOL_NBYTES), "absolute"),
    "pages": (lambda: pages(POOL_NBYTES), "minimal"),
    "buddy": (lambda: Buddy(POOL_NBYTES), "minimal"),
}


def compare(count: int, seeds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Every arm on every locality class; means over the seeds."""
    models = language_models()
    table: dict[str, dict[str, dict[str, float]]] = {}
    for locality, repeat in LOCALITY.items():
        print(f"\n{locality}: loaded / reload, GB moved, plans that move, planning ms median / p99 / max, MB lost")
        for name, (make, policy) in ARMS.items():
            rows = []
            for seed in range(seeds):
                sequence = requests(models, count, repeat, seed)
                everything = sum(models[model].nbytes for model, _ in sequence)
                rows.append(drive(make(), models, sequence, policy).summary(everything))
            row = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
            table.setdefault(locality, {})[name] = row
            print(
                f"  {name:34} {row['loaded_share']:6.3f} {row['moved_gb']:9.1f} {row['moving_plans']:6.1f} "
                f"{row['plan_ms_median']:7.2f} {row['plan_ms_p99']:7.2f} {row['plan_ms_max']:7.2f} "
                f"{row['lost_mb_mean']:8.1f}",
                flush=True,
            )
    return table


def growing(count: int, seeds: int) -> list[dict[str, Any]]:
    """Tangram's Fig. 12b: models of 40 to 280 GB together share one GPU; bytes loaded against reload-everything."""
    print("\nFig. 12b: GB of models, then loaded / reload at L1 to L4")
    base = language_models()
    rows: list[dict[str, Any]] = []
    for goal in range(40, 281, 40):
        models: list[Model] = []
        for model in itertools.cycle(sorted(base, key=lambda model: (model.nbytes * 7919) % 97)):
            if sum(each.nbytes for each in models) + model.nbytes / 2 > goal * GB:
                break
            models.append(model)
        shares = {}
        for locality, repeat in LOCALITY.items():
            ratios = []
            for seed in range(seeds):
                sequence = requests(models, count, repeat, seed)
                result = drive(Regions(POOL_NBYTES), models, sequence, "minimal")
                ratios.append(result.loaded_nbytes / sum(models[model].nbytes for model, _ in sequence))
            shares[locality] = statistics.mean(ratios)
        rows.append({"models_gb": sum(model.nbytes for model in models) / GB, "models": len(models), **shares})
        print(
            f"  {rows[-1]['models_gb']:6.0f} ({len(models):2}) "
            + " ".join(f"{share:6.3f}" for share in shares.values())
        )
    return rows


def planning(turns: int) -> dict[str, float]:
    """1,000 new tensors into 1,000 regions, 500 free and 500 not, nearly every free byte needed and some evicted."""
    times: dict[str, list[float]] = {"fits": [], "packed": [], "evicts": []}
    for (kind, taken), turn in itertools.product([("fits", 0.9), ("packed", 0.9995), ("evicts", 1.2)], range(turns)):
        rng = random.Random(turn)
        pool = Regions(10**12)
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


def remap_us() -> float:
    """Microseconds for moving one populated 2 MiB granule to another address on this host, as the emulated GPU does."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    count = 16
    handle = os.memfd_create("granules")
    try:
        os.ftruncate(handle, count * SMALL)
        source, target = mmap.mmap(handle, count * SMALL), mmap.mmap(-1, count * SMALL)
        for offset in range(0, count * SMALL, 4096):
            source[offset] = 1
        views = [(ctypes.c_char * 1).from_buffer(each) for each in (source, target)]
        here, there = (ctypes.addressof(view) for view in views)
        began = time.perf_counter()
        for offset in range(0, count * SMALL, SMALL):
            if libc.mremap(here + offset, SMALL, SMALL, 3, there + offset) == ctypes.c_void_p(-1).value:
                raise OSError(ctypes.get_errno(), "mremap")
        took = time.perf_counter() - began
        views.clear()
        return took / count * 1e6
    finally:
        os.close(handle)


class FixedBlocks:
    """Torpor's baseline: blocks of exact sizes are cached when released; for another size idle ones are given back to
    the driver, the largest first, and a new one is asked for. Only sizes are kept: addresses are the driver's.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.reserved = capacity, 0
        self.idle: dict[int, int] = {}  # count by size

    def take(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Blocks of these sizes; returns how often the driver allocated and freed."""
        allocated = freed = 0
        for size in sizes:
            if self.idle.get(size):
                self.idle[size] -= 1
                continue
            while self.reserved + size > self.capacity:
                largest = max(each for each, count in self.idle.items() if count)
                self.idle[largest] -= 1
                self.reserved -= largest
                freed += 1
            self.reserved += size
            allocated += 1
        return allocated, freed

    def give(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            self.idle[size] = self.idle.get(size, 0) + 1


class Everything:
    """Contains every segment: nothing may be evicted by the pool."""

    def __contains__(self, segment: object) -> bool:
        return True


def _placed(pool: Pool, needs: Sequence[tuple[int, int]]) -> bool:
    try:
        pool.place(needs, cost=lambda segment: 1.0, fixed=Everything())
    except PoolFull:
        return False
    return True


def fig13(functions: int, count: int) -> dict[str, dict[str, float]]:
    """Time to allocate a model's blocks over its run time (Torpor's Fig. 13): many functions on one GPU, the least
    recently used model leaves.
    """
    capacity = 25 << 30
    kinds = torpor_models()
    buddy, fixed = Buddy(capacity), FixedBlocks(capacity)
    needs = [
        [(function * 10_000 + n, nbytes) for n, nbytes in enumerate(segments_of(kinds[function % len(kinds)][1]))]
        for function in range(functions)
    ]
    blocks = [[block.slots * SLOT_NBYTES for block in blocks_of(need, SLOT_NBYTES)] for need in needs]
    resident: dict[int, None] = {}  # functions with blocks in ``buddy``, the least recently used first
    awake: dict[int, None] = {}  # functions with blocks in ``fixed``, the least recently used first
    ratios: dict[str, list[float]] = {"buddy": [], "FixedBlocks": []}
    rng = random.Random(13)
    for _ in range(count):
        function = rng.randrange(functions)
        run_s = kinds[function % len(kinds)][2]
        began = thread_ms()
        if function not in resident:
            while buddy.free_nbytes < sum(blocks[function]) or not _placed(buddy, needs[function]):
                oldest = next(iter(resident))
                del resident[oldest]
                buddy.drop([segment for segment, _ in needs[oldest]])
        resident.pop(function, None)
        resident[function] = None
        took = thread_ms() - began
        ratios["buddy"].append(took / 1e3 / run_s)
        spent = 0.0
        if function not in awake:
            while awake and sum(sum(blocks[each]) for each in awake) + sum(blocks[function]) > capacity:
                oldest = next(iter(awake))
                del awake[oldest]
                fixed.give(blocks[oldest])
            allocated, freed = fixed.take(blocks[function])
            spent = allocated * MALLOC_S + freed * FREE_S
        awake.pop(function, None)
        awake[function] = None
        ratios["FixedBlocks"].append(spent / run_s)
    table = {}
    print("\nFig. 13: time to allocate / run time, p50 p90 p99 max")
    for name, found in ratios.items():
        steady = sorted(found[count // 2 :])
        at = {f"p{share}": steady[int(share / 100 * (len(steady) - 1))] for share in (50, 90, 99, 100)}
        table[name] = at
        print(f"  {name:12} " + " ".join(f"{value:8.4f}" for value in at.values()))
    return table


def main(args: argparse.Namespace) -> None:
    gc.freeze()
    count, seeds = (60, 1) if args.quick else (200, 2)
    plan_ms = planning(5 if args.quick else 31)
    table = compare(count, seeds)
    growth = growing(count, 1)
    allocation = fig13(160, 400 if args.quick else 1500)
    host_us = remap_us()
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
        Goal(name="one granule of 2 MiB by mremap on this host, us", goal="-", measured=host_us, met=True),
    ]
    sources = {model.name: {"source": model.source, "nbytes": model.nbytes} for model in language_models()}
    extra = {"arms": table, "fig12b": growth, "fig13": allocation, "planning_ms": plan_ms, "models": sources}
    report(goals, args, extra)


if __name__ == "__main__":
    main(arguments(__doc__.splitlines()[0] if __doc__ else "").parse_args())
