"""Parses and checks requests of OpenAI's interface; anything that cannot be done is refused by name."""

import random
from collections.abc import Callable, Collection
from typing import Any, Final, Literal, TypeVar

import msgspec

from dormouse.client_shim.llm.fields import FIELDS, refused_key
from dormouse.schemas.llm import MAX_LOGPROBS

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
"""Of one stop string: so much text is held back at most."""

MAX_CHOICES: Final = 16
MAX_BIASES: Final = 1024
MAX_STOP_TOKENS: Final = 256
"""These travel to the runtime in one packet of 64 KiB, with up to 8,192 tokens of the prompt."""

MAX_SAID: Final = 4000
"""Characters of a refusal, which may quote the request."""

TOKENS: Final = 1 << 31
"""More than any vocabulary has."""

RANGES: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, 1 << 24),
    "n": (1, MAX_CHOICES),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "max_tokens": (1, 1 << 24),
    "max_completion_tokens": (1, 1 << 24),
    "top_logprobs": (0, MAX_LOGPROBS),
    "logprobs": (0, MAX_LOGPROBS),
}
"""Of a request's numbers, inclusive."""


class RefusedRequest(Exception):
    """``param`` names the field; ``code`` is OpenAI's."""

    def __init__(self, text: str, param: str = "", code: str = "invalid_value") -> None:
        super().__init__(text[:MAX_SAID])
        self.param, self.code = param, code


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class _Request(msgspec.Struct, kw_only=True):
    model: str = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None


class ChatRequest(_Request, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(_Request, kw_only=True):
    prompt: str | list[Any] = ""
    logprobs: int | None = None


Request = ChatRequest | CompletionRequest
Kind = Literal["chat", "completions"]
T = TypeVar("T", bound=msgspec.Struct)


def parse(kind: Kind, body: bytes) -> Request:
    """Raises RefusedRequest."""
    request: Request = read(ChatRequest, body) if kind == "chat" else read(CompletionRequest, body)
    check(request)
    return request


def read(kind: type[T], body: bytes) -> T:
    """With fields of the right types, and no others. Raises RefusedRequest."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        request = msgspec.convert(fields, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        param = text.rpartition("`$.")[2].rstrip("`").partition("[")[0] if "`$." in text else ""
        meant = "" if param else "; write an object with messages (a chat), prompt (a completion) or input (a response)"
        raise RefusedRequest(f"the request cannot be read: {text}{meant}", param) from error
    _refuse_unknown(fields, request.__struct_fields__)
    return request


def _refuse_unknown(fields: dict[str, Any], known: Collection[str]) -> None:
    """Nothing is silently ignored. Raises RefusedRequest."""
    others = {name: value for name, value in fields.items() if name not in known}
    for name in others:
        if name not in FIELDS["request"]:
            text = f"{name[:80]!r} is not a field of such requests; docs/language-models.md says which there are"
            raise RefusedRequest(text, name[:80], "unknown_parameter")
    if (refused := refused_key("request", others)) is not None:
        text = f"{refused} is not supported by this model's node: leave it out"
        raise RefusedRequest(text, refused, "unsupported_parameter")


def check_keys(
    place: str, value: dict[str, Any], param: str, where: str = "", named: Callable[[str], bool] = lambda key: False
) -> None:
    """Whether no key of it would be ignored. Raises RefusedRequest, which names the key."""
    if (key := refused_key(place, value, named)) is not None:
        text = f"{where or place}.{key[:80]} is not supported: leave it out"
        raise RefusedRequest(text, param, "unsupported_parameter")


def check(request: Request) -> None:
    """Whether its values are possible. Raises RefusedRequest."""
    for name, (low, high) in RANGES.items():
        value = getattr(request, name, None)
        if value is not None and type(value) is not bool and not low <= value <= high:
            raise RefusedRequest(f"{name} is {value}; write a number from {low:g} to {high:g}", name)
    stops = stops_of(request)
    if len(stops) > MAX_STOPS or max(map(len, stops), default=0) > MAX_STOP_CHARS:
        raise RefusedRequest(f"at most {MAX_STOPS} stop strings of {MAX_STOP_CHARS} characters", "stop")
    tokens = request.stop_token_ids or ()
    if len(tokens) > MAX_STOP_TOKENS or not all(0 <= token < TOKENS for token in tokens):
        raise RefusedRequest(f"stop_token_ids are at most {MAX_STOP_TOKENS} token ids", "stop_token_ids")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        text = "stream_options.include_obfuscation is not supported: leave it out"
        raise RefusedRequest(text, "stream_options", "unsupported_parameter")
    _check_bias(request.logit_bias or {})


def _check_bias(biases: dict[str, float]) -> None:
    if len(biases) > MAX_BIASES:
        raise RefusedRequest(f"logit_bias has {len(biases):,} tokens; at most {MAX_BIASES}", "logit_bias")
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise RefusedRequest(f"logit_bias has {token[:40]!r}; its keys are token ids", "logit_bias")
        if not -100.0 <= bias <= 100.0:
            raise RefusedRequest(f"logit_bias of {token} is {bias:g}; write a number from -100 to 100", "logit_bias")


def check_vocabulary(request: Request, vocabulary: int) -> None:
    """Whether the model has all tokens that are named. Raises RefusedRequest."""
    named = {"stop_token_ids": request.stop_token_ids or (), "logit_bias": map(int, request.logit_bias or ())}
    for field, tokens in named.items():
        if (most := max(tokens, default=0)) >= vocabulary:
            raise RefusedRequest(f"{field} has {most}; the model's tokens are 0 to {vocabulary - 1}", field)


def stops_of(request: Request) -> list[str]:
    stop = request.stop
    return [stop] if isinstance(stop, str) else list(stop or ())


def most_new(request: Request) -> int | None:
    """Tokens to be made at most, if that was said."""
    given = (request.max_tokens, getattr(request, "max_completion_tokens", None))
    return min((most for most in given if most is not None), default=None)


def logprobs_of(request: Request) -> int:
    """So many of the most probable tokens are reported; -1: none at all. Raises RefusedRequest."""
    if isinstance(request, CompletionRequest):
        count = -1 if request.logprobs is None else request.logprobs
    elif request.top_logprobs is not None and not request.logprobs:
        raise RefusedRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    else:
        count = (request.top_logprobs or 0) if request.logprobs else -1
    return count


def schema_of(request: Request) -> dict[str, Any] | None:
    """The schema of the answer's text, if it is JSON. Raises RefusedRequest."""
    given = request.response_format
    if given is None:
        return None
    check_keys("response_format", given, "response_format")
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        text = f"response_format is of type {str(kind)[:80]!r}; known are text, json_object and json_schema"
        raise RefusedRequest(text, "response_format")
    own = {"json_object": "schema", "json_schema": "json_schema"}.get(kind)
    for name in ("schema", "json_schema"):
        if name != own and given.get(name) is not None:
            raise RefusedRequest(f"response_format of type {kind} has no {name}", "response_format")
    if kind == "text":
        return None
    schema = given.get(own or "")
    if kind == "json_schema" and isinstance(schema, dict):
        check_keys("response_format.json_schema", schema, "response_format")
        schema = schema.get("schema")
    elif kind == "json_object" and schema is None:
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        where = "schema" if kind == "json_object" else "json_schema.schema"
        raise RefusedRequest(f"response_format.{where} is to be a JSON schema", "response_format")
    return schema


def seed_of(request: Request) -> int:
    return random.getrandbits(62) if request.seed is None else request.seed & ((1 << 62) - 1)
