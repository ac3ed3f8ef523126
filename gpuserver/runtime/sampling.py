"""Chooses tokens from logits. The noise is a function of seed and position, so that a sequence goes on equally wherever
and beside whomever it is computed.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import torch

MOST_LOGPROBS: Final = 20


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one sequence's tokens are chosen. ``temperature`` 0: the most probable one."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int = -1  # so many of the most probable tokens are told; -1: none, not the chosen one either

    @property
    def plain(self) -> bool:
        """The most probable token as the model says it."""
        return self.temperature == 0 and not self.changes

    @property
    def changes(self) -> bool:
        """Whether logits are not taken as they are."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1.0)
        return bool(self.bias) or any(penalties)


class Chosen(msgspec.Struct, frozen=True, array_like=True):
    """A token, its log probability and those of the most probable ones, if they were asked for."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []


class BadMask(Exception):
    """It is not as long as the vocabulary, or allows nothing."""


def allowed(bits: bytes, vocabulary: int) -> torch.Tensor:
    """For each token, whether it may come; of a Mask. Raises BadMask."""
    if len(bits) != -(-vocabulary // 8):
        raise BadMask(f"a mask of {len(bits)} bytes for a vocabulary of {vocabulary}")
    found = torch.from_numpy(np.unpackbits(np.frombuffer(bits, np.uint8), count=vocabulary, bitorder="little")).bool()
    if not found.any():
        raise BadMask("a mask that allows no token")
    return found


def choose(
    logits: torch.Tensor,
    sampling: Sampling,
    tokens: Sequence[int],
    prompt: int,
    greedy: int,
    mask: torch.Tensor | None = None,
) -> Chosen:
    """The next token after ``tokens``, of which the first ``prompt`` are the prompt. ``logits`` are one row of fp32;
    ``greedy`` is the index of the largest. With a ``mask``, only its tokens are chosen, and only they have a
    probability.
    """
    if sampling.plain and sampling.logprobs < 0 and mask is None:
        return Chosen(greedy)
    if sampling.changes:
        logits = _changed(logits, sampling, tokens, prompt)
    if mask is None:
        return _chosen(logits, sampling, len(tokens))
    numbers = mask.nonzero()[:, 0]
    chosen = _chosen(logits[numbers], sampling, len(tokens))
    top = [(int(numbers[index]), logprob) for index, logprob in chosen.top]
    return Chosen(int(numbers[chosen.token]), chosen.logprob, top)


def _chosen(logits: torch.Tensor, sampling: Sampling, position: int) -> Chosen:
    token = int(logits.argmax()) if sampling.temperature == 0 else _sampled(logits, sampling, position)
    if sampling.logprobs < 0:
        return Chosen(token)
    logprobs = logits.log_softmax(-1)
    values, indices = logprobs.topk(min(sampling.logprobs, len(logprobs)))
    return Chosen(token, float(logprobs[token]), list(zip(indices.int().tolist(), values.tolist(), strict=True)))


def _changed(logits: torch.Tensor, sampling: Sampling, tokens: Sequence[int], prompt: int) -> torch.Tensor:
    """By OpenAI's presence and frequency penalties (of what was made), Hugging Face's repetition penalty (of all), and
    biases.
    """
    logits = logits.clone()
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(tokens)))
        old, penalty = logits[seen], sampling.repetition_penalty
        logits[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = Counter(tokens[prompt:])
        if counts:
            made = torch.tensor(list(counts))
            often = torch.tensor(list(counts.values()), dtype=logits.dtype)
            logits[made] -= sampling.presence_penalty + sampling.frequency_penalty * often
    for token, bias in sampling.bias.items():
        logits[token] += bias
    return logits


def _sampled(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    values, order = (logits / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        values, order = values[: sampling.top_k], order[: sampling.top_k]
    probabilities = values.softmax(-1)
    if sampling.min_p:
        count = max(1, int((probabilities >= sampling.min_p * probabilities[0]).sum()))
        probabilities = probabilities[:count]
    if sampling.top_p < 1.0:
        before = probabilities.cumsum(0) - probabilities  # of more probable ones: the first is always kept
        count = max(1, int((before < sampling.top_p).sum()))
        probabilities = probabilities[:count]
    sums = probabilities.double().cumsum(0)
    noise = torch.rand((), dtype=torch.float64, generator=_noise(sampling.seed, position))
    index = int(torch.searchsorted(sums, noise * sums[-1], right=True))
    return int(order[min(index, len(probabilities) - 1)])


def _noise(seed: int, position: int) -> torch.Generator:
    """Equal for equal seed and position. The multiplier spreads neighbours (SplitMix64's increment)."""
    return torch.Generator().manual_seed((seed + position * 0x9E3779B97F4A7C15) & ((1 << 63) - 1))
