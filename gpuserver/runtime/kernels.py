"""The C++ kernels of a runtime on the CPU (kernels.cpp): built once, as the emulated GPU's allocator is."""

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Final

import torch

from dormouse.gpuserver import native
from dormouse.schemas.errors import ConfigError

SOURCE: Final = Path(__file__).with_name("kernels.cpp")
_FAST: Final = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_ANY_ORDER: Final = ("-fassociative-math", "-fno-signed-zeros", "-freciprocal-math")
"""Sums in any order, so that they can be vectors. Not -ffast-math: linked with it, a library makes its whole process
take subnormal numbers for zero.
"""

_FLAGS: Final = ("-std=c++20", *_FAST, *_ANY_ORDER, "-shared", "-fPIC")


def build() -> Path:
    """Compile them unless that was done. Raises ConfigError with the reason.

    They use torch's own OpenMP: a second one would have threads of its own, which would wait for the same cores.
    """
    omp = sorted(Path(torch.__file__).parent.glob("lib/libgomp*"))
    return native.build(SOURCE, _FLAGS, [str(path) for path in omp[:1]])


@cache
def load() -> ctypes.CDLL | None:
    """None where they cannot be built: torch does it then. Loaded once: a runtime has it from the process that forked
    it, whose files it may not read.
    """
    try:
        library = ctypes.CDLL(str(build()))
    except (ConfigError, OSError):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.dormouse_attend.argtypes = [ctypes.c_int, *(pointer,) * 6, *(number,) * 7, ctypes.c_float, ctypes.c_float]
    library.dormouse_attend.restype = None
    library.dormouse_write.argtypes = [number, *(pointer,) * 4, *(number,) * 9]
    library.dormouse_write.restype = None
    return library


if __name__ == "__main__":
    sys.exit(native.build_now(build))
