"""Answers in the form of OpenAI's interface: whole, and as server-sent events."""

import codecs
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from dormouse.schemas.llm import DONE

Kind = Literal["chat", "completions"]


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(value)


@dataclass
class ToolCall:
    """A call as made so far; ``arguments`` are parts of a JSON object."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass
class Choice:
    """One choice as made so far."""

    index: int
    text: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(kw_only=True)
class OpenAiAnswer:
    """One answer. ``usage``: token counts, once they are known."""

    kind: Kind
    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    wants_logprobs: bool = False
    _told: dict[int, "_LogprobsOfCompletions"] = field(default_factory=dict)  # by choice
    _around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # by choice: the bytes around a part's text

    def _head(self, chunk: bool) -> dict[str, Any]:
        if self.kind == "completions":
            name = "text_completion"
        else:
            name = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        return orjson.dumps({**self._head(False), "choices": [self._choice(each) for each in choices], "usage": usage})

    def _choice(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        said: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish}
        if self.kind == "completions":
            told = self._legacy(choice.index, choice.logprobs) if self.wants_logprobs else None
            said |= {"text": text, "logprobs": told}
        else:
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if choice.calls:
                message |= {"content": text or None, "tool_calls": [_called(call) for call in choice.calls]}
            said |= {"message": message, "logprobs": {"content": choice.logprobs} if self.wants_logprobs else None}
        return said

    def _legacy(self, index: int, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return self._told.setdefault(index, _LogprobsOfCompletions()).told(logprobs)

    def first(self, index: int) -> bytes:
        """Before any text: only chats have it."""
        if self.kind == "completions":
            return b""
        delta = {"role": "assistant", "content": ""}
        return self._part({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def part(self, index: int, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """The next text of a choice. Without logprobs nothing but the text differs from part to part."""
        if self.wants_logprobs:
            return self._text_part(index, text, logprobs)
        if (around := self._around.get(index)) is None:
            before, _, after = self._text_part(index, "", []).rpartition(b'""')
            around = self._around[index] = before, after
        return b"%b%b%b" % (around[0], orjson.dumps(text), around[1])

    def _text_part(self, index: int, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        if self.kind == "completions":
            told: Any = self._legacy(index, logprobs) if self.wants_logprobs else None
            return self._part({"index": index, "text": text, "logprobs": told, "finish_reason": None})
        told = {"content": logprobs} if self.wants_logprobs else None
        return self._part({"index": index, "delta": {"content": text}, "logprobs": told, "finish_reason": None})

    def call(self, index: int, number: int, call: ToolCall) -> bytes:
        """A choice's call of a tool, its ``number`` th, begins."""
        return self._call_part(index, {"index": number, **_called(call)})

    def arguments(self, index: int, number: int, text: str) -> bytes:
        """The next of its arguments."""
        return self._call_part(index, {"index": number, "function": {"arguments": text}})

    def _call_part(self, index: int, part: dict[str, Any]) -> bytes:
        told: Any = {"content": []} if self.wants_logprobs else None
        return self._part({"index": index, "delta": {"tool_calls": [part]}, "logprobs": told, "finish_reason": None})

    def last(self, index: int, finish: str) -> bytes:
        if self.kind == "completions":
            return self._part({"index": index, "text": "", "logprobs": None, "finish_reason": finish})
        return self._part({"index": index, "delta": {}, "logprobs": None, "finish_reason": finish})

    def end(self, usage: dict[str, Any], wanted: bool) -> bytes:
        """Of the stream; with token counts, if they are ``wanted``."""
        return (self.usage(usage) if wanted else b"") + DONE

    def usage(self, usage: dict[str, Any]) -> bytes:
        return event({**self._head(True), "choices": [], "usage": usage})

    def _part(self, choice: dict[str, Any]) -> bytes:
        return event({**self._head(True), "choices": [choice]})


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": "".join(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def logprob_entry(name: str, text: bytes | None, logprob: float) -> dict[str, Any]:
    """Of a token. Parts of characters are written as escapes; a token that is no text has its name, and no bytes."""
    said = name if text is None else text.decode(errors="backslashreplace")
    return {"token": said, "logprob": logprob, "bytes": None if text is None else list(text)}


class _LogprobsOfCompletions:
    """Of one choice. Of tokens with the same text, the most probable one is reported."""

    def __init__(self) -> None:
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # of the next token, in the text

    def told(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "tokens": [_text_of(each) for each in entries],
            "token_logprobs": [each["logprob"] for each in entries],
            "top_logprobs": [_by_text([*each["top_logprobs"], each]) for each in entries],
            "text_offset": [self._next(each["bytes"]) for each in entries],
        }

    def _next(self, text: list[int] | None) -> int:
        offset = self._offset
        self._offset += len(self._characters.decode(bytes(text or ())))
        return offset


def _text_of(entry: dict[str, Any]) -> str:
    """Parts of characters are marked: OpenAI does it so."""
    text: str = entry["token"]
    told = entry["bytes"] is None or text.encode() == bytes(entry["bytes"])
    return text if told else f"bytes:{text}"


def _by_text(entries: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in sorted(entries, key=lambda entry: -entry["logprob"]):
        found.setdefault(_text_of(each), each["logprob"])
    return found
