"""Private API of PyTorch's dispatcher: schemas, kernels on dispatch keys, and guards that leave keys out."""

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

_C: Any = torch._C
_library: Any = torch.library.Library

NoTorchFunction: Any = _C.DisableTorchFunction
BelowAutograd: Any = _C._AutoDispatchBelowAutograd

_libraries: list[Any] = []  # torch.library.Library unregisters when it is collected


def register_fallback(kernel: Callable[..., Any], key: str = "CUDA") -> None:
    """`kernel(op, *args, **kwargs)` for every operation that reaches the CUDA key and has no kernel of PyTorch's there:
    in a CPU wheel, factories."""
    library = _library("_", "IMPL")
    library.fallback(kernel, key)
    _libraries.append(library)


def register_kernels(kernels: Mapping[str, Callable[..., Any]], key: str = "CUDA") -> None:
    """Kernels on a dispatch key by operator name without namespace; names that this torch does not have are left
    out."""
    library = _library("aten", "IMPL")
    _libraries.append(library)
    known = aten_schemas()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators,")  # PyTorch's own are replaced
        for name, kernel in kernels.items():
            if name in known:
                library.impl(name, kernel, key)


def fragment(namespace: str) -> Any:
    """A library to which operations of a namespace can be added."""
    return _library(namespace, "FRAGMENT")


def full_name(schema: Any) -> str:
    """Namespace, name and overload."""
    return str(schema.name) + ("." + schema.overload_name if schema.overload_name else "")


@cache
def aten_schemas() -> Mapping[str, Any]:
    """Of PyTorch's own operations, by name without namespace. All of them are made anew at each question."""
    schemas = _C._jit_get_all_schemas()
    return {full_name(schema)[6:]: schema for schema in schemas if schema.name.startswith("aten::")}


def operation(name: str) -> Any:
    """The overload of PyTorch's with this name, which has no namespace."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def has_kernel(name: str, key: str) -> bool:
    """Whether an operation, by its full name, has a kernel of its own on a dispatch key."""
    return bool(_C._dispatch_has_kernel(name) and _C._dispatch_has_kernel_for_dispatch_key(name, key))


def call_composite(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator's Python kernel that is written in terms of other operations."""
    return op._op_dk(_C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def call_implicit(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation as PyTorch takes it apart, whichever key has a kernel of its own for it."""
    return op._op_dk(_C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def without_autocast() -> Any:
    """A context in which operations on cuda are not cast again."""
    return _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_C.DispatchKey.AutocastCUDA))


def watch_higher_order(
    patch: Callable[[Any, str, Any], None], taken: Callable[[Any, Any], bool], refusal: Callable[[str], Exception]
) -> None:
    """Run operators on functions as PyTorch does without compiling, where `taken(args, kwargs)`; of those that it
    always compiles, raise what `refusal(name)` makes. A mode of the program's comes first.
    """
    kind: Any = torch._ops.HigherOrderOperator
    real = kind.dispatch
    keys = _C.DispatchKey

    def dispatch(self: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        if key not in (keys.Python, keys.CUDA) or _C._len_torch_dispatch_stack() or not taken(args, kwargs):
            return real(self, key, *args, **kwargs)
        kernel = self.py_kernels.get(keys.CompositeExplicitAutograd)
        if kernel is None:
            raise refusal(self.name())
        return kernel(*args, **kwargs)

    patch(kind, "dispatch", dispatch)


def watch_operations(patch: Callable[[Any, str, Any], None], watch: Callable[[], None]) -> None:
    """Call `watch()` when a program names an operation for the first time: its library is there by then."""
    kind: Any = torch._ops._OpNamespace
    real = kind.__getattr__

    def getattribute(self: Any, name: str) -> Any:
        found = real(self, name)
        watch()
        return found

    patch(kind, "__getattr__", getattribute)
