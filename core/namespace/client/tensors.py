"""Arrays by the Open Inference Protocol's binary tensors: pure. Callers with arrays have numpy."""

import json
import struct
import sys
from collections.abc import Mapping
from math import prod
from typing import Any, Final
from urllib.parse import quote

import numpy as np

from dormouse.client.errors import BadAnswer
from dormouse.client.wire import HttpReply, ToSend

_LENGTH: Final = "inference-header-content-length"

_NUMBERS: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype("?"),
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}
_NAMES: Final = {dtype: name for name, dtype in _NUMBERS.items()}


def sent(function: str, tensors: Mapping[str, Any], outputs: list[str] | None, headers: Mapping[str, str]) -> ToSend:
    """Raises TypeError, ValueError."""
    inputs, pieces = [], []
    for name, value in tensors.items():
        datatype, shape, data = _written(name, value)
        parameters = {"binary_data_size": len(data)}
        inputs.append({"name": name, "shape": list(shape), "datatype": datatype, "parameters": parameters})
        pieces.append(data)
    asked: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    if outputs is not None:
        asked["outputs"] = [{"name": name} for name in outputs]
    head = json.dumps(asked).encode()
    said = {"Content-Type": "application/octet-stream", _LENGTH: str(len(head)), **headers}
    return ToSend("POST", f"/v2/models/{quote(function, safe='')}/infer", said, b"".join([head, *pieces]))


def _written(name: str, value: Any) -> tuple[str, tuple[int, ...], bytes | memoryview]:
    torch = sys.modules.get("torch")  # a caller with a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        if value.dtype == torch.bfloat16:
            return "BF16", tuple(value.shape), value.view(torch.int16).numpy().tobytes()
        value = value.numpy()
    if isinstance(value, str | bytes):
        value = np.array([value], dtype=object)
    elif isinstance(value, list | tuple) and value and all(isinstance(each, str | bytes) for each in value):
        value = np.array(value, dtype=object)
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        return "BYTES", array.shape, b"".join(_prefixed(name, each) for each in array.ravel())
    if (datatype := _NAMES.get(array.dtype.newbyteorder("<"))) is None:
        raise TypeError(f"{name!r} is an array of {array.dtype}: give numbers, text or bytes")
    shape = array.shape
    return datatype, shape, np.ascontiguousarray(array, _NUMBERS[datatype]).reshape(-1).view(np.uint8).data


def _prefixed(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes):
        raise TypeError(f"{name!r} has a {type(value).__name__} in it: give numbers, text or bytes")
    return struct.pack("<I", len(value)) + value


def decoded(reply: HttpReply) -> dict[str, Any]:
    """By name: arrays, of BYTES arrays of ``bytes`` objects, of BF16 torch.Tensors. Raises BadAnswer."""
    try:
        length = int(reply.headers.get(_LENGTH, len(reply.content)))
        data = memoryview(reply.content)
        if not 0 <= length <= len(data):
            raise ValueError(f"its JSON is to have {length} bytes, and {len(data)} came")
        said, start, found = json.loads(reply.content[:length])["outputs"], length, {}
        for each in said:
            nbytes = each["parameters"]["binary_data_size"]
            if not 0 <= nbytes <= len(data) - start:
                raise ValueError(f"{each['name']!r} is to have {nbytes} bytes, and {len(data) - start} are left")
            piece = data[start : start + nbytes]
            start += nbytes
            found[each["name"]] = _read(each["datatype"], each["shape"], piece)
        if start != len(data):
            raise ValueError(f"{len(data)} bytes came, and {start} were announced")
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, struct.error) as error:
        raise BadAnswer(f"the answer is none of the Open Inference Protocol: {error}") from error
    return found


def _read(datatype: str, shape: list[int], data: memoryview) -> Any:
    if datatype == "BYTES":
        if 4 * prod(shape) > len(data):
            raise ValueError("its BYTES are not as many as its shape says")
        array = np.empty(prod(shape), dtype=object)
        start = 0
        for number in range(len(array)):
            (nbytes,) = struct.unpack_from("<I", data, start)
            array[number] = bytes(data[start + 4 : start + 4 + nbytes])
            start += 4 + nbytes
        if start != len(data):
            raise ValueError("its BYTES are not as many as its shape says")
        return array.reshape(shape)
    if datatype == "BF16":
        torch = sys.modules.get("torch")
        if torch is None:
            raise ValueError("it has BF16, of which NumPy has no arrays: import torch first, to have it as a tensor")
        return torch.from_numpy(np.frombuffer(bytearray(data), "<i2").reshape(shape)).view(torch.bfloat16)
    return np.frombuffer(bytearray(data), _NUMBERS[datatype]).reshape(shape)
