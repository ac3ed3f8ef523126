"""Sequences whose every token is chosen from those of a mask: held until it is there, and nobody else with them."""

import random

import numpy as np
import pytest
import torch
from language_models import VOCABULARY, prompts, reference, wrong_tokens
from runtime_engines import begin, engine
from transformers import PreTrainedModel

from dormouse.core.decisions.batches.batch import Sequence
from dormouse.gpuserver.runtime.engine import Engine, Generation
from dormouse.gpuserver.runtime.sampling import BadMask, Sampling, allowed, choose


def bits(tokens: list[int]) -> bytes:
    chosen = np.zeros(VOCABULARY, np.uint8)
    chosen[tokens] = 1
    return np.packbits(chosen, bitorder="little").tobytes()


def some(position: int) -> list[int]:
    """The tokens that may come there."""
    return sorted(random.Random(position).sample(range(VOCABULARY), 7))


def masked(made: Engine, number: int, prompt: list[int], new: int, sampling: Sampling | None = None) -> Sequence:
    sequence = Sequence(number, list(prompt), len(prompt), len(prompt) + new)
    made.add(number, Generation(sequence, sampling or Sampling(), frozenset(), masked=True))
    return sequence


def finish(made: Engine) -> None:
    """Each mask comes when it is missed."""
    while not made.batch.idle:
        for generation in list(made.generations.values()):
            sequence = generation.sequence
            if sequence.held:
                made.allow(sequence.number, len(sequence.tokens), bits(some(len(sequence.tokens))))
        assert made.step() is not None, "it stands still"
        made.batch.check()
    assert made.blocks.available == made.blocks.count


@torch.inference_mode()
def wrong(model: PreTrainedModel, sequence: Sequence) -> list[int]:
    """Positions whose token is not the reference's most probable one of those that may come."""
    logits = model(torch.tensor([sequence.tokens])).logits[0].float()
    found = []
    for position in range(sequence.prompt, len(sequence.tokens)):
        row, may = logits[position - 1], some(position)
        if sequence.tokens[position] not in may or float(row[may].max() - row[sequence.tokens[position]]) > 1e-4:
            found.append(position)
    return found


def test_the_most_probable_of_those_that_may_come() -> None:
    model = reference("llama")
    made = engine(model, 64)
    sequences = [masked(made, number, prompt, 20) for number, prompt in enumerate(prompts(1, 5, 40))]
    finish(made)
    assert [wrong(model, sequence) for sequence in sequences] == [[], []]


def test_preempted_ones_too() -> None:
    model = reference("llama")
    made = engine(model, 8)
    sequences = [masked(made, number, prompt, 40) for number, prompt in enumerate(prompts(2, 20, 25, 30))]
    finish(made)
    assert sum(sequence.preempted for sequence in sequences) > 0
    assert [wrong(model, sequence) for sequence in sequences] == [[], [], []]


def test_one_that_waits_for_its_mask_is_in_no_step_and_holds_up_nobody() -> None:
    model = reference("llama")
    made = engine(model, 64)
    held = masked(made, 0, prompts(3, 9)[0], 5)
    assert not made.batch.ready
    free = begin(made, 1, prompts(4, 9)[0], 6)
    for count in range(1, 4):
        assert [each.number for each in made.step() or []] == [1]
        assert (len(free.tokens), len(held.tokens)) == (9 + count, 9)
    made.allow(0, 9, bits([3]))
    assert {each.number for each in made.step() or []} == {0, 1}
    assert held.tokens[9:] == [3]
    assert [each.number for each in made.step() or []] == [1]
    made.step()
    assert wrong_tokens(model, free.tokens, 9) == []
    assert made.batch.running == [held]
    assert not made.batch.ready


def test_a_plan_that_finds_nothing_is_not_made_again_before_something_changes() -> None:
    made = engine(reference("llama"), 4)
    held = masked(made, 0, prompts(5, 4)[0], 5)
    made.allow(0, 4, bits([3]))
    made.step()
    waiting = begin(made, 1, list(range(3, 103)), 2)  # never fits
    assert made.step() is None
    assert not made.batch.ready
    made.allow(0, 5, bits([4]))
    assert made.batch.ready
    made.remove(0)
    assert (held.held, made.batch.next(0.0)) == (False, waiting)
    assert made.batch.ready


def test_masks_of_other_positions_and_sequences_change_nothing() -> None:
    made = engine(reference("llama"), 64)
    held = masked(made, 0, prompts(6, 4)[0], 5)
    made.allow(0, 5, bits([3]))
    made.allow(7, 4, bits([3]))
    assert held.held
    made.allow(0, 4, bits([3]))
    made.allow(0, 4, b"")  # nobody waits for it any more
    made.step()
    assert held.tokens[4:] == [3]


@pytest.mark.parametrize("mask", [b"", b"\0" * (VOCABULARY // 8), b"\xff" * (VOCABULARY // 8 + 1), b"\xff"])
def test_masks_that_are_none_are_refused(mask: bytes) -> None:
    made = engine(reference("llama"), 64)
    masked(made, 0, prompts(6, 4)[0], 5)
    with pytest.raises(BadMask):
        made.allow(0, 4, mask)


def test_bits_beyond_the_vocabulary_allow_nothing() -> None:
    with pytest.raises(BadMask):
        allowed(b"\0\xf0", 12)
    assert allowed(b"\x01\xf8", 12).nonzero()[:, 0].tolist() == [0, 11]


def test_probabilities_are_of_what_may_come() -> None:
    logits = torch.arange(VOCABULARY, dtype=torch.float32) / 50
    mask = allowed(bits([3, 200, 300]), VOCABULARY)
    chosen = choose(logits, Sampling(logprobs=20), [1, 2], 2, VOCABULARY - 1, mask)
    expected = logits[[3, 200, 300]].log_softmax(-1).tolist()
    assert chosen.token == 300
    assert chosen.logprob == pytest.approx(expected[2])
    assert [token for token, _ in chosen.top] == [300, 200, 3]
    assert [logprob for _, logprob in chosen.top] == pytest.approx(expected[::-1])


def test_sampling_is_that_of_logits_without_the_others() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(VOCABULARY, generator=generator)
    may = sorted(torch.randperm(VOCABULARY, generator=generator)[:40].tolist())
    mask = allowed(bits(may), VOCABULARY)
    rest = torch.full_like(logits, float("-inf"))
    rest[may] = logits[may]
    for seed in range(30):
        for settings in ({"top_p": 0.8}, {"top_k": 50}, {"min_p": 0.1}, {"frequency_penalty": 1.0}):
            sampling = Sampling(temperature=1.0, seed=seed, **settings)
            tokens = [5, may[0], may[0]]
            found = choose(logits, sampling, tokens, 1, 0, mask).token
            assert found in may
            assert found == choose(rest, sampling, tokens, 1, 0).token
