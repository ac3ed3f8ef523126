"""`torch.cuda.set_sync_debug_mode`: warns or raises where a call would wait for the GPU on CUDA."""

import warnings
from typing import Final

_MODES: Final = {"default": 0, "warn": 1, "error": 2}
_TEXT: Final = "called a synchronizing CUDA operation"


class _Mode:
    number = 0


def get_mode() -> int:
    return _Mode.number


def set_mode(debug_mode: int | str) -> None:
    mode = _MODES.get(debug_mode, -1) if isinstance(debug_mode, str) else debug_mode
    if mode not in _MODES.values():
        raise RuntimeError("invalid value of debug_mode, expected one of `default`, `warn`, `error`")
    _Mode.number = mode


def note() -> None:
    """A call that waits: a copy that is not `non_blocking`, or a result whose shape or value is asked for."""
    if _Mode.number == 1:
        warnings.warn(_TEXT, stacklevel=4)
    elif _Mode.number:
        raise RuntimeError(_TEXT)
