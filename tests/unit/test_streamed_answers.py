"""Answers in parts: what the router's policy makes of them, how an instance sends them, what the command line shows."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_rig import fails_with, loaded, one, said, spec

from dormouse.client_shim.instance.answer_parts import PartSender
from dormouse.client_shim.instance.codec import BadResponse, event
from dormouse.client_shim.instance.coroutines import Coroutines
from dormouse.client_shim.instance.handler import Handler
from dormouse.core.cli.streams import events
from dormouse.core.config import LimitsSection
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.state import RouterState
from dormouse.router.access.limits import TenantLimits
from dormouse.router.front.bodies import Body
from dormouse.router.front.counts import ServedCounts
from dormouse.router.front.drain import Draining
from dormouse.router.front.requests import Requests
from dormouse.router.front.streams import AnswerStream
from dormouse.schemas import messages as m

# --- the router's policy


def part(ticket: int, body: bytes = b"x", first: bool = False) -> m.AnswerPart:
    return m.AnswerPart(request=ticket, body=body, kind=m.SSE if first else None)


def test_parts_are_passed_on_and_what_was_taken_is_told() -> None:
    rig = loaded()
    ticket = rig.run(7)
    rig.now_s += 0.5
    begin, passed = rig.say("i1", part(ticket, b"one", first=True))
    assert isinstance(begin, e.BeginStream)
    assert (begin.request, begin.kind, begin.timing.run_s) == (7, m.SSE, 0.5)
    assert passed == e.Pass([(7, b"one")])
    assert rig.say("i1", part(ticket, b"two")) == [e.Pass([(7, b"two")])]
    large = b"x" * m.CHUNK_NBYTES
    assert one(rig.say("i1", part(ticket, large)), e.Pass).parts == [(7, large)]
    told = one(rig.do(e.ChunkTaken(7, m.CHUNK_NBYTES + 6)), m.PartsTaken)
    assert told == m.PartsTaken(request=ticket, nbytes=m.CHUNK_NBYTES + 6)
    assert isinstance(rig.say("i1", m.Returned(request=ticket, body=b"", nbytes=0))[0], e.Answer)
    assert rig.do(e.ChunkTaken(7, 3)) == []


@pytest.mark.parametrize(
    ("parts", "kind", "left"),
    [
        ([b"data: 1\n\n", b"data: [DONE]\n\n"], m.SSE, False),
        ([b"data: 1\n\ndata: [DONE]\n\n"], m.SSE, False),
        ([b"data: 1\n\n"], m.SSE, True),
        ([b"data: [DONE]\n\n", b"data: 2\n\n"], m.SSE, True),
        ([b"data: [DONE]\n\n"], m.RAW, True),
    ],
)
def test_who_leaves_after_the_last_event_has_not_cancelled(parts: list[bytes], kind: m.StreamKind, left: bool) -> None:
    """As OpenAI's clients do: the instance's own end may come a moment later."""

    async def told() -> list[e.Event]:
        events: list[e.Event] = []
        state = RouterState(loads=1, max_queue=1, prefix="")
        drain = Draining(Path("/nowhere"), int)
        requests = Requests(LimitsSection(), state, events.append, ServedCounts(print), TenantLimits({}), drain)
        number, answer = requests.submit("chat", Body(requests.bodies))
        requests.begun(e.BeginStream(number, kind, e.Timing()))
        stream = answer.result()
        assert isinstance(stream, AnswerStream)
        for each in parts:
            stream.put(each)
        taking = stream.parts()
        for each in parts:
            assert await anext(taking) == each
        requests.leave(number)
        await taking.aclose()
        return events[1:]

    assert asyncio.run(told()) == [e.RequesterLeft(1)] * left


@pytest.mark.parametrize(
    "wrong",
    [
        [part(1)],  # of what kind?
        [part(1, first=True), part(1, first=True)],
        [part(1, b"x" * (m.CHUNK_NBYTES + 1), first=True)],
        [part(1, b"x" * m.CHUNK_NBYTES, first=number == 0) for number in range(5)],  # beyond the window
    ],
)
def test_parts_that_must_not_be_end_the_instance(wrong: list[m.AnswerPart]) -> None:
    rig = loaded()
    assert rig.run() == 1
    for each in wrong[:-1]:
        assert not [action for action in rig.say("i1", each) if isinstance(action, e.Kill)]
    actions = rig.say("i1", wrong[-1])
    assert one(actions, e.Kill).instance == "i1"
    fails_with(actions, 1, "sandbox_died", 502)


def test_a_client_that_leaves_a_stream_ends_it_at_once() -> None:
    rig = loaded()
    ticket = rig.run()
    rig.say("i1", part(ticket, first=True))
    assert one(rig.do(e.RequesterLeft(1)), e.Interrupt) == e.Interrupt("i1", ticket)


def test_a_stream_that_begins_when_its_client_has_left_ends_at_once() -> None:
    rig = loaded()
    ticket = rig.run()
    assert not [action for action in rig.do(e.RequesterLeft(1)) if isinstance(action, e.Interrupt)]
    assert one(rig.say("i1", part(ticket, first=True)), e.Interrupt) == e.Interrupt("i1", ticket)


def test_the_time_limit_is_from_part_to_part() -> None:
    rig = loaded(spec(timeout_ms=1000))
    ticket = rig.run()
    for number in range(5):
        rig.after(0.9)
        one(rig.say("i1", part(ticket, first=number == 0)), e.Pass)
    assert rig.after(0.9) == []
    fails_with(rig.after(0.2), 1, "timed_out", 504)


@pytest.mark.parametrize("began", [True, False])
def test_parts_without_a_byte_are_no_progress(began: bool) -> None:
    rig = loaded(spec(timeout_ms=1000))
    ticket = rig.run()
    rig.after(0.5)
    rig.say("i1", part(ticket, b"x" if began else b"", first=True))
    rig.after(0.4)
    rig.say("i1", part(ticket, b""))
    actions = rig.after(0.1)
    if began:
        assert actions == []
        rig.after(0.4)
        rig.say("i1", part(ticket, b""))
        actions = rig.after(0.1)
    fails_with(actions, 1, "timed_out", 504)


def test_a_client_that_does_not_read_is_no_fault_of_the_function() -> None:
    """What is less than the step in which it is told what was taken holds no function up."""
    rig = loaded(spec(timeout_ms=1000))
    rig.say("i1", part(rig.run(), b"x" * m.TAKEN_NBYTES, first=True))
    assert rig.after(1.5) == rig.after(1.5) == []


def test_a_stream_is_not_begun_anew_when_its_executor_dies() -> None:
    for streams in (False, True):
        rig = loaded(spec(idempotent=True))
        ticket = rig.run()
        if streams:
            rig.say("i1", part(ticket, first=True))
        rig.hear(m.LeaseLost(request=ticket))
        actions = rig.say("i1", m.Raised(request=ticket, code="executor_lost", text=""))
        assert bool(said(actions, m.Acquire)) is not streams
        if streams:
            fails_with(actions, 1, "executor_lost", 503)


# --- the front door


class Reader:
    """A client; ``told`` is what a stream says to be taken."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.read: list[bytes] = []
        self.reads = True
        self.stream = AnswerStream(e.BeginStream(1, m.SSE, e.Timing()), self.told.append)
        self.stream.direct = self._direct

    def _direct(self, part: bytes) -> bool:
        if self.reads:
            self.read.append(b"!" + part)
        return self.reads

    async def follow(self) -> None:
        async for part in self.stream.parts():
            await asyncio.sleep(0)  # others come meanwhile
            self.read.append(part)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_parts_go_out_at_once_while_none_waits_and_never_overtake() -> None:
    async def main() -> None:
        reader = Reader()
        stream = reader.stream
        stream.put(b"1")
        following = asyncio.create_task(reader.follow())
        await asyncio.sleep(0)
        stream.put(b"2")  # the first one is still on its way
        await settled()
        stream.put(b"3")
        assert reader.read == [b"1", b"2", b"!3"]
        reader.reads = False
        stream.put(b"4")
        reader.reads = True
        stream.put(b"5")
        await settled()
        stream.put(b"6")
        stream.end(e.Drop(1))
        await following
        assert reader.read[3:] == [b"4", b"5", b"!6"]

    asyncio.run(main())


def test_a_part_does_not_overtake_what_is_said_in_a_pause() -> None:
    async def main() -> None:
        reader = Reader()
        pause = reader.stream.parts(silence_s=0.0)
        assert await anext(pause) == b""
        reader.stream.put(b"1")
        assert reader.read == []
        assert await anext(pause) == b"1"

    asyncio.run(main())


def test_what_was_taken_is_told_in_steps() -> None:
    """Told for each token, it would be half of the router's events."""

    async def main() -> None:
        reader = Reader()
        following = asyncio.create_task(reader.follow())
        await settled()
        for size in (6, m.TAKEN_NBYTES - 7, 1, 5):
            reader.stream.put(b"x" * size)
        reader.stream.end(e.Drop(1))
        await following
        assert reader.told == [m.TAKEN_NBYTES]

    asyncio.run(main())


# --- the instance


class Wire:
    """The router's side of a sender: takes only when it is waited for."""

    def __init__(self) -> None:
        self.sent: list[m.AnswerPart] = []
        self.untaken_nbytes = self.untold_nbytes = self.most_nbytes = 0

    def send(self, message: m.InstanceToRouter) -> None:
        assert isinstance(message, m.AnswerPart)
        self.sent.append(message)
        self.untaken_nbytes += len(message.body)
        self.most_nbytes = max(self.most_nbytes, self.untaken_nbytes)

    def wait_taken(self, request: int) -> int:
        assert request == 5
        self.untold_nbytes, self.untaken_nbytes = self.untold_nbytes + self.untaken_nbytes, 0
        assert self.untold_nbytes >= m.TAKEN_NBYTES, "waits for what the router does not say"
        told, self.untold_nbytes = self.untold_nbytes, 0
        return told


@given(st.lists(st.integers(0, 3 * m.CHUNK_NBYTES), max_size=12))
def test_a_sender_keeps_to_the_window_and_loses_nothing(sizes: list[int]) -> None:
    wire = Wire()
    sender = PartSender(5, wire.send, wire.wait_taken)
    for number, size in enumerate(sizes):
        sender.put(bytes([number]) * size)
    sender.finish()
    assert b"".join(each.body for each in wire.sent) == b"".join(bytes([n]) * size for n, size in enumerate(sizes))
    assert wire.most_nbytes <= m.STREAM_WINDOW_NBYTES
    assert [each.kind is not None for each in wire.sent] == [True] + [False] * (len(wire.sent) - 1)
    assert wire.sent[0].kind == (m.RAW if sizes else m.SSE)


def test_views_of_other_items_are_bytes_too() -> None:
    wire = Wire()
    sender = PartSender(5, wire.send, wire.wait_taken)
    for view in (memoryview(b"abcd")[::2], np.zeros((0, 4)).data, np.arange(2, dtype=">i2").data):
        sender.put(view)
    assert [each.body for each in wire.sent] == [b"ac", b"", b"\0\0\0\1"]
    wire.sent.clear()
    sender.put(np.zeros(m.CHUNK_NBYTES // 4).data)
    assert [len(each.body) for each in wire.sent] == [m.CHUNK_NBYTES] * 2


@given(st.lists(st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"]))), st.integers(1, 7))
def test_text_survives_its_events(texts: list[str], step: int) -> None:
    data = b"".join(event(text) for text in texts)
    assert list(events(data[start : start + step] for start in range(0, len(data), step))) == texts


@pytest.mark.parametrize("value", ["\ud800", float("nan"), object(), {"x": b"bytes"}])
def test_what_no_event_can_carry_is_refused(value: object) -> None:
    with pytest.raises(BadResponse):
        event(value)


@pytest.fixture
def handler() -> Iterator[Handler]:
    coroutines = Coroutines()
    yield Handler(coroutines)
    coroutines.close()


def test_tasks_that_a_request_leaves_are_ended_with_it(handler: Handler) -> None:
    seen: list[Any] = []

    async def background() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            seen.append("ended")

    async def handle() -> int:
        seen.append(asyncio.create_task(background()))
        await asyncio.sleep(0)
        return 3

    assert handler.call(handle) == 3
    handler.finish()
    assert seen[1:] == ["ended"]


def test_a_generator_that_is_left_is_closed(handler: Handler) -> None:
    seen = []

    def handle() -> Iterator[int]:
        try:
            yield 1
        finally:
            seen.append("ended")

    parts = handler.parts(handle())
    assert parts is not None
    next(parts)
    parts.close()
    assert seen == ["ended"]


@pytest.mark.parametrize("value", [1, "text", [1], {"a": 1}, None, range(3)])
def test_values_are_no_parts(handler: Handler, value: Any) -> None:
    assert handler.parts(value) is None
