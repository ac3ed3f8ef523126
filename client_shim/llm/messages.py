"""Messages of a chat in the form that templates want. Pure."""

import json
from collections.abc import Callable
from typing import Any, Final

from dormouse.client_shim.llm.requests import RefusedRequest, check_keys

_ROLES: Final = {"developer": "system"}
"""OpenAI's names that differ from those of templates."""


def role_of(message: dict[str, Any]) -> str:
    """As templates call it. Raises RefusedRequest."""
    role = message.get("role")
    if not isinstance(role, str):
        raise RefusedRequest("each message needs a role", "messages")
    return _ROLES.get(role, role)


def templated(message: dict[str, Any], as_parts: bool, named: Callable[[str], bool]) -> dict[str, Any]:
    """Its content as a text or ``as_parts``, and its calls with arguments as objects. ``named``: whether the template
    has this word. Raises RefusedRequest.
    """
    check_keys("messages", message, "messages", "a message", named)
    texts = _texts(message.get("content"), named)
    if (refusal := message.get("refusal")) is not None:  # the model's words instead of an answer
        if any(texts) or not isinstance(refusal, str):
            raise RefusedRequest("a message has content, or a refusal, which is a text", "messages")
        texts = [refusal]
    content: Any = [{"type": "text", "text": text} for text in texts] if as_parts else "".join(texts)
    made = {**message, "role": role_of(message), "content": content}
    if (calls := message.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise RefusedRequest("tool_calls of a message is a list", "messages")
        made["tool_calls"] = [_call(call, named) for call in calls]
        if not calls:
            del made["tool_calls"]
    return made


def _texts(content: Any, named: Callable[[str], bool]) -> list[str]:
    if content is None or isinstance(content, str):
        return [] if content is None else [content]
    if not isinstance(content, list):
        raise RefusedRequest("the content of a message is a text, or a list of parts", "messages")
    found = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            text = "only parts of type text are supported, with their text"
            raise RefusedRequest(text, "messages", "unsupported_parameter")
        other = "refusal" if kind == "text" else "text"
        check_keys("messages.content", {**part, other: None}, "messages", "a part of a message", named)
        if part.get(other) is not None:
            raise RefusedRequest(f"a part of type {kind} has no {other}", "messages")
        found.append(str(part[kind]))
    return found


def _call(call: Any, named: Callable[[str], bool]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedRequest("each of a message's tool_calls names a function", "messages")
    if call.get("type") not in (None, "function"):
        text = f"a message's tool call is of type {str(call['type'])[:80]!r}: only functions are known"
        raise RefusedRequest(text, "messages", "unsupported_parameter")
    check_keys("messages.tool_calls", call, "messages", "a message's tool call", named)
    check_keys("messages.tool_calls.function", function, "messages", "a message's tool call.function", named)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RefusedRequest(f"arguments of a message's tool call are no JSON: {error}", "messages") from error
    if not isinstance(arguments, dict | None):
        raise RefusedRequest("arguments of a message's tool call are a JSON object", "messages")
    return {**call, "type": "function", "function": {**function, "arguments": arguments or {}}}
