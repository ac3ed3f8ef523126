"""Runs the command stream of one instance on one GPU, trusting none of it.

Owns the instance's definitions, its storages on this GPU (`storages.py`) and its generators. It has no sockets,
threads or streams: the executor's device thread calls it, one frame at a time, and what it returns are the replies to
send. Results are compared with what the instance predicted; what fails poisons what it would have written, and the
first error is told at the next command that waits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgpack
import torch

from dormouse.gpuserver import index_checks
from dormouse.gpuserver.definitions import Kernel, Meta, ProtocolViolation, brief, expect
from dormouse.gpuserver.generators import Generators
from dormouse.gpuserver.numerics import NUMERICS
from dormouse.gpuserver.running import Runner
from dormouse.gpuserver.storages import CommandFailed, Direct, Failure, Materialise, MayWrite, StorageTable, Stored
from dormouse.schemas import stream as wire

__all__ = ["EndReport", "EndRequest", "Interpreter", "InterpreterDevice", "Limits", "ProtocolViolation"]


STORAGE_BITS: Final = 63
"""Storage ids are non-negative and below two to this: they are kept in a database of signed numbers."""


MAX_TOLD: Final = 1 << 14
MAX_TOLD_FAILURES: Final = 64
"""Of what is poisoned when a lease ends: enough to name what a program can use later, small enough for a message."""


class InterpreterDevice(Protocol):
    """What the interpreter needs of a GPU. Optional: `contains(ptr, nbytes)`: whether operands lie in the
    pool."""

    @property
    def torch_device(self) -> torch.device: ...

    def generator(self) -> torch.Generator: ...

    def relieve(self) -> str | None:
        """Make room for what was refused last; None if there is some now, else why not."""

    def activation_stats(self) -> tuple[int, int, int]: ...

    def synchronize(self) -> None:
        """Raises DeviceLost if the device cannot be used any more."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_storages: int = 1 << 20
    max_storage_nbytes: int = 1 << 40


@dataclass(frozen=True, kw_only=True)
class EndRequest:
    """``wait``: for the write-back, with an answer; ``acknowledge``: once everything before it has been read."""

    token: int
    wait: bool
    acknowledge: bool = True


@dataclass(frozen=True, kw_only=True)
class EndReport:
    """What a lease did to the model. `spoiled` storages must be forgotten on this GPU: an operation failed while
    writing them."""

    dirty: list[int] = field(default_factory=list)
    created: list[tuple[int, int]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    spoiled: list[int] = field(default_factory=list)


class Interpreter:
    def __init__(self, device: InterpreterDevice, arena: memoryview, limits: Limits | None = None) -> None:
        self.device = device
        self.limits = limits or Limits()
        self.table = StorageTable(device.torch_device, getattr(device, "contains", None))
        self.ending: EndRequest | None = None
        self._arena = torch.frombuffer(arena, dtype=torch.uint8) if len(arena) else torch.empty(0, dtype=torch.uint8)
        self._metas: dict[int, Meta] = {}
        self._keys: dict[int, Kernel] = {}
        self._generators = Generators(device.torch_device, device.generator())
        self._runner = Runner(self.table, self._generators, device)
        self._settings: dict[str, list[Any]] = {}  # of numerics, the newest last
        self._error: Failure | None = None  # the first since the lease began, or since one was told
        self._poisoned: dict[int, Failure] = {}  # by storage, of the lease that ends
        self._serial, self._secret, self._number = 0, 0, 0
        self._operations = 0  # in the current frame
        self._replies: list[bytes] = []
        self._active = False  # torch's settings are this instance's
        self._handlers: Final[dict[int, Callable[[list[Any], int], int]]] = {
            wire.FREE: self._free,
            wire.UPLOAD: self._upload,
            wire.UPLOAD_INLINE: self._upload_inline,
            wire.DOWNLOAD: self._download,
            wire.RESULT_META: self._result_meta,
            wire.END: self._end,
            wire.SYNC: self._sync,
            wire.SEED: self._seed,
            wire.MEMORY: self._memory,
            wire.CREATE: self._create,
            wire.FORGET_DEFS: self._forget_definitions,
            wire.RNG_GET: self._rng_get,
            wire.RNG_SET: self._rng_set,
            wire.SET: self._set,
        }

    # --- what the executor calls

    @property
    def repaired_strides(self) -> int:
        """Results whose strides were not the predicted ones and were copied into them."""
        return self._runner.results.repaired

    @property
    def operations_run(self) -> int:
        return self._runner.ran

    def bind(
        self,
        storage_id: int,
        nbytes: int,
        materialise: Materialise,
        may_write: MayWrite | None = None,
        direct: Direct | None = None,
    ) -> None:
        """A persistent storage. `may_write` is asked before its first write: False if it must be copied first; `direct`
        before a use that needs a few rows, until it was materialised."""
        self.table.bind(storage_id, nbytes, materialise, may_write, direct)

    def unbind(self, storage_ids: list[int]) -> None:
        self.table.unbind(storage_ids)

    def begin(self, serial: int, secret: int) -> None:
        self._serial, self._secret, self._number = serial, secret, 0
        self._error = None
        self.ending = None
        if self._runner.guard is not None:
            self._runner.guard.forget()
        self.resume()

    def resume(self) -> None:
        """It is this instance's turn: torch has its settings."""
        self._active = True
        self._apply(self._settings)

    def pause(self) -> None:
        """It is not."""
        if self._active:
            self._active = False
            NUMERICS.restore()

    def execute(self, frame: bytes) -> list[bytes]:
        """Run a frame. ProtocolViolation: the instance is to be ended. After an END, `ending` is set and nothing more
        is run."""
        serial, secret, number, definitions, commands = self._decode(frame)
        if serial != self._serial or secret != self._secret:
            return [msgpack.packb([wire.REFUSED, serial, "the lease has ended"])]
        if number != self._number + 1 or self.ending is not None:
            raise ProtocolViolation(f"frame {brief(number)} does not follow frame {self._number}")
        self._number = number
        self._replies = []
        self._operations = 0
        with torch.inference_mode():
            self._define(definitions)
            self._run(commands)
        if self.ending is None:
            self._reply(wire.ACK, serial, number)
        return self._replies

    def report(self) -> EndReport:
        assert self.ending is not None, "report() follows an END"
        dirty, created, freed, spoiled, self._poisoned = self.table.end(keep=self.ending.wait)
        if self.ending.wait:
            freed += spoiled  # what the host has of them is not what they should be: whoever names them hears why
        else:
            self.table.unbind(dirty)
            spoiled, dirty = spoiled + dirty, []
        return EndReport(dirty=dirty, created=created, freed=freed, spoiled=spoiled)

    def storage(self, storage_id: int) -> torch.UntypedStorage:
        return self.table.by_id[storage_id].bytes()

    def finish_end(self, version: int | None) -> list[bytes]:
        """Write-back is done (the storages are persistent from now on; the executor binds them again): the replies to
        END."""
        assert self.ending is not None
        for stored in self.table.by_id.values():
            stored.persistent = True
            stored.dirty = False
        self._replies = []
        if self.ending.wait:
            error = self._error.told() if self._error is not None else None
            self._reply(wire.VALUE, self.ending.token, [version, error, _by_failure(self._poisoned)])
        if self.ending.acknowledge:
            self._reply(wire.ACK, self._serial, self._number)
        self._over()
        return self._replies

    def abort(self) -> EndReport:
        """The lease was revoked: everything not persistent is dropped; `dirty` are the storages that this GPU must
        forget."""
        dirty, _, freed, spoiled, _ = self.table.end(keep=False)
        self.table.unbind(dirty)
        self._over()
        return EndReport(dirty=dirty, freed=freed, spoiled=spoiled)

    def close(self) -> None:
        """The instance is gone: nothing of its arena and of its storages is held any more, whoever still knows us."""
        self.table.by_id.clear()
        self._keys.clear()
        self._arena = torch.empty(0, dtype=torch.uint8)

    def _over(self) -> None:
        self._serial, self._secret = -1, -1
        self._error = None
        self._poisoned = {}
        self.ending = None
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
            self._metas[number] = Meta(number, definition)
        for number, definition in zip(keys[::2], keys[1::2], strict=True):
            self._check_new(number, self._keys)
            self._keys[number] = Kernel(definition, self._metas)

    def _check_new(self, number: Any, table: dict[int, Any]) -> None:
        if type(number) is not int or number < 0 or number in table:
            raise ProtocolViolation(f"definition {brief(number)} is not a new number")

    def _run(self, commands: list[Any]) -> None:
        position, end = 0, len(commands)
        keys, handlers = self._keys, self._handlers
        try:
            while position < end:
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
        except (IndexError, TypeError, ValueError) as error:
            # Operations' own errors never come here: only our reading of operands does.
            raise ProtocolViolation("a command's operands are malformed") from error

    def _operation(self, kernel: Kernel, commands: list[Any], position: int) -> int:
        middle = position + kernel.n_operands
        after = middle + kernel.n_fresh
        fresh = commands[middle:after]
        if kernel.predicted is None or len(fresh) != kernel.n_fresh:
            raise ProtocolViolation(f"{kernel.name} without its operands or without predicted results")
        self._check_fresh(fresh)
        where = [self._number, self._operations, kernel.name]
        self._operations += 1
        operands = commands[position:middle]
        try:
            self._runner.run(kernel, operands, fresh)
        except CommandFailed as failed:
            self._poison(kernel, operands, fresh, failed.failure, where)
        except torch.OutOfMemoryError as error:  # around the operation: making a view of an operand, entering a result
            self._poison(kernel, operands, fresh, Failure("OutOfMemoryError", str(error), None), where)
        return after

    def _check_fresh(self, numbers: list[Any]) -> None:
        by_id, freed = self.table.by_id, self.table.freed_persistent
        for number in numbers:
            # The shift is 0 for what the store can keep, and for nothing else.
            if type(number) is not int or number >> STORAGE_BITS or number in by_id or number in freed:
                raise ProtocolViolation(f"storage {brief(number)} is not a new number")
        if len(by_id) + len(numbers) > self.limits.max_storages:
            raise ProtocolViolation("too many storages")

    def _poison(
        self, kernel: Kernel, operands: list[Any], fresh: list[int], failure: Failure, where: list[Any]
    ) -> None:
        failure = failure.at(where)
        if self._error is None:
            self._error = failure
        for number in fresh:
            stored = self.table.by_id[number] = Stored(0)
            stored.error = failure
        tensors = kernel.tensors(operands)
        for index in kernel.written:
            target = self.table.by_id.get(tensors[index])
            if target is not None:
                target.error = failure
                target.dirty = True

    # --- control commands: each reads its operands at `position` and returns the position after them

    def _free(self, commands: list[Any], position: int) -> int:
        end = position + 1 + _count(commands[position])
        numbers = commands[position + 1 : end]
        if not all(type(number) is int for number in numbers):
            raise ProtocolViolation("a storage that is freed has no number")
        self.table.free(numbers)
        return end

    def _target(self, number: Any, total_nbytes: int, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes of a storage that an upload writes, made on first mention."""
        for value in (total_nbytes, offset, nbytes):
            _count(value)
        stored = self.table.by_id.get(number)
        if stored is None:
            self._check_fresh([number])
            if total_nbytes > self.limits.max_storage_nbytes:
                raise ProtocolViolation(f"a storage of {total_nbytes} bytes")
            stored = self.table.create(number, total_nbytes)
        if stored.error is not None:
            raise CommandFailed(stored.error)
        self.table.will_write(stored)
        storage = stored.bytes()
        if offset + nbytes > stored.nbytes:
            raise ProtocolViolation(f"an upload to bytes {offset}..{offset + nbytes} of a storage of {stored.nbytes}")
        stored.dirty = True
        whole = torch.empty(0, dtype=torch.uint8, device=self.table.device)
        return whole.set_(storage, offset, (nbytes,))  # type: ignore[call-overload, no-any-return]

    def _put(self, number: Any, total_nbytes: int, offset: int, source: torch.Tensor) -> None:
        try:
            self._runner.with_relief(lambda: self._target(number, total_nbytes, offset, source.numel())).copy_(source)
        except CommandFailed as failed:
            failure = failed.failure.at([self._number, -1, "an upload"])
            self._error = self._error or failure
            self.table.by_id.setdefault(number, Stored(0)).error = failure

    def _upload(self, commands: list[Any], position: int) -> int:
        number, total_nbytes, offset, arena_offset, nbytes = commands[position : position + 5]
        self._put(number, total_nbytes, offset, self._arena_part(arena_offset, nbytes))
        return position + 5

    def _upload_inline(self, commands: list[Any], position: int) -> int:
        number, total_nbytes, offset, content = commands[position : position + 4]
        if not isinstance(content, bytes):
            raise ProtocolViolation("an upload without bytes")
        source = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        )
        self._put(number, total_nbytes, offset, source)
        return position + 4

    def _arena_part(self, offset: Any, nbytes: Any) -> torch.Tensor:
        if _count(offset) + _count(nbytes) > self._arena.numel():
            raise ProtocolViolation("bytes beyond the end of the arena")
        return self._arena[offset : offset + nbytes]

    def _create(self, commands: list[Any], position: int) -> int:
        number, nbytes = commands[position : position + 2]
        self._check_fresh([number])
        if _count(nbytes) > self.limits.max_storage_nbytes:
            raise ProtocolViolation(f"a storage of {nbytes} bytes")
        try:
            self._runner.with_relief(lambda: self.table.create(number, nbytes))
        except CommandFailed as failed:
            failure = failed.failure.at([self._number, -1, "aten::empty"])
            self._error = self._error or failure
            self.table.by_id.setdefault(number, Stored(0)).error = failure
        return position + 2

    def _download(self, commands: list[Any], position: int) -> int:
        token, number, meta_number, arena_offset = commands[position : position + 4]
        _count(token)
        meta = self._metas.get(meta_number)
        if meta is None:
            raise ProtocolViolation(f"geometry {brief(meta_number)} was not defined")
        nbytes = meta.numel * meta.itemsize
        if arena_offset == -1:
            if nbytes > wire.INLINE_NBYTES:
                raise ProtocolViolation(f"a download of {nbytes} bytes outside the arena")
            destination = torch.empty(nbytes, dtype=torch.uint8)
        else:
            destination = self._arena_part(arena_offset, nbytes)
        if self._failed(token):
            return position + 4
        try:
            view = self.table.view(self.table.get(number), meta)
            destination.view(meta.dtype).view(meta.size).copy_(view)
        except CommandFailed as failed:
            self._fail(token, failed.failure)
        except (RuntimeError, ValueError) as error:
            failure = self._runner.failed(error).failure
            self._fail(token, Failure(failure.kind, failure.text, [self._number, -1, "a download"]))
        else:
            self._reply(wire.VALUE, token, bytes(destination.numpy()) if arena_offset == -1 else nbytes)
        return position + 4

    def _result_meta(self, commands: list[Any], position: int) -> int:
        token, key = commands[position : position + 2]
        _count(token)
        kernel = self._keys.get(key)
        if kernel is None:
            raise ProtocolViolation(f"key {brief(key)} was not defined")
        end = position + 2 + kernel.n_operands
        operands, first = commands[position + 2 : end], commands[end]
        if type(first) is not int:
            raise ProtocolViolation("a result without a number")
        where = [self._number, self._operations, kernel.name]
        self._operations += 1
        if self._failed(token):
            return end + 1
        try:
            payload = self._runner.ask(kernel, operands, first, self._check_fresh)
        except CommandFailed as failed:
            self._poison(kernel, operands, [], failed.failure, where)
            self._failed(token)
        else:
            self._reply(wire.VALUE, token, payload)
        return end + 1

    def _end(self, commands: list[Any], position: int) -> int:
        token, wait = commands[position : position + 2]
        self.ending = EndRequest(token=_count(token), wait=wait == wire.END_WAIT, acknowledge=wait != wire.END_QUIET)
        if (failure := self._late_fault()) is not None:
            for stored in self.table.by_id.values():
                if not stored.persistent and stored.error is None:  # which of them it reached, nobody knows
                    stored.error = failure
        return position + 2

    def _sync(self, commands: list[Any], position: int) -> int:
        token = _count(commands[position])
        if self.table.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        if not self._failed(token):
            self._reply(wire.VALUE, token, None)
        return position + 1

    def _memory(self, commands: list[Any], position: int) -> int:
        self._reply(wire.VALUE, _count(commands[position]), list(self.device.activation_stats()))
        return position + 1

    def _seed(self, commands: list[Any], position: int) -> int:
        generator, seed = commands[position : position + 2]
        self._generators.seed(_count(generator), _count(seed))
        return position + 2

    def _rng_get(self, commands: list[Any], position: int) -> int:
        token, generator = commands[position : position + 2]
        self._reply(wire.VALUE, _count(token), self._generators.state(_count(generator)))
        return position + 2

    def _rng_set(self, commands: list[Any], position: int) -> int:
        generator, state = commands[position : position + 2]
        try:
            self._generators.set_state(_count(generator), state)
        except CommandFailed as failed:
            self._error = self._error or Failure(
                failed.failure.kind, failed.failure.text, [self._number, -1, "set_rng_state"]
            )
        return position + 2

    def _set(self, commands: list[Any], position: int) -> int:
        name, values = commands[position : position + 2]
        NUMERICS.check(name, values)
        self._settings.pop(name, None)
        self._settings[name] = values
        self._apply({name: values})
        return position + 2

    def _apply(self, settings: dict[str, list[Any]]) -> None:
        try:
            NUMERICS.apply(settings)
        except CommandFailed as failed:
            self._error = self._error or failed.failure.at([self._number, -1, "a setting"])

    def _forget_definitions(self, commands: list[Any], position: int) -> int:
        self._metas.clear()
        self._keys.clear()
        self.table.forget_views()
        return position

    # --- replies

    def _late_fault(self) -> Failure | None:
        """What has shown on the GPU only: an index that leads nowhere."""
        if self._runner.guard is None or not self._runner.guard.fault():
            return None
        failure = Failure("IndexError", index_checks.OUT_OF_RANGE, None)  # of which operation, nobody has looked
        self._error = self._error or failure
        return failure

    def _failed(self, token: int) -> bool:
        """Tell the first error at a waiting command, once."""
        self._late_fault()
        if self._error is None:
            return False
        self._fail(token, self._error)
        self._error = None
        return True

    def _fail(self, token: int, failure: Failure) -> None:
        self._reply(wire.FAILED, token, *failure.told())

    def _reply(self, *message: Any) -> None:
        self._replies.append(msgpack.packb(message))


def _by_failure(poisoned: dict[int, Failure]) -> list[list[Any]]:
    """``[[kind, text, where, storage, [numbers]], ...]``; of very many, the first."""
    grouped: dict[int, tuple[Failure, list[int]]] = {}
    for number, failure in list(poisoned.items())[:MAX_TOLD]:
        grouped.setdefault(id(failure), (failure, []))[1].append(number)
    return [[*failure.told(), numbers] for failure, numbers in list(grouped.values())[:MAX_TOLD_FAILURES]]


def _count(value: Any) -> int:
    """A number from the wire that must be a non-negative integer."""
    if type(value) is not int or value < 0:
        raise ProtocolViolation(f"{brief(value)} is not a count")
    return value
