"""Requests as spans, and what the router keeps of them while nobody takes them."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import uvloop
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dormouse.core.config import NodeConfig, NodeSection, TracingSection
from dormouse.core.decisions.requests import events as e
from dormouse.core.links.link import Link
from dormouse.core.paths import RunPaths
from dormouse.router.front.traced import traced
from dormouse.router.front.tracing import Trace
from dormouse.router.traces import outbox
from dormouse.router.traces.exporting import address
from dormouse.router.traces.main import Traces
from dormouse.router.traces.outbox import BATCH, MAX, ROLE, Outbox
from dormouse.router.traces.spans import GivenIds, emit
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError

TRACE = Trace(f"00-{'4b' * 16}-{'01' * 8}-01", "a=1", "02" * 8)
ENDED_NS = 1_800_000_000_000_000_000


def _of(outcome: e.Answer | e.Fail | e.Drop, trace: Trace = TRACE, code: str = "ok") -> m.TracedRequest:
    return traced(trace, "r1", "f", "t", outcome, code, ENDED_NS)


def _emitted(request: m.TracedRequest) -> dict[str, ReadableSpan]:
    ids, kept = GivenIds(), InMemorySpanExporter()
    provider = TracerProvider(id_generator=ids, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    emit(provider.get_tracer("test"), ids, request)
    return {span.name: span for span in kept.get_finished_spans()}


def _answered(**timing: Any) -> e.Answer:
    return e.Answer(1, "i1", b"", 0, e.Timing(queue_s=0.25, wait_s=0.5, run_s=1.0, **timing))


def test_parts_follow_one_another_until_the_end() -> None:
    spans = _emitted(_of(_answered(copy_s=0.125, source="host")))
    assert sorted(spans) == ["copy", "f", "queue", "run", "wait"]
    began_ns = ENDED_NS - 1_750_000_000
    times = {name: (span.start_time - began_ns, span.end_time - began_ns) for name, span in spans.items()}  # type: ignore[operator]
    assert times == {
        "f": (0, 1_750_000_000),
        "queue": (0, 250_000_000),
        "wait": (250_000_000, 750_000_000),
        "run": (750_000_000, 1_750_000_000),
        "copy": (750_000_000, 875_000_000),
    }
    above = {name: span.parent.span_id for name, span in spans.items() if span.parent is not None}
    own = spans["f"].context.span_id
    assert above == {
        "f": int("02" * 8, 16),
        **dict.fromkeys(("queue", "wait", "run"), own),
        "copy": spans["run"].context.span_id,
    }
    assert own == int("01" * 8, 16)
    assert {span.context.trace_id for span in spans.values()} == {int("4b" * 16, 16)}
    assert spans["f"].context.trace_state.to_header() == "a=1"


def test_a_language_models_answer_has_parts_of_its_own() -> None:
    first = m.AnswerBegun(request=1, queue_us=1, runtime_us=2, wake_us=3, prefill_us=4)
    assert [*_emitted(_of(_answered(first=first)))] == ["queue", "runtime", "wake", "prefill", "rest", "f"]


def test_a_trace_that_begins_here_and_what_failed() -> None:
    failed = e.Fail(1, m.Failure(code="sandbox_died", status=502, text="it died"), e.Timing())
    span = _emitted(_of(failed, TRACE._replace(above="0" * 16, state=""), "sandbox_died"))["f"]
    assert span.parent is None
    assert span.context.trace_id == int("4b" * 16, 16)
    assert (span.status.status_code.name, span.status.description) == ("ERROR", "sandbox_died")
    refused = e.Fail(1, m.Failure(code="queue_full", status=429, text="full"), e.Timing())
    assert _emitted(_of(refused, code="queue_full"))["f"].status.status_code.name == "UNSET", "the client's own doing"
    left = _emitted(_of(e.Drop(1), code="cancelled"))["f"]
    assert left.attributes is not None
    assert "http.response.status_code" not in left.attributes


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("http://h:4318", "http://h:4318/v1/traces"),
        ("http://h:4318/", "http://h:4318/v1/traces"),
        ("https://h/otlp/v1/traces", "https://h/otlp/v1/traces"),
    ],
)
def test_where_spans_go(given: str, wanted: str) -> None:
    assert address(given) == wanted


class RouterOfTraces:
    """A router, and a traces process at the other end of a real link."""

    def __init__(self, run: Path) -> None:
        (run / "t").mkdir()
        self.paths = RunPaths(run)
        self.peers: dict[str, int] = {}
        self.supervisor = self
        self.wanted: list[str] = []
        self.heard: list[m.TracedRequest] = []
        self.news = asyncio.Event()
        self.outbox = Outbox(self, TracingSection(endpoint="http://h:4318"))
        self.link: Link[m.RouterToTraces, m.TracesToRouter] | None = None

    def send(self, message: m.WantRole) -> None:
        self.wanted.append(message.role)

    def up(self, epoch: int) -> None:
        path = self.paths.link(ROLE, "router", epoch)
        self.link = Link(path, bind=True, incoming=m.RouterToTraces, on_message=self._take)
        self.outbox.peers_changed({ROLE: epoch})

    def down(self) -> None:
        assert self.link is not None
        self.link.close()
        self.outbox.peers_changed({})

    def _take(self, trace: m.TracedRequests) -> None:
        self.heard += trace.requests
        self.news.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.heard) < count:
                await self.news.wait()
                self.news.clear()


def test_what_waits_is_bounded_and_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    async def main() -> None:
        world, request = RouterOfTraces(tmp_path), _of(_answered())
        world.outbox.open()
        assert world.wanted == [ROLE]
        for _ in range(MAX + 3):
            world.outbox.add(request)
        assert world.outbox.spans == {"exported": 0, "failed": 0, "dropped": 3 * 4}
        world.up(1)
        await world.until(MAX)
        assert world.link is not None
        world.link.send(m.SpansSent(exported=5, failed=2, dropped=1, trouble="it refuses"))
        async with asyncio.timeout(60):
            while not world.outbox.told()["trouble"]:  # noqa: ASYNC110 - the router waits for nothing here
                await asyncio.sleep(0.01)
        world.down()
        for _ in range(BATCH):
            world.outbox.add(request)
        world.up(2)
        await world.until(MAX + BATCH)
        assert world.outbox.told() == {
            "endpoint": "http://h:4318",
            "spans": {"exported": 5, "failed": 2, "dropped": 13},
            "trouble": "it refuses",
        }
        world.outbox.close()
        world.link.close()

    uvloop.run(main())


def test_one_that_does_not_read_has_no_more_than_its_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "UNREAD", 1)
    monkeypatch.setattr(outbox, "MAX", BATCH)

    async def main() -> None:
        world, request = RouterOfTraces(tmp_path), _of(_answered())
        world.outbox.peers_changed({ROLE: 1})  # nobody is at the other end
        for _ in range(4 * BATCH):
            world.outbox.add(request)
        assert world.outbox.spans["dropped"] == 2 * BATCH * 4
        world.outbox.close()

    uvloop.run(main())


def test_without_an_endpoint_nothing_is_wanted(tmp_path: Path) -> None:
    world = RouterOfTraces(tmp_path)
    quiet = Outbox(world, TracingSection())
    quiet.open()
    assert (world.wanted, quiet.share, quiet.spans) == ([], None, {})


def test_without_the_sdk_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dormouse.router.traces.exporting", None)  # as if an import in it had failed

    async def main() -> None:
        config = NodeConfig(node=NodeSection(run=str(tmp_path), state=str(tmp_path)))
        with pytest.raises(ConfigError, match=r"pip install 'dormouse\[otel\]'"):
            await Traces("traces", 1, config).start()

    uvloop.run(main())
