"""The old names of CUDA tensor types: `torch.cuda.FloatTensor`, and `x.type(...)` with them.

PyTorch's own refuse to be called in a CPU build. These make tensors on cuda:0, and stand for PyTorch's in
`isinstance`.
"""

from functools import cache
from typing import Any, Final

import torch

from dormouse.client_shim.commands import recorder
from dormouse.client_shim.patches import patch

NAMES: Final = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}

_PREFIX: Final = "torch.cuda."


def install() -> None:
    for name, dtype in NAMES.items():
        patch(torch.cuda, name, _type_of(name, dtype))
    tensor: Any = torch.Tensor
    real_default = torch.set_default_tensor_type

    def set_default_tensor_type(t: Any, /) -> None:
        known = _cuda_type(t)
        if known is None:
            real_default(t)
            recorder.forget_plans()  # of which the default dtype is a part
            return
        raise RuntimeError(
            f"torch.set_default_tensor_type({_PREFIX}...) is not supported on Dormouse; "
            'use torch.set_default_device("cuda") and torch.set_default_dtype'
        )

    patch(tensor, "type", to_type)
    patch(torch, "set_default_tensor_type", set_default_tensor_type)


_real_type: Any = torch.Tensor.type


def to_type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """`Tensor.type`."""
    known = _cuda_type(dtype)
    if known is not None:
        return self.to("cuda", known)
    return _real_type(self, dtype, non_blocking, **kwargs)


def _cuda_type(wanted: Any) -> torch.dtype | None:
    """The dtype of a CUDA tensor type or of its name; None for everything else."""
    if isinstance(wanted, str):
        return NAMES.get(wanted.removeprefix(_PREFIX)) if wanted.startswith(_PREFIX) else None
    return wanted.dtype if isinstance(wanted, _TensorType) else None


class _TensorType(type):
    """The kind of these types: calling one makes a tensor, and instances are tensors of that device and dtype."""

    dtype: torch.dtype

    def __call__(cls, *args: Any, device: Any = "cuda") -> torch.Tensor:
        if torch.device(device).type != "cuda":
            raise RuntimeError(f"legacy constructor expects device type: cuda but device type: {device} was passed")
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            if not args[0].is_cuda or args[0].dtype != cls.dtype:
                raise TypeError(f"expected {_PREFIX}{cls.__name__} (got {args[0].type()})")
            return args[0].detach()
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.tensor(args[0], dtype=cls.dtype, device="cuda")
        size = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return torch.empty(size, dtype=cls.dtype, device="cuda")

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype == cls.dtype

    def __subclasscheck__(cls, other: Any) -> bool:
        return cls is other

    @property
    def is_cuda(cls) -> bool:
        return True

    is_sparse = False
    layout = torch.strided


@cache
def _type_of(name: str, dtype: torch.dtype) -> _TensorType:
    return _TensorType(name, (), {"__module__": "torch.cuda", "dtype": dtype})
