"""Translates requests of `/v1/responses` to chats, and answers to its items, whole and as events. Pure."""

import time
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import orjson

from dormouse.client_shim.llm import requests as r
from dormouse.client_shim.llm.answers import Choice, ToolCall
from dormouse.client_shim.llm.fields import FIELDS

PARAMS: Final = {"messages": "input", "response_format": "text", "max_completion_tokens": "max_output_tokens"}
"""The names of a chat's fields here."""

_TEXTS: Final = ("text", "input_text", "output_text")


class ResponsesRequest(msgspec.Struct, kw_only=True):
    model: str = ""
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = False
    stream_options: r.StreamOptions | None = None
    metadata: dict[str, Any] | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool = False


def as_chat(asked: ResponsesRequest) -> r.ChatRequest:
    """Raises RefusedRequest."""
    if asked.stream_options is not None and asked.stream_options.include_usage:
        raise r.RefusedRequest("a stream of events has its usage in any case: leave it out", "stream_options")
    return r.ChatRequest(
        model=asked.model,
        messages=_messages(asked),
        max_completion_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        tools=[_tool(tool) for tool in asked.tools or ()],
        tool_choice=_choice(asked.tool_choice),
        parallel_tool_calls=asked.parallel_tool_calls,
        response_format=_format(asked.text),
        stream=asked.stream,
        stream_options=asked.stream_options,
        seed=asked.seed,
        top_k=asked.top_k,
        min_p=asked.min_p,
        logit_bias=asked.logit_bias,
        ignore_eos=asked.ignore_eos,
    )


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if asked.instructions:
        found.append({"role": "system", "content": asked.instructions})
    items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    for item in items:
        kind = item.get("type", "message")
        if f"input {kind}" in FIELDS:
            r.check_keys(f"input {kind}", item, "input", f"the {kind} of input")
        match item:
            case {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}:
                call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                if found and "tool_calls" in found[-1]:
                    found[-1]["tool_calls"].append(call)
                else:
                    found.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case {"type": "function_call_output", "call_id": call_id, "output": output}:
                found.append({"role": "tool", "tool_call_id": call_id, "content": _parts(output)})
            case {"role": role} if kind == "message":
                found.append({"role": role, "content": _parts(item.get("content"))})
            case _:
                text = f"input has an item of type {str(kind)[:80]!r}, or one that lacks fields"
                text = f"{text}: messages, function_call and function_call_output are known"
                raise r.RefusedRequest(text, "input", "unsupported_parameter")
    return found


def _parts(content: Any) -> Any:
    """As those of chats: each is of type text."""
    if not isinstance(content, list):
        return content
    known = (isinstance(part, dict) and part.get("type") in _TEXTS for part in content)
    return [{**part, "type": "text"} if is_text else part for part, is_text in zip(content, known, strict=True)]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        return tool
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        r.check_keys("tool_choice of a response", choice, "tool_choice", "tool_choice")
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    r.check_keys("text", text or {}, "text")
    given = (text or {}).get("format")
    if given is not None and not isinstance(given, dict):
        raise r.RefusedRequest("text.format is an object with a type", "text")
    if given is not None and given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}
    return given


@dataclass(kw_only=True)
class ResponsesAnswer:
    """One answer: messages and calls in the order in which they come. ``id`` also makes those of its items."""

    id: str
    model: str
    asked: ResponsesRequest
    created: int = field(default_factory=lambda: int(time.time()))
    _sequence: int = 0
    _output: list[dict[str, Any]] = field(default_factory=list)  # that is complete
    _text: list[str] | None = None  # of the message that is open
    _call: dict[str, Any] | None = None  # that is open
    _arguments: list[str] = field(default_factory=list)  # of that
    _finish: str = "stop"

    # --- events of the answer

    def first(self, index: int) -> bytes:
        response = self._response("in_progress", None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def part(self, index: int, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        events = b""
        if self._text is None:
            events += self._close("completed")
            self._text = []
            item = {**self._message(""), "status": "in_progress", "content": []}
            events += self._event("response.output_item.added", output_index=len(self._output), item=item)
            events += self._event("response.content_part.added", **self._where(), part=_output_text(""))
        self._text.append(text)
        return events + self._event("response.output_text.delta", **self._where(), delta=text, logprobs=[])

    def call(self, index: int, number: int, call: ToolCall) -> bytes:
        events = self._close("completed")
        self._call = {
            "type": "function_call",
            "id": self._item("fc"),
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self._arguments = []
        return events + self._event("response.output_item.added", output_index=len(self._output), item=self._call)

    def arguments(self, index: int, number: int, text: str) -> bytes:
        assert self._call is not None
        self._arguments.append(text)
        place = {"item_id": self._call["id"], "output_index": len(self._output)}
        return self._event("response.function_call_arguments.delta", **place, delta=text)

    def last(self, index: int, finish: str) -> bytes:
        self._finish = finish
        return self._close("incomplete" if finish == "length" else "completed")

    def end(self, usage: dict[str, Any], wanted: bool) -> bytes:
        status = self._status
        return self._event(f"response.{status}", response=self._response(status, usage))

    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        (choice,) = choices
        text = "".join(choice.text)
        if text or not choice.calls:
            self.part(0, text, [])
        for number, call in enumerate(choice.calls):
            self.call(0, number, call)
            self.arguments(0, number, "".join(call.arguments))
        self.last(0, choice.finish or "stop")
        return orjson.dumps(self._response(self._status, usage))

    # --- their form on the wire

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _item(self, prefix: str) -> str:
        return f"{prefix}_{self.id.removeprefix('resp_')}{len(self._output)}"

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._item("msg"), "output_index": len(self._output), "content_index": 0}

    def _message(self, text: str) -> dict[str, Any]:
        content = [_output_text(text)]
        return {"type": "message", "id": self._item("msg"), "role": "assistant", "content": content}

    def _close(self, status: str) -> bytes:
        """The message or the call that is open, if one is."""
        if self._call is not None:
            return self._close_call(self._call, status)
        if self._text is None:
            return b""
        text, self._text = "".join(self._text), None
        item = {**self._message(text), "status": status}
        events = self._event("response.output_text.done", **self._where(), text=text, logprobs=[])
        events += self._event("response.content_part.done", **self._where(), part=_output_text(text))
        events += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return events

    def _close_call(self, call: dict[str, Any], status: str) -> bytes:
        arguments = "".join(self._arguments)
        done = {**call, "arguments": arguments, "status": status}
        place = {"item_id": call["id"], "output_index": len(self._output)}
        events = self._event("response.function_call_arguments.done", **place, name=call["name"], arguments=arguments)
        events += self._event("response.output_item.done", output_index=len(self._output), item=done)
        self._output.append(done)
        self._call = None
        return events

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(body))

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        asked = self.asked
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self.model,
            "output": list(self._output),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
