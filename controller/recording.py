"""Recordings of the scheduler's events and actions, in files: the writer that the controller has, and the reader.

A file is ``MAGIC``, a frame with a `Header`, then one frame for each event, in order: its time (seconds of the
controller's monotonic clock), the event, the actions. A frame is the length of its body and the body's CRC-32 (both
``<I``), then the body, msgpack as events.py declares it. The seed is in the header and the leases' secrets are in the
actions, so the file is for its owner alone; the controller's instances never see it.

A file whose writer was killed may end within a frame. Nothing else that is cut short or changed passes for whole.
"""

import errno
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from dormouse.core.decisions.scheduling.events import Action, Event
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.core.quantities import size
from dormouse.core.version import this_version
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import Policy

FORMAT: Final = 8
"""8: with how long a turn lasts while others wait, 7: with what has changed of a batch that waits, and not all of it
again, 5: with what batches took before, 4: with batches of requests, 3: with tenants and their shares, and what
runtimes have to compute, 2: with seats and turns. A reader of an older one would not see the last fields of events and
actions, and decide something else without saying so.
"""

MAGIC: Final = b"dormouse recording\n"

FRAME: Final = struct.Struct("<II")

MAX_FRAME_NBYTES: Final = 16 << 20
"""Far above the scheduler's output for one event: its actions are at most one for each request that waits."""

FLUSH_NBYTES: Final = 64 << 10
"""A write of this size costs the controller about 30 us, once in some hundred events."""

FLUSH_S: Final = 1.0
"""After which recorded events are in the file; the controller's timer."""


FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""Of a disk, or of its owner's part of it."""


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """All that a `Scheduler` is made of. ``seed`` is hexadecimal: it has more bits than a msgpack number."""

    format: int
    dormouse: str
    seed: str
    revoke_s: float
    max_waiting: int
    policy: Policy
    topology: Topology
    keep_s: float

    @classmethod
    def new(
        cls,
        *,
        seed: int,
        revoke_s: float,
        max_waiting: int,
        policy: Policy,
        topology: Topology,
        keep_s: float = inf,
    ) -> "RecordingHeader":
        return cls(
            format=FORMAT,
            dormouse=this_version(),
            seed=f"{seed:x}",
            revoke_s=revoke_s,
            max_waiting=max_waiting,
            policy=policy,
            topology=topology,
            keep_s=keep_s,
        )

    def scheduler(self) -> Scheduler:
        """A fresh one."""
        return Scheduler(
            seed=int(self.seed, 16),
            revoke_s=self.revoke_s,
            max_waiting=self.max_waiting,
            policy=self.policy,
            topology=self.topology,
            keep_s=self.keep_s,
        )


class _Made(msgspec.Struct):
    """The part of the header that every format has."""

    format: int
    dormouse: str


class RecordedEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event at ``now_s`` and what the scheduler answered."""

    now_s: float
    event: Event
    actions: list[Action]


class Recorder:
    """Writes a new file at ``path``; the recording that was there becomes ``path.1``. Stops for good at
    ``limit_nbytes`` or when a write fails, and reports the reason to ``on_stop``, once; the file then ends with a
    whole frame.

    Raises OSError if no file can be made, ConfigError if something else than a recording is in its place.
    """

    def __init__(self, path: Path, limit_nbytes: int, header: RecordingHeader, on_stop: Callable[[str], None]) -> None:
        self._limit_nbytes = limit_nbytes
        self._on_stop = on_stop
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray(MAGIC)
        self._nbytes = 0  # in the file
        _set_aside(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)
        os.fchmod(self._fd, 0o600)  # whatever the umask
        self._frame(header)
        self.flush()

    @property
    def on(self) -> bool:
        return self._fd >= 0

    def record(self, now_s: float, event: Event, actions: list[Action]) -> None:
        if self._fd < 0:
            return
        self._frame(RecordedEvent(now_s, event, actions))
        if len(self._buffer) >= FLUSH_NBYTES:
            self.flush()

    def _frame(self, value: RecordingHeader | RecordedEvent) -> None:
        """Append to the buffer, or stop if the file would grow above its limit."""
        buffer = self._buffer
        begin = len(buffer)
        body = begin + FRAME.size
        buffer += bytes(FRAME.size)
        self._encoder.encode_into(value, buffer, body)
        with memoryview(buffer) as view:
            FRAME.pack_into(buffer, begin, len(buffer) - body, zlib.crc32(view[body:]))
        if self._nbytes + len(buffer) > self._limit_nbytes:
            del buffer[begin:]
            self._stop(f"the file has reached record.limit, {size(self._limit_nbytes)}")

    def flush(self) -> None:
        """Write the events recorded since the last time."""
        if self._fd >= 0 and (error := self._write()) is not None:
            self._stop(error.strerror or str(error))

    def _write(self) -> OSError | None:
        """All of the buffer, or nothing of it."""
        buffer, whole = self._buffer, self._nbytes
        try:
            while buffer:
                written = os.write(self._fd, buffer)
                self._nbytes += written
                del buffer[:written]
        except OSError as error:
            buffer.clear()
            self._nbytes = whole
            os.ftruncate(self._fd, whole)
            return error
        return None

    def _stop(self, why: str) -> None:
        self.close()
        self._on_stop(why)

    def close(self) -> None:
        if self._fd >= 0:
            self._write()
            os.close(self._fd)
            self._fd = -1


def _set_aside(path: Path) -> None:
    """Rename the recording before this one; nothing else is touched."""
    before = path.with_name(path.name + ".1")
    for there in (path, before):
        try:
            mode = os.lstat(there).st_mode
        except FileNotFoundError:
            continue
        if not (stat.S_ISREG(mode) and _begin(there) in (MAGIC, b"")):
            raise ConfigError(f"record.path: {there} is there and is not a recording; write another path, or move it")
    if path.exists():
        os.replace(path, before)


def _begin(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(MAGIC))


class Recording:
    """A file that is read. When ``events`` has ended, ``cut_nbytes`` is what there is of a frame that was not written
    to its end.

    Raises ConfigError if it is no recording, or one of another format.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.cut_nbytes = 0
        try:
            with open(path, "rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    text = "is not a recording; give a file that [record] path of a node has named"
                    raise ConfigError(f"{path}: {text}")
                body = self._frame(file, -1)
                self._begin = file.tell()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; give the path of a recording") from error
        if body is None:
            raise ConfigError(f"{path}: ends within its header; nothing was recorded")
        try:
            made = msgspec.msgpack.decode(body, type=_Made)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: its header is none; it was not written by Dormouse: {error}") from None
        if made.format != FORMAT:
            raise self._of_another(made.dormouse)
        try:
            self.header = msgspec.msgpack.decode(body, type=RecordingHeader)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise self._of_another(made.dormouse) from None

    def _of_another(self, version: str) -> ConfigError:
        return ConfigError(
            f"{self.path}: was recorded by Dormouse {version}, this is {this_version()}; replay it with the other one"
        )

    def events(self) -> Iterator[RecordedEvent]:
        """In order. Raises ConfigError where the file is damaged."""
        decoder = msgspec.msgpack.Decoder(RecordedEvent)
        with open(self.path, "rb") as file:
            file.seek(self._begin)
            number = 0
            while (body := self._frame(file, number)) is not None:
                number += 1
                try:
                    entry = decoder.decode(body)
                except (msgspec.DecodeError, UnicodeDecodeError):  # the sum is right: so it was written
                    raise self._of_another(self.header.dormouse) from None
                yield entry

    def _frame(self, file: BinaryIO, number: int) -> bytes | None:
        """The next body; None at the end. ``number`` events have been read, -1: not even the header."""
        begin = file.tell()
        head = file.read(FRAME.size)
        if len(head) < FRAME.size:
            self.cut_nbytes = len(head)
            return None
        nbytes, crc = FRAME.unpack(head)
        body = file.read(nbytes) if nbytes <= MAX_FRAME_NBYTES else b""
        if nbytes > MAX_FRAME_NBYTES or (len(body) == nbytes and zlib.crc32(body) != crc):
            after = "in its header" if number < 0 else f"after {number:,} events"
            raise ConfigError(f"{self.path}: is damaged {after}, at byte {begin:,}; what follows cannot be read")
        if len(body) < nbytes:
            self.cut_nbytes = len(head) + len(body)
            return None
        return body
