"""Turns errors that an executor reports into the exceptions that PyTorch would have raised.

The exception's type travels as a name; only the names listed here become a class, everything else is a RuntimeError.
"""

from typing import Final

import torch

from dormouse.client_shim.commands.room import out_of_memory
from dormouse.client_shim.torch_private import LinAlgError


class WakeFailed(RuntimeError):
    """Bytes of the model did not come from the store. The request may be sent again."""


class ModelDamaged(WakeFailed):
    """Nor will they: stored bytes are damaged, and load() has to make them again. The node sees to that."""


_CLASSES: Final[dict[str, type[Exception]]] = {
    kind.__name__: kind
    for kind in (
        torch.OutOfMemoryError,
        LinAlgError,
        IndexError,
        ValueError,
        TypeError,
        KeyError,
        AssertionError,
        NotImplementedError,
        OverflowError,
        ZeroDivisionError,
        MemoryError,
        RuntimeError,
        WakeFailed,
        ModelDamaged,
    )
}
_CLASSES["_LinAlgError"] = LinAlgError


class LeaseLost(RuntimeError):
    """The GPU was taken from this request (revoked, stale or refused). The request may be sent again."""


class SeatLost(LeaseLost):
    """Others needed the GPU's memory while this request gave it nothing to do, and its results there had no room. The
    request may be sent again.
    """


class ExecutorLost(RuntimeError):
    """The process that owns the GPU died while it served this request. The request may be sent again."""


class NoLease(RuntimeError):
    """cuda was used outside of load() and handle(), by a thread that has outlived them, where there is no GPU. In the
    next request there is one again."""


class SessionEnded(ExecutorLost):
    """The node has ended this `dormouse run` session, or is gone. Run the program again."""


class StoreRefused(RuntimeError):
    """The store did not take an upload, in its words: there is no room for it, or a file cannot be read."""


def exception(kind: str, text: str, op: str | None, site: str | None) -> Exception:
    """The exception to raise, its message naming the operation and the line that issued it."""
    where = f"\n  in {op.partition('@')[0]} on cuda:0" if op else ""
    if site:
        where += f", issued by\n  {site}"
    made = _CLASSES.get(kind, RuntimeError)
    return out_of_memory(text + where) if made is torch.OutOfMemoryError else made(text + where)
