"""Checks and schemas of pydantic's type hints, made by pydantic itself, which the function has imported if it has such
hints.

Pure. Nothing here imports it: it would cost each instance memory and time that a function without it has no use for.
"""

import sys
import typing
from typing import Any, Final

MESSAGE: Final = 300
"""Characters of a report on a wrong value: validators are user code."""


class Invalid(ValueError):
    """A value is not of its type; the text says where, as msgspec's do."""


class Adapter:
    """Of one hint. Raises pydantic's exception for types that it cannot take."""

    def __init__(self, hint: Any) -> None:
        pydantic: Any = sys.modules["pydantic"]
        self._adapter, self._error = pydantic.TypeAdapter(hint), pydantic.ValidationError

    def value_of(self, plain: Any) -> Any:
        """Raises Invalid."""
        try:
            return self._adapter.validate_python(plain)
        except self._error as error:
            first, *others = error.errors(include_url=False, include_input=False, include_context=False)
            more = f" (and {len(others)} more)" if others else ""
            raise Invalid(f"{first['msg'][:MESSAGE]}{more} - at `{_path(first['loc'])}`") from error

    def schema(self, mode: typing.Literal["validation", "serialization"]) -> dict[str, Any]:
        found: dict[str, Any] = self._adapter.json_schema(mode=mode)
        return found


def adapter(hint: Any) -> Adapter | None:
    """None if pydantic has no part in it."""
    return Adapter(hint) if "pydantic" in sys.modules and _has(hint) else None


def _has(hint: Any) -> bool:
    """A model, a dataclass or a constraint of pydantic's, also of an item."""
    if isinstance(hint, type) and hasattr(hint, "__pydantic_validator__"):
        return True
    said = getattr(hint, "__metadata__", ())  # of Annotated
    if any(type(each).__module__.partition(".")[0] in ("pydantic", "annotated_types") for each in said):
        return True
    return any(_has(each) for each in typing.get_args(hint))


def _path(places: tuple[str | int, ...]) -> str:
    return "$" + "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in places)


def fields(kind: Any) -> dict[str, tuple[Any, bool]] | None:
    """Of a model: each hint, and whether it must be there. None for any other type."""
    found = getattr(kind, "__pydantic_fields__", None)
    if not isinstance(kind, type) or not isinstance(found, dict):
        return None
    return {each.alias or name: (each.annotation, each.is_required()) for name, each in found.items()}


def plain(value: Any) -> Any:
    """A model as values that JSON has; None for any other value."""
    pydantic: Any = sys.modules.get("pydantic")
    if pydantic is None or not isinstance(value, pydantic.BaseModel) or not hasattr(value, "model_dump"):
        return None
    return value.model_dump(mode="json", by_alias=True)
