"""Decodes a request's body to the argument of ``handle``, by its content type. Pure: no I/O.

JSON is a value, a form its fields, a saved array an array; all else is bytes that know their type. Bodies arrive
unchecked.
"""

import ast
import ctypes
import math
import mmap
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dormouse.client_shim.instance import codec
from dormouse.client_shim.instance.codec import BadRequest
from dormouse.client_shim.instance.dispositions import BadPart, charset

NPY: Final = "application/x-npy"
"""An array as ``numpy.save`` writes it."""

LARGE_NBYTES: Final = 4 << 20
"""From here on, pages make a difference, and there are some large ones among them."""

_libc: Final = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_AS_JSON: Final = ("", "application/json", "application/x-www-form-urlencoded")
"""The last is curl's default for anything that it sends."""


@dataclass(slots=True)
class RequestFile:
    """A file of a request: its bytes, and the client's description of them; ``filename`` is "" if it sent none.

    No subclass of bytes: Python would copy the bytes twice to make one.
    """

    data: bytes
    filename: str = ""
    content_type: str = ""


def is_json(kind: str) -> bool:
    """Whether a body of this content type is read as JSON."""
    plain = plain_type(kind)
    return plain in _AS_JSON or plain.endswith("+json")


def plain_type(kind: str) -> str:
    """Without parameters."""
    return kind.partition(";")[0].strip().lower()


def value_of(body: bytes | memoryview, kind: str) -> Any:
    """Of a body that is not JSON, too. Raises BadRequest."""
    if is_json(kind):
        return codec.decode(body)
    plain = plain_type(kind)
    if plain == "multipart/form-data":
        return _fields(memoryview(body), kind)
    if plain == NPY:
        return array_of(memoryview(body))
    return RequestFile(_copied(body), content_type=kind)


def _copied(data: bytes | memoryview) -> bytes:
    """The same bytes; for many, a third of the time, because they come to lie in large pages. NumPy does so, too."""
    nbytes = len(data)
    if nbytes < LARGE_NBYTES or not isinstance(data, memoryview) or data.readonly:
        return bytes(data)
    copy = bytes(nbytes)  # so many zeros are not written, and nobody has seen them
    start = id(copy) + bytes.__basicsize__ - 1
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(first, end - first, mmap.MADV_HUGEPAGE)
    ctypes.memmove(start, (ctypes.c_char * nbytes).from_buffer(data), nbytes)
    return copy


def _fields(body: memoryview, kind: str) -> dict[str, Any]:
    """By name; those that come more than once are a list."""
    try:
        from dormouse.client_shim.instance import multipart
    except ModuleNotFoundError as error:
        text = f"the Python of this node's functions cannot read forms: {error}; install python-multipart into it"
        raise codec.BadResponse(text) from error
    fields: dict[str, Any] = {}
    try:
        for part in multipart.parts(body, kind):
            value: Any
            if part.filename is not None:
                value = RequestFile(_copied(part.data), part.filename, part.kind)
            elif plain_type(part.kind) == "application/json":
                value = codec.decode(part.data)
            else:
                value = str(part.data, charset(part.kind.encode("latin-1")))
            if part.name in fields:
                before = fields[part.name]
                value = [*before, value] if isinstance(before, _Several) else [before, value]
                value = _Several(value)
            fields[part.name] = value
    except (multipart.BadMultipart, BadPart) as error:
        raise BadRequest(f"the body is not multipart/form-data: {error}", "bad_body") from error
    except UnicodeDecodeError as error:
        text = (
            f"a field of the form is not {error.encoding.upper()}: {error}; send bytes as a file (curl: -F name=@FILE)"
        )
        raise BadRequest(text, "bad_body") from error
    return fields


class _Several(list[Any]):
    """Values of a field that came more than once: a JSON array that came once is none of these."""


def array_of(body: memoryview) -> np.ndarray:
    """An array that ``numpy.save`` has written: nothing in it is unpickled. Raises BadRequest."""
    try:
        dtype, shape, order, start = _header(body)
        nbytes = math.prod(shape) * dtype.itemsize
        if start + nbytes != len(body):
            raise ValueError(f"{nbytes} bytes are announced and {len(body) - start} are there")
        return np.frombuffer(body[start:], dtype).reshape(shape, order=order).copy(order="K")
    except ValueError as error:
        raise BadRequest(f"the body is no array as numpy.save writes it: {error}", "bad_body") from error


def _header(body: memoryview) -> tuple[np.dtype[Any], tuple[int, ...], Any, int]:
    """Its dtype, shape and order, and where its data begins; the format is NEP 1's. Raises ValueError."""
    if bytes(body[:6]) != b"\x93NUMPY" or len(body) < 12 or body[6] not in (1, 2, 3):
        raise ValueError("it does not begin as one does")
    wide = body[6] > 1
    start = 12 if wide else 10
    end = start + int.from_bytes(body[8:start], "little")
    if not end <= len(body) or end - start > 10_000:  # NumPy reads no longer ones either
        raise ValueError("its header is not whole, or too long")
    try:
        said = ast.literal_eval(bytes(body[start:end]).decode("latin-1"))
        dtype, shape, fortran = np.dtype(said["descr"]), said["shape"], said["fortran_order"]
    except (SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise ValueError("its header is not one") from error
    if not isinstance(shape, tuple) or not all(type(each) is int and each >= 0 for each in shape):
        raise ValueError("its shape is not one")
    if dtype.hasobject or dtype.itemsize == 0:
        raise ValueError("its items are no numbers")
    return dtype, shape, "F" if fortran else "C", end
