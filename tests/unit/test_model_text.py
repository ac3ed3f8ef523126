"""Text from tokens, requests as OpenAI's interface has them: what an instance does before and after its runtime."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from language_models import tokenizer

from dormouse.client_shim.llm.model import Words
from dormouse.client_shim.llm.requests import RefusedRequest, check_vocabulary, logprobs_of, most_new, parse, stops_of
from dormouse.client_shim.llm.text import WINDOW, TextStream, UnreadableTokens

WORDS: Any = tokenizer()


def decode(tokens: Any) -> str:
    text: str = WORDS.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def streamed(tokens: list[int], *stops: str, window: int = WINDOW) -> tuple[list[str], bool]:
    """What comes with each token, and whether a stop string ended it."""
    stream = TextStream(decode, stops, window)
    parts = [stream.put([token], last=index == len(tokens) - 1) for index, token in enumerate(tokens)]
    return parts, stream.stopped


@given(st.text(min_size=1))
def test_text_comes_whole_however_its_characters_are_split(text: str) -> None:
    text = text.encode("utf-8", errors="ignore").decode()
    tokens = WORDS.encode(text, add_special_tokens=False)
    for window in (0, WINDOW) if tokens else ():
        parts, _ = streamed(tokens, window=window)
        assert "".join(parts) == decode(tokens) == text


@given(st.lists(st.integers(0, 258), min_size=1, max_size=60))
def test_bytes_that_are_no_text_come_as_when_decoded_at_once(tokens: list[int]) -> None:
    for window in (0, WINDOW):
        assert "".join(streamed(tokens, window=window)[0]) == decode(tokens)


def test_no_part_ends_within_a_character() -> None:
    parts, _ = streamed(WORDS.encode("aé\N{SLEEPING SYMBOL}b", add_special_tokens=False))
    assert [part for part in parts if part] == ["a", "é", "\N{SLEEPING SYMBOL}", "b"]


@given(st.text("ab", min_size=1, max_size=40), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_end_it_wherever_they_lie(text: str, stops: list[str]) -> None:
    parts, stopped = streamed(WORDS.encode(text, add_special_tokens=False), *stops)
    ends = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    assert stopped == bool(ends)
    # of several that end with the same token, the one that begins first
    first = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=len(text))
    expected = min((text.find(stop) for stop in stops if stop in text[:first]), default=len(text))
    assert "".join(parts) == text[:expected]


def test_nothing_of_a_stop_string_is_given_out_before_it_is_known() -> None:
    parts, _ = streamed(WORDS.encode("one STEP two STOP three", add_special_tokens=False), "STOP")
    assert "".join(parts) == "one STEP two "
    assert all("STO" not in part for part in parts)


class PanicException(BaseException):
    """As pyo3 has it: no Exception, and it can be told by its name only."""


def test_a_panic_of_the_tokenizer_is_an_error_of_the_tokens() -> None:
    def panics(*_: Any, **__: Any) -> str:
        raise PanicException("index out of range")

    words: Any = object.__new__(Words)
    words._decode, words._special_ids = panics, frozenset()
    for make, tokens in ((words.decode, ([1],)), (words.decode_with, ([1], [1])), (words.token_text, (1,))):
        with pytest.raises(UnreadableTokens, match="index out of range"):
            make(*tokens)


@pytest.mark.parametrize(("field", "value"), [("logit_bias", {"5": 1, "100": 1}), ("stop_token_ids", [5, 100])])
def test_tokens_that_the_model_does_not_have_are_refused(field: str, value: Any) -> None:
    asked = chat(**{field: value})
    check_vocabulary(asked, 101)
    with pytest.raises(RefusedRequest, match="has 100; the model's tokens are 0 to 99") as raised:
        check_vocabulary(asked, 100)
    assert raised.value.param == field


def chat(**fields: Any) -> Any:
    return parse("chat", orjson.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}))


def test_what_is_understood() -> None:
    request = chat(max_completion_tokens=5, max_tokens=9, stop="x", logprobs=True, top_logprobs=2, metadata={"any": 1})
    assert (most_new(request), stops_of(request), logprobs_of(request)) == (5, ["x"], 2)
    chat(response_format={"type": "text"}, store=False, best_of=None)  # asks for nothing that is not there


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"store": True}, "store", "unsupported_parameter"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "unsupported_parameter"),
        ({"guided_json": {}}, "guided_json", "unknown_parameter"),
        ({"response_format": "json"}, "response_format", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": 1e9}, "temperature", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"messages": 3}, "messages", "invalid_value"),
        ({"messages": ["x"]}, "messages", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options", "invalid_value"),
    ],
)
def test_what_is_refused_names_the_field(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(RefusedRequest) as raised:
        chat(**fields)
    assert (raised.value.param.partition(".")[0], raised.value.code) == (param, code)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000])
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(RefusedRequest):
        parse("chat", body)
