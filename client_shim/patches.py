"""Every attribute of PyTorch that the shim replaces is replaced through here, so that it is known what was there and
a test can leave the world."""

from typing import Any

_MISSING: Any = object()
_replaced: list[tuple[Any, str, Any]] = []  # (owner, name, what was there), oldest first


def patch(owner: Any, name: str, value: Any) -> None:
    """Set an attribute and remember what it was."""
    _replaced.append((owner, name, vars(owner).get(name, _MISSING)))
    setattr(owner, name, value)


def undo() -> None:
    """Put everything back, last first."""
    while _replaced:
        owner, name, value = _replaced.pop()
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
