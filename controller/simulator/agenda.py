"""Pending entries of a simulation, and its clock: pure. Entries of the same time come in the order they were put in."""

from heapq import heappush
from typing import Any

COPIED, ENDED, TICK, BEGIN, LOST, BACK, STARTED, LEAVES, ASKS, DROPS = range(10)
COMPUTED, THROUGH, IDLE, RESTED, STEPPED, OPENED, WANTS, IDLES, UNWANTED, PRESSED, TURNED = range(10, 21)
OPENS, PRELOADED, RUNTIME, DRAINED, UNDRAINED, TOKEN_DUE, LOADED, SPARE = range(21, 29)
"""Kinds: of leases (executors.py) the copy's and the lease's end, and that one may begin to copy; the core's Tick; a
GPU's loss and return; a process' start and end, and that a request leaves the router (front.py); that a request is
dropped if it has no answer; of leases that take turns (turns.py) the end of their GPU time, of that and their copies,
and of time on the host, and that it lasts. Of leases of language models (streams/): that a step is over, that the seat
is ready, that a turn is wanted, or may be another's, that the lease has had nothing to do, that its memory for KV took
others' place, and that a turn has begun. That a stream begins. That a model has come that nobody had asked for, and its
runtime (preloads.py). That a GPU is drained, and is not any more. Of instances that come and go (extras.py): that a
stream is late if it has no first token, that one has loaded, and that one has had nothing to do.
"""

Entry = tuple[float, int, int, Any, int]
"""Time in seconds, number, kind, what, and a version that tells a void entry."""


class Agenda:
    """``heap`` has the next entry first; its taker sets ``now_s`` (seconds) to its time. The next request comes at
    ``arrives_s``.
    """

    __slots__ = ("_number", "arrives_s", "heap", "now_s")

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self.now_s = 0.0
        self.arrives_s = float("inf")
        self._number = 0

    @property
    def next_s(self) -> float:
        """Until then nothing is due."""
        heap, arrives_s = self.heap, self.arrives_s
        return heap[0][0] if heap and heap[0][0] < arrives_s else arrives_s

    def put(self, at_s: float, kind: int, what: Any, version: int = 0) -> None:
        self._number += 1
        heappush(self.heap, (at_s, self._number, kind, what, version))
