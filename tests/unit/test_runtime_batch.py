"""Who begins next, where several functions share a runtime."""

from dormouse.gpuserver.runtime.batch import Batch, Sequence
from dormouse.gpuserver.runtime.blocks import Blocks


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
