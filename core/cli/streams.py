"""Output of `dormouse invoke` for an answer that comes in parts, or is bytes."""

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import click

from dormouse.core.cli.frame import of_error
from dormouse.core.node.refusals import CallRefused, Unreachable
from dormouse.core.output import show_bytes, show_json
from dormouse.schemas.errors import DormouseError


def show_stream(name: str, kind: str, pieces: Iterable[bytes], as_json: bool, began_s: float) -> None:
    """Print the parts as they come, each event in a line, but what a language model writes as it writes it; bytes as
    they are, but not to a terminal. ``kind`` is the answer's content type. With ``as_json``, all parts in one JSON
    value at the end, also those of a stream that fails. Raises DormouseError.
    """
    if kind != "text/event-stream":
        if as_json:
            raise DormouseError("the answer is bytes, which are no JSON: leave out --json, and write them to a file")
        show_bytes(kind, pieces)
        return
    parts: list[Any] = []
    written = False
    said: dict[str, Any] = {}
    try:
        for data in events(pieces):
            if as_json:
                parts.append(_value(data))
            elif (text := _written(data)) is not None:
                click.echo(text, nl=False)
                written = True
            else:
                click.echo(("\n" if written else "") + data)
                written = False
    except (CallRefused, Unreachable, DormouseError, KeyboardInterrupt) as error:
        said = {"error": of_error(error)} if as_json else {}
        raise
    finally:
        if written:
            click.echo()
        if as_json:
            ms = round((time.perf_counter() - began_s) * 1000, 3)
            show_json({"function": name, "parts": parts, "ms": ms, **said})


def events(pieces: Iterable[bytes]) -> Iterator[str]:
    """The data of each event, as soon as it is whole."""
    left = b""
    for piece in pieces:
        *whole, left = (left + piece).split(b"\n\n")
        for event in whole:
            yield "\n".join(line.removeprefix("data: ") for line in event.decode(errors="replace").split("\n"))


def _written(data: str) -> str | None:
    """The text of a part of a language model's answer; None if it is something else."""
    if data == "[DONE]":
        return ""
    part = _value(data)
    if not isinstance(part, dict) or part.get("object") not in ("chat.completion.chunk", "text_completion"):
        return None
    choices = part.get("choices")
    texts = [_text_of(choice) for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    return "".join(texts)


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return text if isinstance(text, str) else ""


def _value(data: str) -> Any:
    """Text comes as it is, everything else as JSON: nobody can tell text that looks like JSON."""
    try:
        return json.loads(data)
    except ValueError:
        return data
