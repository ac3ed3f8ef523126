"""Schemas of functions over HTTP: that of one, and an OpenAPI document of all that a caller may use.

Pure. An instance makes its schema; it may be hostile, so the schema is read here as any input is.
"""

import base64
import hashlib
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from dormouse.core.decisions.requests import failures, queueing, splits
from dormouse.core.decisions.requests.state import RouterState, ServedFunction
from dormouse.core.names import base_of
from dormouse.core.version import package_version
from dormouse.router.access import tenancy
from dormouse.router.access.access import Caller
from dormouse.router.front.exchange import HttpError
from dormouse.schemas.llm import DefaultSampling

MAX_LEVELS: Final = 64
"""Of a schema: beyond any function's own types, and far from Python's limit."""

_REF: Final = "#/$defs/"


def page_policy(page: bytes) -> bytes:
    """A content security policy: of what the page has in it, only its own script and style run, and it talks to this
    node alone.
    """
    parts = [b"default-src 'none'", b"connect-src 'self'", b"img-src blob:", b"base-uri 'none'", b"form-action 'none'"]
    for kind in (b"script", b"style"):
        text = page.partition(b"<%b>" % kind)[2].partition(b"</%b>" % kind)[0]
        parts.append(b"%b-src 'sha256-%b'" % (kind, base64.b64encode(hashlib.sha256(text).digest())))
    return b"; ".join([*parts, b"frame-ancestors 'none'"])


def schema_of(p: RouterState, caller: Caller, name: str) -> dict[str, Any]:
    """Of one function's requests, its answers, or neither. Raises HttpError."""
    name = splits.named(p, name)
    if not tenancy.serves(caller, p, name):
        raise HttpError(queueing.absent(p, name))
    function = p.functions[name]
    if function.schema is None and function.spec.llm is None:
        raise HttpError(failures.not_loaded(name, function.failure) if function.failure else failures.loading(name))
    return {"name": name, "version": function.spec.version, **said_of(function)}


def said_of(function: ServedFunction) -> dict[str, Any]:
    """The well-formed part of the schema that its instance has sent."""
    return said_in(function.schema)


def said_in(schema: bytes | None) -> dict[str, Any]:
    try:
        said = orjson.loads(schema or b"{}")  # all that it reads, it can write: no integers of any size
    except ValueError:
        return {}
    if not isinstance(said, dict):
        return {}
    found = {key: said[key] for key in ("request", "response") if isinstance(said.get(key), dict)}
    if any(_levels(each, MAX_LEVELS) > MAX_LEVELS for each in found.values()):
        return {}
    if _tensors(tensors := said.get("tensors")):
        found["tensors"] = tensors
    with suppress(msgspec.ValidationError):
        if "sampling" in said:
            found["sampling"] = msgspec.to_builtins(msgspec.convert(said["sampling"], DefaultSampling))
    text = said.get("description")
    return found | ({"description": text[:2000]} if isinstance(text, str) else {})


def _tensors(said: Any) -> bool:
    """Whether it has the Open Inference Protocol's form of tensors."""
    if not isinstance(said, dict) or said.keys() != {"inputs", "outputs"}:
        return False
    return all(isinstance(side, list) and all(_tensor(each) for each in side) for side in said.values())


def _tensor(said: Any) -> bool:
    if not isinstance(said, dict) or said.keys() != {"name", "datatype", "shape"}:
        return False
    named = isinstance(said["name"], str) and isinstance(said["datatype"], str)
    return named and isinstance(said["shape"], list) and all(type(each) is int for each in said["shape"])


def _levels(value: Any, most: int) -> int:
    """How deeply it is nested, as far as that is not beyond ``most``."""
    if not isinstance(value, dict | list) or most < 0:
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max((_levels(each, most - 1) for each in items), default=0)


class Described(NamedTuple):
    """One function's part of a document, from its schema: members of its ``paths`` and of its ``components``."""

    schema: bytes | None
    path: bytes
    components: bytes


class Documents:
    """Documents in OpenAPI 3.1. A function's part is made once for each schema: it is most of the work, and one of
    a few KiB takes as long as a request.
    """

    def __init__(self) -> None:
        self._made: dict[str, Described] = {}

    def describe(self, p: RouterState, name: str) -> bool:
        """Make one function's part, unless it is known. Whether that has taken time."""
        function, made = p.functions.get(name), self._made.get(name)
        if function is None or (made is not None and made.schema == function.schema):
            return False
        components: dict[str, Any] = {}
        path = {f"/functions/{name}/invoke": {"post": _operation(function, components)}}
        self._made[name] = Described(function.schema, *(orjson.dumps(each)[1:-1] for each in (path, components)))
        return True

    def document(self, p: RouterState, caller: Caller) -> bytes:
        """Of all that the caller may invoke; of a function's versions, the one that has its name."""
        self._made = {name: each for name, each in self._made.items() if name in p.functions}
        shown = [name for name in sorted(p.functions) if base_of(name) == name and tenancy.serves(caller, p, name)]
        for name in shown:
            self.describe(p, name)
        made = [self._made[name] for name in shown]
        components = b",".join([_ERROR, *(each.components for each in made if each.components)])
        return _DOCUMENT % (b",".join(each.path for each in made), components)


_ERROR: Final = orjson.dumps(
    {
        "Error": {
            "type": "object",
            "properties": {
                "error": {
                    "type": "object",
                    "properties": {
                        key: {"type": "string"} for key in ("code", "message", "type", "request_id", "param")
                    },
                    "required": ["code", "message", "type", "request_id"],
                }
            },
        }
    }
)[1:-1]

_DOCUMENT: Final = (
    b'{"openapi":"3.1.0","info":{"title":"Functions of this node","version":"%b"},"paths":{%%b},"components":{'
    b'"schemas":{%%b},"securitySchemes":{"key":{"type":"http","scheme":"bearer"}}},"security":[{},{"key":[]}]}'
) % package_version().encode()


def _operation(function: ServedFunction, components: dict[str, Any]) -> dict[str, Any]:
    name, said = function.spec.name, said_of(function)
    request = _named(said.get("request", {}), name, components)
    described = "request" in said
    kinds = {"application/json": {"schema": request}}
    if not described:
        kinds["*/*"] = {"schema": {}}
    elif (form := _form(said["request"], request, components)) is not None:
        kinds["multipart/form-data"] = {"schema": form}
    failed = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    response = _named(said.get("response", {}), name, components)
    return {
        "operationId": f"invoke-{name}",
        "summary": name,
        "description": said.get("description", ""),
        "requestBody": {"required": True, "content": kinds},
        "responses": {
            "200": {"description": "what handle() returns", "content": {"application/json": {"schema": response}}},
            "422": {"description": "the request is not what the function takes", "content": failed},
            "default": {"description": "an error", "content": failed},
        },
    }


def _form(said: dict[str, Any], request: dict[str, Any], components: dict[str, Any]) -> dict[str, Any] | None:
    """An object may come as a form, too; its bytes are files then."""
    reference = request.get("$ref")
    found = components.get(str(reference).rpartition("/")[2]) if reference is not None else request
    if not isinstance(found, dict) or not isinstance(properties := found.get("properties"), dict):
        return None
    fields = {
        key: {"type": "string", "contentMediaType": "application/octet-stream"}
        if isinstance(each, dict) and each.get("contentEncoding") == "base64"
        else each
        for key, each in properties.items()
    }
    return {key: found[key] for key in ("type", "required") if key in found} | {"properties": fields}


def _named(said: dict[str, Any], function: str, components: dict[str, Any]) -> dict[str, Any]:
    """Its definitions become components that have the function's name before theirs."""
    definitions = said.get("$defs", {})
    if isinstance(definitions, dict):
        for key, each in definitions.items():
            components[_component(function, key)] = _moved(each, function)
    moved = _moved({key: each for key, each in said.items() if key != "$defs"}, function)
    assert isinstance(moved, dict)
    return moved


def _moved(value: Any, function: str) -> Any:
    if isinstance(value, list):
        return [_moved(each, function) for each in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(each, function) for key, each in value.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith(_REF):
        moved["$ref"] = f"#/components/schemas/{_component(function, reference.removeprefix(_REF))}"
    return moved


def _component(function: str, key: str) -> str:
    """A name that no other function's component has: its first dot is where the function's name ends."""
    if "." in function:  # no name of a function begins with a line
        function = "_" + function.replace("_", "__").replace(".", "_-")
    return f"{function}.{key}"
