"""What CUDA reports at the call comes at the call, as PyTorch on the CPU says it; what cannot fail, and what CUDA
reports later, is not waited for."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, linalg

from dormouse.client_shim import torch_private
from dormouse.client_shim.commands.room import Room
from dormouse.gpuserver.commands.operators import refusal

CUDA = "cuda"
MODES: list[Any] = [torch.no_grad, torch.inference_mode]
NAN = float("nan")


class On:
    """Inputs on one device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def at(self, *values: Any) -> Tensor:
        return torch.tensor(values, device=self.device)

    def full(self, value: float, *size: int) -> Tensor:
        return torch.full(size, float(value), device=self.device)

    def eye(self, size: int = 3) -> Tensor:
        return torch.eye(size, device=self.device)

    def none(self) -> Tensor:
        """Of an empty selection."""
        some = self.at(1.0, 2.0)
        return some[some > 3]


def _put(values: Tensor, index: Any, length: int) -> None:
    """First in a way that succeeds."""
    values[index] = values.new_ones(values[index].shape)
    values[index] = values.new_ones(length)


WRONG: dict[str, Callable[[On], Any]] = {
    "cholesky": lambda on: linalg.cholesky(-on.eye()),
    "cholesky, old": lambda on: torch.cholesky(-on.eye()),
    "cholesky_ex": lambda on: linalg.cholesky_ex(-on.eye(), check_errors=True),
    "cholesky_inverse": lambda on: torch.cholesky_inverse(on.full(0, 3, 3)),
    "inv": lambda on: linalg.inv(on.full(0, 3, 3)),
    "inverse": lambda on: on.full(0, 3, 3).inverse(),
    "inv_ex": lambda on: linalg.inv_ex(on.full(0, 3, 3), check_errors=True),
    "tensorinv": lambda on: linalg.tensorinv(on.full(0, 3, 3), ind=1),
    "matrix_power": lambda on: linalg.matrix_power(on.full(0, 3, 3), -1),
    "solve": lambda on: linalg.solve(on.full(0, 3, 3), on.full(1, 3)),
    "solve, one of a batch": lambda on: linalg.solve(torch.stack([on.eye(), on.full(0, 3, 3)]), on.full(1, 2, 3)),
    "solve_ex": lambda on: linalg.solve_ex(on.full(0, 3, 3), on.full(1, 3), check_errors=True),
    "tensorsolve": lambda on: linalg.tensorsolve(on.full(0, 3, 3), on.full(1, 3)),
    "lu_factor": lambda on: linalg.lu_factor(on.full(0, 3, 3)),
    "lu_factor_ex": lambda on: linalg.lu_factor_ex(on.full(0, 3, 3), check_errors=True),
    "svd": lambda on: linalg.svd(on.full(NAN, 3, 2)),
    "svd, old": lambda on: torch.svd(on.full(NAN, 3, 2)),
    "svdvals": lambda on: linalg.svdvals(on.full(NAN, 3, 2)),
    "eig": lambda on: linalg.eig(on.full(NAN, 3, 3)),
    "eigh": lambda on: linalg.eigh(on.full(NAN, 3, 3)),
    "eigvalsh": lambda on: linalg.eigvalsh(on.full(NAN, 3, 3)),
    "pinv": lambda on: linalg.pinv(on.full(NAN, 3, 3)),
    "matrix_rank": lambda on: linalg.matrix_rank(on.full(NAN, 3, 3)),
    "cond": lambda on: linalg.cond(on.full(NAN, 3, 3)),
    "nuclear norm": lambda on: linalg.norm(on.full(NAN, 3, 3), "nuc"),
    "a distribution": lambda on: torch.distributions.MultivariateNormal(
        on.full(0, 3), precision_matrix=-on.eye(), validate_args=False
    ),
    "multinomial, below 0": lambda on: torch.multinomial(on.at(-1.0, 2.0), 1),
    "multinomial, all 0": lambda on: torch.multinomial(on.at(0.0, 0.0), 1),
    "multinomial, several": lambda on: torch.multinomial(on.at(NAN, 1.0), 3, replacement=True),
    "histc": lambda on: torch.histc(on.at(NAN, 1.0)),
    "normal": lambda on: torch.normal(on.at(0.0), on.at(-1.0)),
    "normal of a number": lambda on: torch.normal(0.0, on.at(-1.0)),
    "searchsorted": lambda on: torch.searchsorted(on.at(1.0, 2.0), on.at(1.0), sorter=on.at(0, 5)),
    "bucketize": lambda on: torch.bucketize(on.at(1.0), on.eye()),
    "bincount": lambda on: torch.bincount(on.at(1, -2)),
    "repeat_interleave": lambda on: torch.repeat_interleave(on.at(1, 2), on.at(1, -2)),
    "max of nothing": lambda on: on.none().max(),
    "argmin of nothing": lambda on: on.none().argmin(),
    "aminmax of nothing": lambda on: on.none().aminmax(),
    "mode of nothing": lambda on: on.none().mode(),
    "a mask that takes two values of three": lambda on: on.full(0, 3).index_put_(
        (on.at(True, False, True),), on.full(1, 3)
    ),
    "bernoulli_": lambda on: on.full(0, 3).bernoulli_(1.5),
    "uniform_": lambda on: on.full(0, 3).uniform_(3, 1),
    "random_": lambda on: on.full(0, 3).random_(3, 1),
    "heaviside": lambda on: torch.heaviside(on.at(0.0), on.at(1)),
    "complex": lambda on: torch.complex(on.at(0.0), on.at(0.0).double()),
    "polar": lambda on: torch.polar(on.at(0.0), on.at(0.0).double()),
    "conv1d": lambda on: F.conv1d(on.full(1, 1, 1, 5), on.full(1, 1, 1, 3), dilation=0),
    "conv2d": lambda on: F.conv2d(on.full(1, 1, 1, 5, 5), on.full(1, 1, 1, 3, 3), dilation=-1),
    "cummax": lambda on: on.at(1.0)[0].cummax(3),
    "cummin": lambda on: on.at(1j).cummin(0),
    "an integer's negative power": lambda on: on.at(2) ** -1,
    "as_strided": lambda on: on.full(0, 4).as_strided((3, 3), (3, 1)),
    "_assert_async": lambda on: torch._assert_async(on.at(0)[0]),
    "_assert_async with a text": lambda on: torch._assert_async(on.at(0)[0], "no more than that"),
    "one_hot": lambda on: F.one_hot(on.at(2, -1)),
    "linear, half of a float model": lambda on: F.linear(on.full(1, 1, 3).half(), on.eye()),
    "matmul of two dtypes": lambda on: on.eye().double() @ on.eye(),
    "addmm of two dtypes": lambda on: torch.addmm(on.at(1), on.eye(), on.eye()),
    "addmm, too many dimensions": lambda on: torch.addmm(on.full(1, 1, 3, 3), on.eye(), on.eye()),
    "conv2d of two dtypes": lambda on: F.conv2d(on.full(1, 1, 1, 5, 5), on.full(1, 1, 1, 3, 3).bfloat16()),
    "conv2d, another bias": lambda on: F.conv2d(on.full(1, 1, 1, 5, 5), on.full(1, 1, 1, 3, 3), on.full(1, 2)),
    "conv3d, padding below 0": lambda on: F.conv3d(on.full(1, 1, 1, 5, 5, 5), on.full(1, 1, 1, 3, 3, 3), padding=-1),
    "conv_transpose1d": lambda on: F.conv_transpose1d(on.full(1, 1, 1, 5), on.full(1, 1, 1, 3), output_padding=9),
    "no kernel for half": lambda on: linalg.inv(on.eye().half()),
    "no kernel for bool": lambda on: on.at(True).abs(),
    "no kernel for floats": lambda on: ~on.at(1.0),
    "no kernel for integers": lambda on: on.at(1).frac(),
    "no order of complex numbers": lambda on: on.at(1j) > on.at(2j),
    "no bytes as a mask": lambda on: on.full(0, 3).masked_scatter(on.at(1, 0, 1).byte(), on.full(1, 3)),
    "masked_fill": lambda on: on.full(0, 3).masked_fill_(on.at(True, False, True), 1j),
    "softmax": lambda on: on.eye().softmax(2),
    "log_softmax": lambda on: on.eye().log_softmax(-3),
    "sort": lambda on: on.full(1, 3).sort(1),
    "index_select": lambda on: on.eye().index_select(0, on.at([0])),
    "index_add": lambda on: on.full(0, 3, 2).index_add_(0, on.at(0, 2), on.full(1, 2)),
    "index_copy": lambda on: on.full(0, 3, 2).index_copy_(0, on.at(0, 2), on.full(1, 2, 3)),
    "renorm": lambda on: (on.eye().renorm(2, 0, 1), on.eye().renorm(2, 0, -1)),
    "softshrink": lambda on: (F.softshrink(on.eye(), 1), F.softshrink(on.eye(), -1)),
    "interpolate": lambda on: F.interpolate(on.full(1, 1, 1, 4), 0, mode="linear"),
    "values of another shape": lambda on: _put(on.full(0, 3), (on.at(0, 1),), 3),
    "values that are too many": lambda on: _put(on.eye(), (on.at(0, 1), on.at(0, 1)), 3),
    "values of a column": lambda on: _put(on.eye(), (slice(None), on.at(0, 1)), 4),
    "side": lambda on: torch.searchsorted(on.at(1.0, 2.0), on.at(1.0), side="both"),
    "put": lambda on: on.full(0, 3).put(on.at(0, 1), on.at(1.0)),
    "select_scatter": lambda on: on.eye().select_scatter(on.full(1, 2), 0, 0),
    "as_strided_scatter": lambda on: on.eye().as_strided_scatter(on.full(1, 2), (2,), (200,)),
    "out of another dtype": lambda on: torch.complex(on.at(1.0), on.at(2.0), out=on.at(1j).to(torch.complex128)),
    "out is read": lambda on: torch.gather(values := on.full(1, 3), 0, on.at(2, 1, 0), out=values),
    "out is one of a list": lambda on: torch.cat([on.full(1, 0), values := on.eye()], out=values),
    "out is one element": lambda on: torch.cat([on.full(1, 3)], out=on.at(1.0).expand(3)),
    "aminmax": lambda on: torch.aminmax(on.eye(), out=(on.at(1.0).double()[0], on.at(1.0).double()[0])),
    "full_like": lambda on: (torch.full_like(on.at(1).byte(), 255), torch.full_like(on.at(1).byte(), 1000)),
    "full_like, infinite": lambda on: torch.full_like(on.at(1), math.inf),
    "full": lambda on: torch.full((2,), 1e39, device=on.device),
    "new_full": lambda on: on.at(1.0).half().new_full((2,), -1e9),
    "fill_": lambda on: on.at(1.0).fill_(1j),
    "masked_fill of half": lambda on: on.full(0, 3).half().masked_fill(on.at(True, False, True), -1e9),
    "clamp": lambda on: on.at(1).char().clamp(max=1000),
    "pow": lambda on: on.at(1.0).half() ** 1e9,
    "alpha of an integer": lambda on: torch.add(on.at(1).char(), on.at(1).char(), alpha=1000),
    "a factor that is complex": lambda on: torch.addmm(on.eye(), on.eye(), on.eye(), beta=1j),
    "lerp": lambda on: on.at(1.0).lerp(on.at(2.0), 1e300),
    "threshold": lambda on: F.threshold(on.eye(), 1e300, 0),
    "alpha": lambda on: torch.add(on.at(1.0), on.at(1.0), alpha=True),
    "linspace of truth values": lambda on: torch.linspace(0, 1, 3, dtype=torch.bool, device=on.device),
    "arange of truth values": lambda on: torch.arange(3, dtype=torch.bool, device=on.device),
    "pool, of integers": lambda on: F.adaptive_avg_pool1d(on.at([[1, 2, 3]]), 1),
    "pool, a large window": lambda on: F.max_pool2d(on.full(1, 1, 4, 4), 1 << 40),
    "no kernel, but for nothing": lambda on: (
        torch.cdist(on.full(1, 0, 3).half(), on.full(1, 0, 3).half()),
        torch.cdist(on.full(1, 2, 3).half(), on.full(1, 2, 3).half()),
    ),
    "index_fill": lambda on: on.eye().index_fill(0, on.at(0.0), 2),
    "index_fill, of two dimensions": lambda on: on.eye().index_fill(0, on.at([0, 1]), 2),
    "index_reduce": lambda on: on.at(1.0)[0].index_reduce(0, on.at(0, 0), on.at(1.0)[0], "prod"),
    "index_select of a number": lambda on: on.at(1.0)[0].index_select(0, on.at(0, 0)),
    "masked_scatter": lambda on: (
        on.full(0, 3).masked_scatter(on.at(True, False, True), on.at(1.0, 2.0)),
        on.full(0, 3).masked_scatter(on.at(True, False, True), on.at(1.0)),
    ),
    "put into nothing": lambda on: on.full(0, 0).put(on.at(0, 1), on.at(1.0, 2.0)),
    "rows of searchsorted": lambda on: torch.searchsorted(on.eye(), on.at(1.0)[0]),
    "ormqr": lambda on: torch.ormqr(on.eye(), on.full(1, 2), on.eye()),
    "addmv": lambda on: (
        torch.addmv(on.full(1, 2), on.full(1, 2, 3), on.full(1, 3)),
        torch.addmv(on.full(1, 4), on.full(1, 2, 3), on.full(1, 3)),
    ),
    "interpolate of nothing": lambda on: F.interpolate(on.full(1, 1, 1, 4, 0), (2, 2), mode="bilinear"),
    "pixel_unshuffle": lambda on: F.pixel_unshuffle(on.full(1, 1, 1, 3, 3), 2),
    "nll_loss": lambda on: F.nll_loss(on.full(0, 2, 3, 2, 3), on.full(0, 2, 2, 2).long()),
    "weights of binary_cross_entropy": lambda on: F.binary_cross_entropy(
        on.full(0, 5, 5), on.full(0, 5, 5), on.full(1, 1, 5, 5)
    ),
    "transpose_": lambda on: on.eye().transpose_(0, 2),
    "squeeze_": lambda on: on.eye().squeeze_(4),
}


def _error(call: Callable[[On], Any], on: On) -> tuple[type[Exception], str]:
    with pytest.raises(Exception) as info:  # noqa: PT011  # compared with PyTorch's own
        call(on)
    return info.type, str(info.value).splitlines()[0]


@pytest.mark.filterwarnings("ignore:torch.cholesky")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WRONG)
def test_an_error_comes_at_the_call_as_pytorch_says_it(loopback: Any, mode: Any, name: str) -> None:
    loopback.begin_lease()
    call = WRONG[name]
    with mode():
        assert _error(call, On(CUDA)) == _error(call, On("cpu"))
        torch.cuda.synchronize()  # it was told, and the lease goes on
        assert (torch.ones(2, device=CUDA) * 2).tolist() == [2.0, 2.0]


def test_a_matrix_gets_more_jitter_until_it_has_a_factor(loopback: Any) -> None:
    """As code for Gaussian processes does it."""
    kernel = torch.ones(4, 4, device=CUDA) - 1e-4 * torch.eye(4, device=CUDA)
    failed = []
    for jitter in (0.0, 1e-6, 1e-3, 1e-1):
        try:
            factor = linalg.cholesky(kernel + jitter * torch.eye(4, device=CUDA))
            break
        except torch_private.LinAlgError as error:
            failed.append(type(error))
    assert failed == [torch_private.LinAlgError] * 2
    assert round(factor.sum().item(), 4) == 4.1675


SURE: dict[str, Callable[[On], Any]] = {
    "cholesky_ex": lambda on: linalg.cholesky_ex(-on.eye()),
    "inv_ex": lambda on: linalg.inv_ex(on.full(0, 3, 3)),
    "lu": lambda on: linalg.lu(on.full(0, 3, 3)),
    "det": lambda on: linalg.det(on.full(NAN, 3, 3)),
    "qr": lambda on: linalg.qr(on.full(NAN, 3, 3)),
    "solve_triangular": lambda on: linalg.solve_triangular(on.full(0, 3, 3), on.eye(), upper=True),
    "norm": lambda on: linalg.norm(on.eye()),
    "max": lambda on: on.eye().max(),
    "sum of nothing": lambda on: torch.zeros(0, 3, device=on.device).sum(1),
    "histc": lambda on: torch.histc(on.full(1, 3), 4, 0, 2),
    "searchsorted": lambda on: torch.searchsorted(on.full(1, 3), on.full(1, 2)),
    "normal": lambda on: torch.normal(on.full(1, 3), 2.0),
    "bernoulli_": lambda on: on.full(1, 3).bernoulli_(0.5),
    "a mask that takes one value": lambda on: on.full(0, 3).masked_fill(on.at(True, False, True), 2.0),
    "an index that takes values": lambda on: on.full(0, 3).index_put_((on.at(0, 2),), on.full(1, 2)),
    "one_hot": lambda on: F.one_hot(on.at(0, 2), 3),
    "softmax": lambda on: on.eye().softmax(0),
    "masks as attention has them": lambda on: [
        on.full(0, 3).to(dtype).masked_fill(on.at(True, False, True), value)
        for dtype in (torch.float32, torch.half, torch.bfloat16)
        for value in (-math.inf, torch.finfo(dtype).min)
    ],
    "the least integer": lambda on: on.at(1, 2).masked_fill(on.at(True, False), -(1 << 63)),
    "numbers that come out infinite": lambda on: on.at(1.0).half() * 1e9,
    "integers times a float": lambda on: on.at(1, 2) * 1e30,
    "a mask for which there is enough": lambda on: on.full(0, 3).masked_scatter(
        on.at(True, False, True), on.full(1, 3)
    ),
    "index_fill": lambda on: on.eye().index_fill(0, on.at(0), 200),
}
LATER: dict[str, Callable[[On, int], Any]] = {
    "gather": lambda on, index: on.full(0, 3).gather(0, on.at(index)),
    "index": lambda on, index: on.full(0, 3)[on.at(index)],
    "embedding": lambda on, index: F.embedding(on.at(index), on.eye()),
    "cross_entropy": lambda on, index: F.cross_entropy(on.eye(2), on.at(0, index)),
    "bernoulli": lambda on, index: torch.bernoulli(on.at(1.5 * index)),
    "one_hot": lambda on, index: F.one_hot(on.at(index), 3),
}


@pytest.mark.parametrize("name", SURE)
def test_what_cannot_fail_is_not_waited_for(loopback: Any, name: str) -> None:
    """A second time: at first it may be unknown whether there is a kernel for it."""
    SURE[name](On(CUDA))
    torch.cuda.synchronize()
    trips = loopback.stream.answers.round_trips
    SURE[name](On(CUDA))
    assert loopback.stream.answers.round_trips == trips
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", LATER)
def test_what_fails_on_the_gpu_is_told_at_the_next_answer(loopback: Any, name: str) -> None:
    LATER[name](On(CUDA), 0)
    torch.cuda.synchronize()
    trips = loopback.stream.answers.round_trips
    LATER[name](On(CUDA), 7)
    assert loopback.stream.answers.round_trips == trips
    with pytest.raises((RuntimeError, IndexError)):
        torch.cuda.synchronize()


@pytest.mark.parametrize("mode", MODES)
def test_one_hot_checks_its_classes(loopback: Any, mode: Any) -> None:
    with mode():
        for classes, count in (([5], 3), ([-1], 3), ([1], 0)):
            with pytest.raises(RuntimeError) as expected:
                F.one_hot(torch.tensor(classes), count)
            with pytest.raises(RuntimeError) as info:
                F.one_hot(torch.tensor(classes, device=CUDA), count).tolist()
            assert str(info.value).splitlines()[0] == str(expected.value)
        for right, count in (([[1, 2]], 3), ([2, 0], -1), ([], 4)):
            host = torch.tensor(right, dtype=torch.int64)
            got = F.one_hot(host.to(CUDA), count)
            assert (got.dtype, got.tolist()) == (torch.int64, F.one_hot(host, count).tolist())


MIXED: dict[str, Callable[[On], Any]] = {
    "normal": lambda on: torch.normal(on.at(1.0).half(), on.at(0.0)),
    "ldexp": lambda on: torch.ldexp(on.at(3), on.at(2.0).half()),
    "huber_loss": lambda on: F.huber_loss(on.at(3.0).half(), on.at(1.0), reduction="none"),
    "binary_cross_entropy": lambda on: F.binary_cross_entropy(on.at(0.5), on.at(1.0), on.at(2.0).double()),
    "nansum": lambda on: torch.nansum(on.at([1, 2])),
}


PRODUCTS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mm": lambda x, to: torch.mm(x, x, **to),
    "bmm": lambda x, to: torch.bmm(x[None], x[None], **to)[0],
    "addmm": lambda x, to: torch.addmm(x.float() if to else x, x, x, beta=2, **to),
    "baddbmm": lambda x, to: torch.baddbmm(x[None].float() if to else x[None], x[None], x[None], beta=2, **to)[0],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_halves_that_are_wider(loopback: Any, name: str) -> None:
    """Which PyTorch has on CUDA only."""
    product = PRODUCTS[name]
    x = torch.full((2, 2), 300.0, device=CUDA).half()
    got = product(x, {"out_dtype": torch.float32})
    assert (got.dtype, got.tolist()) == (torch.float32, product(x.float(), {}).tolist())
    with pytest.raises(RuntimeError):
        product(x, {"out_dtype": torch.float64})


@pytest.mark.parametrize("name", MIXED)
def test_the_dtype_of_a_result_is_the_kernels(loopback: Any, name: str) -> None:
    call = MIXED[name]
    for _ in range(2):
        got, expected = call(On(CUDA)), call(On("cpu"))
        assert (got.dtype, got.shape, got.tolist()) == (expected.dtype, expected.shape, expected.tolist())


def test_labels_that_no_class_has_are_not_looked_up(loopback: Any) -> None:
    """PyTorch's kernel reads whatever lies there."""
    chances = torch.full((4, 1, 3), -1.0)

    def loss(on: str, *labels: int) -> float:
        targets = torch.tensor([labels], device=on)
        return F.ctc_loss(chances.to(on), targets, torch.tensor([4]), torch.tensor([len(labels)])).item()

    assert loss(CUDA, 1, 2) == loss("cpu", 1, 2)
    for wrong in (9, 3, -1):
        with pytest.raises(RuntimeError, match=f"targets from .*{wrong}.* of 3 classes"):
            loss(CUDA, 1, wrong)


def test_a_check_that_itself_fails_is_an_operations_error(loopback: Any) -> None:
    """And no end of the instance: the operands that it is given were looked at by nobody before."""
    labels = torch.ones(1, 2, device=CUDA) * 1j
    with pytest.raises(RuntimeError, match="not implemented for"):
        F.ctc_loss(torch.zeros(4, 1, 3, device=CUDA), labels, torch.tensor([4]), torch.tensor([2])).item()
    assert (torch.ones(2, device=CUDA) * 2).tolist() == [2.0, 2.0]


def test_what_has_succeeded_once_is_not_waited_for_again(loopback: Any) -> None:
    """A kernel that is there for some dtypes is there for all tensors of these."""
    answers = loopback.stream.answers
    halves = torch.ones(2, 3, device=CUDA).half(), torch.ones(4, 3, device=CUDA).half()
    torch.cuda.synchronize()
    answers.round_trips = 0
    F.linear(*halves)
    assert answers.round_trips == 1
    F.linear(*halves)
    F.linear(halves[0][:1], halves[1])
    assert answers.round_trips == 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="same dtype"):
            F.linear(halves[0], halves[1].float())
    assert answers.round_trips == 3, "what has failed is waited for the next time too"


def test_values_alone_are_computed_without_their_vectors(loopback: Any) -> None:
    executor = loopback.node.executors[0]
    for call in (linalg.svdvals, linalg.eigvalsh):
        host = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        before = executor.interpreter.operations_run
        got = call(host.to(CUDA)).cpu()
        torch.testing.assert_close(got, call(host))
        assert executor.interpreter.operations_run == before + 1


def test_a_refused_operation_names_a_way_on() -> None:
    assert refusal("aten::segment_reduce").endswith("use others in its place, or call it on the CPU, with x.cpu()")


def test_what_may_not_fit_is_waited_for(loopback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program halves its batch when the GPU is full; what surely fits makes no round trip."""
    monkeypatch.setattr(Room, "large_nbytes", 1 << 16)
    stream, answers = loopback.stream, loopback.stream.answers
    host = torch.ones(1 << 15)
    model = host.to(CUDA)
    assert (stream.leased, answers.round_trips) == (False, 0), "what load() uploads goes to the store"
    stream.commit()
    loopback.begin_lease()
    assert torch.equal(model.cpu(), host)
    answers.round_trips = 0
    small, large = torch.empty(1 << 8, device=CUDA), torch.empty(1 << 15, device=CUDA)
    assert answers.round_trips == 1
    torch.cat([small, small])
    assert answers.round_trips == 1
    torch.cat([large.fill_(1.0), small])
    assert answers.round_trips == 2
    held = stream.held_nbytes
    ways: list[Callable[[], Tensor]]
    ways = [lambda: torch.empty(1 << 38, device=CUDA), lambda: model[:1].expand(1 << 38) + 1]
    for refused in ways:
        with pytest.raises((torch.OutOfMemoryError, RuntimeError), match="memory"):
            refused()
        assert stream.held_nbytes == held, "nothing is left of it"
    assert large.sum().item() == 1 << 15


def test_many_small_that_add_up_are_waited_for_together(loopback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed or uploaded; those that have died do not count."""
    monkeypatch.setattr(Room, "large_nbytes", 1 << 16)
    loopback.begin_lease()
    answers = loopback.stream.answers
    host = torch.ones(1 << 11)  # of which the ninth is waited for
    ways: list[Callable[[], Tensor]] = [lambda: host.to(CUDA), lambda: torch.ones(1 << 11, device=CUDA)]
    for make in ways:
        torch.cuda.synchronize()
        answers.round_trips = 0
        for _ in range(100):
            make()
        assert answers.round_trips == 0
        kept = [make() for _ in range(100)]
        assert answers.round_trips == 11
        assert len({each.sum().item() for each in kept}) == 1
        del kept
