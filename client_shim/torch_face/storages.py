"""Storages of cuda:0 as a program sees them: `tensor.untyped_storage()`, `tensor.storage()`, `torch.UntypedStorage(8,
device="cuda")`, `tensor.set_(storage)`.

A `CudaStorage` is an ordinary storage on PyTorch's device without memory that says it is on cuda:0. As it is one to
`isinstance` and to `torch.save`, saving and loading are PyTorch's own: a file gets the bytes that a GPU machine would
write, and a tensor tagged `cuda:0` in it comes back to cuda:0.
"""

from typing import Any

import torch

from dormouse.client_shim import torch_private
from dormouse.client_shim.commands import metas
from dormouse.client_shim.commands.handles import adopt, meta_of, storage_of
from dormouse.client_shim.patches import patch, raising
from dormouse.client_shim.stream import remote_storage
from dormouse.client_shim.stream.remote_storage import RemoteStorage
from dormouse.client_shim.torch_face.device_numbers import expect_first
from dormouse.client_shim.torch_face.remote_tensor import DEVICE, RemoteTensor, become, dispatch, is_remote, wrap
from dormouse.client_shim.torch_face.transfers import download, empty, upload

ADDRESS_BITS = 36
"""Addresses are made up: storage number * 64 GiB + offset. Distinct storages have distinct, disjoint addresses."""


def install() -> None:
    storage: Any = torch.UntypedStorage
    patch(storage, "__new__", staticmethod(_new))
    patch(storage, "copy_", _copy)
    patch(torch.TypedStorage, "_new_wrapped_storage", _typed_like)
    real = torch.is_storage
    patch(torch, "is_storage", lambda obj, /: isinstance(obj, CudaStorage) or real(obj))
    torch_private.watch_tensor_metadata(patch, _set_bits)


def address(storage: RemoteStorage) -> int:
    if storage.nbytes == 0:
        return 0
    # A storage that does not exist yet has no number; its object's identity serves meanwhile, far above the others.
    number = storage.id if storage.born else (1 << 26) + (id(storage) >> 4) % (1 << 26)
    return number << ADDRESS_BITS


class CudaStorage(torch.UntypedStorage):
    """The result of `tensor.untyped_storage()`. Objects are made on demand; the identity is `remote`."""

    __module__ = torch.UntypedStorage.__module__
    remote: RemoteStorage

    def __new__(cls, remote: RemoteStorage) -> "CudaStorage":
        self = torch_private.make_storage(cls, remote.nbytes, device="meta")
        assert isinstance(self, CudaStorage)
        self.remote = remote
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def _cdata(self) -> int:
        return id(self.remote)

    def data_ptr(self) -> int:
        return address(self.remote)

    def nbytes(self) -> int:
        return self.remote.nbytes

    size = __len__ = nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStorage) and other.remote is self.remote

    def __hash__(self) -> int:
        return id(self.remote)

    def bytes(self) -> RemoteTensor:
        return wrap(self.remote, metas.contiguous(torch.uint8, (self.remote.nbytes,)))

    def cpu(self) -> torch.UntypedStorage:
        return download(self.bytes()).untyped_storage()

    def tolist(self) -> list[int]:
        values: list[int] = download(self.bytes()).tolist()
        return values

    def __iter__(self) -> Any:
        return iter(self.tolist())

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self.bytes()[index].item()
        if index.indices(self.nbytes()) == (0, self.nbytes(), 1):
            return self
        raise NotImplementedError(
            "a part of a CUDA storage cannot be a storage of its own on Dormouse; slice a tensor instead"
        )

    def __setitem__(self, index: Any, value: Any) -> None:
        self.bytes()[index] = value

    def fill_(self, value: Any) -> "CudaStorage":
        self.bytes().fill_(value)
        return self

    def copy_(self, source: Any, non_blocking: Any = None) -> "CudaStorage":  # type: ignore[override]
        source = getattr(source, "_untyped_storage", source)
        if source.nbytes() != self.nbytes():
            raise RuntimeError(
                f"size does not match, self was {self.nbytes()} bytes but src was {source.nbytes()} bytes"
            )
        if isinstance(source, CudaStorage):
            self.bytes().copy_(source.bytes())
        elif not torch_private.awaits_loading(source):
            upload(self.bytes(), torch.empty(0, dtype=torch.uint8, device="cpu").set_(source))
        return self

    def clone(self) -> "CudaStorage":
        return CudaStorage(copied(self.remote, {}))

    __copy__ = clone

    def __deepcopy__(self, memo: dict[int, Any]) -> "CudaStorage":
        return CudaStorage(copied(self.remote, memo))

    def resize_(self, nbytes: int) -> "CudaStorage":
        if nbytes != self.nbytes():
            raise NotImplementedError(
                "resizing a CUDA storage in place is not supported on Dormouse; make a new tensor"
            )
        return self

    def resizable(self) -> bool:
        return False

    def is_shared(self) -> bool:
        return True

    def share_memory_(self, *args: Any, **kwargs: Any) -> "CudaStorage":
        return self

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def byteswap(self, dtype: torch.dtype) -> None:
        host: Any = self.cpu()
        host.byteswap(dtype)
        self.copy_(host)

    _share_cuda_ = raising("CUDA tensors cannot be shared between processes on Dormouse; send .cpu() instead")

    def _write_file(self, *args: Any, **kwargs: Any) -> Any:
        return torch_private.write_storage(self.cpu(), *args, **kwargs)

    def _set_from_file(self, *args: Any, **kwargs: Any) -> "CudaStorage":
        host = torch_private.untyped_storage(self.nbytes(), "cpu")
        torch_private.read_storage(host, *args, **kwargs)
        return self.copy_(host)


# torch.save chooses its name in the file by this name.
CudaStorage.__name__ = CudaStorage.__qualname__ = "UntypedStorage"


def copied(storage: RemoteStorage, memo: dict[int, Any]) -> RemoteStorage:
    """A copy on the device, made once for each `memo` of `copy.deepcopy`: tensors that shared a storage still share
    one.
    """
    result: RemoteStorage | None = memo.get(id(storage))
    if result is None:
        meta = metas.contiguous(torch.uint8, (storage.nbytes,))
        source = wrap(storage, meta)
        fresh = storage.born and storage.nbytes > 0
        made: RemoteTensor = dispatch(torch.ops.aten.clone.default, (source,), {}) if fresh else empty(meta)
        result = memo[id(storage)] = storage_of(made)
    return result


def set_(
    self: RemoteTensor, source: Any = None, storage_offset: int = 0, size: Any = None, stride: Any = None
) -> RemoteTensor:
    """`Tensor.set_`: another storage, or another part of one, without a copy."""
    if (is_remote(source) or isinstance(source, torch.TypedStorage)) and source.dtype != self.dtype:
        raise RuntimeError(f"Could not set a tensor of type {self.dtype} to one of type {source.dtype}")
    if isinstance(source, torch.TypedStorage):
        source = torch_private.untyped(source)
    if is_remote(source):
        storage, whole = storage_of(source), meta_of(source)
    elif isinstance(source, CudaStorage):
        storage = source.remote
        whole = metas.contiguous(self.dtype, (storage.nbytes // self.dtype.itemsize,))
    elif source is None:
        storage, whole = remote_storage.kind(0), metas.contiguous(self.dtype, (0,))
    else:
        raise RuntimeError(f"Attempted to set the storage of a tensor on device {DEVICE} to one on {source.device}")
    if size is None:
        meta = whole
    else:
        shape = (size,) if isinstance(size, int) else tuple(size)
        steps = metas.contiguous_stride(shape) if not stride and shape else tuple(stride or ())
        meta = metas.intern(self.dtype, shape, steps, storage_offset)
    if meta.extent() > storage.nbytes:
        if storage.born:
            raise NotImplementedError(
                f"set_ to {meta.extent()} bytes of a CUDA storage that has {storage.nbytes} would resize it, "
                "which is not supported on Dormouse; make a new tensor"
            )
        storage.nbytes = meta.extent()
    become(self, storage, meta)
    return self


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "cuda":
        return torch_private.make_storage(cls, *args, **kwargs)
    expect_first(torch.device(device).index)
    if args and isinstance(args[0], int):
        return CudaStorage(remote_storage.kind(args[0]))
    host = torch_private.make_storage(torch.UntypedStorage, *args)
    return CudaStorage(remote_storage.kind(host.nbytes())).copy_(host)


def _copy(self: torch.UntypedStorage, source: Any, non_blocking: Any = None) -> torch.UntypedStorage:
    """`UntypedStorage.copy_` of a storage on the CPU."""
    return torch_private.copy_storage(self, source.cpu() if isinstance(source, CudaStorage) else source)


def _typed_like(self: Any, storage: torch.UntypedStorage) -> torch.TypedStorage:
    """`TypedStorage._new_wrapped_storage`, whose own insists on the exact class."""
    if type(self) is torch.TypedStorage:
        return torch_private.typed(storage, self.dtype)
    result: torch.TypedStorage = type(self)(wrap_storage=storage)
    return result


def _set_bits(tensor: Any, bits: dict[str, bool]) -> None:
    """A tensor was loaded that is a lazily conjugated or negated view of its storage."""
    if not is_remote(tensor):
        return
    kept = (metas.CONJUGATED if bits.get("conj") else 0) | (metas.NEGATED if bits.get("neg") else 0)
    old = meta_of(tensor)
    adopt(tensor, storage_of(tensor), metas.intern(old.dtype, old.size, old.stride, old.offset, kept))
