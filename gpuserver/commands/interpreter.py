"""Runs the command stream of one instance on one GPU, trusting none of it.

Owns the instance's definitions, its storages on this GPU (`storages.py`) and the life of its lease; operations are run
by `running.py`, other commands by `control.py`. It has no sockets, threads or streams: the executor's device thread
calls it, one frame at a time, and it returns the replies to send. A command that fails poisons the storages that it
would have written; the first error is reported at the next command that waits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgpack
import torch

from dormouse.gpuserver.commands import fast_path
from dormouse.gpuserver.commands.captures import CaptureCounts, Captures
from dormouse.gpuserver.commands.control import Control, count
from dormouse.gpuserver.commands.definitions import CheckedMeta, Kernel, ProtocolViolation, brief, expect
from dormouse.gpuserver.commands.generators import Generators
from dormouse.gpuserver.commands.graph_builds import InstanceGraphs
from dormouse.gpuserver.commands.replies import Replies, by_failure
from dormouse.gpuserver.commands.running import OperationRunner
from dormouse.gpuserver.commands.storages import CommandFailed, EndReport, HeldStorage, StorageFailure, StorageTable
from dormouse.gpuserver.commands.templates import Templates
from dormouse.gpuserver.device.protocol import Capture
from dormouse.schemas import stream as wire

__all__ = ["EndReport", "EndRequest", "Interpreter", "InterpreterDevice", "ProtocolViolation"]


class InterpreterDevice(Protocol):
    """The interpreter's interface to a GPU. Optional: `contains(ptr, nbytes)`: whether operands lie in the pool."""

    @property
    def capture(self) -> Capture | None:
        """How sections of templates are captured; None: not at all."""

    @property
    def torch_device(self) -> torch.device: ...

    def generator(self) -> torch.Generator: ...

    def relieve(self) -> str | None:
        """Make room for the allocation that was refused last; None if there is some now, else why not."""

    def activation_stats(self) -> tuple[int, int, int]: ...

    def synchronize(self) -> None:
        """Raises DeviceLost if the device cannot be used any more."""


@dataclass(frozen=True, kw_only=True)
class EndRequest:
    """``wait``: for the write-back, with an answer; ``acknowledge``: once everything before it has been read."""

    token: int
    wait: bool
    acknowledge: bool = True


FindFastPath = Callable[[], fast_path.FastPath | None]
"""Asked when a lease begins, until there is one: it may be built meanwhile."""


_ANSWERED: Final = (wire.DOWNLOAD, wire.SYNC)
"""Commands that read, and change nothing."""


class Interpreter:
    """Plain operations are run by the fast path, once there is one, and all others by Python."""

    def __init__(self, device: InterpreterDevice, arena: memoryview, find_fast: FindFastPath = lambda: None) -> None:
        self.table = StorageTable(device.torch_device, getattr(device, "contains", None))
        self.ending: EndRequest | None = None
        self._metas: dict[int, CheckedMeta] = {}
        self._keys: dict[int, Kernel] = {}
        self._find_fast = find_fast
        self._fast: fast_path.FastPath | None = None
        self._steps: Any = None
        self._plans: dict[int, Any] = {}  # of plain keys
        generators = Generators(device.torch_device, device.generator())
        self._device = device
        self._runner = OperationRunner(self.table, generators, device, self._relieve)
        self._replies = Replies(self._runner.late_fault)
        self._control = Control(
            device.activation_stats, arena, self.table, self._metas, generators, self._runner, self._replies
        )
        free = self._control.handlers[wire.FREE]
        self._graphs = InstanceGraphs()
        self._captures = Captures(self.table, self._keys, self._control.settings, device.capture)
        self._templates = Templates(self.table, self._keys, self._runner, self._run, free, self._count, self._captures)
        self._poisoned: dict[int, StorageFailure] = {}  # by storage, of the lease that ends
        self._serial, self._secret = 0, 0
        self._operations = 0  # in the current frame
        self._handlers: Final[dict[int, Callable[[list[Any], int], int]]] = {
            **self._control.handlers,
            **self._templates.handlers,
            wire.GRAPH: self._graphs.want,
            wire.RESULT_META: self._result_meta,
            wire.END: self._end,
            wire.FORGET_DEFS: self._forget_definitions,
        }

    # --- calls of the executor

    @property
    def repaired_strides(self) -> int:
        """Results whose strides were not the predicted ones and were copied into them."""
        return self._runner.results.repaired

    @property
    def operations_run(self) -> int:
        return self._runner.ran

    def begin(self, serial: int, secret: int) -> None:
        self._serial, self._secret = serial, secret
        self._replies.frame, self._replies.error = 0, None
        self.ending = None
        if self._runner.guard is not None:
            self._runner.guard.forget()
        if self._fast is None and (fast := self._find_fast()) is not None:
            self._fast, self._steps = fast, fast.steps(self._plans, self.table)
            self._control.steps = self._steps
            self._templates.compute_by(self._steps)
            self._captures.compute_by(fast, self._steps, self._plans)
            for number, kernel in self._keys.items():
                self._plan(number, kernel)
        self.resume()

    def resume(self) -> None:
        """It is this instance's turn: torch has its settings."""
        self._control.resume()

    def pause(self) -> None:
        """It is not this instance's turn any more."""
        self._control.pause()

    def execute(self, frame: bytes) -> list[bytes]:
        """Run a frame. ProtocolViolation: the instance is to be ended. After an END, `ending` is set and nothing more
        is run."""
        serial, secret, number, definitions, commands = self._decode(frame)
        if serial != self._serial or secret != self._secret:
            return [msgpack.packb([wire.REFUSED, serial, "the lease has ended", ""])]
        replies = self._replies
        if number != replies.frame + 1 or self.ending is not None:
            raise ProtocolViolation(f"frame {brief(number)} does not follow frame {replies.frame}")
        replies.frame, replies.messages = number, []
        for news in self._templates.news:
            replies.give(*news)
        self._templates.news.clear()
        for outcome in self._graphs.outcomes():
            replies.give(wire.BUILT, *outcome)
        with torch.inference_mode():
            self._begin_frame()
            self._define(definitions)
            self._run(commands)
        if self.ending is None:
            replies.give(wire.ACK, serial, number)
            self._templates.heard()
        return replies.messages

    @property
    def expecting(self) -> bool:
        """Whether the instance is on its way to where it waits."""
        return self._templates.expecting

    def ahead(self) -> bool:
        """Between frames: compute a few commands that the instance will probably ask for; whether there may be more."""
        with torch.inference_mode(), self._following():
            return self._templates.ahead()

    @property
    def capture_counts(self) -> CaptureCounts:
        return self._captures.counts

    @property
    def may_capture(self) -> bool:
        return self._captures.wanted

    def settle(self) -> None:
        """Before another's turn: no command remains that would run within it."""
        with torch.inference_mode(), self._following():
            self._templates.settle()

    def capture(self) -> None:
        """While it is this instance's turn and nothing waits: capture one section that has recurred."""
        with torch.inference_mode():
            self._captures.capture()

    def drop_captured(self) -> bool:
        """Whether that has made room."""
        return self._captures.drop()

    def _begin_frame(self) -> None:
        with self._following():
            self._templates.begin_frame()
        self._operations = 0

    @contextmanager
    def _following(self) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, ValueError) as error:
            raise ProtocolViolation("what the instance follows is malformed") from error

    def report(self) -> EndReport:
        assert self.ending is not None, "report() follows an END"
        report = self.table.end(keep=self.ending.wait)
        self._poisoned = report.poisoned
        if self.ending.wait:  # the host's bytes of the spoiled ones are wrong: their users get the reason
            report.freed += report.spoiled
        else:
            self.table.unbind(report.dirty)
            report.spoiled += report.dirty
            report.dirty = []
        return report

    def storage(self, storage_id: int) -> torch.UntypedStorage:
        return self.table.by_id[storage_id].bytes()

    def finish_end(self, version: int | None) -> list[bytes]:
        """Write-back is done (the storages are persistent from now on; the executor binds them again): the replies to
        END."""
        assert self.ending is not None
        for stored in self.table.by_id.values():
            stored.persistent = True
            stored.dirty = False
        replies = self._replies
        replies.messages = []
        if self.ending.wait:
            error = replies.error.told() if replies.error is not None else None
            replies.give(wire.VALUE, self.ending.token, [version, error, by_failure(self._poisoned)])
        if self.ending.acknowledge:
            replies.give(wire.ACK, self._serial, replies.frame)
        self._over()
        return replies.messages

    def abort(self) -> EndReport:
        """The lease was revoked: everything not persistent is dropped; `dirty` are the storages that this GPU must
        forget."""
        report = self.table.end(keep=False)
        self.table.unbind(report.dirty)
        self._over()
        return report

    def close(self) -> None:
        """The instance is gone: nothing of its arena and of its storages is held any more, even if references to this
        object remain.
        """
        self.table.by_id.clear()
        self._templates.abandon()
        self._captures.forget()
        self._keys.clear()
        self._plans.clear()
        self._control.close()

    def _over(self) -> None:
        self._serial, self._secret = -1, -1
        self._replies.error = None
        self._poisoned = {}
        self.ending = None
        self._templates.abandon()
        self.pause()

    # --- frames

    def _decode(self, frame: bytes) -> list[Any]:
        if len(frame) > wire.MAX_FRAME_NBYTES:
            raise ProtocolViolation(f"a frame of {len(frame)} bytes")
        try:
            message = msgpack.unpackb(frame)
        except Exception as error:  # msgpack's own errors have no common base that also covers bad UTF-8
            raise ProtocolViolation("a frame that does not decode") from error
        decoded: list[Any] = expect(message, list, 5)
        expect(decoded[3], list, 2)
        if not isinstance(decoded[4], list):
            raise ProtocolViolation("a frame without commands")
        return decoded

    def _define(self, definitions: list[Any]) -> None:
        metas, keys = definitions
        for table, flat in ((self._metas, metas), (self._keys, keys)):
            if not isinstance(flat, list) or len(flat) % 2 or len(table) + len(flat) // 2 > wire.MAX_DEFS:
                raise ProtocolViolation("definitions are malformed or too many")
        for number, definition in zip(metas[::2], metas[1::2], strict=True):
            self._check_new(number, self._metas)
            self._metas[number] = CheckedMeta(number, definition)
        for number, definition in zip(keys[::2], keys[1::2], strict=True):
            self._check_new(number, self._keys)
            kernel = self._keys[number] = Kernel(definition, self._metas)
            self._plan(number, kernel)

    def _plan(self, number: int, kernel: Kernel) -> None:
        if self._fast is not None and (plan := self._fast.plan(kernel, self.table.device)) is not None:
            self._plans[number] = plan

    def _check_new(self, number: Any, table: dict[int, Any]) -> None:
        if type(number) is not int or number < 0 or number in table:
            raise ProtocolViolation(f"definition {brief(number)} is not a new number")

    def _run(self, commands: list[Any]) -> None:
        position, end = 0, len(commands)
        keys, handlers = self._keys, self._handlers
        try:
            while position < end:
                if self._templates.unsettled and (position := self._unsettled(commands, position)) == end:
                    return
                if self._plans and (position := self._plain(commands, position)) == end:
                    return
                code = commands[position]
                kernel = keys.get(code)
                if kernel is not None:
                    position = self._operation(kernel, commands, position + 1)
                    continue
                handler = handlers.get(code)
                if handler is None:
                    raise ProtocolViolation(f"{brief(code)} is neither a command nor a key that was defined")
                position = handler(commands, position + 1)
                if self.ending is not None:
                    return
        except (LookupError, TypeError, ValueError) as error:
            # Operations' own errors never come here: only our reading of operands does.
            raise ProtocolViolation("a command's operands are malformed") from error

    def _unsettled(self, commands: list[Any], position: int) -> int:
        """Commands that can be answered while results that were asked for are not confirmed yet, or while something was
        written ahead: the answer comes first, the state is settled after it. Returns the position where others begin.
        """
        templates, handlers, end = self._templates, self._handlers, len(commands)
        while position < end and templates.unsettled:
            code = commands[position]
            if code == wire.FREE:
                position = templates.free(commands, position + 1)
            elif code == wire.VALIDATED or (code in _ANSWERED and self.table.owed):
                position = handlers[code](commands, position + 1)
            else:
                templates.settle()
        return position

    def _plain(self, commands: list[Any], position: int) -> int:
        """Run the plain commands from here on; returns the position where they end."""
        steps = self._steps
        try:
            end: int = steps.run(commands, position)
            self._count(steps.ran)
            return end
        except Exception as error:  # of an operation that writes
            at: int = steps.failed
            if at < 0:
                raise
            self._count(steps.ran + 1)
            kernel = self._keys[commands[at]]
            middle = at + 1 + kernel.n_operands
            operands = commands[at + 1 : middle]
            where = [self._replies.frame, self._operations - 1, kernel.name]
            stored = [self.table.by_id[operands[place]] for place in kernel.tensors]
            failure = self._runner.raised(kernel, stored, error)
            self._poison(kernel, operands, commands[middle : middle + kernel.n_fresh], failure.failure, where)
            return middle + kernel.n_fresh

    def _relieve(self) -> str | None:
        """See `InterpreterDevice`. Results computed ahead are dropped first."""
        if self._templates.guessing:
            return "(what nobody has asked for makes no room)"
        return None if self._templates.drop() else self._device.relieve()

    def _count(self, ran: int) -> None:
        self._operations += ran
        self._runner.ran += ran

    def _operation(self, kernel: Kernel, commands: list[Any], position: int) -> int:
        middle = position + kernel.n_operands
        after = middle + kernel.n_fresh
        fresh = commands[middle:after]
        if kernel.predicted is None or len(fresh) != kernel.n_fresh:
            raise ProtocolViolation(f"{kernel.name} without its operands or without predicted results")
        self.table.check_fresh(fresh)
        where = [self._replies.frame, self._operations, kernel.name]
        self._operations += 1
        operands = commands[position:middle]
        try:
            self._runner.run(kernel, operands, fresh)
        except CommandFailed as failed:
            self._poison(kernel, operands, fresh, failed.failure, where)
        except torch.OutOfMemoryError as error:  # around the operation: making a view of an operand, entering a result
            self._poison(kernel, operands, fresh, StorageFailure("OutOfMemoryError", str(error)), where)
        return after

    def _poison(
        self, kernel: Kernel, operands: list[Any], fresh: list[int], failure: StorageFailure, where: list[Any]
    ) -> None:
        failure = failure.at(where)
        self._replies.error = self._replies.error or failure
        for number in fresh:
            self.table.by_id[number] = HeldStorage(0, error=failure)
        tensors = [operands[place] for place in kernel.tensors]
        for index in kernel.written:
            target = self.table.by_id.get(tensors[index])
            if target is not None:
                target.error = failure
                target.dirty = True

    # --- commands that are about keys and the lease; as in control.py

    def _result_meta(self, commands: list[Any], position: int) -> int:
        token, key = commands[position : position + 2]
        count(token)
        kernel = self._keys.get(key)
        if kernel is None:
            raise ProtocolViolation(f"key {brief(key)} was not defined")
        end = position + 2 + kernel.n_operands
        operands, first = commands[position + 2 : end], commands[end]
        if type(first) is not int:
            raise ProtocolViolation("a result without a number")
        where = [self._replies.frame, self._operations, kernel.name]
        self._operations += 1
        if self._replies.failed(token):
            return end + 1
        try:
            payload = self._runner.ask(kernel, operands, first)
        except CommandFailed as failed:
            self._poison(kernel, operands, [], failed.failure, where)
            self._replies.failed(token)
        else:
            self._replies.give(wire.VALUE, token, payload)
        return end + 1

    def _end(self, commands: list[Any], position: int) -> int:
        token, wait = commands[position : position + 2]
        self._templates.leave()
        self.ending = EndRequest(token=count(token), wait=wait == wire.END_WAIT, acknowledge=wait != wire.END_QUIET)
        if (failure := self._replies.late_fault()) is not None:
            for stored in self.table.by_id.values():
                if not stored.persistent and stored.error is None:  # it is unknown which of them it reached
                    stored.error = failure
        return position + 2

    def _forget_definitions(self, commands: list[Any], position: int) -> int:
        self._templates.forget()
        self._captures.forget()
        self._metas.clear()
        self._keys.clear()
        self._plans.clear()
        self.table.forget_views()
        return position
