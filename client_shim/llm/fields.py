"""The table of request keys, at every depth: no key is silently ignored. Pure.

Keys of a schema in a request are not here: the grammar library knows them and refuses others.
"""

from collections.abc import Callable
from typing import Any, Final

READ: Final = "read"
TEMPLATE: Final = "template"
HARMLESS: Final = "harmless"
"""The treatment of a key: it is used, the model's template gets it, or it only describes the client. A key whose effect
is not implemented has the values that ask for no effect.
"""

Meaning = str | tuple[Any, ...]

_FUNCTION: Final[dict[str, Meaning]] = {
    "name": READ,
    "description": TEMPLATE,
    "parameters": READ,
    "strict": READ,
    "return": TEMPLATE,
}
_ITEM: Final[dict[str, Meaning]] = {"type": READ, "id": HARMLESS, "status": HARMLESS}
"""Of a response, as clients send it back."""

FIELDS: Final[dict[str, dict[str, Meaning]]] = {
    "request": {  # beside those of its class
        "access_programs": (None, []),
        "audio": (None,),
        "background": (None, False),
        "best_of": (None, 1),
        "context_management": (None, []),
        "conversation": (None,),
        "echo": (None, False),
        "function_call": (None, "none"),
        "functions": (None, []),
        "image": (None,),
        "include": (None, []),
        "max_tool_calls": (None,),
        "metadata": HARMLESS,
        "modalities": (None, ["text"]),
        "moderation": (None,),
        "prediction": (None,),
        "previous_response_id": (None,),
        "prompt": (None,),
        "prompt_cache_key": HARMLESS,
        "prompt_cache_options": HARMLESS,
        "prompt_cache_retention": HARMLESS,
        "reasoning": (None,),
        "reasoning_effort": (None, "none"),
        "safety_identifier": HARMLESS,
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "suffix": (None, ""),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
        "user": HARMLESS,
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
    },
    "response_format": {"type": READ, "json_schema": READ, "schema": READ},
    "response_format.json_schema": {
        "schema": READ,
        "strict": HARMLESS,  # it is kept to in any case
        "name": HARMLESS,
        "description": HARMLESS,
    },
    "text": {"format": READ, "verbosity": (None, "medium")},
    "tools": {"type": READ, "function": READ, "cache_control": HARMLESS},
    "tools.function": _FUNCTION,
    "tool_choice": {"type": READ, "function": READ},
    "tool_choice.function": {"name": READ},
    "tool_choice of a response": {"type": READ, "name": READ},
    "messages": {
        "role": READ,
        "content": READ,
        "refusal": READ,
        "tool_calls": READ,
        "tool_call_id": TEMPLATE,
        "name": TEMPLATE,
        "reasoning": TEMPLATE,
        "reasoning_content": TEMPLATE,
        "annotations": HARMLESS,
        "cache_control": HARMLESS,
        "audio": (None,),
        "function_call": (None,),
        "prefix": (None, False),
    },
    "messages.content": {
        "type": READ,
        "text": READ,
        "refusal": READ,
        "annotations": HARMLESS,
        "cache_control": HARMLESS,
        "logprobs": HARMLESS,
    },
    "messages.tool_calls": {"type": READ, "id": TEMPLATE, "index": HARMLESS, "function": READ},
    "messages.tool_calls.function": {"name": READ, "arguments": READ},
    "input message": {**_ITEM, "role": READ, "content": READ},
    "input function_call": {**_ITEM, "call_id": READ, "name": READ, "arguments": READ},
    "input function_call_output": {**_ITEM, "call_id": READ, "output": READ},
}
"""By place. A key with values is refused with others; one that a place does not have is refused unless it is null."""


def refused_key(place: str, value: dict[str, Any], named: Callable[[str], bool] = lambda key: False) -> str | None:
    """The first key that would be ignored. ``named``: whether the model's template has that word."""
    known = FIELDS[place]
    for key, each in value.items():
        meaning = known.get(key, (None,))
        if isinstance(meaning, tuple) and each not in meaning and not (key not in known and named(key)):
            return key
    return None
