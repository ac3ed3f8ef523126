"""A graph: operations that an instance has captured with `torch.compile`, to be called as one operator.

It is data, and is checked as keys are: only allowed operations, and none that writes, draws random numbers, or has
operands whose values must be inspected. A graph that passes may be compiled as a whole (graph_builds.py), which checks
nothing but indices; it can also be called as it is, operation by operation.
"""

import copy
import re
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any, Final

import msgpack
import torch

from dormouse.gpuserver.commands import index_checks
from dormouse.gpuserver.commands.definitions import (
    DEVICE,
    CheckedMeta,
    Hole,
    Kernel,
    ProtocolViolation,
    expect,
)
from dormouse.gpuserver.commands.emulation import EMULATED
from dormouse.gpuserver.commands.fast_path import NotPlain, expect_checked
from dormouse.gpuserver.commands.index_checks import IndexGuard
from dormouse.gpuserver.commands.oplist import Allowed, Misfit
from dormouse.schemas import stream as wire

NAME: Final = re.compile("dormouse::graph_([0-9a-f]{32})")
ALIGNMENT: Final = 16
"""Kernels may read so many bytes at once. Storages begin at a multiple."""

_ATTENTION: Final = "aten::scaled_dot_product_attention"
_UNBOUNDED: Final = ("as_strided", "set", "resize")
"""Words in the names of operations that see memory as they please; once compiled, nobody looks."""


class Unfit(Exception):
    """It is called operation by operation: the text says why."""


class Graph:
    """Raises Unfit; ProtocolViolation if it is malformed."""

    def __init__(self, definition: bytes, device: torch.device) -> None:
        self.device = device
        try:
            inputs, nodes, outputs = expect(msgpack.unpackb(definition), list, 3)
        except (ValueError, msgpack.UnpackException) as error:
            raise ProtocolViolation("a graph that does not decode") from error
        if not all(isinstance(part, list) for part in (inputs, nodes, outputs)) or not outputs:
            raise ProtocolViolation("a graph is malformed")
        if len(nodes) > wire.MAX_GRAPH_NODES:
            raise ProtocolViolation(f"a graph of {len(nodes)} operations")
        numbers = count()
        metas = {number: CheckedMeta(number, meta) for meta, number in zip(inputs, numbers, strict=False)}
        self.inputs = list(metas.values())
        if any(meta.bits for meta in self.inputs):
            raise Unfit("an input is conjugated or negated")
        self.nodes = [_Node(node, metas, numbers, device) for node in nodes]
        self.outputs: list[int] = outputs
        for output in outputs:
            if type(output) is not int or not len(self.inputs) <= output < len(metas):
                raise ProtocolViolation("a graph's output is none of its values")
        used = set(outputs).union(*(node.operands for node in self.nodes))
        for node in self.nodes:
            node.expect(used)

    def call(self, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The outputs, operation by operation; on CUDA also whether an index was wrong, if there are any."""
        guard = IndexGuard() if self.device.type == "cuda" else None
        values = list(inputs)
        for node in self.nodes:
            values += node.call(values, guard)
        return [values[number] for number in self.outputs], guard.found if guard is not None else None


class _Node:
    def __init__(self, definition: Any, metas: dict[int, CheckedMeta], numbers: Any, device: torch.device) -> None:
        name, args, kwargs, default_dtype, results = expect(definition, list, 5)
        self._kernel = kernel = Kernel([name, args, kwargs, None, default_dtype], metas)
        if kernel.n_operands != len(kernel.metas):
            raise ProtocolViolation("a graph's operation has an operand that is no value of it")
        op = kernel.op
        if op is None:
            assert kernel.refusal is not None
            raise Unfit(kernel.refusal[1])
        if op.custom or op.resizes or kernel.written or any(word in op.base for word in _UNBOUNDED):
            raise Unfit(f"{kernel.name} is not compiled with others")
        if op.has_generator or (op.random and op.draws(kernel.args, kernel.kwargs)):
            raise Unfit(f"{kernel.name} draws random numbers")
        if device.type == "cpu" and kernel.name in EMULATED and kernel.name != _ATTENTION:
            raise Unfit(f"{kernel.name} is emulated on this GPU")
        if kernel.default_dtype is not torch.float32:
            raise Unfit("the default dtype is not float32")
        try:
            expect_checked(kernel, op)
        except NotPlain:
            raise Unfit(f"{kernel.name} has operands that are looked at each time") from None
        packet = getattr(torch.ops.aten, op.base)  # names of the table's own schema
        self._op = getattr(packet, op.schema.overload_name or "default")
        self._rule = index_checks.RULES.get(op.base)
        self._device = device
        self.operands = [meta.number for meta in kernel.metas]
        self._promised: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {}  # by place among the results
        if not isinstance(results, list):
            raise ProtocolViolation("a graph's operation without results")
        self._results = [CheckedMeta(number, meta) for meta, number in zip(results, numbers, strict=False)]
        metas.update((meta.number, meta) for meta in self._results)

    def expect(self, used: set[int]) -> None:
        """Those of its results are compared with the promise: kernels of two kinds of GPU may differ in others."""
        places = (n for n, meta in enumerate(self._results) if meta.number in used)
        self._promised = {n: (self._results[n].dtype, self._results[n].size) for n in places}

    def call(self, values: list[torch.Tensor], guard: IndexGuard | None) -> list[torch.Tensor]:
        kernel = self._kernel
        operands = [values[number] for number in self.operands]
        args = [kernel.fill(value, operands, self._special) for value in kernel.args]
        kwargs = {name: kernel.fill(value, operands, self._special) for name, value in kernel.kwargs.items()}
        if guard is not None and self._rule is not None:
            assert kernel.op is not None
            args, kwargs = [], guard.checked(self._rule, kernel.op.bound(args, kwargs), at_once=False)
        result = self._op(*args, **kwargs)
        found = list(result) if isinstance(result, list | tuple) else [result]
        # Those that follow were checked with the sizes that the instance has named.
        kept = len(found) == len(self._results)
        if not kept or any((found[n].dtype, found[n].size()) != promised for n, promised in self._promised.items()):
            raise RuntimeError(f"{kernel.name} has not returned what was captured")
        return found

    def _special(self, value: Any) -> Any:
        return self._device if value is DEVICE else value


class GraphOperator(Allowed):
    """The graph as an operator. ``compiled``: its compiled form, which returns what `Graph.call` does, in one list."""

    def __init__(self, digest: str, graph: Graph, compiled: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        self._digest = digest
        self._declare()
        self.graph = graph
        self._compiled = compiled
        self._misaligned: list[int] = []  # inputs
        self._shared: list[int] | None = None
        self.failed = ""  # how the compiled form failed last

    def _declare(self) -> None:
        schema: Any = torch._C.parse_schema(wire.GRAPH_SCHEMA.format(self._digest))
        super().__init__(SimpleNamespace(_schema=schema, tags=(), _op=self._call))

    def fitted(self, kernel: Kernel) -> "GraphOperator":
        expected = self.graph.inputs
        given = kernel.args[0] if len(kernel.args) == 1 and not kernel.kwargs else None
        if not isinstance(given, list) or not len(given) == len(kernel.metas) == len(expected):
            raise Misfit(f"{kernel.name} takes a list of {len(expected)} tensors")
        if not all(isinstance(item, Hole) for item in given):
            raise Misfit(f"{kernel.name} takes tensors")
        for meta, wanted in zip(kernel.metas, expected, strict=True):
            if (meta.dtype, meta.size, meta.stride, meta.bits) != (wanted.dtype, wanted.size, wanted.stride, 0):
                raise Misfit(f"{kernel.name}: an input has another type, size or strides than it was captured with")
        places = [place for place, meta in enumerate(kernel.metas) if meta.offset * meta.itemsize % ALIGNMENT]
        if not places:
            return self
        other = copy.copy(self)
        other._misaligned = places
        other._declare()
        return other

    def _call(self, inputs: list[torch.Tensor], guard: IndexGuard | None = None) -> list[torch.Tensor]:
        for place in self._misaligned:
            inputs[place] = _aligned(inputs[place])
        try:
            found = self._compiled(inputs)
        except RuntimeError as error:  # its text may be too short: operation by operation it is raised again, or gone
            self.failed = str(error)
            found, bad = self.graph.call(inputs)
            shared = _shared(inputs, found)
        else:
            bad = found.pop() if len(found) > len(self.graph.outputs) else None
            if self._shared is None:
                self._shared = _shared(inputs, found)  # a compiled graph returns the same buffers each time
            shared = self._shared
        if bad is not None and guard is not None:
            guard.note(bad)
        for place in shared:
            found[place] = found[place].clone()
        return found


def _shared(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[int]:
    """The outputs that lie where an input or another one does."""
    seen = {each.untyped_storage().data_ptr() for each in inputs}
    places = []
    for place, each in enumerate(outputs):
        start = each.untyped_storage().data_ptr()
        if start in seen:
            places.append(place)
        seen.add(start)
    return places


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
