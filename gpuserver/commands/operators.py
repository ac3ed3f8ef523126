"""Decides which custom operators, those that libraries add to PyTorch's own (`torchvision::nms`), an executor runs, and
how it refuses the others.

An instance names an operator by its full name and a digest of its schema's text; both are only ever a key into a table
made here. A library is imported when the first of its operators is asked for, and only if it is built in below or the
node file has it under `[gpu] operators`: whoever lists a library there trusts its code. The library promises that an
operator writes only the operands that its schema declares. Writes through PyTorch's own operations are noticed, and
poison the operands; those of a kernel through a pointer are not. A result that lies in an operand's memory is refused.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from dormouse.gpuserver.commands.oplist import Allowed, plain
from dormouse.schemas import stream as wire

BUILT_IN: Final = frozenset(
    f"torchvision::{name}" for name in ("nms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
)
"""Those that were looked at: `operand_checks.py` refuses operands with which they would leave their tensors."""

_BUILT_IN_MODULES: Final = {"torchvision": "torchvision"}  # by namespace


GRAPHS: Final = "dormouse::graph_"
"""Prefix of the operators that are graphs of an instance."""

_find_graph: list[Callable[[str], Allowed | None]] = []
"""Lookup of those that are built: in `graph_builds.py`, once it is enabled."""


class _Library:
    """The outcome for a namespace: its operators, or why there are none."""

    def __init__(self, namespace: str, module: str, whole: bool) -> None:
        self.module = module
        self.operators: dict[str, Allowed] = {}  # by name and digest
        self.declared: dict[str, str] = {}  # schemas by name
        self.trouble = ""
        try:
            with torch.inference_mode(False):
                importlib.import_module(module)
        except Exception as error:  # whatever a library raises: it is not there
            self.trouble = f"{type(error).__name__}: {error}"
            return
        for schema in torch._C._jit_get_all_schemas():
            name = schema.name + ("." + schema.overload_name if schema.overload_name else "")
            if schema.name.startswith(f"{namespace}::") and (whole or name in BUILT_IN):
                packet = getattr(getattr(torch.ops, namespace), schema.name.removeprefix(f"{namespace}::"), None)
                op: Any = getattr(packet, schema.overload_name or "default", None)
                if op is not None and "backward" not in name and all(plain(str(a.real_type)) for a in schema.arguments):
                    self.declared[name] = str(schema)
                    self.operators[f"{name}@{wire.digest(str(schema))}"] = Allowed(op)


_granted: dict[str, str] = {}  # modules by namespace, of the node file
_libraries: dict[str, _Library] = {}  # by namespace, of those that were asked for


def grant(operators: Iterable[str]) -> None:
    """`[gpu] operators` of the node file: "NAMESPACE", or "NAMESPACE:MODULE" where the module has another name."""
    _libraries.clear()
    _granted.clear()
    for entry in operators:
        namespace, _, module = entry.partition(":")
        _granted[namespace] = module or namespace


def graphs_are_of(find: Callable[[str], Allowed | None]) -> None:
    _find_graph[:] = [find]


def find(name: str) -> Allowed | None:
    """The operator of this name and digest, if it may run here. May import its library."""
    if name.startswith(GRAPHS):
        return next((found for find in _find_graph if (found := find(name)) is not None), None)
    library = _library(name)
    return library.operators.get(name) if library is not None else None


def refusal(name: str) -> str:
    """Why there is none, and what to do."""
    full, _, _ = name.partition("@")
    if full == name:
        return (
            f"{name} is not an operation that a function may run on a GPU: use others in its place, "
            "or call it on the CPU, with x.cpu()"
        )
    namespace = full.partition("::")[0]
    library = _library(name)
    if library is not None and library.trouble:
        return f"{full}: the executor cannot import {library.module}, which defines it ({library.trouble})"
    if library is not None and full in library.declared:
        return (
            f"{full}: the library of the executor declares it otherwise, as {library.declared[full]}; "
            "install the same version for executors and sandboxes"
        )
    if namespace in _granted:
        return f"{full}: {_granted[namespace]} defines no such operator that can run on a GPU of this node"
    return (
        f"{full} is a custom operator, and this node does not run it on its GPUs. Its operator can allow it: "
        f'[gpu] operators = ["{namespace}"] in the node file ("{namespace}:MODULE" where a module of another name '
        "defines it), with that library in the executors' environment. Or call it on the CPU, or use PyTorch's own "
        "operations"
    )


def _library(name: str) -> _Library | None:
    namespace = name.partition("::")[0]
    whole = namespace in _granted
    module = _granted.get(namespace) or _BUILT_IN_MODULES.get(namespace)
    if module is None or "@" not in name or not (whole or name.partition("@")[0] in BUILT_IN):
        return None
    if namespace not in _libraries:
        _libraries[namespace] = _Library(namespace, module, whole)
    return _libraries[namespace]
