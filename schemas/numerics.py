"""Global settings of torch's numerics that a function may change for its own operations: their names and values. No
torch here: both ends name settings by the private setters of `torch._C`, and must agree.

Not among them are settings that a GPU ignores (oneDNN), and those that change speed only (preferred BLAS).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

PRECISIONS: Final = ("none", "ieee", "tf32", "bf16")
MAX_LIST: Final = 16


@dataclass(frozen=True)
class Setting:
    """``setter`` of `torch._C`, and ``getters`` that give its values. ``leading`` come first in calls of both."""

    name: str
    setter: str
    getters: tuple[str, ...]
    default: list[Any]
    leading: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # what its one value may be, if that is a word
    keyword: str = ""  # by which the setter takes the last of several values

    def takes(self, values: Any) -> bool:
        """Whether the setter can be called with these."""
        if not isinstance(values, list) or len(values) != len(self.default):
            return False
        if self.words:
            return values[0] in self.words
        if isinstance(self.default[0], list):
            numbers = values[0]
            return (
                isinstance(numbers, list)
                and len(numbers) <= MAX_LIST
                and all(type(number) is int and 0 <= number < MAX_LIST for number in numbers)
            )
        return all(type(value) is bool for value in values)

    def call(self, setter: Callable[..., None], values: list[Any]) -> None:
        """``setter`` with these. Raises whatever torch does."""
        if self.keyword:
            setter(*self.leading, *values[:-1], **{self.keyword: values[-1]})
        else:
            setter(*self.leading, *values)

    def current(self, torch_c: Any) -> list[Any] | None:
        """Its values now; None if this torch has no such setting, or if older and newer settings contradict each
        other.
        """
        try:
            found = [getattr(torch_c, getter)(*self.leading) for getter in self.getters]
        except (AttributeError, RuntimeError):
            return None
        return list(found[0]) if isinstance(found[0], tuple) else found


def _switch(name: str, *default: bool, getter: str = "") -> Setting:
    return Setting(name, f"_set_{name}", (getter or f"_get_{name}",), list(default))


def _precision(backend: str, operation: str, default: str = "none") -> Setting:
    return Setting(
        f"fp32_precision {backend} {operation}",
        "_set_fp32_precision_setter",
        ("_get_fp32_precision_getter",),
        [default],
        leading=(backend, operation),
        words=PRECISIONS,
    )


SETTINGS: Final = (
    Setting(
        "deterministic_algorithms",
        "_set_deterministic_algorithms",
        ("_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only"),
        [False, False],
        keyword="warn_only",
    ),
    _switch("deterministic_fill_uninitialized_memory", True),
    _switch("cudnn_enabled", True),
    _switch("cudnn_benchmark", False),
    _switch("cudnn_deterministic", False),
    _switch("sdp_use_flash", True, getter="_get_flash_sdp_enabled"),
    _switch("sdp_use_mem_efficient", True, getter="_get_mem_efficient_sdp_enabled"),
    _switch("sdp_use_math", True, getter="_get_math_sdp_enabled"),
    _switch("sdp_use_cudnn", True, getter="_get_cudnn_sdp_enabled"),
    _switch("sdp_use_overrideable", True, getter="_get_overrideable_sdp_enabled"),
    _switch("math_sdp_allow_fp16_bf16_reduction", False),
    Setting("sdp_priority_order", "_set_sdp_priority_order", ("_get_sdp_priority_order",), [[1, 2, 0, 3, 4]]),
    _switch("cublas_allow_fp16_reduced_precision_reduction", True, True),
    _switch("cublas_allow_bf16_reduced_precision_reduction", True, True),
    _switch("cublas_allow_fp16_accumulation", False),
    # Each of the older three changes some of the newer ones, which come last so that restoring all restores these.
    _switch("cublas_allow_tf32", False),
    Setting(
        "float32_matmul_precision",
        "_set_float32_matmul_precision",
        ("_get_float32_matmul_precision",),
        ["highest"],
        words=("highest", "high", "medium"),
    ),
    _switch("cudnn_allow_tf32", True),
    _precision("generic", "all"),
    _precision("cuda", "all"),
    _precision("cuda", "matmul"),
    _precision("cuda", "conv", "tf32"),
    _precision("cuda", "rnn", "tf32"),
    *(_precision("mkldnn", operation) for operation in ("all", "matmul", "conv", "rnn")),
)
"""In the order in which they are restored."""
