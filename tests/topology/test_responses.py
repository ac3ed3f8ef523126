"""`/v1/responses` through the `openai` client on a real node: text, events, calls of tools, what is refused."""

import json
from collections.abc import Iterator
from typing import Any, Final

import openai
import pytest
from language_models import make_folder, tokenizer
from llm_node import CONFIG, connected, deploy, generated
from transformers import PreTrainedModel

from benchmarks.nodes.testnode import TestNode, running_node

TEMPLATE: Final = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}({{ c.function.name }} "
    "{{ c.function.arguments.city }}){% endfor %}{% else %}<s>{{ m.role }}: {{ m.content }}</s>{% endif %}{% endfor %}"
)
WEATHER: Final[Any] = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rom", "Ulm"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
SCHEMA: Final[Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
NO_BLANKS: Final[Any] = {str(token): -100 for token in tokenizer().encode(" \n\t", add_special_tokens=False)}
PLAIN: Final[Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def model(node: TestNode, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("caller")
    found = make_folder(folder, template=TEMPLATE)
    deploy(node, "caller", folder)
    return found


@pytest.fixture
def client(node: TestNode, model: PreTrainedModel) -> Iterator[openai.OpenAI]:
    with connected(node) as found:
        yield found


def tokens(text: str) -> list[int]:
    words: Any = tokenizer()
    found: list[int] = words.encode(text, add_special_tokens=False)
    return found


def test_a_text_and_its_usage(client: openai.OpenAI, model: PreTrainedModel) -> None:
    answer = client.responses.create(
        model="caller", input="one", instructions="be brief", max_output_tokens=20, store=False, **PLAIN
    )
    prompt = tokens("<s>system: be brief</s><s>user: one</s>")
    assert answer.output_text == generated(model, prompt, 20)
    assert (answer.status, answer.incomplete_details and answer.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt), 20)
    assert answer.instructions == "be brief"


def test_items_of_a_conversation_are_messages(client: openai.OpenAI, model: PreTrainedModel) -> None:
    given: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "on"}, {"type": "input_text", "text": "e"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "two", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Rom"}'},
        {"type": "function_call", "call_id": "b", "name": "weather", "arguments": '{"city": "Ulm"}'},
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
    ]
    answer = client.responses.create(model="caller", input=given, max_output_tokens=5, **PLAIN)
    text = "<s>user: one</s><s>assistant: two</s>(weather Rom)(weather Ulm)<s>tool: sunny</s>"
    assert answer.output_text == generated(model, tokens(text), 5)


def test_events_are_those_that_the_client_expects(client: openai.OpenAI, model: PreTrainedModel) -> None:
    with client.responses.stream(model="caller", input="one", max_output_tokens=12, **PLAIN) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    text = generated(model, tokens("<s>user: one</s>"), 12)
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))


def test_a_complete_answer_is_told_as_such(client: openai.OpenAI) -> None:
    given: Any = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    extra = {"logit_bias": NO_BLANKS}
    answer = client.responses.create(model="caller", input="one", text=given, max_output_tokens=60, extra_body=extra)
    assert answer.status == "completed"
    assert 0 <= json.loads(answer.output_text)["n"] <= 9
    with client.responses.stream(
        model="caller", input="one", text=given, max_output_tokens=60, extra_body=extra
    ) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "response.completed"


def test_tools_are_called(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "caller",
        "input": "one",
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": False,
        "max_output_tokens": 120,
        "extra_body": {"logit_bias": NO_BLANKS, "seed": 1},
    }
    answer = client.responses.create(**asked)
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)["city"] in ("Rom", "Ulm")) == ("weather", True)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[2] == "response.output_item.added"
    assert len(kinds) > 8
    assert set(kinds[3:-3]) == {"response.function_call_arguments.delta"}
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    (streamed,) = final.output
    assert streamed.type == "function_call"
    assert json.loads(streamed.arguments) == json.loads(call.arguments)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"store": True}, "store", "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "unsupported_parameter"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "unsupported_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"text": {"format": {"type": "grammar"}}}, "text", "invalid_value"),
        ({"text": {"verbosity": "low"}}, "text", "unsupported_parameter"),
        ({"max_output_tokens": 100_000}, "input", "context_length_exceeded"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"extra_body": {"colour": "red"}}, "colour", "unknown_parameter"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**{"model": "caller", "input": "one", **fields})
    assert (raised.value.param, raised.value.code) == (param, code)


def test_nothing_is_stored(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="caller", input="one", max_output_tokens=1)
    with pytest.raises(openai.APIStatusError, match="no responses are stored") as raised:
        client.responses.retrieve(answer.id)
    assert raised.value.status_code == 404
