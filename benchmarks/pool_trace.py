"""The part of ``benchmarks.pool`` that serves requests: each strategy on Tangram's locality classes, no memory touched.

The serving pools are driven with the tensors of the eight models of Tangram §5.1 (``benchmarks.pool_models``) by seeded
requests of its four locality classes. A request wakes its model (what is missing is loaded), then takes key-value
blocks for its batch in the same pool, which leave when it ends. Times are this thread's processor time.
"""

import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from benchmarks.pool_models import Model, language_models
from dormouse.core.decisions.memory.freelist import aligned
from dormouse.core.decisions.memory.pools.buddy import Buddy
from dormouse.core.decisions.memory.pools.pages import Pages
from dormouse.core.decisions.memory.pools.protocol import Cost, PoolChange, PoolFull
from dormouse.core.decisions.memory.pools.regions import Regions

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

    def note(self, plan: PoolChange, plan_ms: float) -> None:
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


Planned = Regions | Pages | Buddy
"""Pools that plan addresses."""


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


def drive(pool: Planned, models: Sequence[Model], sequence: Iterable[tuple[int, int]], policy: str) -> Result:
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


ARMS: Final[dict[str, tuple[Callable[[], Planned], str]]] = {
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
