"""What CUDA kernels accept and CPU kernels do not, for executors that compute on the CPU: a program written for
`cuda` meets these."""

from collections.abc import Callable
from typing import Any, Final

import torch


def _histc(data: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    counts: torch.Tensor = torch.ops.aten.histc.default(
        data if data.is_floating_point() else data.double(), *args, **kwargs
    )
    return counts.to(data.dtype)


EMULATED: Final[dict[str, Callable[..., Any]]] = {
    "aten::histc": _histc,
}
"""By the schema's name. Checked against the same samples as everything else in `benchmarks/coverage.py`."""
