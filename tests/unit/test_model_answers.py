"""What an instance of a language model sends its router: the parts of one step together, and ends after their parts."""

import threading
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import orjson
import pytest
from language_models import VOCABULARY, tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dormouse.client_shim.llm import open_requests
from dormouse.client_shim.llm import requests as r
from dormouse.client_shim.llm.answering import Answering
from dormouse.client_shim.llm.answers import Choice, OpenAiAnswer
from dormouse.client_shim.llm.decoding import Decoding
from dormouse.client_shim.llm.grammar import MASKS_S, BrokenGrammar, Grammar, Grammars
from dormouse.client_shim.llm.open_requests import OpenChoice, OpenRequest
from dormouse.client_shim.llm.text import TextStream
from dormouse.client_shim.llm.tools import grammar_of
from dormouse.client_shim.llm.workers import Work
from dormouse.schemas import messages as m
from dormouse.schemas.llm import DefaultSampling

WORDS: Any = tokenizer()


class Router:
    """Takes what is sent to it."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def send(self, message: Any) -> None:
        self.heard.append(message)

    def take(self) -> list[Any]:
        """But that an answer has begun."""
        heard, self.heard = self.heard, []
        return [message for message in heard if not isinstance(message, m.AnswerBegun)]


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def answering(router: Router) -> Answering:
    sink: Any = router
    return Answering(sink, WORDS, lambda message: None, count(100))


def opened(
    answering: Answering, number: int, kind: r.Kind, words: Any = WORDS, stops: Sequence[str] = (), **fields: Any
) -> None:
    asked = r.parse(
        kind, orjson.dumps({"prompt": "x"} | fields if kind == "completions" else {"messages": []} | fields)
    )
    told = r.logprobs_of(asked)
    answer = OpenAiAnswer(kind=kind, id="c", model="m", wants_logprobs=told >= 0)
    request = OpenRequest(number, asked, answer, [1], 100, told, DefaultSampling())
    request.generations.append(OpenChoice(number, request, Choice(0), 0, TextStream(Decoding(words), stops)))
    answering.add(request)


def stream(answering: Answering, number: int) -> None:
    opened(answering, number, "completions", stream=True)


def step(*numbers: int, finish: str = "") -> m.Tokens:
    (token,) = WORDS.encode("a", add_special_tokens=False)
    return m.Tokens(tokens=[m.ChosenToken(number=number, token=token, finish=finish) for number in numbers])


def test_parts_of_a_step_are_one_message(answering: Answering, router: Router) -> None:
    for number in (1, 2, 3):
        stream(answering, number)
    answering.tokens(step(1, 2, 3))
    (first,) = router.take()
    assert [(part.request, part.kind) for part in first.parts] == [(number, m.SSE) for number in (1, 2, 3)]
    answering.tokens(step(1, 3))
    (second,) = router.take()
    assert [(part.request, part.kind) for part in second.parts] == [(1, None), (3, None)]
    assert all(b'"text":"a"' in part.body for part in (*first.parts, *second.parts))


def test_tokens_that_are_no_text_fail_their_own_answer_only(answering: Answering, router: Router) -> None:
    for number in (1, 2):
        stream(answering, number)
    made = step(1, 2)
    unreadable = m.ChosenToken(number=1, token=-1)  # of no tokenizer
    answering.tokens(m.Tokens(tokens=[unreadable, made.tokens[1]]))
    failed, parts = router.take()
    assert (failed.request, failed.code) == (1, "bad_response")
    assert [part.request for part in parts.parts] == [2]


def test_an_end_comes_after_its_parts(answering: Answering, router: Router) -> None:
    for number in (1, 2):
        stream(answering, number)
    answering.tokens(step(1, 2, finish="length"))
    heard = router.take()
    ends = [index for index, message in enumerate(heard) if isinstance(message, m.Returned)]
    assert [heard[index].request for index in ends] == [1, 2]
    for index in ends:
        parts = [part for message in heard[:index] if isinstance(message, m.AnswerParts) for part in message.parts]
        body = b"".join(part.body for part in parts if part.request == heard[index].request)
        assert body.endswith(b"data: [DONE]\n\n")


def test_what_failed_says_so_after_its_parts(answering: Answering, router: Router) -> None:
    stream(answering, 1)
    answering.tokens(step(1))
    answering.fail_all("out_of_memory", "no room")
    parts, raised = router.take()
    assert isinstance(parts, m.AnswerParts)
    assert isinstance(raised, m.Raised)
    assert answering.idle


# --- grammars: `go` lets those on that have to wait


class SlowGrammar(Grammar):
    """One that needs a word of the test to take a token."""

    go = threading.Event()

    def take(self, token: int) -> None:
        assert self.go.wait(60)
        super().take(token)


class KnownWords:
    """As much of them as answers need."""

    def __init__(self) -> None:
        self.grammars = Grammars(WORDS, VOCABULARY, [2])


class Kept:
    """Two streams: 1 keeps to a schema, 2 to nothing. ``told`` to the runtime: what comes after `take`."""

    def __init__(self, router: Router, text: str, kind: type[Grammar] = Grammar) -> None:
        self.words, self.router, self.told = KnownWords(), router, list[Any]()
        words: Any = self.words
        sink: Any = router
        self.answering = Answering(sink, words, self.told.append, count(100))
        for number in (1, 2):
            stream(self.answering, number)
        (first, _) = self.answering.unfinished()
        self.choice, grammars = first, self.words.grammars
        self.wanted = first.request.wanted = grammars.wanted(text, "response_format")
        while not self.wanted.work.done:
            grammars.compilers.settle([self.wanted.work])
        grammar = grammars.compiled(self.wanted, 0.0)
        assert grammar is not None
        first.grammar = kind(grammar.fresh()._matcher, grammar.bits)

    def say(self, *numbers: int) -> list[Any]:
        """Both make an `a`. Returns what the router hears."""
        self.answering.tokens(step(*numbers))
        return self.router.take()

    def settle(self) -> list[Any]:
        """What it hears once all grammars have taken what has come."""
        while self.answering.late:
            taking = self.choice.taking
            self.words.grammars.maskers.settle([] if taking is None else [taking])
            self.answering.go_on()
        return self.router.take()


@pytest.fixture
def go() -> Iterator[threading.Event]:
    SlowGrammar.go = threading.Event()
    yield SlowGrammar.go
    SlowGrammar.go.set()


def test_a_grammar_that_takes_its_time_holds_up_its_own_answer_only(
    router: Router, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(router, "start: /a{3}/", SlowGrammar)
    (heard,) = kept.say(1, 2)
    assert [part.request for part in heard.parts] == [2]
    with monkeypatch.context() as nobody_waits:
        nobody_waits.setattr(kept.words.grammars.maskers, "settle", pytest.fail)
        (heard,) = kept.say(2)
    assert [part.request for part in heard.parts] == [2]
    assert kept.choice.mask() is None  # nor is it sent with a next lease
    assert kept.told == []
    go.set()
    (heard,) = kept.settle()
    assert [part.request for part in heard.parts] == [1]
    assert b'"text":"a"' in heard.parts[0].body
    assert kept.told == [kept.choice.mask()]
    kept.say(1)
    kept.settle()
    kept.say(1)
    kept.settle()
    assert kept.choice.choice.finish == "stop"
    assert kept.told[-1] == m.Abort(number=1)


def test_a_grammar_is_late_but_its_answer_pauses_for_its_client(router: Router, go: threading.Event) -> None:
    kept = Kept(router, "start: /a{3}/", SlowGrammar)
    request = kept.choice.request
    kept.say(1)
    kept.answering._hold(request)
    go.set()
    kept.settle()
    assert [type(message) for message in kept.told] == [m.Abort]  # a mask would be for nobody
    assert kept.answering.taken(1, 1) == [kept.choice]
    assert kept.choice.mask() is not None


def test_one_whose_time_is_over_is_refused_and_not_kept(
    router: Router, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(router, "start: /a{3}/", SlowGrammar)
    monkeypatch.setattr(open_requests, "SLOW_S", 0.0)
    monkeypatch.setattr(open_requests, "MASKS_S", 0.0)
    heard = kept.say(1, 2)
    kept.answering.go_on()
    (raised,) = [message for message in heard + router.take() if isinstance(message, m.Raised)]
    why = "the schema cannot be used: to find out which tokens may come took more than 0 s: make it simpler"
    assert raised == m.Raised(request=1, code="invalid_value", text=why, param="response_format")
    assert kept.words.grammars.wanted("start: /a{3}/", "tools").work is not kept.wanted.work
    go.set()
    (heard,) = kept.say(2)
    assert [part.request for part in heard.parts] == [2]


def test_slow_masks_of_an_answer_count_together(router: Router) -> None:
    kept = Kept(router, "start: /a{3}/")
    kept.say(1)
    kept.settle()
    kept.choice.slow_s = MASKS_S - 0.5
    kept.choice.taking = Work(lambda: None)
    kept.choice.taking.run()
    kept.choice.taking.cpu_s = 0.4
    assert kept.choice.taken(0.0)
    kept.choice.taking = Work(lambda: None)
    kept.choice.taking.run()
    kept.choice.taking.cpu_s = 0.2
    with pytest.raises(BrokenGrammar, match="more than 3 s"):
        kept.choice.taken(0.0)


def test_a_schema_that_breaks_its_grammar_on_the_way_is_a_mistake_of_who_sent_it(router: Router) -> None:
    pattern = {"type": "string", "pattern": "^a{1000000}$"}
    text = grammar_of(None, None, {"type": "object", "properties": {"x": pattern}, "required": ["x"]}, {})
    assert text is not None
    kept, heard = Kept(router, text), list[Any]()
    for token in WORDS.encode('{"x":"aaa', add_special_tokens=False):
        kept.answering.tokens(m.Tokens(tokens=[m.ChosenToken(number=1, token=token)]))
        heard += kept.settle()
    (raised,) = [message for message in heard if isinstance(message, m.Raised)]
    assert (raised.request, raised.code, raised.param) == (1, "invalid_value", "response_format")
    assert "the schema cannot be used: lexer error: too many expressions" in raised.text
    assert [each.request.number for each in kept.answering.unfinished()] == [2]
    assert kept.words.grammars.wanted(kept.wanted.text, "tools").work is not kept.wanted.work


# --- logprobs


BLANK = "\N{LOWER ONE EIGHTH BLOCK}"


def pieces() -> Any:
    """A tokenizer as Llama's, with a token twice: `A`, and as a byte."""
    names = ["<unk>", f"{BLANK}the", "mouse", "<0xC3>", "<0xA9>", "A", "<0x41>", "</s>"]
    made = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=made, eos_token="</s>")


SAID = [(1, [(1, -0.5), (2, -1.0)]), (3, [(6, -0.25), (5, -0.5)]), (4, []), (7, [(3, -0.125)]), (1, [(1, -0.5)])]
"""Tokens, and which would have been the most probable ones; each itself has -0.5."""


def told(answering: Answering, router: Router, kind: r.Kind, **fields: Any) -> list[Any]:
    """What is said of SAID, in the choices of an answer, or of a stream's parts."""
    opened(answering, 1, kind, pieces(), **fields)
    for index, (token, top) in enumerate(SAID):
        finish = "length" if index == len(SAID) - 1 else ""
        chosen = m.ChosenToken(number=1, token=token, finish=finish, logprob=-0.5, top=top)
        answering.tokens(m.Tokens(tokens=[chosen]))
    heard = router.take()
    if not fields.get("stream"):
        return [choice for message in heard for choice in orjson.loads(message.body)["choices"]]
    body = b"".join(part.body for message in heard if isinstance(message, m.AnswerParts) for part in message.parts)
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n")]
    return [choice for event in events if event.startswith(b"{") for choice in orjson.loads(event)["choices"]]


@pytest.mark.parametrize("streams", [False, True])
def test_completions_tell_tokens_as_openai_does(answering: Answering, router: Router, streams: bool) -> None:
    choices = told(answering, router, "completions", logprobs=2, stream=streams)
    assert "".join(choice["text"] for choice in choices) == "theé the"
    found: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            found[name] = found.get(name, []) + values
    assert found == {
        "tokens": ["the", "bytes:\\xc3", "bytes:\\xa9", "</s>", " the"],
        "token_logprobs": [-0.5] * 5,
        "top_logprobs": [
            {"the": -0.5, "mouse": -1.0},
            {"A": -0.25, "bytes:\\xc3": -0.5},  # of both, the more probable one
            {"bytes:\\xa9": -0.5},
            {"bytes:\\xc3": -0.125, "</s>": -0.5},
            {" the": -0.5},
        ],
        "text_offset": [0, 3, 3, 4, 4],
    }


@pytest.mark.parametrize("streams", [False, True])
def test_the_bytes_of_a_chat_s_tokens_joined_are_its_text(answering: Answering, router: Router, streams: bool) -> None:
    choices = told(answering, router, "chat", logprobs=True, top_logprobs=2, stream=streams)
    content = [each for choice in choices for each in (choice["logprobs"] or {"content": []})["content"]]
    assert [each["token"] for each in content] == ["the", "\\xc3", "\\xa9", "</s>", " the"]
    assert content[3]["bytes"] is None  # it is no text
    assert b"".join(bytes(each["bytes"] or ()) for each in content).decode() == "theé the"
    assert [[top["token"], bytes(top["bytes"])] for top in content[1]["top_logprobs"]] == [["A", b"A"], ["A", b"A"]]


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_that_is_a_special_token_ends_an_answer(answering: Answering, router: Router, streams: bool) -> None:
    choices = told(answering, router, "chat", stops=["</s>"], stream=streams)
    texts = [choice.get("delta", choice.get("message")).get("content") or "" for choice in choices]
    assert ("".join(texts), choices[-1]["finish_reason"]) == ("theé", "stop")
