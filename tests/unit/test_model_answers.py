"""What an instance of a language model sends its router: the parts of one step together, and ends after their parts."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import orjson
import pytest
from language_models import tokenizer

from dormouse.client_shim.llm import requests as r
from dormouse.client_shim.llm.answering import Answering
from dormouse.client_shim.llm.answers import Choice, OpenAiAnswer
from dormouse.client_shim.llm.open_requests import OpenChoice, OpenRequest
from dormouse.client_shim.llm.text import TextStream, UnreadableTokens
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


def readable(tokens: Sequence[int]) -> str:
    if -1 in tokens:
        raise UnreadableTokens("the tokenizer fails")
    text: str = WORDS.decode(list(tokens))
    return text


def stream(answering: Answering, number: int) -> None:
    asked = r.parse("completions", orjson.dumps({"prompt": "x", "stream": True}))
    request = OpenRequest(number, asked, OpenAiAnswer(kind="completions", id="c", model="m"), [1], 100, -1)
    text = TextStream(readable)
    request.generations.append(OpenChoice(number, request, Choice(0), 0, text))
    answering.add(request)


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
    unreadable = m.ChosenToken(number=1, token=-1)
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
