"""What a command will do to shapes: the prediction that lets an operation return before it has run, interned per
signature.

`infer` runs an operation on meta tensors that share storages as the real operands do, and reads views, in-place
results and fresh results off the storages' identity. What cannot be known here (data-dependent shapes, operations
without a meta kernel) gives a plan that asks the executor. Pure but for the interning; the executor checks each
prediction against the real result.
"""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final

import msgpack
import torch

from dormouse.client_shim import torch_private
from dormouse.client_shim.commands import metas
from dormouse.client_shim.commands.metas import Meta
from dormouse.client_shim.commands.operations import Operation
from dormouse.schemas import stream as wire

Result = tuple[int, Meta | None, int]  # FRESH meta slot | ALIAS meta operand | SAME operand | NOTHING


VIEWS_IN_PLACE: Final = {
    f"aten::{name}"
    for name in ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "detach_")
}
"""These change a tensor object and nothing on the GPU."""


BULKY_NBYTES: Final = 4096
"""A command that may take more than this has frames of its own, so that a frame's worth of smaller ones always fits."""

MAX_COMMAND_NBYTES: Final = wire.MAX_FRAME_NBYTES * 3 // 4
"""What a command may take, its definition included. The rest of a frame is for what travels with it."""

_OPERAND_NBYTES: Final = 9  # of a number as msgpack writes it


class Plan:
    """A key with its predicted results. `shape` says which fast path serves it."""

    __slots__ = (
        "believed",
        "bulky",
        "changes",
        "definition",
        "fresh_nbytes",
        "id",
        "listed",
        "metas",
        "nbytes",
        "results",
        "shape",
        "single",
        "writes",
        "written_at",
    )

    VIEW, FRESH, SAME, GENERAL, ASK = range(5)

    def __init__(self) -> None:
        self.id = -1
        self.shape = Plan.ASK
        self.believed = False  # an answer holds for all calls with this signature
        self.results: list[Result] = []
        self.changes: list[tuple[int, Meta]] = []
        self.bulky = False
        self.nbytes = 0  # of the definition and the largest operands, about
        self.listed = False  # the results are a list or tuple
        self.fresh_nbytes: list[int] = []  # by slot
        self.writes: tuple[int, ...] = ()  # operands written, counted over tensors
        self.written_at: tuple[int, ...] = ()  # their places among all operands
        self.definition: list[Any] = []
        self.metas: list[Meta] = []  # that the definition names
        self.single: Meta | None = None  # the one result's


_numbers = count()

generator_numbers: dict[int, int] = {}
"""The executor's generator by the address of the C++ object that stands for it; the Python object does not survive
the dispatcher."""


def generator_number(generator: Any) -> int:
    number = generator_numbers.get(generator._cdata)
    if number is None:
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    return number


def infer(
    operation: Operation,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    remotes: list[Any],
    is_remote: Callable[[Any], bool],
) -> Plan:
    """The plan for one call. `remotes` are its remote tensors in the order of the key's TENSOR literals."""
    plan = Plan()
    plan.writes = tuple(written(operation, args, kwargs, is_remote))
    plan.believed = operation.ask_once or (
        operation.laid_out_by_kernel and not all(in_rows(remote._meta) for remote in remotes)
    )
    if not operation.ask_always and not plan.believed:
        try:
            predict(plan, operation, args, kwargs, remotes, is_remote)
        except Exception:  # a library's own shape rule may raise anything
            # Ours or the user's fault: either way the real operation knows best, and its error is the one to show.
            plan.shape = Plan.ASK
            plan.results, plan.changes = [], []
    define(plan, operation, args, kwargs, is_remote)
    return plan


def in_rows(meta: Meta) -> bool:
    """Whether the strides are those of a new tensor, also of dimensions of size 1: kernels look at these as well."""
    step = 1
    for size, stride in zip(reversed(meta.size), reversed(meta.stride), strict=True):
        if stride != step:
            return False
        step *= max(size, 1)
    return True


def predict(
    plan: Plan,
    operation: Operation,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    remotes: list[Any],
    is_remote: Callable[[Any], bool],
) -> None:
    storages: dict[Any, torch.UntypedStorage] = {}
    shadows: list[torch.Tensor] = []
    by_remote: dict[int, torch.Tensor] = {}

    def shadow(remote: Any) -> torch.Tensor:
        known = by_remote.get(id(remote))
        if known is None:
            storage = storages.get(remote._storage)
            if storage is None:
                storage = storages[remote._storage] = torch_private.untyped_storage(remote._storage.nbytes, "meta")
            known = by_remote[id(remote)] = on_meta(remote._meta, storage)
        shadows.append(known)
        return known

    with torch_private.NoTorchFunction(), torch_private.BelowAutograd(), torch.no_grad():
        meta_args = [substitute(value, shadow, is_remote) for value in args]
        meta_kwargs = {name: substitute(value, shadow, is_remote) for name, value in kwargs.items()}
        output = operation.op(*meta_args, **meta_kwargs)
    read_results(plan, output, shadows, remotes)
    if plan.changes and "out" in kwargs:
        raise RuntimeError("which strides an empty `out=` gets depends on the kernel")
    if not plan.results and not operation.mutates:
        raise RuntimeError("no results: let the executor say")
    plan.shape = Plan.VIEW if operation.name.split(".")[0] in VIEWS_IN_PLACE else _shape(plan)


def read_results(plan: Plan, output: Any, shadows: list[torch.Tensor], remotes: list[Any]) -> None:
    plan.listed = isinstance(output, list | tuple)
    owners: dict[int, int] = {}
    for index, tensor in enumerate(shadows):
        owners.setdefault(tensor.untyped_storage()._cdata, index)
    numbers: dict[int, int] = {}  # of the operands, by identity: lists of thousands are looked through once
    for index, tensor in enumerate(shadows):
        numbers.setdefault(id(tensor), index)
    slots: dict[int, int] = {}
    for item in output if plan.listed else [output]:
        if item is None:
            plan.results.append((wire.NOTHING, None, 0))
            continue
        if not isinstance(item, torch.Tensor) or item.device.type != "meta" or item.layout != torch.strided:
            raise RuntimeError("a result that only the executor can describe")
        same = numbers.get(id(item))
        if same is not None:
            plan.results.append((wire.SAME, None, same))
            continue
        storage = item.untyped_storage()
        owner = owners.get(storage._cdata)
        if owner is not None:
            plan.results.append((wire.ALIAS, metas.of(item), owner))
            continue
        slot = slots.setdefault(storage._cdata, len(slots))
        if slot == len(plan.fresh_nbytes):
            plan.fresh_nbytes.append(storage.nbytes())
        plan.results.append((wire.FRESH, metas.of(item), slot))
    for index, tensor in enumerate(shadows):
        after = metas.of(tensor)
        if after is not remotes[index]._meta and (after.size, after.stride, after.offset, after.bits) != _geometry(
            remotes[index]._meta
        ):
            plan.changes.append((index, after))


def _geometry(meta: Meta) -> tuple[Any, ...]:
    return meta.size, meta.stride, meta.offset, meta.bits


def _shape(plan: Plan) -> int:
    if plan.changes:
        return Plan.GENERAL
    if not plan.writes and plan.results and all(kind in (wire.ALIAS, wire.SAME) for kind, _, _ in plan.results):
        plan.single = plan.results[0][1]
        return Plan.VIEW
    if len(plan.results) == 1 and not plan.listed:
        kind, meta, _ = plan.results[0]
        if kind == wire.FRESH:
            plan.single = meta
            return Plan.FRESH
        if kind == wire.SAME:
            return Plan.SAME
    return Plan.GENERAL


def on_meta(meta: Meta, storage: torch.UntypedStorage) -> torch.Tensor:
    tensor = torch.empty(0, dtype=meta.dtype, device="meta")
    tensor.set_(storage, meta.offset, meta.size, meta.stride)
    if meta.bits & metas.CONJUGATED:
        torch_private.set_conj(tensor, True)
    if meta.bits & metas.NEGATED:
        torch_private.set_neg(tensor, True)
    return tensor


def substitute(value: Any, shadow: Callable[[Any], torch.Tensor], is_remote: Callable[[Any], bool]) -> Any:
    """The argument as a meta run takes it."""
    if is_remote(value):
        return shadow(value)
    if isinstance(value, list | tuple):
        return [substitute(item, shadow, is_remote) for item in value]
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, torch.Generator):
        return None
    return value


def written(
    operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], is_remote: Callable[[Any], bool]
) -> Iterator[int]:
    """The operands (counted over tensors) that are written: by the schema, or as running statistics."""
    writes = operation.writes
    if operation.statistics:
        at, name = operation.flag or (0, "")
        if operation.flag is None or kwargs.get(name, args[at] if at < len(args) else False):
            writes |= operation.statistics
    index = 0
    for key, value in (*enumerate(args), *kwargs.items()):
        for item in value if isinstance(value, list | tuple) else [value]:
            if is_remote(item):
                if key in writes:
                    yield index
                index += 1


def define(
    plan: Plan, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], is_remote: Callable[[Any], bool]
) -> None:
    named: list[Meta] = []
    operands: list[int] = []  # TENSOR, SCALAR or HOST
    host_nbytes = 0

    def literal(value: Any, scalar: bool) -> Any:
        nonlocal host_nbytes
        if is_remote(value):
            named.append(value._meta)
            operands.append(wire.TENSOR)
            return [wire.TENSOR, value._meta.id]
        if isinstance(value, torch.Tensor):
            host_nbytes += value.nbytes
            operands.append(wire.HOST)
            return [wire.HOST, metas.dtype_name(value.dtype), list(value.shape)]
        if isinstance(value, list | tuple):
            return [wire.LIST, [literal(item, scalar) for item in value]]
        if scalar and value is not None and not operation.scalars_in_key:
            operands.append(wire.SCALAR)
            return [wire.SCALAR]
        return _plain(value)

    coded_args = [literal(value, index in operation.scalars) for index, value in enumerate(args)]
    coded_kwargs: list[Any] = []
    for name, value in kwargs.items():
        coded_kwargs += (name, literal(value, name in operation.scalar_names))
    tensors = [place for place, kind in enumerate(operands) if kind == wire.TENSOR]
    plan.written_at = tuple(tensors[index] for index in plan.writes)
    outputs = None
    if plan.shape != Plan.ASK:
        results = [_result(kind, meta, number, named) for kind, meta, number in plan.results]
        changes = []
        for operand, meta in plan.changes:
            named.append(meta)
            changes.append([operand, meta.id])
        outputs = [results, changes, plan.listed]
    plan.definition = [
        operation.wire_name,
        coded_args,
        coded_kwargs,
        outputs,
        metas.dtype_name(torch.get_default_dtype()),
    ]
    plan.metas = named
    if plan.shape != Plan.VIEW:
        _measure(plan, operation, len(operands), host_nbytes)
    plan.id = next(_numbers)


def _measure(plan: Plan, operation: Operation, operands: int, host_nbytes: int) -> None:
    """Refuse what no frame could hold, before it is recorded among commands that are well."""
    try:
        nbytes = len(msgpack.packb(plan.definition))
    except (OverflowError, ValueError, TypeError) as error:  # beyond 64 bits, half a surrogate pair, a symbolic number
        raise NotImplementedError(
            f"{operation.name}: an argument cannot be sent to the GPU's executor: {error}"
        ) from None
    nbytes += host_nbytes + (operands + len(plan.fresh_nbytes)) * _OPERAND_NBYTES
    for meta in set(plan.metas):
        nbytes += _OPERAND_NBYTES * (2 * len(meta.size) + 4) + 16
    if nbytes > MAX_COMMAND_NBYTES:
        raise NotImplementedError(
            f"{operation.name} with {operands} tensors and numbers takes {nbytes} bytes to send to the GPU's executor, "
            f"over the limit of {MAX_COMMAND_NBYTES}: do it in parts"
        )
    plan.nbytes = nbytes
    if nbytes > BULKY_NBYTES:
        plan.bulky = True
        if plan.shape != Plan.ASK:
            plan.shape = Plan.GENERAL


def _result(kind: int, meta: Meta | None, number: int, named: list[Meta]) -> list[Any]:
    if kind == wire.NOTHING:
        return [kind]
    if kind == wire.SAME or meta is None:
        return [kind, number]
    named.append(meta)
    return [kind, meta.id, number]


def _plain(value: Any) -> Any:
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
    raise NotImplementedError(f"an argument of type {type(value).__name__} cannot be sent to the GPU's executor")


def told(results: list[Any], changes: list[Any], listed: bool) -> Plan:
    """A plan of what an executor reported about one run."""
    plan = Plan()
    plan.listed = listed
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
    plan.changes = [(operand, _meta(definition)) for operand, definition in changes]
    plan.fresh_nbytes = [sizes[slot] for slot in sorted(sizes)]
    return plan


def believed(asked: Plan, answer: Plan) -> Plan:
    """A predicting plan from an asking one and the executor's answer."""
    name, args, kwargs, _, default_dtype = asked.definition
    named = list(asked.metas)
    results = [_result(kind, meta, number, named) for kind, meta, number in answer.results]
    answer.bulky, answer.nbytes = asked.bulky, asked.nbytes
    answer.shape = Plan.GENERAL if asked.bulky else _shape(answer)
    answer.definition = [name, args, kwargs, [results, [], answer.listed], default_dtype]
    answer.metas = named
    answer.id = next(_numbers)
    return answer


def _meta(definition: list[Any]) -> Meta:
    dtype, size, stride, offset, bits = definition
    return metas.intern(metas.DTYPES[dtype], tuple(size), tuple(stride), offset, bits)
