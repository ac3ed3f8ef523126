"""What came out of a run, as numbers: pure. How many functions comply, latencies, wakes, what GPUs and links did."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's. Shares are in [0, 1] and rounded, so that equal runs print equal text; only functions that were
    asked count. A latency is None if the request at that rank was never answered. ``wall_s`` is the only thing that
    differs between equal runs.
    """

    policy: str
    functions: int
    requests: int
    compliant: float
    p50_ms: float | None
    p98_ms: float | None
    late: float
    wakes_per_request: float
    gpu_busy: float
    host_gbps: float  # GB (10^9 bytes) per second, all GPUs together
    wall_s: float

    def as_json(self) -> dict[str, Any]:
        """All but the wall time."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        del fields["wall_s"]
        return fields

    def as_row(self) -> dict[str, Any]:
        """For people."""
        return {
            "policy": self.policy,
            "functions": str(self.functions),
            "requests": str(self.requests),
            "compliant": f"{self.compliant:.1%}",
            "p50_ms": "-" if self.p50_ms is None else f"{self.p50_ms:.1f}",
            "p98_ms": "-" if self.p98_ms is None else f"{self.p98_ms:.1f}",
            "late": f"{self.late:.2%}",
            "wakes": f"{self.wakes_per_request:.3f}",
            "busy": f"{self.gpu_busy:.1%}",
            "GB/s": f"{self.host_gbps:.2f}",
            "sim/s": f"{self.requests / self.wall_s:.0f}" if self.wall_s > 0.0 else "-",
        }


def report(
    policy: str,
    times_s: npt.NDArray[np.float64],
    functions: npt.NDArray[np.int64],
    latency_s: npt.NDArray[np.float64],
    deadlines_s: Sequence[float],
    percentiles: Sequence[float],
    busy_s: Sequence[float],
    wakes: int,
    host_nbytes: int,
    wall_s: float,
) -> Report:
    """Of the counted requests only. ``latency_s`` is nan where there was no answer: such a request is late. GPUs and
    links are averaged from the first arrival until all is done.
    """
    answered_s = np.where(np.isnan(latency_s), np.inf, latency_s)
    late = answered_s > np.asarray(deadlines_s)[functions]
    asked = np.bincount(functions, minlength=len(deadlines_s))
    missed = np.bincount(functions, weights=late, minlength=len(deadlines_s))
    seen = asked > 0
    complies = asked - missed >= np.asarray(percentiles) * asked - 1e-9  # 98 of 100 is 98 %, whatever 0.98 * 100 is
    ends_s = np.where(np.isnan(latency_s), times_s, times_s + latency_s)
    span_s = float(ends_s.max() - times_s[0])
    ranked = np.sort(answered_s)
    return Report(
        policy=policy,
        functions=int(seen.sum()),
        requests=len(times_s),
        compliant=round(float(complies[seen].mean()), 6),
        p50_ms=_ms(ranked, 0.50),
        p98_ms=_ms(ranked, 0.98),
        late=round(float(late.mean()), 6),
        wakes_per_request=round(wakes / len(times_s), 6),
        gpu_busy=round(sum(busy_s) / len(busy_s) / span_s, 6) if span_s else 0.0,
        host_gbps=round(host_nbytes / span_s / 1e9, 6) if span_s else 0.0,
        wall_s=wall_s,
    )


def _ms(ranked_s: npt.NDArray[np.float64], share: float) -> float | None:
    """The least latency that so many requests do not exceed."""
    rank = max(0, int(np.ceil(share * len(ranked_s) - 1e-9)) - 1)
    seconds = float(ranked_s[rank])
    return round(seconds * 1000, 3) if np.isfinite(seconds) else None
