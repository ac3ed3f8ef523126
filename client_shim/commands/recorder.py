"""Commands that were seen before are recorded by C++ (recorder.cpp), in a fraction of a microsecond beyond PyTorch's
dispatcher.

Python decides what a call means, once for each signature, and offers its plan; the next call with that signature never
reaches Python. Without a compiler, or until the library is built, Python records everything, and says the same.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgpack

from dormouse.client_shim.commands import composites, numbers, operations
from dormouse.client_shim.commands.handles import cpp
from dormouse.client_shim.commands.operations import Operation
from dormouse.client_shim.commands.plans import Plan
from dormouse.schemas import stream as wire

_KINDS: Final = {wire.FRESH: 0, wire.ALIAS: 1, wire.SAME: 2, wire.NOTHING: 3}


def enable(module: Any, dispatch: Callable[..., Any], hidden: tuple[str, ...], most_plans: int) -> None:
    """Have it come first where PyTorch's dispatcher enters Python. What it has not seen, it asks of `dispatch`."""
    module.enable(dispatch, msgpack.packb, numbers.LIMITS, hidden, tuple(composites.WHOLE), most_plans)
    cpp.module = module


class RecorderSettings(NamedTuple):
    """When `recorded` is called, and when dead storages are told of: constants of the stream."""

    frame_commands: int
    eager_nbytes: int
    poll_mask: int
    free_batch: int
    free_numbers: int
    free: int = wire.FREE


def connect(
    tape: Any, lock: Any, record: Callable[..., int], recorded: Callable[..., None], settings: RecorderSettings
) -> None:
    """Record onto this tape; `record` is Python's own way to, and `recorded` is called where something is to follow."""
    cpp.module.connect(tape, lock.acquire, lock.release, record, recorded, settings)


def disconnect() -> None:
    """Ask Python of each call."""
    if cpp.module is not None:
        cpp.module.connect(None, None, None, None, None, None)


def disable() -> None:
    """Python makes tensors from now on, which are its own."""
    disconnect()
    if cpp.module is not None:
        cpp.module.disable()
    cpp.module = None


def forget_plans() -> None:
    operations.forget_plans()
    if cpp.module is not None:
        cpp.module.forget()


def offer(operation: Operation, plan: Plan, operands: list[Any]) -> None:
    """The plan of the call that Python is being asked of. `operands`: numbers, ids, and None for a storage without."""
    if plan.shape == Plan.ASK or plan.tells or plan.bulky or plan.changes or operation.scalars_in_key:
        return
    schema = operation.op._schema
    results = [(_KINDS[kind], meta, number) for kind, meta, number in plan.results]
    view = plan.shape == Plan.VIEW
    told = (plan.id, view, plan.listed, operands, results, plan.fresh_nbytes, plan.written_at)
    cpp.module.offer(schema.name, schema.overload_name, plan, *told)
