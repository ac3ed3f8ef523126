"""Which calls answer for themselves: CUDA knows at the call whether they succeed, and no shape rule does.

A program that catches `LinAlgError` and tries again with more jitter counts on that, so the shim waits for these as
CUDA does. Calls that cannot fail are not waited for, nor are those whose kernels assert on the GPU, which CUDA reports
later too: indices, targets, probabilities of each element. Pure.
"""

from collections.abc import Callable
from typing import Any, Final

from dormouse.client_shim.commands.plans import Call, Plan
from dormouse.schemas import stream as wire

Arguments = dict[str, Any]
"""Of a call, by name."""


def _always(_: Arguments) -> bool:
    return True


def _checked(arguments: Arguments) -> bool:
    return arguments.get("check_errors") is True


def _with_sorter(arguments: Arguments) -> bool:
    return arguments.get("sorter") is not None


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


def _masked(arguments: Arguments) -> bool:
    """How many elements a mask chooses is a value; one value goes to any number of them."""
    masks = any(index is not None and not index.dtype.is_signed for index in arguments["indices"])
    return masks and arguments["values"].numel() != 1


def _boundaries(arguments: Arguments) -> bool:
    return bool(arguments["boundaries"].dim() != 1)


def _undilated(arguments: Arguments) -> bool:
    return any(step < 1 for step in arguments.get("dilation", ()))


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
            *("lu_unpack", "linalg_lu_solve", "linalg_ldl_solve", "multinomial"),
        ),
        _always,
    ),
    **dict.fromkeys(
        ("linalg_cholesky_ex", "linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_lu_factor_ex", "_linalg_solve_ex"),
        _checked,
    ),
    "searchsorted": _with_sorter,
    "histc": _range_of_data,
    "normal": _spread_of_data,
    **dict.fromkeys(("bernoulli", "bernoulli_"), _chance),
    **dict.fromkeys(("random_", "uniform_"), _backwards),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), _masked),
    "bucketize": _boundaries,
    "one_hot": lambda arguments: arguments.get("num_classes", -1) < 1,
    "heaviside": _two_dtypes("self", "values"),
    "complex": _two_dtypes("real", "imag"),
    "polar": _two_dtypes("abs", "angle"),
    **dict.fromkeys(("convolution", *(f"conv{way}{n}d" for way in ("", "_transpose") for n in (1, 2, 3))), _undilated),
    **dict.fromkeys(("cummax", "cummin"), _without_order),
}
"""By an operation's name without overload."""


def tells(plan: Plan, call: Call) -> bool:
    """Whether the call's outcome is to be waited for; its results are predicted."""
    schema = call.operation.op._schema
    rule = _TELLING.get(schema.name.removeprefix("aten::"))
    if rule is None:
        return _something_of_nothing(plan, call)
    names = (argument.name for argument in schema.arguments)
    return rule(dict(zip(names, call.args, strict=False)) | call.kwargs)


def _something_of_nothing(plan: Plan, call: Call) -> bool:
    """The greatest of no elements is an error; their sum is not, and shape rules do not tell the two apart."""
    made = any(kind == wire.FRESH and meta is not None and meta.numel() for kind, meta, _ in plan.results)
    return made and any(remote._meta.numel() == 0 for remote in call.remotes)
