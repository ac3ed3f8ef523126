"""Choice of the GPU that serves a language model best: pure. A GPU that has the base, the adapter and a warm runtime
comes first by its expected first token (ServerlessLoRA's step 4, Tangram's Algorithm 2), unless others compute there
for too long.

    first token = max(copy of missing bytes, start of a runtime that is not there) + T + steps of others
    later tokens = work * steps of others / own step

T is the time of a prompt, work the computing time of a lease in all. Runtimes take turns, so between two steps are
those of the others, each with the probability that it computes while it has a lease (ServerlessLoRA's Eq. 4, M * T
where all are alike). Missing bytes are those that the executor lacks: beside a base that others have brought, the
adapter alone.
"""

from typing import Final

from dormouse.core.decisions.rules.step_times import step_s
from dormouse.core.decisions.scheduling.functions import Function
from dormouse.core.decisions.scheduling.state import Gpu, Model

LATER: Final = 0.03
"""Weight of a later second for all tokens after the first, beside one until the first: little, for as long as they come
within their time. With ten times as much, runtimes start on one GPU after the other: docs/papers.md.
"""


OWN_PART: Final = 0.1
"""Of a model's bytes, that may be missing though its base is there: its adapter."""


CROWDED: Final = 0.5
"""Part of its tokens' permitted time from which on others' steps make a GPU the second choice: later runtimes there
have theirs, too. docs/papers.md (margins, affinity and batches) has the gain.
"""


def hardship(model: Model, gpu: Gpu, between_s: float) -> int:
    """2: another model's base would have to go for it, or its tokens would be late beside the runtimes that compute
    there, for ``between_s`` each. An evicted base comes again, for as long as both are asked for: such a GPU is chosen
    only if there is no other. 1: tokens come slowly there.
    """
    function = model.function
    each_s = between_s + _step_s(function) if function.tpot_s else 0.0
    missing = model.nbytes - model.resident.get(gpu.number, 0)
    if missing > max(gpu.stats.free_nbytes, OWN_PART * model.nbytes) or each_s > function.tpot_s:
        return 2
    return int(each_s > CROWDED * function.tpot_s)


def first_token_s(model: Model, gpu: Gpu, copy_s: float, between_s: float) -> tuple[float, float]:
    """Time of its first token, if it had a lease there now whose copies take so long; and the delay of its other
    tokens.
    """
    function = model.function
    start_s = 0.0 if warm(model, gpu) else function.start_s
    first_s = max(copy_s, start_s) + (function.best_s or function.hold_s) + between_s
    return first_s, function.work_s * between_s / _step_s(function)


def _step_s(function: Function) -> float:
    return step_s(function.times, 0, 1) if function.times is not None else function.best_s or function.hold_s


def warm(model: Model, gpu: Gpu) -> bool:
    """Whether its runtime has a process there."""
    return model.runtime in gpu.runtimes


def others_s(model: Model, gpu: Gpu) -> float:
    """Steps of other runtimes there, between two of its own."""
    shares: dict[str, tuple[float, float]] = {}
    for running in gpu.leases.values():
        if (name := running.model.runtime) != model.runtime:
            share = shares.get(name, (0.0, 0.0))[0] + running.model.function.busy
            shares[name] = min(1.0, share), _step_s(running.model.function)
    return sum([share * seconds for share, seconds in shares.values()])
