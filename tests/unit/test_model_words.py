"""What a model's files say of its words: its template, the tokens that end an answer, those that are no text."""

import json
import threading
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import orjson
import pytest
from gguf_files import write_gguf
from language_models import tokenizer
from tokenizers import AddedToken

from dormouse.client_shim.llm import grammar
from dormouse.client_shim.llm.answering import Answering
from dormouse.client_shim.llm.answers import Choice, usage
from dormouse.client_shim.llm.folder import BadFolder
from dormouse.client_shim.llm.model import Words
from dormouse.client_shim.llm.requests import RefusedRequest
from dormouse.client_shim.llm.serving import LlmServer, ServedModel
from dormouse.client_shim.llm.template import ChatTemplate
from dormouse.client_shim.llm.understanding import Understanding
from dormouse.schemas import messages as m
from dormouse.schemas.llm import DecoderSpec, DefaultSampling

VOCABULARY = 320
SPEC = DecoderSpec(family="llama", config={"vocab_size": VOCABULARY}, dtype="float32", context=4096)
TOOLS = "{% if tools %}{{ tools | tojson }}MARKS{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '{"name": "weather", "%s": {"city": "Ulm"}}'


def words_of(folder: Path, template: str | None = None, added: Sequence[AddedToken] = (), **files: Any) -> Words:
    """Of a folder with these tokens and files."""
    known: Any = tokenizer(template)
    known.backend_tokenizer.add_tokens(list(added))
    known.save_pretrained(str(folder))
    for name, value in files.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **value}))
    return Words(str(folder), SPEC)


class Router:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def send(self, message: Any) -> None:
        self.heard.append(message)


def said(words: Words, text: str, route: str = "chat", **fields: Any) -> Any:
    """What such a request has as its answer, if the model says this, as tokens, and then nothing."""
    router: Any = Router()
    answering = Answering(router, words, lambda message: None, count(1))
    body = orjson.dumps({"messages": [{"role": "user", "content": "q"}], **fields})
    understanding = Understanding("model", SPEC, words, count(1))
    request = understanding.opened(m.Run(request=1, lease=None, body=body, nbytes=len(body), route=route))
    while not understanding.begun(request, 0.0):
        assert request.wanted is not None
        words.grammars.compilers.settle([request.wanted.work])
    answering.add(request)
    tokens = words.encode(text, special=False)
    for index, token in enumerate(tokens):
        finish = "length" if index == len(tokens) - 1 else ""
        answering.tokens(m.Tokens(tokens=[m.ChosenToken(number=1, token=token, finish=finish)]))
        while answering.late:
            answering.go_on()
    (answer,) = [message.body for message in router.heard if isinstance(message, m.Returned)]
    (choice,) = orjson.loads(answer or b"")["choices"]
    return choice


# --- tokens that are no text


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("must", [False, True])
@pytest.mark.parametrize(
    ("marks", "key", "written"),
    [
        (["[TOOL_CALLS]"], "arguments", "[TOOL_CALLS][{}]"),
        (["<tool_call>", "</tool_call>"], "arguments", "<tool_call>\n{}\n</tool_call>"),
        (["<|python_tag|>"], "parameters", "<|python_tag|>{}"),
    ],
)
def test_calls_are_found_whether_their_marks_are_text_or_not(
    tmp_path: Path, marks: list[str], key: str, written: str, special: bool, must: bool
) -> None:
    added = [AddedToken(mark, special=special) for mark in marks]
    words = words_of(tmp_path, TOOLS.replace("MARKS", "".join(marks)), added)
    assert all((mark in words.special) == special for mark in marks)
    if must and key == "parameters":  # a call that has to be made has no mark there
        written = "{}"
    text = written.replace("{}", CALL % key)
    choice = said(words, text, tools=[WEATHER], **({"tool_choice": "required"} if must else {}))
    assert choice["finish_reason"] in ("tool_calls", "length")
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Ulm"})


def test_a_form_of_calls_that_is_not_known_is_refused(tmp_path: Path) -> None:
    words = words_of(tmp_path, TOOLS.replace("MARKS", "[TOOL_CALLS]weather[ARGS]{}"))
    with pytest.raises(RefusedRequest, match="in no form that is known"):
        said(words, "x", tools=[WEATHER])


def test_special_tokens_are_no_text_wherever_they_are_said_to_be(tmp_path: Path) -> None:
    """In tokenizer.json alone, which `all_special_tokens` does not have."""
    words = words_of(tmp_path, TOOLS, [AddedToken("<|im_end|>", special=True), AddedToken("<think>")])
    assert said(words, "one<|im_end|><think>two")["message"]["content"] == "one<think>two"
    choice = said(words, "one<|im_end|>two", stop=["<|im_end|>"])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one", "stop")


# --- ends


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, [2]),
        ({"generation_config": {"eos_token_id": [2, 7]}}, [2, 7]),
        ({"generation_config": {"eos_token_id": 7}, "config": {"eos_token_id": [8]}}, [2, 7, 8]),
        ({"config": {"eos_token_id": [None, True, -1, VOCABULARY, 9]}}, [2, 9]),
        ({"tokenizer_config": {"eot_token": "<|eot|>"}}, [2, 259]),
    ],
)
def test_every_end_that_the_files_name_is_one(tmp_path: Path, files: Any, ends: list[int]) -> None:
    assert words_of(tmp_path, added=[AddedToken("<|eot|>", special=True)], **files).ends == ends


def test_a_gguf_file_s_ends_of_turns_and_messages_are_ends(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs gguf: make setup")
    model: Any = write_gguf(tmp_path / "small.gguf", ends={"eot": 260, "eom": 261})
    spec = DecoderSpec(family="llama", config={"vocab_size": model.config.vocab_size}, dtype="float32", context=256)
    words = Words(str(tmp_path), spec, "small.gguf")
    assert words.ends == [2, 260, 261]
    assert {"<s>", "</s>", "<unused1>"} <= words.special.keys()  # control tokens
    assert words.encode("<unused1>", special=False) == [260]


def test_ends_that_a_gguf_file_does_not_tell_are_those_that_llama_cpp_knows(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs gguf: make setup")
    model: Any = write_gguf(tmp_path / "small.gguf", named={262: "<|im_end|>", 263: "<end_of_turn>", 264: "<|end_|>"})
    spec = DecoderSpec(family="llama", config={"vocab_size": model.config.vocab_size}, dtype="float32", context=256)
    assert Words(str(tmp_path), spec, "small.gguf").ends == [2, 262, 263]


# --- sampling


def opened(words: Words, route: str = "chat", **fields: Any) -> Any:
    body = orjson.dumps(fields or {"messages": [{"role": "user", "content": "q"}]})
    run = m.Run(request=1, lease=None, body=body, nbytes=len(body), route=route)
    return Understanding("model", SPEC, words, count(1)).opened(run)


def test_the_folder_s_sampling_is_what_a_runtime_is_told(tmp_path: Path) -> None:
    wished = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 3, "stop_strings": ["two"]}
    words = words_of(tmp_path, TOOLS, generation_config=wished)
    request = opened(words)
    (submit,) = request.generations[0].submits(words.ends, 0.0)
    assert (submit.temperature, submit.top_k, submit.top_p) == (0.5, 7, 1.0)
    assert request.limit == len(request.prompt) + 3
    request = opened(words, "completions", prompt=[1] * 4095, top_k=0)
    (submit,) = request.generations[0].submits(words.ends, 0.0)
    assert (submit.temperature, submit.top_k, request.limit) == (0.5, 0, 4096), "as much as the context has room for"
    assert opened(words, "completions", prompt=[1], max_tokens=9).limit == 10
    choice = said(words, "onetwo")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one", "stop")


@pytest.mark.parametrize(
    ("text", "fields"),
    [("onetwo!", {"ignore_eos": True}), ('{"one":"two"}', {"response_format": {"type": "json_object"}})],
)
def test_a_model_s_stop_strings_end_neither_json_nor_what_ignores_ends(tmp_path: Path, text: str, fields: Any) -> None:
    words = words_of(tmp_path, TOOLS, generation_config={"stop_strings": "two"})
    assert said(words, text, **fields)["message"]["content"] == text


def test_a_model_whose_files_are_not_asked_has_its_ends_only(tmp_path: Path) -> None:
    words_of(tmp_path, TOOLS)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7, "temperature": "hot"}')
    words = Words(str(tmp_path), SPEC, samples=False)
    assert (words.sampling, words.ends) == (DefaultSampling(), [2, 7])


def test_an_answer_of_responses_tells_its_sampling(tmp_path: Path) -> None:
    words = words_of(tmp_path, TOOLS, generation_config={"temperature": 0.5, "top_p": 0.25, "max_new_tokens": 3})
    said = orjson.loads(opened(words, "responses", input="q", top_p=0.75).answer.whole([Choice(0)], usage(1, 0, 0)))
    assert (said["temperature"], said["top_p"], said["max_output_tokens"]) == (0.5, 0.75, 3)
    said = orjson.loads(
        opened(words, "responses", input="q", max_output_tokens=9).answer.whole([Choice(0)], usage(1, 0, 0))
    )
    assert (said["temperature"], said["top_p"], said["max_output_tokens"]) == (0.5, 0.25, 9)


# --- the chat template


PARTS = (
    "{% for m in messages %}<s>{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% endif %}{% endfor %}</s>{% endfor %}"
)
BOTH = (
    "{% for m in messages %}<s>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "({{ part.text }}){% endfor %}{% endif %}</s>{% endfor %}"
)
MIXED = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content | trim }}{% else %}"
    "{{ m.content[0].text }}{% endif %}{% endfor %}"
)
LISTED: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": ""}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("template", "content", "text"),
    [
        (PARTS, "hello", "<s>hello</s>"),
        (PARTS, LISTED, "<s>onetwo</s>"),
        (PARTS, "", "<s></s>"),
        (PARTS, None, "<s></s>"),
        (PARTS, [], "<s></s>"),
        (BOTH, "hello", "<s>hello</s>"),
        (BOTH, LISTED, "<s>onetwo</s>"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", LISTED, "ONETWO"),
        (MIXED, "hello", "hello"),
    ],
)
def test_messages_have_the_form_that_the_template_shows(tmp_path: Path, template: str, content: Any, text: str) -> None:
    words = words_of(tmp_path, template)
    assert words.template.text([{"role": "user", "content": content}], True, None) == text


def test_each_role_has_its_form(tmp_path: Path) -> None:
    words = words_of(tmp_path, MIXED)
    assert words.template.forms == {"user": "parts", "system": "text", "assistant": "parts"}  # it raises for tools
    messages = [{"role": "developer", "content": LISTED}, {"role": "user", "content": "hello"}]
    assert words.template.text(messages, True, None) == "onetwohello"


def test_parts_that_a_template_would_print_are_a_text(tmp_path: Path) -> None:
    """Which form it wants may depend on the place, too."""
    last = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    template = "{% for m in messages %}{% if loop.last %}" + last + "{% else %}{{ m.content }}{% endif %};{% endfor %}"
    words = words_of(tmp_path, template)
    assert words.template.forms["user"] == "parts"
    messages = [{"role": "user", "content": text} for text in (LISTED, "three", "four")]
    assert words.template.text(messages, True, None) == "onetwo;three;four;"


def test_what_a_template_leaves_out_is_refused(tmp_path: Path) -> None:
    words = words_of(tmp_path, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(RefusedRequest, match="leaves out what messages of role 'system' say"):
        said(words, "x", messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}])
    quiet = [{"role": "system", "content": ""}, {"role": "user", "content": "q"}]
    assert words.template.text(quiet, True, None) == "q"


def test_a_template_for_tools_has_its_own_forms(tmp_path: Path) -> None:
    words = words_of(tmp_path, BOTH, tokenizer_config={"chat_template": None})
    assert words.template.text([{"role": "user", "content": "hi"}], True, [WEATHER]) == "<s>hi</s>"
    words._tokenizer.chat_template = {"default": BOTH, "tool_use": "[TOOL_CALLS]tools" + PARTS}
    template = ChatTemplate(words._tokenizer)
    assert template.text([{"role": "user", "content": "hi"}], True, None) == "<s>hi</s>"
    assert template.text([{"role": "user", "content": "hi"}], True, [WEATHER]).endswith("<s>hi</s>")
    words._tokenizer.chat_template = {"default": BOTH, "tool_use": "{% if"}
    with pytest.raises(BadFolder, match="cannot be read"):
        ChatTemplate(words._tokenizer)


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", "cannot be read: line 2: "),
        ("{% for m in messages %}{{ m.content }}", "cannot be read: line 1: "),
        ("{{ messages | nosuch }}", "cannot be read: line 1: No filter named 'nosuch'"),
        ("{% for m in messages %}{{ m.text }}{% endfor %}", "leaves out what users say"),
        ("You are a dormouse.", "leaves out what users say"),
    ],
)
def test_a_template_that_can_never_be_right_is_refused_at_once(tmp_path: Path, template: str, what: str) -> None:
    with pytest.raises(BadFolder, match=what):
        words_of(tmp_path, template)


# --- requests whose grammar is not there yet


class Backend:
    """As much of an instance's as requests need that no lease computes."""

    version = 1

    def __init__(self) -> None:
        self.router = Router()


def test_a_schema_that_is_being_compiled_holds_up_no_other_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, go = words_of(tmp_path, TOOLS), threading.Event()
    made = words.grammars._made
    monkeypatch.setattr(words.grammars, "_made", lambda text: go.wait(60) and made(text))
    backend: Any = Backend()
    server, router = LlmServer(backend, "/", "model", ServedModel(SPEC, [], None), words), backend.router

    def ask(number: int, **fields: Any) -> None:
        body = orjson.dumps({"messages": [{"role": "user", "content": "q"}], **fields})
        server._from_router(m.Run(request=number, lease=None, body=body, nbytes=len(body), route="chat"))

    schemas = [{"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [n]}}} for n in range(4)]
    ask(1, response_format=schemas[1])
    ask(2, response_format=schemas[2])
    assert router.heard == []
    second = server._parked[1].wanted
    assert second is not None
    while not second.work.begun_s:  # its thread starts
        words.grammars.compilers.settle([second.work])
    ask(3)
    assert router.heard == [m.NeedLease(version=1)]
    server._from_router(m.Abandon(request=1))
    assert router.heard[1:] == [m.Raised(request=1, code="cancelled", text="the request was cancelled")]
    ask(4, response_format=schemas[3])
    monkeypatch.setattr(grammar, "COMPILE_S", 0.0)
    server._unpark()
    late = [(message.request, message.code, message.param, message.text) for message in router.heard[2:]]
    assert late == [
        (2, "invalid_value", "response_format", "the schema took more than 0 s: make it simpler"),
        (4, "invalid_value", "response_format", "schemas that take too long are being given up: send it again later"),
    ]
    monkeypatch.undo()
    go.set()
    ask(5, response_format=schemas[1])
    while server._parked:
        words.grammars.compilers.settle([server._parked[0].wanted.work])  # type: ignore[union-attr]
        server._unpark()
    assert [each.request.number for each in server._answering.unfinished()] == [3, 5]
    assert len(router.heard) == 4
