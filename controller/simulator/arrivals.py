"""Arrivals of requests at functions: from a seeded process or a file of counts per minute. Times in seconds."""

import csv
import gzip
import re
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dormouse.controller.simulator.scenario import Scenario
from dormouse.schemas.errors import ConfigError

Times = npt.NDArray[np.float64]
Functions = npt.NDArray[np.int64]

MAX_REQUESTS: Final = 20_000_000
"""Some gigabytes of memory and minutes of time."""

MINUTES: Final = 10.0
"""Where a scenario has none."""


def arrivals(scenario: Scenario, seed: int) -> tuple[Times, Functions, int]:
    """Times in ascending order, who is asked at each, and how many of them come first only to warm up: each function
    once, one after the other ended.
    """
    rng = np.random.default_rng(seed)
    count = len(scenario.models)
    settings = scenario.arrivals
    if settings.process == "trace":
        times, functions = _traced(scenario, rng)
    else:
        minutes = MINUTES if settings.minutes is None else settings.minutes
        rates = np.asarray(scenario.rates)
        expected = float(rates.sum()) * minutes
        if expected > MAX_REQUESTS:
            _too_many(scenario, "arrivals.rate", expected)
        times, functions = (_poisson if settings.process == "poisson" else _regular)(rates, minutes, rng)
    if not len(times):
        cure = "a larger scale, or another trace" if settings.process == "trace" else "a larger rate or more minutes"
        raise ConfigError(f"{scenario.path}: arrivals: no request comes; write {cure}")
    if not settings.warm:
        return times, functions, 0
    ends = np.cumsum(scenario.wakes_s)
    starts = np.concatenate([[0.0], ends[:-1]])
    return np.concatenate([starts, times + ends[-1]]), np.concatenate([np.arange(count), functions]), count


def _poisson(rates: Times, minutes: float, rng: np.random.Generator) -> tuple[Times, Functions]:
    """One Poisson process of all functions together, each request one's in proportion to its rate."""
    total = int(rng.poisson(float(rates.sum()) * minutes))
    times = np.sort(rng.uniform(0.0, minutes * 60.0, total))
    if (rates == rates[0]).all():  # the quicker way to draw
        return times, rng.integers(0, len(rates), total)
    return times, _drawn(rates, total, rng)


def _regular(rates: Times, minutes: float, _: np.random.Generator) -> tuple[Times, Functions]:
    """Each function at equal intervals; functions of one rate one after the other."""
    each = np.floor(rates * minutes + 1e-9).astype(np.int64)  # 10 minutes of 2.3 are 23, whatever 2.3 * 10 is
    functions = np.repeat(np.arange(len(rates)), each)
    number = np.arange(len(functions)) - np.repeat(np.cumsum(each) - each, each)
    times = (number + functions / len(rates)) * (60.0 / rates[functions])
    order = np.argsort(times, kind="stable")
    return times[order], functions[order]


def _drawn(weights: npt.NDArray[Any], count: int, rng: np.random.Generator) -> Functions:
    """Functions, drawn with probabilities in proportion to weights, one of which is above 0."""
    ends = np.cumsum(weights)
    return np.searchsorted(ends, rng.uniform(0.0, float(ends[-1]), count), side="right")


def _traced(scenario: Scenario, rng: np.random.Generator) -> tuple[Times, Functions]:
    """Function f has row f; those beyond the last row draw one, with replacement."""
    settings = scenario.arrivals
    counts = read_trace(scenario.path, settings.trace)
    rows, columns = counts.shape
    minutes = settings.minutes
    if minutes is not None:
        if minutes != int(minutes) or minutes > columns:
            raise ConfigError(
                f"{scenario.path}: arrivals.minutes is {minutes:g}; write a whole number of at most {columns}, which "
                "the trace has"
            )
        counts = counts[:, : int(minutes)]
    count = len(scenario.models)
    drawn = rng.integers(0, rows, max(0, count - rows))
    counts = counts[np.concatenate([np.arange(min(count, rows)), drawn])]
    expected = float(counts.sum()) * settings.scale
    if expected > MAX_REQUESTS:
        _too_many(scenario, "arrivals.trace", expected)
    if settings.within == "gaps":
        return _gaps(counts, settings.scale, rng)
    if settings.within == "poisson":
        counts = rng.poisson(counts * settings.scale)
    elif settings.scale != 1.0:
        counts = np.floor(counts * settings.scale + rng.uniform(0.0, 1.0, counts.shape)).astype(np.int64)
    flat = np.repeat(np.arange(counts.size), counts.ravel())
    functions, minute = np.divmod(flat, counts.shape[1])
    times = (minute + rng.uniform(0.0, 1.0, len(flat))) * 60.0
    order = np.argsort(times, kind="stable")
    return times[order], functions[order]


def _gaps(counts: npt.NDArray[np.int64], scale: float, rng: np.random.Generator) -> tuple[Times, Functions]:
    """As the load generator that was published with Torpor does it: each minute has its count of requests, of
    functions drawn by their rates; the gap before each is drawn from a Poisson distribution, in whole milliseconds. So
    gaps hardly differ, far less than those of a Poisson process, and a minute ends when its last request was sent.
    """
    times: list[Times] = []
    functions: list[Functions] = []
    now_s = 0.0
    for column in counts.T:
        total = int(column.sum() * scale)
        if not total:
            now_s += 60.0
            continue
        sent = now_s + np.cumsum(rng.poisson(60_000 / total, total)) / 1000
        times.append(sent)
        functions.append(_drawn(column, total, rng))
        now_s = float(sent[-1])
    return np.concatenate([np.zeros(0), *times]), np.concatenate([np.zeros(0, np.int64), *functions])


def _too_many(scenario: Scenario, key: str, requests: float) -> None:
    text = f"makes {requests:,.0f} requests; at most {MAX_REQUESTS:,} are simulated: write fewer minutes or functions"
    raise ConfigError(f"{scenario.path}: {key} {text}")


def read_trace(scenario: Path, name: str) -> npt.NDArray[np.int64]:
    """Counts by function and minute: columns m0, m1, ... of a CSV file, which may be gzipped; others are ignored."""
    path = scenario.parent / name
    at = f"{scenario}: arrivals.trace: {path}"
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
        lines = list(csv.reader(text.splitlines(), strict=True))
    except FileNotFoundError:
        raise ConfigError(f"{at}: is not there; write a path as seen from the scenario's folder") from None
    except (OSError, EOFError, zlib.error, ValueError, csv.Error) as error:  # not UTF-8, or a path that cannot be
        raise ConfigError(
            f"{at}: cannot be read as CSV ({error}); write UTF-8 text, gzipped if it ends in .gz"
        ) from error
    header = lines[0] if lines else []
    minutes = [index for index, column in enumerate(header) if re.fullmatch(r"m\d+", column)]
    if not minutes or len(lines) < 2:
        raise ConfigError(f"{at}: no counts; write a header with columns m0, m1, ... and one line per function")
    counts = np.zeros((len(lines) - 1, len(minutes)), np.int64)
    for row, line in enumerate(lines[1:]):
        if len(line) != len(header):
            raise ConfigError(f"{at}: line {row + 2} has {len(line)} fields; write {len(header)}, as the header has")
        for column, index in enumerate(minutes):
            if not re.fullmatch(r"[0-9]{1,9}", line[index]):
                raise ConfigError(
                    f"{at}: line {row + 2}: {header[index]} is {line[index]!r}; write the number of requests in it"
                )
            counts[row, column] = int(line[index])
    return counts
