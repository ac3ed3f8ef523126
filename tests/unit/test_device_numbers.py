"""Devices by number, as on a GPU machine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

X = torch.ones(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: X.to(0),
        lambda: X.to(0, torch.float16),
        lambda: X.to(device=0, dtype=torch.float16),
        lambda: X.cuda(0),
        lambda: X.cuda(device=0),
        lambda: X.cuda().to(0),
        lambda: torch.zeros(2, device=0),
        lambda: torch.tensor([1], device=0),
        lambda: torch.ones_like(X, device=0),
        lambda: X.new_zeros(2, device=0),
        lambda: torch.nn.Linear(2, 2, device=0).weight,
        lambda: torch.nn.Linear(2, 2).to(0).weight,
        lambda: torch.nn.Linear(2, 2).to(device=0).weight,
        lambda: torch.nn.Linear(2, 2).cuda(0).weight,
    ],
)
def test_number_0_is_cuda_0(loopback: Any, make: Callable[[], torch.Tensor]) -> None:
    assert make().device == torch.device("cuda", 0)


def test_generators(loopback: Any) -> None:
    generator: Any = torch.Generator(device=0)
    assert generator.device == torch.device("cuda", 0)


def test_there_is_no_number_1(loopback: Any) -> None:
    fail: Any
    for fail in (lambda: X.to(1), lambda: X.cuda(1), lambda: torch.zeros(2, device=1)):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            fail()


def test_what_is_not_a_number_is_left_alone(loopback: Any) -> None:
    assert X.to(torch.float16).dtype == torch.float16
    assert X.to(X.double()).dtype == torch.float64
    assert X.to("cpu") is X
    assert torch.nn.Linear(2, 2).to(torch.float16).weight.dtype == torch.float16
