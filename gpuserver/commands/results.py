"""Results of an operation: compared with the prediction and entered, or described if there was no prediction.

A result is accepted only if type, size and aliasing are as predicted. A difference in strides alone is repaired by a
copy and counted.
"""

from collections.abc import Callable
from typing import Any

import torch

from dormouse.gpuserver.commands.definitions import CheckedMeta, Kernel, Prediction
from dormouse.gpuserver.commands.storages import CommandFailed, HeldStorage, StorageFailure, StorageTable, tensor_on
from dormouse.schemas import stream as wire


class Results:
    """The results of one instance's operations. ``with_relief`` makes a call that needs memory, and repeats it if room
    could be made.
    """

    def __init__(self, table: StorageTable, with_relief: Callable[[Callable[[], torch.Tensor]], torch.Tensor]) -> None:
        self.repaired = 0
        self._table = table
        self._with_relief = with_relief

    def repair(self, output: torch.Tensor, meta: CheckedMeta) -> torch.Tensor:
        """A copy with the strides that were predicted."""
        return self._with_relief(lambda: self._repair(output, meta))

    def _repair(self, output: torch.Tensor, meta: CheckedMeta) -> torch.Tensor:
        self.repaired += 1
        storage = torch.empty(meta.extent, dtype=torch.uint8, device=output.device).untyped_storage()
        return tensor_on(storage, meta, output.device).copy_(output)

    def enter(
        self,
        kernel: Kernel,
        prediction: Prediction,
        output: Any,
        values: list[Any],
        stored: list[HeldStorage],
        fresh: list[int],
    ) -> None:
        """The general case: several results, in-place ones, aliases, resized arguments."""
        tensors = [values[place] for place in kernel.tensors]
        outputs = list(output) if isinstance(output, list | tuple) else [output]
        if len(outputs) != len(prediction.results) and not (output is None and not prediction.results):
            raise _mismatch(kernel, None, output)
        made: dict[int, HeldStorage] = {}
        for item, (kind, meta, number) in zip(outputs, prediction.results, strict=False):
            if kind == wire.FRESH:
                assert meta is not None
                if number in made:
                    if _differs(item, meta) or not _lies_in(item, made[number]):
                        raise _mismatch(kernel, meta, item)
                    made[number].views[meta.number] = item
                else:
                    result = predicted(kernel, item, meta, stored)
                    made[number] = HeldStorage.of_result(self.repair(item, meta) if result is None else result, meta)
            elif kind == wire.NOTHING:
                if item is not None and not (isinstance(item, torch.Tensor) and item.numel() == 0):
                    raise _mismatch(kernel, None, item)
            elif kind == wire.SAME:
                if item is not tensors[number] and (
                    not isinstance(item, torch.Tensor) or item.data_ptr() != tensors[number].data_ptr()
                ):
                    raise _mismatch(kernel, None, item)
            else:
                assert meta is not None
                if _differs(item, meta) or not _lies_in(item, stored[number]):
                    raise _mismatch(kernel, meta, item)
        self._after_writes(kernel, prediction, tensors, stored)
        for slot, number in enumerate(fresh):
            if slot not in made:
                raise _mismatch(kernel, None, output)
            self._table.by_id[number] = made[slot]

    def _after_writes(
        self, kernel: Kernel, prediction: Prediction, tensors: list[torch.Tensor], stored: list[HeldStorage]
    ) -> None:
        for index in kernel.written:
            stored[index].dirty = True
        changed = dict(prediction.changes)
        if changed or (kernel.op is not None and kernel.op.resizes):
            for index in kernel.written:
                meta = changed.get(index, kernel.metas[index])
                wrong = _differs(tensors[index], meta)
                if wrong or index in changed:
                    stored[index].bytes()
                    stored[index].resized()
                if wrong:
                    raise _mismatch(kernel, meta, tensors[index])

    # --- results without a prediction

    def describe(
        self,
        kernel: Kernel,
        output: Any,
        tensors: list[torch.Tensor],
        before: list[int],
        stored: list[HeldStorage],
        first: int,
    ) -> list[Any]:
        """A description of the output for the instance; fresh results are entered under first, first + 1, ...
        ``before``: the storages of the operands' ``tensors`` before the call.
        """
        listed = isinstance(output, list | tuple)
        results: list[Any] = []
        slots: dict[int, int] = {}
        made: list[HeldStorage] = []
        for item in output if listed else [output]:
            results.append(self._describe(item, tensors, before, slots, made, kernel))
        changes = []
        for index in kernel.written:
            stored[index].dirty = True
            if _differs(tensors[index], kernel.metas[index]):
                changes.append([index, _definition(tensors[index])])
                stored[index].bytes()
                stored[index].resized()
        numbers = [first + slot for slot in range(len(made))]
        self._table.check_fresh(numbers)
        for number, entry in zip(numbers, made, strict=True):
            self._table.by_id[number] = entry
        return [results, changes, listed, len(made)]

    def _describe(
        self,
        item: Any,
        tensors: list[torch.Tensor],
        before: list[int],
        slots: dict[int, int],
        made: list[HeldStorage],
        kernel: Kernel,
    ) -> Any:
        if item is None:
            return [wire.NOTHING]
        if isinstance(item, bool | int | float):
            return [wire.PLAIN, item]
        if not isinstance(item, torch.Tensor) or item.layout is not torch.strided or item.device != self._table.device:
            text = f"{kernel.name} gives a result that cannot be moved: {type(item).__name__}"
            raise CommandFailed(StorageFailure("NotImplementedError", text))
        for index, tensor in enumerate(tensors):
            if item is tensor:
                return [wire.SAME, index]
        storage = item.untyped_storage()
        definition = _definition(item)
        if storage._cdata in before:
            return [wire.ALIAS, definition, before.index(storage._cdata)]
        slot = slots.setdefault(storage._cdata, len(slots))
        if slot == len(made):
            made.append(HeldStorage.of_bytes(storage))
        return [wire.FRESH, definition, slot, storage.nbytes()]


def predicted(kernel: Kernel, output: Any, meta: CheckedMeta, stored: list[HeldStorage]) -> torch.Tensor | None:
    """A result in a storage of its own, as it was predicted; None if it must be repaired for that."""
    if not isinstance(output, torch.Tensor) or output.dtype is not meta.dtype or output.size() != meta.size:
        raise _mismatch(kernel, meta, output)
    if output.layout is not torch.strided:
        raise _mismatch(kernel, meta, output)
    address = output.data_ptr()
    if address:
        for entry in stored:
            if entry.address <= address < entry.address + entry.nbytes:
                raise _mismatch(kernel, meta, output)
    if output.storage_offset() != meta.offset or output.is_conj() or output.is_neg():
        return None
    if output.stride() == meta.stride:
        return output
    return output.as_strided(meta.size, meta.stride, meta.offset) if _same_places(output, meta) else None


def _definition(tensor: torch.Tensor) -> list[Any]:
    bits = (1 if tensor.is_conj() else 0) | (2 if tensor.is_neg() else 0)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, list(tensor.size()), list(tensor.stride()), tensor.storage_offset(), bits]


def _lies_in(tensor: torch.Tensor, stored: HeldStorage) -> bool:
    return bool(tensor.untyped_storage()._cdata == stored.bytes()._cdata)


def _same_places(tensor: torch.Tensor, meta: CheckedMeta) -> bool:
    """Whether the strides differ, if at all, only where they lead nowhere: along dimensions of size 1."""
    places = zip(meta.size, tensor.stride(), meta.stride, strict=True)
    return tensor.numel() <= 1 or all(size == 1 or one == other for size, one, other in places)


def _differs(tensor: Any, meta: CheckedMeta) -> bool:
    return (
        not isinstance(tensor, torch.Tensor)
        or tensor.dtype is not meta.dtype
        or tensor.size() != meta.size
        or (tensor.stride() != meta.stride and not _same_places(tensor, meta))
        or tensor.storage_offset() != meta.offset
    )


def _mismatch(kernel: Kernel, meta: CheckedMeta | None, got: Any) -> CommandFailed:
    expected = f"{meta.dtype} {tuple(meta.size)} {meta.stride}" if meta else "other results"
    actual = (
        f"{got.dtype} {tuple(got.size())} {got.stride()}"
        if isinstance(got, torch.Tensor) and got.layout is torch.strided
        else type(got).__name__
    )
    text = f"{kernel.name} gave {actual} where the client expected {expected}: its shape rule is wrong here"
    return CommandFailed(StorageFailure("RuntimeError", text))
