"""Uploads an adapter's tensors to the node, as a runtime computes with them. Runs in the sandbox.

Small tensors are packed into one storage, so they are one copy and share no memory with the base: a function over a
base that is already on a GPU needs only this copy. Large ones are whole parameters, which other adapters may have too:
each is a storage of its own, and shared by content.
"""

from typing import Final

import torch

from dormouse.client_shim.commands.handles import meta_of, storage_of
from dormouse.client_shim.llm.adapter import FoundAdapter
from dormouse.client_shim.llm.adapter_weights import weights_of
from dormouse.client_shim.llm.weights import DTYPES
from dormouse.client_shim.torch_face.remote_tensor import is_remote
from dormouse.core.decisions.memory.freelist import ALIGNMENT
from dormouse.schemas import messages as m
from dormouse.schemas.llm import DecoderSpec

LARGE_NBYTES: Final = 4 << 20


def upload(spec: DecoderSpec, found: FoundAdapter) -> tuple[list[m.WeightAt], list[torch.Tensor]]:
    """The place of each tensor, and the objects that keep them there."""
    dtype = DTYPES[spec.dtype]
    step = ALIGNMENT // dtype.itemsize
    small: list[tuple[list[str], torch.Tensor, int]] = []
    places: list[m.WeightAt] = []
    kept: list[torch.Tensor] = []
    end = 0
    for names, tensor in weights_of(found, dtype):
        if tensor.nbytes > LARGE_NBYTES:
            kept.append(there := tensor.to("cuda"))
            places += _places(there, names, 0, tensor.shape)
        else:
            small.append((names, tensor, end))
            end += -(-tensor.numel() // step) * step
    together = torch.zeros(end, dtype=dtype)
    for _, tensor, start in small:
        together[start : start + tensor.numel()] = tensor.flatten()
    if small:
        kept.append(there := together.to("cuda"))
        for names, tensor, start in small:
            places += _places(there, names, start, tensor.shape)
    return places, kept


def _places(there: torch.Tensor, names: list[str], start: int, shape: torch.Size) -> list[m.WeightAt]:
    assert is_remote(there)
    offset = (meta_of(there).offset + start) * there.dtype.itemsize
    return [m.WeightAt(name=name, storage=storage_of(there).id, offset=offset, shape=list(shape)) for name in names]
