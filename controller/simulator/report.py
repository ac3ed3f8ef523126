"""Results of a run, as numbers: pure. Functions that comply, latencies, wakes, the work of GPUs and links."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dormouse.controller.simulator.streams.outcome import StreamReport, mean_streams, stream_reports
from dormouse.controller.simulator.streams.outcome import late as late_streams
from dormouse.controller.simulator.streams.serving import Streams


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one model's functions."""

    name: str
    functions: int
    requests: int
    compliant: float
    p50_ms: float | None
    p98_ms: float | None
    late: float

    def as_row(self) -> dict[str, Any]:
        """For people."""
        return {
            "model": self.name,
            "functions": str(self.functions),
            "compliant": f"{self.compliant:.1%}",
            "late": f"{self.late:.2%}",
            "p50_ms": "-" if self.p50_ms is None else f"{self.p50_ms:.1f}",
            "p98_ms": "-" if self.p98_ms is None else f"{self.p98_ms:.1f}",
        }


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
    links: dict[str, float] = {}  # share of the time in which each carried bytes
    models: list[ModelReport] = []
    streams: list[StreamReport] = []

    def as_json(self) -> dict[str, Any]:
        """All but the wall time."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        del fields["wall_s"]
        if not self.streams:
            del fields["streams"]
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
            "link": f"{max(self.links.values(), default=0.0):.1%}",
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
    links_busy_s: Mapping[str, float] | None = None,
    names: Sequence[str] = (),
    streams: Streams | None = None,
    tpots_s: Sequence[float] = (),
) -> Report:
    """Of the counted requests only. ``names`` are those of functions' models. ``latency_s`` is nan where there was no
    answer: such a request is late. Of ``streams``, latencies are those of first tokens; one is late, too, if the mean
    time of its further tokens is more than its function's of ``tpots_s``. GPUs and links are averaged from the first
    arrival until all is done.
    """
    answered_s = np.where(np.isnan(latency_s), np.inf, latency_s)
    deadlines = np.asarray(deadlines_s)
    late = answered_s > deadlines[functions]
    if streams is not None:
        late |= late_streams(streams, functions, deadlines, np.asarray(tpots_s))
    asked = np.bincount(functions, minlength=len(deadlines_s))
    missed = np.bincount(functions, weights=late, minlength=len(deadlines_s))
    seen = asked > 0
    complies = asked - missed >= np.asarray(percentiles) * asked - 1e-9  # 98 of 100 is 98 %, whatever 0.98 * 100 is
    ends_s = np.where(np.isnan(latency_s), times_s, times_s + latency_s)
    if streams is not None:
        ends_s = np.maximum(ends_s, times_s + np.nan_to_num(streams.over_s))
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
        links={name: round(busy / span_s, 6) for name, busy in (links_busy_s or {}).items()} if span_s else {},
        models=_by_model(names, functions, asked, complies, late, answered_s),
        streams=[]
        if streams is None
        else stream_reports(streams, times_s, functions, deadlines, np.asarray(tpots_s), complies, names),
    )


def _by_model(
    names: Sequence[str],
    functions: npt.NDArray[np.int64],
    asked: npt.NDArray[np.int64],
    complies: npt.NDArray[np.bool_],
    late: npt.NDArray[np.bool_],
    answered_s: npt.NDArray[np.float64],
) -> list[ModelReport]:
    """In the order of their first functions; those that nobody asked are left out."""
    of = np.asarray(names)
    found = []
    for name in dict.fromkeys(names):
        its = (of == name) & (asked > 0)
        mine = its[functions]
        if not mine.any():
            continue
        ranked = np.sort(answered_s[mine])
        found.append(
            ModelReport(
                name=name,
                functions=int(its.sum()),
                requests=int(mine.sum()),
                compliant=round(float(complies[its].mean()), 6),
                p50_ms=_ms(ranked, 0.50),
                p98_ms=_ms(ranked, 0.98),
                late=round(float(late[mine].mean()), 6),
            )
        )
    return found


def mean(reports: Sequence[Report]) -> Report:
    """Of runs with different seeds: each number is the mean; a latency is None if that of any run is."""
    one = reports[0]
    if len(reports) == 1:
        return one

    def of(name: str) -> Any:
        values = [getattr(each, name) for each in reports]
        return None if None in values else round(sum(values) / len(values), 6)

    shares = ("compliant", "p50_ms", "p98_ms", "late", "wakes_per_request", "gpu_busy", "host_gbps", "wall_s")
    return msgspec.structs.replace(
        one,
        **{name: of(name) for name in shares},
        requests=round(of("requests")),
        links={name: round(sum(each.links.get(name, 0.0) for each in reports) / len(reports), 6) for name in one.links},
        models=[_mean_model([each.models for each in reports], model) for model in one.models],
        streams=mean_streams([each.streams for each in reports]),
    )


def _mean_model(runs: Sequence[Sequence[ModelReport]], one: ModelReport) -> ModelReport:
    same = [model for models in runs for model in models if model.name == one.name]

    def of(name: str) -> Any:
        values = [getattr(each, name) for each in same]
        return None if None in values else round(sum(values) / len(values), 6)

    return msgspec.structs.replace(one, **{name: of(name) for name in ("compliant", "p50_ms", "p98_ms", "late")})


def _ms(ranked_s: npt.NDArray[np.float64], share: float) -> float | None:
    """The least latency that so many requests do not exceed."""
    rank = max(0, int(np.ceil(share * len(ranked_s) - 1e-9)) - 1)
    seconds = float(ranked_s[rank])
    return round(seconds * 1000, 3) if np.isfinite(seconds) else None
