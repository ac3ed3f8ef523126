"""Runs one operation: operands in, the real call, results compared with the prediction (results.py).

`run` is the hot path of the executor. An exception of an operation becomes a `CommandFailed`.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

import torch

from dormouse.gpuserver.commands import index_checks, operand_checks
from dormouse.gpuserver.commands.definitions import DEVICE, CheckedMeta, GeneratorHole, Kernel, ProtocolViolation
from dormouse.gpuserver.commands.emulation import EMULATED
from dormouse.gpuserver.commands.generators import Generators
from dormouse.gpuserver.commands.graphs import GraphOperator
from dormouse.gpuserver.commands.index_checks import IndexGuard
from dormouse.gpuserver.commands.oplist import Allowed
from dormouse.gpuserver.commands.results import Results, predicted
from dormouse.gpuserver.commands.storages import EMBEDDING, CommandFailed, HeldStorage, StorageFailure, StorageTable
from dormouse.gpuserver.device.protocol import DeviceLost
from dormouse.schemas import stream as wire

T = TypeVar("T")
RELIEFS: Final = 3
"""Retries of a call that was refused memory: room is made first by results computed ahead, then by captured sections,
then by idle models.
"""
WROTE_UNDECLARED = "Inplace update to inference tensor"
"""PyTorch's complaint when a custom operator writes an operand although its schema says that it writes none."""


class OperationRunner:
    def __init__(
        self, table: StorageTable, generators: Generators, device: Any, relieve: Callable[[], str | None]
    ) -> None:
        self.table = table
        self.ran = 0
        self._generators = generators
        self._emulated = EMULATED if table.device.type == "cpu" else {}
        self.guard = IndexGuard() if table.device.type == "cuda" else None  # else kernels look themselves
        self._relieve = relieve
        self._synchronize: Callable[[], None] = device.synchronize
        self.results = Results(table, self.with_relief)

    def run(self, kernel: Kernel, operands: list[Any], fresh: list[int]) -> None:
        """Run a predicted operation and enter its results under `fresh`."""
        if kernel.written:
            self._before_writes(kernel, operands)
        values, stored = self._operands(kernel, operands)
        output = self._call(kernel, values, stored)
        prediction = kernel.predicted
        assert prediction is not None
        meta = prediction.one_fresh
        if meta is not None and not kernel.written:
            # By far the most frequent: one result in a storage of its own.
            result = predicted(kernel, output, meta, stored)
            if result is None:
                result = self.results.repair(output, meta)
            self.table.by_id[fresh[0]] = HeldStorage.of_result(result, meta)
            return
        self.results.enter(kernel, prediction, output, values, stored, fresh)

    def may_guess(self, kernel: Kernel) -> bool:
        """Whether running it has no effect but its results."""
        op = kernel.op
        if op is None or kernel.predicted is None or kernel.written or op.random or op.custom:
            return False
        return self.guard is None or op.base not in index_checks.RULES  # the guard remembers what it has seen

    def ask(self, kernel: Kernel, operands: list[Any], first: int) -> list[Any]:
        """Run an operation and describe its results; fresh ones are entered under first, first + 1, ..."""
        if kernel.written:
            self._before_writes(kernel, operands)
        values, stored = self._operands(kernel, operands)
        tensors = [values[place] for place in kernel.tensors]
        before = [tensor.untyped_storage()._cdata for tensor in tensors]
        output = self._call(kernel, values, stored)
        return self.results.describe(kernel, output, tensors, before, stored, first)

    def _before_writes(self, kernel: Kernel, operands: list[Any]) -> None:
        """Copy on write: a storage that others share is copied before its first view is made."""
        self.table.written()
        tensors = [operands[place] for place in kernel.tensors]
        changed = dict(kernel.predicted.changes) if kernel.predicted is not None else {}
        for index in kernel.written:
            stored = self.table.get(tensors[index])
            if stored.may_write is not None:
                if kernel.predicted is not None:
                    grows = index in changed and changed[index].extent > stored.nbytes
                else:
                    grows = kernel.op is not None and kernel.op.resizes
                self.with_relief(partial(self.table.will_write, stored, grows))

    def _operands(self, kernel: Kernel, operands: list[Any]) -> tuple[list[Any], list[HeldStorage]]:
        table = self.table
        by_id = table.by_id
        values = []
        stored: list[HeldStorage] = []
        for value, (kind, what) in zip(operands, kernel.operands, strict=True):
            if kind == wire.TENSOR:
                entry = by_id.get(value)
                if entry is None or entry.error is not None:
                    entry = table.get(value)
                view = entry.views.get(what.number)
                if view is None and entry.direct is not None and kernel.name == EMBEDDING:
                    view = self._rows(kernel, entry, what, len(stored))
                values.append(view if view is not None else table.view(entry, what))
                stored.append(entry)
            elif kind == wire.SCALAR:
                values.append(_scalar(value))
            else:
                values.append(_host(value, *what))
        return values, stored

    def _rows(self, kernel: Kernel, entry: HeldStorage, meta: CheckedMeta, position: int) -> torch.Tensor | None:
        """A table of which few rows are needed, read over the link while it is on its way: otherwise the first layer of
        a language model would wait for up to a tenth of the model's bytes.
        """
        if position or len(meta.size) != 2:
            return None
        rows = kernel.metas[1].numel
        return self.table.direct(entry, meta, rows * meta.size[1] * meta.itemsize)

    def _call(self, kernel: Kernel, values: list[Any], stored: list[HeldStorage]) -> Any:
        op = kernel.op
        if op is None:
            assert kernel.refusal is not None
            raise CommandFailed(StorageFailure(*kernel.refusal))
        args = kernel.args.copy()
        if kernel.flat is not None:
            for place, value in zip(kernel.flat, values, strict=True):
                args[place] = value
        else:
            args = [kernel.fill(value, values, self._special) for value in args]
        kwargs = {}
        if kernel.kwargs:
            kwargs = {name: kernel.fill(value, values, self._special) for name, value in kernel.kwargs.items()}
        args, kwargs = self._checked(kernel, op, args, kwargs)
        if op.custom:
            self.table.written()  # it may write, whatever its schema says
        self.ran += 1
        try:
            return self._invoke(kernel, args, kwargs)
        except torch.OutOfMemoryError as error:
            # Room may be made only if running it twice is the same as running it once.
            why = "" if kernel.written else self._relieve()
            if why is not None:
                raise CommandFailed(_failure(error, why)) from None
        except Exception as error:  # any exception of an operation belongs to the function that asked for it
            failed = self.raised(kernel, stored, error)
            if op.custom and WROTE_UNDECLARED in str(error):
                for entry in stored:
                    entry.error, entry.dirty = failed.failure, True  # nobody knows which it was
            raise failed from None
        return self.with_relief(lambda: self._invoke(kernel, args, kwargs), RELIEFS - 1)

    def raised(self, kernel: Kernel, stored: list[HeldStorage], error: Exception) -> CommandFailed:
        """The failure of an operation on these storages. Raises DeviceLost if it was the device."""
        for index in kernel.written:
            stored[index].resized()  # after a failure half way the views may be stale
        return self.failed(error)

    def _checked(
        self, kernel: Kernel, op: Allowed, args: list[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments, once the checks that its kernel does not make have passed."""
        try:
            if (check := operand_checks.CHECKS.get(op.base)) is not None:
                problem = check(op.bound(args, kwargs))
                if problem is not None:
                    raise CommandFailed(StorageFailure("RuntimeError", problem))
            if self.guard is not None and isinstance(op, GraphOperator):
                return args, {"guard": self.guard}
            if self.guard is not None and (rule := index_checks.RULES.get(op.base)) is not None:
                return [], self.guard.checked(rule, op.bound(args, kwargs), bool(kernel.written))
        except CommandFailed:
            raise
        except Exception as error:  # of operands that nobody has looked at before: the function's
            raise self.failed(error) from None
        return args, kwargs

    def _invoke(self, kernel: Kernel, args: list[Any], kwargs: dict[str, Any]) -> Any:
        assert kernel.op is not None
        if kernel.op.custom and not kernel.op.writes:
            # Our tensors are made in inference mode, and PyTorch refuses to write those outside of it.
            with torch.inference_mode(False), torch.no_grad():
                return self._with_dtype(kernel, args, kwargs)
        if kernel.op.random and kernel.op.draws(args, kwargs):
            return self._random(kernel, args, kwargs)
        return self._with_dtype(kernel, args, kwargs)

    def _random(self, kernel: Kernel, args: list[Any], kwargs: dict[str, Any]) -> Any:
        op = kernel.op
        assert op is not None
        if op.has_generator:
            if kwargs.get("generator") is None and not any(isinstance(value, torch.Generator) for value in args):
                position = op.generator_at
                if position is not None and position < len(args):
                    args[position] = self._generators.get(0)
                else:
                    kwargs = {**kwargs, "generator": self._generators.get(0)}
            return self._with_dtype(kernel, args, kwargs)
        # It draws from PyTorch's own generator: lend it the instance's state.
        own, shared = self._generators.get(0), self._generators.device_default()
        before = shared.get_state()
        shared.set_state(own.get_state())
        try:
            return self._with_dtype(kernel, args, kwargs)
        finally:
            own.set_state(shared.get_state())
            shared.set_state(before)

    def _with_dtype(self, kernel: Kernel, args: list[Any], kwargs: dict[str, Any]) -> Any:
        assert kernel.op is not None
        call = self._emulated.get(kernel.name, kernel.op.call)
        before = torch.get_default_dtype()
        if kernel.default_dtype is before:
            return call(*args, **kwargs)
        torch.set_default_dtype(kernel.default_dtype)
        try:
            return call(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    def _special(self, value: Any) -> Any:
        if value is DEVICE:
            return self.table.device
        if isinstance(value, GeneratorHole):
            return self._generators.get(value.number)
        return value

    def with_relief(self, call: Callable[[], T], reliefs: int = RELIEFS) -> T:
        """Call; out of memory, make room and call again."""
        try:
            return call()
        except torch.OutOfMemoryError as error:
            why = self._relieve() if reliefs else ""
            if why is not None:
                raise CommandFailed(_failure(error, why)) from None
        except (CommandFailed, ProtocolViolation, DeviceLost):
            raise
        except Exception as error:  # as in _call
            raise self.failed(error) from None
        return self.with_relief(call, reliefs - 1)

    def failed(self, error: Exception) -> CommandFailed:
        """The function's error for an exception of torch. Raises DeviceLost if it is the device's: torch meets a
        kernel's sticky error at any later call and does not say whether the next one would work.
        """
        if isinstance(error, torch.AcceleratorError):
            self._synchronize()
        return CommandFailed(_failure(error))

    def late_fault(self) -> StorageFailure | None:
        """A fault that showed only on the GPU: an index out of range."""
        if self.guard is None or not self.guard.fault():
            return None
        return StorageFailure("IndexError", index_checks.OUT_OF_RANGE)  # it is unknown of which operation


def _scalar(value: Any) -> Any:
    if type(value) is list and len(value) == 2:
        return complex(value[0], value[1])
    if type(value) not in (bool, int, float):
        raise ProtocolViolation("a scalar that is not a number")
    return value


def _host(content: Any, dtype: torch.dtype, size: torch.Size, nbytes: int) -> torch.Tensor:
    if type(content) is not bytes or len(content) != nbytes:
        raise ProtocolViolation("a CPU operand of the wrong size")
    if not content:
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).view(size)


def _failure(error: Exception, more: str = "") -> StorageFailure:
    with suppress(Exception):
        return StorageFailure(type(error).__name__, f"{error} {more}".rstrip())
    return StorageFailure("RuntimeError", "an operation failed without saying why")
