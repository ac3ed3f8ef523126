"""Encodes a value that ``handle`` returned: the answer's body and its content type. Pure: no I/O.

Bytes go as they are, pictures as PNG or in the format that the client prefers, arrays as ``numpy.save`` writes them if
the client wants that; all else is JSON.
"""

import io
import re
import sys
from typing import Any, Final

import numpy as np

from dormouse.client_shim.instance import codec
from dormouse.client_shim.instance.codec import BadResponse
from dormouse.client_shim.instance.request_bodies import NPY, plain_type

OCTETS: Final = "application/octet-stream"

PNG: Final = "image/png"
PICTURES: Final = {PNG: "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
"""The picture formats that the node writes: the first one, unless the client names another."""

TYPE: Final = re.compile(r"[\w.+-]{1,60}/[\w.+-]{1,60}( *; *[\w.-]{1,40}=[\w.+-]{1,80}){0,4}", re.ASCII)


def encode(value: Any, accept: str, limit_nbytes: int) -> tuple[bytes | memoryview, str]:
    """The body and its content type, "" for JSON. Raises BadResponse."""
    data, kind = _encoded(value, accept)
    if data is None:
        return codec.encode(value, limit_nbytes), ""
    if len(data) > limit_nbytes:
        raise BadResponse(codec.too_long(len(data), limit_nbytes))
    return data, kind


def _encoded(value: Any, accept: str) -> tuple[bytes | memoryview | None, str]:
    """None for a value that is JSON."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        if isinstance(value[0], bytes | bytearray | memoryview):
            if not TYPE.fullmatch(value[1]):
                raise BadResponse(f"handle() returned bytes of type {value[1][:80]!r}: name one such as 'image/png'")
            return plain_bytes(value[0]), value[1]
        if _is_picture(value[0]):
            return _picture(value[0], plain_type(value[1])), plain_type(value[1])
    if isinstance(value, bytes | bytearray | memoryview):
        return plain_bytes(value), OCTETS
    wanted = [plain_type(each) for each in accept.split(",")]
    if _is_picture(value):
        kind = next((each for each in wanted if each in PICTURES), PNG)
        try:
            return _picture(value, kind), kind
        except BadResponse:
            if kind == PNG:
                raise
            return _picture(value, PNG), PNG  # the client's preference is no mistake of the function
    if isinstance(value, np.ndarray) and NPY in wanted:
        return _array(value), NPY
    return None, ""


def plain_bytes(value: bytes | bytearray | memoryview) -> memoryview:
    """One by one, whatever a view's items and their order are."""
    view = memoryview(value)
    try:
        return view.cast("B")
    except (TypeError, ValueError):
        return memoryview(view.tobytes())


def _is_picture(value: Any) -> bool:
    """A program with a picture has imported PIL."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def _picture(value: Any, kind: str) -> bytes:
    if kind not in PICTURES:
        names = ", ".join(PICTURES)
        raise BadResponse(f"handle() returned a picture of type {kind[:80]!r}: name one of {names}, or return bytes")
    file = io.BytesIO()
    try:
        value.save(file, PICTURES[kind])
    except (OSError, ValueError, SystemError) as error:  # one with transparency is no JPEG, a large one no WEBP
        raise BadResponse(f"handle() returned a picture that cannot be {kind}: {error}: convert it first") from error
    return file.getvalue()


def _array(value: np.ndarray) -> bytes:
    if value.dtype.hasobject:
        raise BadResponse("handle() returned an array of Python objects: return an array of numbers")
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    return file.getvalue()
