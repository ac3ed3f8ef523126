"""Tangram's Fig. 9, as ``benchmarks.papers`` makes it: what reuse brings while KV is reserved for the longest
sequences, and what it brings when KV has what it needs. Its parameters are those of Fig. 12a.
"""

from collections.abc import Callable
from typing import Any, Final

from benchmarks.papers_figures import Claim, Figure, Point, Results, Setting, points, show
from benchmarks.papers_parameters import L40_NBYTES, LOCALITY, MAX_TOKENS, MEAN_TOKENS, decodes_s, workers
from benchmarks.papers_tangram import BATCHES, LOADED, TANGRAM
from dormouse.schemas.policy import Policy

ARMS: Final[dict[str, Policy | str]] = {"SLLM": "sllm", "+Reuse": TANGRAM, "+ODKV": TANGRAM}


def _points(setting: Setting) -> list[Point]:
    minutes = setting.minutes(500)

    def tree(arm: str, x: int, kind: str) -> dict[str, Any]:
        tokens = MEAN_TOKENS if arm == "+ODKV" else MAX_TOKENS
        return workers(1, L40_NBYTES, x, per_s=0.04, minutes=minutes, tokens=tokens)

    return points(setting, ARMS, BATCHES, tree, ("L3",), locality=LOCALITY["L3"], decodes_s=decodes_s())


def _less(arm: str, batch: int, than: str) -> Callable[[Results, str], str]:
    """How many times fewer bytes an arm loads than another one, or ("") than all bytes of all requests' models."""

    def shown(results: Results, kind: str) -> str:
        ours = results.mean(kind, arm, batch, LOADED)
        theirs = results.mean(kind, than, batch, LOADED) if than else 1.0
        return show(theirs / ours if ours else float("nan"), ".2f")

    return shown


FIG_9: Final = Figure(
    name="t9",
    title="Tangram Fig. 9: loading with KV reserved and on demand, one GPU of 45 GB, L3",
    x="batch size",
    y="loaded [% of all bytes]",
    points=_points,
    metrics=(LOADED,),
    claims=tuple(
        Claim(what=f"batch {batch}, {arm}, times less loaded than {name}", paper=paper, ours=_less(arm, batch, than))
        for batch, arm, name, than, paper in (
            (1, "+Reuse", "by our SLLM", "SLLM", "2.3 to 7.6 times faster, by model"),
            (1, "+Reuse", "if all is loaded each time", "", ""),
            (16, "+ODKV", "by +Reuse", "+Reuse", "1.16 to 2.6 times faster “as batch size grows”"),
            (64, "+ODKV", "by +Reuse", "+Reuse", "the same"),
            (16, "+ODKV", "by our SLLM", "SLLM", "1.9 to 4 times faster"),
            (16, "+ODKV", "if all is loaded each time", "", ""),
            (64, "+ODKV", "if all is loaded each time", "", ""),
        )
    ),
)

FIGURES: Final = (FIG_9,)
