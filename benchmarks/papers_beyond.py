"""What ``benchmarks.papers`` shows beyond the papers: orders, content sharing, the bound on waiting, a node of 64 GPUs,
and how much of it all the assumed bandwidth makes.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from benchmarks.papers_figures import (
    COMPLIANT,
    LATE,
    Claim,
    Figure,
    Metric,
    Point,
    Results,
    Setting,
    at,
    number,
    of_80,
    one,
    points,
    same,
    show,
)
from benchmarks.papers_parameters import cluster, fine_tunes, gpus, in_turn, node, trace
from benchmarks.papers_torpor import TAIL, VARIANCE
from dormouse.schemas.policy import DEFAULT, Policy

LOADS: Final = (560, 640, 720)

POISSON: Final = ("poisson",)
"""Arrivals: the authors' gaps hardly vary, and requests do."""

ORDERS: Final = ("fifo", "edf", "feasible", "rrc", "rrc-latency")

SLOWEST: Final = number("max_ms", "longest latency [ms]", ",.0f")


def _of_80(arm: str) -> Claim:
    return Claim(
        what=f"functions of which 80 % comply, {arm}",
        paper="",
        ours=of_80(arm),
    )


def _node(setting: Setting, arms: Mapping[str, Policy | str]) -> list[Point]:
    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        return node(x, trace(setting.trace, kind, setting.minutes()))

    return points(one(setting), arms, LOADS, tree, POISSON)


def _orders(setting: Setting) -> list[Point]:
    arms: dict[str, Policy | str] = {order: msgspec.structs.replace(DEFAULT, order=order) for order in ORDERS}
    return _node(setting, {"default": "default", **arms})


ORDER: Final = Figure(
    name="orders",
    title="Orders, all else as by default",
    x="functions",
    y="compliant functions [%]",
    points=_orders,
    metrics=(COMPLIANT, LATE),
    claims=tuple(_of_80(arm) for arm in ("default", *ORDERS)),
)


def _choices(setting: Setting) -> list[Point]:
    change = msgspec.structs.replace
    return _node(
        setting,
        {
            "default": "default",
            "placement torpor": change(DEFAULT, placement="torpor"),
            "placement tangram": change(DEFAULT, placement="tangram"),
            "placement random": change(DEFAULT, placement="random"),
            "no waiting": change(DEFAULT, await_resident=False),
            "eviction torpor": change(DEFAULT, eviction="torpor"),
            "eviction lru": change(DEFAULT, eviction="lru"),
            "eviction tangram": change(DEFAULT, eviction="tangram"),
        },
    )


CHOICES: Final = Figure(
    name="choices",
    title="Placement and eviction, all else as by default",
    x="functions",
    y="compliant functions [%]",
    points=_choices,
    metrics=(COMPLIANT, LATE),
    claims=tuple(_of_80(arm) for arm in ("default", "placement torpor", "eviction torpor", "eviction lru")),
)


def _sharing(setting: Setting) -> list[Point]:
    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        arrivals = trace(setting.trace, kind, setting.minutes())
        return fine_tunes(x, arrivals) if "shared" in arm else node(x, arrivals)

    return points(
        one(setting),
        {"default": "default", "default, shared": "default", "torpor": "torpor", "torpor, shared": "torpor"},
        (560, 640, 720, 800, 960, 1120),
        tree,
        POISSON,
    )


SHARING: Final = Figure(
    name="sharing",
    title="Content sharing: groups of ten fine-tunes",
    x="functions",
    y="compliant functions [%]",
    points=_sharing,
    metrics=(COMPLIANT, LATE, Metric(name="loaded ÷ all bytes", of=lambda result: float(result["loaded"]))),
    claims=tuple(_of_80(arm) for arm in ("default", "default, shared", "torpor", "torpor, shared")),
)


def _bound(setting: Setting) -> list[Point]:
    change = msgspec.structs.replace
    return _node(
        setting,
        {
            "default": "default",
            "none": change(DEFAULT, passed_over_ms=0),
            "share 1": change(DEFAULT, passed_over_share=1.0),
            "1 s, share 1": change(DEFAULT, passed_over_ms=1000, passed_over_share=1.0),
        },
    )


BOUND: Final = Figure(
    name="bound",
    title="The bound on how long a request is passed over",
    x="functions",
    y="compliant functions [%]",
    points=_bound,
    metrics=(COMPLIANT, LATE, SLOWEST),
    claims=(
        Claim(what="longest latency at 720 [ms], default", paper="", ours=at("default", 720, SLOWEST)),
        Claim(what="the same, none", paper="", ours=at("none", 720, SLOWEST)),
        Claim(what="the same, share 1", paper="", ours=at("share 1", 720, SLOWEST)),
    ),
)


def _large(setting: Setting) -> list[Point]:
    """Five minutes; x: requests, in parts of the trace's."""
    functions = 500 if setting.quick else 5000

    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        arrivals = trace(setting.trace, kind, setting.minutes(5), x / 100)
        return {"gpus": gpus(64), "models": in_turn(functions), "arrivals": arrivals}

    return points(one(setting), same("default", "torpor"), (100, 250), tree, ("poisson",), timed=True)


P50_US: Final = Metric(name="decision p50 [µs]", style=".1f", of=lambda result: float(result["p50_us"]))
P99_US: Final = Metric(name="decision p99 [µs]", style=".0f", of=lambda result: float(result["p99_us"]))
BUSY: Final = Metric(name="GPU busy", of=lambda result: float(result["gpu_busy"]))

LARGE: Final = Figure(
    name="64",
    title="64 GPUs and 5,000 functions",
    x="requests [% of the trace's]",
    y="compliant functions [%]",
    points=_large,
    metrics=(COMPLIANT, LATE, BUSY, P50_US, P99_US),
    claims=(
        Claim(what="decision p99 [µs], default, all loads", paper="(wanted: 400)", ours=lambda r, k: _dearest(r, k)),
    ),
)


def _dearest(results: Results, kind: str) -> str:
    return show(max((results.mean(kind, "default", x, P99_US) for x in results.xs(kind)), default=float("nan")), ".0f")


def _band(setting: Setting, what: str, less: float, more: float) -> list[Point]:
    """The node with less and with more of ``what``."""
    setting = one(setting)
    found: list[Point] = []
    for factor in (less, more):

        def tree(arm: str, x: int, kind: str, factor: float = factor) -> dict[str, Any]:
            link, memory = (factor if what == scaled else 1.0 for scaled in ("link", "memory"))
            return node(x, trace(setting.trace, kind, setting.minutes()), link=link, memory=memory)

        arms = {f"{policy}, {factor - 1:+.0%}": policy for policy in ("default", "torpor")}
        found += points(setting, arms, (560, 600, 640), tree, POISSON)
    return found


def _band_figure(name: str, title: str, what: str, less: float, more: float) -> Figure:
    arms = [f"{policy}, {factor - 1:+.0%}" for policy in ("default", "torpor") for factor in (less, more)]
    return Figure(
        name=name,
        title=title,
        x="functions",
        y="compliant functions [%]",
        points=lambda setting: _band(setting, what, less, more),
        metrics=(COMPLIANT, LATE),
        claims=tuple(_of_80(arm) for arm in arms),
    )


BANDS: Final = _band_figure("bands", "A quarter less and more bandwidth from the host", "link", 0.75, 1.25)
MEMORY: Final = _band_figure("memory", "A tenth less and more memory for models", "memory", 0.9, 1.1)


def _busy_cluster(setting: Setting) -> list[Point]:
    """Ten minutes at three times the trace's rates: 30 requests per minute, the most that Torpor §7.3 speaks of."""

    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        return cluster(x, trace(setting.trace, kind, setting.minutes(10), 3.0))

    arms = same("default", "torpor", "simple-swap", "nonswap")
    return points(one(setting), arms, (750, 1000, 1250, 1500), tree, POISSON)


BUSY_CLUSTER: Final = Figure(
    name="14x3",
    title="Six nodes at three times the trace's rates",
    x="functions",
    y="compliant functions [%]",
    points=_busy_cluster,
    metrics=(COMPLIANT, LATE, TAIL, VARIANCE),
    claims=tuple(_of_80(arm) for arm in ("default", "torpor", "simple-swap", "nonswap")),
)

FIGURES: Final = (BUSY_CLUSTER, ORDER, SHARING, BOUND, LARGE, BANDS, MEMORY, CHOICES)
