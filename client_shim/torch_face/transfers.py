"""Transfers between CPU tensors and remote ones: `.to("cuda")`, `.cpu()`, `.item()`, `copy_`.

The handlers of the operations that cross between them. Layout and dtype are settled here with ordinary CPU tensors, so
that a transfer is always one run of bytes.
"""

from typing import Any

import torch

from dormouse.client_shim import torch_dispatcher
from dormouse.client_shim.commands import metas
from dormouse.client_shim.commands.handles import meta_of, storage_of
from dormouse.client_shim.commands.metas import Meta
from dormouse.client_shim.commands.operations import Operation, handler
from dormouse.client_shim.stream import remote_storage
from dormouse.client_shim.torch_face import synchronizing
from dormouse.client_shim.torch_face.device_numbers import expect_first
from dormouse.client_shim.torch_face.remote_tensor import (
    DEVICE,
    RemoteTensor,
    become,
    create,
    dispatch,
    is_remote,
    record,
    stream,
    world,
    wrap,
    wrap_as,
)
from dormouse.client_shim.torch_face.torchscript import mend, note_moved

aten = torch.ops.aten


def upload(target: RemoteTensor, source: torch.Tensor) -> None:
    """`target.copy_(source)` for a CPU source."""
    meta = meta_of(target)
    if meta.numel() == 0:
        return
    if source.dim() == 0 and meta.numel() > 1:
        dispatch(aten.fill_.Scalar, (target, source.to(target.dtype).item()), {})
        return
    if not meta.is_dense() or meta.bits:
        staged = empty(metas.contiguous(target.dtype, tuple(source.shape)))
        upload(staged, source.to(target.dtype))
        dispatch(aten.copy_.default, (target, staged), {})
        return
    host = source.detach()
    as_it_is = host.dtype == meta.dtype and tuple(host.size()) == meta.size and host.stride() == meta.stride
    if not as_it_is or host.is_conj() or host.is_neg():
        host = torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype).copy_(host)
    itemsize = meta.dtype.itemsize
    stream().upload(storage_of(target), meta.offset * itemsize, host.data_ptr(), meta.numel() * itemsize)


def download(source: RemoteTensor) -> torch.Tensor:
    """A new CPU tensor with the value and, where it is dense, the strides of `source`."""
    meta = meta_of(source)
    if meta.numel() == 0:
        return torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype)
    if meta.bits:
        source = dispatch(aten.clone.default, (source,), {})
        if meta_of(source).bits:
            source = dispatch(aten.resolve_neg.default, (dispatch(aten.resolve_conj.default, (source,), {}),), {})
        return download(source)
    create(storage_of(source))
    itemsize = meta.dtype.itemsize
    limit = stream().bulk.chunk_nbytes // itemsize
    if meta.is_dense():
        host = torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype)
        pieces = [
            metas.contiguous(meta.dtype, (min(limit, meta.numel() - start),), meta.offset + start)
            for start in range(0, meta.numel(), limit)
        ]
    elif meta.numel() <= limit:
        host, pieces = torch.empty(meta.size, dtype=meta.dtype), [meta]
    else:
        return download(dispatch(aten.clone.default, (source,), {"memory_format": torch.contiguous_format}))
    stream().download(storage_of(source), pieces, host.data_ptr())
    return host


def empty(meta: Meta) -> RemoteTensor:
    """A tensor whose storage does not exist yet: it costs nothing until it is written or read."""
    return wrap(remote_storage.kind(meta.extent()), meta)


@handler("copy_", pure=True)
def _copy(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if is_remote(target) and is_remote(source):
        return record(operation, args[:2], {})
    if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
        synchronizing.note()
    if is_remote(target):
        if source.device.type != "cpu":
            raise RuntimeError(f"cannot copy a tensor on {source.device} to cuda:0")
        with torch_dispatcher.NoTorchFunction():
            source.expand(target.shape)  # raises as the copy would
        upload(target, source)
        note_moved(target)
    else:
        target.copy_(download(source))
    return target


@handler("_to_copy", pure=True)
def _to_copy(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    if device is None or device.type == "cuda":
        if device is not None:
            expect_first(device.index)
        kept = {
            name: value
            for name, value in kwargs.items()
            if name not in ("device", "non_blocking", "pin_memory") and value is not None
        }
        return record(operation, args, kept)
    if device.type == "meta":
        with torch_dispatcher.NoTorchFunction():
            return torch.empty_strided(
                args[0].size(), args[0].stride(), dtype=kwargs.get("dtype") or args[0].dtype, device="meta"
            )
    if device.type != "cpu":
        raise RuntimeError(f"a Dormouse function has cuda:0 and the CPU; there is no {device}")
    if not kwargs.get("non_blocking", False):
        synchronizing.note()
    host = download(args[0])
    dtype, memory_format = kwargs.get("dtype"), kwargs.get("memory_format")
    return host.to(dtype=dtype or host.dtype, memory_format=memory_format or torch.preserve_format)


@handler("_local_scalar_dense")
def _local_scalar_dense(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    synchronizing.note()
    return download(args[0]).item()


@handler("detach", "alias", "lift_fresh", "lift", "lift_fresh_copy")
def _alias(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    source = args[0]
    if not is_remote(source):
        return operation.op(*args, **kwargs)
    mend(source)
    return wrap_as(source, storage_of(source), meta_of(source))


@handler("empty.memory_format", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "empty_permuted")
def _empty(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    metas.check_layout(kwargs.get("layout"))
    if device is not None and device.type == "cuda":
        expect_first(device.index)
    remote = device is None or device.type == "cuda"
    if remote and (dtype := kwargs.get("dtype")) is not None:
        metas.check(dtype)
    meta_kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "layout")}
    with torch_dispatcher.NoTorchFunction(), torch_dispatcher.BelowAutograd():
        if args and is_remote(args[0]):
            shadow = torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype, device="meta")
            args = (shadow, *args[1:])
        result = operation.op(*args, **meta_kwargs, device=torch.device("meta") if remote else device)
    return _room(empty(metas.of(result))) if remote else result


def _room(tensor: RemoteTensor) -> RemoteTensor:
    """A storage that may not fit is created at once, unless its content may go to the store."""
    current = world.stream
    if current is not None and current.may_not_fit(storage_of(tensor).nbytes) and not current.to_store:
        current.create(storage_of(tensor))
    return tensor


@handler("_pin_memory", "is_pinned", "record_stream")
def _host_only(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    if operation.name == "aten::is_pinned":
        return False
    if operation.name == "aten::record_stream":
        return None
    raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")


@handler("_pack_padded_sequence")
def _pack(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    """The batch sizes belong on the CPU, where the lengths are: PyTorch's own packing of the elements' numbers gives
    both them and the elements to select."""
    padded, lengths, batch_first = args
    if not is_remote(padded) or is_remote(lengths):
        raise RuntimeError("packing needs the padded batch on cuda:0 and its lengths on the CPU")
    if padded.numel() == 0:
        raise RuntimeError("Cannot pack empty tensors.")
    with torch_dispatcher.NoTorchFunction(), torch_dispatcher.BelowAutograd():
        numbers = torch.arange(padded.size(0) * padded.size(1)).view(padded.size(0), padded.size(1))
        order, batch_sizes = operation.op(numbers, lengths, batch_first)
    rows = dispatch(aten.flatten.using_ints, (padded, 0, 1), {})
    return [dispatch(aten.index_select.default, (rows, 0, order.to(DEVICE)), {}), batch_sizes]


@handler("set_.source_Tensor")
def _set(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    target, source = args
    if not (is_remote(target) and is_remote(source)):
        raise RuntimeError("set_ needs two tensors on the same device")
    become(target, storage_of(source), meta_of(source))
    return target


@handler("_index_put_impl_", "index_put_", "index_put", "index.Tensor", "_unsafe_index.Tensor", pure=True)
def _index(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    """CPU indices may index CUDA tensors; they are moved first."""
    if not is_remote(args[0]):
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    indices = [
        value.to(DEVICE) if isinstance(value, torch.Tensor) and not is_remote(value) else value for value in args[1]
    ]
    return record(operation, (args[0], indices, *args[2:]), kwargs)


@handler("is_same_size")
def _is_same_size(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0].size() == args[1].size()
