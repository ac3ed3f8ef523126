"""The figures of Torpor (SoCC'25) at a node and in a cluster, for ``benchmarks.papers``; parameters are
papers_parameters.py's.
"""

from collections.abc import Mapping
from typing import Any, Final

from benchmarks.papers_figures import (
    COMPLIANT,
    HOST,
    INFINITY,
    LATE,
    Claim,
    Figure,
    Metric,
    Point,
    Results,
    Setting,
    at,
    beside_exact,
    load_variance,
    number,
    of_80,
    one,
    points,
    same,
    saturation,
    show,
)
from benchmarks.papers_parameters import NATIVE_MINUTES, cluster, native, node, trace

ABLATIONS: Final = ("torpor-fifo", "torpor-random", "torpor-lru", "torpor-block")
VARIANTS: Final = ("torpor-edf", "torpor-drop")
"""With an order of deadlines inside RRC's groups, of which the paper names none; and with the prototype's drop."""

FINE: Final = (160, 320, 480, 520, 560, 600, 640, 680, 720)
COARSE: Final = (320, 480, 560, 640)
"""Functions: up to where hardly one complies; the ablations at some of them."""

EXECUTED: Final = number("executed", "functions that were executed", ".1f")


# --- Figs. 10 and 11


def _against_native(setting: Setting) -> list[Point]:
    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        made = node(x, trace(setting.trace, kind, setting.minutes(NATIVE_MINUTES)))
        return native(made) if arm in ("native", "infless-ka", "infless-oracle") else made

    arms = same("default", "torpor", "native", "infless-ka", "infless-oracle")
    return points(setting, arms, (40, 80, 120, 160), tree)


def _of_160(results: Results, kind: str, arm: str) -> str:
    share = results.mean(kind, arm, 160, COMPLIANT)
    return f"{share * 160:.1f} of {show(results.mean(kind, arm, 160, EXECUTED), '.1f')}"


FIG_10: Final = Figure(
    name="10",
    title="Torpor Fig. 10: against Native and INFless-KA at a node",
    x="functions",
    y="compliant functions [%]",
    points=_against_native,
    metrics=(COMPLIANT, LATE, EXECUTED),
    claims=tuple(
        Claim(
            what=f"160 functions, {arm}: compliant of executed",
            paper=paper,
            ours=lambda results, kind, arm=arm: _of_160(results, kind, arm),  # type: ignore[misc]
        )
        for arm, paper in (
            ("default", ""),
            ("torpor", "160 of 160"),
            ("native", "(not in the text) of 72"),
            ("infless-ka", "7 of 112"),
            ("infless-oracle", "7 of 112"),
        )
    ),
)


def _ablations(setting: Setting) -> list[Point]:
    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        return node(x, trace(setting.trace, kind, setting.minutes()))

    full = points(setting, same("default", "torpor"), FINE, tree)
    return full + points(setting, same(*ABLATIONS, *VARIANTS), COARSE, tree)


def _beaten(results: Results, kind: str) -> str:
    """Where the full policy is below an ablation, by how much."""
    found = []
    for arm in ABLATIONS:
        for x in results.xs(kind, arm):
            below = results.mean(kind, arm, x, COMPLIANT) - results.mean(kind, "torpor", x, COMPLIANT)
            if below > 0.0005:
                found.append(f"{arm} +{below * 100:.1f} points at {x:g}")
    return ", ".join(found) or "nowhere"


def _ratio(results: Results, kind: str) -> str:
    return f"{saturation(results, kind, 'default') / saturation(results, kind, 'torpor'):.3f}"


def worse(results: Results, kind: str, arm: str = "default", than: str = "torpor") -> list[tuple[float, float]]:
    """Numbers of functions at which the mean of an arm is below another's, and by how much."""
    both = [
        (x, results.mean(kind, arm, x, COMPLIANT) - results.mean(kind, than, x, COMPLIANT)) for x in results.xs(kind)
    ]
    return [(x, -more) for x, more in both if more < 0]


def _worse(results: Results, kind: str) -> str:
    return ", ".join(f"{x:g}: {less * 100:.2f} points" for x, less in worse(results, kind)) or "nowhere"


FIG_11: Final = Figure(
    name="11",
    title="Torpor Fig. 11: the policies at a node",
    x="functions",
    y="compliant functions [%]",
    points=_ablations,
    metrics=(COMPLIANT, LATE),
    claims=(
        Claim(what="560 functions, Torpor", paper="over 80 %", ours=at("torpor", 560, COMPLIANT)),
        Claim(what="the same, by deadlines inside its groups", paper="", ours=at("torpor-edf", 560, COMPLIANT)),
        Claim(what="the same, with the prototype's drop", paper="", ours=at("torpor-drop", 560, COMPLIANT)),
        Claim(what="560 functions, default policy", paper="", ours=at("default", 560, COMPLIANT)),
        Claim(what="where Torpor is below one of its ablations", paper="nowhere", ours=_beaten),
        Claim(
            what="functions of which 80 % comply, Torpor",
            paper="over 560",
            ours=of_80("torpor"),
        ),
        Claim(
            what="the same, default policy",
            paper="",
            ours=of_80("default"),
        ),
        Claim(what="default ÷ Torpor", paper="(wanted: 1.15)", ours=_ratio),
        Claim(what="where the default is below Torpor", paper="(wanted: nowhere)", ours=_worse),
    ),
)


def _exact(setting: Setting) -> list[Point]:
    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        return node(x, trace(setting.trace, kind, setting.minutes(10)))

    return beside_exact(setting, ("default", "torpor"), (560, 600, 640, 720), tree)


FIG_11_EXACT: Final = Figure(
    name="exact",
    title="Fig. 11 with exact pools, ten minutes",
    x="functions",
    y="compliant functions [%]",
    points=_exact,
    metrics=(COMPLIANT, LATE, HOST),
)


# --- Fig. 14


def _cluster(setting: Setting) -> list[Point]:
    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        made = cluster(x, trace(setting.trace, kind, setting.minutes()))
        return native(made) if arm == "native" else made

    arms = same("default", "torpor", "simple-swap", "nonswap", "native")
    return points(one(setting), arms, (250, 500, 750, 1000, 1250), tree)


FIG_14A: Final = Figure(
    name="14a",
    title="Torpor Fig. 14a: six nodes",
    x="functions",
    y="compliant functions [%]",
    points=_cluster,
    metrics=(COMPLIANT, LATE, EXECUTED),
    claims=(
        Claim(what="1,000 functions, Torpor", paper="(nearly) all", ours=at("torpor", 1000, COMPLIANT)),
        Claim(what="1,250 functions, Torpor", paper="(nearly) all", ours=at("torpor", 1250, COMPLIANT)),
        Claim(what="1,250 functions, default policy", paper="", ours=at("default", 1250, COMPLIANT)),
        Claim(what="executed by Native, of 1,250", paper="up to 500", ours=at("native", 1250, EXECUTED)),
        Claim(
            what="1,000 functions, SimpleSwap", paper="“severe SLO violations”", ours=at("simple-swap", 1000, COMPLIANT)
        ),
    ),
)


def quantile(index: int, name: str) -> Metric:
    def value(result: Mapping[str, Any]) -> float:
        found = result["box"][index]
        return INFINITY if found is None else float(found)

    return Metric(name=name, style=".2f", of=value)


TAIL: Final = quantile(-1, "127/128 quantile of latency ÷ deadline")
MEDIAN: Final = quantile(6, "median of latency ÷ deadline")
VARIANCE: Final = Metric(name="variance of GPU loads", style=".4f", of=load_variance)


def _thousand(setting: Setting) -> list[Point]:
    return [point for point in _cluster(setting) if point.x == 1000 or setting.quick]


FIG_14B: Final = Figure(
    name="14b",
    title="Torpor Fig. 14b: 1,000 functions on six nodes",
    x="functions",
    points=_thousand,
    metrics=(MEDIAN, TAIL, VARIANCE),
    claims=(
        Claim(what="Torpor, latency ÷ deadline, 127/128", paper="below 1", ours=at("torpor", 1000, TAIL)),
        Claim(what="SimpleSwap", paper="over 4", ours=at("simple-swap", 1000, TAIL)),
        Claim(what="NonSwap", paper="over 7", ours=at("nonswap", 1000, TAIL)),
        Claim(what="variance of load, Torpor", paper="“much less” than NonSwap's", ours=at("torpor", 1000, VARIANCE)),
        Claim(what="variance of load, NonSwap", paper="", ours=at("nonswap", 1000, VARIANCE)),
    ),
)

FIGURES: Final = (FIG_11, FIG_11_EXACT, FIG_10, FIG_14A, FIG_14B)
