"""The copy stream of an emulated GPU: a thread that only calls ``memmove`` through ctypes, which releases the
interpreter lock, so that copies and kernels really run side by side; its jobs, and the events that they pass.

The bytes to copy were chosen and checked before.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final, NamedTuple

from dormouse.core.decisions.memory.transfer import Kind
from dormouse.gpuserver.device.host.links import EmulatedLink, carry
from dormouse.gpuserver.device.host.memory import PeerMemory

ASSUMED_NBYTES_S: Final = 6e9
RATE_SHARE: Final = 0.2  # weight of the newest job in a measured bandwidth
MEASURED_NBYTES: Final = 1 << 20  # smaller jobs say more about latency than about bandwidth


class HostEvent(threading.Event):
    """A point on the copy thread's or the device thread's sequence."""

    def done(self) -> bool:
        return self.is_set()


class Memmove(NamedTuple):
    """One ``memmove``, after which the copies with indices below ``finished`` are complete."""

    kind: Kind
    target: int
    source: int
    nbytes: int
    finished: int


class HostCopyJob:
    """A list of parts for the copy thread."""

    def __init__(self, parts: list[Memmove], count: int, on_done: Callable[[], None]) -> None:
        self.parts = parts
        self.events: list[HostEvent] = [HostEvent() for _ in range(count)]
        self.cancelled = False
        self.finished = threading.Event()
        self.on_done = on_done

    def cancel(self) -> None:
        self.cancelled = True

    def join(self) -> None:
        self.finished.wait()


class CopyStream:
    """Carries out jobs in the order in which they are given.

    Args:
        links: those that copies pass over, by kind; no peer's, if there is no such way.

    Attributes:
        bandwidth: bytes per second that copies have lately reached, by kind.
    """

    def __init__(self, links: Mapping[Kind, Sequence[EmulatedLink]]) -> None:
        self._links = links
        self.bandwidth = {
            kind: min((link.nbytes_s for link in over if link.nbytes_s), default=ASSUMED_NBYTES_S)
            for kind, over in links.items()
        }
        if not links[Kind.PEER]:
            self.bandwidth[Kind.PEER] = 0.0  # nothing comes over a link that is not there
        self._jobs: SimpleQueue[HostCopyJob | PeerMemory | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="copy-stream", daemon=True)
        self._thread.start()

    def give(self, job: HostCopyJob | PeerMemory) -> None:
        """Copies; or memory that is to be closed when nothing reads it any more."""
        self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, PeerMemory):
                job.close()
                continue
            finished, began_s = 0, time.perf_counter()
            moved = dict.fromkeys(Kind, 0)
            for part in job.parts:
                if job.cancelled:
                    break
                carry(self._links[part.kind], part.nbytes, partial(ctypes.memmove, *part[1:4]))
                moved[part.kind] += part.nbytes
                while finished < part.finished:
                    job.events[finished].set()
                    finished += 1
            self._measure(moved, time.perf_counter() - began_s)
            if not job.cancelled:
                job.on_done()
            job.finished.set()

    def _measure(self, moved: dict[Kind, int], took_s: float) -> None:
        """Take a job over one kind of link into that kind's average."""
        kinds = [kind for kind, nbytes in moved.items() if nbytes]
        if len(kinds) == 1 and moved[kinds[0]] >= MEASURED_NBYTES:
            old, new = self.bandwidth[kinds[0]], moved[kinds[0]] / took_s
            self.bandwidth[kinds[0]] = old + RATE_SHARE * (new - old)
