"""`dormouse invoke`: one request of a person or a script."""

import json
import mimetypes
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Final

import click

from dormouse.core.cli.completion import function_argument
from dormouse.core.cli.frame import CommandContext, json_option, pass_context
from dormouse.core.cli.requests import as_told
from dormouse.core.cli.streams import show_stream
from dormouse.core.errortext import HINT
from dormouse.core.node.refusals import CallRefused
from dormouse.core.output import show_answer, show_json
from dormouse.schemas.errors import DormouseError

ODD_NBYTES: Final = 80
"""Shown of an answer that is none."""


@click.command()
@function_argument()
@click.argument("words", nargs=-1, metavar="[JSON|TEXT|@FILE|-]")
@click.option("--type", "kind", help="Content type of the request.  [default: by FILE's name, else JSON]")
@click.option("--detach", is_flag=True, help="Do not wait: print a job's id, for `dormouse job`.")
@click.option("--schema", is_flag=True, help="Only show what it takes and answers.")
@json_option("Print JSON: the function, its answer and the milliseconds.")
@pass_context
def invoke(
    context: CommandContext,
    name: str,
    words: tuple[str, ...],
    kind: str | None,
    detach: bool,
    schema: bool,
    json_: bool,
) -> None:
    """Send a request to a function and print its answer, which is JSON; or its parts as they come, if it streams; or
    bytes, to a file: > FILE.

    TEXT that is no JSON is said to a language model, as a user says it in a chat, and is what an embedding model makes
    an embedding of.
    """
    if len(words) > 1:
        shown = "'{\"x\": [1, 2]}'"
        raise click.UsageError(f"the request is in {len(words)} words; put it in single quotes, such as {shown}")
    if schema and (words or kind or detach):
        raise click.UsageError("--schema goes alone: it sends no request")
    if schema:
        show_json(said := context.client.schema(name))
        if said.keys() <= {"name", "version", "description"}:
            click.echo(f"{name} does not say: give handle's request a type (docs/types.md)", err=True)
        return
    request = words[0] if words else "null"
    body = body_of(context, name, request)
    kind = _kind_of(request) if kind is None else kind
    if detach:
        job = context.client.detach(name, body, kind)
        show_json(as_told(job)) if json_ else click.echo(job["id"])
        return
    began = time.perf_counter()
    pieces = context.client.stream(name, body, kind)
    try:
        kind, first = next(pieces, ("", b""))
    except CallRefused as error:
        if words or error.code not in ("function_raised", "invalid_request"):
            raise
        text = f"{error}\n{HINT}no request was written, so it was null"
        raise CallRefused(error.status, error.code, text, error.of_function) from error
    if kind:
        show_stream(name, kind, chain((first,), (piece for _, piece in pieces)), json_, began)
        return
    answer = first + b"".join(piece for _, piece in pieces)
    ms = round((time.perf_counter() - began) * 1000, 3)
    try:
        value = json.loads(answer) if answer else None  # such as a 204 has
    except (
        ValueError,
        RecursionError,
    ) as error:  # whoever wrote the function chose these bytes, and a terminal obeys some
        text = f"the function's answer is not JSON ({error}); it begins {answer[:ODD_NBYTES]!r}"
        raise DormouseError(text) from error
    if json_:
        show_json({"function": name, "answer": value, "ms": ms})
    elif answer:
        show_answer(answer)


def _kind_of(request: str) -> str:
    """The content type of a file, by its name. Text may be JSON."""
    if not request.startswith("@"):
        return ""
    if request.endswith(".npy"):
        return "application/x-npy"
    kind = mimetypes.guess_type(request)[0] or ""
    return "" if kind.startswith("text/") or kind == "application/json" else kind


def body_of(context: CommandContext, name: str, request: str) -> bytes:
    """The body of a request that was written on the command line, or is in a file that was."""
    if request == "-":
        return sys.stdin.buffer.read()
    if request.startswith("@"):
        try:
            return Path(request[1:]).read_bytes()
        except OSError as error:
            raise click.BadParameter(f"{request[1:]}: {error.strerror}", param_hint="@FILE") from error
    try:
        json.loads(request)
    except (ValueError, RecursionError):
        row = next((row for row in context.client.functions() if row["name"] == name), {})
        if row.get("llm") is not None:
            return json.dumps({"messages": [{"role": "user", "content": request}], "stream": True}).encode()
        if row.get("embedding"):
            return json.dumps({"input": request}).encode()
    return request.encode()
