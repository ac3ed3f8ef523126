"""Argument checks made here, at the call, as PyTorch makes them before it calls a kernel."""

from typing import Any

from dormouse.client_shim.commands.handles import meta_of, storage_of
from dormouse.client_shim.commands.operations import Operation, handler
from dormouse.client_shim.torch_face.remote_tensor import is_remote, record


@handler("as_strided", pure=True)
def _as_strided(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    view = record(operation, args, kwargs)
    if (needed := meta_of(view).extent()) > (held := storage_of(view).nbytes):
        meta = meta_of(view)
        raise RuntimeError(
            f"setStorage: sizes {list(meta.size)}, strides {list(meta.stride)}, storage offset {meta.offset}, and "
            f"itemsize {meta.dtype.itemsize} requiring a storage size of {needed} are out of bounds for storage of "
            f"size {held}"
        )
    return view


@handler("pow.Tensor_Scalar", "pow_.Scalar", pure=True)
def _pow(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    exponent = args[1]
    if type(exponent) is int and exponent < 0 and not (args[0].is_floating_point() or args[0].is_complex()):
        raise RuntimeError("Integers to negative integer powers are not allowed.")
    return record(operation, args, kwargs)


@handler("_assert_async")
def _assert_async(operation: Operation, args: Any, kwargs: dict[str, Any]) -> None:
    """Waits, for an assertion that fails on a GPU ends it for everybody."""
    condition, text = args[0], args[1] if len(args) > 1 else kwargs.get("assert_msg")
    if not is_remote(condition) or condition.numel() != 1:
        raise RuntimeError("an assertion takes a tensor of one value on cuda:0")
    if not condition.item():
        raise RuntimeError(text or "Expected Tensor with single nonzero value, but got zero")
