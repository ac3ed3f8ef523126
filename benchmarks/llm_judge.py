"""Judges greedy answers by one forward of the reference over each: a token is its choice, or is listed with what it
lacks. Pure but for the model that it is given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

GAP: Final = 1e-4
"""In fp32: two tokens whose logits are so close may change places by rounding."""

BATCH: Final = 16


@dataclass
class Judged:
    """``others``: tokens that are not the reference's choice, by prompt and place, with what their logit lacks."""

    answers: int = 0
    tokens: int = 0
    others: list[tuple[int, int, float]] = field(default_factory=list)

    def wrong(self, gap: float = GAP) -> int:
        return sum(lacks >= gap for _, _, lacks in self.others)


def judged(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Judged:
    """Greedy answers to these prompts."""
    found = Judged()
    for number, answer, logits in logits_of(model, prompts, answers):
        chosen = logits[torch.arange(len(answer)), torch.tensor(answer)]
        lacks = logits.max(-1).values - chosen
        found.answers += 1
        found.tokens += len(answer)
        found.others += [(number, at, float(lacks[at])) for at in lacks.nonzero()[:, 0].tolist()]
    found.others.sort()
    return found


@torch.inference_mode()
def logits_of(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Sequence[int], torch.Tensor]]:
    """Each answer with its number, and the logits, in fp32, from which each of its tokens was to be chosen. Several of
    about one length share a forward: a token sees nothing of what follows it, so the padding at the end changes
    nothing.
    """
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]) + len(answers[number]))
    for start in range(0, len(order), BATCH):
        some = order[start : start + BATCH]
        rows = [[*prompts[number], *answers[number]] for number in some]
        longest = max(len(row) for row in rows)
        first = min(len(prompts[number]) for number in some) - 1
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        logits = model(padded, logits_to_keep=longest - first).logits.float()
        for index, number in enumerate(some):
            at = len(prompts[number]) - 1 - first
            yield number, answers[number], logits[index, at : at + len(answers[number])]
