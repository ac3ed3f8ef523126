"""All private PyTorch API that the shim stands on, behind names of our own; the self-test at install refuses a torch
it was not written for.

Written for the CPU wheels of torch 2.11 to 2.13. A CUDA wheel has kernels on the dispatch key that we need to be
free, and is refused too.
"""

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import torch

SUPPORTED: Final = ((2, 11), (2, 12), (2, 13))

_CUDA_SLOT: Final = 1
_GUARD_REGISTRY: Final = "_ZN3c104impl26device_guard_impl_registryE"
# A backend of which a CPU wheel registers a guard that reports zero devices: only such a guard may be replaced by
# PyTorch's own no-op one.
_LAZY_SLOT: Final = 17

_C: Any = torch._C
_torch: Any = torch
_library: Any = torch.library.Library

LinAlgError: type[Exception] = _C._LinAlgError
NoTorchFunction: Any = _C.DisableTorchFunction
BelowAutograd: Any = _C._AutoDispatchBelowAutograd
InferenceMode: Any = _C._InferenceMode
disabled_torch_function: Any = _C._disabled_torch_function_impl
make_wrapper: Any = torch.Tensor._make_wrapper_subclass
set_conj: Any = _C._set_conj
set_neg: Any = _C._set_neg
_data_slot: Any = _C.TensorBase.data

_libraries: list[Any] = []  # torch.library.Library unregisters when it is collected


class UnsupportedTorch(RuntimeError):
    """This torch is not one that the shim can stand on; install one of the versions that the message names."""


def check_version() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version not in SUPPORTED:
        names = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise UnsupportedTorch(f"the client shim is written for torch {names}, but this is torch {torch.__version__}")
    if torch.version.cuda is not None or torch.version.hip is not None:
        raise UnsupportedTorch(
            f"a sandbox needs the CPU wheel of torch, but this is {torch.__version__}, built for a GPU"
        )


def install_device_guard() -> None:
    """Give `cuda` a device guard that does nothing.

    A CPU wheel has none, so that indexing a CUDA tensor or `.to("cuda")` raises. PyTorch has a no-op guard of its
    own, but installs it only in place of a registered guard that reports no devices; so such a one is put there
    first.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * (_LAZY_SLOT + 1)).in_dll(library, _GUARD_REGISTRY)
    if registry[_CUDA_SLOT] is None:
        if registry[_LAZY_SLOT] is None:
            raise UnsupportedTorch(
                "no device guard to borrow: slot 17 of c10's registry is empty in this build of torch"
            )
        registry[_CUDA_SLOT] = registry[_LAZY_SLOT]
        _C._ensureCUDADeviceGuardSet()
    _C._cuda_getDevice = lambda: 0
    # Else torch.tensor(..., device="cuda") moves the data without telling the dispatcher.
    _C._set_only_lift_cpu_tensors(True)


def register_fallback(kernel: Callable[..., Any]) -> None:
    """`kernel(op, *args, **kwargs)` for every operation that reaches the CUDA key, which is free in a CPU wheel:
    factories."""
    library = _library("_", "IMPL")
    library.fallback(kernel, "CUDA")
    _libraries.append(library)


def register_kernels(kernels: dict[str, Callable[..., Any]]) -> list[str]:
    """Kernels on the CUDA key by operator name without namespace; names that this torch does not have are left out
    and returned."""
    library = _library("aten", "IMPL")
    _libraries.append(library)
    known = {schema.name + ("." + schema.overload_name if schema.overload_name else "") for schema in all_schemas()}
    missing = [name for name in kernels if f"aten::{name}" not in known]
    for name, kernel in kernels.items():
        if f"aten::{name}" in known:
            library.impl(name, kernel, "CUDA")
    return missing


def all_schemas() -> list[Any]:
    return list(_C._jit_get_all_schemas())


def has_kernel(name: str, key: str) -> bool:
    return bool(_C._dispatch_has_kernel(name) and _C._dispatch_has_kernel_for_dispatch_key(name, key))


def call_composite(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator's Python kernel that is written in terms of other operations."""
    return op._op_dk(_C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def keep_dynamo_out() -> None:
    """Shape rules written in Python are wrapped so that compiling never enters them, and the wrapper imports the
    compiler: seconds and tens of megabytes in every instance, for a compiler that is not used. Tell each wrapper that
    it has nothing to guard.
    """
    wrapper: Any = _torch._disable_dynamo(len)
    for candidate in gc.get_referrers(wrapper.__code__):
        if type(candidate) is FunctionType:
            # The closure, not `__wrapped__`, which later decorators may have changed.
            cells = dict(zip(candidate.__code__.co_freevars, candidate.__closure__ or (), strict=True))
            wrapped: Any = cells["fn"].cell_contents
            with contextlib.suppress(AttributeError):
                wrapped.__dynamo_disable = wrapped
    _C._cuda_getCurrentRawStream = lambda device: 0  # which the compiler's modules import where there is a CUDA


def untyped_storage(nbytes: int, device: str) -> torch.UntypedStorage:
    make: Any = torch.UntypedStorage
    storage: torch.UntypedStorage = make(nbytes, device=device)
    return storage


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange two tensor objects; fails if somebody holds a weak reference to one."""
    exchange: Any = torch.utils.swap_tensors
    exchange(one, other)


def set_tensor_data(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Give a tensor object the sizes and strides of another (what `.data =` does below Python)."""
    _data_slot.__set__(tensor, source)


def get_tensor_data(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _data_slot.__get__(tensor)
    return result


def lift_as_before() -> None:
    _C._set_only_lift_cpu_tensors(False)


def swap_on_module_conversion(swap: bool) -> None:
    """`module.to("cuda")` by exchanging tensors: `.data =` would silently drop our handles and untie weights."""
    torch.__future__.set_swap_module_params_on_conversion(swap)


def self_test(make: Callable[[], torch.Tensor], base: type) -> None:
    """Check on one tensor each property that the shim relies on."""
    tensor = make()
    checks = {
        "a wrapper keeps its Python type": type(tensor) is base,
        "a wrapper says that it is on cuda:0": tensor.is_cuda and tensor.device == torch.device("cuda", 0),
        "a wrapper keeps its strides": tensor.stride() == (1, 2) and tensor.storage_offset() == 0,
        "views reach __torch_dispatch__": type(tensor.t()) is base and tensor.t().shape == (3, 2),
        "indexing works on a CPU wheel": type(tensor[0]) is base,
        "factories reach the CUDA key": type(torch.empty(2, device="cuda")) is base,
        ".data goes through detach": type(tensor.data) is base,
    }
    with torch.inference_mode():
        checks["views work in inference mode"] = type(tensor.view(6) if tensor.is_contiguous() else tensor.t()) is base
    failed = [name for name, good in checks.items() if not good]
    if failed:
        raise UnsupportedTorch(f"torch {torch.__version__} does not behave as the shim needs: {'; '.join(failed)}")
