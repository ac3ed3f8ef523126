"""Private PyTorch API that the shim relies on, behind names of our own: for tensors, storages and settings here, for
the dispatcher and for devices in `torch_dispatcher` and `torch_device`. The self-test at install refuses other versions
of torch.

Written for torch 2.11 to 2.13, their CPU wheels and those for CUDA. The latter have a device guard and kernels on the
dispatch key that we need: where no argument is a tensor of ours, these are replaced.
"""

import contextlib
import functools
import gc
import importlib
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, Final

import torch

from dormouse.client_shim.torch_dispatcher import has_kernel
from dormouse.schemas.numerics import SETTINGS, Setting

SUPPORTED: Final = ((2, 11), (2, 12), (2, 13))

BUILT_FOR_CUDA: Final = torch.version.cuda is not None
"""The original value: programs may see another one later."""

_C: Any = torch._C
_torch: Any = torch

LinAlgError: type[Exception] = _C._LinAlgError
InferenceMode: Any = _C._InferenceMode
disabled_torch_function: Any = _C._disabled_torch_function_impl
is_inference: Any = _C.TensorBase.is_inference
make_wrapper: Any = torch.Tensor._make_wrapper_subclass
set_conj: Any = _C._set_conj
set_neg: Any = _C._set_neg
_data_slot: Any = _C.TensorBase.data


class UnsupportedTorch(RuntimeError):
    """This torch is not one that the shim can stand on; install one of the versions that the message names."""


def check_version() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version not in SUPPORTED:
        names = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise UnsupportedTorch(f"the client shim is written for torch {names}, but this is torch {torch.__version__}")
    if torch.version.hip is not None:
        raise UnsupportedTorch(f"the client shim is not written for ROCm, but this is torch {torch.__version__}")


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


def let_compiler_import() -> None:
    """Its modules import these where there is a CUDA: a CPU build lacks them, and the first needs a driver."""
    _C._cuda_getCurrentRawStream = lambda device: 0
    for name in ("_cuda_CUDAAllocator_AllocatorState", "_set_cached_tensors_enabled"):
        if not hasattr(_C, name):
            setattr(_C, name, None)


def untyped_storage(nbytes: int, device: str) -> torch.UntypedStorage:
    make: Any = torch.UntypedStorage
    storage: torch.UntypedStorage = make(nbytes, device=device)
    return storage


def watch_settings(patch: Callable[[Any, str, Any], None], watch: Callable[[Setting, list[Any]], None]) -> None:
    """Call `watch(setting, values)` after each setter of numerics. `torch.backends.cudnn` holds some of them as they
    were when it was imported.
    """
    held = [kept for kept in vars(type(torch.backends.cudnn)).values() if hasattr(kept, "setter")]
    for name in {setting.setter for setting in SETTINGS if hasattr(_C, setting.setter)}:
        real = getattr(_C, name)
        watched = _watched(real, [setting for setting in SETTINGS if setting.setter == name], watch)
        patch(_C, name, watched)
        for kept in held:
            if kept.setter is real:
                patch(kept, "setter", watched)


def _watched(
    real: Callable[..., None], settings: list[Setting], watch: Callable[[Setting, list[Any]], None]
) -> Callable[..., None]:
    @functools.wraps(real)
    def setter(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        values = [*args, *kwargs.values()]
        for setting in settings:
            leading = len(setting.leading)
            if tuple(values[:leading]) == setting.leading:
                watch(setting, values[leading:])

    return setter


def keep_scripts_unfused() -> None:
    """A torch for CUDA makes kernels of its own for code that TorchScript has run a few times, and needs a driver for
    it.
    """
    _C._jit_override_can_fuse_on_gpu(False)


def bindings() -> Any:
    """The C++ module, for those of its functions that the shim answers."""
    return _C


def list_factories() -> None:
    """PyTorch lists its factories once, at the first `with torch.device(...)`, and recognizes only those."""
    importlib.import_module("torch.utils._device")._device_constructors()


def same_for_jit(function: Any, real: Any) -> None:
    """Let `torch.jit.script` take one function for another, which it knows."""
    builtins = importlib.import_module("torch.jit._builtins")
    if (name := builtins._find_builtin(real)) is not None:
        builtins._register_builtin(function, name)


def make_storage(cls: type, *args: Any, **kwargs: Any) -> torch.UntypedStorage:
    """`torch.UntypedStorage(...)` as PyTorch has it."""
    storage: torch.UntypedStorage = _C.StorageBase.__new__(cls, *args, **kwargs)
    return storage


def copy_storage(target: torch.UntypedStorage, source: Any) -> torch.UntypedStorage:
    _C.StorageBase.copy_(target, source)
    return target


def typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    make: Any = torch.TypedStorage
    result: torch.TypedStorage = make(wrap_storage=storage, dtype=dtype, _internal=True)  # without its warning
    return result


def untyped(storage: Any) -> torch.UntypedStorage:
    result: torch.UntypedStorage = storage._untyped_storage
    return result


def write_storage(storage: Any, *args: Any, **kwargs: Any) -> Any:
    """Into a file of the format before zip files."""
    return storage._write_file(*args, **kwargs)


def read_storage(storage: Any, *args: Any, **kwargs: Any) -> None:
    storage._set_from_file(*args, **kwargs)


def awaits_loading(storage: Any) -> bool:
    """Whether `torch.load` has only made room so far, and will fill it later (`_set_from_file`)."""
    return getattr(storage, "_torch_load_uninitialized", False)


def watch_tensor_metadata(
    patch: Callable[[Any, str, Any], None], watch: Callable[[Any, dict[str, bool]], None]
) -> None:
    """Call `watch(tensor, bits)` when `torch.load` marks a tensor as conjugated or negated."""
    real = _torch._utils.set_tensor_metadata

    def set_tensor_metadata(tensor: Any, metadata: dict[str, bool]) -> None:
        real(tensor, metadata)
        watch(tensor, metadata)

    patch(_torch._utils, "set_tensor_metadata", set_tensor_metadata)


def reduce_tensor(tensor: torch.Tensor, state: dict[str, Any], kind: type) -> tuple[Any, tuple[Any, ...]]:
    """The value of `torch.Tensor.__reduce_ex__` for a dense CUDA tensor of a class with attributes of its own."""
    utils = _torch._utils
    geometry: tuple[Any, ...] = (
        tensor.storage_offset(),
        tuple(tensor.size()),
        tensor.stride(),
        tensor.requires_grad,
        OrderedDict(),
    )
    bits = utils.get_tensor_metadata(tensor)
    args: tuple[Any, ...]
    if tensor.dtype in _torch.storage._new_dtypes():
        rebuild = utils._rebuild_tensor_v3
        args = (tensor.untyped_storage(), *geometry, tensor.dtype)
    else:
        rebuild = utils._rebuild_tensor_v2
        args = (typed(tensor.untyped_storage(), tensor.dtype), *geometry)
    if bits:
        args = (*args, bits)
    if state or kind is not torch.Tensor:
        return _torch._tensor._rebuild_from_type_v2, (rebuild, kind, args, state)
    return rebuild, args


def reduce_parameter(data: torch.Tensor, requires_grad: bool, state: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The same of `torch.nn.Parameter.__reduce_ex__`."""
    utils = _torch._utils
    if state:
        return utils._rebuild_parameter_with_state, (data, requires_grad, OrderedDict(), state)
    return utils._rebuild_parameter, (data, requires_grad, OrderedDict())


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange two tensor objects."""
    exchange: Any = torch.utils.swap_tensors
    exchange(one, other)


def set_tensor_data(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Give a tensor object the sizes and strides of another, as `.data =` does below Python."""
    _data_slot.__set__(tensor, source)


def get_tensor_data(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _data_slot.__get__(tensor)
    return result


def memory(tensor: torch.Tensor) -> int:
    """The address that PyTorch takes for a wrapper's memory; only C++ knows the other tensor objects that share it."""
    address: int = _C.TensorBase.untyped_storage(tensor)._cdata
    return address


def swap_despite_weak_references(patch: Callable[[Any, str, Any], None]) -> None:
    """Exported modules hold weak references to their tensors. These go on naming the tensor objects, which stay."""
    patch(_torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda tensor: []))


def swap_on_module_conversion(swap: bool) -> None:
    """`module.to("cuda")` by exchanging tensors: `.data =` would silently drop our handles and untie weights."""
    torch.__future__.set_swap_module_params_on_conversion(swap)


def _exchanges(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensor objects that have weak references can be: these name the objects then as before."""
    references, shapes = (weakref.ref(one), weakref.ref(other)), (one.shape, other.shape)
    try:
        swap(one, other)
    except RuntimeError:
        return False
    return references[0]() is one and references[1]() is other and (other.shape, one.shape) == shapes


def self_test(make: Callable[[], torch.Tensor], base: type) -> None:
    """Check on one tensor each property that the shim relies on."""
    tensor = make()
    checks = {
        "a wrapper keeps its Python type": type(tensor) is base,
        "a wrapper says that it is on cuda:0": tensor.is_cuda and tensor.device == torch.device("cuda", 0),
        "a wrapper keeps its strides": tensor.stride() == (1, 2) and tensor.storage_offset() == 0,
        "views reach __torch_dispatch__": type(tensor.t()) is base and tensor.t().shape == (3, 2),
        "indexing needs no device": type(tensor[0]) is base,
        "factories reach the CUDA key": type(torch.empty(2, device="cuda")) is base,
        ".data goes through detach": type(tensor.data) is base,
        "a device may be a number": torch.device(0) == tensor.device,
        "constructors from data reach the CUDA key": has_kernel("aten::copy_", "CUDA"),
        "tensors with weak references are exchanged": _exchanges(make(), make()[0]),
    }
    with torch.inference_mode():
        checks["views work in inference mode"] = type(tensor.view(6) if tensor.is_contiguous() else tensor.t()) is base
    failed = [name for name, good in checks.items() if not good]
    if failed:
        raise UnsupportedTorch(f"torch {torch.__version__} does not behave as the shim needs: {'; '.join(failed)}")
