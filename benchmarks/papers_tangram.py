"""The figures of Tangram that ``benchmarks.papers`` makes. What each run has is benchmarks/papers_parameters.py's."""

from typing import Any, Final

import msgspec

from benchmarks.papers_figures import Claim, Figure, Metric, Point, Results, Setting, number, points, show
from benchmarks.papers_parameters import L40_NBYTES, LOCALITY, RTX4090_NBYTES, decodes_s, workers
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


def _locality(setting: Setting) -> list[Point]:
    """One GPU, asked so seldom that no request waits for long: how much is loaded does not depend on that."""
    minutes = setting.minutes(500)
    found: list[Point] = []
    for name, locality in LOCALITY.items():

        def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
            return workers(1, L40_NBYTES, x, 0.04, minutes)

        arms = {arm: policy for arm, policy in ARMS.items() if arm != "reuse, random"}  # there is one GPU
        found += points(setting, arms, BATCHES, tree, (name,), locality=locality)
    return found


def _against_none(results: Results, kind: str, batch: int, arm: str) -> str:
    """Bytes against those of SLLM, which loads nothing for a model that was the last."""
    return show(results.mean(kind, arm, batch, LOADED) / results.mean(kind, "neither", batch, LOADED), ".2f")


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

FIGURES: Final = (FIG_13, FIG_12A)
