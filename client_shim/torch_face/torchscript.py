"""TorchScript modules on cuda:0: `torch.jit.load(path, map_location="cuda")` and `scripted.to("cuda")`.

PyTorch reads a module below Python: it moves a flat tensor, gives its memory and the right sizes to an empty one in
C++, where our handles do not see it, and takes an alias of that. And a module's slots are in C++, where two tensors
cannot be exchanged. When a module runs, its operations reach the wrapper like any others, but for `x.to("cuda")`, which
is another operation in its code afterwards.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from dormouse.client_shim import torch_private
from dormouse.client_shim.commands import metas
from dormouse.client_shim.commands.handles import adopt, storage_of
from dormouse.client_shim.patches import patch
from dormouse.client_shim.torch_face.remote_tensor import RemoteTensor, is_remote


class _Loading(threading.local):
    moved: dict[int, RemoteTensor] | None = None
    """Tensors that this thread has moved while it reads a module, by the memory that PyTorch thinks they have."""


_loading = _Loading()


def install() -> None:
    bindings = torch_private.bindings()
    for name in ("import_ir_module", "import_ir_module_from_buffer"):
        patch(bindings, name, _watching(getattr(bindings, name)))
    jit: Any = torch.jit
    patch(jit.RecursiveScriptModule, "_apply", _apply)
    for name in ("save", "save_to_buffer"):
        patch(jit.RecursiveScriptModule, name, _saving(getattr(jit.RecursiveScriptModule, name)))
    patch(bindings, "_jit_script_compile", _scripting(bindings._jit_script_compile))
    patch(jit._recursive, "create_script_module_impl", _scripting(jit._recursive.create_script_module_impl))
    torch_private.keep_scripts_unfused()
    _all_dispatched(jit._state._python_cu)  # functions that libraries compiled when they were imported


def note_moved(tensor: RemoteTensor) -> None:
    if _loading.moved is not None:
        _loading.moved[torch_private.memory(tensor)] = tensor


def mend(tensor: RemoteTensor) -> None:
    """Before an alias is taken: give it the memory and sizes that C++ gave it."""
    if _loading.moved and (moved := _loading.moved.get(torch_private.memory(tensor))) is not None:
        adopt(tensor, storage_of(moved), metas.of(tensor))


def _watching(real: Callable[..., Any]) -> Callable[..., Any]:
    def read(unit: Any, *args: Any, **kwargs: Any) -> Any:
        _loading.moved = {}
        try:
            module = real(unit, *args, **kwargs)
        finally:
            _loading.moved = None
        _all_dispatched(unit)
        return module

    return read


def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """`Module._apply`, which `to`, `cuda` and `half` call."""
    applied: dict[int, torch.Tensor] = {}  # by the tensor, which its slots keep alive: tied ones stay tied
    slots = []
    for module in self.modules() if recurse else [self]:
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            slots.append((module._c, name, tensor))
            if id(tensor) not in applied:
                with torch.no_grad():
                    applied[id(tensor)] = fn(tensor).requires_grad_(tensor.requires_grad)
    for owner, name, tensor in slots:
        if is_remote(tensor) or is_remote(applied[id(tensor)]):
            owner.setattr(name, applied[id(tensor)])
        else:
            tensor.data = applied[id(tensor)]
    return self


def _scripting(real: Callable[..., Any]) -> Callable[..., Any]:
    """For functions that compile a function or a module."""

    def compiled(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)
        module = getattr(made, "_c", None)
        for each in (made,) if module is None else [module._get_method(name) for name in module._method_names()]:
            _dispatched(each.graph)
        return made

    return compiled


def _saving(real: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch writes the bytes at a tensor's address, below Python, where ours have none."""

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        text = (
            "torch.jit.save of tensors on cuda:0 is not supported on Dormouse; save module.cpu(), with attributes "
            'that are neither parameters nor buffers moved too, and load it with map_location="cuda"'
        )
        if any(is_remote(tensor) for tensor in (*self.parameters(), *self.buffers())):
            raise NotImplementedError(text)  # before a file that is there is opened for writing
        try:
            return real(self, *args, **kwargs)
        except NotImplementedError as error:  # of an attribute
            raise NotImplementedError(text) from error

    return save


def _all_dispatched(unit: Any) -> None:
    for function in unit.get_functions():
        _dispatched(function.graph)


def _dispatched(graph: Any) -> None:
    """Let `x.to(device)` in it reach the dispatcher: TorchScript's own meaning of it initializes PyTorch's CUDA."""
    for node in graph.findAllNodes("aten::to", True):
        if ".prim_Device(" not in node.schema():
            continue
        tensor, device, dtype, non_blocking, copy = node.inputs()
        none = graph.create("prim::Constant", [], 1)
        none.insertBefore(node)
        none.output().setType(torch.NoneType.get())
        nothing = none.output()
        same = graph.create("aten::to", [tensor, dtype, nothing, device, nothing, non_blocking, copy, nothing], 1)
        same.insertBefore(node)
        same.output().setType(node.output().type())
        node.output().replaceAllUsesWith(same.output())
        node.destroy()
