"""The share of each owner of sequences in a step: pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dormouse.core.decisions.batches.batch import Part, Sequence
from dormouse.schemas import messages as m


@dataclass(slots=True)
class StepWork:
    """``prompt``: tokens of prompts that have their KV now for the first time, by this step or by another's prompt that
    begins equally; tokens that are computed again count once.
    """

    tokens: int = 0
    prompt: int = 0
    made: int = 0


def step_work(parts: Iterable[Part]) -> dict[int, StepWork]:
    """By owner; before the step counts as done (`Batch.computed`)."""
    work: defaultdict[int, StepWork] = defaultdict(StepWork)
    for part in parts:
        own = work[part.sequence.owner]
        own.tokens += part.tokens
        own.made += part.samples
        own.prompt += max(0, min(part.start + part.tokens, part.sequence.prompt) - part.sequence.counted)
    return dict(work)


def work_of_nothing(parts: Iterable[Part]) -> dict[int, StepWork]:
    """The same of a step that took its time and is not done: its tokens will be computed again, and count then."""
    return {owner: StepWork(own.tokens) for owner, own in step_work(parts).items()}


def step_shares(work: Mapping[int, StepWork], running: Iterable[Sequence]) -> list[m.StepShare]:
    """The report of it. Blocks of KV that sequences share count for each of them."""
    blocks: defaultdict[int, int] = defaultdict(int)
    for sequence in running:
        blocks[sequence.owner] += len(sequence.table.blocks)
    return [
        m.StepShare(serial=owner, tokens=own.tokens, prompt=own.prompt, made=own.made, kv_blocks=blocks[owner])
        for owner, own in work.items()
    ]
