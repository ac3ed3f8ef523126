"""Translation of the node's configuration and of deployed functions for the scheduling core, and the failure if a
function cannot be kept: pure.
"""

from typing import Final

from dormouse.core.config import NodeConfig, parse_nbytes
from dormouse.core.decisions.rules.step_times import first_token_s
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.functions import USUAL_PROMPT
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.decisions.scheduling.topology import HOST_BPS, Topology
from dormouse.core.quantities import duration, size
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import Policy, changed

ALL: Final = 0.9999
"""The share that stands for 100 % of requests in time: a required request count needs some that may be late."""


def service_level(
    spec: m.FunctionSpec,
    times: m.StepTimes | None = None,
    pinned: bool = False,
    batch_times: tuple[tuple[int, float], ...] = (),
) -> ev.FunctionKnown:
    """The deadline of a language model is that of its first token. ``times`` of its steps, ``batch_times`` of batches,
    if they are known.
    """
    llm, share = spec.llm, min(spec.percentile / 100, ALL)
    deadline_ms, tpot_ms, base = (spec.deadline_ms, 0, "") if llm is None else (llm.ttft_ms, llm.tpot_ms, llm.base)
    deadline_s, tpot_s = deadline_ms / 1000, tpot_ms / 1000
    known = batch_times if spec.batch else ()
    level = spec.name, deadline_s, share, 1.0, spec.tenant, base, tpot_s, times
    return ev.FunctionKnown(*level, pinned=pinned, batch_times=known)


def deadline_warning(scheduler: Scheduler, spec: m.FunctionSpec, instance: str) -> str:
    """That its deadline cannot be met by a node that has nothing else to do, as far as is known; "" if it may be."""
    wanted_ms, what = (spec.deadline_ms, "an answer") if spec.llm is None else (spec.llm.ttft_ms, "a first token")
    if spec.timeout_ms < wanted_ms:
        text = f"a request ends after {duration(spec.timeout_ms)} (timeout), before it is late"
        return f"{what} is wanted within {duration(wanted_ms)}, but {text}; a number without a unit is milliseconds"
    model = scheduler.models.get(instance)
    if model is None:
        return ""
    same = [scheduler.functions.get(name) for name in (spec.name, "" if spec.llm is None else spec.llm.base)]
    times = next((known.times for known in same if known is not None and known.times is not None), None)
    if spec.llm is not None and times is not None:
        first_ms = 1e3 * first_token_s(times, USUAL_PROMPT, 0)
        if first_ms > wanted_ms:
            takes = f"takes {duration(round(first_ms))} on this node with nobody else there"
            text = f"a prompt of {USUAL_PROMPT} tokens {takes}"
            return f"{what} is wanted within {duration(wanted_ms)}, which cannot be: {text}"
    copy_ms = 1e3 * model.nbytes / scheduler.bandwidths.host_bps
    if copy_ms > wanted_ms:
        text = f"to bring its {size(model.nbytes)} to a GPU takes {duration(round(copy_ms))}"
        return f"{what} is wanted within {duration(wanted_ms)}, which cannot be when the model sleeps: {text}"
    return ""


def deadlines(requests: list[tuple[int, int]], now_s: float) -> tuple[tuple[int, float], ...]:
    """Of requests that have so long from now."""
    return tuple((ticket, now_s + left_ms / 1000) for ticket, left_ms in requests)


def wanted_batch(asked: m.BatchAsk | None, now_s: float) -> ev.BatchWanted | None:
    if asked is None:
        return None
    return ev.BatchWanted(deadlines(asked.requests, now_s), asked.most, asked.wait_ms / 1000)


def known_instance(up: m.InstanceUp) -> ev.InstanceKnown:
    return ev.InstanceKnown(up.instance, up.function, up.tenant, up.runtime)


def topology_of(config: NodeConfig) -> Topology:
    """The links of emulated GPUs as they are configured; of others, what a first guess is."""

    def bps(text: str) -> float:
        return float(parse_nbytes(text)) if text else 0.0

    gpu, count = config.gpu, config.gpu_count
    peer = bps(gpu.peer)
    return Topology(
        host_bps=bps(gpu.link) or HOST_BPS,
        switch_bps=bps(gpu.switch),
        switches=tuple(number // 2 for number in range(count)) if gpu.switch else (),
        peer_bps=tuple(tuple(peer if a != b else 0.0 for b in range(count)) for a in range(count)) if peer else (),
    )


def damaged(text: str) -> m.Failure:
    """``text``: the store's finding."""
    said = f"the function's stored model is damaged and is made anew by another load(); retry later ({text})"
    return m.Failure(code="model_damaged", status=503, text=said, retryable=True)


def displaced() -> m.Failure:
    text = "no host memory: a deployed model needed what this one had begun to fill; deploy again, or raise limits.host"
    return m.Failure(code="load_failed", status=422, text=text)


def not_kept(text: str, what: str = "the function was not deployed") -> m.Failure:
    """``text``: why the catalogue does not have the new version, or what else was not done."""
    return m.Failure(code="not_kept", status=507, text=f"{what}: {text}", retryable=True)


def asked_policy(policy: Policy, asked: m.AskPolicy) -> tuple[Policy, m.Failure | None]:
    """The policy with these changes; or as it is, and why."""
    try:
        return changed(policy, asked.changes), None
    except ConfigError as error:
        return policy, m.Failure(code="bad_request", status=400, text=str(error))
