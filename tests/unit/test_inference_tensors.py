"""Inference mode marks what it makes, and PyTorch's own rules about such tensors hold on cuda:0."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

CUDA = "cuda"
OUTSIDE = "Inplace update to inference tensor outside InferenceMode is not allowed"

MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ones": lambda x: torch.ones(3, device=x.device),
    "empty": lambda x: torch.empty(3, device=x.device),
    "sum": lambda x: x + x,
    "clone": lambda x: x.clone(),
    "upload": lambda x: torch.ones(3).to(x.device, copy=True),
    "sort": lambda x: x.sort()[1],
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
}
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(3, 1),
    "slice": lambda x: x[1:],
    "chunk": lambda x: x.chunk(2)[1],
    "detach": lambda x: x.detach(),
    "expand": lambda x: x.expand(2, 3),
    "reshape": lambda x: x.reshape(1, 3),
    "data": lambda x: x.data,
}


def _cpu_and_cuda(loopback: Any) -> list[torch.Tensor]:
    return [torch.ones(3), torch.ones(3, device=CUDA)]


def test_what_inference_mode_makes_is_marked(loopback: Any) -> None:
    for x in _cpu_and_cuda(loopback):
        assert not x.is_inference()
        for name, make in MAKERS.items():
            assert not make(x).is_inference(), name
            with torch.inference_mode():
                made = make(x)
                assert made.is_inference(), name
                with torch.inference_mode(False):
                    assert not make(x).is_inference(), name
            with pytest.raises(RuntimeError, match=OUTSIDE):
                made.zero_()
            with torch.inference_mode():
                made.zero_()
            assert not made.any()


def test_views_are_what_their_base_is(loopback: Any) -> None:
    for normal in _cpu_and_cuda(loopback):
        with torch.inference_mode():
            marked = normal + 1
        for name, view in VIEWS.items():
            for mode in (torch.inference_mode, torch.no_grad):
                with mode():
                    assert view(marked).is_inference(), (name, mode, marked.device)
                    assert not view(normal).is_inference(), (name, mode, normal.device)
        with pytest.raises(RuntimeError, match=OUTSIDE):
            marked[1:] = 5
        with torch.inference_mode():
            marked[1:] = 5
            normal[1:] = 7
        normal[:1] = 7
        assert marked.tolist() == [2.0, 5.0, 5.0]
        assert normal.tolist() == [7.0] * 3


def test_shapes_change_in_place(loopback: Any) -> None:
    for normal in _cpu_and_cuda(loopback):
        with torch.inference_mode():
            marked = torch.ones(2, 3, device=normal.device)
            marked.t_()
            normal.unsqueeze_(0)
            marked.resize_(4, 2)
        assert marked.is_inference()
        assert marked.shape == (4, 2)
        assert not normal.is_inference()
        assert normal.shape == (1, 3)
        normal.squeeze_(0).mul_(2)
        assert normal.tolist() == [2.0] * 3


def test_a_marked_tensor_computes_outside(loopback: Any) -> None:
    for x in _cpu_and_cuda(loopback):
        with torch.inference_mode():
            marked = x * 2
        assert (marked + x).tolist() == [3.0] * 3
        assert not (marked + x).is_inference()
        assert not marked.clone().is_inference()
        twin = copy.deepcopy(marked)
        assert twin.tolist() == [2.0] * 3
        with torch.enable_grad(), pytest.raises(RuntimeError, match="Setting requires_grad=True on inference tensor"):
            marked.requires_grad_()


def test_modules_made_in_inference_mode_run_outside(loopback: Any) -> None:
    layer = torch.nn.BatchNorm1d(3).eval()
    x = torch.randn(2, 3)
    expected = layer(x)
    with torch.inference_mode():
        layer.to(CUDA)
    assert torch.allclose(layer(x.to(CUDA)).cpu(), expected)
    with torch.inference_mode():
        assert torch.allclose(layer(x.to(CUDA)).cpu(), expected)
