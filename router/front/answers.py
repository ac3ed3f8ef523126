"""An answer of a function over HTTP: whole or as it comes, with the parts of its time.

Decides nothing: the answer comes from requests.py.
"""

import asyncio
import math
from contextlib import aclosing
from typing import Final

from dormouse.core.decisions.requests import events as e
from dormouse.router.front import openinference
from dormouse.router.front.exchange import JSON, STREAM_HEADERS, Exchange, error_answer, foreign, own_head
from dormouse.router.front.requests import Answered
from dormouse.router.front.stats import parts
from dormouse.router.front.streams import AnswerStream, Outcome
from dormouse.schemas import messages as m

_COMMENT: Final = b": waiting\n\n"
"""Of an event stream: its client takes it for nothing."""


async def whole(x: Exchange, outcome: Outcome, data: bytes, infers: bool) -> None:
    """An answer that came at once, of a request of the Open Inference Protocol or any other."""
    if x.begun:  # by a heartbeat: a whole answer would be no events
        await _end(x, None if isinstance(outcome, e.Answer) else outcome, m.SSE)
        return
    match outcome:
        case e.Answer(timing=timing, kind=kind, head=head):
            status, own = own_head(head)
            headers, plain = openinference.headers(kind) if infers else (foreign(kind), kind.encode() or JSON)
            await x.answer(status, data, [*told(timing), *own, *headers], plain)
        case e.Fail(failure=failure, timing=timing):
            await x.fail(failure, [*told(timing)])
        case e.Drop():
            pass


async def streamed(x: Exchange, stream: AnswerStream, pause_s: float) -> None:
    """Pass it on as it comes; between events, comments while nothing does. An answer that ends too early never looks
    whole: text ends with an error, bytes without an end.
    """
    if not x.begun:
        status, own = own_head(stream.head)
        defaults = [each for each in STREAM_HEADERS if each[0] not in dict(own)]
        x.begin(status, stream.kind.encode(), [*defaults, *own, *told(stream.timing)])
    stream.direct = x.chunk_now
    async with aclosing(stream.parts(pause_s if stream.kind == m.SSE else math.inf)) as parts:
        async for part in parts:
            if part:
                await x.chunk(part)
            elif not stream.last or stream.last.endswith(b"\n\n"):
                await x.chunk(_COMMENT)
    await _end(x, stream.outcome, stream.kind)


async def heartbeats(x: Exchange, future: Answered, pause_s: float) -> None:
    """Comments while nothing else comes, so that neither the client nor a proxy gives up. From the first one on, what
    fails is an event, and no status any more.
    """
    while not (await asyncio.wait((future,), timeout=pause_s))[0]:
        if not x.begun:
            x.begin(200, m.SSE.encode(), STREAM_HEADERS)
        await x.chunk(_COMMENT)


async def _end(x: Exchange, outcome: Outcome | None, kind: m.StreamKind) -> None:
    match outcome:
        case e.Answer():
            x.end()
        case e.Fail(failure=failure) if kind == m.SSE:
            body, _ = error_answer(x.told(failure), x.request_id.decode())
            await x.chunk(b"event: error\ndata: %b\n\n" % body)
            x.end()
        case _:
            x.cut()


def told(timing: e.Timing) -> list[tuple[bytes, bytes]]:
    """Of an answer: the parts of its time, and which version of its function has made it, if one has."""
    version = [(b"x-dormouse-version", b"%d" % timing.version)] if timing.version else []
    return [server_timing(timing), *version]


def server_timing(timing: e.Timing) -> tuple[bytes, bytes]:
    """Of a language model's answer, what its first token took, and all after that. Then what is no part of the sum:
    until the model had come, which is a part of the run, and where it was.
    """
    said = [f"{name};dur={spent_s * 1000:.3f}" for name, spent_s in parts(timing).items()]
    if timing.copy_s is not None:
        said.append(f"copy;dur={timing.copy_s * 1000:.3f}")
    if timing.source:
        said.append(f"model;desc={timing.source}")
    return b"server-timing", ", ".join(said).encode()
