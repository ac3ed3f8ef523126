"""Decides which calls must wait for their outcome: CUDA knows at the call whether they succeed, and no shape rule does.

A program that catches `LinAlgError` and tries again with more jitter relies on that, so the shim waits for these as
CUDA does. It also waits for the first call of an operation in a way that no shape rule can approve: for example, with
dtypes that there may be no kernel for. Calls that cannot fail are not waited for, nor are those whose kernels assert on
the GPU, which CUDA reports later too: indices, targets, probabilities of each element. Pure.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from dormouse.client_shim.commands import composites, numbers
from dormouse.client_shim.commands.handles import meta_of, storage_of
from dormouse.client_shim.commands.plans import Call, Plan, Way
from dormouse.schemas import stream as wire

Arguments = dict[str, Any]
"""Of a call, by name."""

_broadcast: Any = torch.broadcast_shapes


def _always(_: Arguments) -> bool:
    return True


def _checked(arguments: Arguments) -> bool:
    return arguments.get("check_errors") is True


def _sorted_oddly(arguments: Arguments) -> bool:
    if arguments.get("sorter") is not None or arguments.get("side") not in (None, "left", "right"):
        return True
    values, rows = arguments["self"], arguments["sorted_sequence"]
    return isinstance(values, torch.Tensor) and rows.dim() != 1 and rows.shape[:-1] != values.shape[:-1]


def _range_of_data(arguments: Arguments) -> bool:
    return bool(arguments.get("min", 0) >= arguments.get("max", 0))


def _spread_of_data(arguments: Arguments) -> bool:
    return not isinstance(arguments.get("std", 1), int | float)


def _chance(arguments: Arguments) -> bool:
    chance = arguments.get("p", 0.5)
    return isinstance(chance, int | float) and not 0 <= chance <= 1


def _backwards(arguments: Arguments) -> bool:
    low, high = arguments.get("from", 0), arguments.get("to", 1)
    return low is not None and high is not None and not low < high


def _misplaced(arguments: Arguments) -> bool:
    """The number of elements that a mask chooses is a value; one value goes to any number of them. Indices have a known
    shape, which the values may have or not.
    """
    data, indices, values = arguments["self"], arguments["indices"], arguments["values"]
    places = {at: index for at, index in enumerate(indices) if index is not None}
    if values.numel() == 1 or not places:
        return False
    if any(not index.dtype.is_signed for index in places.values()):
        return True
    try:
        chosen = _broadcast(*(index.shape for index in places.values()))
        first, last = min(places), max(places)
        start = first if last - first == len(places) - 1 else 0
        kept = [size for at, size in enumerate(data.shape) if at not in places]
        shape = torch.Size([*kept[:start], *chosen, *kept[start:]])
        return bool(_broadcast(shape, values.shape) != shape)
    except RuntimeError:
        return True


def _boundaries(arguments: Arguments) -> bool:
    return bool(arguments["boundaries"].dim() != 1)


def _unlike(arguments: Arguments) -> bool:
    """The replacement for a part of a tensor has another shape than the part."""
    data, source, dim = arguments["self"], arguments["source"], arguments["dim"]
    if source.dim() != data.dim() or arguments["index"].numel() != (source.size(dim) if source.dim() else 1):
        return True
    return any(one != other for at, (one, other) in enumerate(zip(data.shape, source.shape, strict=True)) if at != dim)


def _bounds(arguments: Arguments) -> bool:
    power, most = arguments["p"], arguments["maxnorm"]
    return not (power > 0 and most >= 0)


def _complex_number(arguments: Arguments) -> bool:
    return isinstance(arguments["value"], complex) and not arguments["self"].dtype.is_complex


def _names_places(arguments: Arguments) -> bool:
    index, value = arguments["index"], arguments["value"]
    alike = not isinstance(value, torch.Tensor) or value.dtype == arguments["self"].dtype
    return not (index.dtype is torch.int64 and index.dim() < 2 and alike)


def _selects(arguments: Arguments) -> bool:
    data, dim, chosen = arguments["self"], arguments["dim"], arguments["index"].numel()
    return bool(chosen != 1 if data.dim() == 0 else chosen and not data.size(dim))


def _too_few(arguments: Arguments) -> bool:
    """The number of elements that a mask chooses is a value, bounded by the number that there are."""
    data, mask = arguments["self"], arguments["mask"]
    return bool(arguments["source"].numel() < max(data.numel(), mask.numel()))


def _resized(arguments: Arguments) -> bool:
    sizes = (*(arguments["output_size"] or ()), *arguments[next(iter(arguments))].shape[2:])
    return any(size < 1 for size in sizes)


def _put(arguments: Arguments) -> bool:
    data, index = arguments["self"], arguments["index"]
    return bool(index.numel() != arguments["source"].numel() or (index.numel() and not data.numel()))


def _nothing(arguments: Arguments) -> bool:
    return bool(arguments["self"].numel() == 0)


def _without_order(arguments: Arguments) -> bool:
    values = arguments["self"]
    return bool(values.dtype.is_complex or (values.dim() == 0 and arguments["dim"] not in (0, -1)))


def _two_dtypes(first: str, second: str) -> Callable[[Arguments], bool]:
    return lambda arguments: bool(arguments[first].dtype != arguments[second].dtype)


_TELLING: Final[dict[str, Callable[[Arguments], bool]]] = {
    **dict.fromkeys(
        (
            *("_linalg_check_errors", "_linalg_svd", "_linalg_eigh", "_linalg_eigvals", "linalg_eig", "linalg_eigvals"),
            *("linalg_svdvals", "linalg_eigvalsh", "linalg_pinv", "linalg_lstsq", "cholesky", "cholesky_inverse"),
            *("lu_unpack", "linalg_lu_solve", "linalg_ldl_solve", "multinomial", "logspace"),
        ),
        _always,
    ),
    **dict.fromkeys(
        ("linalg_cholesky_ex", "linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_lu_factor_ex", "_linalg_solve_ex"),
        _checked,
    ),
    "searchsorted": _sorted_oddly,
    "histc": _range_of_data,
    "normal": _spread_of_data,
    **dict.fromkeys(("bernoulli", "bernoulli_"), _chance),
    **dict.fromkeys(("random_", "uniform_"), _backwards),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), _misplaced),
    "bucketize": _boundaries,
    "one_hot": lambda arguments: arguments.get("num_classes", -1) < 1,
    "heaviside": _two_dtypes("self", "values"),
    "complex": _two_dtypes("real", "imag"),
    "polar": _two_dtypes("abs", "angle"),
    **dict.fromkeys(tuple(f"index_{kind}{way}" for kind in ("add", "copy", "reduce") for way in ("", "_")), _unlike),
    **dict.fromkeys(("renorm", "renorm_"), _bounds),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _complex_number),
    "softshrink": lambda arguments: not arguments.get("lambd", 0.5) >= 0,
    **dict.fromkeys(composites.UPSAMPLING, _resized),
    **dict.fromkeys(("put", "put_"), _put),
    **dict.fromkeys(("index_fill", "index_fill_"), _names_places),
    **dict.fromkeys(("masked_scatter", "masked_scatter_"), _too_few),
    "index_select": _selects,
    "linspace": lambda arguments: arguments.get("dtype") is torch.bool,
    **dict.fromkeys(("add", "add_", "sub", "sub_", "rsub"), lambda arguments: arguments.get("alpha") is True),
    **dict.fromkeys(("_fft_c2c", "_fft_r2c", "_fft_c2r", "stft"), _nothing),
    **dict.fromkeys(("cummax", "cummin"), _without_order),
}
"""By an operation's name without overload."""


def tells(plan: Plan, call: Call) -> bool:
    """Whether the call's outcome is to be waited for; its results are predicted."""
    schema = call.operation.op._schema
    base = schema.name.removeprefix("aten::")
    if _too_large(plan, call):
        return True
    rule = _TELLING.get(base)
    if rule is None:
        return _something_of_nothing(plan, call) or _over_itself(call)
    names = (argument.name for argument in schema.arguments)
    return rule(dict(zip(names, call.args, strict=False)) | call.kwargs)


def _too_large(plan: Plan, call: Call) -> bool:
    """A number that the results' dtype does not have, or one of those that no kernel counts to. Numbers that stand for
    tensors are converted in silence, and comparisons give truth values.
    """
    schema = call.operation.op._schema
    given = {argument.name: value for argument, value in zip(schema.arguments, call.args, strict=False)} | call.kwargs
    dtypes = {
        meta_of(call.remotes[number]).dtype if meta is None else meta.dtype
        for kind, meta, number in plan.results
        if kind != wire.NOTHING
    }
    for argument in schema.arguments:
        value, kind = given.get(argument.name), str(argument.real_type)
        if ("number" in kind or "float" in kind) and isinstance(value, int | float | complex):
            if not all(numbers.has(dtype, value) for dtype in dtypes):
                return True
        elif "int" in kind:
            counts = value if isinstance(value, list | tuple) else [value]
            if any(type(each) is int and abs(each) >> 31 and each != _LAST for each in counts):
                return True
    return False


_LAST: Final = (1 << 63) - 1
"""The end of a slice that has none."""


def _over_itself(call: Call) -> bool:
    """An `out` that is also read, or of which two elements are one."""
    found = call.kwargs.get("out")
    outs: list[Any] = [out for out in (found if isinstance(found, list | tuple) else [found]) if call.is_remote(out)]
    if not outs or torch.Tag.pointwise in call.operation.op.tags:  # shape rules know these
        return False
    storages = [storage_of(remote) for remote in call.remotes]
    return any(0 in meta_of(out).stride or storages.count(storage_of(out)) > 1 for out in outs)


def _something_of_nothing(plan: Plan, call: Call) -> bool:
    """The greatest of no elements is an error; their sum is not, and shape rules do not distinguish the two. That of
    `cat` does: a growing cache begins with nothing.
    """
    if call.operation.op._schema.name == "aten::cat":
        return False
    made = any(kind == wire.FRESH and meta is not None and meta.numel() for kind, meta, _ in plan.results)
    return made and any(meta_of(remote).numel() == 0 for remote in call.remotes)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ANY_DTYPE: Final = _words("""
    _to_copy copy_ clone cat stack fill_ zero_ index index_fill index_fill_ gather masked_fill masked_fill_ where eq ne
    logical_and logical_or logical_not any all repeat flip roll embedding scaled_dot_product_attention
    empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full
    empty zeros ones full scalar_tensor
""")
"""Operations that have a kernel for every dtype, or are asked anyway."""

_INTEGERS_ONLY: Final = ("bitwise", "__", "gcd", "lcm")
"""Beginnings of names: these have none for the dtype that all others have one for."""

_EVERYWHERE: Final = {torch.float32}

_LOOSE: Final = _words("""
    softmax log_softmax _softmax _log_softmax softmin sort topk kthvalue addmm addmv addbmm baddbmm addr
    index_add index_add_ index_copy index_copy_ index_reduce index_reduce_ index_select
    lu linalg_lu linalg_lu_factor_ex mvlgamma im2col col2im
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
""")
"""Operations whose shape rules do not check dimensions and numbers, as kernels do."""

_LOOSER: Final = _words("""
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution batch_norm
""")
"""Nor at the sizes of all operands after the first."""

_LOOSEST: Final = _words("""
    ormqr addmv pixel_unshuffle binary_cross_entropy binary_cross_entropy_with_logits
    nll_loss nll_loss2d nll_loss_nd cross_entropy_loss
    select_scatter slice_scatter diagonal_scatter as_strided_scatter as_strided_copy
""")
"""Nor at the first's."""


def untried(plan: Plan, call: Call) -> Way | None:
    """The way in which the operation is called, if the call must wait to learn whether there is a kernel for it: a
    program that catches the error to convert its operands relies on that. Once it has succeeded in that way, it will.
    """
    operation = call.operation
    base = operation.name.removeprefix("aten::").partition(".")[0]
    dtypes = [meta_of(remote).dtype for remote in call.remotes]
    values = [value for value in (*call.args, *call.kwargs.values()) if not call.is_remote(value)]
    way: list[Any] = [*dtypes, *(value for value in values if isinstance(value, torch.dtype))]
    if not way:
        return None
    if base in _LOOSE or base in _LOOSER or base in _LOOSEST:
        way += [len(meta_of(remote).size) for remote in call.remotes]
        way += [value if isinstance(value, int | str) else _numbers(value) for value in values]
        if base not in _LOOSE:
            way += [meta_of(remote).size for remote in call.remotes[base in _LOOSER :]]
    elif base in _ANY_DTYPE or (set(way) <= _EVERYWHERE and not base.startswith(_INTEGERS_ONLY)):
        return None
    metas = [meta_of(remote) for remote in call.remotes] + [meta for _, meta, _ in plan.results if meta is not None]
    if any(meta.numel() == 0 for meta in metas):
        way.append(None)  # there may be nothing to do for a kernel that there is not
    return None if tuple(way) in operation.taken else tuple(way)


def _numbers(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) and all(isinstance(item, int) for item in value) else ()
