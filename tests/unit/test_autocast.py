"""Autocast on cuda:0 gives the dtypes that PyTorch's own gives, and the values that they promise.

The dtypes are asked of PyTorch itself: run as a script, this file prints what its CUDA autocast gives for each case on
fake tensors, which have dtypes and shapes and no device. It runs in a process of its own, without the shim.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from dormouse.client_shim import torch_device

pytestmark = pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN", "ignore:torch.chain_matmul")

CUDA = "cuda"
LOW = [torch.bfloat16, torch.float16]


class Maker:
    """Inputs of a case: the same numbers wherever they are made. `x` has the case's dtype, `full` always float32."""

    def __init__(self, dtype: torch.dtype, place: Callable[[Tensor], Tensor]) -> None:
        self.dtype, self.place = dtype, place
        self.generator = torch.Generator().manual_seed(11)

    def _numbers(self, *shape: int) -> Tensor:
        # Rounded to what both low dtypes can hold, so that every way of computing starts from the same numbers.
        return (torch.randn(shape, generator=self.generator) * 8).round() / 8

    def x(self, *shape: int) -> Tensor:
        return self.place(self._numbers(*shape).to(self.dtype))

    def full(self, *shape: int) -> Tensor:
        return self.place(self._numbers(*shape))

    def some(self, *shape: int) -> Tensor:
        """Between 0.25 and 0.75."""
        return self.place((self._numbers(*shape).sigmoid() * 4).round().clamp(1, 3).div(4).to(self.dtype))

    def ids(self, limit: int, *shape: int) -> Tensor:
        return self.place(torch.randint(limit, shape, generator=self.generator))

    def layer(self, module: nn.Module) -> Any:
        module.requires_grad_(True)  # as a model's weights are; autocast remembers their casts
        for name, parameter in module.named_parameters():
            _set(module, name, nn.Parameter(self.place(self._numbers(*parameter.shape) / 4)))
        for name, buffer in module.named_buffers():
            _set(module, name, self.place(buffer.detach()))
        return module.eval()


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    if last in owner._parameters:
        owner._parameters[last] = value  # type: ignore[assignment]
    else:
        owner._buffers[last] = value
    if isinstance(owner, nn.RNNBase):
        owner._flat_weights = [getattr(owner, weight) for weight in owner._flat_weights_names]


def _packed(kind: Any, m: Maker) -> Any:
    layer = m.layer(kind(3, 4, 2, bidirectional=True))
    return layer(pack_padded_sequence(m.x(5, 2, 3), torch.tensor([5, 2])))[0].data


Case = Callable[[Maker], Any]


def _each(module: Any, names: str) -> dict[str, Case]:
    """Functions of one tensor, between 0.25 and 0.75 so that all of them are defined."""

    def case(function: Any) -> Case:
        return lambda m: function(m.some(2, 3))

    return {name: case(getattr(module, name)) for name in names.split()}


def _interpolations() -> dict[str, Case]:
    modes = [(mode, dims) for mode in ("nearest", "nearest-exact") for dims in (1, 2, 3)]
    modes += [("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)]

    def case(mode: str, dims: int) -> Case:
        return lambda m: F.interpolate(m.x(1, 2, *(3,) * dims), scale_factor=2, mode=mode)

    return {f"interpolate_{mode}{dims}": case(mode, dims) for mode, dims in modes}


# The operations of `AT_FORALL_LOWER_PRECISION_FP` in torch's ATen/autocast_mode.h.
LOWER: dict[str, Case] = {
    "conv1d": lambda m: F.conv1d(m.x(1, 2, 6), m.full(3, 2, 3), m.full(3)),
    "conv2d": lambda m: F.conv2d(m.x(1, 2, 5, 5), m.full(3, 2, 3, 3)),
    "conv3d": lambda m: F.conv3d(m.x(1, 2, 3, 3, 3), m.full(3, 2, 2, 2, 2)),
    "conv1d_same": lambda m: F.conv1d(m.x(1, 2, 6), m.full(3, 2, 3), padding="same"),
    "conv2d_same": lambda m: F.conv2d(m.x(1, 2, 5, 5), m.full(3, 2, 3, 3), m.full(3), padding="same"),
    "conv3d_valid": lambda m: F.conv3d(m.x(1, 2, 3, 3, 3), m.full(3, 2, 2, 2, 2), padding="valid"),
    "conv_tbc": lambda m: torch.conv_tbc(m.x(5, 1, 2), m.full(3, 2, 4), m.full(4)),
    "conv_transpose1d": lambda m: F.conv_transpose1d(m.x(1, 2, 6), m.full(2, 3, 3)),
    "conv_transpose2d": lambda m: F.conv_transpose2d(m.x(1, 2, 5, 5), m.full(2, 3, 3, 3)),
    "conv_transpose3d": lambda m: F.conv_transpose3d(m.x(1, 2, 3, 3, 3), m.full(2, 3, 2, 2, 2)),
    "convolution": lambda m: torch.convolution(m.x(1, 2, 6), m.full(3, 2, 3), None, [1], [0], [1], False, [0], 1),
    "prelu": lambda m: F.prelu(m.x(2, 3), m.full(3)),
    "addmm": lambda m: torch.addmm(m.full(2, 4), m.x(2, 3), m.full(3, 4)),
    "addmv": lambda m: torch.addmv(m.full(2), m.x(2, 3), m.full(3)),
    "addr": lambda m: torch.addr(m.full(2, 3), m.x(2), m.full(3)),
    "matmul": lambda m: m.x(2, 2, 3) @ m.full(3, 4),
    "einsum": lambda m: torch.einsum("bij,bjk->bik", m.x(2, 2, 3), m.full(2, 3, 4)),
    "mm": lambda m: torch.mm(m.x(2, 3), m.full(3, 4)),
    "mv": lambda m: torch.mv(m.x(2, 3), m.full(3)),
    "linalg_vecdot": lambda m: torch.linalg.vecdot(m.x(2, 3), m.full(2, 3)),
    "linear": lambda m: F.linear(m.x(2, 3), m.full(4, 3), m.full(4)),
    "addbmm": lambda m: torch.addbmm(m.full(2, 4), m.x(2, 2, 3), m.full(2, 3, 4)),
    "baddbmm": lambda m: torch.baddbmm(m.full(2, 2, 4), m.x(2, 2, 3), m.full(2, 3, 4)),
    "bmm": lambda m: torch.bmm(m.x(2, 2, 3), m.full(2, 3, 4)),
    "chain_matmul": lambda m: torch.ops.aten.chain_matmul([m.x(2, 3), m.full(3, 4), m.full(4, 2)]),
    "linalg_multi_dot": lambda m: torch.linalg.multi_dot([m.x(2, 3), m.full(3, 4), m.full(4, 2)]),
    "linalg_matrix_power": lambda m: torch.linalg.matrix_power(m.x(3, 3), 3),
    "lstm_cell": lambda m: m.layer(nn.LSTMCell(3, 4))(m.x(2, 3)),
    "gru_cell": lambda m: m.layer(nn.GRUCell(3, 4))(m.x(2, 3)),
    "rnn_tanh_cell": lambda m: m.layer(nn.RNNCell(3, 4))(m.x(2, 3)),
    "rnn_relu_cell": lambda m: m.layer(nn.RNNCell(3, 4, nonlinearity="relu"))(m.x(2, 3)),
    "lstm": lambda m: m.layer(nn.LSTM(3, 4, 2, bidirectional=True))(m.x(5, 2, 3)),
    "gru": lambda m: m.layer(nn.GRU(3, 4, 2, batch_first=True))(m.x(2, 5, 3)),
    "rnn_tanh": lambda m: m.layer(nn.RNN(3, 4))(m.x(5, 2, 3)),
    "rnn_relu": lambda m: m.layer(nn.RNN(3, 4, nonlinearity="relu"))(m.x(5, 2, 3)),
    "lstm_packed": lambda m: _packed(nn.LSTM, m),
    "gru_packed": lambda m: _packed(nn.GRU, m),
    "rnn_packed": lambda m: _packed(nn.RNN, m),
    "scaled_dot_product_attention": lambda m: F.scaled_dot_product_attention(
        m.x(1, 2, 5, 4), m.full(1, 2, 5, 4), m.full(1, 2, 5, 4)
    ),
    "multi_head_attention": lambda m: m.layer(nn.MultiheadAttention(4, 2))(m.x(5, 1, 4), m.full(5, 1, 4), m.x(5, 1, 4)),
    "multi_head_attention_forward": lambda m: F.multi_head_attention_forward(
        m.x(5, 1, 4),
        m.x(5, 1, 4),
        m.x(5, 1, 4),
        4,
        2,
        m.full(12, 4),
        m.full(12),
        None,
        None,
        False,
        0.0,
        m.full(4, 4),
        m.full(4),
        training=False,
    ),
}

# `AT_FORALL_FP32` and the operations that turn into these.
FULL: dict[str, Case] = {
    **_each(torch, "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan"),
    "pow_scalar": lambda m: m.x(2, 3).pow(2),
    "pow_tensor": lambda m: m.some(2, 3).pow(m.some(2, 3)),
    "pow_of_scalar": lambda m: 2 ** m.x(2, 3),
    "square": lambda m: torch.square(m.x(2, 3)),
    "arccos": lambda m: torch.arccos(m.some(2, 3)),
    "special_log1p": lambda m: torch.special.log1p(m.some(2, 3)),
    "softplus": lambda m: F.softplus(m.x(2, 3)),
    "layer_norm": lambda m: F.layer_norm(m.x(2, 3), (3,), m.full(3), m.full(3)),
    "native_layer_norm": lambda m: torch.native_layer_norm(m.x(2, 3), (3,), m.full(3), m.full(3), 1e-5)[0],
    "rms_norm": lambda m: F.rms_norm(m.x(2, 3), (3,), m.full(3)),
    "group_norm": lambda m: F.group_norm(m.x(2, 4, 3), 2, m.full(4), m.full(4)),
    "frobenius_norm": lambda m: torch.norm(m.x(2, 3), dim=(0, 1)),
    "nuclear_norm": lambda m: torch.norm(m.full(2, 3), "nuc"),
    "norm": lambda m: m.x(2, 3).norm(),
    "norm_dim": lambda m: m.x(2, 3).norm(2, dim=1),
    "linalg_norm": lambda m: torch.linalg.norm(m.x(2, 3)),
    "weight_norm": lambda m: torch._weight_norm(m.x(4, 3), m.x(4, 1)),
    "normalize": lambda m: F.normalize(m.x(2, 3)),
    "cosine_similarity": lambda m: F.cosine_similarity(m.x(2, 3), m.x(2, 3)),
    "poisson_nll_loss": lambda m: F.poisson_nll_loss(m.x(2, 3), m.some(2, 3)),
    "cosine_embedding_loss": lambda m: F.cosine_embedding_loss(m.x(2, 3), m.x(2, 3), m.ids(1, 2) + 1),
    "cross_entropy": lambda m: F.cross_entropy(m.x(4, 5), m.ids(5, 4)),
    "cross_entropy_sum": lambda m: F.cross_entropy(m.x(4, 5) * 10, m.ids(5, 4), reduction="sum"),
    "cross_entropy_probabilities": lambda m: F.cross_entropy(m.x(4, 5), m.some(4, 5), label_smoothing=0.1),
    "cross_entropy_2d": lambda m: F.cross_entropy(m.x(2, 5, 2, 2), m.ids(5, 2, 2, 2), m.some(5)),
    "nll_loss": lambda m: F.nll_loss(m.x(4, 5), m.ids(5, 4)),
    "nll_loss_2d": lambda m: F.nll_loss(m.x(2, 5, 2, 2), m.ids(5, 2, 2, 2)),
    "hinge_embedding_loss": lambda m: F.hinge_embedding_loss(m.x(2, 3), m.ids(1, 2, 3) * 2 - 1),
    "kl_div": lambda m: F.kl_div(m.x(2, 3), m.some(2, 3), reduction="sum"),
    "l1_loss": lambda m: F.l1_loss(m.x(2, 3), m.x(2, 3)),
    "smooth_l1_loss": lambda m: F.smooth_l1_loss(m.x(2, 3), m.x(2, 3)),
    "huber_loss": lambda m: F.huber_loss(m.x(2, 3), m.x(2, 3)),
    "mse_loss": lambda m: F.mse_loss(m.x(2, 3), m.x(2, 3)),
    "margin_ranking_loss": lambda m: F.margin_ranking_loss(m.x(3), m.x(3), m.ids(1, 3) * 2 - 1),
    "multilabel_margin_loss": lambda m: F.multilabel_margin_loss(m.x(2, 3), m.ids(3, 2, 3)),
    "soft_margin_loss": lambda m: F.soft_margin_loss(m.x(2, 3), m.ids(1, 2, 3) * 2 - 1),
    "triplet_margin_loss": lambda m: F.triplet_margin_loss(m.x(2, 3), m.x(2, 3), m.x(2, 3)),
    "multi_margin_loss": lambda m: F.multi_margin_loss(m.x(2, 3), m.ids(3, 2)),
    "binary_cross_entropy_with_logits": lambda m: F.binary_cross_entropy_with_logits(m.x(2, 3), m.some(2, 3)),
    "dist": lambda m: torch.dist(m.x(2, 3), m.x(2, 3)),
    "pdist": lambda m: F.pdist(m.x(4, 3)),
    "cdist": lambda m: torch.cdist(m.x(2, 3), m.x(4, 3)),
    "pairwise_distance": lambda m: F.pairwise_distance(m.x(4, 5), m.x(4, 5)),
    "renorm": lambda m: torch.renorm(m.x(2, 3), 2, 0, 1),
    "logsumexp": lambda m: torch.logsumexp(m.x(2, 3), 1),
    **_interpolations(),
    "interpolate_antialias": lambda m: F.interpolate(m.x(1, 2, 6, 6), (3, 3), mode="bilinear", antialias=True),
    "interpolate_antialias_cubic": lambda m: F.interpolate(m.x(1, 2, 6, 6), (3, 3), mode="bicubic", antialias=True),
    # `AT_FORALL_FP32_SET_OPT_DTYPE`
    "prod": lambda m: m.some(2, 3).prod(),
    "prod_dim": lambda m: m.some(2, 3).prod(1),
    "softmax": lambda m: F.softmax(m.x(2, 3), -1),
    "softmax_dtype": lambda m: F.softmax(m.x(2, 3), -1, dtype=torch.float64),
    "softmin": lambda m: F.softmin(m.x(2, 3), -1),
    "log_softmax": lambda m: F.log_softmax(m.x(2, 3), -1),
    "cumprod": lambda m: m.some(2, 3).cumprod(1),
    "cumsum": lambda m: m.x(2, 3).cumsum(1),
    "linalg_vector_norm": lambda m: torch.linalg.vector_norm(m.x(2, 3)),
    "linalg_matrix_norm": lambda m: torch.linalg.matrix_norm(m.x(2, 3)),
    "linalg_matrix_norm_nuc": lambda m: torch.linalg.matrix_norm(m.full(2, 3), "nuc"),
    "sum": lambda m: m.x(2, 3).sum(),
    "sum_dim": lambda m: m.x(2, 3).sum(1),
}

# `AT_FORALL_PROMOTE`, with operands of both dtypes; stack and cat promote by themselves.
PROMOTE: dict[str, Case] = {
    "addcdiv": lambda m: torch.addcdiv(m.full(3), m.x(3), m.some(3)),
    "addcmul": lambda m: torch.addcmul(m.x(3), m.full(3), m.x(3)),
    "atan2": lambda m: torch.atan2(m.x(3), m.full(3)),
    "arctan2": lambda m: torch.arctan2(m.x(3), m.full(3)),
    "bilinear": lambda m: F.bilinear(m.x(2, 3), m.full(2, 4), m.x(5, 3, 4)),
    "cross": lambda m: torch.cross(m.x(2, 3), m.full(2, 3), dim=1),
    "dot": lambda m: torch.dot(m.x(3), m.full(3)),
    "vdot": lambda m: torch.vdot(m.x(3), m.full(3)),
    "inner": lambda m: torch.inner(m.x(2, 3), m.full(4, 3)),
    "grid_sampler": lambda m: F.grid_sample(m.x(1, 2, 3, 3), m.full(1, 2, 2, 2), align_corners=False),
    "index_put": lambda m: torch.index_put(m.full(4), [m.ids(4, 2)], m.x(2)),
    "tensordot": lambda m: torch.tensordot(m.x(2, 3), m.full(3, 4), 1),
    "scatter_add": lambda m: torch.scatter_add(m.full(4), 0, torch.arange(2).to(m.full(1).device), m.x(2)),
    "stack": lambda m: torch.stack([m.x(3), m.full(3)]),
    "cat": lambda m: torch.cat([m.x(3), m.full(3)]),
}

# Composites that are kept whole and do not change what autocast gives, and others that should not.
PLAIN: dict[str, Case] = {
    "kron": lambda m: torch.kron(m.x(2), m.x(3)),
    "outer": lambda m: torch.outer(m.x(2), m.x(3)),
    "batch_norm": lambda m: F.batch_norm(m.x(2, 3), m.full(3), m.full(3).abs() + 1, m.full(3), m.full(3)),
    "instance_norm": lambda m: F.instance_norm(m.x(2, 3, 4)),
    "local_response_norm": lambda m: F.local_response_norm(m.x(1, 3, 4), 2),
    "embedding_bag": lambda m: F.embedding_bag(m.ids(5, 2, 3), m.x(5, 4)),
    "embedding": lambda m: F.embedding(m.ids(5, 2, 3), m.x(5, 4)),
    **_each(F, "gelu silu mish selu relu6 hardswish elu celu rrelu relu tanh sigmoid logsigmoid"),
    "dropout": lambda m: F.dropout(m.x(2, 3), training=False),
    "alpha_dropout": lambda m: F.alpha_dropout(m.x(2, 3), training=False),
    "max_pool1d": lambda m: F.max_pool1d(m.x(1, 2, 6), 2),
    "max_pool2d": lambda m: F.max_pool2d(m.x(1, 2, 4, 4), 2),
    "max_pool3d": lambda m: F.max_pool3d(m.x(1, 2, 4, 4, 4), 2),
    "avg_pool1d": lambda m: F.avg_pool1d(m.x(1, 2, 6), 2),
    "adaptive_avg_pool1d": lambda m: F.adaptive_avg_pool1d(m.x(1, 2, 6), 2),
    "adaptive_avg_pool2d": lambda m: F.adaptive_avg_pool2d(m.x(1, 2, 4, 4), 2),
    "adaptive_avg_pool2d_one": lambda m: F.adaptive_avg_pool2d(m.x(1, 2, 4, 4), 1),
    "adaptive_avg_pool3d": lambda m: F.adaptive_avg_pool3d(m.x(1, 2, 4, 4, 4), 2),
    "adaptive_max_pool1d": lambda m: F.adaptive_max_pool1d(m.x(1, 2, 6), 2),
    "ctc_loss": lambda m: F.ctc_loss(
        m.full(6, 1, 4).log_softmax(-1), m.ids(3, 1, 2) + 1, torch.tensor([6]), torch.tensor([2])
    ),
    "stft": lambda m: torch.view_as_real(torch.stft(m.full(1, 16), 8, window=m.full(8).abs() + 1, return_complex=True)),
    "affine_grid": lambda m: F.affine_grid(m.x(1, 2, 3), [1, 1, 2, 2], align_corners=False),
    "pixel_shuffle": lambda m: F.pixel_shuffle(m.x(1, 4, 2, 2), 2),
    "std": lambda m: m.x(2, 3).std(),
    "mean": lambda m: m.x(2, 3).mean(),
    "quantile": lambda m: m.full(5).quantile(0.5),
    "trapezoid": lambda m: torch.trapezoid(m.x(2, 3)),
    "cov": lambda m: torch.cov(m.x(2, 3)),
    "where": lambda m: torch.where(m.ids(2, 3) > 0, m.x(3), m.full(3)),
    "norm_of_product": lambda m: torch.linalg.norm(m.x(2, 3) @ m.full(3, 4), dim=-1),
}

CASES = {**LOWER, **FULL, **PROMOTE, **PLAIN}


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [tensor for item in output if item is not None for tensor in _tensors(item)]


class Shapes(Maker):
    """The same without numbers."""

    def _numbers(self, *shape: int) -> Tensor:
        return torch.empty(shape)


def _reference() -> Iterator[tuple[str, Any]]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch_device.install_device_guard()  # of all the shim only this: fake tensors need one too
    torch.set_autocast_enabled(CUDA, True)  # the context manager refuses where there is no CUDA
    for low in LOW:
        for dtype in (low, torch.float32):
            for name, case in CASES.items():
                torch.set_autocast_dtype(CUDA, low)
                with torch.no_grad(), FakeTensorMode():
                    maker = Shapes(dtype, lambda tensor: torch.empty_like(tensor, device=CUDA))
                    with suppress(Exception):  # no rule for its shape; what it then is stands in `test_dtypes`
                        output = _tensors(case(maker))
                        yield f"{name} {low} {dtype}", [str(tensor.dtype) for tensor in output]
                    torch.clear_autocast_cache()


@cache
def _expected() -> dict[str, Any]:
    output = subprocess.run([sys.executable, "-W", "ignore", __file__], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(output.stdout)
    return result


UNKNOWN = {
    "gru_cell": 1,
    "gru": 2,
    "lstm": 3,
    "rnn_tanh": 2,
    "rnn_relu": 2,
    "lstm_packed": 1,
    "gru_packed": 1,
    "rnn_packed": 1,
    "cov": 1,
}
"""Cases for which fake tensors have no answer, with their numbers of results: all turn into products of matrices, and
give the lower dtype."""

NO_KERNEL = {"ctc_loss"}  # without an answer too: takes float32 only

ROUNDED = {
    "cross_entropy",
    "cross_entropy_sum",
    "cross_entropy_probabilities",
    "cross_entropy_2d",
    "local_response_norm",
}
"""These give float32 made of steps that stay in the dtype they were given, in PyTorch too."""

STEPS = {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_packed", "gru_packed", "rnn_packed"}
"""Rounding adds up over the steps and layers of these."""


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("given", ["low", "float32"])
def test_dtypes_and_values(loopback: Any, mode: Any, low: torch.dtype, given: str) -> None:
    dtype = low if given == "low" else torch.float32
    expected = _expected()
    wrong = []
    with mode():
        for name, case in CASES.items():
            with torch.autocast(CUDA, dtype=low):
                got = _tensors(case(Maker(dtype, lambda tensor: tensor.to(CUDA))))
            precise = _tensors(case(Maker(dtype, lambda tensor: tensor.float() if tensor.dtype is low else tensor)))
            if name not in NO_KERNEL:
                wanted = expected.get(f"{name} {low} {dtype}") or [str(low)] * UNKNOWN[name]
                if [str(tensor.dtype) for tensor in got] != wanted:
                    wrong.append(f"{name}: {[tensor.dtype for tensor in got]}, not {wanted}")
            for one, other in zip(got, precise, strict=True):
                exact = name not in LOWER and one.dtype is torch.float32 and not (name in ROUNDED and dtype is low)
                computed = torch.float32 if exact else low
                near = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[computed]
                near *= 3 if name in STEPS else 1
                if not torch.allclose(one.cpu().double(), other.double(), rtol=near, atol=near):
                    wrong.append(f"{name}: off by {(one.cpu().double() - other.double()).abs().max()}")
    assert not wrong, "\n".join(wrong)


def test_every_operation_on_autocasts_lists_is_a_case() -> None:
    """The names that this torch casts, less those that only kernels of a GPU's libraries call."""
    internal = "_convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell " + (
        "cudnn_convolution cudnn_convolution_transpose _cudnn_rnn "
        "binary_cross_entropy"  # the last is refused under autocast
    )
    spelled = {
        "pow": "pow_scalar", "linear": "linear", "nll_loss2d": "nll_loss_2d", "nuclear_norm": "nuclear_norm",
        "frobenius_norm": "frobenius_norm", "upsample_nearest1d": "interpolate_nearest1",
        "upsample_nearest2d": "interpolate_nearest2", "upsample_nearest3d": "interpolate_nearest3",
        "_upsample_nearest_exact1d": "interpolate_nearest-exact1",
        "_upsample_nearest_exact2d": "interpolate_nearest-exact2",
        "_upsample_nearest_exact3d": "interpolate_nearest-exact3", "upsample_linear1d": "interpolate_linear1",
        "upsample_bilinear2d": "interpolate_bilinear2", "upsample_bicubic2d": "interpolate_bicubic2",
        "upsample_trilinear3d": "interpolate_trilinear3", "_upsample_bilinear2d_aa": "interpolate_antialias",
        "_upsample_bicubic2d_aa": "interpolate_antialias_cubic",
    }  # fmt: skip
    code = (
        "from dormouse.client_shim import torch_dispatcher as t\n"
        "for name in t.aten_schemas():\n"
        "    if t.has_kernel(f'aten::{name}', 'AutocastCUDA'): print(name.partition('.')[0])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    listed = set(output.split())
    assert len(listed) > 100
    assert {name for name in listed - set(internal.split()) if spelled.get(name, name) not in CASES} == set()


def test_autocast_can_be_off_inside(loopback: Any) -> None:
    h, target = torch.randn(4, 5).bfloat16().to(CUDA), torch.tensor([0, 1, 2, 3]).to(CUDA)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), torch.autocast(CUDA, dtype=torch.bfloat16):
            with torch.autocast(CUDA, enabled=False):
                assert F.cross_entropy(h, target).dtype == torch.bfloat16
                assert torch.square(h).dtype == torch.bfloat16
                assert (h.float() @ h.float().t()).dtype == torch.float32
                with torch.autocast(CUDA, dtype=torch.float16):
                    assert (h @ h.t()).dtype == torch.float16
                    assert torch.square(h).dtype == torch.float32
            assert F.cross_entropy(h, target).dtype == torch.float32
        with mode():
            assert F.cross_entropy(h, target).dtype == torch.bfloat16


def test_binary_cross_entropy_is_refused_as_on_a_gpu(loopback: Any) -> None:
    x = torch.full((3,), 0.5).to(CUDA)
    with torch.autocast(CUDA), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(x, x)


def test_composites_stay_whole_while_autocast_is_off(loopback: Any) -> None:
    h, target = torch.randn(4, 5).to(CUDA), torch.tensor([0, 1, 2, 3]).to(CUDA)
    image, weight = torch.randn(1, 2, 5, 5).to(CUDA), torch.randn(3, 2, 3, 3).to(CUDA)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            before = loopback.stream.commands_recorded
            F.cross_entropy(h, target)
            F.pairwise_distance(h, h)
            F.interpolate(image, scale_factor=2)
            F.conv2d(image, weight, padding="same")
            assert loopback.stream.commands_recorded == before + 4


def test_a_recurrent_layer_is_one_command_under_autocast(loopback: Any) -> None:
    layer, x = nn.LSTM(3, 4).eval().to(CUDA), torch.randn(50, 2, 3).to(CUDA)
    with torch.autocast(CUDA, dtype=torch.bfloat16):
        before = loopback.stream.commands_recorded
        layer(x)
        assert loopback.stream.commands_recorded < before + 12  # casts, zeros, and the layer


def test_a_program_that_never_leaves_autocast_keeps_no_casts(loopback: Any) -> None:
    layer = nn.Linear(4, 4).to(CUDA)
    x = torch.randn(2, 4).to(CUDA)
    loopback.end_lease()
    with torch.autocast(CUDA, dtype=torch.bfloat16):
        for _ in range(2):
            loopback.begin_lease()
            expected = layer(x).tolist()
            loopback.end_lease()
        loopback.begin_lease()
        layer(x)
        loopback.stream.lose_lease()
        loopback.begin_lease()
        assert layer(x).tolist() == expected
        assert loopback.end_lease() is None


def test_casts_of_weights_are_made_once_and_do_not_outlive_the_request(loopback: Any) -> None:
    layer = nn.Linear(4, 4).to(CUDA)
    x = torch.randn(2, 4).to(CUDA)
    loopback.end_lease()
    for _ in range(3):
        loopback.begin_lease()
        with torch.autocast(CUDA, dtype=torch.bfloat16):
            before = loopback.stream.commands_recorded
            first = layer(x)
            once = loopback.stream.commands_recorded - before
            second = layer(x)
            assert loopback.stream.commands_recorded - before < 2 * once
        assert torch.equal(first, second)
        del first, second
        assert loopback.end_lease() is None, "nothing may be left that would join the model"
    assert loopback.node.reports[-1].created == []


if __name__ == "__main__":
    print(json.dumps(dict(_reference())))
