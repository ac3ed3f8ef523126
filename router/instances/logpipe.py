"""An instance's output on its way into its function's log: finds the request of each part, and hides the tenant's
secrets.

The pipe is drained whatever happens, so that printing never blocks an instance.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Final

from dormouse.core.loglabels import LabelReader
from dormouse.core.masking import NO_MASK, SecretMask
from dormouse.router.instances.functionlog import FunctionLog

READ_NBYTES: Final = 64 << 10
MASKED_NBYTES: Final = 4 << 10
"""Read at a time if there are secrets to be looked for: at worst some ms of everybody's loop."""

CLOSE_NBYTES: Final = 64 << 10
"""Taken at an instance's end: the capacity of a pipe unless the instance has asked for more."""

IDS_NBYTES: Final = 4 << 10
"""Of a batch, in a mark: all ids that the node makes have room."""

MAX_PARTS: Final = 1024
"""Parts of one read, each of another request than the one before it: lines of 64 bytes, each another's. The rest is
nobody's.
"""

NOTHING: Final[Mapping[int, str]] = {}


class LogPipe:
    """The reading end of one instance's stdout and stderr; ``write_fd`` is for the instance and is closed by
    :meth:`handed`.
    """

    def __init__(
        self,
        log: FunctionLog,
        told: Callable[[], None] = lambda: None,
        mask: SecretMask = NO_MASK,
        instance: str = "",
        running: Mapping[int, str] = NOTHING,
    ) -> None:
        """``told`` is called when something was printed, of which ``mask`` hides a part. ``running``: ids of requests
        that the instance has, by the numbers that it knows; they change after :meth:`drain`.
        """
        self.log, self._told, self._mask = log, told, mask
        self._instance, self._running, self._request, self._within = instance, running, "", False
        self._labels = LabelReader()
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_fd, self._take)

    def _take(self) -> int:
        """Write some of what there is into the log; how many bytes were there."""
        try:
            data = os.read(self._read_fd, MASKED_NBYTES if self._mask else READ_NBYTES)
        except BlockingIOError:
            return 0
        if data:
            parts = list[tuple[str, list[bytes]]]()
            for numbers, text in self._labels.read(data):
                request = self._whose(numbers) if len(parts) < MAX_PARTS else ""
                if not parts or parts[-1][0] != request:
                    parts.append((request, []))
                parts[-1][1].append(text)
            for self._request, texts in parts:
                self._write(self._mask.feed(b"".join(texts)))
            self._told()
        else:
            self._write_rest()
            self._loop.remove_reader(self._read_fd)
        return len(data)

    def _whose(self, numbers: tuple[int, ...]) -> str:
        """The ids of these requests; of what bears no number, that of the one request that there is."""
        if not numbers:
            return next(iter(self._running.values())) if len(self._running) == 1 else ""
        return _joined([self._running[number] for number in numbers if number in self._running])

    def _write_rest(self) -> None:
        self._write(self._mask.feed(self._labels.rest()) + self._mask.rest())

    def _write(self, data: bytes) -> None:
        if data:
            self.log.write(data, self._instance, self._request)
            self._within = not data.endswith(b"\n")

    def note(self, text: str) -> None:
        """A line of the router's on the instance."""
        self._request = self._whose(())
        self._write(b"\n" * self._within + f"--- {text}\n".encode())

    def drain(self) -> None:
        """Output until now is of the requests that there were until now."""
        taken = 0
        while taken < CLOSE_NBYTES and (nbytes := self._take()):  # a grandchild that survived may print for ever
            taken += nbytes

    def handed(self) -> None:
        """The instance has its end; ours is closed, so that its death is the pipe's end."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> None:
        """Take the rest, then close."""
        self._loop.remove_reader(self._read_fd)
        self.drain()
        self._write_rest()
        self.handed()
        os.close(self._read_fd)


def _joined(ids: list[str]) -> str:
    """With commas between them; of more than have room, how many there are beside."""
    said, nbytes = list[str](), 0
    for each in ids:
        if (nbytes := nbytes + len(each) + 1) > IDS_NBYTES:
            return ",".join([*said, f"+{len(ids) - len(said)}"])
        said.append(each)
    return ",".join(said)
