"""`RemoteTensor`: a tensor without bytes that reports cuda:0 as its device and records the operations on it.

Identity is the storage; a view is the same storage with another `Meta`. `dispatch` is the hot path: signature ->
interned plan -> a few integers on the stream. Python-level methods that would look at bytes are overridden here;
downloads and uploads are in `transfers.py`.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch

from dormouse.client_shim import torch_dispatcher, torch_private
from dormouse.client_shim.commands import definitions, metas, numbers, operations, recorder
from dormouse.client_shim.commands.handles import adopt, cpp, meta_of, storage_of
from dormouse.client_shim.commands.metas import CONJUGATED, NEGATED, Meta
from dormouse.client_shim.commands.operations import Operation
from dormouse.client_shim.commands.plans import Call, Plan
from dormouse.client_shim.commands.prediction import infer
from dormouse.client_shim.patches import patch
from dormouse.client_shim.stream import remote_storage
from dormouse.client_shim.stream.call_sites import HIDDEN
from dormouse.client_shim.stream.remote_storage import RemoteStorage
from dormouse.client_shim.stream.stream import Stream
from dormouse.client_shim.torch_face import synchronizing
from dormouse.client_shim.torch_face.device_numbers import expect_first
from dormouse.schemas import stream as wire

DEVICE: Final = torch.device("cuda", 0)
STRIDED: Final = torch.strided
HOST_OPERANDS: Final = {
    "aten::lstm.data",
    "aten::gru.data",
    "aten::rnn_tanh.data",
    "aten::rnn_relu.data",
    "aten::ctc_loss.Tensor",
}
"""Operations that want a CPU tensor beside CUDA ones. Elsewhere only zero-dimensional CPU tensors may join, as in
PyTorch."""

HOST_NBYTES: Final = 1 << 18
"""Bytes of a CPU tensor that may travel with a command: a packed sequence of 32768 steps."""

MAX_PLANS: Final = 60000
"""Interned signatures before all are forgotten, with the geometries in them: a program whose shapes never repeat must
not grow without bound."""

_make_wrapper = torch_private.make_wrapper
_inference_mode_enabled = torch.is_inference_mode_enabled
_is_inference = torch_private.is_inference
_known = operations.known()


_PLAIN: Final = frozenset({int, bool, float, type(None), str, torch.dtype, torch.memory_format, torch.device})
"""Literals that are their own signature, where the schema does not want a Scalar."""


class _World:
    """The one stream of this process; set by `install`."""

    stream: Stream | None = None
    plans = 0
    inference = False
    """Whether this process was ever in inference mode: before, no tensor needs a check."""


world = _World()


def watch_inference_mode() -> None:
    real = torch.inference_mode.__enter__

    def enter(self: torch.inference_mode) -> None:
        world.inference = True
        real(self)

    patch(torch.inference_mode, "__enter__", enter)


def use(module: Any) -> None:
    """Let C++ record, by its module; None: Python."""
    remote_storage.use(module)
    if module is None:
        recorder.disable()
    else:
        recorder.enable(module, dispatch, HIDDEN, MAX_PLANS)


def stream() -> Stream:
    if world.stream is None:
        raise RuntimeError(
            "cuda:0 is not connected: this process was prepared for Dormouse but has no executor to talk to"
        )
    return world.stream


class RemoteTensor(torch.Tensor):
    _storage: RemoteStorage
    _meta: Meta

    __torch_function__ = torch_private.disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return dispatch(func, args, kwargs or {})


def wrap(storage: RemoteStorage, meta: Meta) -> RemoteTensor:
    """A tensor object; in inference mode it is an inference tensor, as in PyTorch."""
    if cpp.module is not None:
        return cpp.module.wrap(storage, meta)  # type: ignore[no-any-return]
    tensor = _make_wrapper(RemoteTensor, meta.size, meta.stride, meta.offset, None, meta.dtype, STRIDED, DEVICE)
    adopt(tensor, storage, meta)
    if meta.bits:
        torch_private.set_conj(tensor, bool(meta.bits & CONJUGATED))
        torch_private.set_neg(tensor, bool(meta.bits & NEGATED))
    return tensor  # type: ignore[no-any-return]


def wrap_as(base: torch.Tensor, storage: RemoteStorage, meta: Meta) -> RemoteTensor:
    """A tensor object for a view of `base`, which is an inference tensor exactly if `base` is one."""
    inference = _is_inference(base)
    if inference is _inference_mode_enabled():
        return wrap(storage, meta)
    with torch_private.InferenceMode(inference):
        return wrap(storage, meta)


def is_remote(value: Any) -> bool:
    """Whether it is a tensor of cuda:0."""
    if cpp.module is None:
        return type(value) is RemoteTensor
    return isinstance(value, torch.Tensor) and cpp.module.is_remote(value)


def dispatch(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record one operation."""
    operation = _known.get(id(op))
    if operation is None:
        operation = operations.describe(op)
    if operation.handler is not None:
        return operation.handler(operation, args, kwargs)
    return record(operation, args, kwargs)


def record(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    """The general path: sign the call, find its plan, append it to the stream, wrap its future results."""
    if operation.decompose:
        return operation.op.decompose(*args, **kwargs)
    if operation.local:
        return torch_dispatcher.call_composite(operation.op, args, kwargs)
    if kwargs and (device := kwargs.get("device")) is not None:
        if device.type != "cuda":
            return _elsewhere(operation, args, kwargs)
        expect_first(device.index)
    key: list[Any] = []
    tensors: list[RemoteTensor] = []
    operands: list[Any] = []
    scalars = operation.scalars
    for index, value in enumerate(args):
        kind = type(value)
        if kind is RemoteTensor:
            key.append(value._meta)
            tensors.append(value)
            operands.append(value._storage)
        elif kind in _PLAIN and (not scalars or value is None or index not in scalars):
            key.append(value or str(value) if kind is float else value)  # -0.0 is another
        elif kind is list and value and not scalars and type(value[0]) is int:  # sizes, strides, dimensions
            key.append(tuple(value))
        else:
            _sign(operation, value, index in scalars, key, tensors, operands)
    for name, value in kwargs.items():
        key.append(name)
        _sign(operation, value, name in operation.scalar_names, key, tensors, operands)
    if operation.writes and len(tensors) > 1:
        key += _shared(tensors)
    signature = tuple(key)
    plan = operation.plans.get(signature)
    if plan is None:
        plan = _learn(operation, signature, args, kwargs, tensors)
    shape = plan.shape
    if cpp.module is not None and (operation.handler is None or operation.pure):
        kind = remote_storage.kind
        ids = [getattr(operand, "id", None) if type(operand) is kind else operand for operand in operands]
        recorder.offer(operation, plan, ids)
    if shape == Plan.VIEW:
        if plan.single is not None and not plan.listed:
            base = tensors[plan.results[0][2]]
            if world.inference:
                return wrap_as(base, storage_of(base), plan.single)
            return wrap(storage_of(base), plan.single)
        return _results(plan, tensors)
    current = world.stream or stream()
    kind = remote_storage.kind
    try:
        ids = [operand.id if type(operand) is kind else operand for operand in operands]
    except AttributeError:
        for tensor in tensors:
            create(storage_of(tensor))
        ids = [operand.id if type(operand) is kind else operand for operand in operands]
    if shape == Plan.FRESH:
        return wrap(remote_storage.born_storage(plan.fresh_nbytes[0], current.record(plan, ids)), plan.single)  # type: ignore[arg-type]
    if shape == Plan.SAME:
        current.record(plan, ids)
        return tensors[plan.results[0][2]]
    if shape == Plan.ASK:
        return _ask(current, operation, signature, plan, ids, tensors)
    first = current.record_alone(plan, ids) if plan.bulky else current.record(plan, ids)
    results = _results(plan, tensors, first)
    if plan.tells:
        current.answer_for_all()
        plan.succeeded(operation)
    return results


def create(storage: RemoteStorage) -> None:
    """Have the executor make a storage, before a command names it. A small one is made by an operation, which is
    recorded like any.
    """
    if storage.born:
        return
    if storage.nbytes > recorder.BLANK_NBYTES:
        stream().create(storage)
        return
    sizes = ((storage.nbytes,),)
    made = storage_of(dispatch(torch.ops.aten.zeros.default, sizes, {"dtype": torch.uint8, "device": DEVICE}))
    storage.id = made.id
    del made.id


def _elsewhere(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    """A factory like `zeros_like(x, device="cpu")`: it takes only the shape from a remote tensor."""
    with torch_dispatcher.NoTorchFunction(), torch_dispatcher.BelowAutograd():
        shadows = [
            torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
            if is_remote(value)
            else value
            for value in args
        ]
        return operation.op(*shadows, **kwargs)


def _sign(
    operation: Operation, value: Any, scalar: bool, key: list[Any], tensors: list[RemoteTensor], operands: list[Any]
) -> None:
    kind = type(value)
    if is_remote(value):
        key.append(meta_of(value))
        tensors.append(value)
        operands.append(storage_of(value))
    elif kind is list or kind is tuple or kind is torch.Size:
        if value and not scalar and type(value[0]) is int:
            key.append(tuple(value))
            return
        key.append(list)
        key.append(len(value))
        for item in value:
            _sign(operation, item, scalar, key, tensors, operands)
    elif isinstance(value, torch.Tensor):
        _sign_host(operation, value, key, operands)
    elif scalar and value is not None:
        key.append(kind if kind is complex or 0 <= value < 128 else (kind, numbers.magnitude(value), value < 0))
        if operation.scalars_in_key:
            key.append(value)
        else:
            operands.append([value.real, value.imag] if kind is complex else value)
    elif kind is torch.Generator or isinstance(value, torch.Generator):
        key.append(("generator", definitions.generator_number(value)))
    elif kind is torch.layout and value is not torch.strided:
        raise NotImplementedError(
            f"{operation.name}: {value} tensors are not supported on cuda:0 of a Dormouse function, only dense ones: "
            "call to_dense() first"
        )
    else:
        key.append(value or str(value) if kind is float else value)


def _shared(tensors: list[RemoteTensor]) -> Iterator[tuple[int, int]]:
    """Of each operand the first that is the same tensor, and the first that has the same storage."""
    storages = [id(storage_of(tensor)) for tensor in tensors]
    same = [id(tensor) for tensor in tensors]
    return ((same.index(tensor), storages.index(storage)) for tensor, storage in zip(same, storages, strict=True))


def _sign_host(operation: Operation, value: torch.Tensor, key: list[Any], operands: list[Any]) -> None:
    if value.device.type != "cpu":
        metas.check_layout(value.layout)
        if value.device.type == "cuda":
            raise NotImplementedError(
                f"{operation.name}: a {type(value).__name__} on cuda has no bytes on the GPU of a Dormouse function: "
                "compilers trace with such tensors. Trace or compile the model on the CPU, and move what comes of it"
            )
        raise RuntimeError(
            "Expected all tensors to be on the same device, "
            f"but found at least two devices, cuda:0 and {value.device}! (in {operation.name})"
        )
    if value.dim() > 0 and operation.name not in HOST_OPERANDS:
        raise RuntimeError(
            "Expected all tensors to be on the same device, "
            f"but found at least two devices, cuda:0 and cpu! (in {operation.name})"
        )
    metas.check(value.dtype)
    if value.layout is not torch.strided or value.nbytes > HOST_NBYTES:
        raise NotImplementedError(
            f"{operation.name}: a CPU tensor of layout {value.layout} and shape {tuple(value.shape)} cannot travel "
            f"with a command, only a dense one of at most {HOST_NBYTES} bytes"
        )
    content = host_bytes(value)
    key.append(("host", value.dtype, tuple(value.shape)))
    operands.append(content)


def host_bytes(value: torch.Tensor) -> bytes:
    value = value.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(value.reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""


def _learn(
    operation: Operation, signature: tuple[Any, ...], args: Any, kwargs: dict[str, Any], tensors: list[RemoteTensor]
) -> Plan:
    if world.stream is not None:
        world.stream.shape_misses += 1
    plan = infer(Call(operation, args, kwargs, tensors, is_remote))
    if world.plans >= MAX_PLANS:
        recorder.forget_plans()
        metas.forget()
        world.plans = 0
    world.plans += 1
    # An asking plan is kept too: its key need not be defined twice. It asks each time.
    operation.plans[signature] = plan
    return plan


def _results(plan: Plan, tensors: list[RemoteTensor], first: int = 0) -> Any:
    """The call's results. ``first`` is the id of its first new storage; 0 if it has none."""
    sizes = enumerate(plan.fresh_nbytes) if first else ()
    fresh = [remote_storage.born_storage(nbytes, first + slot) for slot, nbytes in sizes]
    for operand, meta in plan.changes:
        reshape(tensors[operand], meta)
    results: list[Any] = []
    for kind, result, number in plan.results:
        if kind == wire.SAME:
            results.append(tensors[number])
        elif result is None:
            results.append(None)
        elif kind == wire.FRESH:
            results.append(wrap(fresh[number], result))
        else:
            results.append(wrap_as(tensors[number], storage_of(tensors[number]), result))
    if plan.listed:
        return results
    return results[0] if results else None


def reshape(tensor: RemoteTensor, meta: Meta) -> None:
    """Give a tensor object another geometry in place (`resize_`, `t_`, an empty `out=`)."""
    storage = storage_of(tensor)
    if (growth := meta.extent() - storage.nbytes) > 0:
        if storage.born:
            stream().hold(growth)
        storage.nbytes += growth
    become(tensor, storage, meta)


def become(tensor: RemoteTensor, storage: RemoteStorage, meta: Meta) -> None:
    """Make a tensor object that of another storage, or of another part of it."""
    torch_private.set_tensor_data(tensor, wrap_as(tensor, storage, meta))
    adopt(tensor, storage, meta)


def _ask(
    current: Stream,
    operation: Operation,
    signature: tuple[Any, ...],
    plan: Plan,
    ids: list[Any],
    tensors: list[RemoteTensor],
) -> Any:
    if operation.ask_always or operation.op._schema.name in operations.MOSTLY_STATIC:
        synchronizing.note()
    (results, changes, listed, _), first = current.ask(plan, ids)
    told = definitions.told(results, changes, listed)
    if plan.believed and not plan.writes:
        # Believed from now on; the executor goes on comparing.
        operation.plans[signature] = definitions.believed(plan, told)
    plain = [result[1] for result in results if result[0] == wire.PLAIN]
    if plain:
        return plain if listed else plain[0]
    return _results(told, tensors, first)
