"""Golden bytes per message: what is on the wire does not change by accident. And no bytes build anything undeclared."""

import json
import os
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.schemas import admin
from dormouse.schemas import messages as m

BASES = (m.Message, admin.Packet, admin.Settings, admin.Wish)


def _called(kind: type) -> str:
    """The two modules have names in common, which never meet on one socket."""
    return kind.__name__ if kind.__module__.startswith(m.__name__) else f"admin.{kind.__name__}"


GOLDEN = Path(__file__).with_name("golden_messages.json")
UNIONS = {name: union for name, union in vars(m).items() if isinstance(union, types.UnionType)}
UNIONS |= {name: union for name, union in vars(admin).items() if isinstance(union, types.UnionType)}
KINDS = sorted(
    (
        kind
        for kind in (*vars(m).values(), *vars(admin).values())
        if isinstance(kind, type) and issubclass(kind, BASES) and kind not in BASES
    ),
    key=_called,
)


def example(annotation: Any) -> Any:
    """A value of any field type that messages use, the same each time."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return example(arguments[0])
    if origin is list:
        return [example(arguments[0])]
    if origin is dict:
        return {example(arguments[0]): example(arguments[1])}
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple and arguments[1:] == (...,):
        return (example(arguments[0]),)
    if origin is tuple:
        return tuple(example(argument) for argument in arguments)
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation(**{name: example(kind) for name, kind in typing.get_type_hints(annotation).items()})
    return {int: 7, str: "x", bytes: b"b", bool: True, float: 0.5}[annotation]


def test_golden_bytes() -> None:
    """Set DORMOUSE_GOLDEN=1 to write the file anew after a deliberate change, and say so in the CHANGELOG."""
    found = {_called(kind): msgspec.msgpack.encode(example(kind)).hex() for kind in KINDS}
    if os.environ.get("DORMOUSE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    assert found == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", sorted(UNIONS))
def test_every_member_comes_back_as_itself(name: str) -> None:
    decoder = msgspec.msgpack.Decoder(UNIONS[name])
    for kind in typing.get_args(UNIONS[name]):
        value = example(kind)
        assert decoder.decode(msgspec.msgpack.encode(value)) == value


@given(st.binary(max_size=200))
def test_arbitrary_bytes_build_a_declared_message_or_an_error(data: bytes) -> None:
    for union in UNIONS.values():
        try:
            message = msgspec.msgpack.decode(data, type=union)
        except (msgspec.DecodeError, UnicodeDecodeError):  # the latter: a text that is not UTF-8
            continue
        assert type(message) in typing.get_args(union)
