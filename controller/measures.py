"""Counts of the controller for `/metrics`: pure. One pass over functions and GPUs, no sorting."""

from collections.abc import Mapping

import msgspec

from dormouse.controller.ledger import Used
from dormouse.core.decisions.scheduling.functions import FunctionCounts
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.decisions.scheduling.state import Gpu
from dormouse.schemas import messages as m

NOTHING = FunctionCounts()


def measures(
    scheduler: Scheduler,
    used: Mapping[str, Used],
    hellos: Mapping[int, m.Hello],
    store: m.StoreStatus,
) -> m.NodeMeasures:
    """Of the functions that are deployed, each of which is in ``used``, and of the GPUs that have an executor."""
    resident: dict[str, dict[int, int]] = {}
    for model in scheduler.models.values():
        for number, nbytes in model.resident.items():
            of = resident.setdefault(model.function.name, {})
            of[number] = max(of.get(number, 0), nbytes)  # instances of one function have the same bytes
    functions = [_function(scheduler, name, resident.get(name, {}), each) for name, each in used.items()]
    gpus = [_gpu(gpu, hellos.get(number)) for number, gpu in scheduler.gpus.items()]
    return m.NodeMeasures(
        gpus=gpus, functions=functions, store=store, waiting=len(scheduler.waiting), drained=sorted(scheduler.drained)
    )


def _function(scheduler: Scheduler, name: str, resident: Mapping[int, int], used: Used) -> m.FunctionMeasures:
    known = scheduler.functions.get(name)
    counts = known.counts if known is not None else NOTHING
    return m.FunctionMeasures(
        name=name,
        wakes=[
            m.WakesCounted(
                source=source, count=wakes.count, timed=wakes.timed, spent_us=wakes.spent_us, nbytes=wakes.nbytes
            )
            for source, wakes in counts.woken.items()
        ],
        evictions=dict(counts.evicted.items()),
        resident=list(resident.items()),
        leases=counts.leases,
        used=msgspec.structs.asdict(used),
        batches=counts.batches,
        batch_requests=counts.batch_requests,
        batch_places=counts.batch_places,
        batches_failed=counts.batches_failed,
    )


def _gpu(gpu: Gpu, hello: m.Hello | None) -> m.GpuMeasures:
    return m.GpuMeasures(
        number=gpu.number,
        name=hello.info.name if hello is not None else "",
        capacity_nbytes=gpu.capacity_nbytes,
        stats=gpu.stats,
        seats=len(gpu.leases),
        turns=len(gpu.turns),
    )
