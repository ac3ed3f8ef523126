"""What CUDA kernels accept and CPU kernels do not, for executors that compute on the CPU: a program written for `cuda` meets these."""

from collections.abc import Callable
from typing import Any, Final

import torch


def _histc(data: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if data.is_floating_point():
        return torch.ops.aten.histc.default(data, *args, **kwargs)
    return torch.ops.aten.histc.default(data.double(), *args, **kwargs).to(data.dtype)


EMULATED: Final[dict[str, Callable[..., Any]]] = {
    "aten::histc": _histc,
}
"""By the schema's name. Checked against the same samples as everything else in `benchmarks/coverage.py`."""
