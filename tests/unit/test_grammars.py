"""Grammars against a tokenizer that has a token for each byte: what a mask lets through is what the schema takes."""

import json
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import VOCABULARY, tokenizer

from dormouse.client_shim.llm import grammar
from dormouse.client_shim.llm.grammar import BrokenGrammar, Grammar, Grammars
from dormouse.client_shim.llm.requests import RefusedRequest, parse, schema_of
from dormouse.client_shim.llm.tools import HERMES, LLAMA, MISTRAL, ToolFormat, grammar_of, tool_use
from dormouse.core.links.fds import MAX_PACKET_NBYTES
from dormouse.schemas import messages as m

END = 2
WORDS: Any = tokenizer()
GRAMMARS = Grammars(WORDS, VOCABULARY, [END])
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "w": {"enum": ["x", "y"]}},
    "required": ["n", "w"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Rom", "Ulm"]}},
        },
    },
}
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]))  # these come as escapes only
ADD = {"type": "function", "function": {"name": "add"}}


def may(mask: bytes) -> list[int]:
    return [token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1]


def made(text: str, param: str = "tools", grammars: Grammars = GRAMMARS, now_s: float = 0.0) -> Grammar:
    """With all the time that it takes."""
    wanted = grammars.wanted(text, param)
    while not wanted.work.done:
        grammars.compilers.settle([wanted.work])
    found = grammars.compiled(wanted, now_s)
    assert found is not None
    return found.fresh()


def compiled(schema: dict[str, Any]) -> Grammar:
    text = grammar_of(None, None, schema, {})
    assert text is not None
    return made(text, "response_format")


def takes(found: Grammar, text: str) -> bool:
    """Whether the text may come, and an end may come after it."""
    for token in WORDS.encode(text, add_special_tokens=False):
        if token not in may(found.bits):
            return False
        found.take(token)
    return found.complete or END in may(found.bits)


@given(st.integers(0, 99), st.sampled_from("xy"), st.text(" \n", max_size=3))
def test_what_the_schema_takes_may_come(number: int, word: str, blank: str) -> None:
    text = f'{{{blank}"n":{blank}{number}{blank},{blank}"w": "{word}"{blank}}}'
    assert takes(compiled(SCHEMA), text)


@pytest.mark.parametrize(
    "text", ['{"n": 100, "w": "x"}', '{"n": 1}', '{"n": 1, "w": "z"}', "[]", "hello", '{"n": 1,', ""]
)
def test_what_it_does_not_take_may_not(text: str) -> None:
    assert not takes(compiled(SCHEMA), text)


def test_blanks_between_signs_have_an_end() -> None:
    assert takes(compiled(SCHEMA), '{"n":' + " " * 32 + '1, "w": "x"}')
    assert not takes(compiled(SCHEMA), '{"n":' + " " * 33 + '1, "w": "x"}')


@settings(max_examples=50)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | TEXT, lambda x: st.lists(x) | st.dictionaries(TEXT, x), max_leaves=8
    )
)
def test_any_json_object_may_come(value: Any) -> None:
    assert takes(compiled({"type": "object"}), json.dumps({"value": value}, ensure_ascii=False))


def test_masks_are_as_long_as_the_vocabulary_and_have_no_token_beyond_the_tokenizer() -> None:
    found = made(r"start: /(.|\n)*/")
    mask = found.bits
    assert len(mask) == VOCABULARY // 8
    assert END in may(mask)
    assert max(may(mask)) < len(WORDS)


def test_answers_of_one_grammar_are_apart() -> None:
    one, other = compiled(SCHEMA), compiled(SCHEMA)
    assert takes(one, '{"n": 1, "w": "x"}')
    assert takes(other, '{"n": 2, "w": "y"}')


def test_a_token_that_may_not_come_breaks_it() -> None:
    found = compiled(SCHEMA)
    with pytest.raises(BrokenGrammar):
        found.take(50)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "nosuch"}, "nosuch"),
        ({"not": {"type": "string"}}, "not"),
        ({"$ref": "http://127.0.0.1/x"}, "http://127.0.0.1/x"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "cannot be used"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"type": "string", "pattern": "^a{1000000}$"}, "cannot be used: lexer error: too many expressions"),
        ({"type": "string", "pattern": "(" * 5000 + ")" * 5000}, "regex"),
        ({"type": "number", "minimum": 5, "maximum": 1}, "cannot be used"),
    ],
)
def test_schemas_that_cannot_be_used_are_refused_with_the_reason(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(RefusedRequest, match=why) as raised:
        compiled(schema)
    assert raised.value.param == "response_format"
    assert len(str(raised.value)) < 700


def test_deep_and_large_schemas_end_in_time() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        deep = {"anyOf": [deep]}
    wide: dict[str, Any] = {"type": "string"}
    for number in range(12):
        wide = {"anyOf": [wide, {"type": "object", "properties": {f"a{number}": wide, "z": wide}}]}
    for schema in (deep, wide):
        with pytest.raises(RefusedRequest, match=r"recursion|too large|more than"):
            compiled(schema)


def test_schemas_that_take_too_long_are_given_up_and_not_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, go = Grammars(WORDS, VOCABULARY, [END]), threading.Event()
    real = grammars._made
    monkeypatch.setattr(grammars, "_made", lambda text: go.wait() and real(text))
    many = [grammars.wanted(f"start: /{letter}/", "tools") for letter in "abc"]
    for wanted in many:
        grammars.compilers.settle([wanted.work])
        assert grammars.compiled(wanted, wanted.work.given_s) is None
    for wanted, why in zip(many, ["took more than 3 s", "took more than 3 s", "again later"], strict=True):
        with pytest.raises(RefusedRequest, match=why):
            grammars.compiled(wanted, wanted.work.given_s + grammar.COMPILE_S)
    go.set()
    monkeypatch.undo()
    assert takes(made("start: /a/", grammars=grammars), "a")  # none of those was kept


def test_requests_that_want_the_same_schema_share_its_compilation() -> None:
    grammars = Grammars(WORDS, VOCABULARY, [END])
    assert grammars.wanted("start: /a/", "tools").work is grammars.wanted("start: /a/", "tools").work
    made("start: /a/", grammars=grammars)
    done = grammars.wanted("start: /a/", "tools")
    assert done.work.done
    grammars.drop(done)
    assert grammars.wanted("start: /a/", "tools").work is not done.work


def call(form: ToolFormat, city: str) -> str:
    return f'{{"name": "weather", "{form.key}": {{"city": "{city}"}}}}'


def written(form: ToolFormat, *calls: str) -> str:
    if form is MISTRAL:
        return f"[TOOL_CALLS][{', '.join(calls)}]"
    return calls[0] if form is LLAMA else "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in calls)


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
def test_answers_that_must_call_tools_do(form: ToolFormat) -> None:
    def allowed(text: str, choice: Any = "required", parallel: bool = True, schema: Any = None) -> bool:
        wanted = grammar_of(tool_use([WEATHER, ADD], choice, parallel), form, schema, {})
        assert wanted is not None
        return takes(made(wanted), text)

    good, bad, other = call(form, "Ulm"), call(form, "Bonn"), f'{{"name": "add", "{form.key}": {{}}}}'
    weather = {"type": "function", "function": {"name": "weather"}}
    assert allowed(written(form, good))
    assert allowed(written(form, other))
    assert allowed(written(form, good), weather)
    assert not allowed(written(form, other), weather)
    assert not allowed(written(form, bad))
    assert not allowed("hello")
    assert allowed("hello", "auto")  # one of them is strict: whatever is called is right
    assert allowed(written(form, good), "auto")
    assert not allowed(written(form, bad), "auto")
    assert allowed('{"n": 1, "w": "x"}', "auto", schema=SCHEMA)
    assert allowed(written(form, good), "auto", schema=SCHEMA)
    assert not allowed("hello", "auto", schema=SCHEMA)
    if form is not LLAMA:
        assert allowed(written(form, good, other))
        assert not allowed(written(form, good, other), parallel=False)


@pytest.mark.parametrize("form", [HERMES, MISTRAL])
def test_marks_that_are_special_tokens_come_as_these(form: ToolFormat) -> None:
    words: Any = tokenizer()
    words.add_special_tokens({"additional_special_tokens": [form.opening, *([form.closing] if form.closing else [])]})
    special = {mark: words.convert_tokens_to_ids(mark) for mark in (form.opening, form.closing) if mark}
    for choice in ("auto", "required"):
        wanted = grammar_of(tool_use([WEATHER], choice, True), form, None, special)
        assert wanted is not None
        found = made(wanted, grammars=Grammars(words, VOCABULARY, [END]))
        for token in words.encode(written(form, call(form, "Rom")), add_special_tokens=False):
            assert token in may(found.bits)
            found.take(token)
        assert found.complete or END in may(found.bits)


def test_nothing_is_kept_to_where_nothing_has_to() -> None:
    assert grammar_of(tool_use([ADD], "auto", None), HERMES, None, {}) is None
    assert grammar_of(None, None, None, {}) is None


def test_how_strict_the_library_is_is_not_a_requests_to_say() -> None:
    """It would ignore what it does not know, and take blanks without end."""
    loose = {"type": "object", "x-guidance": {"lenient": True}}
    with pytest.raises(RefusedRequest, match="x-guidance is no part of a schema") as raised:
        grammar_of(None, None, loose, {})
    assert raised.value.param == "response_format"
    tool = {"type": "function", "function": {"name": "f", "parameters": loose}}
    with pytest.raises(RefusedRequest, match="x-guidance is no part of a schema") as raised:
        grammar_of(tool_use([tool], "required", None), HERMES, None, {})
    assert raised.value.param == "tools"


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{"type": "custom"}], None, "tools"),
        ([{"type": "function"}], None, "tools"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "tools"),
        ([{"type": "function", "function": {"name": "\ud800"}}], None, "tools"),
        ([{"type": "function", "function": {"name": "x" * 65}}], None, "tools"),
        ([{"type": "function", "function": {"name": 'a"}}'}}], None, "tools"),
        ([{"type": "function", "function": {"name": "f", "parameters": "x"}}], None, "tools"),
        ([ADD, ADD], None, "tools"),
        ([ADD] * 200, None, "tools"),
        ([ADD], "some", "tool_choice"),
        ([ADD], {"type": "function", "function": {"name": "other"}}, "tool_choice"),
        ([ADD], {"type": "allowed_tools"}, "tool_choice"),
        ([], "required", "tool_choice"),
    ],
)
def test_tools_that_are_none_are_refused(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(RefusedRequest) as raised:
        tool_use(tools, choice, None)
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("given_", "found"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, SCHEMA),
    ],
)
def test_forms_of_answers(given_: Any, found: Any) -> None:
    assert schema_of(parse("chat", json.dumps({"messages": [], "response_format": given_}).encode())) == found


@pytest.mark.parametrize(
    "given_", [{}, {"type": "regex"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 3}}]
)
def test_other_forms_are_refused_by_name(given_: Any) -> None:
    with pytest.raises(RefusedRequest) as raised:
        schema_of(parse("chat", json.dumps({"messages": [], "response_format": given_}).encode()))
    assert raised.value.param == "response_format"


def test_a_vocabulary_whose_masks_fit_no_packet_is_refused() -> None:
    largest = m.ForRuntime(data=msgspec.msgpack.encode(m.Mask(number=1 << 40, position=1 << 24, bits=bytes(60_000))))
    assert len(msgspec.msgpack.encode(largest)) < MAX_PACKET_NBYTES
    assert grammar.VOCABULARY == 8 * 60_000
    with pytest.raises(RefusedRequest, match="480,001 tokens"):
        made("start: /a/", grammars=Grammars(WORDS, grammar.VOCABULARY + 1, [END]))
