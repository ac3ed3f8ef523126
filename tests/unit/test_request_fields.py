"""Every key of a request, at every depth, has an effect, is known to be harmless, or is refused by its name."""

import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from language_models import tokenizer

from dormouse.client_shim.llm.fields import FIELDS, HARMLESS, READ, TEMPLATE
from dormouse.client_shim.llm.messages import templated
from dormouse.client_shim.llm.requests import (
    ChatRequest,
    CompletionRequest,
    RefusedRequest,
    StreamOptions,
    parse,
    read,
    schema_of,
)
from dormouse.client_shim.llm.responses import ResponsesRequest, as_chat
from dormouse.client_shim.llm.template import ChatTemplate
from dormouse.client_shim.llm.tools import tool_use

SCHEMA = {"type": "object", "properties": {"color": {"enum": ["red"]}}}
USER: Any = {"role": "user", "content": "hi"}
CALL: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
TEMPLATE_TEXT = "{% for m in messages %}{{ m.content }}{{ m.mood }}{% endfor %}"


def chat(**fields: Any) -> Any:
    """All that is looked at in a chat."""
    asked = parse("chat", orjson.dumps({"messages": [USER], **fields}))
    assert isinstance(asked, ChatRequest)
    ChatTemplate(tokenizer(TEMPLATE_TEXT)).text(asked.messages, True, None)
    tool_use(asked.tools, asked.tool_choice, None)
    return schema_of(asked)


def responses(**fields: Any) -> Any:
    asked = as_chat(read(ResponsesRequest, orjson.dumps({"input": "hi", **fields})))
    return chat(messages=asked.messages, tools=asked.tools, tool_choice=asked.tool_choice), schema_of(asked)


def message(**fields: Any) -> Any:
    return chat(messages=[USER, {"role": "assistant", "content": "one", **fields}, USER])


PLACES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "request": lambda more: chat(**more),
    "response_format": lambda more: chat(response_format={"type": "json_object", **more}),
    "response_format.json_schema": lambda more: chat(
        response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA, **more}}
    ),
    "text": lambda more: responses(text={"format": {"type": "json_object"}, **more}),
    "tools": lambda more: chat(tools=[{**TOOL, **more}]),
    "tools.function": lambda more: chat(tools=[{**TOOL, "function": {**TOOL["function"], **more}}]),
    "tool_choice": lambda more: chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}, **more}),
    "tool_choice.function": lambda more: chat(
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f", **more}}
    ),
    "tool_choice of a response": lambda more: responses(
        tools=[{"type": "function", **TOOL["function"]}], tool_choice={"type": "function", "name": "f", **more}
    ),
    "messages": lambda more: message(**more),
    "messages.content": lambda more: message(content=[{"type": "text", "text": "a", **more}]),
    "messages.tool_calls": lambda more: message(tool_calls=[{**CALL, **more}]),
    "messages.tool_calls.function": lambda more: message(
        tool_calls=[{**CALL, "function": {**CALL["function"], **more}}]
    ),
    "input message": lambda more: responses(input=[{**USER, **more}]),
    "input function_call": lambda more: responses(
        input=[USER, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", **more}]
    ),
    "input function_call_output": lambda more: responses(
        input=[USER, {"type": "function_call_output", "call_id": "c", "output": "x", **more}]
    ),
}


@pytest.mark.parametrize("place", FIELDS)
def test_every_key_of_the_table_is_what_it_says(place: str) -> None:
    send = PLACES[place]
    send({})
    with pytest.raises(RefusedRequest, match="nosuch") as raised:
        send({"nosuch": 1})
    assert raised.value.code in ("unknown_parameter", "unsupported_parameter")
    for key, meaning in FIELDS[place].items():
        if isinstance(meaning, tuple):
            if place == "request" and key == "top_logprobs":
                continue  # a chat's own
            for value in meaning:
                send({key: value})
            with pytest.raises(RefusedRequest, match=key) as raised:
                send({key: "something else"})
            assert raised.value.code == "unsupported_parameter"
        elif meaning == HARMLESS:
            send({key: "anything"})
        else:
            assert meaning in (READ, TEMPLATE)


def test_no_field_of_a_class_is_in_the_table_too() -> None:
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest):
        both = set(kind.__struct_fields__) & FIELDS["request"].keys()
        assert both <= {"top_logprobs", "prompt", "metadata"}
    assert set(StreamOptions.__struct_fields__) == {"include_usage", "include_obfuscation"}


def test_what_the_template_names_goes_to_it() -> None:
    message(mood="gay")
    with pytest.raises(RefusedRequest, match=r"a message\.colour is not supported"):
        message(colour="red")


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ({"type": "json_object", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_object", "schema": None}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "strict": False, "schema": SCHEMA}}, SCHEMA),
        ({"type": "text", "json_schema": None}, None),
    ],
)
def test_a_schema_is_kept_to_wherever_it_is(given: Any, schema: Any) -> None:
    assert chat(response_format=given) == schema
    if given["type"] != "json_schema":
        assert responses(text={"format": given})[1] == schema
    else:
        assert responses(text={"format": {"type": "json_schema", **given["json_schema"]}})[1] == schema


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"type": "json_object", "schema": "x"}, "schema is to be a JSON schema"),
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "type json_object has no json_schema"),
        ({"type": "json_schema", "schema": SCHEMA}, "type json_schema has no schema"),
        ({"type": "text", "schema": SCHEMA}, "type text has no schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, r"json_schema\.schema is to be"),
        ({"type": "json_object", "strict": True}, "strict is not supported"),
    ],
)
def test_a_schema_that_would_be_ignored_is_refused(given: Any, what: str) -> None:
    with pytest.raises(RefusedRequest, match=what) as raised:
        chat(response_format=given)
    assert raised.value.param == "response_format"


def test_what_a_model_refused_to_say_is_what_it_said() -> None:
    def content(**fields: Any) -> Any:
        return templated({"role": "assistant", **fields}, False, lambda word: False)["content"]

    assert content(content=None, refusal="no") == "no"
    assert content(content="", refusal="no") == "no"
    assert content(content=[{"type": "refusal", "refusal": "no"}]) == "no"
    assert content(content="yes", refusal=None) == "yes"
    for fields in ({"content": "yes", "refusal": "no"}, {"content": [{"type": "text", "text": "a", "refusal": "no"}]}):
        with pytest.raises(RefusedRequest, match="refusal"):
            content(**fields)


@pytest.mark.parametrize("kind", ["input_audio", "image_url", "file", "video_url"])
def test_parts_that_are_no_text_are_refused(kind: str) -> None:
    with pytest.raises(RefusedRequest, match="only parts of type text"):
        message(content=[{"type": kind, kind: {"url": "data:"}}])


def test_calls_of_another_type_are_refused() -> None:
    with pytest.raises(RefusedRequest, match="of type 'custom': only functions"):
        message(tool_calls=[{**CALL, "type": "custom"}])
    with pytest.raises(RefusedRequest, match="strict is true or false"):
        chat(tools=[{"type": "function", "function": {"name": "f", "strict": json.dumps(True)}}])
