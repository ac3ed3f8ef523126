"""The part of `dormouse status` about GPUs, models and the store: pure. Sizes in bytes; keys stay as they are, because
programs read them. Their meaning is in the command's help (core/cli/main.py).
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from dormouse.controller.busyshares import BusyShares
from dormouse.controller.news import News
from dormouse.core.decisions.scheduling.functions import Function, LastWake
from dormouse.core.decisions.scheduling.reasons import Reasons, evicted, ms, preloaded
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.decisions.scheduling.state import Gpu
from dormouse.schemas import messages as m

NO_STORE: Final = m.StoreStatus(
    host_nbytes=0, host_budget_nbytes=-1, file_nbytes=0, file_budget_nbytes=-1, segments=0, slabs=0, trouble=""
)
"""Before the store has reported anything."""


NO_POOL: Final = m.PoolStats()


def status(
    scheduler: Scheduler,
    hellos: Mapping[int, m.Hello],
    names: Iterable[str],
    store: m.StoreStatus,
    report: m.StoreReport | None,
    now_s: float,
    news: News | None = None,
    busy: BusyShares | None = None,
) -> dict[str, Any]:
    """``names`` are the functions that are deployed, ``hellos`` are by GPU; without ``report`` the store
    did not answer. ``now_s`` is of the scheduler's clock.
    """
    functions = {name: _function(scheduler, name, now_s) for name in names}
    news = News() if news is None else news
    busy = BusyShares() if busy is None else busy

    def entry(name: str) -> dict[str, Any]:
        if name not in functions:
            functions[name] = _function(scheduler, name, now_s)
        return functions[name]

    for instance, model in scheduler.models.items():
        told = entry(_name(scheduler, instance))
        told["nbytes"] = max(told["nbytes"], model.nbytes)  # instances of one function have the same bytes
        told["peak_activation_nbytes"] = max(told["peak_activation_nbytes"], model.peak_nbytes)
        for number, nbytes in sorted(model.resident.items()):
            told["gpu_nbytes"][number] = max(told["gpu_nbytes"].get(number, 0), nbytes)
        told["resident_on"] = sorted(told["gpu_nbytes"])
        if (service := told["service"]) is not None and model.nbytes:
            function = model.function
            service["wake_ms"] = ms(function.predicted_s(model.nbytes / scheduler.bandwidths.host_bps))
            service["heavy"] = scheduler.heavy(model) if function.best_s else None
    for part in report.instances if report is not None else ():
        name = part.function or _name(scheduler, part.instance)
        told, others = entry(name), {_name(scheduler, other) for other in part.shared_with}
        if part.instance not in scheduler.models:  # kept from before; no instance has it yet
            told["nbytes"] = max(told["nbytes"], part.nbytes)
        for key in ("host_nbytes", "file_nbytes", "shared_nbytes"):
            told[key] = max(told[key], getattr(part, key))
        told["shared_with"] = sorted({*told["shared_with"], *others} - {name})
    for number, gpu in sorted(scheduler.gpus.items()):
        for each in news.runtimes.get(number, {}).values():
            if each.load is not None:
                names = sorted({_name(scheduler, instance) for instance in each.instances})
                told = _runtime(number, each.pid, each.load, gpu.capacity_nbytes) | {"functions": names}
                for name in names:
                    entry(name)["runtimes"].append(told)
    return {
        "gpus": {
            n: _gpu(scheduler, gpu, hellos.get(n), len(news.runtimes.get(n, ())), now_s)
            | {"trouble": list(news.troubles.get(n, ())), "state": state(scheduler, n), "busy": busy.told(n, now_s)}
            for n, gpu in sorted((scheduler.gpus | _given_up(scheduler)).items())
        },
        "functions": functions,
        "store": _store(store, report is not None),
        "waiting": len(scheduler.waiting),
        "waits": Reasons(scheduler, now_s).told(),
    }


def _given_up(scheduler: Scheduler) -> dict[int, Gpu]:
    """GPUs that are drained: nothing of them is the node's."""
    return {number: Gpu(number, 0, NO_POOL, 0) for number in scheduler.drained - scheduler.gpus.keys()}


def state(scheduler: Scheduler, number: int) -> str:
    """Of a GPU, as shown to people."""
    if number not in scheduler.drained:
        return "serves" if number in scheduler.gpus else "missing"
    return "drains" if number in scheduler.gpus else "drained"


def fragmentation(stats: m.PoolStats) -> float:
    """The share of the free bytes that the largest free run does not have: 0 is one hole, near 1 is crumbs."""
    if stats.free_nbytes <= 0:
        return 0.0
    return round(max(0.0, 1.0 - stats.largest_nbytes / stats.free_nbytes), 4)


def _gpu(scheduler: Scheduler, gpu: Gpu, hello: m.Hello | None, runtimes: int, now_s: float) -> dict[str, Any]:
    """With so many processes of runtimes."""
    stats = gpu.stats
    return {
        "epoch": gpu.epoch,
        "name": hello.info.name if hello is not None else "",
        "pool": hello.pool if hello is not None else "",
        "reason": hello.reason if hello is not None else "",
        "total_nbytes": hello.info.total_nbytes if hello is not None else gpu.capacity_nbytes,
        "capacity_nbytes": gpu.capacity_nbytes,
        "weights_nbytes": stats.weights_nbytes,
        "kv_nbytes": stats.kv_nbytes,
        "lost_nbytes": stats.lost_nbytes,
        "activation_nbytes": stats.activation_nbytes,
        "context_nbytes": gpu.context_nbytes,
        "contexts_nbytes": gpu.context_nbytes * runtimes,
        "beside_nbytes": gpu.beside_nbytes,
        "free_nbytes": stats.free_nbytes,
        "largest_free_nbytes": stats.largest_nbytes,
        "fragmentation": fragmentation(stats),
        "moved_nbytes": stats.moved_nbytes,
        "segments": stats.segments,
        "busy_with": _name(scheduler, gpu.running.instance) if gpu.running is not None else None,
        "turns": [{"function": _name(scheduler, turn.instance), "idle": turn.idle} for turn in gpu.turns],
        "seats": [_name(scheduler, running.instance) for running in gpu.leases.values()],
        "resident": sorted({_name(scheduler, instance) for instance in gpu.resident}),
        "host_bps": round(scheduler.bandwidths.host(gpu.number)),
        "last_preload": preloaded(gpu.last_preload, now_s),
        "switch_with": sorted(neighbour.number for neighbour in gpu.neighbours),
        "peer_bps": {
            other: round(bps)
            for other in sorted(scheduler.gpus)
            if other != gpu.number and (bps := scheduler.bandwidths.peer(other, gpu.number))
        },
    }


def _function(scheduler: Scheduler, name: str, now_s: float) -> dict[str, Any]:
    counts, known = scheduler.counts(name), scheduler.functions.get(name)
    return {
        "nbytes": 0,
        "peak_activation_nbytes": 0,
        "resident_on": [],
        "gpu_nbytes": {},
        "host_nbytes": 0,
        "file_nbytes": 0,
        "shared_nbytes": 0,
        "shared_with": [],
        "leases": counts.leases,
        "wakes": counts.wakes,
        "evictions": counts.evictions,
        "preloads": counts.preloads,
        "copied_nbytes": counts.copied_nbytes,
        "copied_peer_nbytes": counts.peer_nbytes,
        "copied_file_nbytes": counts.file_nbytes,
        "gpu_us": counts.gpu_us,
        "repaired": counts.repaired,
        "replayed": counts.replayed,
        "gpus": dict(counts.gpus),
        "last_wake": _wake(counts.last_wake) if counts.last_wake is not None else None,
        "last_eviction": evicted(counts.last_eviction, scheduler.policy.eviction, now_s),
        "service": _service(known, now_s) if known is not None else None,
        "runtimes": [],
        "pinned": known is not None and known.pinned,
    }


def _runtime(gpu: int, pid: int, load: m.EngineLoad, capacity_nbytes: int) -> dict[str, Any]:
    """A process that computes a language model. KV memory in blocks, and as a share of the GPU's pool."""
    nbytes = load.blocks * load.block_nbytes
    return {
        "gpu": gpu,
        "pid": pid,
        "running": load.running,
        "waiting": load.waiting,
        "preempted": load.preempted,
        "kv_blocks": load.blocks,
        "kv_blocks_used": load.used,
        "kv_blocks_idle": load.idle,
        "kv_nbytes": nbytes,
        "kv_share": round(nbytes / capacity_nbytes, 4) if capacity_nbytes else 0.0,
        "reused_nbytes": load.reused_nbytes,
        "gathered": load.gathered,
    }


def _service(function: Function, now_s: float) -> dict[str, Any]:
    """How it does by its own deadline and percentile, over its window, and what its leases have taken."""
    served = function.served
    return {
        "counted": served,
        "in_time": round(1.0 - function.late / served, 4) if served else None,
        "deadline_ms": ms(function.deadline_s),
        "percentile": round(100 * function.percentile, 4),
        "complies": function.rrc <= 0.0 if served else None,
        "rrc": round(function.rrc, 2) if served else None,
        "rate_s": round(function.rate(now_s), 4),
        "run_ms": ms(function.run_s) if function.run_s is not None else None,
        "wake_ms": None,
        "heavy": None,
        **_batches(function),
    }


def _batches(function: Function) -> dict[str, Any]:
    """Times of batches of so many requests, if they come in batches."""
    if function.batches is None:
        return {}
    return {"batch_ms": {str(count): ms(took_s) for count, took_s in function.batches.times.known.items()}}


def _wake(wake: LastWake) -> dict[str, Any]:
    return {
        "gpu": wake.gpu,
        "copied_nbytes": wake.copied_nbytes,
        "host_nbytes": max(0, wake.copied_nbytes - wake.peer_nbytes - wake.file_nbytes),
        "peer_nbytes": wake.peer_nbytes,
        "file_nbytes": wake.file_nbytes,
        "wake_us": wake.wake_us,
    }


def _store(store: m.StoreStatus, answered: bool) -> dict[str, Any]:
    def budget(nbytes: int) -> int | None:
        return nbytes if nbytes >= 0 else None

    return {
        "answered": answered,
        "host_nbytes": store.host_nbytes,
        "host_budget_nbytes": budget(store.host_budget_nbytes),
        "file_nbytes": store.file_nbytes,
        "file_budget_nbytes": budget(store.file_budget_nbytes),
        "segments": store.segments,
        "slabs": store.slabs,
        "trouble": store.trouble,
    }


def _name(scheduler: Scheduler, instance: str) -> str:
    """The function of an instance; any other name is a function's already."""
    model = scheduler.models.get(instance)
    return model.function.name if model is not None and model.function.name else instance
