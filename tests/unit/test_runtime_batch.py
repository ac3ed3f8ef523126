"""Who begins next, where several functions share a runtime."""

import pytest

from dormouse.core.decisions.batches.batch import Batch, Sequence
from dormouse.core.decisions.batches.blocks import Blocks


def running(batch: Batch) -> list[int]:
    for part in batch.plan(lambda blocks: False):
        batch.computed(part)
        part.sequence.tokens.append(1)
    return [sequence.number for sequence in batch.running]


def test_sequences_of_each_owner_begin_in_turn() -> None:
    """Whoever sends many waits for those of others, and the oldest of each are first."""
    blocks = Blocks(16)
    blocks.grow(0, 20)
    batch = Batch(blocks, sequences=4)
    for number in range(6):
        batch.add(Sequence(number, [number] * 8, 8, 100, owner=1))
    for number in (6, 7):
        batch.add(Sequence(number, [number] * 8, 8, 100, owner=2))
    assert running(batch) == [0, 6, 1, 7]
    batch.remove(batch.running[0])
    batch.add(Sequence(8, [8] * 8, 8, 100, owner=3))
    assert running(batch) == [6, 1, 7, 8]
    batch.remove(batch.running[0])
    assert running(batch) == [1, 7, 8, 2]
    assert running(batch) == [1, 7, 8, 2]


def test_who_was_preempted_is_first_whoever_owns_it() -> None:
    blocks = Blocks(16)
    blocks.grow(0, 20)
    batch = Batch(blocks, sequences=3)
    for number in range(3):
        batch.add(Sequence(number, [number] * 8, 8, 100, owner=1))
    batch.add(Sequence(3, [3] * 8, 8, 100, owner=2))
    assert running(batch) == [0, 3, 1]
    batch.preempt(batch.running[0])
    batch.add(Sequence(4, [4] * 8, 8, 100, owner=3))
    assert running(batch) == [3, 1, 0]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_who_is_parked_or_removed_while_memory_is_asked_for_is_not_in_the_step(
    own: bool, ends: bool, begun: bool
) -> None:
    """The very sequence that it is asked for, or one that is in the plan already: the others are computed, and no
    block is lost.
    """
    blocks = Blocks(16)
    blocks.grow(0, 2 if begun else 1)
    batch = Batch(blocks)
    first, second = Sequence(0, [0] * 15, 15, 100), Sequence(1, [1] * 16, 16, 100)
    batch.add(first)
    batch.add(second)
    if begun:  # the second one needs another block for its next token
        for part in batch.plan(lambda blocks: False):
            batch.computed(part)
            part.sequence.tokens.append(1)
    gone = second if own else first

    def grow(count: int) -> bool:
        (batch.remove if ends else batch.park)(gone)
        blocks.grow(1, 4)
        return True

    third = Sequence(2, [2] * 8, 8, 100)
    batch.add(third)
    computed = [part.sequence for part in batch.plan(grow)]
    assert computed == [first if own else second, third]
    batch.check()
    assert (gone in batch.waiting) is not ends
