"""Finds the storage behind a tensor object of cuda:0, and its geometry in that.

Where Python records, a `RemoteTensor` has both as attributes. Where C++ does (`recorder.py`), tensors are PyTorch's
own, whose memory is the storage.
"""

from typing import Any, Final

from dormouse.client_shim.commands import metas
from dormouse.client_shim.commands.metas import Meta


class _Cpp:
    module: Any = None


cpp: Final = _Cpp()
"""The module in C++, while it records."""


def storage_of(tensor: Any) -> Any:
    """Its `RemoteStorage`."""
    return tensor._storage if cpp.module is None else cpp.module.storage_of(tensor)


def meta_of(tensor: Any) -> Meta:
    meta: Meta = tensor._meta if cpp.module is None else metas.of(tensor)
    return meta


def adopt(tensor: Any, storage: Any, meta: Meta) -> None:
    """Note both, which PyTorch has already."""
    if cpp.module is None:
        tensor._storage, tensor._meta = storage, meta
