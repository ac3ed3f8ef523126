"""Translates a graph that Dynamo has captured to a definition, which an executor may compile and call as one operator.

`torch.export` gives its operations as PyTorch's dispatcher sees them first, none of which writes. A graph that cannot
be one operator (a value that is not a tensor of cuda:0, a write to an input, a result in an input's memory) is called
operation by operation, as it was captured.
"""

import operator
import warnings
from collections.abc import Callable
from typing import Any, Final

import msgpack
import torch
from torch import fx

from dormouse.client_shim.commands import metas
from dormouse.client_shim.commands.definitions import plain
from dormouse.client_shim.torch_dispatcher import fragment, full_name
from dormouse.schemas import stream as wire

_SILENT: Final = ("aten::_assert_tensor_metadata", "aten::_assert_scalar")
"""They return nothing, and repeat the guards' checks."""

_library: Any = fragment("dormouse")


class NotOne(Exception):
    """It cannot be one operator: the text says why."""


class Captured:
    """A graph whose inputs are ``constants`` and the arguments of the call."""

    def __init__(self, graph: fx.GraphModule, inputs: list[Any]) -> None:
        """Raises NotOne."""
        _expect_tensors("an input", inputs)
        _expect_apart(graph)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's, of its own code
            program = torch.export.export(graph, tuple(inputs), strict=False).run_decompositions({})
        signature = program.graph_signature
        if signature.user_inputs_to_mutate or signature.buffers_to_mutate:
            raise NotOne("it writes an input")
        self.constants: list[torch.Tensor] = []
        names = {each.arg.name: program.constants[each.target] for each in signature.input_specs if each.target}
        values: dict[fx.Node, int] = {}
        lists: dict[fx.Node, list[int]] = {}  # of nodes that return several
        known: list[metas.Meta] = []
        nodes: list[Any] = []
        given = 0

        def enter(node: fx.Node, value: Any) -> int:
            known.append(_meta(value))
            values[node] = len(known) - 1
            return values[node]

        for node in program.graph.nodes:
            if node.op == "placeholder":
                if node.name in names:
                    _expect_tensors("a constant", [names[node.name]])
                    self.constants.append(names[node.name])
                given += 1
                enter(node, node.meta["val"])
            elif node.op == "output":
                outputs = list(node.args[0])
            elif node.target is operator.getitem:
                values[node] = lists[node.args[0]][node.args[1]]
            elif isinstance(node.target, torch._ops.OpOverload):
                if node.target._schema.name in _SILENT:
                    continue
                found = node.meta["val"]
                args = [_literal(value, values) for value in node.args]
                kwargs = [each for name, value in node.kwargs.items() for each in (name, _literal(value, values))]
                first = len(known)
                if isinstance(found, list | tuple):
                    lists[node] = list(range(first, first + len(found)))
                    known += (_meta(value) for value in found)
                else:
                    enter(node, found)
                dtype = metas.dtype_name(torch.get_default_dtype())
                told = [meta.definition() for meta in known[first:]]
                nodes.append([full_name(node.target._schema), args, kwargs, dtype, told])
            else:
                raise NotOne(f"{node.target} cannot be sent to the GPU's executor")
        if not outputs or not nodes:
            raise NotOne("it computes nothing")
        chosen = [values.get(each, -1) for each in outputs]
        if min(chosen) < given:
            raise NotOne("a result is an input, or no tensor")
        self._metas = [known[number] for number in chosen]
        self.definition: bytes = msgpack.packb([[meta.definition() for meta in known[:given]], nodes, chosen])
        if len(self.definition) > wire.MAX_GRAPH_NBYTES or len(nodes) > wire.MAX_GRAPH_NODES:
            raise NotOne(f"it has {len(nodes)} operations, too many for one")
        self.digest = wire.graph_digest(self.definition)

    def operator(self) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        """The operator that an executor has it as."""
        schema = wire.GRAPH_SCHEMA.format(self.digest)
        name = schema.partition("(")[0].partition("::")[2]
        if not hasattr(torch.ops.dormouse, name):
            _library.define(schema.partition("::")[2])
            _library.impl(name, self._shapes, "Meta")
        found: Any = getattr(torch.ops.dormouse, name)
        default: Callable[[list[torch.Tensor]], list[torch.Tensor]] = found.default
        return default

    def _shapes(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="meta") for meta in self._metas]


def _expect_tensors(what: str, values: list[Any]) -> None:
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise NotOne(f"{what} is a size that varies; with dynamic=False each size has a graph")
        if not value.is_cuda or value.layout is not torch.strided:
            raise NotOne(f"{what} is on the CPU, or not dense")


def _expect_apart(graph: fx.GraphModule) -> None:
    """A result that is a view of an input, or of another result, must stay one."""
    nodes = list(graph.graph.nodes)
    shared = {
        value.untyped_storage()._cdata
        for node in nodes
        if node.op == "placeholder" and isinstance(value := node.meta.get("example_value"), torch.Tensor)
    }
    for node in nodes[-1].args[0]:
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor):
            raise NotOne("a result is no tensor")
        storage = value.untyped_storage()._cdata
        if storage in shared:
            raise NotOne("a result lies in the memory of an input or of another result")
        shared.add(storage)


def _meta(value: Any) -> metas.Meta:
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        raise NotOne("a value in it is no tensor of cuda:0")
    lengths = (*value.size(), *value.stride(), value.storage_offset())
    if not all(type(length) is int for length in lengths):
        raise NotOne("its sizes vary")
    return metas.of(value)


def _literal(value: Any, values: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        if value not in values:
            raise NotOne("an operation takes a list, or a value that is no tensor")
        return [wire.TENSOR, values[value]]
    if isinstance(value, list | tuple):
        return [wire.LIST, [_literal(item, values) for item in value]]
    if isinstance(value, torch.device) and value.type != "cuda":
        raise NotOne(f"a value in it is on the {value.type}")
    try:
        return plain(value)
    except (NotImplementedError, RuntimeError) as error:
        raise NotOne(str(error)) from None
