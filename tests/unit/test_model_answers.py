"""What an instance of a language model sends its router: the parts of one step together, and ends after their parts."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import orjson
import pytest
from language_models import tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dormouse.client_shim.llm import requests as r
from dormouse.client_shim.llm.answering import Answering
from dormouse.client_shim.llm.answers import Choice, OpenAiAnswer
from dormouse.client_shim.llm.decoding import Decoding
from dormouse.client_shim.llm.open_requests import OpenChoice, OpenRequest
from dormouse.client_shim.llm.text import TextStream
from dormouse.schemas import messages as m

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
    request = OpenRequest(number, asked, answer, [1], 100, told)
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
