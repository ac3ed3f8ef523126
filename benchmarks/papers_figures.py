"""What a figure of ``benchmarks.papers`` consists of: which runs, which numbers of each, what the paper says. Pure."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.papers_parameters import MINUTES, Tree
from benchmarks.papers_runs import Run
from dormouse.controller.simulator.scenario import POLICIES
from dormouse.schemas.policy import Policy

KINDS: Final = {"gaps": "the authors' gaps", "poisson": "Poisson"}
"""``within`` of a scenario, and what that is called here."""

INFINITY: Final = float("inf")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """``trace``: the path of Torpor's sample. ``folder``: for files that scenarios refer to. ``quick``: to see that it
    runs.
    """

    trace: str
    folder: Path
    seeds: int
    quick: bool = False

    def minutes(self, minutes: int = MINUTES) -> int:
        return 1 if self.quick else minutes

    def some(self, xs: Sequence[int]) -> Sequence[int]:
        return xs[:1] if self.quick else xs

    def flat(self, rate: int) -> str:
        """A trace whose functions are all asked so often in each minute."""
        path = self.folder / f"rate-{rate}.csv"
        minutes = range(MINUTES)
        text = ",".join(f"m{minute}" for minute in minutes) + "\n" + ",".join(str(rate) for _ in minutes) + "\n"
        self.folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        return str(path.resolve())


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run as a figure has it: which line, at which number, with which arrivals."""

    arm: str
    kind: str
    x: float
    run: Run


@dataclass(frozen=True, kw_only=True)
class Metric:
    """``of`` a run's result; infinite where something was not answered. ``style`` of Python's formatting."""

    name: str
    of: Callable[[Mapping[str, Any]], float]
    style: str = ".1%"


class Results:
    """A figure's, as far as they are there."""

    def __init__(self, points: Sequence[Point], known: Mapping[str, Mapping[str, Any]]) -> None:
        """``known``: results by the key of their run."""
        self.runs: dict[tuple[str, str, float], list[Mapping[str, Any]]] = {}  # by kind, arm, x: one for each seed
        for point in points:
            if (result := known.get(point.run.key)) is not None:
                self.runs.setdefault((point.kind, point.arm, point.x), []).append(result)

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(kind for kind, _, _ in self.runs))

    def arms(self, kind: str) -> list[str]:
        return list(dict.fromkeys(arm for of, arm, _ in self.runs if of == kind))

    def xs(self, kind: str, arm: str | None = None) -> list[float]:
        return sorted({x for of, line, x in self.runs if of == kind and arm in (None, line)})

    def values(self, kind: str, arm: str, x: float, metric: Metric) -> list[float]:
        return [metric.of(result) for result in self.runs.get((kind, arm, x), ())]

    def mean(self, kind: str, arm: str, x: float, metric: Metric) -> float:
        """nan: no run."""
        values = self.values(kind, arm, x, metric)
        return statistics.mean(values) if values else float("nan")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the paper's text says, and what came out for arrivals of one kind."""

    what: str
    paper: str
    ours: Callable[[Results, str], str]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """``points`` makes its runs for a setting; ``note`` is printed below its tables."""

    name: str
    title: str
    x: str
    points: Callable[[Setting], list[Point]]
    metrics: Sequence[Metric]
    claims: Sequence[Claim] = ()
    y: str = ""
    log: bool = False
    note: str = ""
    marks: Mapping[str, str] = field(default_factory=dict)


COMPLIANT: Final = Metric(name="compliant", of=lambda result: float(result["compliant"]))


HOST: Final = Metric(name="copied from the host [GB/s]", style=".2f", of=lambda result: float(result["host_gbps"]))
LATE: Final = Metric(name="late requests", style=".2%", of=lambda result: float(result["late"]))


def one(setting: Setting) -> Setting:
    """The same with one seed: for differences that no chance makes."""
    return dataclasses.replace(setting, seeds=1)


def number(key: str, name: str, style: str, per: float = 1.0) -> Metric:
    """A number of a result, divided by ``per``, that may be missing because something was not answered."""
    return Metric(name=name, style=style, of=lambda result: INFINITY if result[key] is None else result[key] / per)


def points(
    setting: Setting,
    arms: Mapping[str, Policy | str],
    xs: Sequence[int],
    tree: Callable[[str, int, str], Tree],
    kinds: Sequence[str] = tuple(KINDS),
    **more: Any,
) -> list[Point]:
    """All seeds, kinds, numbers and arms (by name; what one is, or its name in `POLICIES`); ``tree`` gives the scenario
    of an arm, number and kind. Seeds come first: who stops early has some of everything.
    """
    found: list[Point] = []
    for seed in range(setting.seeds):
        for kind in kinds:
            for x in setting.some(xs):
                for arm, policy in arms.items():
                    chosen = POLICIES[policy] if isinstance(policy, str) else policy
                    run = Run(tree=tree(arm, x, kind), policy=chosen, seed=seed, **more)
                    found.append(Point(arm=arm, kind=kind, x=x, run=run))
    return found


def beside_exact(
    setting: Setting, arms: Sequence[str], xs: Sequence[int], tree: Callable[[str, int, str], Tree]
) -> list[Point]:
    """Each policy with memory without addresses and, the same requests, with an executor's own pools."""
    found: list[Point] = []
    for pools in ("ideal", "exact"):
        named = {arm if pools == "ideal" else f"{arm}, exact": POLICIES[arm] for arm in arms}
        found += points(setting, named, xs, tree, ("poisson",), pools=pools)
    return found


def saturation(results: Results, kind: str, arm: str, share: float = 0.8) -> float:
    """Where the mean of the compliant functions falls below ``share``, between two numbers on a straight line; the
    largest number if it never does, nan if it always is.
    """
    xs = results.xs(kind, arm)
    ys = [results.mean(kind, arm, x, COMPLIANT) for x in xs]
    for (x, y), (more, less) in zip(zip(xs, ys, strict=True), list(zip(xs, ys, strict=True))[1:], strict=False):
        if y >= share > less:
            return x + (y - share) / (y - less) * (more - x)
    return xs[-1] if xs and ys[-1] >= share else float("nan")


def load_variance(result: Mapping[str, Any], gpus: int = 4) -> float:
    """Of the GPUs' loads, which are divided by the node's largest; mean over the nodes (Torpor Fig. 14b)."""
    busy = np.asarray(result["busy"]).reshape(-1, gpus)
    return float((busy / busy.max(axis=1, keepdims=True)).var(axis=1).mean())


def show(value: float, style: str) -> str:
    """For a table: nothing was answered, nothing was run."""
    if value == INFINITY:
        return "∞"
    return "" if value != value else format(value, style)


def same(*arms: str) -> dict[str, Policy | str]:
    """Arms that are called as their policy is."""
    return {arm: arm for arm in arms}


def at(arm: str, x: float, metric: Metric) -> Callable[[Results, str], str]:
    """The mean of a metric at a point, as text."""
    return lambda results, kind: show(results.mean(kind, arm, x, metric), metric.style)


def of_80(arm: str) -> Callable[[Results, str], str]:
    """The number of functions of which 80 % comply, as text."""

    def shown(results: Results, kind: str) -> str:
        xs, found = results.xs(kind, arm), saturation(results, kind, arm)
        if found != found:
            return f"below {xs[0]:g}" if xs else ""
        return f"over {xs[-1]:g}" if found == xs[-1] else f"{found:.0f}"

    return shown
