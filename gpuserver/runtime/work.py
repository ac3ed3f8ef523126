"""How much of a step each owner of sequences had: pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dormouse.gpuserver.runtime.batch import Part, Sequence
from dormouse.schemas import messages as m


@dataclass(slots=True)
class StepWork:
    """``prompt``: tokens of prompts whose first token is made now; one that is computed again counts once."""

    tokens: int = 0
    prompt: int = 0
    made: int = 0


def step_work(parts: Iterable[Part]) -> dict[int, StepWork]:
    """By owner; before the step's tokens are chosen."""
    work: defaultdict[int, StepWork] = defaultdict(StepWork)
    for part in parts:
        own = work[part.sequence.owner]
        own.tokens += part.tokens
        if part.samples:
            own.made += 1
            if len(part.sequence.tokens) == part.sequence.prompt:
                own.prompt += part.sequence.prompt
    return dict(work)


def step_shares(work: Mapping[int, StepWork], running: Iterable[Sequence]) -> list[m.StepShare]:
    """What is told of it. Blocks of KV that sequences share count for each of them."""
    blocks: defaultdict[int, int] = defaultdict(int)
    for sequence in running:
        blocks[sequence.owner] += len(sequence.table.blocks)
    return [
        m.StepShare(serial=owner, tokens=own.tokens, prompt=own.prompt, made=own.made, kv_blocks=blocks[owner])
        for owner, own in work.items()
    ]
