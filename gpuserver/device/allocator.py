"""Counts, limits and separates torch's allocations on the CPU: the activations and workspaces of an emulated GPU.

A small C++ library replaces torch's CPU allocator. It is compiled once per torch version into a cache directory, the
first time that an executor starts (about two seconds), or beforehand with ``python -m
dormouse.gpuserver.device.allocator``. Without a compiler there is :class:`ApproximateActivations`, which sees only the
storages that the interpreter holds: it misses workspaces and says so. There the C library overwrites all its
allocations, at the price of every allocation instead of every change of owner.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dormouse.core import native
from dormouse.schemas.errors import ConfigError

SOURCE: Final = Path(__file__).with_name("allocator.cpp")
_FLAGS: Final = ("-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wno-attributes")

_M_PERTURB: Final = -6
"""``mallopt``: glibc fills allocated memory with the complement of a byte, and freed memory with the byte."""


class CountedActivations:
    """Exact: everything that goes through torch's allocator, on any thread, but not earlier allocations. In bytes."""

    approximate = False

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        for name in ("dormouse_used", "dormouse_peak", "dormouse_refused"):
            getattr(self._lib, name).restype = ctypes.c_int64
        self._lib.dormouse_set_limit.argtypes = [ctypes.c_int64]
        self._lib.dormouse_set_owner.argtypes = [ctypes.c_uint32]
        self._lib.dormouse_contains.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._lib.dormouse_install()

    def limit_this_thread(self) -> None:
        """From now on, allocations of the calling thread raise ``torch.OutOfMemoryError`` beyond the limit."""
        self._lib.dormouse_limit_this_thread(1)

    def set_limit(self, nbytes: int) -> None:
        self._lib.dormouse_set_limit(max(0, nbytes))

    def set_owner(self, number: int) -> None:
        """The owner of all blocks allocated from now on, counted from 1: nobody else ever reads their bytes."""
        self._lib.dormouse_set_owner(number)

    def refused(self) -> tuple[int, int]:
        """Bytes that the calling thread was refused last, and bytes that were in use at that moment; once."""
        return int(self._lib.dormouse_refused(0)), int(self._lib.dormouse_refused(1))

    def contains(self, pointer: int, nbytes: int) -> bool:
        """Whether these bytes begin a counted block and lie inside it."""
        return bool(self._lib.dormouse_contains(pointer, nbytes))

    def used(self) -> int:
        return int(self._lib.dormouse_used())

    def peak(self) -> int:
        return int(self._lib.dormouse_peak())

    def reset_peak(self) -> None:
        self._lib.dormouse_reset_peak()


class ApproximateActivations:
    """Without a compiler: the sizes that the interpreter reports for its storages; checked only when they are read."""

    approximate = True

    def __init__(self) -> None:
        self.measure: Callable[[], int] = lambda: 0
        self._limit = sys.maxsize
        self._peak = 0

    def limit_this_thread(self) -> None:
        pass

    def set_limit(self, nbytes: int) -> None:
        self._limit = max(0, nbytes)

    def set_owner(self, number: int) -> None:
        """Whoever it is: from the first on, no block of this process is given out as it was."""
        ctypes.CDLL(None).mallopt(_M_PERTURB, 0xFF)

    def refused(self) -> tuple[int, int]:
        return 0, 0

    def contains(self, pointer: int, nbytes: int) -> bool:
        return True

    def used(self) -> int:
        now = self.measure()
        self._peak = max(self._peak, now)
        return now

    def peak(self) -> int:
        self.used()
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self.measure()


def build() -> Path:
    """Compile the library unless it is there; safe when several executors do so at once. Raises ConfigError."""
    return native.build(SOURCE, _FLAGS, ["-lc10"])


def install() -> CountedActivations | ApproximateActivations:
    """Replace this process's CPU allocator if it can be built; otherwise account approximately."""
    try:
        return CountedActivations(build())
    except (ConfigError, OSError):
        return ApproximateActivations()


if __name__ == "__main__":
    sys.exit(native.build_now(build))
