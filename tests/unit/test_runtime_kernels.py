"""The C++ kernels against torch in float64, as each kind of processor would run them; and that a row's result does not
depend on what is computed beside it.
"""

import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from language_models import prompts, reference, spec_of, wrong_tokens
from torch import nn
from transformers import PreTrainedModel

from dormouse.core import native
from dormouse.core.decisions.batches.batch import Batch, Sequence
from dormouse.gpuserver.runtime import kernels, layers, leaves, models
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.backends.native import NativeBackend
from dormouse.gpuserver.runtime.backends.oracle import TorchBackend
from dormouse.gpuserver.runtime.backends.protocol import Scores
from dormouse.gpuserver.runtime.engine import Engine, Generation, kv_layout
from dormouse.gpuserver.runtime.sampling import Chosen, Sampling
from dormouse.gpuserver.runtime.tables import KvLayout, StepPart, StepTables
from dormouse.schemas.errors import ConfigError

MACHINES: Final[dict[str, tuple[str, ...]]] = {
    "this one": ("-march=native",),
    "AVX2": ("-mavx2", "-mfma", "-mno-avx512f"),
    "no vectors": ("-fno-tree-vectorize",),
}


NO_STEP: Any = SimpleNamespace(step=None)


@cache
def library_for(machine: str) -> ctypes.CDLL:
    return kernels.opened(kernels.build(MACHINES[machine]))


@pytest.fixture(params=MACHINES)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    if request.param == "AVX2" and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs a processor with AVX2")
    return library_for(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def linear(
    library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, wide: bool = False
) -> torch.Tensor:
    module = nn.Linear(1, 1, bias=bias is not None)
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    return leaves.NativeLinear(module, library, wide, NO_STEP)(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 32, 4), (5, 7, 3), (16, 96, 64), (7, 65, 37), (300, 80, 33)]
)
def test_products_are_those_of_float64(
    library: ctypes.CDLL, dtype: torch.dtype, rows: int, inputs: int, outputs: int
) -> None:
    torch.manual_seed(1)
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))
    exact = x.double() @ weight.double().T + bias.double()
    wide = linear(library, x, weight, bias, wide=True)
    assert wide.dtype is torch.float32
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(linear(library, x, weight, bias), exact.to(dtype), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(
        linear(library, x, weight, wide=True).double(), exact - bias.double(), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_in_any_batch(library: ctypes.CDLL, dtype: torch.dtype, threads: None) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(130, 100).to(dtype), torch.randn(71, 100).to(dtype)
    torch.set_num_threads(1)
    together = linear(library, x, weight, wide=True)
    torch.set_num_threads(3)
    for count in (1, 2, 5, 8, 129):
        assert torch.equal(linear(library, x[:count], weight, wide=True), together[:count])
        assert torch.equal(linear(library, x[-count:], weight, wide=True), together[-count:])


def test_numbers_that_are_none_come_out_as_none(library: ctypes.CDLL) -> None:
    weight = torch.randn(8, 40)
    weight[3, 39] = float("nan")
    assert torch.randn(2, 40).isfinite().all()
    assert linear(library, torch.randn(2, 40), weight).isnan().any(0).tolist() == [each == 3 for each in range(8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "scores", [Scores(0.2, 0, 0.0), Scores(0.2, 20, 0.0), Scores(0.2, 0, 3.0), Scores(0.3, 5, 2.0)]
)
def test_attention_is_that_of_torch(library: ctypes.CDLL, dtype: torch.dtype, scores: Scores) -> None:
    """Over blocks that lie anywhere, beside memory that nobody wrote."""
    torch.manual_seed(3)
    layout = KvLayout(layers=2, kv_heads=2, head_dim=24, block_tokens=16, dtype=dtype)
    size = layout.block_nbytes // dtype.itemsize
    memory = torch.full((24 * size,), float("nan"), dtype=dtype)
    free = iter((torch.randperm(24) * size).tolist())
    lengths = (1, 17, 60, 33)
    blocks = [[next(free) for _ in range(-(-length // 16))] for length in lengths]
    kernel, oracle = NativeBackend(layout, memory, library), TorchBackend(layout, memory)
    beginnings = [(length, length) for length in lengths]  # whole prompts, then the same as single tokens and pieces
    for round_, parts in enumerate((beginnings, [(1, 1), (1, 17), (23, 60), (2, 33)])):
        row, made = 0, []
        for (tokens, context), own in zip(parts, blocks, strict=True):
            made.append(StepPart(row, tokens, context, own))
            row += tokens
        step = StepTables(made, layout, memory.device, kernel.columns(made))
        query, key, value = (torch.randn(row, heads, 24).to(dtype).transpose(0, 1) for heads in (6, 2, 2))
        kernel.write(step, 1, key, value)
        written = memory.clone()
        if not round_:
            memory.fill_(float("nan"))
            oracle.write(step, 1, key, value)
            assert torch.equal(memory.nan_to_num(7), written.nan_to_num(7))
        found, expected = (torch.empty(row, 6, 24, dtype=dtype) for _ in range(2))
        kernel.attend(step, 1, query, found, scores)
        oracle.attend(step, 1, query, expected, scores)
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("contiguous", [True, False])  # otherwise torch finds them
def test_the_largest_of_each_row_and_none_of_bad_ones(contiguous: bool) -> None:
    rows = torch.randn(3, 101)
    rows[1, 7] = rows[1, 100] = 9.0
    expected = [int(rows[0].argmax()), 7, int(rows[2].argmax())]

    def find(rows: torch.Tensor) -> list[int]:
        return kernels.largest(rows if contiguous else rows.T.contiguous().T)

    assert find(rows) == expected
    for bad in (float("nan"), float("inf"), float("-inf")):
        for column in (0, 100):
            broken = rows.clone()
            broken[2, column] = bad
            assert find(broken) == [*expected[:2], -1]


def test_without_a_compiler_torch_computes_and_stderr_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build() -> Path:
        raise ConfigError("no compiler")

    monkeypatch.setattr(kernels, "build", build)
    assert kernels.load.__wrapped__() is None
    assert capsys.readouterr().err == "language models will be slow: no compiler\n"


def test_a_changed_header_is_another_library(tmp_path: Path) -> None:
    source, header = tmp_path / "some.cpp", tmp_path / "some.h"
    source.write_text('#include "some.h"')
    names = set()
    for text in ("one", "two"):
        header.write_text(text)
        names.add(native.library_path(source, kernels.FLAGS))
    assert len(names) == 2


# --- whole models


def engine(model: PreTrainedModel, library: ctypes.CDLL, fused: bool, step_tokens: int = 256) -> Engine:
    layout = kv_layout(spec_of(model))
    memory = torch.full((64 * layout.block_nbytes // 4,), float("nan"))
    attention = BlockAttention(layout, memory, NativeBackend(layout, memory, library))
    built = models.build(spec_of(model), attention, fused)
    models.bind(built, {name: parameter.data for name, parameter in model.named_parameters()})
    made = Engine(built, attention, lambda blocks: False)
    made.batch = Batch(made.blocks, step_tokens=step_tokens)
    made.add_extent(0, 0, memory.nbytes)
    return made


def answers(made: Engine, given: list[list[int]], new: int) -> dict[int, list[Chosen]]:
    found: dict[int, list[Chosen]] = {number: [] for number in range(len(given))}
    for number, prompt in enumerate(given):
        sequence = Sequence(number, list(prompt), len(prompt), len(prompt) + new)
        made.add(number, Generation(sequence, Sampling(logprobs=0), frozenset()))
    while not made.batch.idle:
        for each in made.step() or ():
            found[each.number].append(each.chosen)
    return found


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", layers.GATED)
def test_each_processor_says_what_transformers_says(library: ctypes.CDLL, family: str, fused: bool) -> None:
    model = reference(family)
    given = prompts(11, 1, 21, 40)
    for number, found in answers(engine(model, library, fused, 33), given, 10).items():
        tokens = given[number] + [each.token for each in found]
        assert wrong_tokens(model, tokens, len(given[number])) == []


@pytest.mark.parametrize("family", layers.GATED)
def test_probabilities_are_the_same_to_the_last_bit_alone_and_batched(family: str, threads: None) -> None:
    model, library = reference(family), library_for("this one")
    given = prompts(12, 5, 37, 21, 64, 1)
    together = answers(engine(model, library, True, 48), given, 12)
    torch.set_num_threads(1)
    for number, prompt in enumerate(given):
        assert answers(engine(model, library, True), [prompt], 12)[0] == together[number]


def test_a_fused_layer_waits_for_all_its_weights() -> None:
    """Its modules are not called, so nobody else does."""
    made: Any = engine(reference("llama"), library_for("this one"), True).model
    waits = {module: len(parameters) for module, parameters in layers.waiting(made)}
    assert [waits[layer] for layer in made.model.layers] == [9, 9, 9]
    assert waits[made.model.norm] == waits[made.lm_head] == 1
    made = engine(reference("llama"), library_for("this one"), False).model
    waits = {module: len(parameters) for module, parameters in layers.waiting(made)}
    assert [waits[layer.mlp] for layer in made.model.layers] == [3, 3, 3]


def test_an_activation_that_no_kernel_has_leaves_layers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(kernels.ACTIVATIONS, "silu")
    model = reference("llama")
    made: Any = engine(model, library_for("this one"), True)
    assert not any(isinstance(layer.forward, layers.FusedLayer) for layer in made.model.model.layers)
    (found,) = answers(made, prompts(13, 30), 5).values()
    assert wrong_tokens(model, prompts(13, 30)[0] + [each.token for each in found], 30) == []
