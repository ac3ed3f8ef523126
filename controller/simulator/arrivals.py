"""When which function is asked: from a seeded process or a file of counts per minute. Times in seconds."""

import csv
import gzip
import re
import zlib
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dormouse.controller.simulator.scenario import Scenario
from dormouse.schemas.errors import ConfigError

Times = npt.NDArray[np.float64]
Functions = npt.NDArray[np.int64]

MAX_REQUESTS: Final = 20_000_000
"""Some gigabytes of memory and minutes of time."""

MINUTES: Final = 10.0
"""Where a scenario does not say."""


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
        assert settings.rate is not None
        minutes = MINUTES if settings.minutes is None else settings.minutes
        expected = settings.rate * minutes * count
        if expected > MAX_REQUESTS:
            _too_many(scenario, "arrivals.rate", expected)
        if settings.process == "poisson":
            total = int(rng.poisson(expected))
            times = np.sort(rng.uniform(0.0, minutes * 60.0, total))
            functions = rng.integers(0, count, total)
        else:
            times, functions = _regular(count, settings.rate, minutes)
    if not len(times):
        raise ConfigError(f"{scenario.path}: arrivals: no request comes; write a larger rate or more minutes")
    if not settings.warm:
        return times, functions, 0
    ends = np.cumsum(scenario.wakes_s)
    starts = np.concatenate([[0.0], ends[:-1]])
    return np.concatenate([starts, times + ends[-1]]), np.concatenate([np.arange(count), functions]), count


def _regular(count: int, rate: float, minutes: float) -> tuple[Times, Functions]:
    """Each function at equal intervals, one after the other."""
    interval_s = 60.0 / rate
    each = int(rate * minutes)
    times = (np.arange(each)[:, None] + np.arange(count)[None, :] / count) * interval_s
    return times.ravel(), np.tile(np.arange(count), each)


def _traced(scenario: Scenario, rng: np.random.Generator) -> tuple[Times, Functions]:
    """Function f has row f; those beyond the last row draw one, with replacement. Within a minute, requests come at
    random.
    """
    counts = read_trace(scenario.path, scenario.arrivals.trace)
    rows, columns = counts.shape
    minutes = scenario.arrivals.minutes
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
    total = int(counts.sum())
    if total > MAX_REQUESTS:
        _too_many(scenario, "arrivals.trace", total)
    flat = np.repeat(np.arange(counts.size), counts.ravel())
    functions, minute = np.divmod(flat, counts.shape[1])
    times = (minute + rng.uniform(0.0, 1.0, total)) * 60.0
    order = np.argsort(times, kind="stable")
    return times[order], functions[order]


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
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
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
