"""Type hints of ``handle``: what is checked and shown, and what is said of those that cannot be."""

import dataclasses
import datetime
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np
import pydantic
import pydantic.dataclasses
import pytest
import torch

from dormouse.client_shim.instance.codec import BadRequest, BadResponse
from dormouse.client_shim.instance.hints import Hints
from dormouse.schemas import messages as m


class Asked(msgspec.Struct):
    image: bytes
    top: Annotated[int, msgspec.Meta(ge=1)] = 5
    words: list[str] = []


def struct(state: Any, request: Asked) -> dict[str, float]:
    """What is on it."""
    return {}


def form(*fields: tuple[str, bytes]) -> bytes:
    parts = [b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (n.encode(), d) for n, d in fields]
    return b"".join(parts) + b"--x--"


FORM = "multipart/form-data; boundary=x"


def test_a_struct_is_checked_and_shown() -> None:
    hints = Hints(struct)
    assert hints.warning == ""
    said = json.loads(hints.schema)
    assert said["description"] == "What is on it."
    assert said["response"] == {"type": "object", "additionalProperties": {"type": "number"}}
    properties = said["request"]["$defs"]["Asked"]["properties"]
    assert properties["image"] == {"type": "string", "contentEncoding": "base64"}
    assert properties["top"] == {"type": "integer", "minimum": 1, "default": 5}
    assert hints.value_of(b'{"image": "YWI="}', "") == Asked(b"ab")
    file = b'--x\r\nContent-Disposition: form-data; name="image"; filename="f"\r\n\r\nab\r\n'
    assert hints.value_of(file + form(("top", b"7")), FORM) == Asked(b"ab", 7)


@pytest.mark.parametrize(
    ("body", "kind", "code", "param"),
    [
        (b'{"image": 3}', "", "invalid_request", "$.image"),
        (b'{"image": "YWI=", "top": 0}', "", "invalid_request", "$.top"),
        (b'{"image": "YWI=", "words": ["a", 2]}', "", "invalid_request", "$.words[1]"),
        (b"{}", "", "invalid_request", "$"),
        (b"[]", "", "invalid_request", "$"),
        (b"{", "", "bad_json", ""),
        (b'{"image": "YWI=", "words": ["\xff"]}', "", "bad_json", ""),
        (b'{"image": "YWI=", "other": ' + b"[" * 100_000, "", "bad_json", ""),
        (form(("top", b"x")), FORM, "invalid_request", "$.top"),
        (form(("other", b"x")), FORM, "invalid_request", "$"),
        (b"x", FORM, "bad_body", ""),
        (b"x", "image/png", "content_type", ""),
    ],
)
def test_what_is_wrong_is_said_with_its_place(body: bytes, kind: str, code: str, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Hints(struct).value_of(body, kind)
    assert (caught.value.code, caught.value.param) == (code, param)


@dataclasses.dataclass
class Data:
    a: int


class Typed(TypedDict):
    a: int


@pytest.mark.parametrize(
    ("hint", "body", "value"),
    [
        (Data, b'{"a": 1}', Data(1)),
        (Typed, b'{"a": 1}', {"a": 1}),
        ("Data", b'{"a": 1}', Data(1)),
        (dict, b'{"a": [1]}', {"a": [1]}),
        (int | None, b"null", None),
        (bytes, b'"YWI="', b"ab"),
    ],
)
def test_other_hints_are_taken(hint: Any, body: bytes, value: Any) -> None:
    def handle(state: Any, request: Any) -> None: ...

    handle.__annotations__["request"] = hint
    assert Hints(handle).value_of(body, "") == value


def test_bytes_take_any_body() -> None:
    def handle(state: Any, request: bytes) -> None: ...

    assert Hints(handle).value_of(memoryview(b"\x00"), "image/png") == b"\x00"


def test_arrays_are_checked() -> None:
    def handle(state: Any, request: np.ndarray) -> None: ...

    hints = Hints(handle)
    assert hints.warning == ""
    assert hints.value_of(b"[[1, 2]]", "").tolist() == [[1, 2]]
    for body in (b'["a"]', b"[[1], [1, 2]]", b"{}"):
        with pytest.raises(BadRequest) as caught:
            hints.value_of(body, "")
        assert caught.value.code == "invalid_request"


@pytest.mark.parametrize(
    ("dtype", "body", "held"),
    [
        (np.uint8, b"[1, 255]", [1, 255]),
        (np.uint8, b"[1, 256]", None),
        (np.uint8, b"[-1]", None),
        (np.int32, b"[1.0]", [1]),
        (np.int32, b"[1.5]", None),
        (np.int64, b"[9223372036854775808]", None),
        (np.int32, b"[1e300]", None),
        (np.bool_, b"[true, 0]", [True, False]),
        (np.bool_, b"[2]", None),
        (np.float32, b"[0.1]", [np.float32(0.1)]),
    ],
)
def test_numbers_that_an_array_cannot_hold_are_not_made_others(dtype: Any, body: bytes, held: list[Any] | None) -> None:
    def handle(state: Any, request: Any) -> None: ...

    handle.__annotations__["request"] = np.ndarray[Any, np.dtype[dtype]]
    hints = Hints(handle)
    if held is not None:
        assert hints.value_of(body, "").tolist() == held
        return
    with pytest.raises(BadRequest, match="numbers that it cannot hold") as caught:
        hints.value_of(body, "")
    assert caught.value.code == "invalid_request"


class Loud:
    def __class_getitem__(cls, item: Any) -> Any:
        raise ValueError("\ud800" + "loud " * 10_000)


def test_what_types_raise_is_said_in_short() -> None:
    def handle(state: Any, request: Any) -> None: ...

    handle.__annotations__["request"] = "Loud[int]"
    warning = Hints(handle).warning
    assert "cannot be checked (ValueError: \\ud800loud loud" in warning
    assert len(warning.encode()) < 1000


@pytest.mark.parametrize(
    "hint", [torch.nn.Module, dict[str, torch.nn.Module], "Missing", "1 +", "1 / 0", Iterator[int]]
)
def test_what_cannot_be_checked_is_said(hint: Any) -> None:
    def handle(state: Any, request: Any) -> None: ...

    handle.__annotations__["request"] = hint
    hints = Hints(handle)
    assert "the type of 'request' cannot be checked" in hints.warning
    assert hints.value_of(b'{"a": 1}', "") == {"a": 1}


def test_no_hints_check_and_say_nothing() -> None:
    def plain(state, request): ...  # type: ignore[no-untyped-def]

    def anything(state: Any, request: Any) -> Iterator[int]:
        yield 1

    for handle in (plain, anything, lambda _, request: 0, print):
        hints = Hints(handle)
        assert hints.warning == ""
        assert b'"request"' not in hints.schema
        assert hints.value_of(b"[1]", "") == [1]


def test_a_schema_that_is_too_long_is_not_shown_and_checked() -> None:
    Long = msgspec.defstruct("Long", [(f"field_{i}", int, 0) for i in range(5000)])

    def handle(state: Any, request: Any) -> None: ...

    handle.__annotations__["request"] = Long
    hints = Hints(handle)
    assert hints.schema == b""
    assert str(m.SCHEMA_NBYTES) not in hints.warning
    assert "is not shown" in hints.warning
    with pytest.raises(BadRequest):
        hints.value_of(b'{"field_1": "x"}', "")


def test_a_schema_that_is_no_json_is_not_shown_and_checked() -> None:
    Odd = msgspec.defstruct("Odd", [("text", str, "\ud800")])

    def handle(state: Any, request: Any) -> None: ...

    handle.__annotations__["request"] = Odd
    hints = Hints(handle)
    assert hints.schema == b""
    assert "is not shown" in hints.warning
    with pytest.raises(BadRequest):
        hints.value_of(b'{"text": 1}', "")


class Size(pydantic.BaseModel):
    width: Annotated[int, pydantic.Field(gt=0)]


class Drawing(pydantic.BaseModel):
    text: str = pydantic.Field(alias="Text")
    sizes: list[Size] = []
    at: datetime.date | None = None


@pydantic.dataclasses.dataclass
class Point:
    x: int = pydantic.Field(ge=0)


class Holds(msgspec.Struct):
    drawings: list[Drawing]


def _taking(hint: Any) -> Hints:
    def handle(state: Any, request: Any) -> Any: ...

    handle.__annotations__ = {"request": hint, "return": hint}
    return Hints(handle)


@pytest.mark.parametrize(
    ("hint", "body", "param", "text"),
    [
        (Drawing, b'{"Text": 3}', "$.Text", "Input should be a valid string - at `$.Text`"),
        (Drawing, b"{}", "$.Text", "Field required - at `$.Text`"),
        (Drawing, b"[]", "$", "Input should be a valid dictionary or instance of Drawing"),
        (Drawing, b'{"Text": "a", "sizes": [{"width": 1}, {"width": 0}]}', "$.sizes[1].width", "greater than 0"),
        (Drawing, b'{"sizes": 1}', "$.Text", "Field required (and 1 more)"),
        (list[Drawing], b'[{"Text": 3}]', "$[0].Text", "Input should be a valid string"),
        (Drawing | None, b"3", "$", "Drawing"),
        (Point, b'{"x": -1}', "$.x", "greater than or equal to 0"),
        (Annotated[int, pydantic.Field(le=3)], b"4", "$", "less than or equal to 3"),
        (Holds, b'{"drawings": [{"Text": 3}]}', "$.drawings[0].Text", "a valid string - at `$.drawings[0].Text`"),
    ],
)
def test_pydantics_types_are_checked_like_msgspecs(hint: Any, body: bytes, param: str, text: str) -> None:
    hints = _taking(hint)
    assert hints.warning == ""
    with pytest.raises(BadRequest) as refused:
        hints.value_of(body, "")
    assert (refused.value.code, refused.value.param) == ("invalid_request", param)
    assert text in str(refused.value)
    with pytest.raises(BadRequest) as refused:
        hints.value_of(b"{", "")
    assert refused.value.code == "bad_json"


def test_pydantics_types_are_made_shown_and_answered() -> None:
    hints = _taking(Drawing)
    made = hints.value_of(b'{"Text": "a", "sizes": [{"width": 2}], "at": "2026-01-02"}', "")
    assert made == Drawing(Text="a", sizes=[Size(width=2)], at=datetime.date(2026, 1, 2))
    assert hints.value_of(form(("Text", b"7"), ("at", b"2026-01-02")), FORM).at == datetime.date(2026, 1, 2)
    said = json.loads(hints.schema)
    assert said["request"]["required"] == ["Text"]
    assert said["request"]["properties"]["sizes"]["items"] == {"$ref": "#/$defs/Size"}
    assert said["request"]["$defs"]["Size"]["properties"]["width"]["exclusiveMinimum"] == 0
    assert said["response"]["properties"]["at"]["anyOf"][0] == {"type": "string", "format": "date"}
    assert json.loads(_taking(Holds).schema)["request"]["$defs"]["Holds"]["properties"]["drawings"]["items"] == {
        "type": "object",
        "title": "Drawing",
    }
    data, kind = hints.asked(b'{"Text": "a"}', "", "").answer([made, {"it": made}], 1000)[:2]
    plain = {"Text": "a", "sizes": [{"width": 2}], "at": "2026-01-02"}
    assert (json.loads(bytes(data)), kind) == ([plain, {"it": plain}], "")


def test_a_model_that_json_cannot_hold_is_said() -> None:
    class Measured(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        value: float = 0.0
        other: Any = None

    hints = Hints(lambda state, request: None)
    for wrong in (Measured(value=math.nan), Measured(other=object())):
        with pytest.raises(BadResponse):
            hints.asked(b"1", "", "").answer({"it": wrong}, 1000)


def test_pydantic_is_not_imported_for_functions_that_do_not() -> None:
    code = (
        "import sys; from dormouse.client_shim.instance.hints import Hints\n"
        "def handle(state, request: int) -> int: ...\n"
        "Hints(handle).value_of(b'1', ''); sys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
