"""Codec of ``handle``'s requests and responses: JSON to Python values and back. Pure.

Requests arrive unchecked: the router passes bytes on.
"""

import codecs
import math
from dataclasses import fields, is_dataclass
from typing import Any, Final

import msgspec
import numpy as np
import orjson
import torch

from dormouse.client_shim.instance import pydantic_types
from dormouse.core import notjson
from dormouse.core.quantities import sizes

EVENT_NBYTES: Final = 16 << 20
"""Of a JSON value in one event, at most."""

_STEP_NBYTES: Final = 64 << 10
_RAW: Final = msgspec.json.Decoder(msgspec.Raw)


class BadRequest(ValueError):
    """The body is not JSON, or wrong in another way, which ``code`` says; ``param`` is the part that is wrong."""

    def __init__(self, text: str, code: str = "bad_json", param: str = "") -> None:
        super().__init__(text)
        self.code, self.param = code, param


class BadResponse(TypeError):
    """The result of ``handle`` cannot be sent; the text says what to do."""


def decode(body: bytes | memoryview) -> Any:
    """Integers of any size stay exact. Raises BadRequest."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        wrong = _not_json(body)
        if wrong:
            hint = "" if "; " in wrong else "; send a JSON value"
            raise BadRequest(f"the body is not JSON: {wrong}{hint}") from error
        raise BadRequest(f"the body is not JSON that Python can hold: {error}; send a simpler value") from error


def _not_json(body: bytes | memoryview) -> str:
    """Why it is not JSON; "" if it is, and only its values cannot be made."""
    try:
        _RAW.decode(body)
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, len(body), _STEP_NBYTES):
            decoder.decode(body[start : start + _STEP_NBYTES])
        decoder.decode(b"", final=True)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return notjson.cause(body, str(error))
    except RecursionError:
        return "it is nested too deeply"
    return ""


def encode(value: Any, limit_nbytes: int) -> bytes:
    """JSON text of the value that ``handle`` returned; arrays become lists. Raises BadResponse.

    JSON has no NaN and no infinity. The encoder writes them as null, which would be a wrong answer, so they are looked
    for where there is a null.
    """
    try:
        data = _dumps(value)
        finite = b"null" not in data or _finite(value)
    except (TypeError, RecursionError, UnicodeEncodeError) as error:
        if isinstance(error, BadResponse):
            raise
        if isinstance(error.__cause__, BadResponse):
            raise error.__cause__ from None
        raise BadResponse(f"handle() returned something that is not JSON: {_cure(error)}") from error
    if not finite:
        raise BadResponse("handle() returned NaN or infinity, which JSON cannot say: return None or a string for it")
    if len(data) > limit_nbytes:
        raise BadResponse(too_long(len(data), limit_nbytes, " of JSON"))
    return data


def too_long(nbytes: int, limit_nbytes: int, what: str = "") -> str:
    has, most = sizes(nbytes, limit_nbytes)
    return f"handle() returned {has}{what}; at most {most} fit: return less, or raise [limits] response"


def event(value: Any) -> bytes:
    """One server-sent event: text as it is, line by line, everything else as JSON. Raises BadResponse."""
    if isinstance(value, str):
        try:
            data = value.encode()
        except UnicodeEncodeError as error:
            raise BadResponse(f"handle() yielded text that is not Unicode: {error}: yield whole characters") from error
        lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    else:
        lines = [encode(value, EVENT_NBYTES)]
    return b"".join(b"data: %b\n" % line for line in lines) + b"\n"


def _cure(error: Exception) -> str:
    """The encoder's reason in the words of a user, and the way out."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or contains itself: return a flat value"
    if isinstance(error, UnicodeEncodeError) or "surrogates" in str(error):
        return "a text in it is not Unicode (it has a lone surrogate): decode bytes with errors='replace'"
    if "Dict key" in str(error):
        return "a dict has a key that is neither text nor a number: make the keys strings"
    if "64-bit" in str(error):
        return "a number in it has more than 64 bits: return it as a string"
    return f"{error}: return dicts, lists, strings, and numbers of at most 64 bits"


def _dumps(value: Any) -> bytes:
    """A decoded value can be encoded again: the fast encoder stops at 254 levels, the decoder of requests does not."""
    try:
        return orjson.dumps(value, _convert, orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    except TypeError as error:
        if "Recursion limit" not in str(error):
            raise
        return msgspec.json.encode(value, enc_hook=_convert)


def _finite(value: Any) -> bool:
    """Whether no float in it is NaN or infinite; for values that the encoder takes. They may be nested deeply."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                return False
        elif isinstance(item, dict):
            todo.extend((*item, *item.values()))
        elif isinstance(item, list | tuple):
            todo.extend(item)
        elif isinstance(item, np.ndarray | np.generic):
            if item.dtype.kind == "f" and not np.isfinite(item).all():
                return False
        elif is_dataclass(item):
            todo.extend(getattr(item, field.name) for field in fields(item))
        elif (plain := pydantic_types.plain(item)) is not None:
            todo.append(plain)
    return True


def _convert(value: Any) -> Any:
    """Called for a value that is neither JSON nor an array that can be read in place."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, torch.Tensor):
        advice = "call .item() on it" if value.numel() == 1 else "call .tolist() on it"
        raise BadResponse(f"handle() returned a tensor of shape {tuple(value.shape)}, which is not JSON: {advice}")
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    try:
        if (plain := pydantic_types.plain(value)) is not None:
            return plain
    except ValueError as error:
        raise BadResponse(f"handle() returned a {kind}, which is not JSON: {error}") from error
    raise BadResponse(
        f"handle() returned a value of type {kind}, which is not JSON: return dicts, lists, strings and numbers"
    )
