"""Plain operations of a frame, run by C++ (fast_path.cpp): read, called, compared and entered in a microsecond.

A key has a plan if its call is the same each time but for its tensors and numbers, if its results are fresh tensors or
operands that it writes, and if no check looks at values. running.py runs everything else, malformed commands included.
Without a compiler, or until the library is built, it runs everything.
"""

from functools import cache
from typing import Any, Final

import torch

from dormouse.core.native import EXECUTOR
from dormouse.gpuserver.commands import index_checks, operand_checks
from dormouse.gpuserver.commands.definitions import DEVICE, CheckedMeta, GeneratorHole, Hole, Kernel
from dormouse.gpuserver.commands.emulation import EMULATED
from dormouse.gpuserver.commands.oplist import Allowed
from dormouse.gpuserver.commands.storages import EMBEDDING, MAX_STORAGES, HeldStorage, StorageTable
from dormouse.schemas import stream as wire

AHEAD_NBYTES: Final = 32 << 20
"""Most bytes of results that nobody has asked for yet. Meanwhile nothing is freed."""

_ATTENTION: Final = "aten::scaled_dot_product_attention"
_ENUMERATED: Final = (torch.dtype, torch.layout, torch.memory_format)
_TENSOR, _SCALAR = 0, 1
_RESULTS: Final = {wire.FRESH: 0, wire.SAME: 1, wire.NOTHING: 2}


class NotPlain(Exception):
    """A key that Python runs."""


class FastPath:
    """The library, which is there once."""

    def __init__(self, module: Any) -> None:
        self._module = module
        module.bind(HeldStorage)

    def steps(self, plans: dict[int, Any], table: StorageTable) -> Any:
        known = plans, table.by_id, table.freed_persistent, table.ahead
        return self._module.Steps(*known, table, MAX_STORAGES, wire.FREE, AHEAD_NBYTES)

    def program(self, words: list[Any], plans: dict[int, Any], places: list[int], results: list[int]) -> Any:
        """Plain commands, and FREE, to be computed as a whole: of storages numbered from 0 on, ``places`` in a template
        of those that are there before, -1 for those that it makes. Raises ValueError.
        """
        return self._module.Program(words, plans, wire.FREE, places, results)

    def plan(self, kernel: Kernel, device: torch.device) -> Any:
        """None if it is not plain."""
        try:
            return self._module.Plan(*_planned(kernel, device))
        except (NotPlain, ValueError):
            return None


@cache
def _of(module: Any) -> FastPath:
    return FastPath(module)


def load() -> FastPath | None:
    """None while it is not built, and if it cannot be loaded."""
    return None if (module := EXECUTOR.load()) is None else _of(module)


def _planned(kernel: Kernel, device: torch.device) -> tuple[Any, ...]:
    """The arguments of a Plan. Raises NotPlain."""
    op, prediction = kernel.op, kernel.predicted
    if op is None or prediction is None or prediction.listed or prediction.changes or op.custom or op.resizes:
        raise NotPlain
    if op.random and op.draws(kernel.args, kernel.kwargs):
        raise NotPlain
    if device.type == "cpu" and kernel.name in EMULATED and kernel.name != _ATTENTION:
        raise NotPlain
    if device.type == "cuda" and op.base in index_checks.RULES:
        raise NotPlain
    expect_checked(kernel, op)
    arguments, places = _arguments(kernel, op, device)
    operands = []
    tensors = iter(kernel.metas)
    for number, (kind, _) in enumerate(kernel.operands):
        if kind not in (wire.TENSOR, wire.SCALAR) or number not in places:
            raise NotPlain
        meta = next(tensors) if kind == wire.TENSOR else None
        if meta is None and places[number][1] >= 0:
            raise NotPlain
        operands.append((_SCALAR if meta is None else _TENSOR, *places[number], meta))
    schema = op.schema
    return (
        schema.name,
        schema.overload_name,
        arguments,
        operands,
        _results(kernel),
        list(kernel.written),
        kernel.n_fresh,
        kernel.default_dtype,
        device.type == "cpu" and kernel.name == _ATTENTION,
        kernel.name == EMBEDDING,
    )


def _results(kernel: Kernel) -> list[tuple[int, int, CheckedMeta | None]]:
    assert kernel.predicted is not None
    results = kernel.predicted.results
    slots = [number for kind, _, number in results if kind == wire.FRESH]
    if slots != list(range(kernel.n_fresh)) or any(kind not in _RESULTS for kind, _, _ in results):
        raise NotPlain
    if kernel.written and any(kind != wire.SAME for kind, _, _ in results):
        raise NotPlain
    return [(_RESULTS[kind], number, meta) for kind, meta, number in results]


def _arguments(kernel: Kernel, op: Allowed, device: torch.device) -> tuple[list[Any], dict[int, tuple[int, int]]]:
    """In the schema's order, with an ellipsis for values filled in later; and of each operand argument and item."""
    named = [argument.name for argument in op.schema.arguments if not argument.kwarg_only]
    if len(kernel.args) > len(named) or not kernel.kwargs.keys().isdisjoint(named[: len(kernel.args)]):
        raise NotPlain
    values = op.bound(kernel.args, kernel.kwargs)
    arguments: list[Any] = []
    places: dict[int, tuple[int, int]] = {}
    for at, argument in enumerate(op.schema.arguments):
        if argument.name not in values:
            raise NotPlain
        value = values.pop(argument.name)
        misplaced = isinstance(value, _ENUMERATED) and at not in op.enumerations
        if isinstance(value, Hole):
            places[value.index] = (at, -1)
            value = ...
        elif value is DEVICE:
            value = device
        elif misplaced or isinstance(value, GeneratorHole | complex):
            raise NotPlain
        elif isinstance(value, list) and any(isinstance(item, Hole) for item in value):
            numbers = [item.index if isinstance(item, Hole) else -1 for item in value]
            if min(numbers) < 0 or numbers != sorted(numbers):
                raise NotPlain
            places |= {number: (at, item) for item, number in enumerate(numbers)}
            value = ...
        arguments.append(value)
    if values:
        raise NotPlain
    return arguments, places


def expect_checked(kernel: Kernel, op: Allowed) -> None:
    """The check that its kernel does not make has passed, whatever the tensors hold. Raises NotPlain."""
    check = operand_checks.CHECKS.get(op.base)
    if check is None:
        return
    if len(kernel.metas) < kernel.n_operands:
        raise NotPlain
    shapes = [torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="meta") for meta in kernel.metas]
    try:
        args = [kernel.fill(value, shapes, lambda special: special) for value in kernel.args]
        kwargs = {name: kernel.fill(value, shapes, lambda special: special) for name, value in kernel.kwargs.items()}
        values = op.bound(args, kwargs)
        numbers = [name for name, value in values.items() if isinstance(value, int | float)]
        problem = check(values)
    except Exception:  # it looks at values, which these do not have
        raise NotPlain from None
    tensors = {each.name for each in op.schema.arguments if "Tensor" in str(each.real_type)}
    if problem is not None or not tensors.isdisjoint(numbers):  # the check knows tensors only
        raise NotPlain
