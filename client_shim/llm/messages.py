"""Messages of a chat in the form that templates want. Pure."""

import json
from typing import Any, Final

from dormouse.client_shim.llm.requests import RefusedRequest

_ROLES: Final = {"developer": "system"}
"""What OpenAI calls otherwise than templates."""


def templated(message: dict[str, Any]) -> dict[str, Any]:
    """Its text joined, and what it calls with arguments as objects. Raises RefusedRequest."""
    role = message.get("role")
    if not isinstance(role, str):
        raise RefusedRequest("each message needs a role", "messages")
    made = {**message, "role": _ROLES.get(role, role), "content": _text(message.get("content"))}
    if (calls := message.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise RefusedRequest("tool_calls of a message is a list", "messages")
        made["tool_calls"] = [_call(call) for call in calls]
        if not calls:
            del made["tool_calls"]
    return made


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RefusedRequest("the content of a message is a text, or a list of parts", "messages")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            text = "only parts of type text are supported, with their text"
            raise RefusedRequest(text, "messages", "unsupported_parameter")
    return "".join(part["text"] for part in content)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedRequest("each of a message's tool_calls names a function", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RefusedRequest(f"arguments of a message's tool call are no JSON: {error}", "messages") from error
    if not isinstance(arguments, dict | None):
        raise RefusedRequest("arguments of a message's tool call are a JSON object", "messages")
    return {**call, "type": "function", "function": {**function, "arguments": arguments or {}}}
