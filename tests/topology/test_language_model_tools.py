"""JSON and calls of tools, through the `openai` client on a real node: a model of random numbers keeps to a grammar."""

import contextlib
import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from language_models import TEMPLATE, make_folder, tokenizer
from llm_node import CONFIG, MESSAGES, client, deploy, expected, only_runtime, runtimes, streaming
from llm_node import rest as rest_of

from benchmarks.nodes.testnode import TestNode, running_node

__all__ = ["client"]

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
        "words": {"type": "array", "items": {"enum": ["ab", "cd", "ef"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["number", "words"],
    "additionalProperties": False,
}
FORMAT: Final[Any] = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
HUGE: Final = {"type": "string", "pattern": "^a{1000000}$"}
"""Its grammar is small; the first mask takes a quarter of a second, well within the limit on a busy machine."""

CITY: Final = {
    "type": "object",
    "properties": {"city": {"enum": ["Rom", "Ulm"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Final[Any] = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK: Final[Any] = {"type": "function", "function": {"name": "clock", "parameters": CITY}}
BLANKS: Final[Any] = tokenizer().encode(" \n\t", add_special_tokens=False)
NO_BLANKS: Final[Any] = {str(token): -100 for token in BLANKS}
"""A model of random numbers would write many."""

TOOLS_TEMPLATE: Final = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}({{ c.function.name }} "
    "{{ c.function.arguments.city }}){% endfor %}{% else %}<s>{{ m.role }}: {{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestNode]:
    with running_node(CONFIG + "[limits]\nheartbeat_ms = 30\n") as running:
        for name, template in (("chat", TEMPLATE), ("caller", TOOLS_TEMPLATE)):
            folder = tmp_path_factory.mktemp(name)
            make_folder(folder, template=template)
            deploy(running, name, folder)
        yield running


def check(text: str | None) -> Any:
    """It is what SCHEMA says."""
    value = json.loads(text or "")
    assert set(value) == {"number", "words"}
    assert 0 <= value["number"] <= 99
    assert 2 <= len(value["words"]) <= 4
    assert set(value["words"]) <= {"ab", "cd", "ef"}
    return value


def test_answers_keep_to_a_schema(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> Any:
        return client.chat.completions.create(
            model="chat", messages=MESSAGES, max_tokens=100, response_format=FORMAT, logit_bias=NO_BLANKS, **more
        )

    answer = ask(temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    check(answer.choices[0].message.content)
    texts = [choice.message.content for choice in ask(n=4, seed=3, temperature=1.5).choices]
    assert len({json.dumps(check(text)) for text in texts}) > 1
    assert [choice.message.content for choice in ask(n=4, seed=3, temperature=1.5).choices] == texts
    told = ask(temperature=1, seed=1, logprobs=True, top_logprobs=20).choices[0]
    check(told.message.content)
    assert "".join(each.token for each in told.logprobs.content) == told.message.content
    assert told.logprobs.content[0].logprob == 0  # only a brace can be the first
    assert [each.token for each in told.logprobs.content[0].top_logprobs] == ["{"]


def test_an_object_without_a_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="chat",
        messages=MESSAGES,
        max_tokens=60,
        seed=2,
        response_format={"type": "json_object"},
        logit_bias={**NO_BLANKS, "95": -3, "93": 40},  # so that it comes to an end
    )
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_one_that_is_kept_to_a_schema_goes_on_after_its_runtime_died_and_holds_up_nobody(
    node: TestNode, client: openai.OpenAI
) -> None:
    def stream() -> Any:
        long = {"type": "array", "items": {"enum": ["ab", "cd", "ef"]}, "minItems": 25, "maxItems": 25}
        return client.chat.completions.create(
            model="chat",
            messages=MESSAGES,
            max_tokens=200,
            seed=5,
            stream=True,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": long}},
            logit_bias=NO_BLANKS,
        )

    whole = rest_of(stream())
    assert len(json.loads(whole)) == 25
    cut = stream()
    start = next(cut).choices[0].delta.content or ""
    pid = only_runtime(node)
    beside = streaming(client, "live on", 100)
    next(beside)
    os.kill(pid, signal.SIGKILL)
    assert start + rest_of(cut) == whole
    beside.close()


def test_beside_one_without_a_schema(node: TestNode, client: openai.OpenAI, tmp_path: Path) -> None:
    model = make_folder(tmp_path)
    free = streaming(client, "beside", 100)
    answer = client.chat.completions.create(
        model="chat", messages=MESSAGES, max_tokens=100, response_format=FORMAT, logit_bias=NO_BLANKS
    )
    check(answer.choices[0].message.content)
    assert rest_of(free) == expected(model, "beside", 100)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"type": "regex"}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nosuch"}}}, "Invalid type: nosuch"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}, "Unimplemented keys"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": HUGE}}, "too many expressions"),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "array", "items": HUGE, "minItems": 9}},
            },
            "too many expressions",
        ),
    ],
)
def test_schemas_that_cannot_be_used_are_refused(client: openai.OpenAI, given: Any, why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as raised:
        client.chat.completions.create(
            model="chat", messages=MESSAGES, response_format=given, logit_bias=NO_BLANKS, max_tokens=100
        )
    assert raised.value.param == "response_format"


def test_a_tool_that_must_be_called_is(client: openai.OpenAI) -> None:
    def ask(choice: Any, **more: Any) -> Any:
        return client.chat.completions.create(
            model="caller",
            messages=MESSAGES,
            tools=[WEATHER, CLOCK],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=150,
            seed=1,
            logit_bias=NO_BLANKS,
            **more,
        )

    choice = ask("required").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name in ("weather", "clock")
    assert json.loads(call.function.arguments)["city"] in ("Rom", "Ulm")
    named = ask({"type": "function", "function": {"name": "clock"}}).choices[0]
    assert named.message.tool_calls[0].function.name == "clock"
    parts = list(ask({"type": "function", "function": {"name": "clock"}}, stream=True))
    deltas = [part.choices[0].delta.tool_calls[0] for part in parts if part.choices[0].delta.tool_calls]
    assert (deltas[0].index, deltas[0].function.name, deltas[0].function.arguments) == (0, "clock", "")
    assert (deltas[0].id or "").startswith("call_")
    assert len(deltas) > 3  # they come as they are made
    assert json.loads("".join(delta.function.arguments for delta in deltas))["city"] in ("Rom", "Ulm")
    assert parts[-1].choices[0].finish_reason == "tool_calls"
    assert not any(part.choices[0].delta.content for part in parts)


def test_calls_and_their_results_go_to_the_template(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model="caller", messages=messages, tools=[WEATHER], max_tokens=1)
    text = "[weather]<tool_call><s>system: hi</s>(weather Rom)<s>tool: sunny</s>"
    marks = 2 * text.count("<s>")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(text) - 3 * text.count("<s>") - 4 * text.count("</s>") + marks
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{bad"
    with pytest.raises(openai.BadRequestError, match="no JSON"):
        client.chat.completions.create(model="caller", messages=messages, tools=[WEATHER], max_tokens=1)


def test_a_model_whose_template_has_no_tools_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="has no tools") as raised:
        client.chat.completions.create(model="chat", messages=MESSAGES, tools=[WEATHER])
    assert (raised.value.param, raised.value.code) == ("tools", "unsupported_parameter")
    answer = client.chat.completions.create(
        model="chat", messages=MESSAGES, tools=[WEATHER], tool_choice="none", max_tokens=1
    )
    assert answer.choices[0].finish_reason


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":"chat","messages":[{"role":"user","content":"\\ud800"}]}', ""),
        (b'{"model":"chat","messages":[{"role":"user","content":"x"}],"stop":"\\udfff"}', ""),
        (b'{"model":"chat","messages":[{"role":"user","content":"x"}],"colour":"red"}', "colour"),
        (b'{"model":"chat","messages":[{"role":"user","content":' + b"[" * 50_000 + b"]" * 50_000 + b"}]}", ""),
        (b'{"model":"chat","messages":[{"role":"user","content":3}]}', "messages"),
    ],
)
def test_bodies_that_are_no_requests_are_refused(node: TestNode, body: bytes, param: str) -> None:
    answer = node.http("POST", "/v1/chat/completions", raw=body)
    assert answer.status == 400
    assert answer.body["error"].get("param", "") == param


def test_several_prompts_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="one prompt") as raised:
        client.completions.create(model="chat", prompt=["a", "b"])
    assert (raised.value.param, raised.value.code) == ("prompt", "unsupported_parameter")


def test_a_prompt_of_half_characters_is_refused(node: TestNode) -> None:
    assert node.http("POST", "/v1/completions", raw=b'{"model":"chat","prompt":"\\ud83d"}').status == 400


@contextlib.contextmanager
def waiting(node: TestNode, new: int, then: signal.Signals = signal.SIGCONT) -> Iterator[http.client.HTTPResponse]:
    """A stream that has no first part, and whose client has heard a comment. Runtimes stand still until ``then``."""
    pids = runtimes(node)
    with contextlib.closing(node.connect(60)) as connection:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            body = {"model": "chat", "prompt": "ab", "max_tokens": new, "stream": True, "ignore_eos": True}
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            assert (answer.status, answer.getheader("content-type")) == (200, "text/event-stream")
            assert [answer.readline() for _ in range(4)] == [b": waiting\n", b"\n"] * 2
        finally:
            for pid in pids:
                os.kill(pid, then)
        yield answer


def test_a_client_that_waits_for_the_first_part_hears_comments(node: TestNode, client: openai.OpenAI) -> None:
    client.completions.create(model="chat", prompt="a", max_tokens=1)
    with waiting(node, 3) as answer:
        rest = [line for line in answer.read().split(b"\n\n") if line and not line.startswith(b":")]
    assert rest[-1] == b"data: [DONE]"
    assert all(line.startswith(b"data: ") for line in rest)


def test_a_client_hears_comments_while_a_stream_pauses(node: TestNode) -> None:
    with contextlib.closing(node.connect(60)) as connection:
        body = {"model": "chat", "prompt": "ab", "max_tokens": 1900, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        while not answer.readline().startswith(b"data: "):
            pass
        pids = runtimes(node)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            heard = [line for line in iter(answer.readline, b": waiting\n") if line.strip()]
            assert [answer.readline() for _ in range(3)] == [b"\n", b": waiting\n", b"\n"]
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        heard += [line for line in answer.read().splitlines() if line.strip() and not line.startswith(b":")]
    assert all(line.startswith(b"data: ") for line in heard)
    assert heard[-1].strip() == b"data: [DONE]"


PAUSES: Final = """
import time
def load():
    pass
def handle(state, request):
    for part in request:
        yield part if isinstance(part, str) else bytes(part)
        time.sleep(0.5)
"""


def test_comments_are_between_events_only_and_bytes_are_as_they_are(node: TestNode) -> None:
    node.deployed("pauses", PAUSES)
    text = str(node.invoke("pauses", ["a", "b"]).body)
    assert ": waiting\n\n" in text
    assert text.replace(": waiting\n\n", "") == "data: a\n\ndata: b\n\n"
    assert node.invoke("pauses", [[1, 2], [3]]).body == "\x01\x02\x03"


def test_what_fails_after_a_comment_is_an_error_event(node: TestNode, client: openai.OpenAI) -> None:
    """No runtime should live until it has made a first part: then the answer would be a stream like any other."""
    client.completions.create(model="chat", prompt="a", max_tokens=1)
    over = threading.Event()

    def kill_whatever_computes() -> None:
        while not over.wait(0.01):
            for pid in runtimes(node):
                with contextlib.suppress(ProcessLookupError):  # it is gone already
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_whatever_computes)
    with waiting(node, 1900, then=signal.SIGKILL) as answer:
        killer.start()
        try:
            data = answer.read()
        finally:
            over.set()
            killer.join()
    kind, _, error = data.rstrip().rpartition(b"\n\n")[2].partition(b"\n")
    assert kind == b"event: error"
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "executor_lost"
