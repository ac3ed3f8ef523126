"""Private PyTorch API for `cuda` in a process without CUDA: the device guard, and the type of devices."""

import ctypes
import functools
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from dormouse.client_shim.torch_private import UnsupportedTorch

NO_ACCELERATOR: Final = ("Cannot access accelerator device", "hasPrimaryContext expects a valid device index")
"""A part of the error of autograd's engine when it meets a CUDA node in a process without CUDA."""

_CUDA_SLOT: Final = 1
_GUARD_REGISTRY: Final = "_ZN3c104impl26device_guard_impl_registryE"
# A backend of which a CPU wheel registers a guard that reports zero devices: only such a guard may be replaced by
# PyTorch's own no-op one.
_LAZY_SLOT: Final = 17

_TP_NEW: Final = 39 * ctypes.sizeof(ctypes.c_void_p)
"""The offset of `tp_new` in a type object of CPython: documented, and the same since 3.4."""

_C: Any = torch._C


def hide_gpus() -> None:
    """From CUDA in this process, should anything ever initialise it: the GPUs are the executors', and a process that
    has initialised CUDA cannot be forked.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def install_device_guard() -> None:
    """Give `cuda` a device guard that does nothing.

    A CPU wheel has none, so that indexing a CUDA tensor or `.to("cuda")` raises; one for CUDA has one that asks the
    driver. PyTorch has a no-op guard of its own, but installs it only in place of a registered guard that reports no
    devices; so such a one is put there first.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * (_LAZY_SLOT + 1)).in_dll(library, _GUARD_REGISTRY)
    if registry[_LAZY_SLOT] is None:
        raise UnsupportedTorch("no device guard to borrow: slot 17 of c10's registry is empty in this build of torch")
    registry[_CUDA_SLOT] = registry[_LAZY_SLOT]
    _C._ensureCUDADeviceGuardSet()
    _C._cuda_getDevice = lambda: 0


class Devices:
    """Translates the arguments of `torch.device(...)`."""

    arguments: Callable[[tuple[Any, ...]], tuple[Any, ...]] = staticmethod(lambda args: args)


@functools.cache
def watch_device_type() -> None:
    """Have `torch.device(...)` ask `Devices` first, for good. The type itself must stay what it is: PyTorch compares
    it by identity, and files name it.
    """

    class Pythonic:
        def __new__(cls) -> "Pythonic":
            return object.__new__(cls)

    def new_of(kind: type) -> ctypes.c_void_p:
        return ctypes.c_void_p.from_address(id(kind) + _TP_NEW)

    made_by = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.py_object)
    real = made_by(new_of(torch.device).value or 0)

    def new(cls: type, *args: Any, **kwargs: Any) -> torch.device:
        made: torch.device = real(cls, Devices.arguments(args), kwargs)
        return made

    # A type written in C takes no attributes. So into its dictionary, and into its slot the function that looks there.
    gc.get_referents(torch.device.__dict__)[0]["__new__"] = staticmethod(new)
    new_of(torch.device).value = new_of(Pythonic).value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.device))
