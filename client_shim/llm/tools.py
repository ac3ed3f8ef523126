"""A request's tools, the syntax of a model's calls, and the grammar of answers that must be calls.

Known forms, by the model's template::

    hermes    <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>     any number
    llama     {"name": "f", "parameters": {...}}                               alone, maybe after <|python_tag|>
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dormouse.client_shim.llm.requests import RefusedRequest, check_keys

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""OpenAI's rule."""

WHITESPACE: Final = {"whitespace_pattern": r"[ \n\t]{0,32}"}
"""Between the signs of JSON; without a bound, a small model may write nothing else for ever."""


@dataclass(frozen=True)
class ToolFormat:
    """``opening`` and ``closing`` are around a call. ``key``: of its arguments. ``bare``: also without ``opening``, as
    all of an answer. ``listed``: calls are in an array.
    """

    name: str
    opening: str
    closing: str = ""
    key: str = "arguments"
    bare: bool = False
    listed: bool = False

    @property
    def marks(self) -> list[str]:
        return [mark for mark in (self.opening, self.closing) if mark]


HERMES: Final = ToolFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA: Final = ToolFormat("llama", "<|python_tag|>", key="parameters", bare=True)
MISTRAL: Final = ToolFormat("mistral", "[TOOL_CALLS]", listed=True)


def format_of(template: str) -> ToolFormat | None:
    """The call syntax of a model with this chat template, if it is known."""
    if not re.search(r"\btools\b", template) or "<function=" in template or "[ARGS]" in template:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        return HERMES
    return LLAMA if "<|python_tag|>" in template or '"parameters"' in template else None


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: dict[str, Any]
    strict: bool


@dataclass(frozen=True)
class ToolUse:
    """``given``: as templates want them. ``must``: names of which one has to be called; none if nothing has to."""

    given: list[dict[str, Any]]
    tools: tuple[Tool, ...]
    must: tuple[str, ...]
    parallel: bool

    @property
    def kept(self) -> bool:
        """Whether calls keep to the tools' descriptions."""
        return bool(self.must) or any(tool.strict for tool in self.tools)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)


def tool_use(tools: Any, choice: Any, parallel: bool | None) -> ToolUse | None:
    """The use of tools that a request asks for; None if nothing is to be called. Raises RefusedRequest."""
    found = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    names = [tool.name for tool in found]
    if len(found) > MAX_TOOLS:
        raise RefusedRequest(f"at most {MAX_TOOLS} tools", "tools")
    if len(set(names)) < len(names):
        raise RefusedRequest("two tools have the same name", "tools")
    if choice in (None, "auto", "none"):
        must: tuple[str, ...] = ()
    elif choice == "required":
        must = tuple(names)
    else:
        must = (_named(choice),)
    if must and not set(must) <= set(names):
        raise RefusedRequest(f"tool_choice names {must[0]!r}, which tools do not", "tool_choice")
    if not found and choice == "required":
        raise RefusedRequest("tool_choice is 'required' and there are no tools", "tool_choice")
    if not found or choice == "none":
        return None
    return ToolUse(list(tools), tuple(found), must, parallel is not False)


def _tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise RefusedRequest(f"{where} is of type {kind!r}: only functions are known", "tools", "unsupported_parameter")
    check_keys("tools", tool, "tools", where)
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedRequest(f"{where}.function has no name", "tools")
    check_keys("tools.function", function, "tools", f"{where}.function")
    if not _NAME.fullmatch(function["name"]):
        text = f"{where}.function.name is {function['name'][:80]!r}: up to 64 letters, digits, _ and - are possible"
        raise RefusedRequest(text, "tools")
    parameters = function.get("parameters")
    strict = function.get("strict")
    if not isinstance(parameters, dict | None) or not isinstance(function.get("description"), str | None):
        raise RefusedRequest(f"{where}.function: parameters is a JSON schema, description a text", "tools")
    if not isinstance(strict, bool | None):
        raise RefusedRequest(f"{where}.function.strict is true or false", "tools")
    if parameters and parameters.get("type") != "object":
        raise RefusedRequest(f"{where}.function.parameters is to be a JSON schema of type 'object'", "tools")
    return Tool(function["name"], parameters or {"type": "object"}, strict is True)


def _named(choice: Any) -> str:
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        check_keys("tool_choice", choice, "tool_choice")
        if isinstance(function, dict):
            check_keys("tool_choice.function", function, "tool_choice")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return str(function["name"])
    elif isinstance(choice, dict) and isinstance(choice.get("type"), str):
        text = f"tool_choice of type {choice['type'][:80]!r} is not supported"
        raise RefusedRequest(text, "tool_choice", "unsupported_parameter")
    raise RefusedRequest("tool_choice is 'none', 'auto', 'required' or names a function", "tool_choice")


def json_rule(schema: dict[str, Any], field: str) -> str:
    """The grammar of a value of this schema. ``field`` has it. Raises RefusedRequest."""
    if "x-guidance" in schema:  # how strict the library is, and for how long: not a request's to say
        text = f"x-guidance is no part of a schema in {field}: leave it out"
        raise RefusedRequest(text, field, "unsupported_parameter")
    return f"%json {json.dumps({'x-guidance': WHITESPACE, **schema})}"


def grammar_of(
    use: ToolUse | None, form: ToolFormat | None, schema: dict[str, Any] | None, special: Mapping[str, int]
) -> str | None:
    """Of answers that keep to ``schema``, or call tools; None if anything goes. ``special``: by text, tokens that are
    no text to the library.
    """
    text = [] if schema is None else [f"text: {json_rule(schema, 'response_format')}"]
    if use is None or form is None:
        return "\n".join(["start: text", *text]) if text else None
    calls = _calls(use, form, special)
    if use.must:
        return "\n".join(["start: calls", *calls])
    if text:
        return "\n".join(["start: text | calls", *text, *calls])
    if not use.kept:
        return None
    if form.bare:
        return "\n".join(["start: TEXT | calls", r"TEXT: /([^{ \n\t](.|\n)*)?/", *calls])
    lead = "lead: TEXT opening" if form.opening in special else f"lead[lazy]: TEXT {json.dumps(form.opening)}"
    return "\n".join(["start: (lead rest)* TEXT", lead, r"TEXT: /(.|\n)*/", *calls])


def _calls(use: ToolUse, form: ToolFormat, special: Mapping[str, int]) -> list[str]:
    """Rules: ``calls``, and ``rest``, which is a call without its opening."""

    def mark(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    tools = [tool for tool in use.tools if not use.must or tool.name in use.must]
    rules = [
        f"call: {' | '.join(f'call{index}' for index in range(len(tools)))}",
        f"opening: {mark(form.opening)}",
    ]
    for index, tool in enumerate(tools):
        head = json.dumps(f'"name": {json.dumps(tool.name)}, "{form.key}": ')
        arguments = json_rule(tool.parameters, "tools")
        rules += [f'call{index}: "{{" {head} arguments{index} "}}"', f"arguments{index}: {arguments}"]
    if form.listed:
        more = '(", " call)*' if use.parallel else ""
        return [*rules, f'rest: "[" call {more} "]"', "calls: opening rest"]
    if form.bare:
        return [*rules, "calls: call"]
    more = r'("\n" opening rest)*' if use.parallel else ""
    return [*rules, rf'rest: "\n" call "\n" {mark(form.closing)}', f"calls: opening rest {more}"]
