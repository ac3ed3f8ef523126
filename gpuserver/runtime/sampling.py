"""Chooses tokens from logits. The noise is a function of seed and position, so that a sequence goes on equally on any
runtime and in any batch.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np
import torch

AT_ONCE: Final = 4 << 20
"""Logits that are sorted at once on a GPU: that takes some hundred MB beside them."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The choice of one sequence's tokens. ``temperature`` 0: the most probable one."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int = -1  # so many of the most probable tokens are reported; -1: none, not the chosen one either

    @property
    def plain(self) -> bool:
        """The most probable token of the unchanged logits."""
        return self.temperature == 0 and not self.changes

    @property
    def only_samples(self) -> bool:
        """By its temperature, from logits as they are, and reports nothing of them."""
        return self.temperature > 0 and not self.changes and self.logprobs < 0

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
    """By OpenAI's presence and frequency penalties (of generated tokens), Hugging Face's repetition penalty (of all),
    and biases.
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
    noise = _uniform(sampling.seed, position)
    index = int(torch.searchsorted(sums, noise * sums[-1], right=True))
    return int(order[min(index, len(probabilities) - 1)])


def sampled_rows(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """The choices of `choose` for the rows of these logits, on their device and with one wait for it: where nothing but
    a token is asked for, by its temperature.
    """
    most = max(1, AT_ONCE // logits.shape[-1])
    parts = [slice(start, start + most) for start in range(0, len(samplings), most)]
    found = [_sampled_together(logits[part], samplings[part], positions[part]) for part in parts]
    return torch.cat(found).tolist() if found else []


def _sampled_together(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> torch.Tensor:
    """As `_sampled`, with 0 for tokens that are left out there."""
    width, device = logits.shape[-1], logits.device

    def column(numbers: Iterable[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=dtype).to(device)[:, None]

    values, order = (logits / column(each.temperature for each in samplings)).sort(dim=-1, descending=True, stable=True)
    place = torch.arange(width, device=device)
    kept = column((each.top_k or width for each in samplings), torch.int64)
    probabilities = values.masked_fill(place >= kept, float("-inf")).softmax(-1)
    least = column(each.min_p for each in samplings) * probabilities[:, :1]
    probabilities = probabilities.masked_fill((probabilities < least) & (place > 0), 0.0)
    most = column(each.top_p if each.top_p < 1.0 else float("inf") for each in samplings)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill((before >= most) & (place > 0), 0.0)
    sums = probabilities.double().cumsum(-1)
    pairs = zip(samplings, positions, strict=True)
    noise = column((_uniform(each.seed, position).item() for each, position in pairs), torch.float64)
    index = torch.searchsorted(sums, noise * sums[:, -1:], right=True)
    last = (probabilities > 0).sum(-1, keepdim=True) - 1
    chosen: torch.Tensor = order.gather(-1, index.minimum(last))
    return chosen[:, 0]


def _uniform(seed: int, position: int) -> torch.Tensor:
    return torch.rand((), dtype=torch.float64, generator=_noise(seed, position))


def _noise(seed: int, position: int) -> torch.Generator:
    """Equal for equal seed and position. The multiplier spreads neighbours (SplitMix64's increment)."""
    return torch.Generator().manual_seed((seed + position * 0x9E3779B97F4A7C15) & ((1 << 63) - 1))
