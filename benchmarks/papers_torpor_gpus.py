"""The figures of Torpor (SoCC'25) that show one mechanism each, late binding (8, 9) and heavy models (12), for
``benchmarks.papers``; parameters are papers_parameters.py's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.papers_figures import (
    HOST,
    INFINITY,
    Claim,
    Figure,
    Metric,
    Point,
    Results,
    Setting,
    at,
    beside_exact,
    number,
    points,
    same,
    show,
)
from benchmarks.papers_parameters import CONTAINERS, HEAVY_SCALE, heavy_and_light, native, resnets, trace
from dormouse.controller.simulator.arrivals import read_trace

P98: Final = number("p98_ms", "p98 [ms]", ".0f")
PER_S: Final = number("per_s", "answered per second", ".1f")

LOADS: Final = ((33, 80), (40, 60), (60, 40), (120, 20), (210, 10))
"""Fig. 8: functions on one GPU and their requests per minute, of the prototype's scripts (paper: 80 to 10)."""


# --- Fig. 8


def _one_gpu(setting: Setting) -> list[Point]:
    found: list[Point] = []
    for functions, rate in LOADS[-1:] if setting.quick else LOADS:

        def tree(arm: str, x: int, kind: str, functions: int = functions) -> dict[str, Any]:
            arrivals = trace(setting.flat(x), kind, setting.minutes(5))
            if arm == "native":
                return native(resnets(CONTAINERS, arrivals, 1))
            return resnets(functions, arrivals, 1)

        found += points(setting, same("default", "torpor", "native"), [rate], tree)
    return found


def _times_native(results: Results, kind: str, arm: str, rate: float) -> str:
    times = results.mean(kind, arm, rate, PER_S) / results.mean(kind, "native", rate, PER_S)
    return f"{times:.1f}"


def _worst_tail(results: Results, kind: str) -> str:
    return "/".join(show(results.mean(kind, "torpor", x, P98), ".0f") for x in results.xs(kind)) + " ms"


FIG_8: Final = Figure(
    name="8",
    title="Torpor Fig. 8: ResNet-152 functions on one GPU",
    x="requests per minute of each function",
    y="98th percentile [ms]",
    log=True,
    points=_one_gpu,
    metrics=(P98, PER_S),
    claims=(
        Claim(
            what="throughput of Torpor ÷ Native at 10 r/m",
            paper="over 10",
            ours=lambda results, kind: _times_native(results, kind, "torpor", 10),
        ),
        Claim(
            what="the same, default policy",
            paper="",
            ours=lambda results, kind: _times_native(results, kind, "default", 10),
        ),
        Claim(what="tail of Torpor at 10/20/40/60/80 r/m", paper="below 50 ms", ours=_worst_tail),
    ),
)


# --- Fig. 9


def _bursts(setting: Setting) -> list[Point]:
    minutes = setting.minutes(5)
    scale = 200.0 / float(read_trace(Path(), setting.trace)[:40, :minutes].mean())

    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        made = resnets(x, trace(setting.trace, kind, minutes, round(scale, 6)), 4)
        return native(made) if arm == "native" else made

    return points(setting, same("default", "torpor", "native"), [40], tree)


def _worst_gpu(result: Mapping[str, Any]) -> float:
    return INFINITY if None in result["gpu_p98_ms"] else float(max(result["gpu_p98_ms"]))


def _least_gpu(result: Mapping[str, Any]) -> float:
    return INFINITY if None in result["gpu_p98_ms"] else float(min(result["gpu_p98_ms"]))


def _spread(result: Mapping[str, Any]) -> float:
    return float(np.std(result["busy"]) / np.mean(result["busy"]))


MIN_GPU: Final = Metric(name="p98 of the best GPU [ms]", style=",.0f", of=_least_gpu)
WORST_GPU: Final = Metric(name="p98 of the worst GPU [ms]", style=",.0f", of=_worst_gpu)
SPREAD: Final = Metric(name="load CoV over GPUs", style=".3f", of=_spread)

FIG_9: Final = Figure(
    name="9",
    title="Torpor Fig. 9: 40 ResNet-152 functions of 200 requests per minute on 4 GPUs",
    x="functions",
    points=_bursts,
    metrics=(SPREAD, MIN_GPU, WORST_GPU),
    claims=(
        Claim(what="Torpor's tail, worst GPU [ms]", paper="around 35 on all GPUs", ours=at("torpor", 40, WORST_GPU)),
        Claim(what="default policy's, worst GPU [ms]", paper="", ours=at("default", 40, WORST_GPU)),
        Claim(what="Native's, worst GPU [ms]", paper="multi-seconds", ours=at("native", 40, WORST_GPU)),
    ),
)


# --- Fig. 12


def of_model(name: str, key: str) -> Metric:
    def value(result: Mapping[str, Any]) -> float:
        found = result["models"][name][key]
        return INFINITY if found is None else float(found)

    return Metric(name=f"{name} {key.removesuffix('_ms')} [ms]", style=".0f", of=value)


def _heavy(setting: Setting) -> list[Point]:
    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        return heavy_and_light(trace(setting.trace, kind, setting.minutes(), HEAVY_SCALE))

    return points(setting, same("default", "torpor", "torpor-lru"), [60], tree)


FIG_12: Final = Figure(
    name="12",
    title="Torpor Fig. 12: heavy and light models",
    x="share of Bert-qa in the memory that all models need [%]",
    points=_heavy,
    metrics=tuple(of_model(name, key) for name in ("Bert-qa", "DenseNet-201") for key in ("p90_ms", "p98_ms")),
    claims=(
        Claim(what="Bert-qa p98, Torpor [ms]", paper="≤ 200", ours=at("torpor", 60, of_model("Bert-qa", "p98_ms"))),
        Claim(what="Bert-qa p98, LRU [ms]", paper="> 200", ours=at("torpor-lru", 60, of_model("Bert-qa", "p98_ms"))),
        Claim(what="Bert-qa p98, default [ms]", paper="", ours=at("default", 60, of_model("Bert-qa", "p98_ms"))),
        Claim(
            what="DenseNet-201 p98, Torpor [ms]",
            paper="≤ 80",
            ours=at("torpor", 60, of_model("DenseNet-201", "p98_ms")),
        ),
    ),
)


def _heavy_exact(setting: Setting) -> list[Point]:
    """The same requests, with memory without addresses and with an executor's own pools."""

    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        return heavy_and_light(trace(setting.trace, kind, setting.minutes(10), HEAVY_SCALE))

    return beside_exact(setting, ("default", "torpor", "torpor-lru"), [60], tree)


FIG_12_EXACT: Final = Figure(
    name="exact12",
    title="Fig. 12 with exact pools, ten minutes",
    x="share of Bert-qa in the memory that all models need [%]",
    points=_heavy_exact,
    metrics=(of_model("Bert-qa", "p98_ms"), of_model("DenseNet-201", "p98_ms"), HOST),
)

FIGURES: Final = (FIG_12, FIG_12_EXACT, FIG_8, FIG_9)
