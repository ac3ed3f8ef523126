"""The control commands of an instance's stream: all but operations and those about frames, keys and the lease.

Uploads and downloads through the arena, storages, random state, settings of numerics. Each command reads its operands
at ``position`` and returns the position after them.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from dormouse.gpuserver.commands.definitions import CheckedMeta, ProtocolViolation, brief
from dormouse.gpuserver.commands.generators import Generators
from dormouse.gpuserver.commands.numerics import NUMERICS
from dormouse.gpuserver.commands.replies import Replies
from dormouse.gpuserver.commands.running import OperationRunner
from dormouse.gpuserver.commands.storages import MAX_STORAGE_NBYTES, CommandFailed, HeldStorage, StorageTable
from dormouse.schemas import stream as wire


class Control:
    """The control commands of one instance. ``metas``: its geometries, by number."""

    def __init__(
        self,
        activation_stats: Callable[[], tuple[int, int, int]],
        arena: memoryview,
        table: StorageTable,
        metas: dict[int, CheckedMeta],
        generators: Generators,
        runner: OperationRunner,
        replies: Replies,
    ) -> None:
        self._activation_stats, self._table, self._metas = activation_stats, table, metas
        self._arena = torch.frombuffer(arena, dtype=torch.uint8) if len(arena) else torch.empty(0, dtype=torch.uint8)
        self._generators, self._runner, self._replies = generators, runner, replies
        self.steps: Any = None  # the library's, once there is one
        self._on_cpu = table.device.type == "cpu"
        self.settings: dict[str, list[Any]] = {}  # of numerics, the newest last
        self._active = False  # torch's settings are this instance's
        self.handlers: Final[dict[int, Callable[[list[Any], int], int]]] = {
            wire.FREE: self._free,
            wire.UPLOAD: self._upload,
            wire.UPLOAD_INLINE: self._upload_inline,
            wire.DOWNLOAD: self._download,
            wire.SYNC: self._sync,
            wire.SEED: self._seed,
            wire.MEMORY: self._memory,
            wire.CREATE: self._create,
            wire.RNG_GET: self._rng_get,
            wire.RNG_SET: self._rng_set,
            wire.SET: self._set,
        }

    def resume(self) -> None:
        """It is this instance's turn: torch has its settings."""
        self._active = True
        self._apply(self.settings)

    def pause(self) -> None:
        """It is not this instance's turn any more."""
        if self._active:
            self._active = False
            NUMERICS.restore()

    def close(self) -> None:
        """Nothing of the arena is held any more."""
        self._arena = torch.empty(0, dtype=torch.uint8)

    # --- storages and their bytes

    def _free(self, commands: list[Any], position: int) -> int:
        end = position + 1 + count(commands[position])
        numbers = commands[position + 1 : end]
        if not all(type(number) is int for number in numbers):
            raise ProtocolViolation("a storage that is freed has no number")
        self._table.free(numbers)
        return end

    def _target(self, number: Any, total_nbytes: int, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes of a storage that an upload writes, made on first mention."""
        for value in (total_nbytes, offset, nbytes):
            count(value)
        stored = self._table.by_id.get(number)
        if stored is None:
            self._table.check_fresh([number])
            if total_nbytes > MAX_STORAGE_NBYTES:
                raise ProtocolViolation(f"a storage of {total_nbytes} bytes")
            stored = self._table.create(number, total_nbytes)
        else:
            self._table.written()
        if stored.error is not None:
            raise CommandFailed(stored.error)
        self._table.will_write(stored)
        storage = stored.bytes()
        if offset + nbytes > stored.nbytes:
            raise ProtocolViolation(f"an upload to bytes {offset}..{offset + nbytes} of a storage of {stored.nbytes}")
        stored.dirty = True
        whole = torch.empty(0, dtype=torch.uint8, device=self._table.device)
        return whole.set_(storage, offset, (nbytes,))  # type: ignore[call-overload, no-any-return]

    def _put(self, number: Any, total_nbytes: int, offset: int, source: torch.Tensor) -> None:
        try:
            self._runner.with_relief(lambda: self._target(number, total_nbytes, offset, source.numel())).copy_(source)
        except CommandFailed as failed:
            failure = self._replies.note(failed.failure, "an upload")
            self._table.by_id.setdefault(number, HeldStorage(0)).error = failure

    def _upload(self, commands: list[Any], position: int) -> int:
        number, total_nbytes, offset, arena_offset, nbytes = commands[position : position + 5]
        self._put(number, total_nbytes, offset, self._arena_part(arena_offset, nbytes))
        return position + 5

    def _upload_inline(self, commands: list[Any], position: int) -> int:
        number, total_nbytes, offset, content = commands[position : position + 4]
        if not isinstance(content, bytes):
            raise ProtocolViolation("an upload without bytes")
        if self._on_cpu and self.steps is not None and self.steps.write(number, total_nbytes, offset, content):
            return position + 4
        source = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        )
        self._put(number, total_nbytes, offset, source)
        return position + 4

    def _arena_part(self, offset: Any, nbytes: Any) -> torch.Tensor:
        if count(offset) + count(nbytes) > self._arena.numel():
            raise ProtocolViolation("bytes beyond the end of the arena")
        return self._arena[offset : offset + nbytes]

    def _create(self, commands: list[Any], position: int) -> int:
        number, nbytes = commands[position : position + 2]
        self._table.check_fresh([number])
        if count(nbytes) > MAX_STORAGE_NBYTES:
            raise ProtocolViolation(f"a storage of {nbytes} bytes")
        try:
            self._runner.with_relief(lambda: self._table.create(number, nbytes))
        except CommandFailed as failed:
            failure = self._replies.note(failed.failure, "aten::empty")
            self._table.by_id.setdefault(number, HeldStorage(0)).error = failure
        return position + 2

    def _download(self, commands: list[Any], position: int) -> int:
        token, number, meta_number, arena_offset = commands[position : position + 4]
        count(token)
        meta = self._metas.get(meta_number)
        if meta is None:
            raise ProtocolViolation(f"geometry {brief(meta_number)} was not defined")
        nbytes = meta.numel * meta.itemsize
        if arena_offset == -1 and nbytes > wire.INLINE_NBYTES:
            raise ProtocolViolation(f"a download of {nbytes} bytes outside the arena")
        if arena_offset != -1:
            destination = self._arena_part(arena_offset, nbytes)
        if self._replies.failed(token):
            return position + 4
        if arena_offset == -1:
            if self.steps is not None and meta.contiguous:
                content = self.steps.read(number, meta.offset * meta.itemsize, nbytes, bool(self._table.owed))
                if content is not None:
                    self._replies.give(wire.VALUE, token, content)
                    return position + 4
            # Memory of the host: a GPU without free memory can still report that.
            destination = torch.frombuffer(bytearray(nbytes), dtype=torch.uint8) if nbytes else torch.empty(0)
        try:
            view = self._table.view(self._table.get(number), meta)
            destination.view(meta.dtype).view(meta.size).copy_(view)
        except CommandFailed as failed:
            self._replies.fail(token, failed.failure)
        except (RuntimeError, ValueError) as error:
            failure = self._runner.failed(error).failure
            self._replies.fail(token, failure.at([self._replies.frame, -1, "a download"]))
        else:
            self._replies.give(wire.VALUE, token, bytes(destination.numpy()) if arena_offset == -1 else nbytes)
        return position + 4

    # --- the rest

    def _sync(self, commands: list[Any], position: int) -> int:
        token = count(commands[position])
        if self._table.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        if not self._replies.failed(token):
            self._replies.give(wire.VALUE, token, None)
        return position + 1

    def _memory(self, commands: list[Any], position: int) -> int:
        self._replies.give(wire.VALUE, count(commands[position]), list(self._activation_stats()))
        return position + 1

    def _seed(self, commands: list[Any], position: int) -> int:
        generator, seed = commands[position : position + 2]
        self._generators.seed(count(generator), count(seed))
        return position + 2

    def _rng_get(self, commands: list[Any], position: int) -> int:
        token, generator = commands[position : position + 2]
        self._replies.give(wire.VALUE, count(token), self._generators.state(count(generator)))
        return position + 2

    def _rng_set(self, commands: list[Any], position: int) -> int:
        generator, state = commands[position : position + 2]
        try:
            self._generators.set_state(count(generator), state)
        except CommandFailed as failed:
            self._replies.note(failed.failure, "set_rng_state")
        return position + 2

    def _set(self, commands: list[Any], position: int) -> int:
        name, values = commands[position : position + 2]
        NUMERICS.check(name, values)
        self._table.written()  # commands ahead were computed with other settings
        self.settings.pop(name, None)
        self.settings[name] = values
        self._apply({name: values})
        return position + 2

    def _apply(self, settings: dict[str, list[Any]]) -> None:
        try:
            NUMERICS.apply(settings)
        except CommandFailed as failed:
            self._replies.note(failed.failure, "a setting")


def count(value: Any) -> int:
    """A number from the wire that must be a non-negative integer."""
    if type(value) is not int or value < 0:
        raise ProtocolViolation(f"{brief(value)} is not a count")
    return value
