"""Lets C++ (recorder.cpp) record commands that were seen before, in a fraction of a microsecond beyond PyTorch's
dispatcher.

Python decides what a call means, once for each signature, and offers its plan; the next call with that signature never
reaches Python. Without a compiler, or until the library is built, Python records everything, with the same effect.
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
    """Have it come first where PyTorch's dispatcher enters Python. Calls that it has not seen go to `dispatch`."""
    whole, deciding = tuple(composites.WHOLE), tuple(operations.DECIDED_BY_SCALARS)
    module.enable(dispatch, msgpack.packb, numbers.LIMITS, hidden, whole, deciding, most_plans)
    cpp.module = module


BLANK_NBYTES: Final = 1 << 20
"""A storage without a value is created by an operation, zeros, if it is no larger."""


class RecorderSettings(NamedTuple):
    """When `recorded` is called, and when dead storages are reported: constants of the stream."""

    frame_commands: int
    eager_nbytes: int
    poll_mask: int
    free_batch: int
    free_numbers: int
    free: int = wire.FREE
    blank_nbytes: int = BLANK_NBYTES


class TemplateSettings(NamedTuple):
    """Criteria for keeping sequences of commands, and for sending them to the executor."""

    follow: int = wire.FOLLOW
    validated: int = wire.VALIDATED
    leave: int = wire.LEAVE
    check: int = wire.CHECK
    free: int = wire.FREE
    relative: int = wire.RELATIVE
    checked: bool = False  # both ends compare their actions with those without templates
    seen: int = 2  # times that one has come before it is followed
    operations: int = 4  # by which one is known: as many as the first frame has; 0: none is followed
    least_words: int = 48
    most_words: int = wire.MAX_TEMPLATE_WORDS
    most_pending_nbytes: int = 8 << 20  # of results: the executor holds those that it has computed ahead
    most_pending: int = 1024  # operations


template_settings = TemplateSettings()
"""Of the next connection."""


def connect(
    tape: Any,
    record: Callable[..., int],
    recorded: Callable[..., None],
    tell: Callable[..., bool],
    flush: Callable[[], None],
    settings: RecorderSettings,
) -> None:
    """Record onto this tape; `record` is Python's own way to, and `recorded` is called where something is to follow.
    `tell`: has the executor know a template; `flush`: sends the recorded commands."""
    known = tape, record, recorded, tell, flush
    cpp.module.connect(*known, settings, template_settings)


def disconnect() -> None:
    """Ask Python of each call."""
    if cpp.module is not None:
        cpp.module.connect(*[None] * 7)


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
    if plan.shape == Plan.ASK or plan.tells or plan.bulky or plan.changes:
        return
    schema = operation.op._schema
    results = [(_KINDS[kind], meta, number) for kind, meta, number in plan.results]
    view = plan.shape == Plan.VIEW
    told = (plan.id, view, plan.listed, operands, results, plan.fresh_nbytes, plan.written_at)
    cpp.module.offer(schema.name, schema.overload_name, plan, *told)
