"""Replaces attributes of PyTorch for the whole shim and remembers the originals, so that a test can restore them. Also
has common replacements."""

from typing import Any, NoReturn

_MISSING: Any = object()
_replaced: list[tuple[Any, str, Any]] = []  # (owner, name, original), oldest first


def patch(owner: Any, name: str, value: Any) -> None:
    """Set an attribute and remember its old value."""
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


def raising(text: str, kind: type[Exception] = RuntimeError) -> Any:
    """In the place of a function: says why there is none."""

    def refusal(*args: Any, **kwargs: Any) -> NoReturn:
        raise kind(text)

    return refusal


def raising_class(name: str, text: str, *makers: str) -> type:
    """In the place of a class, because programs name it in annotations and `isinstance`; neither it nor its `makers`
    make an object."""
    refusal = raising(text)
    return type(name, (), {"__init__": refusal} | dict.fromkeys(makers, staticmethod(refusal)))


def nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a function that has nothing to do here."""
