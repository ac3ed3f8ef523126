"""Data of a run that figures need beyond its report: the distribution of latencies, and the busy times of each GPU.
Pure; bounded, however long the run.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

BINS: Final = 120
"""Intervals of the time in which requests come; a figure is not much wider than that in dots."""

MAX_BINS: Final = 4 * BINS
"""Where a run goes on longer than requests come, intervals beyond these are joined in pairs."""

POINTS: Final = 1000
"""Of a distribution."""


class Watch:
    """One run's. ``latency_ms`` and ``share`` are points of the distribution: so many of all requests were answered
    within that; unanswered ones are in none. ``busy`` has for each GPU and interval of ``bin_s`` seconds the share in
    which it was leased. Warm requests are in neither.
    """

    latency_ms: npt.NDArray[np.float64]
    share: npt.NDArray[np.float64]
    bin_s: float

    def __init__(self) -> None:
        self._leased_s = np.zeros((0, MAX_BINS))

    def begin(self, gpus: int, first_s: float, last_s: float) -> None:
        """Requests that count come from ``first_s`` to ``last_s``."""
        self._first_s = self._last_s = first_s
        self.bin_s = (last_s - first_s) / BINS or 1.0
        self._leased_s = np.zeros((gpus, MAX_BINS))

    def on_busy(self, gpu: int, began_s: float, ended_s: float) -> None:
        began_s = max(began_s, self._first_s) - self._first_s
        ended_s -= self._first_s
        self._last_s = max(self._last_s, ended_s + self._first_s)
        while ended_s >= MAX_BINS * self.bin_s:
            self.bin_s *= 2.0
            pairs = self._leased_s.reshape(len(self._leased_s), MAX_BINS // 2, 2).sum(axis=2)
            self._leased_s = np.concatenate([pairs, np.zeros_like(pairs)], axis=1)
        width_s = self.bin_s
        row = self._leased_s[gpu]
        for index in range(int(began_s / width_s), int(ended_s / width_s) + 1):
            part_s = min(ended_s, (index + 1) * width_s) - max(began_s, index * width_s)
            row[index] += max(0.0, part_s)

    def end(self, latency_s: npt.NDArray[np.float64]) -> None:
        """nan: not answered."""
        ranked = np.sort(latency_s[~np.isnan(latency_s)])
        at = np.unique(np.linspace(0, len(ranked) - 1, min(len(ranked), POINTS)).astype(np.int64))
        self.latency_ms = ranked[at] * 1000
        self.share = (at + 1) / len(latency_s)

    @property
    def busy(self) -> npt.NDArray[np.float64]:
        """GPUs by intervals, until the last lease ended. A last interval of which less than half was reached is left
        out: a few requests would look like much.
        """
        span_s = self._last_s - self._first_s
        count = max(1, min(MAX_BINS, int(span_s / self.bin_s + 0.5)))
        widths_s = np.full(count, self.bin_s)
        widths_s[-1] = min(self.bin_s, span_s - (count - 1) * self.bin_s) or self.bin_s
        busy: npt.NDArray[np.float64] = self._leased_s[:, :count] / widths_s
        return busy
