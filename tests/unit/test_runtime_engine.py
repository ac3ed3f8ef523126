"""The engine of a runtime against `transformers`: every family, in chunks, batched, preempted, sharing beginnings."""

import subprocess
import sys
from typing import Any

import needs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import TINY, VOCABULARY, prompts, reference, spec_of, wrong_tokens
from runtime_engines import begin, engine

from dormouse.core.decisions.batches.batch import Batch, Sequence
from dormouse.core.decisions.batches.blocks import Blocks
from dormouse.gpuserver.runtime import kernels, models
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.backends.native import NativeBackend
from dormouse.gpuserver.runtime.engine import BadLogits, Engine, Generation, kv_layout
from dormouse.gpuserver.runtime.sampling import Sampling
from dormouse.gpuserver.runtime.work import StepWork
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.llm import DecoderSpec


def finish(made: Engine) -> None:
    while not made.batch.idle:
        assert made.step() is not None, "it stands still"
        made.batch.check()
    assert not made.generations
    assert made.blocks.available == made.blocks.count


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("family", TINY)
def test_each_family_says_what_transformers_says(family: str, native: bool) -> None:
    model = reference(family)
    made = engine(model, 64, native, step_tokens=40)
    sequences = [begin(made, number, prompt, 24) for number, prompt in enumerate(prompts(1, 5, 17, 33, 64, 3))]
    finish(made)
    for sequence in sequences:
        assert len(sequence.tokens) == sequence.limit
        assert wrong_tokens(model, sequence.tokens, sequence.prompt) == []


@needs.COMPILER
def test_the_kernels_were_there() -> None:
    assert isinstance(engine(reference("llama"), 2).attention.backend, NativeBackend)


@needs.COMPILER
def test_the_kernels_are_loaded_once() -> None:
    """A runtime has them from the process that forked it: it may not read the file that they lie in."""
    assert kernels.load() is kernels.load() is not None


@needs.COMPILER
def test_the_kernels_leave_subnormal_numbers_as_they_are() -> None:
    """A library that was linked with fast mathematics makes its whole process take them for zero."""
    code = "from dormouse.gpuserver.runtime import kernels; assert kernels.load(); print(5e-324 * float('1'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "5e-324\n"


def test_little_memory_preempts_and_changes_nothing() -> None:
    model = reference("llama")
    given_ = prompts(2, 20, 25, 30)
    alone = []
    for prompt in given_:
        made = engine(model, 12)
        alone.append(begin(made, 0, prompt, 40))
        finish(made)
    made = engine(model, 8)
    beside = [begin(made, number, prompt, 40) for number, prompt in enumerate(given_)]
    finish(made)
    assert sum(sequence.preempted for sequence in beside) > 0
    assert [each.tokens for each in beside] == [each.tokens for each in alone]


def test_tokens_of_a_prompt_count_once_as_they_are_computed() -> None:
    """In chunks, preempted, and with a beginning that is there already: also of one whose client leaves."""
    made = engine(reference("llama"), 8, step_tokens=16)
    for number, prompt in enumerate([*prompts(2, 20, 40, 45), *prompts(2, 20)]):
        begin(made, number, prompt, 40).owner = number
    counted = [0] * 4
    preempted = False
    while not made.batch.idle:
        assert made.step() is not None
        for owner, work in made.step_work.items():
            counted[owner] += work.prompt
        for sequence in made.batch.running:
            assert counted[sequence.number] == sequence.counted >= min(sequence.computed, sequence.prompt)
            preempted |= sequence.preempted > 0
    assert preempted
    assert counted == [20, 40, 45, 20]


def test_a_prompt_whose_client_leaves_has_counted_what_was_computed() -> None:
    made = engine(reference("llama"), 8, step_tokens=16)
    begin(made, 0, prompts(2, 60)[0], 4)
    parts = []
    for _ in range(3):
        assert made.step() == []
        parts.append(made.step_work[0].prompt)
    made.remove(0)
    assert parts == [16, 16, 16]


def test_equal_beginnings_are_computed_once() -> None:
    model = reference("qwen3")
    made = engine(model, 32)
    start, *ends = prompts(3, 50, 9, 4)
    first = begin(made, 0, start + ends[0], 8)
    finish(made)
    second = begin(made, 1, start + ends[1], 8)
    finish(made)
    assert (first.reused, second.reused) == (0, 48)
    assert wrong_tokens(model, second.tokens, second.prompt) == []


def test_beginnings_are_not_shared_across_salts() -> None:
    made = engine(reference("llama"), 32)
    (start,) = prompts(4, 40)
    for number, salt in enumerate((b"one", b"two", b"one")):
        sequence = Sequence(number, list(start), 40, 44, salt)
        made.add(number, Generation(sequence, Sampling(), frozenset()))
        finish(made)
        assert sequence.reused == (32 if number == 2 else 0)


def test_sampled_tokens_depend_on_seed_and_position_only() -> None:
    model = reference("mistral")
    given_ = prompts(5, 20, 25, 30)
    sampling = [Sampling(temperature=0.9, top_p=0.95, top_k=50, seed=seed) for seed in (7, 8, 7)]
    alone = []
    for prompt, how in zip(given_, sampling, strict=True):
        made = engine(model, 16)
        alone.append(begin(made, 0, prompt, 40, how).tokens)
        finish(made)
    made = engine(model, 8)
    beside = [begin(made, number, given_[number], 40, sampling[number]) for number in range(3)]
    finish(made)
    assert sum(sequence.preempted for sequence in beside) > 0
    assert [sequence.tokens for sequence in beside] == alone
    made = engine(model, 16)
    other = begin(made, 0, given_[0], 40, Sampling(temperature=0.9, top_p=0.95, top_k=50, seed=9))
    finish(made)
    assert other.tokens != alone[0]


def test_a_client_that_leaves_gives_its_blocks_back_at_once() -> None:
    made = engine(reference("llama"), 16)
    begin(made, 0, prompts(6, 40)[0], 40)
    made.step()
    made.remove(0)
    made.batch.check()
    assert made.batch.idle
    assert made.blocks.available == 16


def test_logits_that_are_no_numbers_are_an_error_and_nothing_is_lost() -> None:
    model = reference("llama")
    made = engine(model, 16)
    begin(made, 0, prompts(7, 10)[0], 4)
    weight = made.model.model.norm.weight.data
    kept = weight.clone()
    weight.fill_(float("nan"))
    with pytest.raises(BadLogits) as raised:
        made.step()
    assert raised.value.numbers == [0]
    weight.copy_(kept)
    finish(made)


def test_a_sequence_with_bad_logits_is_named_and_the_others_go_on() -> None:
    model = reference("llama")
    made = engine(model, 16)
    good = begin(made, 0, prompts(7, 10)[0], 20)
    begin(made, 1, [5, 300, 6], 4)
    third = begin(made, 2, prompts(8, 12)[0], 20)
    made.model.model.embed_tokens.weight.data[300] = float("nan")
    with pytest.raises(BadLogits) as raised:
        made.step()
    assert raised.value.numbers == [1]
    assert made.step_work == {0: StepWork(tokens=25)}, "its tokens count when they are computed again"
    made.remove(1)
    finish(made)
    for sequence in (good, third):
        assert wrong_tokens(reference("llama"), sequence.tokens, sequence.prompt) == []


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_is_bound_again_to_other_memory(family: str) -> None:
    """As with each seat; also what is tied, and what layers know of their weights."""
    model = reference(family)
    made = engine(model, 32)
    first = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    models.bind(made.model, first)
    weights = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    models.bind(made.model, weights)
    for tensor in (*first.values(), *(parameter.data for parameter in model.parameters())):
        tensor.fill_(float("nan"))  # it is no longer theirs
    sequence = begin(made, 0, prompts(8, 20)[0], 10)
    finish(made)
    assert wrong_tokens(reference(family), sequence.tokens, sequence.prompt) == []
    assert {parameter.data_ptr() for parameter in made.model.parameters()} == {w.data_ptr() for w in weights.values()}


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        (lambda w: {**w, "model.layers.0.extra": torch.zeros(1)}, "have 'model.layers.0.extra'"),
        (lambda w: {name: tensor for name, tensor in w.items() if "norm" not in name}, "lack"),
        (lambda w: {**w, "model.norm.weight": torch.zeros(3)}, r"is torch.float32 \[3\], its model wants"),
        (lambda w: {**w, "model.norm.weight": torch.zeros(64, dtype=torch.float16)}, "is torch.float16"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(weights: object, what: str) -> None:
    model = reference("llama")
    spec = spec_of(model)
    built = models.build(spec, BlockAttention(kv_layout(spec), torch.zeros(1)))
    assert callable(weights)
    with pytest.raises(ConfigError, match=what):
        models.bind(built, weights({name: parameter.data for name, parameter in model.named_parameters()}))


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("bloom", "vocab_size", 5),
        ("llama", "auto_map", {"AutoModel": "evil.Model"}),
        ("llama", "_attn_implementation", "hub/kernel"),
        ("llama", "hidden_act", "exec"),
        ("llama", "hidden_size", 1 << 40),
        ("llama", "hidden_size", True),
        ("llama", "rope_parameters", {"rope_type": "hub"}),
        ("llama", "rms_norm_eps", float("nan")),
        ("llama", "num_key_value_heads", 3),
    ],
)
def test_what_is_no_known_field_is_refused_by_name(family: str, field: str, value: object) -> None:
    config: Any = {**spec_of(reference("llama")).config, field: value}
    with pytest.raises(ConfigError, match=family if family == "bloom" else "heads" if value == 3 else field):
        DecoderSpec(family=family, config=config, dtype="float32", context=64).check()


# --- the books


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_books_of_blocks_hold_whatever_comes(data: st.DataObject) -> None:
    blocks = Blocks(4)
    batch = Batch(blocks, step_tokens=data.draw(st.integers(1, 40)), sequences=data.draw(st.integers(1, 6)))
    numbers = iter(range(10_000))
    extents: dict[int, int] = {}

    def grow(wanted: int) -> bool:
        assert wanted > 0
        if len(extents) >= 6 or not data.draw(st.booleans()):
            return False
        extent = next(numbers)
        extents[extent] = data.draw(st.integers(1, 4))
        blocks.grow(extent, extents[extent])
        return True

    alive: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 60))):
        act = data.draw(st.sampled_from(["add", "step", "step", "step", "leave", "shrink", "preempt"]))
        if act == "add":
            length = data.draw(st.integers(1, 30))
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))  # many are equal
            sequence = Sequence(next(numbers), tokens, length, length + data.draw(st.integers(1, 8)))
            alive.append(sequence)
            batch.add(sequence)
        elif act == "leave" and alive:
            batch.remove(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
        elif act == "shrink":
            for extent in blocks.returnable(data.draw(st.integers(0, 3))):
                blocks.shrink(extent)
                del extents[extent]
        elif act == "preempt":
            batch.preempt_all()
        else:
            for part in batch.plan(grow):
                assert part.start == part.sequence.computed
                assert part.tokens >= 1
                batch.computed(part)
                if part.samples:
                    part.sequence.tokens.append(data.draw(st.integers(0, 1)))
                    if len(part.sequence.tokens) >= part.sequence.limit:
                        batch.remove(part.sequence)
                        alive.remove(part.sequence)
        batch.check()
        assert len(batch.running) + len(batch.waiting) == len(alive)


def test_the_vocabulary_is_what_the_tests_say() -> None:
    assert spec_of(reference("gpt2")).vocabulary == VOCABULARY
