"""What ``benchmarks.papers`` shows beyond the papers: orders, content sharing, the bound on waiting, a node of 64 GPUs,
and how much of it all the assumed bandwidth makes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from benchmarks.papers_figures import (
    COMPLIANT,
    Claim,
    Figure,
    Metric,
    Point,
    Results,
    Setting,
    at,
    number,
    of_80,
    points,
    same,
    show,
)
from benchmarks.papers_parameters import cluster, fine_tunes, gpus, in_turn, node, trace
from benchmarks.papers_torpor import TAIL, VARIANCE
from dormouse.schemas.policy import DEFAULT, Policy

LOADS: Final = (560, 640, 720)

FEW: Final = 3
"""Seeds at most: these are about differences that no chance makes."""

ORDERS: Final = ("fifo", "edf", "feasible", "rrc", "rrc-latency")

SLOWEST: Final = number("max_ms", "longest latency [ms]", ",.0f")


def few(setting: Setting) -> Setting:
    return dataclasses.replace(setting, seeds=min(FEW, setting.seeds))


def _of_80(arm: str) -> Claim:
    return Claim(
        what=f"functions of which 80 % comply, {arm}",
        paper="",
        ours=of_80(arm),
    )


def _node(setting: Setting, arms: Mapping[str, Policy | str]) -> list[Point]:
    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        return node(x, trace(setting.trace, kind, setting.minutes()))

    return points(few(setting), arms, LOADS, tree)


def _orders(setting: Setting) -> list[Point]:
    arms: dict[str, Policy | str] = {order: msgspec.structs.replace(DEFAULT, order=order) for order in ORDERS}
    return _node(setting, {"default": "default", **arms})


ORDER: Final = Figure(
    name="orders",
    title="Orders, all else as by default",
    x="functions",
    y="compliant functions [%]",
    points=_orders,
    metrics=(COMPLIANT,),
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
    metrics=(COMPLIANT,),
    claims=tuple(_of_80(arm) for arm in ("default", "placement torpor", "eviction torpor", "eviction lru")),
)


def _sharing(setting: Setting) -> list[Point]:
    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        arrivals = trace(setting.trace, kind, setting.minutes())
        return fine_tunes(x, arrivals) if "shared" in arm else node(x, arrivals)

    return points(
        few(setting),
        {"default": "default", "default, shared": "default", "torpor": "torpor", "torpor, shared": "torpor"},
        (560, 640, 720, 800, 960, 1120),
        tree,
    )


SHARING: Final = Figure(
    name="sharing",
    title="Content sharing: groups of ten fine-tunes",
    x="functions",
    y="compliant functions [%]",
    points=_sharing,
    metrics=(COMPLIANT, Metric(name="loaded ÷ all bytes", of=lambda result: float(result["loaded"]))),
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
    metrics=(COMPLIANT, SLOWEST),
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

    return points(few(setting), same("default", "torpor"), (100, 250), tree, ("poisson",), timed=True)


P50_US: Final = Metric(name="decision p50 [µs]", style=".1f", of=lambda result: float(result["p50_us"]))
P99_US: Final = Metric(name="decision p99 [µs]", style=".0f", of=lambda result: float(result["p99_us"]))
BUSY: Final = Metric(name="GPU busy", of=lambda result: float(result["gpu_busy"]))

LARGE: Final = Figure(
    name="64",
    title="64 GPUs and 5,000 functions",
    x="requests [% of the trace's]",
    y="compliant functions [%]",
    points=_large,
    metrics=(COMPLIANT, BUSY, P50_US, P99_US),
    claims=(
        Claim(what="decision p99 [µs], default, all loads", paper="(wanted: 400)", ours=lambda r, k: _dearest(r, k)),
    ),
)


def _dearest(results: Results, kind: str) -> str:
    return show(max((results.mean(kind, "default", x, P99_US) for x in results.xs(kind)), default=float("nan")), ".0f")


def _bands(setting: Setting) -> list[Point]:
    """A quarter less and more from the host; at most three seeds."""
    setting = few(setting)
    found: list[Point] = []
    for link, name in ((0.75, "-25 %"), (1.25, "+25 %")):

        def tree(arm: str, x: int, kind: str, link: float = link) -> dict[str, Any]:
            return node(x, trace(setting.trace, kind, setting.minutes()), link=link)

        arms = {f"{policy}, {name}": policy for policy in ("default", "torpor")}
        found += points(setting, arms, (480, 560, 600, 640, 680, 720), tree)
    return found


def _busy_cluster(setting: Setting) -> list[Point]:
    """Ten minutes at three times the trace's rates: 30 requests per minute, the most that Torpor §7.3 speaks of."""

    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        return cluster(x, trace(setting.trace, kind, setting.minutes(10), 3.0))

    arms = same("default", "torpor", "simple-swap", "nonswap")
    return points(few(setting), arms, (750, 1000, 1250, 1500), tree)


BUSY_CLUSTER: Final = Figure(
    name="14x3",
    title="Six nodes at three times the trace's rates",
    x="functions",
    y="compliant functions [%]",
    points=_busy_cluster,
    metrics=(COMPLIANT, TAIL, VARIANCE),
    claims=tuple(_of_80(arm) for arm in ("default", "torpor", "simple-swap", "nonswap")),
)

BANDS: Final = Figure(
    name="bands",
    title="A quarter less and more bandwidth from the host",
    x="functions",
    y="compliant functions [%]",
    points=_bands,
    metrics=(COMPLIANT,),
    claims=tuple(_of_80(f"{arm}, {name}") for arm in ("default", "torpor") for name in ("-25 %", "+25 %")),
)

FIGURES: Final = (BUSY_CLUSTER, ORDER, SHARING, BOUND, LARGE, BANDS, CHOICES)
