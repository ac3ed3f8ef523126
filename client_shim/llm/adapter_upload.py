"""Brings an adapter's tensors to the node, as a runtime computes with them. Runs in the sandbox.

They lie behind each other in one storage, so they are one copy, and share memory with nothing of the base: a function
over a base that is on a GPU already has only this to bring.
"""

from typing import Final

import torch

from dormouse.client_shim.llm.adapter import FoundAdapter
from dormouse.client_shim.llm.folder import BadFolder
from dormouse.client_shim.llm.weights import DTYPES
from dormouse.client_shim.torch_face.remote_tensor import RemoteTensor
from dormouse.schemas import messages as m
from dormouse.schemas.llm import DOWN, UP, DecoderSpec

ALIGNED_NBYTES: Final = 256
"""Of each tensor: as torch's own allocations are."""


def check(found: FoundAdapter) -> None:
    """Raises BadFolder for what runtimes do not compute."""
    if found.spec.replaced or any(each.kind != "linear" or each.bias for each in found.spec.modules):
        raise BadFolder("adapters with biases, embeddings or parameters of their own are not served")


def upload(spec: DecoderSpec, found: FoundAdapter) -> tuple[list[m.WeightAt], list[torch.Tensor]]:
    """Where each tensor is, and what keeps them there."""
    dtype = DTYPES[spec.dtype]
    step = ALIGNED_NBYTES // dtype.itemsize
    sources = {module + end: name for module, of in found.tensors.items() for end, name in ((DOWN, of.a), (UP, of.b))}
    read = dict(found.checkpoint.read(sources.values()))
    tensors = {name: read[source].T if name.endswith(UP) else read[source] for name, source in sources.items()}
    starts: dict[str, int] = {}
    end = 0
    for name, tensor in tensors.items():
        starts[name] = end
        end += -(-tensor.numel() // step) * step
    together = torch.zeros(end, dtype=dtype)
    for name, tensor in tensors.items():
        together[starts[name] : starts[name] + tensor.numel()].view(tensor.shape).copy_(tensor)
    there = together.to("cuda")
    assert isinstance(there, RemoteTensor)
    first = there._meta.offset
    places = [
        m.WeightAt(
            name=name,
            storage=there._storage.id,
            offset=(first + starts[name]) * dtype.itemsize,
            shape=list(tensor.shape),
        )
        for name, tensor in tensors.items()
    ]
    return places, [there]
