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


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Of the kernels that CUDA has, a CPU has two: where others were chosen, one of these computes."""
    kernels: Any = torch.backends.cuda
    if kernels.flash_sdp_enabled() or kernels.math_sdp_enabled():
        result: torch.Tensor = torch.ops.aten.scaled_dot_product_attention.default(*args, **kwargs)
    else:
        result = torch.ops.aten._scaled_dot_product_attention_math.default(*args, **kwargs)[0]
    return result


EMULATED: Final[dict[str, Callable[..., Any]]] = {
    "aten::histc": _histc,
    "aten::scaled_dot_product_attention": _attention,
}
"""By the schema's name. Checked against the same samples as everything else in `benchmarks/coverage.py`."""
