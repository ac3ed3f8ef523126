"""Reports of a runtime on its work: the waits of sequences for their first token, outstanding work, and times of steps.

It measures durations and counts; it changes nothing.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dormouse.core.decisions.batches.batch import STEP_TOKENS, Sequence
from dormouse.core.decisions.batches.deadlines import Deadlines
from dormouse.core.decisions.rules.step_times import StepTimer, news
from dormouse.gpuserver.runtime.engine import Engine, Made
from dormouse.schemas import messages as m

NOTHING: Final[Mapping[str, int]] = MappingProxyType({})

TELL_S: Final = 0.25
"""Between two reports of the load while it computes."""


@dataclass(frozen=True, slots=True)
class SequenceBegun:
    """A sequence has its first token. ``reused``: tokens of its prompt whose KV was there."""

    told: m.FirstToken
    reused: int


@dataclass(slots=True)
class _Wait:
    """A sequence that has no token yet."""

    sequence: Sequence
    submitted_s: float
    began_s: float | None = None
    wake_s: float = 0.0

    def told(self, now_s: float) -> m.FirstToken:
        began_s = now_s if self.began_s is None else self.began_s
        return m.FirstToken(
            number=self.sequence.number,
            queue_us=max(0, int((began_s - self.submitted_s) * 1e6)),
            wake_us=int(self.wake_s * 1e6),
            prefill_us=max(0, int((now_s - began_s - self.wake_s) * 1e6)),
        )


class StepProgress:
    """See the module."""

    def __init__(self) -> None:
        self._waits: dict[int, _Wait] = {}
        self._reused_nbytes = 0
        self._told: m.LoadChanged | None = None
        self._told_s = 0.0
        self._timer = StepTimer(STEP_TOKENS)
        self._times: m.StepTimes | None = None  # as reported
        self._prompts_told = False  # the last report of due work had some

    # --- first tokens

    def submitted(self, sequence: Sequence) -> None:
        self._waits[sequence.number] = _Wait(sequence, time.perf_counter())

    def forget(self, number: int) -> None:
        self._waits.pop(number, None)

    def stepped(
        self, began_s: float, waited_s: float, room_s: float, engine: Engine, made: list[Made]
    ) -> list[SequenceBegun]:
        """A step that began then and has waited so long for weights, and for room for KV. Returns the facts of
        sequences that have their first token by it.
        """
        now_s = time.perf_counter()
        if not waited_s:
            self._timer.step_tokens = engine.batch.step_tokens
            self._timer.learn(*engine.step_tokens, (now_s - began_s - room_s) * 1e6)
        if not self._waits:
            return []
        for wait in self._waits.values():
            if wait.sequence.begun:
                wait.began_s = began_s if wait.began_s is None else wait.began_s
                wait.wake_s += waited_s
        waits = [self._waits.pop(each.number) for each in made if each.number in self._waits]
        for wait in waits:
            self._reused_nbytes += wait.sequence.reused * engine.layout.block_nbytes // engine.layout.block_tokens
        return [SequenceBegun(wait.told(now_s), wait.sequence.reused) for wait in waits]

    @property
    def times(self) -> m.StepTimes | None:
        """The times of steps, as far as known."""
        return self._timer.times

    @property
    def news(self) -> bool:
        """Whether there are prompts, and there were none in the last report of due work."""
        return not self._prompts_told and any(not wait.sequence.gathers for wait in self._waits.values())

    def due(self, engine: Engine, deadlines: Deadlines) -> m.StepsDue:
        """The outstanding work."""
        now_s, prompts = time.perf_counter(), dict[int, m.PromptsDue]()
        for wait in self._waits.values():
            if wait.sequence.gathers:
                continue
            waited_us = int((now_s - wait.submitted_s + deadlines.before_s(wait.sequence)) * 1e6)
            serial, tokens = wait.sequence.owner, wait.sequence.left
            if (known := prompts.get(serial)) is not None:
                tokens, waited_us = known.tokens + tokens, max(known.waited_us, waited_us)
            prompts[serial] = m.PromptsDue(serial=serial, tokens=tokens, waited_us=waited_us)
        self._prompts_told = bool(prompts)
        sequences = len(engine.batch.running) + len(engine.batch.waiting)
        return m.StepsDue(prompts=list(prompts.values()), decoding=max(0, sequences - len(self._waits)))

    # --- the load

    def load(self, engine: Engine, busy: list[int], gathered: Mapping[str, int] = NOTHING) -> m.LoadChanged | None:
        """If it is time to report it: often only while there are steps, each of which asks again."""
        now_s = time.perf_counter()
        told = [] if self._told is None else self._told.busy
        if engine.batch.running and busy == told and now_s < self._told_s + TELL_S:
            return None
        if (times := self._timer.times) is not None and news(times, self._times):
            self._times = times
        load = m.EngineLoad(
            running=len(engine.batch.running),
            waiting=len(engine.batch.waiting),
            preempted=engine.batch.preempted,
            blocks=engine.blocks.count,
            used=engine.blocks.count - engine.blocks.available,
            idle=engine.blocks.idle,
            block_nbytes=engine.layout.block_nbytes,
            reused_nbytes=self._reused_nbytes,
            times=self._times,
            gathered=dict(gathered),
        )
        changed = m.LoadChanged(load=load, busy=busy)
        if changed == self._told:
            return None
        self._told, self._told_s = changed, now_s
        return changed
