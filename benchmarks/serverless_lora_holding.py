"""What instances of a simulated run held of GPU memory, and for how long: by the leases that the core grants and ends.

An instance holds its context, its adapter and, where it has one of its own, its backbone. A shared backbone is held on
a GPU while any instance over it is there. KV is not counted. It is active while it starts and computes, else idle.
"""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.serverless_lora_workload import ADAPTERS, BACKBONES
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.core.decisions.scheduling import events as ev


class Lease(NamedTuple):
    """Of an instance, by number. ``copies``: something of its model was missing. ``busy_s`` of it, it computed."""

    instance: int
    gpu: int
    began_s: float
    ended_s: float
    busy_s: float
    copies: bool


class Held(NamedTuple):
    """By backbone: GB x seconds, instances that began, and those of them that had their model to load."""

    active_gb_s: dict[str, float]
    idle_gb_s: dict[str, float]
    began: dict[str, int]
    loaded: dict[str, int]


def watched(simulation: Simulation) -> list[Lease]:
    """Leases that are over, as a run ends them."""
    over: list[Lease] = []
    begun: dict[tuple[int, int], tuple[str, float, bool]] = {}  # by GPU and serial
    handle = simulation.core.handle

    def watching(event: ev.Event, now_s: float) -> list[ev.Action]:
        if isinstance(event, ev.LeaseOver):
            name, began_s, copies = begun.pop((event.gpu, event.done.serial))
            over.append(Lease(int(name[1:]), event.gpu, began_s, now_s, event.done.gpu_us / 1e6, copies))
        actions = handle(event, now_s)
        for action in actions:
            if isinstance(action, ev.WakeOn):
                key = action.lease.gpu, action.lease.serial
                begun[key] = action.instance, now_s, action.wake_nbytes > 0
        return actions

    simulation.core.handle = watching  # type: ignore[method-assign]
    return over


def held(
    leases: Sequence[Lease],
    specs: Sequence[ModelSpec],
    shared: bool,
    from_s: float,
    after_s: float,
    always_s: float | None = None,
) -> Held:
    """Since ``from_s``; each for ``after_s`` beyond its lease. ``always_s``: all was there for so long, in use or not,
    and is paid as if it were.
    """
    names = [backbone.name for backbone in BACKBONES]
    found = Held(dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0), dict.fromkeys(names, 0), dict.fromkeys(names, 0))
    if always_s is not None:
        for number, spec in enumerate(specs):
            first = _first(specs, number)
            own = _own_nbytes(spec, shared) + (spec.base_nbytes if shared and first else 0)
            if not first and spec.llm is not None and spec.llm.group:
                continue  # it is in the process of the first one
            found.active_gb_s[spec.name] += own / 1e9 * always_s
        return found
    alone: dict[tuple[int, int], list[Lease]] = {}  # by instance and GPU
    for lease in leases:
        if (kept := lease._replace(ended_s=lease.ended_s + after_s)).ended_s > from_s:
            alone.setdefault((lease.instance, lease.gpu), []).append(kept)
    there: dict[tuple[str, int], list[Lease]] = {}  # by backbone and GPU
    for (instance, gpu), mine in alone.items():
        spec = specs[instance]
        _add(found, spec.name, _own_nbytes(spec, shared), spec, mine, from_s)
        there.setdefault((spec.name, gpu), []).extend(mine)
        since = [lease for lease in mine if lease.began_s >= from_s]
        found.began[spec.name] += len(since)
        found.loaded[spec.name] += sum(lease.copies for lease in since)
    for (name, _), mine in there.items() if shared else ():
        spec = next(each for each in specs if each.name == name)
        _add(found, name, spec.base_nbytes, spec, mine, from_s)
    return found


def _add(found: Held, name: str, nbytes: int, spec: ModelSpec, leases: Sequence[Lease], from_s: float) -> None:
    """So many bytes while any of these leases is there."""
    assert spec.llm is not None
    total_s, active_s, until_s = 0.0, 0.0, from_s
    for lease in sorted(leases, key=lambda each: each.began_s):
        total_s += max(0.0, lease.ended_s - max(lease.began_s, until_s))
        until_s = max(until_s, lease.ended_s)
        active_s += lease.busy_s + spec.llm.seat_s + spec.llm.start_s * lease.copies
    active_s = min(active_s, total_s)
    found.active_gb_s[name] += nbytes / 1e9 * active_s
    found.idle_gb_s[name] += nbytes / 1e9 * (total_s - active_s)


def _own_nbytes(spec: ModelSpec, shared: bool) -> int:
    """Of a group's one process with all adapters, as its first function has it."""
    assert spec.llm is not None
    adapters_nbytes = spec.llm.adapter_nbytes * (ADAPTERS if spec.llm.group else 1)
    return spec.llm.context_nbytes + (adapters_nbytes if shared else spec.nbytes)


def _first(specs: Sequence[ModelSpec], number: int) -> bool:
    return all(spec.name != specs[number].name for spec in specs[:number])
