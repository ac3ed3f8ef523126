"""The adapters of a runtime (LoRA). Nothing is merged into weights, which others share.

An adapter has a number, and a step has the number of each token's adapter. Where a row's adapter adds to a product, or
has a bias of its own there, the C++ kernels do that beside the others' rows (lora.h). The rest is in adapted.py:
modules of which an adapter has other parameters of its own are computed separately for its rows.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from dormouse.gpuserver.runtime import layers
from dormouse.gpuserver.runtime.adapted import adapted
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.backends.native import NativeBackend
from dormouse.gpuserver.runtime.low_rank import MAX, LowRank, Table, made_table, table_of
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.llm import MAX_RANK

TABLE: Final = 16
"""Entries of each table at first: enough for most runtimes."""

WORD_NBYTES: Final = 16
"""Bytes that a GPU reads at once."""

Replaced = Mapping[str, torch.Tensor]
"""Parameters of an adapter in place of the base's, by their names there."""


class Adapters:
    """Of one model. Each has a number as long as somebody may ask for it, and is bound while its tensors are here."""

    def __init__(self, model: Any, attention: BlockAttention) -> None:
        self._model, self._attention = model, attention
        self._native = isinstance(attention.backend, NativeBackend)
        self._modules: dict[str, nn.Module] = dict(model.named_modules())
        self._shapes = {name: each.shape for name, each in model.named_parameters(remove_duplicate=False)}
        self._wholes: dict[nn.Module, nn.Module] = {}  # by module inside: the one that is computed at once
        for module in model.modules():
            if isinstance(module.forward, layers.WHOLE):
                self._wholes.update(dict.fromkeys(module.modules(), module))
        self._salts: dict[int, bytes] = {}  # by number
        self._bound: dict[int, list[Callable[[], object]]] = {}  # functions that take it away again
        self._ranks: dict[int, int] = {}  # the largest of each that is bound
        self._apart: set[int] = set()  # some of their rows are computed by themselves
        self._ragged: set[int] = set()  # some of their tensors begin anywhere
        self.version = 0  # so often was one bound or unbound
        self._serials = itertools.count()
        self._tables = [table for module in model.modules() if (table := table_of(module)) is not None]
        self._size = max((len(table.native) for table in self._tables), default=TABLE)  # they are all of one

    def open(self) -> int:
        """The number of a new one. Raises ConfigError if there are too many."""
        number = next((number for number in range(MAX) if number not in self._salts), None)
        if number is None:
            raise ConfigError(f"a runtime computes {MAX} adapters at most")
        self._salts[number] = b"adapter %d" % next(self._serials)
        return number

    def bind(self, number: int, adds: Mapping[str, LowRank], replaced: Replaced = MappingProxyType({})) -> None:
        """It adds this, by names of modules, and replaces that. Raises ConfigError unless all of it fits."""
        assert number in self._salts
        assert number not in self._bound
        if not adds and not replaced:
            raise ConfigError("the adapter changes nothing")
        for name, low in adds.items():
            self._check(name, low)
        for name, tensor in replaced.items():
            self._check_replaced(name, tensor)
        self._ranks[number] = max((low.rank for low in adds.values()), default=0)
        self.version += 1
        embeds = any(isinstance(self._modules[name], nn.Embedding) for name in adds)
        if replaced or embeds:
            self._apart.add(number)
        tensors = (each for low in adds.values() for each in low if isinstance(each, torch.Tensor))
        if any(each.data_ptr() % WORD_NBYTES for each in tensors):
            self._ragged.add(number)
        undo = self._bound[number] = []
        before = len(self._tables), self._size
        self._make_room(number)
        own: dict[nn.Module, dict[tuple[nn.Module, str], nn.Parameter]] = {}  # by the module that is called
        for name, low in adds.items():
            module = self._modules[name]
            self._table(module, number).put(number, low)
            if not self._in_kernels(module):
                adapted(module, self._model, self._attention).adds = True
        for name, tensor in replaced.items():
            owner, _, last = name.rpartition(".")
            module = self._modules[owner]
            if last == "bias" and self._in_kernels(module):
                self._table(module, number).put_bias(number, tensor)
            else:
                made = nn.Parameter(tensor, requires_grad=False)
                own.setdefault(self._wholes.get(module, module), {})[module, last] = made
        for module, parameters in own.items():
            whole = module in self._wholes
            forward: Any = module.forward
            holder = forward.places if whole else adapted(module, self._model, self._attention)
            holder.put(number, parameters)
            undo.append(partial(holder.own.pop, number))
        if (len(self._tables), self._size) != before:
            layers.bound(self._model)

    def unbind(self, number: int) -> None:
        """Its tensors leave; no sequence that has it is in a step until it is bound again."""
        self.version += 1
        for undo in self._bound.pop(number, ()):
            undo()
        self._ranks.pop(number, None)
        self._apart.discard(number)
        self._ragged.discard(number)

    def close(self, number: int) -> None:
        """No sequence has it any more."""
        self.unbind(number)
        del self._salts[number]

    def bound(self, number: int) -> bool:
        return number in self._bound

    def salt(self, number: int) -> bytes:
        """Of the KV that it makes: nobody else's is like it."""
        return self._salts[number]

    @property
    def mixed(self) -> frozenset[int]:
        """Those bound that only add to products: a step computes all of their rows alike."""
        return frozenset(self._bound.keys() - self._apart)

    @property
    def tables(self) -> list[Table]:
        """Of all products that any adds to."""
        return [table for table in self._tables if table.by_number]

    def aligned(self, numbers: frozenset[int]) -> bool:
        """Whether all tensors of these begin where wide words do."""
        return self._ragged.isdisjoint(numbers)

    def most_rank(self, numbers: Iterable[int]) -> int:
        """Of these adapters."""
        return max((self._ranks[number] for number in numbers), default=0)

    def _in_kernels(self, module: nn.Module) -> bool:
        return self._native and type(module) is nn.Linear

    def _make_room(self, number: int) -> None:
        """In all tables: the kernels look into each for each number."""
        while self._size <= number:
            self._size *= 2
        for table in self._tables:
            table.resize(self._size)

    def _table(self, module: nn.Module, number: int) -> Table:
        table = table_of(module)
        if table is None:
            table = made_table(module, self._size)
            self._tables.append(table)
        self._bound[number].append(partial(table.drop, number))
        return table

    # --- whether it fits

    def _check(self, name: str, low: LowRank) -> None:
        inputs, outputs = self._sizes(name)
        embedding = isinstance(self._modules[name], nn.Embedding)
        rank = low.up.shape[0] if low.up.dim() else 0
        if not 0 < rank <= MAX_RANK:
            raise ConfigError(f"the adapter's rank at {name!r} is {rank}; it can be 1 to {MAX_RANK}")
        found = [list(each.shape) for each in (low.down, low.up)]
        wanted = [[inputs, rank] if embedding else [rank, inputs], [rank, outputs]]
        if low.bias is not None:
            found, wanted = [*found, list(low.bias.shape)], [*wanted, [outputs]]
            if embedding:
                raise ConfigError(f"the adapter has a bias at {name!r}, which is an embedding")
        if found != wanted:
            raise ConfigError(f"the adapter's shapes at {name!r} are {found}, its model wants {wanted}")
        for each in low:
            if isinstance(each, torch.Tensor):
                self._check_tensor(name, each)

    def _sizes(self, name: str) -> tuple[int, int]:
        """Inputs and outputs."""
        module: Any = self._modules.get(name)
        if type(module) is nn.Linear:
            return module.in_features, module.out_features
        if isinstance(module, Conv1D):
            return module.nx, module.nf
        if type(module) is nn.Embedding or hasattr(module, "scalar_embed_scale"):  # Gemma's
            return module.num_embeddings, module.embedding_dim
        raise ConfigError(f"the adapter adds to {name!r}, which is no linear layer or embedding of this model")

    def _check_replaced(self, name: str, tensor: torch.Tensor) -> None:
        if (shape := self._shapes.get(name)) is None:
            raise ConfigError(f"the adapter replaces {name!r}, which is no parameter of this model")
        if tensor.shape != shape:
            raise ConfigError(f"the adapter's {name!r} is {list(tensor.shape)}, its model wants {list(shape)}")
        self._check_tensor(name, tensor)

    def _check_tensor(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype is not (dtype := self._attention.layout.dtype):
            raise ConfigError(f"the adapter at {name!r} is not of its model's {dtype}")
        if not tensor.is_contiguous():
            raise ConfigError(f"the adapter at {name!r} is not contiguous")
