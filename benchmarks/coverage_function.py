"""A Dormouse function that runs PyTorch's operator database on cuda:0 and on the CPU of its own sandbox and compares.

`handle(state, {"names": [...], "samples": n})` answers with one verdict per operator and dtype: `agree`, `error` (a
clear one, with its text), `wrong`, or `skip` (the CPU cannot run any sample either). It imports nothing of
Dormouse's.
"""

import contextlib
import copy
import signal
import warnings
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "int64": torch.int64}
OP_TIMEOUT_S = 60

# Values are random: only shapes and dtypes are compared.
RANDOM = (
    "rand",
    "dropout",
    "bernoulli",
    "multinomial",
    "normal",
    "cauchy",
    "exponential",
    "geometric",
    "uniform",
    "rrelu",
    "log_normal",
    "empty",
    "fractional_max_pool",
    "svd_lowrank",
    "pca_lowrank",
    "poisson",
)

# A decomposition's factors are unique only up to signs or phases, so what they rebuild is compared elsewhere; here
# their shapes.
GAUGE = ("svd", "eig", "qr", "geqrf", "ormqr", "householder_product", "pca_lowrank")


class TooLong(Exception):
    """An operator took longer than its time."""


def load() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

    table: dict[str, Any] = {}
    for entry in op_db:
        name = entry.name + (f".{entry.variant_test_name}" if entry.variant_test_name else "")
        table.setdefault(name, entry)
    return table


def handle(state: dict[str, Any], request: dict[str, Any]) -> Any:
    if request.get("list"):
        return sorted(state)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return [
            verdict(state[name], name, dtype, request.get("samples"))
            for name in request["names"]
            for dtype in DTYPES
            if DTYPES[dtype] in state[name].dtypes
        ]


def verdict(entry: Any, name: str, dtype: str, limit: int | None) -> dict[str, Any]:
    """Run an operator's samples until one does not agree."""
    result: dict[str, Any] = {"name": name, "dtype": dtype, "samples": 0, "verdict": "agree", "text": ""}

    def alarm(*_: Any) -> None:
        raise TooLong(f"not finished after {OP_TIMEOUT_S} s")

    signal.signal(signal.SIGALRM, alarm)
    signal.alarm(OP_TIMEOUT_S)
    try:
        torch.manual_seed(0)
        for index, sample in enumerate(entry.sample_inputs("cpu", DTYPES[dtype])):
            if limit is not None and index >= limit:
                break
            problem = compare_sample(entry, name, sample)
            if problem is not None:
                kind, text = problem
                if kind == "skip":
                    continue
                return result | {"verdict": kind, "text": text, "sample": index}
            result["samples"] += 1
    except TooLong as error:
        return result | {"verdict": "hang", "text": str(error)}
    except Exception as error:
        return result | {"verdict": "skip", "text": f"no samples: {type(error).__name__}: {error}"}
    finally:
        signal.alarm(0)
    if not result["samples"]:
        result["verdict"] = "skip"
    return result


def compare_sample(entry: Any, name: str, sample: Any) -> tuple[str, str] | None:
    remote = move(copy.deepcopy((sample.input, sample.args, sample.kwargs)), "cuda")
    if name == "tensor_split":
        remote = (remote[0], sample.args, sample.kwargs)  # which wants its indices on the CPU
    try:
        torch.manual_seed(1)
        expected = entry(sample.input, *sample.args, **sample.kwargs)
    except TooLong:
        raise
    except Exception as error:
        return "skip", f"{type(error).__name__}: {error}"
    try:
        torch.manual_seed(1)
        actual = entry(remote[0], *remote[1], **remote[2])
        actual, expected = move(actual, "cpu"), move(expected, "cpu")  # some samples name a device of their own
        torch.cuda.synchronize()
    except TooLong:
        raise
    except Exception as error:
        settle()
        return "error", f"{type(error).__name__}: {error}"
    text = difference(expected, actual, exact=not any(word in name for word in RANDOM + GAUGE))
    return ("wrong", text) if text else None


def settle() -> None:
    """A failed operator may have left an error that is told at the next waiting operation."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()


def move(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        if (
            device == "cuda"
            and value.layout == torch.strided
            and value.untyped_storage().nbytes() != value.nbytes
            and not value.is_conj()
            and not value.is_neg()
        ):
            # The same view of the same storage, so that strides are tried too.
            whole = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
            return whole.to(device).as_strided(value.shape, value.stride(), value.storage_offset())
        return value.to(device)
    if isinstance(value, torch.device):
        return torch.device(device)
    if isinstance(value, dict):
        return {
            key: "cuda" if key == "device" and device == "cuda" else move(item, device) for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(move(item, device) for item in value)
    if isinstance(value, tuple):  # named results of an operator
        return tuple(move(item, device) for item in value)
    return value


def difference(expected: Any, actual: Any, exact: bool) -> str:
    """What differs, or nothing."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(actual, torch.Tensor):
            return f"{type(actual).__name__} instead of a tensor"
        if expected.dtype != actual.dtype or expected.shape != actual.shape or expected.layout != actual.layout:
            return f"{actual.dtype} {tuple(actual.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
        if not exact:
            return ""
        try:
            torch.testing.assert_close(
                actual, expected.detach(), equal_nan=True, rtol=1e-4, atol=1e-4, check_stride=False
            )
        except AssertionError as error:
            return str(error)
        return ""
    if isinstance(expected, dict):
        expected, actual = list(expected.values()), list(actual.values())
    if isinstance(expected, list | tuple):
        if not isinstance(actual, list | tuple) or len(actual) != len(expected):
            return "another number of results"
        return next(
            (text for one, other in zip(expected, actual, strict=True) if (text := difference(one, other, exact))), ""
        )
    if exact and isinstance(expected, bool | int | float | complex) and expected != actual and expected == expected:
        return f"{actual!r} instead of {expected!r}"
    return "" if type(expected) is type(actual) else f"{type(actual).__name__} instead of {type(expected).__name__}"
