"""Functions' logs: the output of their instances (logpipe.py), one bounded file per function, rotated once; followers
receive it at once. A flood rotates only its own log.
"""

import asyncio
import os
import struct
import time
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path
from typing import Final

from dormouse.core.logrecords import BEGINS_MARK, begun, last_mark, mark
from dormouse.core.names import base_of

MARK_S: Final = 1.0
MAX_MARKS: Final = 8192
"""Of one log: 128 KiB."""

_MARK: Final = struct.Struct("<Qd")

RECORD_S: Final = 5.0
RECORD_NBYTES: Final = 64 << 10
"""A record that was being written at a time began so many seconds and bytes before it at most. All lines of a log may
be indented.
"""

FOLLOWER_NBYTES: Final = 1 << 20
CHUNK_NBYTES: Final = 64
"""Bytes that a slow follower may lag behind before it loses some; and bytes that a chunk takes beside its own."""


class FollowerQueue(asyncio.Queue[bytes]):
    """Output that a follower has not taken yet."""

    nbytes = 0

    def full(self) -> bool:
        return self.nbytes >= FOLLOWER_NBYTES

    def _put(self, item: bytes) -> None:
        super()._put(item)
        self.nbytes += len(item) + CHUNK_NBYTES

    def _get(self) -> bytes:
        item = super()._get()
        self.nbytes -= len(item) + CHUNK_NBYTES
        return item


class TimeMarks:
    """From where on a log was written since when: one mark for each second in which something was, in a file beside
    the log, so that nobody looks for it in the log.

    ::

        offset in the log (8 bytes, little-endian) | seconds of the Unix clock (8 bytes, a double)   ... in order
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._marks: list[tuple[int, float]] = []
        with suppress(OSError):
            data = path.read_bytes()
            self._marks = list(_MARK.iter_unpack(data[: len(data) // _MARK.size * _MARK.size]))

    def mark(self, offset: int, now_s: float) -> bool:
        """Output at this offset is written now. Whether a mark was wanted for it."""
        if self._marks and abs(now_s - self._marks[-1][1]) < MARK_S:
            return False
        self._marks.append((offset, now_s))
        if len(self._marks) > MAX_MARKS:  # a log that is written slowly: every other one will do
            self._marks = self._marks[::2]
            data = b"".join(_MARK.pack(*mark) for mark in self._marks)
            with suppress(OSError):
                self.path.write_bytes(data)
            return True
        with suppress(OSError), self.path.open("ab") as file:
            file.write(_MARK.pack(offset, now_s))
        return True

    def offset(self, since_s: float) -> int:
        """From where on all is that was written since then. Some lines before that come too where marks were left out,
        and where the clock was set.
        """
        later = next((n for n, (_, at_s) in enumerate(self._marks) if at_s > since_s - MARK_S), None)
        if later is None:
            return 1 << 62
        return self._marks[max(0, later - 1) if len(self._marks) >= MAX_MARKS // 2 else later][0]

    def move(self, path: Path) -> None:
        """The log is another's predecessor now."""
        with suppress(OSError):
            self.path.replace(path)
        self.path = path


class FunctionLog:
    """Append-only file of at most ``limit_nbytes``, and its predecessor."""

    def __init__(self, path: Path, limit_nbytes: int) -> None:
        self._path = path
        self._limit_nbytes = limit_nbytes
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = path.open("ab", buffering=0)
        self._nbytes = self._file.tell()
        self._marks, self._marks_before = TimeMarks(_beside(path)), TimeMarks(_beside(self._previous))
        self._followers: set[FollowerQueue] = set()
        self._origin = ("", "")

    def write(self, data: bytes, instance: str = "", request: str = "") -> None:
        """``request``: its id, if it is known during which one this was printed."""
        if self._file.closed or not data:
            return  # the function was removed; an instance of it that ends may still print
        data, origin, now_s = data.replace(BEGINS_MARK, b"?"), (instance, request), time.time()
        changed, self._origin = origin != self._origin, origin
        marked = mark(now_s, *origin) + data if changed or instance else data
        with suppress(OSError):  # a full disk loses the output, and nothing else
            if self._append(marked if changed else data, marked, now_s):
                changed = True
        for follower in self._followers:
            if not follower.full():
                follower.put_nowait(marked if changed else data)

    def _append(self, data: bytes, marked: bytes, now_s: float) -> bool:
        """``marked`` where it is to say when; whether it was."""
        if self._nbytes + len(data) > self._limit_nbytes:
            with suppress(FileNotFoundError):  # moved by an attempt that then could not make a new one
                os.replace(self._path, self._previous)
            full, self._file = self._file, self._path.open("ab", buffering=0)
            full.close()
            self._nbytes = 0
            self._marks.move(self._marks_before.path)
            self._marks, self._marks_before = TimeMarks(_beside(self._path)), self._marks
        timed = self._marks.mark(self._nbytes, now_s)
        self._nbytes += self._file.write(marked if timed else data)
        return timed

    @property
    def _previous(self) -> Path:
        return self._path.with_name(self._path.name + ".1")

    def tail(self, lines: int, since_s: float = 0.0) -> bytes:
        """The last ``lines`` lines of those that were written since then, in seconds of the Unix clock; with the
        beginning of the record that was being written then. With marks (core/logrecords.py).
        """
        before = data = b""
        for path, marks in ((self._previous, self._marks_before), (self._path, self._marks)):
            if path.exists():
                written = path.read_bytes()
                start = marks.offset(since_s) if since_s else 0
                if not data:
                    before = (before + written[marks.offset(since_s - RECORD_S) : start])[-RECORD_NBYTES:]
                data += written[start:]
        data = begun(before, data) + data
        last = _last(data, lines)
        return last if last[:1] == BEGINS_MARK else last_mark(data[: len(data) - len(last)]) + last

    def follow(self) -> FollowerQueue:
        """New output from now on; give the queue back to :meth:`unfollow`."""
        queue = FollowerQueue()
        self._followers.add(queue)
        return queue

    def unfollow(self, queue: FollowerQueue) -> None:
        self._followers.discard(queue)

    def remove(self) -> None:
        self.close()
        for path in (self._path, self._previous):
            path.unlink(missing_ok=True)
            _beside(path).unlink(missing_ok=True)

    @property
    def open(self) -> bool:
        """Until it is removed, or the node ends."""
        return not self._file.closed

    def close(self) -> None:
        self._file.close()


def _last(data: bytes, lines: int) -> bytes:
    """Looks at no more lines than are wanted: a log may have millions of empty ones."""
    if lines <= 0:
        return b""
    kept = data.removesuffix(b"\n").rsplit(b"\n", min(lines, data.count(b"\n")))
    return data[len(kept[0]) + 1 :] if len(kept) > lines else data


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".times")


LEFT: Final = 16
"""Logs of one tenant's deploys that came to nothing, the newest: each has its files and a descriptor."""


class FunctionLogs:
    """All of them, each opened when it is first wanted; ``path(name)`` is where. Versions of a function have one.
    ``served`` and ``coming``: the functions that there are, and those that are deployed or removed now.
    """

    def __init__(
        self,
        path: Callable[[str], Path],
        limit_nbytes: int,
        served: Container[str] = (),
        coming: Container[str] = (),
    ) -> None:
        self.path = path
        self._limit_nbytes = limit_nbytes
        self._served, self._coming = served, coming
        self._logs: dict[str, FunctionLog] = {}
        self._owners: dict[str, str] = {}  # for which tenant what was printed, by name, those of the newest start last

    def begin(self, name: str, tenant: str) -> FunctionLog:
        """Something is printed for this tenant. Output of another tenant's deploy that has failed is no part of it.
        Raises OSError.
        """
        name = base_of(name)
        if self._owners.get(name, tenant) != tenant and name not in self._served:
            self.remove(name)
        self._owners.pop(name, None)
        self._owners[name] = tenant
        left = [each for each, owner in self._owners.items() if owner == tenant and each not in self._served]
        for each in left[:-LEFT]:
            if each not in self._coming:
                self.remove(each)
        return self.of(name)

    def hides(self, name: str, tenant: str | None) -> bool:
        """Whether that is of a deploy of another tenant that came to nothing."""
        name = base_of(name)
        return tenant is not None and name not in self._served and self._owners.get(name, tenant) != tenant

    def restore(self, names: Container[str]) -> None:
        """These functions there are: other logs are nobody's any more."""
        before, _, after = self.path("*").name.partition("*")
        for path in self.path("*").parent.glob(f"{before}*{after}"):
            if (name := path.name[len(before) : -len(after)]) not in names:
                self.remove(name)

    def of(self, name: str) -> FunctionLog:
        """Raises OSError."""
        name = base_of(name)
        if name not in self._logs:
            self._logs[name] = FunctionLog(self.path(name), self._limit_nbytes)
        return self._logs[name]

    def remove(self, name: str) -> None:
        """Of a function, not of one of its versions."""
        if name in self._logs or self.path(name).exists():  # it may be of before the router's start
            self.of(name).remove()
            del self._logs[name]
        self._owners.pop(name, None)

    def close(self) -> None:
        for log in self._logs.values():
            log.close()
