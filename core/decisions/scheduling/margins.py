"""Choice of the language model runtime that has the next turn on a GPU, of those that want one: pure. A turn is a step.

    margin = deadline - (now + wake + T)   of the prompt that is to have its first token soonest
           = last turn + tpot - (now + T)  where all sequences have theirs, and T is a step

T is the learned time of the runtime's steps (rules/step_times.py), wake the copies of the bytes that have left the GPU
with its seat. Tokens whose model has to be copied first are late anyway, but not late for good: their margin is without
that, or runtimes that have no room beside each other would come before all prompts. The wait of a prompt is in its
deadline, which counts from its arrival; the turns of others are the decision made here. Prompts go first, the least
margin before others (ServerlessLoRA's Eq. 5, with its waits by tokens): a late first token is late for good. But a
runtime without any goes first if that turn would make its tokens late, and its margin is the smaller part of its wanted
time.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from dormouse.core.decisions.rules.step_times import first_token_s, step_s
from dormouse.core.decisions.scheduling.functions import Function
from dormouse.core.decisions.scheduling.state import DueSteps, Gpu, Running
from dormouse.schemas.messages import StepsDue

UNKNOWN_TPOT_S: Final = 0.1
"""Wanted time of a token where none was given."""

WakeTime = Callable[[Running], float]
"""Seconds of copies until a lease has all of its model again."""


def due_of(gpu: Gpu, own: Running, told: StepsDue, now_s: float) -> DueSteps:
    """Reported work of a runtime, with the deadlines of the functions whose prompts it has."""
    function = own.model.function
    tokens, first = 0, (float("inf"), function.deadline_s)
    for prompts in told.prompts:
        lease = gpu.leases.get(prompts.serial)
        whose = function if lease is None else lease.model.function
        tokens += prompts.tokens
        first = min(first, (now_s - prompts.waited_us / 1e6 + whose.deadline_s, whose.deadline_s))
    return DueSteps(now_s, first[0], first[1], tokens, told.decoding, tpot_of(gpu, own))


def tpot_of(gpu: Gpu, own: Running) -> float:
    """The least time wanted of a token, over those who get tokens from its runtime."""
    runtime, least_s = own.model.runtime, own.model.function.tpot_s
    for lease in gpu.leases.values():
        if lease is not own and lease.model.runtime == runtime != "":
            tpot_s = lease.model.function.tpot_s
            least_s = min(least_s, tpot_s) if least_s and tpot_s else least_s or tpot_s
    return least_s or UNKNOWN_TPOT_S


def turn_s(running: Running) -> float:
    """Expected time of its next step."""
    due, function = running.due, running.model.function
    return function.best_s if due is None else turn_of(function, due.tokens, due.decoding)


def turn_of(function: Function, tokens: int, decoding: int) -> float:
    """The same of a step with so many tokens of prompts and of others."""
    return function.best_s if function.times is None else step_s(function.times, tokens, decoding)


def margin_s(running: Running, now_s: float, wake_s: WakeTime) -> float:
    """See the module."""
    due = running.due
    assert due is not None
    if not due.tokens:
        return due.told_s + due.tpot_s - now_s - turn_s(running)
    return due.first_s - now_s - wake_s(running) - _first_token_s(running.model.function, due)


def _first_token_s(function: Function, due: DueSteps) -> float:
    return function.best_s if function.times is None else first_token_s(function.times, due.tokens, due.decoding)


def wanting(gpu: Gpu) -> list[Running]:
    """Leases of runtimes that want a turn there."""
    return [each for each in gpu.leases.values() if each.due is not None and each.waiting.live]


def by_margin(runtimes: Sequence[Running], now_s: float, wake_s: WakeTime) -> tuple[Running, str, float]:
    """The one that has the next turn, why, and its margin."""
    prompts = [each for each in runtimes if each.due is not None and each.due.tokens]
    if not prompts:
        return _least(runtimes, now_s, "tokens", wake_s)
    first = _least(prompts, now_s, "prompts", wake_s)
    tokens = [each for each in runtimes if each not in prompts]
    if not tokens:
        return first
    last = _least(tokens, now_s, "tokens_late", wake_s)
    if last[2] < turn_s(first[0]) and _part(last) < _part(first):
        return last
    return first


def in_turn(runtimes: Sequence[Running], now_s: float, wake_s: WakeTime) -> tuple[Running, str, float]:
    """The one that has wanted it for longest."""
    first = min(runtimes, key=lambda each: (each.waiting.arrived_s, each.lease.serial))
    return first, "in_turn", margin_s(first, now_s, wake_s)


TURN_ORDERS: Final = {"margin": by_margin, "fifo": in_turn}


def _least(runtimes: Iterable[Running], now_s: float, why: str, wake_s: WakeTime) -> tuple[Running, str, float]:
    margin, _, running = min([(margin_s(each, now_s, wake_s), each.lease.serial, each) for each in runtimes])
    return running, why, margin


def _part(chosen: tuple[Running, str, float]) -> float:
    """Its margin, of the time that was wanted."""
    running, _, margin = chosen
    due = running.due
    assert due is not None
    return margin / (due.ttft_s if due.tokens else due.tpot_s)
