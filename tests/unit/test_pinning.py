"""Pinned host memory: it says that it is pinned, and costs a copy."""

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

CUDA = "cuda"


def test_a_pinned_copy(loopback: Any) -> None:
    x = torch.arange(6.0).view(2, 3).t()
    y = x.pin_memory()
    assert (x.is_pinned(), y.is_pinned()) == (False, True)
    assert y.pin_memory() is y
    assert torch.equal(x, y)
    assert y.stride() == x.stride()
    assert y.data_ptr() != x.data_ptr()
    assert y[1:].t().is_pinned()
    assert y.untyped_storage().is_pinned()
    assert not y.clone().is_pinned()
    assert not torch.nn.Parameter(x).is_pinned()
    assert y.to(CUDA, non_blocking=True).tolist() == x.tolist()
    assert not y.to(CUDA).is_pinned()
    assert x.untyped_storage().pin_memory().is_pinned()


def test_only_dense_cpu_tensors(loopback: Any) -> None:
    make: Any
    for make in (
        lambda: torch.ones(2, device=CUDA).pin_memory(),
        lambda: torch.zeros(2, device="meta", pin_memory=True),
        lambda: torch.ones(2).to_sparse().pin_memory(),
    ):
        with pytest.raises(RuntimeError, match="only dense CPU tensors"):
            make()
    assert not torch.ones(2).to_sparse().is_pinned()


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda **kwargs: torch.empty(3, **kwargs),
        lambda **kwargs: torch.empty((2, 3), dtype=torch.float64, **kwargs),
        lambda **kwargs: torch.empty_strided((2, 3), (1, 2), **kwargs),
        lambda **kwargs: torch.zeros(3, **kwargs),
        lambda **kwargs: torch.ones(3, **kwargs),
        lambda **kwargs: torch.full((3,), 2, **kwargs),
        lambda **kwargs: torch.rand(3, **kwargs),
        lambda **kwargs: torch.randn(3, **kwargs),
        lambda **kwargs: torch.randint(5, (3,), **kwargs),
        lambda **kwargs: torch.arange(3, **kwargs),
        lambda **kwargs: torch.tensor([1, 2], **kwargs),
        lambda **kwargs: torch.empty_like(X, **kwargs),
        lambda **kwargs: torch.zeros_like(X, **kwargs),
        lambda **kwargs: torch.ones_like(X, **kwargs),
        lambda **kwargs: torch.rand_like(X, **kwargs),
        lambda **kwargs: torch.full_like(X, 2, **kwargs),
        lambda **kwargs: X.new_empty(3, **kwargs),
        lambda **kwargs: X.new_zeros(3, **kwargs),
    ],
)
def test_factories_make_pinned_tensors(loopback: Any, make: Callable[..., torch.Tensor]) -> None:
    assert make(pin_memory=True).is_pinned()
    assert not make(pin_memory=False).is_pinned()
    assert not make().is_pinned()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_factories_are_still_what_pytorch_knows(loopback: Any) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(3) + torch.ones_like(x)

    scripted: Any = torch.jit.script(program)
    assert scripted(torch.ones(3)).tolist() == [2.0] * 3
    assert pickle.loads(pickle.dumps(torch.zeros)) is torch.zeros
    with torch.device(CUDA):
        assert torch.zeros(2).is_cuda
        assert torch.tensor([1]).is_cuda
        assert torch.empty_like(torch.eye(2)).is_cuda
    with torch.device("meta"):
        assert torch.ones(2).is_meta


def test_pinned_memory_is_given_back(loopback: Any) -> None:
    storages = [weakref.ref(torch.ones(4).pin_memory().untyped_storage()) for _ in range(3)]
    gc.collect()
    assert [storage() for storage in storages] == [None] * 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_pins(loopback: Any, workers: int) -> None:
    data = TensorDataset(torch.arange(6.0).view(3, 2), torch.arange(3))
    loader = DataLoader(data, batch_size=2, pin_memory=True, num_workers=workers)
    seen = []
    for values, labels in loader:
        assert values.is_pinned()
        assert labels.is_pinned()
        seen.append(values.to(CUDA, non_blocking=True).sum().item())
    assert seen == [6.0, 9.0]


def test_leaving_gives_pytorch_back(loopback: Any) -> None:
    factory = torch.zeros
    loopback.close()
    assert torch.zeros is not factory
    assert not torch.ones(2).is_pinned()
    with pytest.raises(RuntimeError):
        torch.empty(2, pin_memory=True)
