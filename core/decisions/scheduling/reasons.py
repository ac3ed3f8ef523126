"""Explanations of waiting requests and evicted models, in words: pure. Looks at the scheduler's state and changes
nothing; no decision reads it. The explained order is that of the scheduler's present state and expectations.
"""

from bisect import bisect_left
from collections import Counter
from typing import Any, Final

from dormouse.core.decisions.scheduling.functions import LastEviction, LastPreload
from dormouse.core.decisions.scheduling.keeping import EVICTION_CLASSES
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.decisions.scheduling.state import Gpu, Running, Waiting
from dormouse.core.quantities import duration, size

OLDEST: Final = 20
"""Requests that are explained one by one, for a person to read. Others are counted by kind of reason."""


class Reasons:
    """Of all requests that wait at one moment."""

    def __init__(self, scheduler: Scheduler, now_s: float) -> None:
        self._scheduler, self._shares = scheduler, scheduler.shares
        self._now_s = now_s
        self._over_by_s = scheduler.shares.over_by_s(now_s)
        gpus = scheduler.gpus.values()
        self._free = any(gpu.open(scheduler.policy.turns) for gpu in gpus)
        self._next_s = min(
            (running.ends_s for gpu in gpus for running in gpu.turns if running.overdue_s > now_s), default=None
        )
        self._standings = sorted(
            scheduler.standing(waiting, now_s)
            for waiting in scheduler.waiting.values()
            if (waiting.resumes is not None or not (waiting.model.leased or waiting.rationed))
            and waiting.tenant not in self._over_by_s
        )

    def told(self) -> dict[str, Any]:
        """``oldest`` requests with their reasons; how many of the ``others`` wait for each kind of reason."""
        oldest: list[dict[str, Any]] = []
        others: Counter[str] = Counter()
        for waiting in self._scheduler.waiting.values():
            kind, text = self.why(waiting)
            if len(oldest) == OLDEST:
                others[kind] += 1
                continue
            oldest.append(
                {
                    "function": waiting.function.name or waiting.model.instance,
                    "instance": waiting.model.instance,
                    "waited_ms": ms(self._now_s - waiting.arrived_s),
                    "left_ms": ms(waiting.deadline_s - self._now_s),
                    "kind": kind,
                    "reason": text,
                }
            )
        return {"oldest": oldest, "others": dict(others)}

    def why(self, waiting: Waiting) -> tuple[str, str]:
        """The kind of reason, which programs may count, and the text for people."""
        scheduler, now_s = self._scheduler, self._now_s
        gpus, policy = scheduler.gpus, scheduler.policy
        if not gpus:
            drained = ", ".join(map(str, sorted(scheduler.drained)))
            why = f"; GPU {drained} is drained (`dormouse gpu undrain N`)" if drained else ""
            return "no_gpu", f"no GPU's executor is up{why}"
        if (lease := waiting.resumes) is not None:
            return "turn", self._turn(gpus[lease.lease.gpu]) + self._margin(lease)
        if waiting.model.leased:
            return "instance", "its instance serves another request"
        if (number := waiting.model.held_for) is not None and number in gpus:
            running = gpus[number].running
            if running is not None:
                soon = f"in {_duration(running.ends_s - now_s)}" if running.ends_s > now_s else "any moment"
                if running.model is not waiting.model and waiting.model.instance not in gpus[number].resident:
                    others = "all GPUs but one wait for long copies, and its own would be another"
                    return "held", f"{others}; GPU {number} is expected to be free {soon}"
                return "held", f"GPU {number} has its model and is expected to be free {soon}"
        if waiting.rationed:
            most = f"those that need most, as its {size(waiting.model.nbytes)}, wait"
            return "rationed", f"links are too slow for all models: {most}"
        if waiting.tenant in self._over_by_s:
            return "share", self._share(waiting.tenant)
        standing = scheduler.standing(waiting, now_s)
        if policy.passed_over_ms and now_s - waiting.arrived_s >= policy.passed_over_ms / 1000:
            share = f"{policy.passed_over_share:.0%} of the GPUs' time is for those that have, oldest first"
            text = f"{self._busy()}; it has waited for more than {duration(policy.passed_over_ms)}, and {share}"
            return "overdue", text
        if standing[0] > 0.0:
            return "late", "late already: those that can make their deadline come first"
        if waiting.function.group:
            if waiting.function.given_up:
                return "given_up", "links are too slow for all models, and its needs most: those of others come first"
            return "given_up", "too many of its function's requests were late: those of others come first"
        before = bisect_left(self._standings, standing)
        turn = f"{before} {'request comes' if before == 1 else 'requests come'} first" if before else "it comes next"
        return "busy", f"{self._busy()}; {turn}"

    def _share(self, tenant: str) -> str:
        others = {waiting.tenant for waiting in self._scheduler.waiting.values()}
        return (
            f"tenant {tenant} is {_duration(self._over_by_s[tenant])} of a GPU ahead of its share, which is "
            f"{self._shares.share(tenant, others):.0%} beside those who wait: others' requests come first"
        )

    def _turn(self, gpu: Gpu) -> str:
        """Reason why a lease that has a seat does not compute."""
        names = [running.model.function.name or running.instance for running in gpu.turns]
        text = f"it has a seat on GPU {gpu.number} and waits for its turn again"
        if not names:
            return text
        left_s = min((left_s for turn in gpu.turns if (left_s := turn.ends_s - self._now_s) > 0.0), default=0.0)
        more = f" for about {_duration(left_s)} more" if left_s else ""
        if len(names) == 1:
            return f"{text}, which {names[0]} has{more}"
        return f"{text}: {', '.join(names)} have theirs" + (f", the first{more}" if more else "")

    def _margin(self, lease: Running) -> str:
        """Time that its runtime's work may still wait."""
        if (due := lease.due) is None:
            return ""
        what = "a first token" if due.tokens else "its tokens"
        left_ms = ms(self._scheduler.margin_s(lease, self._now_s))
        if left_ms < 0.0:
            return f"; {what} will be {duration(round(-left_ms))} late"
        return f"; {what} can wait {duration(round(left_ms))} more"

    def _busy(self) -> str:
        count = len(self._scheduler.gpus)
        if self._free:
            return "requests before it wait for GPUs that are busy"
        left_s = 0.0 if self._next_s is None else self._next_s - self._now_s
        more = f"for about {_duration(left_s)} more" if left_s > 0.0 else ""
        if count == 1:
            return f"the only GPU is busy {more}".rstrip()
        return f"all {count} GPUs are busy" + (f", the first {more}" if more else "")


def evicted(last: LastEviction | None, eviction: str, now_s: float) -> dict[str, Any] | None:
    """A function's last eviction; ``eviction`` is the policy's."""
    if last is None:
        return None
    return {
        "gpu": last.gpu,
        "ago_s": round(now_s - last.at_s, 3),
        "nbytes": last.nbytes,
        "for": last.function or None,
        "rule": EVICTION_CLASSES[eviction].rule,
    }


def preloaded(last: LastPreload | None, now_s: float) -> dict[str, Any] | None:
    """The last model brought to a GPU before any request for it, and the reason."""
    if last is None:
        return None
    saved = duration(1000 * last.saved_s)
    return {
        "function": last.function,
        "ago_s": round(now_s - last.at_s, 3),
        "nbytes": last.nbytes,
        "copied_nbytes": last.copied_nbytes,
        "outcome": last.outcome or "coming",
        "reason": f"{60 * last.rate_s:.3g} times a minute, somebody would have waited {saved} for it",
    }


def _duration(seconds: float) -> str:
    """Of an expected time: to a millisecond."""
    return duration(round(1000 * seconds))


def ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
