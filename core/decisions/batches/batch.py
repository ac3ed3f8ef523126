"""Decides what each step computes: continuous batching with chunked prefill and preemption. Pure.

A sequence::

    waiting --room for its prompt's next tokens--> running --last token--> done
       ^                                             |
       +-------- preempted: its KV is released ------+        it goes on with the same tokens

Each step takes one token of every sequence whose prompt is computed, then as many prompt tokens as fit the budget:
those of started prompts first, oldest first, then those of others (rules/joins.py). A brief step takes no more prompt
tokens than cost as much as its other tokens. When KV is short, the youngest sequence is preempted. A sequence that is
held, parked or gathering is in no step, and delays no other.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from dormouse.core.decisions.batches.blocks import ROOT, Blocks, BlockTable
from dormouse.core.decisions.rules.joins import IN_TURN, JoinQueue
from dormouse.core.decisions.rules.pace import Pace

STEP_TOKENS: Final = 256
"""Prompt tokens in one step at most, beside those of running sequences: a long prompt must not hold up others' tokens.
"""

GPU_STEP_TOKENS: Final = 1024
"""The same on a GPU, which computes so many of an 8B model in about the time in which a step's kernels are issued."""

STEP_SEQUENCES: Final = 128

NO_ADAPTER: Final = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """``tokens``: the prompt and the tokens generated so far. ``computed``: how many of them have their KV."""

    number: int
    tokens: list[int]
    prompt: int  # tokens of the prompt
    limit: int  # tokens in all at most
    salt: bytes = ROOT
    owner: int = 0  # a lease
    heard_s: float = 0.0  # when its runtime received it
    waited_s: float = 0.0  # before that, as reported by its instance
    latest_s: float = IN_TURN  # when it has to begin at latest, to be in time
    adapter: int = NO_ADAPTER  # the number of its own
    computed: int = 0
    reused: int = 0  # tokens whose KV was there, when it first began
    counted: int = 0  # tokens of the prompt that had their KV once, even if it was lost since
    begun: bool = False
    held: bool = False  # its permitted next tokens are not known yet: it is left out
    parked: bool = False  # its adapter is not here: it is left out
    gathers: bool = False  # it waits for others of its function: it is left out
    over: bool = False  # it has ended: in a plan that it was in, it is left out
    preempted: int = 0  # how often
    table: BlockTable = field(default_factory=BlockTable)

    @property
    def able(self) -> bool:
        """Whether it can be in a step."""
        return not (self.held or self.parked or self.gathers or self.over)

    @property
    def left(self) -> int:
        """Tokens that a step can still compute before the next one is known."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Part:
    """``tokens`` tokens of a sequence from ``start`` on, in one step. ``samples``: the next one is to be chosen."""

    sequence: Sequence
    start: int
    tokens: int

    @property
    def samples(self) -> bool:
        return self.start + self.tokens == len(self.sequence.tokens)


def _able(sequence: Sequence) -> bool:
    return sequence.able


class Batch:
    """The sequences of one runtime. ``pace``: how much of a long prompt a step takes; without one, all that fits."""

    def __init__(
        self,
        blocks: Blocks,
        step_tokens: int = STEP_TOKENS,
        sequences: int = STEP_SEQUENCES,
        pace: Pace | None = None,
    ) -> None:
        self.blocks = blocks
        self.waiting: JoinQueue[Sequence] = JoinQueue()
        self.running: list[Sequence] = []  # as they began
        self.step_tokens, self._sequences = step_tokens, sequences
        self._pace = pace
        self.brief = False  # others wait for the GPU, or are likely to
        self.wanted = 0  # blocks that the last plan lacked
        self._stalled = False  # the last plan was empty, and nothing has changed since
        self.preempted = 0  # how often

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def ready(self) -> bool:
        """Whether a plan may have something to compute."""
        return not self._stalled and any(sequence.able for sequence in (*self.running, *self.waiting))

    def next(self, now_s: float) -> Sequence | None:
        """The next sequence to begin."""
        if not self.waiting:
            return None
        return self.waiting.next(now_s, Counter(sequence.owner for sequence in self.running), _able)

    def retry(self) -> None:
        """The next plan may find room, though nothing has changed here."""
        self._stalled = False

    def add(self, sequence: Sequence) -> None:
        self._stalled = False
        self.waiting.add(sequence, sequence.latest_s)

    def release(self, sequence: Sequence) -> None:
        """The sequence is no longer held."""
        self._stalled = sequence.held = False

    def join(self, sequence: Sequence) -> None:
        """The sequence no longer waits for others."""
        self._stalled = sequence.gathers = False

    def unpark(self, sequence: Sequence) -> None:
        """Its adapter has arrived."""
        self._stalled = sequence.parked = False

    def park(self, sequence: Sequence) -> None:
        """Its adapter is being unloaded: the sequence restarts when the adapter is back."""
        if sequence in self.running:
            self.preempt(sequence)
        sequence.parked = True

    def remove(self, sequence: Sequence) -> None:
        """The sequence has ended, by itself or by its client."""
        self._stalled, sequence.over = False, True
        if sequence in self.running:
            self.running.remove(sequence)
            self.blocks.release(sequence.table)
        else:
            self.waiting.remove(sequence)

    def wanted_by(self, sequence: Sequence, latest_s: float) -> None:
        """The sequence must begin by ``latest_s``."""
        sequence.latest_s = latest_s
        self.waiting.move(sequence, latest_s)

    def plan(self, grow: Callable[[int], bool], now_s: float = 0.0) -> list[Part]:
        """Returns the next step; empty if nothing can be computed. ``grow(blocks)`` asks for memory, and returns
        whether it got any. During that call, sequences may be parked or removed: they are not in the step.
        """
        self.wanted = 0
        parts: list[Part] = []
        for sequence in list(self.running):
            if sequence in self.running and sequence.left == 1 and sequence.able:
                self._take(sequence, 1, parts, grow)
        budget, going_on = self.step_tokens, bool(parts)
        if self.brief and self._pace is not None:
            budget = self._pace.tokens(budget)
        for sequence in list(self.running):
            if budget and sequence in self.running and sequence.left > 1 and sequence.able:
                budget -= self._take(sequence, self._share(sequence, budget, going_on), parts, grow)
        while budget and len(self.running) < self._sequences and (first := self.next(now_s)) is not None:
            tokens = self._begin(first, budget, going_on, parts, grow, now_s)
            if not tokens and first.able:
                break
            budget -= tokens
        parts = [part for part in parts if part.sequence in self.running]
        self._stalled = not parts
        return parts

    def _share(self, sequence: Sequence, budget: int, going_on: bool) -> int:
        """Prompt tokens of a sequence in this step. A prompt that fits into one step delays running sequences by one
        step; a longer one would delay them by many, so it takes as much as its pace allows.
        """
        if self._pace is not None and going_on and len(sequence.tokens) > self.step_tokens:
            budget = self._pace.tokens(budget)
        return min(budget, sequence.left)

    def _begin(
        self,
        sequence: Sequence,
        budget: int,
        going_on: bool,
        parts: list[Part],
        grow: Callable[[int], bool],
        now_s: float,
    ) -> int:
        """Tokens of a waiting sequence in this step; 0 if there is no room for it: no sequence is preempted for one
        that has not begun.
        """
        sequence.table = self.blocks.share(sequence.tokens, sequence.salt)
        sequence.computed = len(sequence.table.blocks) * self.blocks.block_tokens
        tokens = self._share(sequence, budget, going_on)
        if not self._room(sequence, sequence.computed + tokens, grow):
            self.blocks.release(sequence.table)
            sequence.computed = 0
            return 0
        if not sequence.begun:
            sequence.begun, sequence.reused = True, sequence.computed
        self.waiting.begins(sequence, now_s)
        self.running.append(sequence)
        parts.append(Part(sequence, sequence.computed, tokens))
        return tokens

    def _take(self, sequence: Sequence, tokens: int, parts: list[Part], grow: Callable[[int], bool]) -> int:
        """Tokens of a running sequence; preempts younger sequences for it, and in the end the sequence itself."""
        while not self._room(sequence, sequence.computed + tokens, grow):
            if not sequence.able:
                return 0
            youngest = max(self.running, key=lambda each: each.number)
            self.preempt(youngest)
            if youngest is sequence:
                return 0
        parts.append(Part(sequence, sequence.computed, tokens))
        return tokens

    def _room(self, sequence: Sequence, tokens: int, grow: Callable[[int], bool]) -> bool:
        if self.blocks.extend(sequence.table, tokens):
            return True
        lacking = -(-tokens // self.blocks.block_tokens) - len(sequence.table.blocks) - self.blocks.available
        if grow(lacking) and sequence.able and self.blocks.extend(sequence.table, tokens):
            return True
        self.wanted = max(self.wanted, lacking)
        return False

    def preempt(self, sequence: Sequence) -> None:
        """Its room is needed; it is the first to begin again."""
        self.running.remove(sequence)
        self.blocks.release(sequence.table)
        sequence.computed = 0
        sequence.preempted += 1
        self.preempted += 1
        self.waiting.again(sequence)

    def preempt_all(self) -> None:
        """All KV is to be given up."""
        self._stalled = False
        for sequence in reversed(list(self.running)):
            self.preempt(sequence)

    def computed(self, part: Part) -> None:
        """A part of the step has been computed."""
        sequence = part.sequence
        sequence.computed = part.start + part.tokens
        sequence.counted = max(sequence.counted, min(sequence.computed, sequence.prompt))
        self.blocks.filled(sequence.table, sequence.tokens, sequence.computed, sequence.salt)

    def check(self) -> None:
        self.blocks.check(sequence.table for sequence in self.running)
        assert all(not sequence.table.blocks and not sequence.computed for sequence in self.waiting)
        for sequence in self.running:
            assert sequence.computed <= len(sequence.table.blocks) * self.blocks.block_tokens
