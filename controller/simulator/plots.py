"""Figures as PNG files, with matplotlib, which is imported only when figures are asked for. The same numbers give the
same file, byte for byte, with the same matplotlib.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dormouse.controller.simulator.watch import Watch
from dormouse.schemas.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Of Okabe and Ito, who chose them to be told apart by the colour-blind; yellow is left out, which white swallows."""

MARKERS: Final = "osD^v<>"
STYLES: Final = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
"""Dashes let the line below be seen where two policies do the same. 4 styles and 7 colours make 28 different lines."""

INCHES: Final = (6.4, 4.0)
DPI: Final = 150

MARKED: Final = 3
"""More deadlines than these are shown as the shortest and the longest."""


class Figures:
    """Those of one command, in a folder, which is made if it is not there. Raises ConfigError where that cannot be, or
    without matplotlib. ``written`` are the files.
    """

    def __init__(self, folder: str) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot: matplotlib is not installed; run pip install 'dormouse[plot]'")
        self._folder = Path(folder)
        self.written: list[Path] = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = self._folder / ".dormouse"  # rather now than after the simulation
            probe.touch()
            probe.unlink()
        except FileExistsError:
            raise ConfigError(f"--plot: {folder} is a file; give the path of a directory") from None
        except OSError as error:
            raise ConfigError(f"--plot: {folder}: {error.strerror}; give a directory that can be written") from error

    def compliance(
        self, name: str, of: str, series: Mapping[str, Sequence[tuple[int, float, float]]], target: float | None
    ) -> None:
        """Shares of functions that comply and of requests that are late, against the number ``of`` what. Nothing is
        known between two numbers, so lines are steps.
        """
        with self._axes(name, panels=2) as (axes, late):
            if target is not None:
                axes.axhline(100 * target, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)), label="target")
            self._points(axes, {name: [(x, 100 * y) for x, y, _ in points] for name, points in series.items()}, True)
            self._points(late, {name: [(x, 100 * y) for x, _, y in points] for name, points in series.items()}, True)
            axes.set(ylabel="compliant\nfunctions [%]", ylim=(-2, 102))
            late.set(xlabel=f"number of {of}", ylabel="late requests [%]")
            late.set_ylim(bottom=0)

    def capacity(self, name: str, of: str, series: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        """GPUs (``of`` what) that are needed against the number of functions."""
        with self._axes(name) as (axes,):
            self._points(axes, series)
            axes.set(xlabel="number of functions", ylabel=f"{of} needed")
            most = max((y for points in series.values() for _, y in points), default=1)
            axes.set_ylim(0, 1.05 * most)
            axes.locator_params(axis="y", integer=True)

    def latency(
        self, name: str, runs: Mapping[str, Watch], deadlines_s: Sequence[float], percentiles: Sequence[float]
    ) -> None:
        """The distribution of latencies of all requests, with the deadlines and, if there is one, the percentile."""
        from matplotlib.ticker import LogLocator, NullFormatter

        deadlines = sorted(set(deadlines_s))
        if len(deadlines) > MARKED:
            deadlines = [deadlines[0], deadlines[-1]]
        with self._axes(name) as (axes,):
            for deadline_s in deadlines:
                axes.axvline(deadline_s * 1000, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)))
                label = f" deadline {deadline_s * 1000:g} ms"
                axes.text(deadline_s * 1000, 2, label, rotation=90, ha="right", va="bottom", color="0.35", fontsize=8)
            if len(set(percentiles)) == 1:
                axes.axhline(100 * percentiles[0], color="0.6", linewidth=0.8, linestyle=":")
                at = (0.005, 100 * percentiles[0] - 1)
                axes.text(*at, f"{100 * percentiles[0]:g} %", transform=axes.get_yaxis_transform(), va="top",
                          color="0.35", fontsize=8)  # fmt: skip
            for index, (policy, run) in enumerate(runs.items()):
                axes.step(run.latency_ms, 100 * run.share, where="post", label=policy, **_style(index))
            axes.set(xscale="log", xlabel="latency [ms]", ylabel="requests answered within it [%]", ylim=(0, 102))
            low, high = axes.get_xlim()
            written = range(1, 10) if high < 20 * low else (1, 2, 5) if high < 1000 * low else (1,)
            axes.xaxis.set_major_locator(LogLocator(subs=tuple(written)))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
            axes.xaxis.set_minor_formatter(NullFormatter())

    def load(self, name: str, runs: Mapping[str, Watch]) -> None:
        """Busy share of the GPUs over time, mean and from the least busy to the most; a panel for each policy."""
        longest = 0.0
        with self._axes(name, panels=len(runs), legend=False) as panels:
            for index, (axes, (policy, run)) in enumerate(zip(panels, runs.items(), strict=True)):
                busy = 100 * run.busy
                edges = np.arange(busy.shape[1] + 1) * run.bin_s / 60
                colour = COLOURS[index % len(COLOURS)]
                several = len(busy) > 1
                longest = max(longest, edges[-1])
                if several:
                    axes.stairs(busy.max(axis=0), edges, baseline=busy.min(axis=0), fill=True, color=colour, alpha=0.25,
                                linewidth=0, label=f"least to most busy of {len(busy)} GPUs")  # fmt: skip
                label = "mean" if several else "the GPU"
                axes.stairs(busy.mean(axis=0), edges, baseline=None, color=colour, linewidth=1.4, label=label)
                axes.set(ylabel="GPU busy [%]", ylim=(0, 105))
                axes.set_title(policy, loc="left", fontsize=9)
                axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2,
                            borderaxespad=0)  # fmt: skip
            panels[-1].set(xlabel="time since the first request [min]", xlim=(0, longest))

    @staticmethod
    def _points(axes: "Axes", series: Mapping[str, Sequence[tuple[int, float]]], steps: bool = False) -> None:
        for index, (policy, points) in enumerate(series.items()):
            xs, ys = [x for x, _ in points], [y for _, y in points]
            shape = "steps-post" if steps else "default"
            axes.plot(
                xs,
                ys,
                drawstyle=shape,
                marker=MARKERS[index % len(MARKERS)],
                markersize=4,
                label=policy,
                **_style(index),
            )
        axes.locator_params(axis="x", integer=True)

    @contextmanager
    def _axes(self, name: str, panels: int = 1, legend: bool = True) -> Iterator[list["Axes"]]:
        """Empty axes, one under the other; written to the file when they are left."""
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context():
            matplotlib.rcdefaults()  # whatever the user's own settings are
            height = INCHES[1] if panels == 1 else 0.7 + 1.5 * panels
            figure = Figure((INCHES[0], height), dpi=DPI, layout="constrained")
            made = list(figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])
            for axes in made:
                axes.spines[["top", "right"]].set_visible(False)
                axes.grid(color="0.92", linewidth=0.6)
                axes.set_axisbelow(True)
            yield made
            if legend:
                made[0].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
            path = self._folder / f"{name}.png"
            try:
                figure.savefig(path, metadata={"Software": None})
            except OSError as error:
                raise ConfigError(f"--plot: {path}: {error.strerror}; give a directory that can be written") from error
        self.written.append(path)


def _style(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": STYLES[index % len(STYLES)],
        "linewidth": 1.4,
    }
