"""Triton's kernels for what adapters add, in Triton's interpreter, against torch and `transformers`."""

import pytest
import torch
import triton_here
from adapted_models import adapted, adapter
from language_models import prompts, reference, spec_of, wrong_tokens
from runtime_engines import begin

from dormouse.core.decisions.batches.batch import NO_ADAPTER, Batch
from dormouse.gpuserver.runtime import models
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.engine import Engine, kv_layout
from dormouse.gpuserver.runtime.low_rank import AdapterRows, LowRank, Table, add_each

if not triton_here.HERE:
    pytest.skip("needs Triton, which make setup puts beside the environment", allow_module_level=True)

from dormouse.gpuserver.runtime.backends.low_rank_on_triton import SPLIT_INPUTS, TritonLowRank
from dormouse.gpuserver.runtime.backends.on_triton import TritonBackend

RANKS = (1, 8, 16, 17, 64)
OWNERS = [*[NO_ADAPTER] * 3, *[0] * 33, 1, 2, 2, *[3] * 16, 4, *[5] * 2, NO_ADAPTER, 1]  # 5 adds nothing here


def table_of(inputs: int, outputs: int, dtype: torch.dtype) -> Table:
    table = Table(8)
    for number, rank in enumerate(RANKS):
        bias = torch.randn(outputs).to(dtype) if number % 2 else None
        down, up = torch.randn(rank, inputs) / inputs**0.5, torch.randn(rank, outputs) / rank**0.5
        table.put(number, LowRank(down.to(dtype), up.to(dtype), 0.5 + number, bias))
    return table


def rows_of(owners: list[int]) -> AdapterRows:
    numbers = torch.tensor(owners)
    return AdapterRows(numbers, numbers, (owners, owners), {*owners} - {NO_ADAPTER}, max(RANKS))


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (96, 70), (7, 33), (2 * SPLIT_INPUTS + 40, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_what_torch_adds(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    torch.manual_seed(2)
    table, low = table_of(inputs, outputs, dtype), TritonLowRank()
    given, before = torch.randn(len(OWNERS), inputs).to(dtype), torch.randn(len(OWNERS), outputs).to(dtype)
    found, wanted = before.clone(), before.double()
    low.add(table, given, found, rows_of(OWNERS), False)
    for number, each in table.by_number.items():
        own = torch.tensor(OWNERS) == number
        exact = given[own].double() @ each.down.double().T @ each.up.double()
        wanted[own] += each.scale * (exact + (0 if each.bias is None else each.bias.double()))
    tolerance = 1e-4 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
    assert found[torch.tensor(OWNERS) == NO_ADAPTER].equal(before[torch.tensor(OWNERS) == NO_ADAPTER])


def test_a_row_is_the_same_alone_and_beside_others() -> None:
    torch.manual_seed(3)
    table, low = table_of(1100, 70, torch.float32), TritonLowRank()
    given = torch.randn(len(OWNERS), 1100)
    together = torch.zeros(len(OWNERS), 70)
    low.add(table, given, together, rows_of(OWNERS), False)
    for row in (3, 20, 36, 37, 38, 50, 55):
        alone = torch.zeros(1, 70)
        low.add(table, given[row : row + 1], alone, rows_of([OWNERS[row]]), False)
        # A GPU adds in one order. NumPy's library, the interpreter's, may take another one for another row of a tile.
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-5)


def test_a_table_that_changes_is_read_again() -> None:
    """Also one with more entries; and rows without any adapter get nothing."""
    torch.manual_seed(4)
    table, low = table_of(64, 64, torch.float32), TritonLowRank()
    given, another = torch.randn(3, 64), LowRank(torch.randn(4, 64), torch.randn(4, 64), 2.0)

    def check(*owners: int) -> None:
        found, wanted = torch.zeros(3, 64), torch.zeros(3, 64)
        low.add(table, given, found, rows_of([*owners]), False)
        add_each(table, given, wanted, rows_of([*owners]), False)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)

    check(0, 1, 2)
    table.put(1, another)
    check(0, 1, 2)
    table.drop(0)
    check(0, 1, 2)
    table.resize(16)
    table.put(9, another)
    check(0, 9, 9)
    check(*[NO_ADAPTER] * 3)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_sequences_with_adapters_say_what_transformers_says(family: str) -> None:
    model = reference(family, num_hidden_layers=2)
    layout = kv_layout(spec_of(model))
    memory = torch.full((16 * layout.block_nbytes // 4,), float("nan"))
    attention = BlockAttention(layout, memory, TritonBackend(layout, memory, processors=1))
    built = models.build(spec_of(model), attention)
    models.bind(built, {name: parameter.data for name, parameter in model.named_parameters()})
    made = Engine(built, attention, lambda blocks: False)
    made.batch = Batch(made.blocks, step_tokens=24)
    made.add_extent(0, 0, 16 * layout.block_nbytes)
    every = [adapter(model, 1), adapter(model, 2, rank=20, only="1.")]
    for each in every:
        made.bind(made.adapters.open(), each)
    given = [NO_ADAPTER, 1, 0, 1]
    begun = [begin(made, number, prompts(9, 21)[0], 4, adapter=of) for number, of in enumerate(given)]
    while not made.batch.idle:
        assert made.step() is not None
    for sequence, of in zip(begun, given, strict=True):
        with adapted(model, {} if of == NO_ADAPTER else every[of]):
            assert wrong_tokens(model, sequence.tokens, sequence.prompt) == []
    assert len({tuple(sequence.tokens) for sequence in begun}) == 3
