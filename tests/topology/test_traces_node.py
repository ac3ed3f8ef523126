"""A real node exports its requests as spans to a real collector, and serves whatever becomes of the collector."""

import re
import signal
from collections.abc import Iterator

import pytest
from otlp_collector import Collector, collecting

from benchmarks.nodes.testnode import TestNode, running_node

pytestmark = pytest.mark.timeout(360)

FUNCTION = """
import torch
from dormouse.client_shim.instance.context import current

def load():
    return torch.ones(4).to("cuda")

def handle(weights, request):
    if request == "fail":
        raise ValueError("as asked")
    return [weights.sum().item(), current().traceparent, current().tracestate]
"""

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ABOVE = "00f067aa0ba902b7"
WAIT_S = 90.0


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def node(collector: Collector) -> Iterator[TestNode]:
    config = f'[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\n[tracing]\nendpoint = "{collector.endpoint}"\n'
    with running_node(config) as running:
        running.deployed("f", FUNCTION)
        yield running


def _spans(node: TestNode) -> dict[str, int]:
    return dict(node.status()["node"]["tracing"]["spans"])


def test_a_request_is_a_span_with_its_parts(node: TestNode, collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE}-{ABOVE}-01", "tracestate": "rojo=1", "X-Request-Id": "mine-1"}
    answer = node.http("POST", "/functions/f/invoke", 1, headers=headers)
    assert answer.status == 200
    total, traceparent, tracestate = answer.body
    assert (total, tracestate) == (4.0, "rojo=1")
    node.wait(lambda: {"f", "queue", "wait", "run"} <= {*collector.of(TRACE)}, WAIT_S, "the spans")
    spans = collector.of(TRACE)
    request = spans["f"]
    assert traceparent == f"00-{TRACE}-{request.span_id.hex()}-01", "what the function asks hangs below"
    assert (request.parent_span_id.hex(), request.trace_state, request.kind) == (ABOVE, "rojo=1", 2)
    told = {each.key: each.value.string_value or each.value.int_value for each in request.attributes}
    assert told == {
        "dormouse.function": "f",
        "dormouse.tenant": "default",
        "dormouse.request_id": "mine-1",
        "dormouse.outcome": "ok",
        "dormouse.model": told["dormouse.model"],
        "http.response.status_code": 200,
    }
    parts = [spans[name] for name in ("queue", "wait", "run")]
    assert {part.parent_span_id for part in parts} == {request.span_id}
    assert parts[0].start_time_unix_nano == request.start_time_unix_nano
    assert parts[2].end_time_unix_nano == request.end_time_unix_nano
    assert [part.end_time_unix_nano for part in parts[:2]] == [part.start_time_unix_nano for part in parts[1:]]
    assert collector.resources[0]["service.name"] == "dormouse"
    assert collector.resources[0]["service.instance.id"] == "test"


def test_what_fails_says_so_and_who_brings_no_trace_begins_one(node: TestNode, collector: Collector) -> None:
    assert node.invoke("f", "fail").status == 500
    node.wait(lambda: any(span.status.message == "function_raised" for span in collector.spans), WAIT_S, "the failure")
    failed = next(span for span in collector.spans if span.status.message == "function_raised")
    assert (failed.status.code, failed.parent_span_id) == (2, b"")
    traceparent = node.result("f", 1)[1]
    node.wait(lambda: "run" in collector.of(traceparent[3:35]), WAIT_S, "a trace that began here")
    unsampled = {"traceparent": f"00-{'a' * 32}-{ABOVE}-00"}
    assert node.http("POST", "/functions/f/invoke", 1, headers=unsampled).body[1] == unsampled["traceparent"]
    after = node.result("f", 1)[1]
    node.wait(lambda: "run" in collector.of(after[3:35]), WAIT_S, "what came after it")
    assert collector.of("a" * 32) == {}, "the client does not want it"


def test_a_request_of_the_command_line_is_one_too(node: TestNode, collector: Collector) -> None:
    node.admin.invoke("f", b"1")
    (last,) = node.admin.requests("f", "", 1)
    assert re.fullmatch("c1-[0-9]+", last["id"])
    node.wait(lambda: "run" in collector.of(last["trace"]), WAIT_S, "its spans")


def test_a_collector_that_refuses_or_hangs_costs_no_request(node: TestNode, collector: Collector) -> None:
    before = _spans(node)
    collector.status = 400
    node.result("f", 1)
    node.wait(lambda: _spans(node)["failed"] >= before["failed"] + 4, WAIT_S, "what was refused")
    trouble = node.status()["node"]["tracing"]["trouble"]
    assert trouble
    collector.status = 200
    collector.goes_on.clear()
    try:
        tries = collector.tries
        for _ in range(20):
            node.result("f", 1)
        node.wait(lambda: collector.tries > tries, WAIT_S, "a batch that is under way")
        failed = _spans(node)["failed"]
        node.wait(lambda: _spans(node)["failed"] > failed, WAIT_S, "its time to be over")
    finally:
        collector.goes_on.set()
    last = node.result("f", 1)[1]
    node.wait(lambda: "run" in collector.of(last[3:35]), WAIT_S, "what comes once it answers again")
    node.wait(lambda: node.status()["node"]["tracing"]["trouble"] == "", WAIT_S, "no trouble any more")


def test_its_process_may_be_stopped_or_die(node: TestNode, collector: Collector) -> None:
    pid = node.kill("traces", signal.SIGSTOP)
    for _ in range(5):
        node.result("f", 1)
    node.replaced("traces", pid)  # one that is stopped is dead to the node
    pid = node.kill("traces")
    node.result("f", 1)
    node.replaced("traces", pid)
    last = node.result("f", 1)[1]
    node.wait(lambda: "run" in collector.of(last[3:35]), WAIT_S, "what comes once it is there again")
    scraped = node.http("GET", "/metrics").body
    counted = {line.split()[0]: line.split()[1] for line in scraped.splitlines() if "dormouse_spans_total{" in line}
    assert [*counted] == [f'dormouse_spans_total{{outcome="{each}"}}' for each in ("exported", "failed", "dropped")]
    assert float(counted['dormouse_spans_total{outcome="exported"}']) > 0
