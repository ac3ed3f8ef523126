"""Recent use of each GPU's time, by function: pure. Keeps the executors' statements of GPU time, as they are metered,
in slots.
"""

from collections import Counter, deque
from typing import Any, Final

WINDOW_S: Final = 60
"""Short enough for `dormouse top` to call it now, and long enough for many statements of an executor."""

SLOT_S: Final = 1
MAX: Final = 20
"""Functions that are reported one by one; there may be hundreds."""


class BusyShares:
    """Times are seconds of a monotonic clock. Of a GPU, at most WINDOW_S + 1 slots are kept."""

    def __init__(self) -> None:
        self._slots: dict[int, deque[tuple[int, Counter[str]]]] = {}  # by GPU: (when, GPU time in us by function)

    def add(self, gpu: int, function: str, gpu_us: int, now_s: float) -> None:
        if gpu_us <= 0:
            return
        slots, at = self._slots.setdefault(gpu, deque()), int(now_s) // SLOT_S
        if not slots or slots[-1][0] != at:
            slots.append((at, Counter()))
            self._thin(slots, now_s)
        slots[-1][1][function] += gpu_us

    def told(self, gpu: int, now_s: float) -> dict[str, Any]:
        """``share`` of the GPU's time in which it computed, and ``functions`` whose that was, those with most first;
        of ``others``, their number. The share of several that compute at the same time may be above 1.
        """
        slots, spent = self._slots.get(gpu, deque()), Counter[str]()
        self._thin(slots, now_s)
        for _, slot in slots:
            spent.update(slot)
        first = sorted(spent.items(), key=lambda item: (-item[1], item[0]))
        return {
            "seconds": WINDOW_S,
            "share": _share(sum(spent.values())),
            "functions": {name: _share(gpu_us) for name, gpu_us in first[:MAX]},
            "others": max(0, len(first) - MAX),
        }

    @staticmethod
    def _thin(slots: deque[tuple[int, Counter[str]]], now_s: float) -> None:
        while slots and (slots[0][0] + 1) * SLOT_S <= now_s - WINDOW_S:
            slots.popleft()


def _share(gpu_us: int) -> float:
    return round(gpu_us / 1e6 / WINDOW_S, 4)
