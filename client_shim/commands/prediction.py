"""Predicts an operation's results, so that it can return before it has run.

The operation runs on meta tensors that share storages as the real operands do, and views, in-place results and fresh
results are read off the storages' identity. An unpredictable result (data-dependent shapes, operations without a meta
kernel) gives a plan that asks the executor. The executor checks each prediction against the real result.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from dormouse.client_shim import torch_dispatcher, torch_private
from dormouse.client_shim.commands import definitions, metas, telling
from dormouse.client_shim.commands.handles import meta_of, storage_of
from dormouse.client_shim.commands.metas import Meta
from dormouse.client_shim.commands.operations import Operation
from dormouse.client_shim.commands.plans import Call, Plan
from dormouse.schemas import stream as wire

VIEWS_IN_PLACE: Final = {
    f"aten::{name}"
    for name in ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "detach_")
}
"""These change a tensor object and nothing on the GPU."""


def infer(call: Call) -> Plan:
    """The plan for one call."""
    operation = call.operation
    plan = Plan(writes=tuple(definitions.written(call)))
    plan.believed = operation.ask_once or (
        operation.laid_out_by_kernel and not all(_in_rows(meta_of(remote)) for remote in call.remotes)
    )
    mixed = operation.mixed and len({meta_of(remote).dtype for remote in call.remotes}) > 1
    if not operation.ask_always and not plan.believed and not mixed:
        try:
            _predict(plan, call)
        except Exception as error:  # a library's own shape rule may raise anything
            if _in_place_view(operation):  # nothing of it is the executor's
                raise RuntimeError(str(error)) if isinstance(error, AssertionError) else error from None
            # Ours or the user's fault: either way the real operation knows best, and its error is the one to show.
            plan.shape = Plan.ASK
            plan.results, plan.changes = [], []
    if plan.shape in (Plan.FRESH, Plan.SAME, Plan.GENERAL):
        if telling.tells(plan, call):
            plan.tell()
        elif way := telling.untried(plan, call):
            plan.tell(way)
    definitions.define(plan, call)
    return plan


def _in_place_view(operation: Operation) -> bool:
    return operation.name.split(".")[0] in VIEWS_IN_PLACE


def _in_rows(meta: Meta) -> bool:
    """Whether the strides are those of a new tensor, also of dimensions of size 1: kernels look at these as well."""
    return meta.stride == metas.contiguous_stride(meta.size)


def _predict(plan: Plan, call: Call) -> None:
    storages: dict[Any, torch.UntypedStorage] = {}
    shadows: list[torch.Tensor] = []
    by_remote: dict[int, torch.Tensor] = {}

    def shadow(remote: Any) -> torch.Tensor:
        known = by_remote.get(id(remote))
        if known is None:
            real = storage_of(remote)
            storage = storages.get(real)
            if storage is None:
                storage = storages[real] = torch_private.untyped_storage(real.nbytes, "meta")
            known = by_remote[id(remote)] = _on_meta(meta_of(remote), storage)
        shadows.append(known)
        return known

    operation = call.operation
    with torch_dispatcher.NoTorchFunction(), torch_dispatcher.BelowAutograd(), torch.no_grad():
        args = [_substitute(value, shadow, call.is_remote) for value in call.args]
        kwargs = {name: _substitute(value, shadow, call.is_remote) for name, value in call.kwargs.items()}
        output = operation.op(*args, **kwargs)
    _read_results(plan, output, shadows, call.remotes)
    if plan.changes and "out" in call.kwargs:
        raise RuntimeError("which strides an empty `out=` gets depends on the kernel")
    if not plan.results and not operation.writes:
        raise RuntimeError("no results: let the executor say")
    if _in_place_view(operation):
        plan.shape = Plan.VIEW
    else:
        plan.choose_path()


def _read_results(plan: Plan, output: Any, shadows: list[torch.Tensor], remotes: list[Any]) -> None:
    plan.listed = isinstance(output, list | tuple)
    # Operands by storage and by identity: lists of thousands are looked through once.
    owners: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for index, tensor in enumerate(shadows):
        owners.setdefault(tensor.untyped_storage()._cdata, index)
        numbers.setdefault(id(tensor), index)
    slots: dict[int, int] = {}
    for item in output if plan.listed else [output]:
        if item is None:
            plan.results.append((wire.NOTHING, None, 0))
            continue
        if not isinstance(item, torch.Tensor) or item.device.type != "meta" or item.layout != torch.strided:
            raise RuntimeError("a result that only the executor can describe")
        storage = item.untyped_storage()
        if (same := numbers.get(id(item))) is not None:
            plan.results.append((wire.SAME, None, same))
        elif (owner := owners.get(storage._cdata)) is not None:
            plan.results.append((wire.ALIAS, metas.of(item), owner))
        else:
            slot = slots.setdefault(storage._cdata, len(slots))
            if slot == len(plan.fresh_nbytes):
                plan.fresh_nbytes.append(storage.nbytes())
            plan.results.append((wire.FRESH, metas.of(item), slot))
    for index, (tensor, remote) in enumerate(zip(shadows, remotes, strict=True)):
        after = metas.of(tensor)
        if after is not meta_of(remote) and after.definition() != meta_of(remote).definition():
            plan.changes.append((index, after))


def _on_meta(meta: Meta, storage: torch.UntypedStorage) -> torch.Tensor:
    tensor = torch.empty(0, dtype=meta.dtype, device="meta")
    tensor.set_(storage, meta.offset, meta.size, meta.stride)
    if meta.bits & metas.CONJUGATED:
        torch_private.set_conj(tensor, True)
    if meta.bits & metas.NEGATED:
        torch_private.set_neg(tensor, True)
    return tensor


def _substitute(value: Any, shadow: Callable[[Any], torch.Tensor], is_remote: Callable[[Any], bool]) -> Any:
    """The argument as a meta run takes it."""
    if is_remote(value):
        return shadow(value)
    if isinstance(value, list | tuple):
        return [_substitute(item, shadow, is_remote) for item in value]
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, torch.Generator):
        return None
    return value
