"""`torch.compile`: PyTorch's compiler reads the function and guards its assumptions; the operations are recorded.

Dynamo needs no device: tensors of cuda:0 are plain ones to it, where C++ records. It captures operations, which are
called one after the other, without the Python around them. The executor chooses kernels, so the backends that make
kernels end here; others, `eager` or a program's own, are called as they are.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dormouse import client_shim
from dormouse.client_shim import torch_private
from dormouse.client_shim.commands.graphs import Captured, NotOne
from dormouse.client_shim.commands.handles import cpp
from dormouse.client_shim.patches import patch
from dormouse.client_shim.torch_face.import_hooks import when_imported
from dormouse.client_shim.torch_face.remote_tensor import world
from dormouse.client_shim.torch_face.tensor_types import to_type
from dormouse.schemas.messages import DeviceInfo


class _CompilingNode:
    compiles = False
    """The node's executors compile graphs."""


_BACKENDS = ("_TorchCompileInductorWrapper", "_TorchCompileAOTInductorWrapper")


def install() -> None:
    patch(torch, "compile", _unless_python_records(torch.compile))
    for name in _BACKENDS:
        patch(torch, name, type(name, (getattr(torch, name),), {"__call__": _captured}))
    torch_private.let_compiler_import()
    when_imported("torch._dynamo.config", _go_on_without)
    when_imported("torch._dynamo.trace_rules", _pass_over)


def _captured(backend: Any, graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """The backend whose mode and options PyTorch has checked. They are about kernels."""
    if not _CompilingNode.compiles:
        _say_once("[gpu] compile is not true in the node file")
        return graph.forward
    if torch.is_grad_enabled():
        _say_once("gradients are on")
        return graph.forward
    try:
        return _Compiled(graph, Captured(graph, example_inputs))
    except NotOne as reason:
        _say(str(reason))
    except Exception as error:  # exporting may raise anything
        _say(f"it cannot be exported: {error}")
    return graph.forward


class _Compiled:
    """Operation by operation as long as it is not built, where it is computed."""

    def __init__(self, graph: fx.GraphModule, captured: Captured) -> None:
        self._graph, self._captured = graph, captured
        self._operator = captured.operator()
        self._refused = False

    def __call__(self, *inputs: torch.Tensor) -> Any:
        if not self._refused and world.stream is not None:
            outcome = world.stream.graph(self._captured.digest, self._captured.definition)
            if outcome == "":
                return tuple(self._operator([*self._captured.constants, *inputs]))
            if outcome is not None:
                self._refused = True
                _say(outcome)
        return self._graph.forward(*inputs)


def _say(reason: str) -> None:
    print(f"torch.compile: a graph's operations are called one by one: {reason}", file=sys.stderr)


@functools.cache
def _say_once(reason: str) -> None:
    _say(reason)


def connect(device: DeviceInfo) -> None:
    patch(_CompilingNode, "compiles", device.compiles)


def _go_on_without(config: Any) -> None:
    """A function that cannot be compiled is called as it is, and PyTorch logs why; with `fullgraph=True` it raises."""
    patch(config, "suppress_errors", True)


def _pass_over(rules: Any) -> None:
    """Our own Python is not read, but called; one method of tensors can be in a graph."""
    rules.add(client_shim.__name__)
    rules._allowed_callable_ids.add(id(to_type))


def _unless_python_records(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile, **options)
        if cpp.module is not None:
            return real(model, **options)
        warnings.warn(
            "torch.compile: the function itself is called, because the part of Dormouse that records operations in C++ "
            "is not built on this node, or turned off: dormouse doctor says why",
            stacklevel=2,
        )
        return model

    return compile
