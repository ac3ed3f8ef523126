"""Steps that are captured and replayed: here a replay computes the captured step anew, in Triton's interpreter, from
what is at its place on the device by then, and from whatever the host knew when it was captured.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton_here
from adapted_models import adapted, adapter
from language_models import prompts, reference, spec_of, wrong_tokens
from runtime_engines import begin
from transformers import PreTrainedModel

from dormouse.core.decisions.batches.batch import NO_ADAPTER, Batch, Sequence
from dormouse.gpuserver.runtime import models, step_graphs
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.engine import Engine, kv_layout
from dormouse.gpuserver.runtime.packing import FREE, NOWHERE, FixedColumns
from dormouse.gpuserver.runtime.step_graphs import AFTER, GRAPHS, ROWS, StepGraphs

if not triton_here.HERE:
    pytest.skip("needs Triton, which make setup puts beside the environment", allow_module_level=True)

from dormouse.gpuserver.runtime.backends.low_rank_on_triton import DeviceTable
from dormouse.gpuserver.runtime.backends.on_triton import TritonBackend

BLOCKS = 40


class Again:
    """Captures for an engine on the CPU."""

    def __init__(self, attention: BlockAttention) -> None:
        self._attention, self.captured = attention, 0

    def __call__(self, call: Callable[[], torch.Tensor]) -> step_graphs.Replay:
        self.captured += 1
        step = self._attention.step

        def replay() -> torch.Tensor:
            now, self._attention.step = self._attention.step, step
            try:
                with patch.object(DeviceTable, "follow"):  # a graph asks nobody what adapters there are
                    return call()
            finally:
                self._attention.step = now

        return replay


def engine(model: PreTrainedModel, processors: int = 1) -> tuple[Engine, Again]:
    layout = kv_layout(spec_of(model, 2048))
    memory = torch.full((BLOCKS * layout.block_nbytes // 4,), float("nan"))
    attention = BlockAttention(layout, memory, backend := TritonBackend(layout, memory, processors))
    built = models.build(spec_of(model, 2048), attention)
    models.bind(built, {name: parameter.data for name, parameter in model.named_parameters()})
    made, again = Engine(built, attention, lambda blocks: False), Again(attention)
    made.graphs = StepGraphs(made.forward, backend, lambda: again)
    made.add_extent(0, 0, BLOCKS * layout.block_nbytes)
    return made, again


def replayed(made: Engine) -> int:
    assert made.graphs is not None
    return made.graphs.replayed


def finish(made: Engine) -> None:
    while not made.batch.idle:
        assert made.step() is not None


def right(model: PreTrainedModel, *sequences: Sequence) -> None:
    for sequence in sequences:
        assert len(sequence.tokens) == sequence.limit
        assert wrong_tokens(model, sequence.tokens, sequence.prompt) == []


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "gpt2"])
def test_what_is_replayed_says_what_transformers_says(family: str) -> None:
    """Sequences come and go, so that steps have one, two, three (of four) and two rows; their blocks are others."""
    model = reference(family, num_hidden_layers=2)
    made, again = engine(model)
    lengths = [(9, 24), (12, 14), (18, 8)]
    begun = []
    for number, (prompt, new) in enumerate(lengths):
        begun.append(begin(made, number, prompts(number, prompt)[0], new))
        for _ in range(AFTER + 3):
            made.step()
    finish(made)
    right(model, *begun)
    assert again.captured == 3  # of one row, of two, and of four
    assert replayed(made) == 12
    last = begin(made, 9, prompts(9, 19)[0], 4)
    before = replayed(made)
    finish(made)
    right(model, last)
    assert (replayed(made) - before, again.captured) == (3, 3)  # its prompt was computed otherwise


def test_nothing_is_written_for_rows_of_no_token() -> None:
    model = reference("llama", num_hidden_layers=2)
    made, again = engine(model)
    begun = [begin(made, number, prompts(number, 5)[0], 10) for number in range(3)]
    finish(made)
    assert (again.captured, replayed(made) > 0) == (1, True)
    layout = made.attention.layout
    written = int((~made.attention.memory.isnan()).sum())
    per_token = layout.block_nbytes // 4 // layout.block_tokens
    assert written == per_token * sum(len(sequence.tokens) - 1 for sequence in begun)


def test_prompts_are_replayed_beside_single_tokens() -> None:
    """In pieces, of one and of several; also where nothing is sampled yet."""
    model = reference("llama", num_hidden_layers=2)
    made, again = engine(model)
    made.batch = Batch(made.blocks, step_tokens=24)
    begun = [begin(made, 0, prompts(0, 5)[0], 26)]
    for number, length in enumerate((60, 61, 30, 70, 24, 9, 12), 1):
        made.step()
        begun.append(begin(made, number, prompts(number, length)[0], 3))
        for _ in range(3):
            made.step()
    finish(made)
    right(model, *begun)
    assert made.graphs is not None
    kinds = [kind for kind in made.graphs._graphs if kind.pieces]
    assert {kind.tokens for kind in kinds} == {16, 32}
    assert again.captured == len(made.graphs._graphs)
    layout = made.attention.layout
    written = int((~made.attention.memory.isnan()).sum())
    assert written <= layout.block_nbytes // 4 // layout.block_tokens * sum(len(each.tokens) - 1 for each in begun)


def test_prompts_with_adapters_are_replayed_and_another_that_takes_a_number_is_seen() -> None:
    model = reference("llama", num_hidden_layers=1)
    made, again = engine(model)
    every = [adapter(model, 1), adapter(model, 2, rank=20)]
    for each in every:
        made.bind(made.adapters.open(), each)

    def check(turn: int) -> None:
        owners = [turn % 2, NO_ADAPTER, 1]
        texts = [prompts(9 * turn + each, 19 - turn)[0] for each in range(len(owners))]
        begun = [begin(made, each, texts[each], 1, adapter=of) for each, of in enumerate(owners)]
        finish(made)
        for sequence, of in zip(begun, owners, strict=True):
            with adapted(model, {} if of == NO_ADAPTER else every[of]):
                right(model, sequence)

    for turn in range(AFTER + 2):
        check(turn)
    assert (again.captured, replayed(made)) == (1, 1)
    made.unbind(1)
    made.adapters.close(1)
    assert made.adapters.open() == 1
    every[1] = adapter(model, 3, rank=20)
    made.bind(1, every[1])
    check(AFTER + 2)
    assert (again.captured, replayed(made)) == (1, 2)


def test_longer_contexts_have_graphs_of_their_own() -> None:
    """They are cut into more splits, whose sums are merged; not those of the fourth row, which is none."""
    model = reference("llama", num_hidden_layers=1, max_position_embeddings=1024)
    made, again = engine(model, processors=132)
    begun = [begin(made, number, prompts(3 + number, length)[0], 20) for number, length in enumerate((505, 9, 9))]
    finish(made)
    right(model, *begun)
    assert made.graphs is not None
    assert [(kind.tokens, kind.splits) for kind in made.graphs._graphs] == [(4, 1), (4, 2)]
    assert (again.captured, replayed(made)) == (2, 20 - 2 - 2 * (AFTER + 1))


def test_adapters_are_replayed_and_what_takes_their_number_or_place_is_seen() -> None:
    model = reference("llama", num_hidden_layers=1)
    made, _ = engine(model)
    every = [
        adapter(model, 1, only="proj"),
        adapter(model, 2, rank=20, only="proj"),
        adapter(model, 3, rank=4, only="q_proj"),
    ]
    for each in every[:2]:
        made.bind(made.adapters.open(), each)

    def answered(*owners: int) -> list[Sequence]:
        begun = [begin(made, each, prompts(9, 7)[0], 5, adapter=of) for each, of in enumerate(owners)]
        finish(made)
        return begun

    def check(*owners: int) -> None:
        for sequence, of in zip(answered(*owners), owners, strict=True):
            with adapted(model, {} if of == NO_ADAPTER else every[of]):
                right(model, sequence)

    def replayed_since(before: int) -> tuple[int, int]:
        """Graphs of single tokens, and what was replayed."""
        assert made.graphs is not None
        return sum(not kind.pieces for kind in made.graphs._graphs), replayed(made) - before

    before = 0
    check(NO_ADAPTER, 1, 0, 1)
    assert replayed_since(before) == (1, 4 - AFTER - 1)
    before = replayed(made)
    check(1, 1, 0, 0)  # the same kind of step
    assert replayed_since(before) == (1, 4)
    made.bind(made.adapters.open(), every[2])  # to products that have a table
    before = replayed(made)
    check(2, 1, NO_ADAPTER, 0)
    assert replayed_since(before) == (1, 4)
    made.unbind(1)
    made.adapters.close(1)
    assert made.adapters.open() == 1
    every[1] = adapter(model, 7, rank=20, only="proj")
    made.bind(1, every[1])
    before = replayed(made)
    check(2, 1, 1, 0)
    assert replayed_since(before) == (1, 4)
    check(*[NO_ADAPTER] * 4)
    assert replayed_since(before)[0] == 2  # without what adapters add
    made.bind(made.adapters.open(), adapter(model, 5, only="lm_head"))
    every.append(adapter(model, 5, only="lm_head"))
    check(3, 1, 2, 0)
    assert replayed_since(before)[0] == 3  # one product more


def test_an_adapter_with_parameters_of_its_own_is_computed_without() -> None:
    model = reference("llama", num_hidden_layers=1)
    made, again = engine(model)
    norm = made.model.model.norm.weight.clone() * 3
    made.bind(made.adapters.open(), adapter(model, 1), {"model.norm.weight": norm})
    made.bind(made.adapters.open(), adapter(model, 2))
    own = begin(made, 0, prompts(9, 21)[0], 9, adapter=0)
    other = begin(made, 1, prompts(9, 21)[0], 20, adapter=1)
    for _ in range(9):
        made.step()
    assert (again.captured, replayed(made)) == (0, 0)
    finish(made)
    assert again.captured == 1
    with adapted(model, adapter(model, 2)):
        right(model, other)
    with adapted(model, adapter(model, 1)):
        whole: Any = model
        before = whole.model.norm.weight.data
        whole.model.norm.weight.data = norm.data
        try:
            right(model, own)
        finally:
            whole.model.norm.weight.data = before


def test_a_product_that_only_such_an_adapter_changes_is_not_taken_for_captured() -> None:
    model = reference("llama", num_hidden_layers=1)
    made, _ = engine(model)
    norm = made.model.model.norm.weight.clone()
    every = [adapter(model, 1, only="q_proj"), adapter(model, 2, only="v_proj")]
    every.append(adapter(model, 3, only="q_proj") | adapter(model, 4, only="v_proj"))
    made.bind(made.adapters.open(), every[0])
    made.bind(made.adapters.open(), every[1], {"model.norm.weight": norm})

    def check(number: int, seed: int) -> None:
        sequence = begin(made, 0, prompts(seed, 21)[0], 9, adapter=number)
        finish(made)
        with adapted(model, every[number]):
            right(model, sequence)

    check(0, 1)
    before = replayed(made)
    made.bind(made.adapters.open(), every[2])
    check(2, 2)
    assert (before, replayed(made) > before) == (8 - AFTER - 1, True)


def test_weights_elsewhere_and_more_blocks_are_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "BLOCKS", 4)
    model, other = reference("llama", num_hidden_layers=1), reference("llama", 5, num_hidden_layers=1)
    made, again = engine(model)
    assert made.graphs is not None

    def two() -> None:
        begun = [begin(made, number, prompts(number, 20)[0], 8) for number in (1, 2)]
        finish(made)
        right(model, *begun)

    two()
    assert again.captured == 1
    long = begin(made, 3, prompts(3, 150)[0], 9)
    finish(made)
    right(model, long)
    two()
    assert again.captured == 3
    models.bind(made.model, {name: parameter.data for name, parameter in other.named_parameters()})
    made.graphs.forget()
    made.batch.preempt_all()
    last = begin(made, 4, prompts(4, 20)[0], 8)
    before = replayed(made)
    finish(made)
    right(other, last)
    assert (again.captured, replayed(made) - before) == (4, 7 - AFTER - 1)


def test_what_cannot_be_captured_is_said_once_and_computed(capsys: pytest.CaptureFixture[str]) -> None:
    model = reference("llama", num_hidden_layers=1)
    made, _ = engine(model)
    assert made.graphs is not None

    def refused(call: Callable[[], torch.Tensor]) -> step_graphs.Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    made.graphs._new_capture = lambda: refused
    sequence = begin(made, 0, prompts(1, 20)[0], 12)
    finish(made)
    right(model, sequence)
    assert replayed(made) == 0
    assert capsys.readouterr().err.count("steps are computed without graphs: RuntimeError: operation not") == 1


def test_a_step_that_lacks_memory_has_what_graphs_hold() -> None:
    model = reference("llama", num_hidden_layers=1)
    made, again = engine(model)
    assert made.graphs is not None
    graphs = made.graphs

    def lack(*_: Any) -> None:
        if graphs._graphs:
            raise torch.OutOfMemoryError("CUDA out of memory")

    sequence = begin(made, 0, prompts(1, 20)[0], 12)
    for _ in range(AFTER + 3):
        made.step()
    assert (again.captured, replayed(made)) == (1, 1)
    hook = made.model.register_forward_pre_hook(lack)
    finish(made)
    right(model, sequence)
    assert (again.captured, graphs.trouble, len(graphs._graphs)) == (1, "OutOfMemoryError: CUDA out of memory", 0)
    graphs.forget()  # the next seat
    hook.remove()
    another = begin(made, 1, prompts(2, 20)[0], 12)
    finish(made)
    right(model, another)
    assert (again.captured, graphs.trouble) == (2, "")


def test_graphs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "GRAPHS", 2)
    model = reference("llama", num_hidden_layers=1)
    made, again = engine(model)
    assert made.graphs is not None
    for count in (1, 2, 3, 1, 3):
        for number in range(count):
            begin(made, number, prompts(number, 5)[0], AFTER + 3)
        finish(made)
        assert len(made.graphs._graphs) <= 2
    assert len(ROWS) <= GRAPHS
    assert again.captured == 6  # two of them of prompts; the first goes for the third


def test_columns_are_where_they_were_and_full() -> None:
    fixed = FixedColumns(torch.device("cpu"), [4, FREE, 4, 2, FREE], 100)
    first = fixed.put([4, FREE, 0, 2, FREE], [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8], [], [3], [2, 2]])
    assert [each.tolist() for each in first] == [[5, 6, 7, NOWHERE], [*range(1, 9)], [], [3, 0], [2, 2]]
    second = fixed.put([3, FREE, 3, 2, FREE], [[9], [8], [4], [], []])
    assert [each.data_ptr() for each in first if len(each)][:3] == [second[at].data_ptr() for at in (0, 1, 3)]
    assert [each.tolist() for each in second] == [[9, NOWHERE, NOWHERE], [8], [4, 0, 0], [0, 0], []]
    assert [each.tolist() for each in fixed.put([1, FREE], [[4], [1]])] == [[4], [1]]
