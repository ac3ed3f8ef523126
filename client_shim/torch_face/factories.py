"""Tensors made on cuda:0 from nothing: `torch.zeros(..., device="cuda")`, `arange`, `randn`.

They have no tensor argument, so they do not reach the wrapper; they reach kernels on the CUDA key, in every thread
and without a mode. The ones with a composite kernel would arrive as `empty` and a `resize`; they are registered one
by one so that each is one command.
"""

from functools import partial
from typing import Any, Final

from dormouse.client_shim import torch_dispatcher
from dormouse.client_shim.commands import metas, operations
from dormouse.client_shim.commands.operations import Operation
from dormouse.client_shim.torch_face.device_numbers import expect_first
from dormouse.client_shim.torch_face.remote_tensor import dispatch, record

WITHOUT_PYTHON_KEY: Final = ("copy_", "_local_scalar_dense", "empty.memory_format", "empty_strided")
"""The operations that constructors from data call without the Python key: making a tensor on cuda:0, moving numbers
there, and reading one of a list of tensors. PyTorch's own kernels of the first two would come before our fallback; and
under a mode of the function's, PyTorch finds kernels in Python only if they were registered for the operation."""

WITH_CUDA_KERNELS: Final = ("tril_indices", "triu_indices", "_cudnn_init_dropout_state", "_efficientzerotensor")
"""Further factories that have a kernel of their own in a torch for CUDA, besides the two above."""


def install() -> None:
    torch_dispatcher.register_fallback(_fallback)
    made = [name for name, schema in torch_dispatcher.aten_schemas().items() if _is_factory(name, schema)]
    operations.handler(*made, pure=True, overloads=False)(_make)
    covered = (*made, *WITHOUT_PYTHON_KEY, *WITH_CUDA_KERNELS)
    torch_dispatcher.register_kernels({name: partial(_fallback, torch_dispatcher.operation(name)) for name in covered})


def _is_factory(name: str, schema: Any) -> bool:
    kinds = [str(argument.type) for argument in schema.arguments]
    return (
        not any("Tensor" in kind or "Storage" in kind for kind in kinds)
        and any(argument.name == "device" for argument in schema.arguments)
        and str(schema.returns[0].type) == "Tensor"
        and not any(word in schema.name for word in ("sparse", "quantized", "empty", "from_file", "nested"))
        and not any(word in schema.overload_name for word in ("names", "out"))
        and torch_dispatcher.has_kernel(f"aten::{name}", "CompositeExplicitAutograd")
        and not torch_dispatcher.has_kernel(f"aten::{name}", "CUDA")
    )


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    return dispatch(op, args, kwargs)


def _make(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    metas.check_layout(kwargs.pop("layout", None))
    kwargs.pop("pin_memory", None)
    if (device := kwargs.get("device")) is not None:
        expect_first(device.index)
    return record(operation, args, kwargs)
