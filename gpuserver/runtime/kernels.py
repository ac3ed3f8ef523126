"""The C++ kernels of a runtime on the CPU (kernels.cpp and headers): built once, as the emulated GPU's allocator is.

The structures here are the Step, Shape, Lora, Gated and Layer of the headers, field by field.
"""

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from dormouse.core import native
from dormouse.schemas.errors import ConfigError

SOURCE: Final = Path(__file__).with_name("kernels.cpp")
_MATHEMATICS: Final = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
"""No -ffast-math: the kernels themselves fix the order of additions and the places of rounding, so that no result
depends on the batch; and a library that is linked with it makes its whole process take subnormal numbers for zero.
"""

FLAGS: Final = ("-std=c++20", "-O3", "-fopenmp", *_MATHEMATICS, "-shared", "-fPIC")
SPAN: Final = 16
"""Tokens of a tile of attention (attention.h): a block has a multiple of it."""

_pointer, _number, _single = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class NativeStep(ctypes.Structure):
    """The tables of a step."""

    _fields_ = (
        *((name, _pointer) for name in ("base", "places", "blocks", "rows", "counts", "contexts", "starts")),
        ("adapters", _pointer),
        *((name, _number) for name in ("tokens", "items", "most_rank")),
    )


class NativeShape(ctypes.Structure):
    """Of the attention of a layer."""

    _fields_ = (
        *((name, _number) for name in ("heads", "kv_heads", "dim", "block_tokens", "layer_offset", "window")),
        ("scale", _single),
        ("softcap", _single),
    )


class NativeLora(ctypes.Structure):
    """The changes of an adapter to a product."""

    _fields_ = (*((name, _pointer) for name in ("a", "b", "added", "bias")), ("rank", _number), ("scale", _single))


class NativeGated(ctypes.Structure):
    """A gated MLP: where its weights are, and its sizes."""

    _fields_ = (
        *((name, _pointer) for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")),
        *((name, _pointer) for name in ("gate_loras", "up_loras", "down_loras")),
        *((name, _number) for name in ("hidden", "inner", "activation")),
    )


class NativeLayer(ctypes.Structure):
    """A decoder layer: where its weights are, and its sizes."""

    WEIGHTS: Final = (
        *("before_attention", "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "o", "o_bias"),
        *("after_attention", "before_mlp", "after_mlp", "q_loras", "k_loras", "v_loras", "o_loras"),
    )
    _fields_ = (
        *((name, _pointer) for name in WEIGHTS),
        ("mlp", NativeGated),
        ("shape", NativeShape),
        ("epsilon", _single),
        ("one", _single),
    )


ACTIVATIONS: Final = {
    "silu": 0,
    "gelu_pytorch_tanh": 1,
    "gelu_new": 1,
    "gelu_fast": 1,
    "gelu": 2,
    "relu": 3,
}
"""As layer.h numbers them."""


def build(machine: tuple[str, ...] = ("-march=native",)) -> Path:
    """Compile them unless that was done. Raises ConfigError with the reason.

    They use torch's own OpenMP: a second one would have threads of its own, which would wait for the same cores.
    """
    omp = sorted(Path(torch.__file__).parent.glob("lib/libgomp*"))
    return native.build(SOURCE, (*FLAGS, *machine), [str(path) for path in omp[:1]])


def opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    flag = ctypes.c_int
    for name, types in {
        "attend": (flag, *(_pointer,) * 4),
        "write": (flag, *(_pointer,) * 3, _number, _number, _pointer, _number, _number),
        "layer": (flag, *(_pointer,) * 6),
        "linear": (flag, flag, *(_pointer,) * 4, *(_number,) * 3, _pointer, _pointer, _number),
        "gated": (flag, *(_pointer,) * 3, _number, _pointer, _number),
        "norm": (flag, *(_pointer,) * 3, _number, _number, _single, _single),
        "rotate": (flag, *(_pointer,) * 4, *(_number,) * 3),
        "largest": (_pointer, _number, _number, _pointer),
    }.items():
        function: Any = getattr(library, f"dormouse_{name}")
        function.argtypes, function.restype = types, None
    return library


@cache
def load() -> ctypes.CDLL | None:
    """None where they cannot be built: torch does it then, some times slower, and stderr has the reason. Loaded once: a
    runtime has it from the process that forked it, whose files it may not read.
    """
    try:
        return opened(build())
    except (ConfigError, OSError) as error:
        print(f"language models will be slow: {error}", file=sys.stderr)
        return None


def largest(logits: torch.Tensor) -> list[int]:
    """The index of the largest number of each row, -1 for a row with any that is not finite. ``logits``: fp32."""
    library = load() if logits.device.type == "cpu" and logits.is_contiguous() else None
    if library is None:
        return logits.argmax(-1).where(logits.isfinite().all(-1), -1).tolist()
    found = torch.empty(logits.shape[0], dtype=torch.int64)
    library.dormouse_largest(logits.data_ptr(), *logits.shape, found.data_ptr())
    indices: list[int] = found.tolist()
    return indices


if __name__ == "__main__":
    sys.exit(native.build_now(build))
