"""The type hints of ``handle``: a JSON schema of its requests and answers, and a check before it is called.

Pure: no I/O. msgspec makes both, or pydantic for its own types. A hint that neither can take checks nothing, which is
reported to the deployer.
"""

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch

from dormouse.client_shim.instance import answer_bodies, codec, publicly, pydantic_types, request_bodies, signatures
from dormouse.client_shim.instance.codec import BadRequest, BadResponse
from dormouse.client_shim.instance.inference import Inference
from dormouse.client_shim.instance.pydantic_types import Invalid
from dormouse.client_shim.instance.request_bodies import RequestFile
from dormouse.client_shim.instance.signatures import Signature
from dormouse.core import answerhead
from dormouse.schemas import messages as m
from dormouse.schemas.open_inference import InferenceKind

_PATH: Final = re.compile(r" - at `\$([^`]{0,200})`(?= - at |$)", re.DOTALL)
"""There are two where a model of pydantic's is part of something: the place in it comes first."""


class AskedRequest(NamedTuple):
    """The argument of ``handle`` for a request, and the encoder of the result: a body and its content type, of at most
    so many bytes.
    """

    value: Any
    encode: Callable[[Any, int], tuple[bytes | memoryview, str]]

    def answer(self, result: Any, most_nbytes: int) -> "EncodedAnswer":
        """Raises BadResponse."""
        if (response := publicly.response_of(result)) is None:
            return EncodedAnswer(*self.encode(result, most_nbytes))
        head, body, kind = publicly.head_of(response), response.body, publicly.kind_of(response)
        if head is not None and head.status in answerhead.BODILESS:
            if body not in (None, "", b""):
                raise BadResponse(f"handle() answered with the status {head.status}, which has no body: leave it out")
            return EncodedAnswer(b"", "", head)
        if kind and isinstance(body, str):
            body = body.encode(errors="backslashreplace")
        data, own = self.encode(body, most_nbytes)
        return EncodedAnswer(data, kind or own, head)


class EncodedAnswer(NamedTuple):
    """Its body, its content type, "" for JSON, and the function's status and headers."""

    data: bytes | memoryview
    kind: str = ""
    head: m.AnswerHead | None = None


class Hints:
    """Of one function. ``warning`` is for the deployer; ``schema`` is JSON, b"" if nothing is known."""

    def __init__(self, handle: Callable[..., Any], each: bool = False, signature: Signature | None = None) -> None:
        """``each``: it takes and returns lists of them. ``signature``: its tensors as its file declares them."""
        self.schema, self.warning = b"", ""
        self._request: Any = None
        self._decoder: msgspec.json.Decoder[Any] | None = None
        self._adapter: pydantic_types.Adapter | None = None
        found, name = self._found(handle)
        if each:
            found = {key: _item(hint) for key, hint in found.items()}
        said: dict[str, Any] = {}
        if (request := found.get(name)) not in (None, Any, object, inspect.Parameter.empty):
            try:
                adapter = pydantic_types.adapter(request)
                said["request"] = _schema(request, adapter, "validation")
                if adapter is None:
                    self._decoder = msgspec.json.Decoder(request, dec_hook=_converted)
                self._request, self._adapter = request, adapter
            except Exception as error:  # user code: metaclasses and properties of its types run here
                self._warn(name, f"{error}")
        try:
            response = found["return"]
            said["response"] = _schema(response, pydantic_types.adapter(response), "serialization")
        except Exception:  # none, or a generator, or a picture: the answer is what it is
            said.pop("response", None)
        if text := inspect.getdoc(handle):
            said["description"] = text[:2000]
        self._signature = signature or signatures.hinted(self._request or Any, found.get("return", Any))
        if self._signature != Signature():
            said["tensors"] = self._signature.told()
        try:
            data = msgspec.json.encode(said) if said else b""
        except UnicodeEncodeError as error:  # of a default, or of the docstring
            self.warning = f"the schema of {name!r} is no JSON ({error}) and is not shown; requests are checked"
            return
        if len(data) <= m.SCHEMA_NBYTES:
            self.schema = data
        else:
            self.warning = f"the schema of {name!r} has {len(data)} bytes and is not shown; requests are checked"

    def _found(self, handle: Callable[..., Any]) -> tuple[dict[str, Any], str]:
        """The hints by name, and the name of the parameter for requests."""
        try:
            names = [
                each.name
                for each in inspect.signature(handle).parameters.values()
                if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
            ]
        except (TypeError, ValueError):  # a callable that says nothing of itself
            return {}, ""
        name = names[1] if len(names) > 1 else ""
        try:
            return typing.get_type_hints(handle, include_extras=True), name
        except Exception as error:  # of a name that is not there, or of the hint's own code
            if name in getattr(handle, "__annotations__", {}):
                self._warn(name, f"{type(error).__name__}: {error}")
            return {}, name

    def _warn(self, name: str, why: str) -> None:
        self.warning = (
            f"the type of {name!r} cannot be checked ({_said(why)}): handle() is given any request; use what msgspec "
            "or pydantic can take, such as a msgspec.Struct, a BaseModel, a dataclass or a TypedDict, or no type"
        )

    def asked(self, body: bytes | memoryview, kind: str, accept: str) -> AskedRequest:
        """Raises BadRequest."""
        if (inference := InferenceKind.of(kind)) is None:
            value = self.value_of(body, kind)
            return AskedRequest(value, lambda result, most_nbytes: answer_bodies.encode(result, accept, most_nbytes))
        asked = Inference(body, inference, self._signature)
        tensors: Any = asked.tensors
        if self._request is not None:
            tensors = self._checked(signatures.values(tensors, self._request))
        return AskedRequest(tensors, asked.answer)

    def value_of(self, body: bytes | memoryview, kind: str) -> Any:
        """As ``handle`` is given it, checked. Raises BadRequest."""
        if self._request is None:
            return request_bodies.value_of(body, kind)
        if request_bodies.is_json(kind):
            if self._decoder is None:
                return self._checked(codec.decode(body))
            try:
                return self._decoder.decode(body)
            except msgspec.ValidationError as error:
                raise _refused(error) from error
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                codec.decode(body)  # says what is wrong
                raise
        value = request_bodies.value_of(body, kind)
        if isinstance(value, RequestFile) and self._request not in (bytes, bytearray):
            plain = request_bodies.plain_type(kind)
            text = f"this function takes no body of type {plain}: send JSON, or a form; see its schema"
            raise BadRequest(text, "content_type")
        return self._checked(_plain(value))

    def _checked(self, plain: Any) -> Any:
        """Raises BadRequest."""
        try:
            if self._adapter is not None:
                return self._adapter.value_of(plain)
            return msgspec.convert(plain, self._request, strict=False, dec_hook=_converted)
        except (Invalid, msgspec.ValidationError) as error:
            raise _refused(error) from error


def _said(why: str) -> str:
    """Of user code, which may say anything: as it can travel."""
    return why.encode(errors="backslashreplace").decode()[:500]


def _item(hint: Any) -> Any:
    """Of a list; any other hint says nothing of items."""
    arguments = typing.get_args(hint)
    return arguments[0] if typing.get_origin(hint) in (list, Sequence, tuple) and arguments else Any


def _refused(error: Invalid | msgspec.ValidationError) -> BadRequest:
    why = _said(str(error))
    path = "$" + "".join(reversed(_PATH.findall(why)))
    text = _PATH.sub("", why) + (f" - at `{path}`" if path != "$" else "")
    return BadRequest(f"the request is not what this function takes: {text}", "invalid_request", path)


def _plain(value: Any) -> Any:
    """Files as their bytes, as types name them."""
    if isinstance(value, RequestFile):
        return value.data
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _converted(kind: type, value: Any) -> Any:
    """For types that msgspec does not know: arrays and models. Raises ValueError, which becomes a ValidationError."""
    if (adapter := pydantic_types.adapter(kind)) is not None:
        return adapter.value_of(value)
    wanted = signatures.array_hint(kind)
    if wanted is None:
        raise NotImplementedError(f"a value of type {kind.__qualname__}")
    if isinstance(value, torch.Tensor):
        if wanted.kind is not torch.Tensor:
            raise ValueError("Expected an array, got numbers of BF16, which only a torch.Tensor holds")
        return value
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if not isinstance(value, np.ndarray):
        if array.dtype.kind not in "biuf":
            raise ValueError("Expected an array of numbers")
        array = array if wanted.dtype is None else _numbers(array, wanted.dtype)
    if wanted.dtype is not None and array.dtype != wanted.dtype:
        raise ValueError(f"Expected an array of {wanted.dtype}, got {array.dtype}")
    if wanted.shape is not None and array.ndim != len(wanted.shape):
        raise ValueError(f"Expected an array of {len(wanted.shape)} dimensions, got {array.ndim}")
    if wanted.kind is not torch.Tensor:
        return array
    if array.dtype == object:
        raise ValueError("Expected a tensor of numbers")
    return torch.from_numpy(np.array(array) if not array.flags.writeable else array)


def _numbers(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Of JSON. Raises ValueError where they would become others."""
    with np.errstate(all="ignore"):
        found = array.astype(dtype)
    if dtype.kind in "biu" and not np.array_equal(found, array):
        raise ValueError(f"Expected an array of {dtype}, got numbers that it cannot hold")
    return found


def _schema(
    hint: Any, adapter: pydantic_types.Adapter | None, mode: typing.Literal["validation", "serialization"]
) -> dict[str, Any]:
    """Raises TypeError for a hint that cannot be taken, and any exception of the types' own code."""
    return adapter.schema(mode) if adapter is not None else msgspec.json.schema(hint, schema_hook=_hooked)


def _hooked(kind: type) -> dict[str, Any]:
    if signatures.array_hint(kind) is not None:
        return {"type": "array", "description": "numbers, in lists of lists; or a body of type application/x-npy"}
    if pydantic_types.fields(kind) is not None:
        return {"type": "object", "title": kind.__name__}
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is a class that cannot be made of JSON")
