"""Results of a language model's streams, as numbers: pure."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dormouse.controller.simulator.streams.serving import Streams

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class StreamReport(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model's functions. ``ttft``: time to the first token; ``tpot``: of each further one, the mean of a stream.
    A time is None if the stream at that rank has none. Shares of streams: ``ttft_met``, ``tpot_met``, and ``met`` both.
    ``tokens_per_s``: output of whole streams, while there were any. ``preempted``: how often one was.
    """

    name: str
    streams: int
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    ttft_met: float
    tpot_met: float
    met: float
    compliant: float
    tokens_per_s: float
    preempted: int
    failed: int

    def as_row(self) -> dict[str, Any]:
        """For people."""
        row = {"model": self.name, "streams": str(self.streams), "compliant": f"{self.compliant:.1%}"}
        for name in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms"):
            value = getattr(self, name)
            row[name] = "-" if value is None else f"{value:.1f}"
        row |= {name: f"{getattr(self, name):.1%}" for name in ("ttft_met", "tpot_met")}
        return row | {"tokens/s": f"{self.tokens_per_s:.0f}", "preempted": str(self.preempted)}


def tpot_s(streams: Streams) -> Floats:
    """Of each stream: 0 where there is one token only, infinite where the last one never came."""
    further = streams.output - 1
    whole = streams.over_s - streams.first_s
    found = np.where(further > 0, whole / np.maximum(further, 1), 0.0)
    return np.where(np.isnan(streams.over_s), np.inf, found)


def late(streams: Streams, functions: npt.NDArray[np.int64], ttfts_s: Floats, tpots_s: Floats) -> Bools:
    """Requests to language models that were late; ``tpots_s`` is infinite for other functions."""
    first_s = np.where(np.isnan(streams.over_s), np.inf, streams.first_s)
    found: Bools = (streams.output > 0) & ((first_s > ttfts_s[functions]) | (tpot_s(streams) > tpots_s[functions]))
    return found


def stream_reports(
    streams: Streams,
    times_s: Floats,
    functions: npt.NDArray[np.int64],
    ttfts_s: Floats,
    tpots_s: Floats,
    complies: Bools,
    names: Sequence[str],
) -> list[StreamReport]:
    """In the order of the models' first functions. ``complies`` is of functions."""
    of = np.asarray(names)
    found = []
    for name in dict.fromkeys(of[np.isfinite(tpots_s)].tolist()):
        its = of == name
        which = np.flatnonzero(its[functions])
        if not len(which):
            continue
        mine, who = streams.part(which), functions[which]
        whole = ~np.isnan(mine.over_s)
        first_s, each_s = np.where(whole, mine.first_s, np.inf), tpot_s(mine)
        ttft, tpot = first_s <= ttfts_s[who], each_s <= tpots_s[who]
        begins_s = times_s[which]
        span_s = float((begins_s + np.where(whole, mine.over_s, 0.0)).max() - begins_s.min())
        found.append(
            StreamReport(
                name=name,
                streams=len(which),
                ttft_p50_ms=_ms(first_s, 0.50),
                ttft_p99_ms=_ms(first_s, 0.99),
                tpot_p50_ms=_ms(each_s, 0.50),
                tpot_p99_ms=_ms(each_s, 0.99),
                ttft_met=round(float(ttft.mean()), 6),
                tpot_met=round(float(tpot.mean()), 6),
                met=round(float((ttft & tpot).mean()), 6),
                compliant=round(float(complies[np.unique(who)].mean()), 6),
                tokens_per_s=round(float(mine.output[whole].sum()) / span_s, 3) if span_s else 0.0,
                preempted=int(mine.preempted.sum()),
                failed=int((~whole).sum()),
            )
        )
    return found


def _ms(seconds: Floats, share: float) -> float | None:
    """The least time that so many streams do not exceed."""
    rank = max(0, int(np.ceil(share * len(seconds) - 1e-9)) - 1)
    found = float(np.sort(seconds)[rank])
    return round(found * 1000, 3) if np.isfinite(found) else None


def mean_streams(runs: Sequence[Sequence[StreamReport]]) -> list[StreamReport]:
    """Of runs with different seeds: each number is the mean; a time is None if that of any run is."""
    found = []
    for one in runs[0]:
        same = [each for reports in runs for each in reports if each.name == one.name]
        means: dict[str, Any] = {}
        for name in one.__struct_fields__:
            values = [getattr(each, name) for each in same]
            if name != "name":
                means[name] = None if None in values else round(sum(values) / len(values), 6)
        for name in ("streams", "preempted", "failed"):
            means[name] = round(means[name])
        found.append(StreamReport(name=one.name, **means))
    return found
