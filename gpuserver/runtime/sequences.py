"""Sequences of a runtime's members: submitted, perhaps gathered, given to the engine, and reported until they are over.

Decides which wait for others first, and owns their deadlines. The turn (process.py) decides when the engine computes.
"""

import math
import time

from dormouse.core.decisions.batches.deadlines import Deadlines
from dormouse.core.decisions.batches.gathering import Gathering
from dormouse.core.decisions.rules.batching import BatchRule
from dormouse.gpuserver.runtime.engine import Engine, Made
from dormouse.gpuserver.runtime.executor_link import ExecutorLink
from dormouse.gpuserver.runtime.members import Member, Members
from dormouse.gpuserver.runtime.progress import SequenceBegun, StepProgress
from dormouse.gpuserver.runtime.sampling import BadMask
from dormouse.gpuserver.runtime.serving_model import ServingModel
from dormouse.gpuserver.runtime.submissions import generation_of
from dormouse.schemas import messages as m


class MemberSequences:
    """See the module."""

    def __init__(
        self,
        link: ExecutorLink,
        serving: ServingModel,
        members: Members,
        progress: StepProgress,
        rule: BatchRule | None,
    ) -> None:
        self._link, self._serving, self._members, self._progress = link, serving, members, progress
        self._gathering = Gathering(rule)
        self._deadlines = Deadlines()

    @property
    def _engine(self) -> Engine | None:
        return self._serving.engine

    # --- sequences to be computed

    @property
    def due_s(self) -> float:
        """When it has something to do by itself."""
        return self._gathering.due_s(self._progress.times) if self._gathering.waits else math.inf

    def due(self) -> m.StepsDue | None:
        return None if self._engine is None else self._progress.due(self._engine, self._deadlines)

    def wanted(self, serial: int, joins: m.JoinRule) -> None:
        """Some of its sequences may have come before this."""
        self._gathering.wanted(serial, joins.ttft_us / 1e6)
        self._deadlines.told(serial, joins)
        if (member := self._members.by_serial.get(serial)) is not None and self._engine is not None:
            for sequence in self._engine.sequences(member.numbers.values()):
                self._engine.batch.wanted_by(sequence, self._deadlines.latest_s(sequence, self._progress.times))

    def join_gathered(self) -> None:
        """Those that have waited for others for long enough."""
        if self._gathering.waits and self._engine is not None:
            for number in self._gathering.take(time.perf_counter(), self._progress.times):
                self._engine.join(number)

    # --- messages of instances

    def heard(self, member: Member, message: m.Submit | m.Mask | m.Abort) -> None:
        match message:
            case m.Submit():
                self._submit(member, message)
            case m.Mask(number=own, position=position, bits=bits):
                if (number := member.numbers.get(own)) is not None:
                    self._allow(number, position, bits)
            case m.Abort(number=own):
                member.submissions.forget(own)
                if (number := member.numbers.get(own)) is not None:
                    self.remove(number)
                self.tell_load()

    def _submit(self, member: Member, submit: m.Submit) -> None:
        tokens = member.submissions.whole(submit)
        if tokens is None:
            return
        if member.refused:
            self._link.tell(member.serial, m.ModelRefused(text=member.refused))
            return
        if self._engine is None or submit.number in member.numbers:
            return
        number = self._members.enter(member, submit.number)
        generation = generation_of(number, submit, tokens, member.spec.vocabulary)
        if generation is None:
            self.refuse(number, "refused")
            return
        sequence = generation.sequence
        sequence.owner, sequence.adapter, sequence.heard_s = member.serial, member.number, time.perf_counter()
        sequence.latest_s = self._deadlines.latest_s(sequence, self._progress.times)
        if len(tokens) == submit.prompt:  # else it has begun once
            sequence.gathers = self._gathering.add(number, member.serial, len(tokens), sequence.heard_s)
        self._engine.add(number, generation)
        self._progress.submitted(sequence)
        if sequence.parked or sequence.gathers:  # no step reports it
            self.tell_load()

    def _allow(self, number: int, position: int, bits: bytes) -> None:
        if self._engine is None:
            return
        try:
            self._engine.allow(number, position, bits)
        except BadMask:
            self.refuse(number, "bad_mask")

    def lease_over(self, serial: int) -> None:
        """Nothing more is wanted of those that it had."""
        self._gathering.dismiss(serial)
        self._deadlines.forget(serial)

    def remove(self, number: int) -> None:
        self._members.end(number)
        self._progress.forget(number)
        self._gathering.discard(number)
        if self._engine is not None:
            self._engine.remove(number)

    # --- reports

    def tell_load(self) -> None:
        if self._engine is None:
            return
        if (changed := self._progress.load(self._engine, self._members.busy, self._gathering.begun)) is not None:
            self._link.say(changed)

    def refuse(self, number: int, why: str) -> None:
        """No token of it will come any more."""
        member, own = self._members.owner(number)
        self.remove(number)
        self._link.tell(member.serial, m.Tokens(tokens=[m.ChosenToken(number=own, token=-1, finish=why)]))

    def tell_made(self, made: list[Made], firsts: list[SequenceBegun]) -> None:
        begun = {first.told.number: first for first in firsts}
        for serial, tokens in self._members.packets(made, begun):
            self._link.tell(serial, tokens)
        for each in made:
            if each.finish:
                self._members.end(each.number)
