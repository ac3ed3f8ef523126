"""Calls that CUDA kernels accept and CPU kernels do not, for executors that compute on the CPU: programs written for
`cuda` make them."""

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


def _of_dtype(name: str) -> Callable[..., torch.Tensor]:
    """A product whose result is wider than its operands, as CUDA has it for halves."""
    product = getattr(torch.ops.aten, name)

    def call(*args: Any, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None, **numbers: Any) -> Any:
        dtype = out_dtype or args[-1]
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        halves = tensors[-1].dtype in (torch.float16, torch.bfloat16)
        if dtype != tensors[-1].dtype and not (halves and dtype is torch.float32):
            raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
        wide = [tensor.to(dtype) for tensor in tensors]
        return product.default(*wide, **numbers) if out is None else product.out(*wide, **numbers, out=out)

    return call


EMULATED: Final[dict[str, Callable[..., Any]]] = {
    "aten::histc": _histc,
    "aten::scaled_dot_product_attention": _attention,
    **{
        f"aten::{name}.dtype{way}": _of_dtype(name)
        for name in ("mm", "bmm", "addmm", "baddbmm")
        for way in ("", "_out")
    },
}
"""By the schema's name. Checked against the same samples as everything else in `benchmarks/coverage.py`."""
