"""Text from tokens, requests as OpenAI's interface has them: what an instance does before and after its runtime."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dormouse.client_shim.llm.decoding import _BYTES, Decoding, UnreadableTokens, _stages, _Whole
from dormouse.client_shim.llm.requests import RefusedRequest, check_vocabulary, logprobs_of, most_new, parse, stops_of
from dormouse.client_shim.llm.text import TextStream

WORDS: Any = tokenizer()
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "▁the", "dor", "▁▁x", "mouse", "�", "é", "", "n't", "."]
PHRASE = [*"abé .,!?'", " ", "##ed", "n't", "'s", "word", "end</w>", "</w>", "a", ""]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def with_decoder(pieces: list[str], decoder: Any, model: str = "WordLevel", **options: Any) -> Any:
    """A tokenizer of these tokens, with special ones and others that were added."""
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(["<unk>", *pieces]))}
    made: Any = Tokenizer(
        models.Unigram([(name, 0.0) for name in vocabulary], 0, byte_fallback=True)
        if model == "Unigram"
        else models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
        if model == "BPE"
        else models.WordLevel(vocabulary, "<unk>")
    )
    if decoder is not None:
        made.decoder = decoder
    made.add_special_tokens([AddedToken("<s>"), AddedToken("</s>", lstrip=True, rstrip=True), AddedToken("[é]")])
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken(" added é ", lstrip=True), "Ġx"])
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=made, eos_token="</s>", **options)


ALPHABET_OF = {byte: sign for sign, byte in _BYTES.items()}
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENIZERS = {
    "byte level": with_decoder([*ALPHABET, "ĠÐ", "Ñģ"], decoders.ByteLevel(), "BPE"),
    "byte level in a sequence": with_decoder(
        ALPHABET, decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), "BPE"
    ),
    "llama": with_decoder([*PIECES, *BYTES], decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]), "BPE"),
    "strips three": with_decoder([*PIECES, *BYTES], decoders.Sequence([*LLAMA, decoders.Strip(" ", 3, 0)])),
    "gemma": with_decoder([*PIECES, *BYTES], decoders.Sequence(LLAMA), "BPE"),
    "unigram": with_decoder(PIECES, decoders.Metaspace(), "Unigram"),
    "unigram with bytes": with_decoder(
        [*PIECES, *BYTES], decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), "Unigram"
    ),
    "unigram, cleaned": with_decoder(
        PIECES, decoders.Metaspace(prepend_scheme="never"), "Unigram", clean_up_tokenization_spaces=True
    ),
    "word pieces": with_decoder(PHRASE, decoders.WordPiece()),
    "word pieces, cleaned twice": with_decoder(PHRASE, decoders.WordPiece(), clean_up_tokenization_spaces=True),
    "cleaned": with_decoder(PHRASE, decoders.Fuse(), clean_up_tokenization_spaces=True),
    "of BPE, not cleaned": with_decoder(PHRASE, decoders.Fuse(), "BPE", clean_up_tokenization_spaces=True),
    "suffixes": with_decoder(PHRASE, decoders.BPEDecoder()),
    "replaced at the end": with_decoder(PHRASE, decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "x")])),
    "none": with_decoder(PHRASE, None),
}


def streamed(tokens: list[int], *stops: str, words: Any = WORDS) -> tuple[list[str], bool]:
    """What comes with each token, and whether a stop string ended it."""
    stream = TextStream(Decoding(words), stops)
    parts = [stream.put([token], last=index == len(tokens) - 1) for index, token in enumerate(tokens)]
    return parts, stream.stopped


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=40)
@given(st.data())
def test_parts_joined_are_what_the_tokenizer_makes_of_all_tokens(kind: str, data: st.DataObject) -> None:
    words = TOKENIZERS[kind]
    token = st.integers(0, len(words) - 1) | st.sampled_from(words.encode("<s></s><think>é", add_special_tokens=False))
    parts = data.draw(st.lists(st.lists(token, max_size=4), min_size=1, max_size=25))
    stream = TextStream(Decoding(words))
    text = "".join([*(stream.put(part) for part in parts), stream.put([], last=True)])
    assert text == words.decode([token for part in parts for token in part], skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["llama", "gemma", "unigram with bytes", "byte level"])
@settings(max_examples=30)
@given(st.text(min_size=1))
def test_characters_come_whole_and_none_is_lost(kind: str, text: str) -> None:
    words = TOKENIZERS[kind]
    names = (
        [*map(ALPHABET_OF.__getitem__, text.encode())]
        if kind == "byte level"
        else [BYTES[each] for each in text.encode()]
    )
    tokens = words.convert_tokens_to_ids(["<s>", *names, *["</s>"] * 20, *names])
    parts, _ = streamed(tokens, words=words)
    assert "".join(parts) == words.decode(tokens, skip_special_tokens=True)
    assert "".join(parts).replace(" ", "") == (text + text).replace(" ", "")


def test_blanks_between_words_outlast_many_special_tokens() -> None:
    words = TOKENIZERS["llama"]
    the, end = words.convert_tokens_to_ids(["▁the", "</s>"])
    assert "".join(streamed([end] * 20 + [the] + [end] * 20 + [the], words=words)[0]) == "the the"


def test_each_token_costs_the_same_however_many_were_before() -> None:
    words = TOKENIZERS["llama"]
    decoding, lengths = Decoding(words), list[int]()
    decode = decoding._decode
    decoding._decode = lambda names: lengths.append(len(names)) or decode(names)  # type: ignore[func-returns-value]
    decoding._made = decoding._kind(_stages(words.backend_tokenizer.decoder))
    stream = TextStream(decoding)
    the, byte = words.convert_tokens_to_ids(["▁the", "<0x80>"])
    for token in [the] * 500 + [byte] * 500 + [the] * 500:
        stream.put([token])
    assert sum(lengths) < 4000


def test_no_part_ends_within_a_character() -> None:
    parts, _ = streamed(WORDS.encode("aé💤b", add_special_tokens=False))
    assert [part for part in parts if part] == ["a", "é", "💤", "b"]


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


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("</s>", "one"),  # the token
        ("</s>\n", "onetwo"),
        ("ne</s>t", "o"),
        ("</s><s>", "onetwo\nthree"),
        ("<s>", "onetwo\nthree"),
        ("[é]", "onetwo\nthree</s>four"),
        ("o</s> ", "onetwo\nthree</s>four"),  # it never comes
        ("three</", "onetwo\n"),  # written in letters
    ],
)
def test_a_stop_string_may_be_a_special_token_or_have_one(stop: str, text: str) -> None:
    words = TOKENIZERS["byte level"]
    end, start = words.convert_tokens_to_ids(["</s>", "<s>"])

    def letters(said: str) -> list[int]:
        found: list[int] = words.convert_tokens_to_ids([ALPHABET_OF[byte] for byte in said.encode()])
        return found

    tokens = [*letters("one"), end, *letters("two"), end, *letters("\nthree"), end, start, *letters("</s>four")]
    parts, stopped = streamed(tokens, stop, words=words)
    assert ("".join(parts), stopped) == (text, stop != "o</s> " and stop != "[é]")
    assert "".join(streamed(tokens, words=words)[0]) == "onetwo\nthree</s>four"


def test_a_special_token_that_is_shown_is_text() -> None:
    words = TOKENIZERS["llama"]
    the, mark = words.convert_tokens_to_ids(["▁the", "[é]"])
    stream = TextStream(Decoding(words), shown=[mark])
    assert stream.put([the, mark, the], last=True) == "the[é] the"
    stream = TextStream(Decoding(words), ["[é]"], shown=[mark])
    assert (stream.put([the, mark, the], last=True), stream.stopped) == ("the", True)


def test_what_is_told_of_a_token_is_what_it_adds() -> None:
    words = TOKENIZERS["llama"]
    the, byte, end = words.convert_tokens_to_ids(["▁the", "<0xE6>", "</s>"])
    stream = TextStream(Decoding(words))
    assert [stream.told(token)[1] for token in (the, byte, end, 1 << 20)] == [b"the", b"\xe6", None, None]
    assert stream.told(end)[0] == "</s>"
    stream.put([the])
    assert stream.told(the)[1] == b" the"
    words = TOKENIZERS["byte level"]
    assert TextStream(Decoding(words)).told(words.convert_tokens_to_ids("ĠÐ"))[1] == b" \xd0"


class PanicException(BaseException):
    """As pyo3 has it: no Exception, and it can be told by its name only."""


def test_a_panic_of_the_tokenizer_is_an_error_of_the_tokens() -> None:
    def panics(names: list[str]) -> str:
        raise PanicException("index out of range")

    decoding = Decoding(TOKENIZERS["llama"])
    decoding._made = lambda: _Whole(panics)
    text = TextStream(decoding)
    with pytest.raises(UnreadableTokens, match="index out of range"):
        text.told(1)
    with pytest.raises(UnreadableTokens, match="index out of range"):
        text.put([1], last=True)


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
