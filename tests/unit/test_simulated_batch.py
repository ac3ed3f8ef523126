"""The simulator's batch of streams, for many steps at once, against the batch of real runtimes, step by step."""

from dataclasses import dataclass
from itertools import count
from typing import Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dormouse.controller.simulator.streams import batch as simulated
from dormouse.controller.simulator.streams.batch import StreamBatch
from dormouse.controller.simulator.streams.cost import EqualSteps, StepCost
from dormouse.controller.simulator.streams.learning import StepsLearned
from dormouse.controller.simulator.streams.stream import OVER, Stream
from dormouse.core.decisions.batches.batch import STEP_SEQUENCES, STEP_TOKENS, Batch, Sequence
from dormouse.core.decisions.batches.blocks import Blocks
from dormouse.core.decisions.rules.joins import IN_TURN
from dormouse.core.decisions.rules.pace import Pace
from dormouse.gpuserver.runtime.engine import BLOCK_TOKENS

COST = StepCost(fixed_s=0.02, per_sequence_s=0.0013, per_context_s=1.7e-6, per_prompt_s=0.0007)


@dataclass(frozen=True)
class Asked:
    at_s: float
    prompt: int
    output: int
    owner: int = 0
    latest_s: float = IN_TURN


@dataclass
class Fate:
    first_s: float = -1.0
    over_s: float = -1.0
    preempted: int = 0


@dataclass(frozen=True)
class Limits:
    """``extents`` of ``extent_blocks`` blocks are there at most."""

    extents: int
    extent_blocks: int = 4
    step_tokens: int = STEP_TOKENS
    sequences: int = STEP_SEQUENCES
    brief: bool | None = None  # None: without a pace


class Forgetful(Batch):
    """The real decisions; but what a preempted sequence has computed is not found again, nor is another's."""

    salts = count()

    def add(self, sequence: Sequence) -> None:
        sequence.salt = next(self.salts).to_bytes(8, "little")
        super().add(sequence)

    def preempt(self, sequence: Sequence) -> None:
        super().preempt(sequence)
        sequence.salt = next(self.salts).to_bytes(8, "little")


def step_by_step(asked: list[Asked], limits: Limits) -> list[Fate]:
    """By the real decisions, and the formula for every step."""
    blocks = Blocks(BLOCK_TOKENS)
    pace = None if limits.brief is None else Pace()
    batch = Forgetful(blocks, limits.step_tokens, limits.sequences, pace)
    batch.brief = limits.brief is True
    fates = [Fate() for _ in asked]
    open_: dict[int, Sequence] = {}
    extents = 0

    def grow(wanted: int) -> bool:
        nonlocal extents
        more = -(-wanted // limits.extent_blocks)
        if extents + more > limits.extents:
            return False
        for extent in range(extents, extents + more):
            blocks.grow(extent, limits.extent_blocks)
        extents += more
        return True

    now_s, come = 0.0, 0
    while come < len(asked) or open_:
        if not open_:
            now_s = max(now_s, asked[come].at_s)
        while come < len(asked) and asked[come].at_s <= now_s:
            one = asked[come]
            open_[come] = Sequence(come, [1] * one.prompt, one.prompt, one.prompt + one.output, owner=one.owner)
            open_[come].latest_s = one.latest_s
            batch.add(open_[come])
            come += 1
        before = set(map(id, batch.running))
        parts = batch.plan(grow, now_s)
        assert parts
        tokens = [part for part in parts if id(part.sequence) in before and part.sequence.left == 1]
        prompts = [part for part in parts if part not in tokens]
        contexts = sum(part.start + 1 for part in tokens)
        took_s = COST.step_s(len(tokens), contexts, sum(part.tokens for part in prompts))
        now_s += took_s
        if pace is not None:
            pace.learn(sum(part.tokens for part in prompts), took_s * 1e3)
        for part in parts:
            batch.computed(part)
        for part in parts:
            sequence = part.sequence
            if not part.samples:
                continue
            fate = fates[sequence.number]
            if len(sequence.tokens) == sequence.prompt:
                fate.first_s = now_s
            sequence.tokens.append(2)
            if len(sequence.tokens) >= sequence.limit:
                fate.over_s, fate.preempted = now_s, sequence.preempted
                batch.remove(sequence)
                del open_[sequence.number]
    return fates


class Many:
    """Drives a batch as a simulated runtime does: who joins, joins at the next boundary."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.learned = StepsLearned(limits.step_tokens)
        learned = None if limits.brief is None else self.learned
        self.batch = StreamBatch(COST, BLOCK_TOKENS, limits.step_tokens, limits.sequences, learned=learned)
        self.batch.brief = limits.brief is True
        self.extents = self.plans = 0

    def grow(self, blocks: int, gently: bool) -> bool:
        more = -(-blocks // self.limits.extent_blocks)
        if self.extents + more > self.limits.extents:
            return False
        self.extents += more
        self.batch.blocks += more * self.limits.extent_blocks
        return True

    def run(self, asked: list[Asked]) -> list[Fate]:
        batch, fates = self.batch, [Fate() for _ in asked]
        now_s, come = 0.0, 0
        while come < len(asked) or batch.count:
            if not batch.count:
                now_s = max(now_s, asked[come].at_s)
            while come < len(asked) and asked[come].at_s <= now_s:
                one = asked[come]
                batch.add(Stream(come, one.prompt, one.output, owner=one.owner), one.latest_s)
                come += 1
            steps = batch.plan(self.grow, now_s)
            self.plans += 1
            assert steps is not None
            done = steps.count
            if come < len(asked) and batch.takes_more:
                done = min(done, steps.until(asked[come].at_s - now_s))
            now_s += steps.seconds(done)
            self.learned.learn(batch.prompt_tokens, batch.sequences, steps, done)
            made = batch.advance(done)
            first, over = made.first, made.over
            batch.check()
            for stream in first:
                fates[stream.number].first_s = now_s
            for stream in over:
                assert stream.state == OVER
                fates[stream.number].over_s, fates[stream.number].preempted = now_s, stream.preempted
        return fates


def test_the_rules_have_the_same_numbers() -> None:
    assert (simulated.BLOCK_TOKENS, simulated.STEP_TOKENS) == (BLOCK_TOKENS, STEP_TOKENS)
    assert simulated.STEP_SEQUENCES == STEP_SEQUENCES


LENGTHS = st.one_of(st.integers(1, 40), st.integers(1, 900))
WORKLOADS = st.lists(st.tuples(st.floats(0.0, 0.5), LENGTHS, st.integers(1, 120)), min_size=1, max_size=14)


@settings(max_examples=60, deadline=None)
@given(WORKLOADS, st.integers(1, 40), st.sampled_from([(256, 128), (64, 3), (16, 128)]))
def test_it_is_as_if_done_step_by_step(
    workload: list[tuple[float, int, int]], spare: int, most: tuple[int, int]
) -> None:
    asked, at_s = [], 0.0
    for gap_s, prompt, output in workload:
        at_s += gap_s + 1e-7  # no two at once, and none just at a step's end
        asked.append(Asked(at_s, prompt, output))
    largest = max(-(-(each.prompt + each.output) // BLOCK_TOKENS) for each in asked)
    limits = Limits(-(-largest // 4) + spare // 2, step_tokens=most[0], sequences=most[1])
    expected, found = step_by_step(asked, limits), Many(limits).run(asked)
    assert [fate.preempted for fate in found] == [fate.preempted for fate in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.first_s == pytest.approx(theirs.first_s, rel=1e-9)
        assert mine.over_s == pytest.approx(theirs.over_s, rel=1e-9)


PACED: Final = [
    (0.0, 1, 41),
    (0.5, 78, 9),
    *[(0.0, *each) for each in ((6, 9), (40, 6), (14, 5), (1, 5), (34, 3), (40, 1))],
]
"""How many tokens of prompts a step takes differs from step to step."""


@settings(max_examples=60, deadline=None)
@example([(0.0, 1, 54), (0.5, 1, 15), (0.0, 1, 15), (0.0, 1, 15), (0.0, 230, 1)], (16, 128), False)
@example(PACED, (16, 128), True)
@given(WORKLOADS, st.sampled_from([(256, 128), (64, 3), (16, 128)]), st.booleans())
def test_steps_take_as_much_of_prompts_as_real_ones(
    workload: list[tuple[float, int, int]], most: tuple[int, int], brief: bool
) -> None:
    """With room for all: who is preempted in the middle of a plan has a part in a real one until its end."""
    asked, at_s = [], 0.0
    for gap_s, prompt, output in workload:
        at_s += gap_s + 1e-7
        asked.append(Asked(at_s, prompt, output))
    limits = Limits(1 << 20, step_tokens=most[0], sequences=most[1], brief=brief)
    expected, found = step_by_step(asked, limits), Many(limits).run(asked)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.first_s == pytest.approx(theirs.first_s, rel=1e-9)
        assert mine.over_s == pytest.approx(theirs.over_s, rel=1e-9)


WANTED = st.lists(
    st.tuples(st.floats(0.0, 0.1), LENGTHS, st.integers(1, 60), st.integers(0, 2), st.floats(0.0, 2.0)),
    min_size=4,
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(WANTED, st.sampled_from([(64, 3), (16, 128), (64, 1)]))
def test_who_joins_next_is_the_same_with_deadlines(
    workload: list[tuple[float, int, int, int, float]], most: tuple[int, int]
) -> None:
    """With room for all: where that is short, the simulator looks who is late only when something changes."""
    asked, at_s = [], 0.0
    for gap_s, prompt, output, owner, wanted_s in workload:
        at_s += gap_s + 1e-7
        asked.append(Asked(at_s, prompt, output, owner, at_s + wanted_s))
    limits = Limits(1 << 20, step_tokens=most[0], sequences=most[1])
    expected, found = step_by_step(asked, limits), Many(limits).run(asked)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.first_s == pytest.approx(theirs.first_s, rel=1e-9)
        assert mine.over_s == pytest.approx(theirs.over_s, rel=1e-9)


def test_a_stream_costs_few_plans_however_long_it_is() -> None:
    asked = [Asked(0.7 * number, 200, 2000) for number in range(40)]
    many = Many(Limits(1 << 20))
    many.run(asked)
    assert many.plans <= 6 * len(asked)


def test_short_memory_preempts_the_youngest() -> None:
    asked = [Asked(0.0, 60, 60), Asked(0.0, 60, 60), Asked(0.0, 60, 60)]
    fates = Many(Limits(5)).run(asked)
    assert [fate.preempted for fate in fates] == [0, 0, 1]
    assert fates[0].over_s == fates[1].over_s < fates[2].over_s


def test_what_never_fits_is_planned_no_more() -> None:
    many = Many(Limits(2))
    many.batch.add(Stream(0, 100, 100))
    while (steps := many.batch.plan(many.grow)) is not None:
        many.batch.advance(steps.count)
    assert many.batch.remove_first().number == 0
    assert not many.batch.count
    many.batch.check()


def test_what_memory_was_lost_with_begins_again() -> None:
    many = Many(Limits(1 << 20))
    for number, output in enumerate((30, 40)):
        many.batch.add(Stream(number, 20, output))
    steps = many.batch.plan(many.grow)
    assert steps is not None
    many.batch.advance(1)
    assert many.batch.plan(many.grow) is not None
    many.batch.advance(9)
    given_up = many.batch.give_up()
    many.batch.check()
    assert [(each.number, each.tokens, each.left, each.preempted) for each in given_up] == [
        (0, 30, 30, 1),
        (1, 30, 30, 1),
    ]
    many.extents = 0
    assert many.batch.plan(many.grow) is not None
    assert [each.number for each in many.batch.advance(1).first] == []


@given(st.floats(1e-6, 0.1), st.floats(0.0, 1e-3), st.integers(1, 10_000), st.floats(0.0, 1.0))
def test_steps_and_their_time_are_each_others_inverse(first_s: float, more_s: float, count: int, part: float) -> None:
    steps = EqualSteps(count, first_s, more_s)
    some = int(part * count)
    assert steps.done(steps.seconds(some)) == some
    assert steps.until(steps.seconds(some)) == max(1, some)
    between_s = steps.seconds(some) + 0.5 * (steps.seconds(some + 1) - steps.seconds(some))
    assert steps.done(between_s) == some
    assert steps.until(between_s) == min(some + 1, count)
