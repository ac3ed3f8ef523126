"""The figures of Tangram that ``benchmarks.papers`` makes. What each run has is benchmarks/papers_parameters.py's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from benchmarks.papers_figures import INFINITY, Claim, Figure, Metric, Point, Results, Setting, number, points, show
from benchmarks.papers_parameters import (
    GB,
    L40_NBYTES,
    LLM_BPS,
    LOCALITY,
    MAX_TOKENS,
    MEAN_TOKENS,
    OTHER_MS,
    RTX4090_NBYTES,
    decodes_s,
    pool_of,
    workers,
)
from benchmarks.pool_models import Model, language_models
from dormouse.schemas.policy import DEFAULT, Policy

TANGRAM: Final = Policy(order="fifo", placement="tangram", eviction="tangram", passed_over_ms=0)

ARMS: Final[dict[str, Policy | str]] = {
    "default": "default",
    "default, fifo": msgspec.structs.replace(DEFAULT, order="fifo"),
    "default, no waiting": msgspec.structs.replace(DEFAULT, order="fifo", await_resident=False),
    "reuse, affinity": TANGRAM,
    "reuse, random": msgspec.structs.replace(TANGRAM, placement="random"),
    "neither": "sllm",
}
"""A node's settings; with another order, because nothing here has a deadline; and where nobody waits for a busy GPU
that has the model. Then Tangram, the same with random placement, and SLLM-CM, which keeps only the last model of a GPU.
"""

RATES: Final = {"0.4 per second": 0.4, "1.6 per second": 1.6}

BATCHES: Final = (1, 4, 16, 64)
"""Assumption: the text names the largest only."""

POOLS: Final = (50, 65, 130, 200, 260)
"""Gigabytes of all models. Assumption: the text names "over 200 GB" only."""

FIRST: Final = number("first_p99_ms", "p99 of the time to the first token [s]", ",.2f", 1000.0)
LOADED: Final = Metric(name="loaded ÷ all bytes of the models", of=lambda result: float(result["loaded"]))


def _gpus(setting: Setting) -> list[Point]:
    minutes = setting.minutes(60)

    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        return workers(x, RTX4090_NBYTES, 1, RATES[kind], minutes)

    return points(setting, ARMS, (1, 2, 3, 4, 6, 8), tree, tuple(RATES), locality=LOCALITY["L3"], decodes_s=decodes_s())


def _less(results: Results, kind: str, arm: str, xs: tuple[int, ...]) -> str:
    """How much less than without reuse, at each number of GPUs."""
    found = []
    for x in xs:
        neither = results.mean(kind, "neither", x, FIRST)
        found.append(show(1 - results.mean(kind, arm, x, FIRST) / neither, ".0%"))
    return " / ".join(found)


def _plateau(results: Results, kind: str, arm: str) -> str:
    """What 8 GPUs have of the latency of 4."""
    return show(results.mean(kind, arm, 8, FIRST) / results.mean(kind, arm, 4, FIRST), ".2f")


FIG_13: Final = Figure(
    name="t13",
    title="Tangram Fig. 13: time to the first token against the number of GPUs",
    x="GPUs",
    y="p99 of the time to the first token [s]",
    log=True,
    points=_gpus,
    metrics=(FIRST, LOADED),
    claims=(
        Claim(
            what="reuse + affinity, less than neither, 4 / 6 / 8 GPUs",
            paper="8 to 54 % at 1.6 per second “with more GPUs”",
            ours=lambda results, kind: _less(results, kind, "reuse, affinity", (4, 6, 8)),
        ),
        Claim(
            what="the same, 1 / 2 / 3 GPUs",
            paper="“noticeable” at 0.4 per second; at 1.6 both “converge”",
            ours=lambda results, kind: _less(results, kind, "reuse, affinity", (1, 2, 3)),
        ),
        Claim(
            what="default policy, less than neither, 4 / 6 / 8 GPUs",
            paper="",
            ours=lambda results, kind: _less(results, kind, "default", (4, 6, 8)),
        ),
        Claim(
            what="8 GPUs ÷ 4 GPUs, reuse + affinity",
            paper="1 (plateau) at 0.4 per second",
            ours=lambda results, kind: _plateau(results, kind, "reuse, affinity"),
        ),
        Claim(
            what="8 GPUs ÷ 4 GPUs, neither",
            paper="1 (plateau) at 0.4 per second",
            ours=lambda results, kind: _plateau(results, kind, "neither"),
        ),
    ),
)


def _alone(setting: Setting, xs: Sequence[int], name: str, locality: str, **given: Any) -> list[Point]:
    """One GPU, asked so seldom that no request waits for long: how much is loaded does not depend on that. ``given`` to
    `workers`, or computed for it from ``x``.
    """
    minutes = setting.minutes(500)

    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        said = {key: value(x) if callable(value) else value for key, value in given.items()}
        return workers(1, L40_NBYTES, per_s=0.04, minutes=minutes, **said)

    arms = {arm: policy for arm, policy in ARMS.items() if arm != "reuse, random"}  # there is one GPU
    more = {"locality": LOCALITY[locality], "decodes_s": decodes_s()}
    return points(setting, arms, xs, tree, (name,), **more)


def _locality(setting: Setting) -> list[Point]:
    found: list[Point] = []
    for length, tokens in (("", MEAN_TOKENS), (", longest", MAX_TOKENS)):
        for name in LOCALITY:
            found += _alone(setting, BATCHES, name + length, name, batch=int, tokens=tokens)
    return found


def _pools(setting: Setting) -> list[Point]:
    found: list[Point] = []
    for name in ("L1", "L2", "L4"):
        found += _alone(setting, POOLS, name, name, batch=16, pool=lambda x: pool_of(x * GB))
    return found


def _overall(setting: Setting) -> list[Point]:
    return _alone(setting, (16,), "L3", "L3", batch=int)


def _against_none(results: Results, kind: str, batch: int, arm: str) -> str:
    """Bytes against those of SLLM, which loads nothing for a model that was the last."""
    ours, theirs = (results.mean(kind, name, batch, LOADED) for name in (arm, "neither"))
    return show(ours / theirs if theirs else float("nan"), ".2f")


FIG_12A: Final = Figure(
    name="t12a",
    title="Tangram Fig. 12a: locality and batch size on one GPU of 45 GB",
    x="batch size",
    y="loaded [% of all bytes]",
    points=_locality,
    metrics=(LOADED,),
    claims=(
        Claim(
            what="batch 64, loaded ÷ SLLM's, Tangram",
            paper="1 at L1, more reuse at L2 to L4",
            ours=lambda results, kind: _against_none(results, kind, 64, "reuse, affinity"),
        ),
        Claim(
            what="batch 1, the same",
            paper="less than at 64, the less the higher the locality",
            ours=lambda results, kind: _against_none(results, kind, 1, "reuse, affinity"),
        ),
        Claim(
            what="batch 64, default policy",
            paper="",
            ours=lambda results, kind: _against_none(results, kind, 64, "default"),
        ),
    ),
)

FIG_12B: Final = Figure(
    name="t12b",
    title="Tangram Fig. 12b: models of more and more bytes on one GPU of 45 GB, batches of 16",
    x="GB of all models",
    y="loaded [% of all bytes]",
    points=_pools,
    metrics=(LOADED,),
    claims=(
        Claim(
            what="260 GB of models, loaded ÷ SLLM's, Tangram",
            paper="0.23 to 0.56 beyond 200 GB",
            ours=lambda results, kind: _against_none(results, kind, 260, "reuse, affinity"),
        ),
        Claim(
            what="50 GB of models, the same",
            paper="less: load latency rises, then is stable",
            ours=lambda results, kind: _against_none(results, kind, 50, "reuse, affinity"),
        ),
        Claim(
            what="260 GB of models, default policy",
            paper="",
            ours=lambda results, kind: _against_none(results, kind, 260, "default"),
        ),
    ),
)


# --- Fig. 8


def _first(model: Model) -> Metric:
    def value(result: Mapping[str, Any]) -> float:
        found = result["models"].get(model.name, {}).get("first_mean_ms")
        return INFINITY if found is None else float(found) / 1000

    return Metric(name=f"{model.name}: mean time to the first token [s]", style=".2f", of=value)


def _range(results: Results, kind: str, arm: str, of: Callable[[float, float, Model], float], style: str) -> str:
    """Least and most over the models of a number made of its arm's and SLLM's time to the first token."""
    found = []
    for model in language_models():
        ours, theirs = (results.mean(kind, name, 16, _first(model)) for name in (arm, "neither"))
        found.append(of(ours, theirs, model))
    return f"{show(min(found), style)} to {show(max(found), style)}"


def _faster(ours_s: float, theirs_s: float, model: Model) -> float:
    """Loading. What is not loading is taken to be the same; who waits for nothing is still to be set going."""
    return (theirs_s - OTHER_MS / 1000) / max(ours_s - OTHER_MS / 1000, 0.01 * model.nbytes / LLM_BPS)


def _saved(ours_s: float, theirs_s: float, model: Model) -> float:
    return 1 - ours_s / theirs_s


FIG_8: Final = Figure(
    name="t8",
    title="Tangram Fig. 8: mean time to the first token by model, one GPU of 45 GB, L3",
    x="batch size",
    points=_overall,
    metrics=tuple(_first(model) for model in language_models()),
    claims=tuple(
        Claim(
            what=f"{what}, over the models, {arm}",
            paper=paper if arm == "reuse, affinity" else "",
            ours=lambda results, kind, arm=arm, of=of, style=style: _range(results, kind, arm, of, style),  # type: ignore[misc]
        )
        for arm in ("reuse, affinity", "default")
        for what, paper, of, style in (
            ("loading, times faster than SLLM", "1.8 to 6.2", _faster, ".1f"),
            ("less time to the first token than SLLM", "14 to 60 %", _saved, ".0%"),
        )
    ),
)

FIGURES: Final = (FIG_13, FIG_12A, FIG_12B, FIG_8)
