"""Output of one `dormouse simulate`: a table, JSON, figures, and the result of a search in words."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import click
import msgspec

from dormouse.controller.simulator.plots import Figures
from dormouse.controller.simulator.report import Report
from dormouse.controller.simulator.scenario import Scenario
from dormouse.controller.simulator.watch import Watch
from dormouse.core.output import show_json, table


class SimulationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The runs asked for. ``sweep``: numbers of functions. ``find``: "gpus" or "functions", of which numbers up to
    ``limit`` are tried until the share ``target`` of functions complies; GPUs are of each of ``nodes``, and no fewer
    than ``least``, which faults name.
    """

    seed: int
    sweep: list[int] | None = None
    find: str | None = None
    target: float = 1.0
    limit: int = 0
    nodes: int = 1
    least: int = 1
    seeds: int = 1
    pools: str = "ideal"
    by_model: bool = False

    @property
    def all_seeds(self) -> list[int]:
        return list(range(self.seed, self.seed + self.seeds))

    @property
    def seeded(self) -> str:
        return f"seed {self.seed}" if self.seeds == 1 else f"seeds {self.seed} to {self.seed + self.seeds - 1}"


class Tried(NamedTuple):
    """``report`` is the mean of those of all ``seeds``; ``watch`` has seen the first."""

    report: Report
    watch: Watch | None
    seeds: list[Report]


class PolicyResults(msgspec.Struct, frozen=True, kw_only=True):
    """Of one policy: the runs tried, by number of GPUs or functions, and the ``answer`` among those; None: no number
    was enough. Without a search there is one, the scenario's number of functions.
    """

    policy: str
    tried: dict[int, Tried]
    answer: int | None


def printed(found: Sequence[Sequence[PolicyResults]], plan: SimulationPlan, json_: bool) -> None:
    """Results by number of functions, then by policy."""
    if json_:
        show_json(_as_json(found, plan))
        return
    rows = [row for index, results in enumerate(found) for row in _rows(results, plan, index)]
    columns = list(rows[0])
    if sys.stdout.isatty():  # 80 columns do not hold what is the same in all rows, or nearly
        if plan.sweep is not None or plan.find == "functions":
            click.echo(plan.seeded)
            same = ["requests", "GB/s", "sim/s"]
        else:
            click.echo(f"{rows[0]['functions']} functions, {rows[0]['requests']} requests, {plan.seeded}")
            same = ["functions", "requests", "GB/s", *(["sim/s"] if plan.find is not None else [])]
        wide = ["link"] if plan.find is not None else []
        if plan.seeds > 1:  # spreads need the room
            wide += ["p50_ms", "wakes", "busy", "sim/s"]
        columns = [column for column in columns if column not in (*same, *wide)]
    table(rows, columns)
    if plan.by_model:
        _print_models(found, plan)
    _print_streams(found, plan)
    if plan.find is None:
        return
    click.echo()
    for index, results in enumerate(found):
        for one in results:
            of = "" if plan.sweep is None else f", {plan.sweep[index]:,} functions"
            click.echo(f"{one.policy}{of}: {conclude(one, plan)}")
    click.echo("Nothing is known of numbers that were not tried: compliance need not rise or fall with each step.")


def conclude(one: PolicyResults, plan: SimulationPlan) -> str:
    """The result of a search, as a sentence without its end."""
    target, number = f"{plan.target * 100:g}%", one.answer
    share = {at: f"{tried.report.compliant:.1%}" for at, tried in one.tried.items()}
    if plan.find == "gpus":
        if number is None:
            verb = "is" if plan.limit == 1 else "are"
            return f"{_gpus(plan.limit, plan)} {verb} not enough: {share[plan.limit]} of functions comply, not {target}"
        less = f"; with {number - 1}, {share[number - 1]} do" if number > plan.least else ""
        if plan.least == number > 1:
            less = f"; fewer were not tried: [[faults]] name GPU {number - 1}" + (
                " of a node" if plan.nodes > 1 else ""
            )
        return f"with {_gpus(number, plan)}, {share[number]} of functions comply ({target} were wanted){less}"
    if number is None:
        least = min(share)
        return f"of {least} function{'s'[: least > 1]}, only {share[least]} comply, not {target}"
    more = f"; of {number + 1:,}, {share[number + 1]} do" if number < plan.limit else "; more were not tried (--limit)"
    return f"of {number:,} functions, {share[number]} comply ({target} were wanted){more}"


def _gpus(count: int, plan: SimulationPlan) -> str:
    return ("1 GPU" if count == 1 else f"{count} GPUs") + (" per node" if plan.nodes > 1 else "")


def _rows(results: Sequence[PolicyResults], plan: SimulationPlan, index: int) -> list[dict[str, Any]]:
    """For people."""
    rows = []
    for one in results:
        for number, tried in sorted(one.tried.items()):
            row = tried.report.as_row()
            if plan.seeds > 1:
                row["compliant"] += _spread([each.compliant for each in tried.seeds], ".1%")
                row["late"] += _spread([each.late for each in tried.seeds], ".2%")
            if plan.sweep is not None:
                row["functions"] = str(plan.sweep[index])
            if plan.find is not None:
                row = {"policy": row.pop("policy"), plan.find: str(number), **row, plan.find: str(number)}
            rows.append(row)
    return rows


def _spread(values: Sequence[float], form: str) -> str:
    return f" ({min(values):{form}} to {max(values):{form}})"


def _print_models(found: Sequence[Sequence[PolicyResults]], plan: SimulationPlan) -> None:
    """Of the numbers asked for, or found."""
    for index, results in enumerate(found):
        for one in results:
            of = "" if plan.sweep is None else f", {plan.sweep[index]:,} functions"
            click.echo(f"\n{one.policy}{of}, by model")
            rows = [model.as_row() for model in one.tried[_shown(one, plan)].report.models]
            table(rows, list(rows[0]))


def _print_streams(found: Sequence[Sequence[PolicyResults]], plan: SimulationPlan) -> None:
    """Of language models, if there are any."""
    for index, results in enumerate(found):
        for one in results:
            of = "" if plan.sweep is None else f", {plan.sweep[index]:,} functions"
            if rows := [streams.as_row() for streams in one.tried[_shown(one, plan)].report.streams]:
                click.echo(f"\n{one.policy}{of}, language models")
                table(rows, list(rows[0]))


def _as_json(found: Sequence[Sequence[PolicyResults]], plan: SimulationPlan) -> dict[str, Any]:
    head: dict[str, Any] = {"seed": plan.seed, "seeds": plan.seeds, "pools": plan.pools}
    if plan.find is not None:
        head |= {"find": plan.find, "target": plan.target, "limit": plan.limit}
    each = [{"policies": [_one_as_json(one, plan) for one in results]} for results in found]
    if plan.sweep is None:
        return head | each[0]
    return head | {"sweep": [{"functions": count} | one for count, one in zip(plan.sweep, each, strict=True)]}


def _one_as_json(one: PolicyResults, plan: SimulationPlan) -> dict[str, Any]:
    tried = {}
    for number, each in sorted(one.tried.items()):
        tried[number] = each.report.as_json()
        if plan.seeds > 1:
            tried[number]["each_seed"] = [same.as_json() for same in each.seeds]
    if plan.find is None:
        (only,) = tried.values()
        return only
    return {
        "policy": one.policy,
        "capacity": one.answer,
        "tried": [{"number": number} | fields for number, fields in tried.items()],
    }


def draw(
    figures: Figures, points: Sequence[Scenario], found: Sequence[Sequence[PolicyResults]], plan: SimulationPlan
) -> None:
    """All figures that the results make, and lists the files on stderr."""
    if plan.find is None and plan.sweep is not None:
        by_policy = zip(*found, strict=True)
        lines = {
            one[0].policy: [
                (number, tried.report.compliant, tried.report.late)
                for same in one
                for number, tried in same.tried.items()
            ]
            for one in by_policy
        }
        figures.compliance("compliance", "functions", lines, None)
    if plan.find == "gpus" and plan.sweep is not None:
        needed = {
            one[0].policy: [
                (n, same.answer) for n, same in zip(plan.sweep, one, strict=True) if same.answer is not None
            ]
            for one in zip(*found, strict=True)
        }
        figures.capacity("capacity", _words(plan), needed)
    for point, results in zip(points, found, strict=True):
        suffix = "" if plan.sweep is None else f"-{len(point.models)}"
        if plan.find is not None:
            tries = {
                one.policy: [
                    (number, tried.report.compliant, tried.report.late) for number, tried in sorted(one.tried.items())
                ]
                for one in results
            }
            figures.compliance(f"compliance{suffix}", _words(plan), tries, plan.target)
        runs = {one.policy: watch for one in results if (watch := one.tried[_shown(one, plan)].watch) is not None}
        figures.latency(f"latency{suffix}", runs, point.deadlines_s, point.percentiles)
        figures.load(f"load{suffix}", runs)
    for path in figures.written:
        click.echo(f"wrote {path}", err=True)


def _words(plan: SimulationPlan) -> str:
    if plan.find != "gpus":
        return "functions"
    return "GPUs of each node" if plan.nodes > 1 else "GPUs"


def _shown(one: PolicyResults, plan: SimulationPlan) -> int:
    """The number whose latencies are drawn: the one found, or the nearest to it."""
    if one.answer is not None:
        return one.answer
    return plan.limit if plan.find == "gpus" else min(one.tried)
