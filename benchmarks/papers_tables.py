"""The numbers of ``benchmarks.papers`` as Markdown, and where they go in docs/papers.md. Pure but for that file."""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers_figures import INFINITY, KINDS, Figure, Metric, Results, show
from benchmarks.report import Goal

PLACE = re.compile(r"(<!-- figure (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""In the document, what is between these is written anew."""


def kind_name(kind: str) -> str:
    return KINDS.get(kind, kind)


def tables(figure: Figure, results: Results) -> str:
    """What the paper says beside what came out; then each number by arm, its mean and, in parentheses, its least and
    largest of the seeds.
    """
    parts = [claims(figure, results)] if figure.claims else []
    for metric in figure.metrics:
        parts += [numbers(figure, results, kind, metric) for kind in results.kinds]
    return "\n\n".join(parts)


def claims(figure: Figure, results: Results) -> str:
    kinds = results.kinds
    rows = [[figure.title, "paper's text", *(f"simulated, {kind_name(kind)}" for kind in kinds)]]
    for claim in figure.claims:
        rows.append([claim.what, claim.paper, *(_blank(claim.ours(results, kind)) for kind in kinds)])
    return _table(rows)


def numbers(figure: Figure, results: Results, kind: str, metric: Metric) -> str:
    xs = results.xs(kind)
    label = metric.name if len(results.kinds) == 1 else f"{metric.name}, {kind_name(kind)}"
    rows = [[f"{label}; {figure.x}", *(f"{x:,g}" for x in xs)]]
    for arm in results.arms(kind):
        rows.append([arm, *(cell(results.values(kind, arm, x, metric), metric.style) for x in xs)])
    return _table(rows)


def cell(values: Sequence[float], style: str) -> str:
    if not values:
        return ""
    low, high, mean = (show(value, style) for value in (min(values), max(values), _mean(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def _mean(values: Sequence[float]) -> float:
    return INFINITY if INFINITY in values else statistics.mean(values)


def _blank(text: str) -> str:
    return "" if "nan" in text else text


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| --- " * len(rows[0]) + "|", *lines[1:]])


def goal_table(goals: Sequence[Goal]) -> str:
    rows = [["goal", "wanted", "simulated", "met"]]
    for goal in goals:
        measured = (
            f"{goal.measured:.3f}".rstrip("0").rstrip(".") if isinstance(goal.measured, float) else str(goal.measured)
        )
        rows.append([goal.name, goal.goal.replace(">=", "≥"), measured, "yes" if goal.met else "**no**"])
    return _table(rows)


def write(document: Path, made: dict[str, str]) -> list[str]:
    """Replace what figures have in the document; returns the names of those that it has no place for."""
    text = document.read_text(encoding="utf-8")
    places = {match[2] for match in PLACE.finditer(text)}
    text = PLACE.sub(lambda match: match[1] + made[match[2]] + "\n" + match[3] if match[2] in made else match[0], text)
    document.write_text(text, encoding="utf-8")
    return [name for name in made if name not in places]
