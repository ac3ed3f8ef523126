"""Codec of the Open Inference Protocol: requests and answers are JSON, then the bytes of binary tensors. Pure: no I/O.

Requests arrive unchecked. A tensor is an array of NumPy; of BF16, which NumPy does not have, a tensor of PyTorch; of
BYTES, an array of ``bytes`` objects.
"""

import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final

import msgspec
import numpy as np
import orjson
import torch

from dormouse.client_shim.instance import codec, signatures
from dormouse.client_shim.instance.codec import BadResponse
from dormouse.client_shim.instance.signatures import BF16, BYTES, NAMES, NUMBERS, Signature, Tensors, TensorSpec, wrong
from dormouse.core.quantities import size
from dormouse.schemas.open_inference import ALL, InferenceKind, InferredKind

MAX_TENSORS: Final = 1000

MAX_ELEMENTS: Final = (1 << 60) - 1
"""Of a shape: NumPy makes no array whose lengths other than 0, of eight bytes each, come to more than 2^63 - 1."""

_UNSUPPORTED: Final = ("shared_memory_region", "classification")


class SentTensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class WantedOutput(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class InferenceRequest(msgspec.Struct):
    """The JSON of one."""

    inputs: list[SentTensor]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[WantedOutput] = []


_DECODER: Final = msgspec.json.Decoder(InferenceRequest)


class Inference:
    """One request, with its tensors, and how it is answered. ``signature`` is its function's. Raises BadRequest."""

    def __init__(self, body: bytes | memoryview, kind: InferenceKind, signature: Signature) -> None:
        self._kind, self._signature = kind, signature
        whole = memoryview(body) if not kind.encoding else memoryview(_unpacked(body, kind))
        if kind.header > len(whole):
            raise wrong(f"Inference-Header-Content-Length is {kind.header}, and the body has {len(whole)} bytes")
        if kind.header == 0:
            self._asked = InferenceRequest([], parameters={"binary_data_output": True})
            self.tensors = self._raw(whole)
        else:
            json = whole if kind.header == ALL else whole[: kind.header]
            self._asked = _asked(json)
            self.tensors = _tensors(self._asked, whole[len(json) :])
        for output in self._asked.outputs:
            _supported(output.name, output.parameters)
            if signature.outputs is not None and output.name not in signature.outputs:
                raise wrong(f"unexpected inference output {output.name[:100]!r} for model {kind.model!r}")
        signature.check(kind.model, self.tensors)

    def _raw(self, data: memoryview) -> Tensors:
        """All of the body is the only input."""
        specs = list((self._signature.inputs or {}).values())
        if len(specs) != 1 or not specs[0].datatype or specs[0].shape is None:
            text = f"model {self._kind.model!r} does not say that it has one input, of which datatype and shape: send"
            raise wrong(f"{text} JSON before the tensor, and its length as Inference-Header-Content-Length")
        name, datatype, shape, _ = specs[0]
        assert shape is not None
        if datatype == BYTES:
            return {name: _bytes([bytes(data)], [1])}
        size, left = divmod(len(data), 2 if datatype == BF16 else NUMBERS[datatype].itemsize)
        known = math.prod(each for each in shape if each != -1)
        if left or shape.count(-1) > 1 or (shape.count(-1) == 1 and (not known or size % known)):
            raise wrong(
                f"the body has {len(data)} bytes, of which no {datatype} of the shape {list(shape)} can be made"
            )
        found = [size // known if each == -1 else each for each in shape]
        return {name: _of_bytes(name, datatype, found, data)}

    # --- its answer

    def answer(self, result: Any, limit_nbytes: int) -> tuple[bytes | memoryview, str]:
        """The body and its kind. Raises BadResponse."""
        outputs = {name: self._output(name, value) for name, value in self._named(result).items()}
        wanted = {each.name: each.parameters for each in self._asked.outputs} or {name: {} for name in outputs}
        if missing := [name for name in wanted if name not in outputs]:
            text = f"unexpected inference output {missing[0][:100]!r} for model {self._kind.model!r}, which gives"
            raise wrong(f"{text} {', '.join(list(outputs)[:10]) or 'none'}")
        always = self._asked.parameters.get("binary_data_output", False)
        told, pieces = [], []
        for name, parameters in wanted.items():
            array = outputs[name]
            one: dict[str, Any] = {"name": name, "datatype": signatures.datatype_of(array), "shape": list(array.shape)}
            if parameters.get("binary_data", always) is True:
                pieces.append(_to_bytes(array))
                one["parameters"] = {"binary_data_size": len(pieces[-1])}
            else:
                one["data"] = _to_json(name, array)
            told.append(one)
        said = {"model_name": self._kind.model, "model_version": str(self._kind.version), "id": self._asked.id}
        try:
            json = orjson.dumps(said | {"outputs": told}, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise BadResponse(f"handle() returned outputs with names that are no Unicode: {error}") from error
        nbytes = len(json) + sum(map(len, pieces))
        if nbytes > limit_nbytes:
            raise BadResponse(codec.too_long(nbytes, limit_nbytes))
        body = b"".join([json, *pieces])
        if self._kind.accept:
            body = _packed(body, self._kind.accept)
        return body, str(InferredKind(len(json) if pieces else ALL, self._kind.accept))

    def _named(self, result: Any) -> Mapping[str, Any]:
        if isinstance(result, Mapping):
            if not all(isinstance(name, str) for name in result):
                raise BadResponse("handle() returned a dict with keys that are no text: name each output")
            return result
        if isinstance(result, msgspec.Struct):
            return {name: getattr(result, name) for name in result.__struct_fields__}
        if is_dataclass(result) and not isinstance(result, type):
            return {each.name: getattr(result, each.name) for each in fields(result)}
        if hasattr(result, "_asdict"):
            return dict(result._asdict())
        known = list(self._signature.outputs or ())
        return {known[0] if len(known) == 1 else signatures.SOLE_OUTPUT: result}

    def _output(self, name: str, value: Any) -> np.ndarray | torch.Tensor:
        spec = (self._signature.outputs or {}).get(name) if self._signature.strict else None
        if self._signature.strict and self._signature.outputs is not None and spec is None:
            known = ", ".join(self._signature.outputs)
            raise BadResponse(f"handle() returned {name[:100]!r}, which its signature does not have: it has {known}")
        array = _array(name, value, spec)
        if spec is not None and (signatures.datatype_of(array) != spec.datatype or not spec.takes(array.shape)):
            found = f"{signatures.datatype_of(array)} of the shape {list(array.shape)}"
            said = f"{spec.datatype} {list(spec.shape or ())}"
            raise BadResponse(f"handle() returned {found} as {name!r}, of which its signature says {said}")
        return array


# --- requests


def _unpacked(body: bytes | memoryview, kind: InferenceKind) -> bytes:
    machine = zlib.decompressobj(31 if kind.encoding == "gzip" else 15)
    try:
        whole = machine.decompress(body, kind.most + 1)
    except zlib.error as error:
        raise wrong(f"the body is not {kind.encoding}, as Content-Encoding says: {error}") from None
    if len(whole) > kind.most:
        raise wrong(f"the body has more than {size(kind.most)} when it is unpacked (limits.body); send less")
    if not machine.eof or machine.unused_data:
        raise wrong(f"the body is not {kind.encoding}, as Content-Encoding says: it does not end where it should")
    return whole


def _asked(json: memoryview) -> InferenceRequest:
    try:
        asked = _DECODER.decode(json)
    except msgspec.ValidationError as error:
        raise wrong(f"the request is not one of the Open Inference Protocol: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        codec.decode(json)  # says what is wrong
        raise
    if len(asked.inputs) > MAX_TENSORS or len(asked.outputs) > MAX_TENSORS:
        raise wrong(f"a request may have {MAX_TENSORS} inputs and outputs")
    for what, tensors in (("input", asked.inputs), ("output", asked.outputs)):
        names = [each.name for each in tensors]
        if len(set(names)) != len(names):
            raise wrong(f"an {what} stands twice in the request; send each once")
    return asked


def _supported(name: str, parameters: Mapping[str, Any]) -> None:
    if found := [each for each in _UNSUPPORTED if each in parameters]:
        raise wrong(f"{name[:100]!r} has the parameter {found[0]!r}, which this node does not know; leave it out")


def _tensors(asked: InferenceRequest, rest: memoryview) -> Tensors:
    tensors: Tensors = {}
    start = 0
    for each in asked.inputs:
        _supported(each.name, each.parameters)
        if each.datatype not in signatures.DATATYPES:
            text = f"input {each.name[:100]!r} is of the datatype {each.datatype[:20]!r}; there are"
            raise wrong(f"{text} {', '.join(signatures.DATATYPES)}")
        if len(each.shape) > 32 or any(not 0 <= length <= MAX_ELEMENTS for length in each.shape):
            raise wrong(f"input {each.name[:100]!r} has a shape that is none: {str(each.shape)[:400]}")
        if math.prod(length or 1 for length in each.shape) > MAX_ELEMENTS:  # NumPy counts so, also where one is 0
            raise wrong(f"input {each.name[:100]!r} has a shape of too many elements: {str(each.shape)[:400]}")
        nbytes = each.parameters.get("binary_data_size")
        if (nbytes is None) is (each.data is msgspec.UNSET):
            raise wrong(f"input {each.name[:100]!r} is to have either data or a binary_data_size")
        if nbytes is None:
            assert isinstance(each.data, msgspec.Raw)
            tensors[each.name] = _of_json(each.name, each.datatype, each.shape, each.data)
            continue
        if type(nbytes) is not int or not 0 <= nbytes <= len(rest) - start:
            text = f"input {each.name[:100]!r} has a binary_data_size of {str(nbytes)[:40]}, and"
            raise wrong(f"{text} {len(rest) - start} bytes are left of the body")
        tensors[each.name] = _of_bytes(each.name, each.datatype, each.shape, rest[start : start + nbytes])
        start += nbytes
    if start != len(rest):
        raise wrong(f"unexpected additional input data: {len(rest) - start} bytes after the last binary tensor")
    return tensors


def _of_bytes(name: str, datatype: str, shape: Sequence[int], data: memoryview) -> np.ndarray | torch.Tensor:
    """A copy: the next request comes to where these bytes are."""
    if datatype == BYTES:
        return _bytes(_elements(name, data, math.prod(shape)), shape)
    dtype = np.dtype("<i2") if datatype == BF16 else NUMBERS[datatype]
    if math.prod(shape) * dtype.itemsize != len(data):
        text = f"input {name[:100]!r} has {len(data)} bytes, and {datatype} of the shape {list(shape)} has"
        raise wrong(f"{text} {math.prod(shape) * dtype.itemsize}")
    array = np.frombuffer(data, dtype)
    if datatype == "BOOL" and array.view(np.uint8).max(initial=0) > 1:
        raise wrong(f"input {name[:100]!r} has a byte that is no BOOL: they are 0 and 1")
    copy = array.reshape(shape).copy()
    return torch.from_numpy(copy).view(torch.bfloat16) if datatype == BF16 else copy


def _elements(name: str, data: memoryview, count: int) -> list[bytes]:
    elements: list[bytes] = []
    start = 0
    while start < len(data):
        end = start + 4
        end += struct.unpack_from("<I", data, start)[0] if end <= len(data) else 0
        if end > len(data) or len(elements) == count:
            break
        elements.append(bytes(data[start + 4 : end]))
        start = end
    if start != len(data) or len(elements) != count:
        text = (
            f"input {name[:100]!r} is to have {count} elements of BYTES, each its length in four bytes and then so many"
        )
        raise wrong(f"{text}; its {len(data)} bytes are not that")
    return elements


def _bytes(elements: list[bytes], shape: Sequence[int]) -> np.ndarray:
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array.reshape(shape)


def _of_json(name: str, datatype: str, shape: Sequence[int], raw: msgspec.Raw) -> np.ndarray | torch.Tensor:
    """Flat, or nested as its shape says."""
    value, count = codec.decode(memoryview(raw)), math.prod(shape)
    try:
        found = np.array(value, dtype=object) if datatype == BYTES else np.asarray(value)
    except ValueError:
        raise wrong(f"the data of input {name[:100]!r} is not in even rows") from None
    if found.size != count or (found.shape != (count,) and found.shape != tuple(shape)):
        text = f"the data of input {name[:100]!r} has the shape {list(found.shape)}, and its shape is to be"
        raise wrong(f"{text} {list(shape)}")
    if datatype == BYTES:
        if not all(isinstance(each, str) for each in found.ravel()):
            raise wrong(f"the data of input {name[:100]!r}, of BYTES, is to be text")
        return _bytes([each.encode() for each in found.ravel()], shape)
    dtype = np.dtype("<f4") if datatype == BF16 else NUMBERS[datatype]
    kinds = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[dtype.kind]
    if dtype == np.uint64 and found.dtype.kind == "f":  # so NumPy has integers of which only some are so large
        found = np.array(value, dtype=object)
        found = (
            found.astype(dtype) if all(type(each) is int and 0 <= each < 1 << 64 for each in found.ravel()) else found
        )
    with np.errstate(all="ignore"):
        array = found.astype(dtype) if found.dtype.kind in kinds or not count else None
    if array is None or (dtype.kind in "iu" and not np.array_equal(array, found)):
        raise wrong(f"the data of input {name[:100]!r} has values that are not {datatype}")
    array = array.reshape(shape)
    return torch.from_numpy(array).to(torch.bfloat16) if datatype == BF16 else array


# --- answers


def _array(name: str, value: Any, spec: TensorSpec | None) -> np.ndarray | torch.Tensor:
    """Numbers of Python, and lists of them, become arrays of the signature's type. Raises BadResponse."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        if tensor.dtype == torch.bfloat16:
            return tensor.contiguous()
        try:
            value = tensor.numpy()
        except TypeError as error:
            raise BadResponse(f"handle() returned a tensor as {name!r} that has no datatype here: {error}") from error
    if not isinstance(value, np.ndarray | np.generic):
        value = _of_python(name, value, spec)
        if spec is not None and spec.datatype == BF16:
            return torch.from_numpy(np.atleast_1d(value)).to(torch.bfloat16)
    array = np.atleast_1d(np.asarray(value)) if np.ndim(value) == 0 else np.asarray(value)
    if array.dtype.kind in "OSU":
        return _bytes([_element(name, each) for each in array.ravel()], array.shape)
    if (datatype := NAMES.get(array.dtype.newbyteorder("<"))) is None:
        raise BadResponse(f"handle() returned an array of {array.dtype} as {name!r}: return numbers, text or bytes")
    return np.ascontiguousarray(array, NUMBERS[datatype])


def _of_python(name: str, value: Any, spec: TensorSpec | None) -> Any:
    text = isinstance(value, str | bytes)
    try:
        if text or (spec is not None and spec.datatype == BYTES) or _has_text(value):
            return np.array(value, dtype=object)
        if spec is not None and spec.datatype == BF16:
            return np.asarray(value, dtype=np.float32)
        found = np.asarray(value, dtype=None if spec is None else NUMBERS[spec.datatype])
        if spec is not None and found.dtype.kind in "biu" and not np.array_equal(found, np.asarray(value)):
            raise ValueError(f"it has numbers that are not {spec.datatype}")
        return found
    except (TypeError, ValueError, OverflowError) as error:
        raise BadResponse(f"handle() returned something as {name!r} that is no array: {error}") from error


def _has_text(value: Any) -> bool:
    """Whether the first thing in its lists is text: NumPy would cut zeros off."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, str | bytes)


def _element(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    raise BadResponse(
        f"handle() returned a {type(value).__name__} in {name!r}: return arrays of numbers, text or bytes"
    )


def _to_bytes(array: np.ndarray | torch.Tensor) -> memoryview:
    if isinstance(array, torch.Tensor):
        array = array.view(torch.int16).numpy()
    if array.dtype == object:
        return memoryview(b"".join(_prefixed(array.ravel())))
    return array.reshape(-1).view(np.uint8).data


def _prefixed(elements: Iterable[bytes]) -> Iterable[bytes]:
    for each in elements:
        yield struct.pack("<I", len(each))
        yield each


def _to_json(name: str, array: np.ndarray | torch.Tensor) -> Any:
    """Flat. Raises BadResponse."""
    if isinstance(array, torch.Tensor):
        array = array.float().numpy()
    if array.dtype == object:
        try:
            return [str(each, "utf-8") for each in array.ravel()]
        except UnicodeDecodeError as error:
            raise BadResponse(f"{name!r} has bytes that are no text: ask for it with binary_data: {error}") from error
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise BadResponse(f"{name!r} has NaN or infinity, which JSON cannot say: ask for it with binary_data")
    return array.ravel() if array.dtype.itemsize > 2 else array.ravel().tolist()


def _packed(body: bytes, encoding: str) -> bytes:
    machine = zlib.compressobj(1, wbits=31 if encoding == "gzip" else 15)
    return machine.compress(body) + machine.flush()
