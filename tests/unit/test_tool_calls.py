"""Calls of tools in a model's text: each form, at every place where the text may be cut; what is no call is text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.client_shim.llm.tool_calls import CallBegun, CallEnded, CallPart, ToolCallStream
from dormouse.client_shim.llm.tools import HERMES, LLAMA, MISTRAL, ToolFormat, format_of

NAMES = ("weather", "add")
CALL = '{"name": "weather", "arguments": {"city": "a } </tool_call> \\" [TOOL_CALLS]", "n": [1, {"x": {}}]}}'
OTHER = '{"name": "add", "arguments": {}}'
ARGUMENTS = json.loads(CALL)["arguments"]


def heard(form: ToolFormat, parts: list[str], certain: bool = False) -> tuple[str, list[tuple[str, Any]]]:
    """All text, and the calls."""
    stream = ToolCallStream(form, NAMES, certain)
    pieces = [piece for part in parts for piece in stream.put(part)] + stream.put("", last=True)
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegun):
            calls.append((piece.name, ""))
        elif isinstance(piece, CallPart):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    assert sum(isinstance(piece, CallEnded) for piece in pieces) == len(calls)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def everywhere(form: ToolFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The same, wherever it is cut."""
    whole = heard(form, [text])
    for at in range(len(text)):
        assert heard(form, [text[:at], text[at:]]) == whole, text[:at]
    assert heard(form, list(text)) == whole
    return whole


LLAMA_CALL = CALL.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
        (HERMES, f"\n\n<tool_call>{CALL}</tool_call>\n", "", 1),
        (
            HERMES,
            f"Let me see. \n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
            "Let me see.",
            2,
        ),
        (HERMES, f"<tool_call>\n{CALL}", "", 1),  # it ended there
        (HERMES, f"<tool_call>\n{CALL}\n</tool", "", 1),
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call> and more", " and more", 1),
        (HERMES, f"<tool_call>\n{CALL} no end", " no end", 1),
        (LLAMA, LLAMA_CALL, "", 1),
        (LLAMA, f" <|python_tag|>{LLAMA_CALL}", "", 1),
        (LLAMA, f"{LLAMA_CALL}; {LLAMA_CALL}", "", 2),
        (LLAMA, f"Well:<|python_tag|>{LLAMA_CALL}", "Well:", 1),
        (MISTRAL, f"[TOOL_CALLS][{CALL}]", "", 1),
        (MISTRAL, f"I will. [TOOL_CALLS] [{CALL}, {CALL}]", "I will.", 2),
    ],
)
def test_calls_are_found_wherever_they_are_cut(form: ToolFormat, text: str, said: str, calls: int) -> None:
    assert everywhere(form, text) == (said, [("weather", ARGUMENTS)] * calls)


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
        (HERMES, f"I see. <tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", "I see.", 2),
        (LLAMA, LLAMA_CALL, "", 1),
        (HERMES, '<tool_call>\n{"name": "wea', '<tool_call>\n{"name": "wea', 0),
        (HERMES, "no call", "no call", 0),
    ],
)
def test_arguments_that_are_certain_come_as_they_are_made(form: ToolFormat, text: str, said: str, calls: int) -> None:
    for at in range(len(text)):
        assert heard(form, [text[:at], text[at:]], True) == (said, [("weather", ARGUMENTS)] * calls)
    assert heard(form, list(text), True) == (said, [("weather", ARGUMENTS)] * calls)


def test_of_a_call_that_is_cut_short_all_is_told() -> None:
    stream = ToolCallStream(HERMES, NAMES, True)
    pieces = stream.put('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b') + stream.put("", last=True)
    assert [piece.name for piece in pieces if isinstance(piece, CallBegun)] == ["add"]
    assert "".join(piece.text for piece in pieces if isinstance(piece, CallPart)) == '{"a": 1, "b'
    assert not any(isinstance(piece, str | CallEnded) for piece in pieces)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "a < b <tool_ <tool_call> is a word, as is </tool_call>  "),
        (HERMES, '<tool_call>\n{"name": "weather", "arguments": {bad}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": ["weather"], "arguments": {}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "weather", "arguments": "text"}\n</tool_call> '),
        (HERMES, '<tool_call>\n{"name": "weather", "argum'),
        (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"x": NaN}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"x": 1e999}}\n</tool_call>'),
        (HERMES, " \n<tool_call"),
        (HERMES, "  \n"),
        (HERMES, CALL),
        (LLAMA, '{"name": "Ada", "parameters": {}}'),
        (LLAMA, '{"an": "answer"} and more {"x"'),
        (LLAMA, f"It would be {LLAMA_CALL}"),
        (LLAMA, "{" * 3000 + "}" * 3000),
        (MISTRAL, "[TOOL_CALLS][1, 2]"),
        (MISTRAL, f"[TOOL_CALLS][{CALL}, 3]"),
        (MISTRAL, "[TOOL_CALLS][]"),
    ],
)
def test_what_is_no_call_comes_out_as_text(form: ToolFormat, text: str) -> None:
    if len(text) < 1000:
        everywhere(form, text)
    assert heard(form, list(text)) == (text, [])


PARTS = [
    "<tool_call>",
    "</tool_call>",
    "\n",
    " ",
    CALL,
    OTHER,
    "{",
    "}",
    "text",
    '"',
    "<tool",
    ";",
    "[TOOL_CALLS]",
    "[",
]


@given(st.lists(st.sampled_from(PARTS), max_size=12), st.sampled_from([HERMES, LLAMA, MISTRAL]), st.data())
def test_nothing_depends_on_how_it_is_cut(parts: list[str], form: ToolFormat, data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    said, calls = heard(form, pieces)
    assert (said, calls) == heard(form, [text])
    if not calls:
        assert said == text


def test_the_form_is_known_by_the_template() -> None:
    assert format_of("{{ tools }} <tool_call>") is HERMES
    assert format_of("{% if tools %}<|python_tag|>") is LLAMA
    assert format_of("{{ tools }} [TOOL_CALLS]") is MISTRAL
    assert format_of("{{ messages }} <tool_call>") is None
    assert format_of("{{ tools }} <tool_call><function=x>") is None
    assert format_of("{{ tools }}") is None


def test_ids_of_mistral_are_what_its_templates_take() -> None:
    call, _, _ = ToolCallStream(MISTRAL, NAMES).put(f"[TOOL_CALLS][{OTHER}]", last=True)
    assert isinstance(call, CallBegun)
    assert len(call.id) == 9
    assert call.id.isalnum()
