"""Methods of `RemoteTensor` that look at bytes or at Python-level identity, where PyTorch's own would see an empty
tensor.

Installed onto the class once; also `Tensor.data`, whose setter would silently drop a remote tensor's handle.
"""

import copy
import functools
from typing import Any, Final, NoReturn

import torch
from torch import overrides

from dormouse.client_shim import torch_dispatcher, torch_private
from dormouse.client_shim.commands.handles import adopt, cpp, meta_of, storage_of
from dormouse.client_shim.patches import patch, raising
from dormouse.client_shim.torch_face import at_call, device_numbers, pinning, storages, synchronizing  # noqa: F401  # at_call: its handlers
from dormouse.client_shim.torch_face.remote_tensor import RemoteTensor, is_remote, wrap
from dormouse.client_shim.torch_face.storages import CudaStorage, address, copied, set_
from dormouse.client_shim.torch_face.transfers import download


def install() -> None:
    for name, method in {**_METHODS, **_AS_PYTORCH_HAS_THEM}.items():
        setattr(RemoteTensor, name, method)
    patch(torch.Tensor, "data", property(_get_data, _set_data))
    owners: tuple[Any, ...] = (torch, torch.utils.dlpack)
    capsule = _chosen(owners[0].to_dlpack, _METHODS["__dlpack__"])
    for owner in owners:
        patch(owner, "to_dlpack", capsule)
    storages.install()
    pinning.install()
    device_numbers.install()


def install_on_tensors() -> None:
    """The same where tensors of cuda:0 are PyTorch's own: PyTorch does the rest for them."""
    tensor: Any = torch.Tensor
    for name, method in _METHODS.items():
        patch(tensor, name, _chosen(getattr(tensor, name), method))


def _chosen(real: Any, method: Any) -> Any:
    if isinstance(method, property):
        return property(_chosen(real.fget, method.fget))

    @functools.wraps(real)
    def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_remote(self):
            return real(self, *args, **kwargs)
        if overrides.has_torch_function_unary(self):
            return overrides.handle_torch_function(chosen, (self,), self, *args, **kwargs)
        with torch_dispatcher.NoTorchFunction():
            return method(self, *args, **kwargs)

    return chosen


no_backward = raising(
    "backward() is not available on Dormouse: a function's GPU runs inference only, "
    "the operations of the backward pass are not allowed there. Train elsewhere, or call .cpu() first"
)


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    """`type(parameter)(value, requires_grad=False)`, as accelerate puts weights into their places."""
    if "requires_grad" in kwargs:
        return torch.nn.Parameter(*args, **kwargs)
    return torch.Tensor.__new__(cls, *args, **kwargs)


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, RemoteTensor)
"""Other classes are the program's."""


def _data_ptr(self: RemoteTensor) -> int:
    base = address(storage_of(self))
    return base + meta_of(self).offset * meta_of(self).dtype.itemsize if base else 0


def _repr(self: RemoteTensor, *, tensor_contents: Any = None) -> str:
    synchronizing.note()
    host = download(self)
    text: str = torch._tensor_str._str(host, tensor_contents=tensor_contents)  # type: ignore[no-untyped-call]
    closing = text.rindex(")")
    extra = ", device='cuda:0'" + (", requires_grad=True" if self.requires_grad and self.is_leaf else "")
    text = text[:closing] + extra + text[closing:]
    return "Parameter containing:\n" + text if getattr(self, "_is_param", False) else text


def _tolist(self: RemoteTensor) -> Any:
    synchronizing.note()
    return download(self).tolist()


def _numpy(self: RemoteTensor, *, force: bool = False) -> Any:
    if force:
        synchronizing.note()
        return download(self).numpy(force=True)
    raise TypeError(
        "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
    )


def _array(self: RemoteTensor, *args: Any, **kwargs: Any) -> Any:
    return _numpy(self)


def _deepcopy(self: RemoteTensor, memo: dict[int, Any]) -> Any:
    if id(self) in memo:
        return memo[id(self)]
    if not self.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment"
        )
    with torch.no_grad():
        # Tensors that share a storage still share one afterwards, as torch has it.
        result: Any = wrap(copied(storage_of(self), memo), meta_of(self))
        if type(self) not in _PLAIN:
            result = result.as_subclass(type(self))
    result.requires_grad_(self.requires_grad)
    parameter = getattr(self, "_is_param", False)  # of which PyTorch copies no more
    for name, value in self.__dict__.items():
        if name not in ("_storage", "_meta") and (not parameter or name == "_is_param"):
            setattr(result, name, copy.deepcopy(value, memo))
    memo[id(self)] = result
    return result


def _reduce_ex(self: RemoteTensor, protocol: Any) -> Any:
    """The value for a CUDA tensor of PyTorch, so that files hold nothing of ours."""
    state = {name: value for name, value in self.__dict__.items() if name not in ("_storage", "_meta", "_is_param")}
    if getattr(self, "_is_param", False):
        return torch_private.reduce_parameter(self.data, self.requires_grad, state)
    return torch_private.reduce_tensor(self, state, torch.Tensor if type(self) in _PLAIN else type(self))


def _is_set_to(self: RemoteTensor, tensor: Any) -> bool:
    if not is_remote(tensor) or storage_of(self) is not storage_of(tensor):
        return False
    return meta_of(self) is meta_of(tensor) or meta_of(self).definition() == meta_of(tensor).definition()


def _as_subclass(self: RemoteTensor, cls: type) -> RemoteTensor:
    if cls is torch.Tensor or cls is RemoteTensor:
        return self
    raise NotImplementedError(
        f"a CUDA tensor cannot become a {cls.__name__} on Dormouse: it is a tensor subclass already"
    )


def _get_data(self: torch.Tensor) -> torch.Tensor:
    return torch_private.get_tensor_data(self)


def _set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    if cpp.module is not None:
        torch_private.set_tensor_data(self, value)
    elif is_remote(self) and is_remote(value):
        torch_private.set_tensor_data(self, value)
        adopt(self, storage_of(value), meta_of(value))
    elif is_remote(self) or is_remote(value):
        # The object must become another kind of tensor: exchange the two, keeping the object's role in its module.
        state = {name: item for name, item in self.__dict__.items() if name not in ("_storage", "_meta")}
        is_param = isinstance(self, torch.nn.Parameter)
        replacement = (
            torch.nn.Parameter(value.detach(), self.requires_grad)
            if is_param
            else value.detach().requires_grad_(self.requires_grad)
        )
        torch_private.swap(self, replacement)
        for name, item in state.items():
            if name != "_is_param":
                setattr(self, name, item)
    else:
        torch_private.set_tensor_data(self, value)


def _pin_memory(self: RemoteTensor, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")


def _unsupported(what: str) -> Any:
    text = f"{what} needs the bytes of a CUDA tensor, which are not in this process: call .cpu() first"
    return raising(text, NotImplementedError)


_AS_PYTORCH_HAS_THEM: dict[str, Any] = {
    "__new__": staticmethod(_new),
    "__str__": _repr,
    "__format__": lambda self, spec: format(download(self), spec) if self.dim() == 0 else object.__format__(self, spec),
    "as_subclass": _as_subclass,
    "is_pinned": lambda self, *args: False,
}
"""Methods that a subclass has to have of its own."""

_METHODS: dict[str, Any] = {
    "__repr__": _repr,
    "tolist": _tolist,
    "numpy": _numpy,
    "__array__": _array,
    "__deepcopy__": _deepcopy,
    "__reduce_ex__": _reduce_ex,
    "data_ptr": _data_ptr,
    "const_data_ptr": _data_ptr,
    "untyped_storage": lambda self: CudaStorage(storage_of(self)),
    "set_": set_,
    "is_set_to": _is_set_to,
    "backward": no_backward,
    "pin_memory": _pin_memory,
    "is_shared": lambda self: True,
    "share_memory_": lambda self: self,
    "record_stream": lambda self, stream: None,
    "__dlpack__": _unsupported("DLPack"),
    "__cuda_array_interface__": property(_unsupported("the CUDA array interface")),
}
