"""Encodes a plan as the definition under which a command's key travels to an executor, and decodes the answer.

Pure, but for the numbers of keys. Refuses values that the wire cannot carry before anything of them is recorded.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any, Final

import msgpack
import torch

from dormouse.client_shim.commands import metas
from dormouse.client_shim.commands.handles import meta_of
from dormouse.client_shim.commands.metas import Meta
from dormouse.client_shim.commands.plans import Call, Plan
from dormouse.schemas import stream as wire

BULKY_NBYTES: Final = 8192
"""A command that may take more than this has frames of its own, so that a frame's worth of smaller ones always fits."""

MAX_COMMAND_NBYTES: Final = wire.MAX_FRAME_NBYTES * 3 // 4
"""The size limit of a command, its definition included. The rest of a frame is for data that travels with it."""

_OPERAND_NBYTES: Final = 9  # of a number as msgpack writes it

_numbers = count()

generator_numbers: dict[int, int] = {}
"""The executor's generator by the address of the C++ object that stands for it; the Python object does not survive
the dispatcher."""


def generator_number(generator: Any) -> int:
    number = generator_numbers.get(generator._cdata)
    if number is None:
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    return number


def written(call: Call) -> Iterator[int]:
    """The operands (counted over tensors) that are written: by the schema, or as running statistics."""
    operation = call.operation
    writes = operation.writes
    if operation.statistics:
        at, name = operation.flag or (0, "")
        if operation.flag is None or call.kwargs.get(name, call.args[at] if at < len(call.args) else False):
            writes |= operation.statistics
    index = 0
    for key, value in (*enumerate(call.args), *call.kwargs.items()):
        for item in value if isinstance(value, list | tuple) else [value]:
            if call.is_remote(item):
                if key in writes:
                    yield index
                index += 1


def define(plan: Plan, call: Call) -> None:
    """Give the plan its number and its definition. Raises NotImplementedError if that cannot travel."""
    # `literal` calls itself, so it lives until the next garbage collection: it must not keep the call's tensors.
    operation, is_remote, named = call.operation, call.is_remote, plan.metas
    operands: list[int] = []  # TENSOR, SCALAR or HOST
    host_nbytes = 0

    def literal(value: Any, scalar: bool) -> Any:
        nonlocal host_nbytes
        if is_remote(value):
            named.append(meta_of(value))
            operands.append(wire.TENSOR)
            return [wire.TENSOR, meta_of(value).id]
        if isinstance(value, torch.Tensor):
            host_nbytes += value.nbytes
            operands.append(wire.HOST)
            return [wire.HOST, metas.dtype_name(value.dtype), list(value.shape)]
        if isinstance(value, list | tuple):
            return [wire.LIST, [literal(item, scalar) for item in value]]
        if scalar and value is not None and not operation.scalars_in_key:
            operands.append(wire.SCALAR)
            return [wire.SCALAR]
        return plain(value)

    args = [literal(value, index in operation.scalars) for index, value in enumerate(call.args)]
    kwargs: list[Any] = []
    for name, value in call.kwargs.items():
        kwargs += (name, literal(value, name in operation.scalar_names))
    tensors = [place for place, kind in enumerate(operands) if kind == wire.TENSOR]
    plan.written_at = tuple(tensors[index] for index in plan.writes)
    outputs = None if plan.shape == Plan.ASK else _outputs(plan)
    plan.definition = [operation.wire_name, args, kwargs, outputs, metas.dtype_name(torch.get_default_dtype())]
    if plan.shape != Plan.VIEW:
        _measure(plan, operation.name, len(operands), host_nbytes)
    plan.id = next(_numbers)


def _outputs(plan: Plan) -> list[Any]:
    """The predicted results, whose geometries join those that the definition names."""
    results: list[list[Any]] = []
    for kind, meta, number in plan.results:
        if kind == wire.NOTHING:
            results.append([kind])
        elif kind == wire.SAME or meta is None:
            results.append([kind, number])
        else:
            plan.metas.append(meta)
            results.append([kind, meta.id, number])
    plan.metas += (meta for _, meta in plan.changes)
    return [results, [[operand, meta.id] for operand, meta in plan.changes], plan.listed]


def _measure(plan: Plan, name: str, operands: int, host_nbytes: int) -> None:
    """Refuse a command that no frame could hold, before it is recorded among valid ones."""
    try:
        nbytes = len(msgpack.packb(plan.definition))
    except (OverflowError, ValueError, TypeError) as error:  # beyond 64 bits, half a surrogate pair, a symbolic number
        raise NotImplementedError(f"{name}: an argument cannot be sent to the GPU's executor: {error}") from None
    nbytes += host_nbytes + (operands + len(plan.fresh_nbytes)) * _OPERAND_NBYTES
    for meta in set(plan.metas):
        nbytes += _OPERAND_NBYTES * (2 * len(meta.size) + 4) + 16
    if nbytes > MAX_COMMAND_NBYTES:
        raise NotImplementedError(
            f"{name} with {operands} tensors and numbers takes {nbytes} bytes to send to the GPU's executor, "
            f"over the limit of {MAX_COMMAND_NBYTES}: do it in parts"
        )
    plan.nbytes = nbytes
    if nbytes > BULKY_NBYTES:
        plan.bulky = True
        if plan.shape != Plan.ASK:
            plan.shape = Plan.GENERAL


def plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        return [wire.COMPLEX, value.real, value.imag]
    if isinstance(value, torch.dtype):
        metas.check(value)
        return [wire.DTYPE, metas.dtype_name(value)]
    if isinstance(value, torch.layout):
        return [wire.LAYOUT, str(value).removeprefix("torch.")]
    if isinstance(value, torch.memory_format):
        return [wire.FORMAT, str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return [wire.DEVICE]
    if isinstance(value, torch.Generator):
        return [wire.GENERATOR, generator_number(value)]
    kind = type(value).__name__
    way = "a quantized module stays on the CPU, with its inputs: x.cpu()" if kind == "ScriptObject" else "use x.cpu()"
    raise NotImplementedError(f"an argument of type {kind} cannot be sent to the GPU's executor: {way}")


def told(results: list[Any], changes: list[Any], listed: bool) -> Plan:
    """A plan from an executor's report of one run."""
    plan = Plan(listed=listed, changes=[(operand, _meta(definition)) for operand, definition in changes])
    sizes: dict[int, int] = {}
    for result in results:
        kind = result[0]
        if kind in (wire.FRESH, wire.ALIAS):
            meta = _meta(result[1])
            plan.results.append((kind, meta, result[2]))
            if kind == wire.FRESH:
                sizes[result[2]] = max(sizes.get(result[2], 0), result[3] if len(result) > 3 else meta.extent())
        elif kind == wire.SAME:
            plan.results.append((kind, None, result[1]))
        elif kind == wire.NOTHING:
            plan.results.append((kind, None, 0))
    plan.fresh_nbytes = [sizes[slot] for slot in sorted(sizes)]
    return plan


def believed(asked: Plan, answer: Plan) -> Plan:
    """A predicting plan from an asking one and the executor's answer."""
    name, args, kwargs, _, default_dtype = asked.definition
    answer.bulky, answer.nbytes = asked.bulky, asked.nbytes
    answer.choose_path()
    if asked.bulky:
        answer.shape = Plan.GENERAL
    answer.metas = list(asked.metas)
    answer.definition = [name, args, kwargs, _outputs(answer), default_dtype]
    answer.id = next(_numbers)
    return answer


def _meta(definition: list[Any]) -> Meta:
    dtype, size, stride, offset, bits = definition
    return metas.intern(metas.DTYPES[dtype], tuple(size), tuple(stride), offset, bits)
