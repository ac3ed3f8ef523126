"""The figures of ``benchmarks.papers`` as PNG files, in the colours of the simulator's own."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.papers_figures import INFINITY, Figure, Metric, Results
from benchmarks.papers_tables import kind_name
from dormouse.controller.simulator.plots import COLOURS, MARKERS, STYLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI: Final = 85
PANEL: Final = (4.4, 3.2)  # inches
BARS: Final = (3.4, 2.8)


def draw(figure: Figure, results: Results, path: Path) -> bool:
    """Lines: a panel for each kind of arrivals, of the first number; where a figure has one point only, bars: a panel
    for each number. Means over the seeds, and from the least to the largest. False if there is nothing to draw.
    """
    import matplotlib
    from matplotlib.figure import Figure as Sheet

    kinds = results.kinds
    if not kinds:
        return False
    lines = max(len(results.xs(kind)) for kind in kinds) > 1
    count, (width, height) = (len(kinds), PANEL) if lines else (min(4, len(figure.metrics)), BARS)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        sheet = Sheet((width * count, height), dpi=DPI, layout="constrained")
        sheet.suptitle(f"{figure.title} (simulated)", fontsize=9)
        panels = list(sheet.subplots(1, count, squeeze=False, sharey=lines)[0])
        for index, axes in enumerate(panels):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="0.92", linewidth=0.6)
            axes.set_axisbelow(True)
            if lines:
                axes.set_title(kind_name(kinds[index]), loc="left", fontsize=9)
                _lines(axes, figure, results, kinds[index], figure.metrics[0])
            else:
                axes.set_title(figure.metrics[index].name, loc="left", fontsize=9)
                _bars(axes, results, figure.metrics[index])
        if lines:
            panels[0].set_ylabel(figure.y or figure.metrics[0].name)
        handles, labels = panels[0].get_legend_handles_labels()
        sheet.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
        sheet.savefig(path, metadata={"Software": None})
    return True


def _factor(metric: Metric) -> float:
    return 100.0 if metric.style.endswith("%") else 1.0


def _lines(axes: "Axes", figure: Figure, results: Results, kind: str, metric: Metric) -> None:
    factor = _factor(metric)
    for index, arm in enumerate(results.arms(kind)):
        found = [(x, results.values(kind, arm, x, metric)) for x in results.xs(kind, arm)]
        found = [(x, values) for x, values in found if values and INFINITY not in values]
        xs = [x for x, _ in found]
        colour = COLOURS[index % len(COLOURS)]
        means = [factor * statistics.mean(values) for _, values in found]
        style = STYLES[index % len(STYLES)]
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(xs, means, color=colour, linestyle=style, marker=marker, markersize=4, linewidth=1.3, label=arm)
        low, high = ([factor * end(values) for _, values in found] for end in (min, max))
        axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel(figure.x)
    axes.set_xticks(_apart(results.xs(kind)))
    if figure.log:
        _log(axes)
    elif factor == 100.0:
        axes.set_ylim(-2, 102)


def _apart(xs: list[float]) -> list[float]:
    """Numbers that can stand beside one another on an axis."""
    kept: list[float] = []
    for x in xs:
        if not kept or x - kept[-1] >= (xs[-1] - xs[0]) / 9:
            kept.append(x)
    return kept


def _bars(axes: "Axes", results: Results, metric: Metric) -> None:
    """The kinds of arrivals, and in each the arms beside one another."""
    kinds, largest, least = results.kinds, 0.0, INFINITY
    for index, arm in enumerate(results.arms(kinds[0])):
        for place, kind in enumerate(kinds):
            values = [value for x in results.xs(kind, arm) for value in results.values(kind, arm, x, metric)]
            at = place + 0.8 * (index + 0.5) / len(results.arms(kind)) - 0.4
            if not values or INFINITY in values:
                axes.text(at, 0, "∞", ha="center", va="bottom")
                continue
            mean = statistics.mean(values)
            largest, least = max(largest, mean), min(least, mean)
            spread = [[mean - min(values)], [max(values) - mean]]
            width = 0.7 / len(results.arms(kind))
            label = arm if not place else None
            axes.bar(at, mean, color=COLOURS[index % len(COLOURS)], width=width, yerr=spread, capsize=2, label=label)
    axes.set_xticks(range(len(kinds)), [kind_name(kind) for kind in kinds], fontsize=8)
    if largest > 30 * least > 0.0:
        _log(axes)


def _log(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
