"""The allow-list: what is on it, what never may be."""

import asyncio
from typing import Any, NoReturn

import pytest
import torch

from dormouse.core.config import NodeConfig
from dormouse.core.paths import RunPaths
from dormouse.gpuserver.commands import operand_checks, operators
from dormouse.gpuserver.commands.oplist import allowed
from dormouse.gpuserver.device.protocol import DeviceError
from dormouse.gpuserver.executor import main


@pytest.mark.parametrize(
    "name",
    [
        "aten::add.Tensor",
        "aten::linear",
        "aten::scaled_dot_product_attention",
        "aten::conv2d",
        "aten::index.Tensor",
        "aten::embedding",
        "aten::_softmax",
        "aten::_fft_c2c",
        "aten::arange.start_step",
        "aten::normal_",
        "aten::native_layer_norm",
        "aten::lstm.input",
        "aten::_native_multi_head_attention",
        "aten::as_strided",
        "aten::copy_",
        "aten::_to_copy",
        "aten::cat",
        "aten::topk",
    ],
)
def test_ordinary_operations_may_run(name: str) -> None:
    assert name in allowed()


@pytest.mark.parametrize(
    "word",
    [
        "backward",
        "sparse",
        "csr",
        "quantize",
        "nested",
        "from_file",
        "record_stream",
        "pin_memory",
        "segment_reduce",
        "unsafe_index",
    ],
)
def test_families_that_may_not(word: str) -> None:
    assert [name for name in allowed() if word in name] == []


def test_only_plain_operations_of_pytorch_itself() -> None:
    assert len(allowed()) > 1500
    for name, operation in allowed().items():
        assert name.startswith("aten::")
        assert callable(operation.call)
    assert not {"aten::set_.source_Storage", "aten::_stack.out", "aten::_foreach_copy.out", "aten::to_sparse"} & set(
        allowed()
    )


def test_checks_are_for_operations_that_may_run() -> None:
    bases = {operation.base for operation in allowed().values()}
    optional = {
        "cudnn_batch_norm",
        "_native_batch_norm_legit_functional",
        "_batch_norm_no_update",
        "_batch_norm_with_update_functional",
    }
    assert set(operand_checks.CHECKS) - bases <= optional | operators.BUILT_IN
    assert operators.BUILT_IN - set(operand_checks.CHECKS) == {"torchvision::nms"}, "whose kernel checks all it reads"


def _problem(name: str, *args: Any, **kwargs: Any) -> str | None:
    operation = allowed()[f"aten::{name}"]
    return operand_checks.CHECKS[operation.base](operation.bound(list(args), kwargs))


def test_transforms_check_their_dimensions() -> None:
    x = torch.zeros(3, 4)
    assert _problem("_fft_r2c", x, [1], 0, True) is None
    wrong: list[Any] = [[2], [-1], [0, 0], [], [1 << 40], [[]], None]
    for dims in wrong:
        assert _problem("_fft_r2c", x, dims, 0, True) is not None
    assert _problem("_fft_c2r", x.to(torch.complex64), [1], 0, 6) is None
    assert _problem("_fft_c2r", x.to(torch.complex64), [1], 0, 60) is not None


def test_d3_a_check_sees_arguments_however_they_come() -> None:
    """By keyword, a norm without its statistics was not looked at: its kernel follows a null pointer."""
    x, one = torch.zeros(2, 3, 4), torch.zeros(3)
    by_name = {"weight": None, "bias": None, "momentum": 0.1, "eps": 1e-5}
    assert _problem("native_batch_norm", x, running_mean=one, running_var=one, training=False, **by_name) is None
    assert _problem("native_batch_norm", x, running_mean=None, running_var=None, training=True, **by_name) is None
    assert _problem("native_batch_norm", x, running_mean=None, running_var=None, training=False, **by_name)
    assert _problem("native_batch_norm", x, running_mean=one[:1], running_var=one, training=True, **by_name)
    assert _problem("_fft_c2r", x.to(torch.complex64), dim=[1], normalization=0, last_dim_size=60)
    assert _problem("_weight_norm", v=x, g=one[:2]) is None
    assert _problem("_weight_norm", v=x, g=one)


def test_d3_a_polynomial_of_years_is_refused() -> None:
    x = torch.ones(2)
    for operand in (10**9, 1e30, float("nan"), torch.tensor([1.0, 3e38]), torch.tensor([-(1 << 63), 1])):
        assert "can be computed here" in str(_problem("special_laguerre_polynomial_l", x, operand)), operand
    for operand in (5, 0.5, torch.tensor([1.0, 30.0]), torch.empty(0)):
        assert _problem("special_laguerre_polynomial_l", x, operand) is None


def test_d3_a_median_of_what_was_expanded_is_refused() -> None:
    """PyTorch's kernel reads behind it, and gives what it finds there."""
    assert "share their memory" in str(_problem("nanmedian.dim", torch.ones(1).expand(2, 4), 1))
    assert _problem("nanmedian.dim", torch.ones(2, 4).t(), 1) is None
    assert _problem("matrix_power", torch.ones(2, 2), -(1 << 63))
    assert _problem("matrix_power", torch.ones(2, 2), -3) is None


def test_d3_the_sizes_of_a_packed_sequence_are_those_of_its_data() -> None:
    data, state = torch.zeros(5, 2), torch.zeros(1, 3, 2)
    rest: list[Any] = [[state] * 4, True, 1, 0.0, False, False]
    assert _problem("gru.data", data, torch.tensor([3, 2]), state, *rest) is None
    assert _problem("lstm.data", data, torch.tensor([3, 2]), [state, state], *rest) is None
    for sizes in ([2, 3], [3, 3], [5, 0], [6, -1], [3, 2, 0], [3, 3, -1], [1 << 40], []):
        assert _problem("gru.data", data, torch.tensor(sizes, dtype=torch.int64), state, *rest), sizes
    assert _problem("gru.data", data, torch.tensor([3.0, 2.0]), state, *rest)
    assert _problem("gru.input", data, state, *rest) is None


def test_d3_attention_without_heads_is_refused() -> None:
    """Found by the fuzzer: a division by zero ends the process."""
    x = torch.zeros(1, 2, 4)
    for heads in (0, -1, None):
        assert _problem("_transformer_encoder_layer_fwd", x, 4, heads)
        assert _problem("_native_multi_head_attention", x, x, x, 4, heads)
    assert _problem("_transformer_encoder_layer_fwd", x, 4, 2) is None


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "draws"),
    [
        ("aten::scaled_dot_product_attention", ["q", "k", "v"], {}, False),
        ("aten::scaled_dot_product_attention", ["q", "k", "v", None, 0.0], {}, False),
        ("aten::scaled_dot_product_attention", ["q", "k", "v"], {"dropout_p": 0.1}, True),
        ("aten::dropout", ["x", 0.5, True], {}, True),
        ("aten::dropout", ["x", 0.5, False], {}, False),
        ("aten::dropout", ["x", 0.0, True], {}, False),
        ("aten::native_dropout", ["x", 0.5, None], {}, True),
        ("aten::native_dropout", ["x", 0.5, False], {}, False),
        ("aten::lstm.input", ["x", [], [], True, 2, 0.0, False, False, True], {}, False),
        ("aten::lstm.input", ["x", [], [], True, 2, 0.3, True, False, True], {}, True),
        ("aten::rand_like", ["x"], {}, True),
        ("aten::bernoulli", ["x"], {}, True),
        ("aten::multinomial", ["x", 3], {}, True),
    ],
)
def test_what_takes_random_numbers_and_what_only_could(
    name: str, args: list[Any], kwargs: dict[str, Any], draws: bool
) -> None:
    operation = allowed()[name]
    assert operation.random
    assert operation.draws(args, kwargs) is draws


@pytest.mark.parametrize(
    ("kind", "projected"), [(torch.nn.LSTM, 0), (torch.nn.LSTM, 2), (torch.nn.GRU, 0), (torch.nn.RNN, 0)]
)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_d3_a_recurrent_network_has_all_its_weights_and_states(
    kind: Any, projected: int, bidirectional: bool, bias: bool
) -> None:
    """The kernel walks through as many as its layers need, wherever the list ends."""
    more = {"proj_size": projected} if projected else {}
    model = kind(3, 4, num_layers=2, bidirectional=bidirectional, bias=bias, **more)
    weights = model._flat_weights
    name = {torch.nn.LSTM: "lstm.input", torch.nn.GRU: "gru.input", torch.nn.RNN: "rnn_tanh.input"}[kind]
    ways = 4 if bidirectional else 2
    state, cell = torch.zeros(ways, 1, projected or 4), torch.zeros(ways, 1, 4)
    x = torch.zeros(5, 1, 3)

    def problem(given: list[torch.Tensor], state: torch.Tensor = state, layers: int = 2) -> str | None:
        hx = [state, cell] if kind is torch.nn.LSTM else state
        return _problem(name, x, hx, given, bias, layers, 0.0, False, bidirectional, False)

    assert problem(weights) is None
    assert "weights of 2 layers" in str(problem(weights[:-1]))
    assert "weights of 2 layers" in str(problem([]))
    assert "layers and directions" in str(problem(weights, state[:1]))
    assert "layers and directions" in str(problem(weights, layers=3))
    assert "three dimensions" in str(problem(weights, state[0]))


def test_d3_bags_are_found_by_a_list_of_offsets() -> None:
    weight, indices, offsets = torch.zeros(3, 4), torch.tensor([0, 1]), torch.tensor([0, 1])
    for name in ("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"):
        assert _problem(name, weight, indices, offsets, False, 1) is None
        assert "no mode" in str(_problem(name, weight, indices, offsets, False, -1))
        assert "of one" in str(_problem(name, weight, indices, offsets.view(1, 2), False, 0))
        assert "of one" in str(_problem(name, weight, indices.view(1, 2), offsets, False, 0))
        assert "two dimensions" in str(_problem(name, weight.int(), indices, offsets, False, 0))
        assert _problem(name, weight, indices, offsets, False, 0, False, torch.ones(2)) is None
        assert "per_sample_weights" in str(_problem(name, weight, indices, offsets, False, 0, False, torch.ones(1)))
        whole = torch.ones(2).int()
        assert "per_sample_weights" in str(_problem(name, weight, indices, offsets, False, 0, False, whole))


def test_d3_a_weight_norm_of_what_was_expanded_is_refused() -> None:
    for name in ("_weight_norm", "_weight_norm_interface"):
        assert _problem(name, torch.ones(4), torch.ones(4), 0) is None
        assert "share their memory" in str(_problem(name, torch.ones(4), torch.ones(1).expand(4), 0))
        assert "share their memory" in str(_problem(name, torch.ones(1, 2).expand(4, 2), torch.ones(4), 0))


def test_d3_pivots_are_rows_of_their_matrices() -> None:
    """A kernel exchanges the rows that they name, wherever those lie."""
    factors, pivots = torch.linalg.lu_factor(torch.eye(3).expand(2, 3, 3))
    right = torch.zeros(2, 3, 1)
    for name, before, after in (
        ("lu_unpack", [factors], []),
        ("lu_solve", [right, factors], []),
        ("linalg_lu_solve", [factors], [right]),
        ("linalg_ldl_solve", [factors], [right]),
    ):
        assert _problem(name, *before, pivots, *after) is None
        for wrong in (0, 4, 10**9, -(1 << 31)):
            problem = _problem(name, *before, torch.full_like(pivots, wrong), *after)
            assert "of 3 rows" in str(problem), (name, wrong)
        for shape in ((0,), (3,), (2, 2), (2, 3, 1)):
            problem = _problem(name, *before, torch.ones(shape, dtype=torch.int32), *after)
            assert "pivots of shape" in str(problem), (name, shape)
        assert "int64" in str(_problem(name, *before, pivots.long(), *after))
    assert _problem("linalg_ldl_solve", factors, -pivots, right) is None
    assert _problem("linalg_lu_solve", factors, -pivots, right)


def test_d3_the_result_of_a_triangle_lies_in_order() -> None:
    batch = torch.zeros(2, 3, 4, 4)
    for name in ("tril.out", "triu.out"):
        assert _problem(name, batch, 0, out=batch.clone()) is None
        assert _problem(name, batch[0, 0], 0, out=batch[0, 0].t()) is None
        assert "contiguous" in str(_problem(name, batch, 0, out=batch.clone().permute(1, 0, 2, 3)))


def test_d3_eigenvalues_of_what_is_no_number_are_refused() -> None:
    good = torch.eye(3)
    for name in ("linalg_eigvals", "linalg_eigvals.out", "_linalg_eigvals"):
        out = {"out": torch.empty(3, dtype=torch.complex64)} if name.endswith("out") else {}
        assert _problem(name, good, **out) is None
        assert "NaN" in str(_problem(name, good / torch.zeros(3, 1), **out))


def test_d3_attention_on_the_cpu_reads_rows_that_lie_in_order() -> None:
    x = torch.zeros(1, 2, 4, 4)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert _problem(name, x, x, x) is None
    assert _problem(name, x.transpose(1, 2), x.transpose(1, 2), x.transpose(1, 2)) is None
    for wrong in (x.transpose(2, 3), x[:1, :1, :1, :1].expand(1, 2, 4, 4)):
        for place in range(3):
            operands = [x, x, x]
            operands[place] = wrong
            assert "not contiguous" in str(_problem(name, *operands))
    assert "4 dimensions" in str(_problem(name, x[0], x, x))


def test_d3_a_pooling_of_years_is_refused() -> None:
    for name, x, size in (("adaptive_max_pool3d", torch.zeros(1, 2, 4, 4), [10**9, 7, 0]),):
        assert "an output of" in str(_problem(name, x, size))
        assert _problem(name, x, [2, 2, 1]) is None
    assert _problem("adaptive_avg_pool2d", torch.zeros(1, 2, 4), [7, 7]) is None


def test_an_executor_has_the_table_before_anybody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than README's first function may."""

    def opened(*arguments: Any) -> NoReturn:
        raise DeviceError("far enough")

    monkeypatch.setattr(main, "open_device", opened)
    executor = main.Executor.__new__(main.Executor)
    executor.config, executor.gpu, executor.paths = NodeConfig(), 0, RunPaths(NodeConfig().run_directory)
    allowed.cache_clear()
    with pytest.raises(DeviceError, match="far enough"):
        asyncio.run(executor.start())
    assert allowed.cache_info().currsize == 1
