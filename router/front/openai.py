"""The router's part of OpenAI's interface: the function that a request is for, and the list of models.

The rest of a request is for the function's instance to interpret.
"""

from typing import Any, Final

import msgspec

from dormouse.core import notjson
from dormouse.core.decisions.requests import splits
from dormouse.core.decisions.requests.state import RouterState, ServedFunction
from dormouse.router.access import tenancy
from dormouse.router.access.access import Caller
from dormouse.router.front.exchange import HttpError
from dormouse.schemas.messages import Failure

ROUTES: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/embeddings": "embeddings",
}

STREAMED: Final = frozenset({"chat", "completions", "responses"})
"""Routes whose answers come in parts, if that is asked for."""


class Addressed(msgspec.Struct):
    """The function that a request names, and whether its answer is to come in parts."""

    model: str
    stream: bool | None = False


_ADDRESSED: Final = msgspec.json.Decoder(Addressed)


def route_of(path: str) -> str:
    return ROUTES[path.removeprefix("/openai")]


def addressed(body: bytes | memoryview) -> Addressed:
    """Raises HttpError."""
    try:
        return _ADDRESSED.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"the body must be a JSON object that names a model: {notjson.cause(body, str(error))}"
        named = next(
            (name for name in ("model", "stream") if f"`{name}`" in str(error) or f"`$.{name}`" in str(error)), ""
        )
        raise HttpError(Failure(code="invalid_value", status=400, text=text, param=named)) from None


def unknown(name: str) -> Failure:
    text = f"there is no model {name[:100]!r}; GET /v1/models says which there are"
    return Failure(code="model_not_found", status=404, text=text, param="model")


def models(p: RouterState, caller: Caller, name: str) -> dict[str, Any]:
    """All that the caller may use, or one. Raises HttpError."""
    if name:
        name = splits.named(p, name)
        if not tenancy.serves(caller, p, name) or not _is_model(p.functions[name]):
            raise HttpError(unknown(name))
        return _model(p.functions[name])
    served = [function for function in p.functions.values() if _is_model(function)]
    seen = [function for function in served if tenancy.serves(caller, p, function.spec.name)]
    return {"object": "list", "data": [_model(function) for function in seen]}


def _is_model(function: ServedFunction) -> bool:
    return function.spec.llm is not None or function.spec.embedding is not None


def _model(function: ServedFunction) -> dict[str, Any]:
    """``parent``: of a model with an adapter, its base; as in vLLM."""
    spec = function.spec
    said = {"id": spec.name, "object": "model", "created": 0, "owned_by": spec.tenant, "x_version": spec.version}
    return said | {"parent": (spec.llm.base or None) if spec.llm is not None else None}
