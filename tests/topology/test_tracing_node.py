"""On a real node: where a model was, by what a function knows its request, and what its log says of a failure."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.nodes.testnode import HttpAnswer, TestNode, running_node
from dormouse.core.logrecords import having
from dormouse.core.node.refusals import CallRefused

FUNCTION = """
import logging, sys
import torch
from dormouse.client_shim.instance.context import current

logging.basicConfig(format="told %(request_id)s %(trace_id)s %(message)s", stream=sys.stdout)

def load():
    return torch.ones(1 << 20).to("cuda")

async def handle(weights, request):
    logging.warning("here")
    if request == "fail":
        raise ValueError("as asked")
    return [weights.sum().item(), current().id, current().traceparent]
"""

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "12MiB"\nactivations = "4MiB"\nthreads = 1\n') as running:
        for name in ("a", "b", "c"):  # of which the GPU holds one
            running.deployed(name, FUNCTION.replace("torch.ones", f"{ord(name)} * torch.ones"))
        yield running


def _invoke(node: TestNode, name: str, body: Any = 1, **headers: str) -> HttpAnswer:
    return node.http("POST", f"/functions/{name}/invoke", body, headers=headers)


def _timing(answer: HttpAnswer) -> dict[str, str]:
    parts = [part.strip().split(";") for part in answer.headers["server-timing"].split(",")]
    return {name: said.partition("=")[2] for name, said in parts}


def test_an_answer_says_where_its_model_was(node: TestNode) -> None:
    for name in ("a", "b"):
        _invoke(node, name)
    cold, warm = _timing(_invoke(node, "a")), _timing(_invoke(node, "a"))
    assert (cold["model"], warm["model"]) == ("host", "gpu")
    assert list(warm) == ["queue", "wait", "run", "model"]
    if "copy" in cold:  # news of it come by another way than the answer
        assert 0 < float(cold["copy"]) <= float(cold["run"])
    failed = _invoke(node, "a", "fail")
    assert (failed.status, [*_timing(failed)], _timing(failed)["model"]) == (
        500,
        ["queue", "wait", "run", "model"],
        "gpu",
    )


def test_a_function_knows_its_request_and_so_does_its_log(node: TestNode) -> None:
    parent = f"00-{TRACE}-00f067aa0ba902b7-01"
    answer = _invoke(node, "a", **{"X-Request-Id": "mine-1", "traceparent": parent})
    assert answer.status == 200
    total, request_id, traceparent = answer.body
    assert (total, request_id, answer.headers["x-request-id"]) == (97 * (1 << 20), "mine-1", "mine-1")
    assert traceparent == parent, "nothing is exported: what follows hangs below the client's part"
    assert _invoke(node, "a", traceparent="00-broken").body[2] == ""
    assert _invoke(node, "a", "fail", **{"X-Request-Id": "mine-2", "traceparent": parent}).status == 500
    log = node.log_of("a")
    assert f"told mine-1 {TRACE} here\n" in log
    assert f"dormouse: request mine-2 of trace {TRACE} failed\n" in log
    told, failed = (b"".join(line.text for line in record) for record in having(log.encode(), "mine-2"))
    assert told == f"told mine-2 {TRACE} here\n".encode()
    assert b"Traceback" in failed
    assert failed.endswith(b"  ValueError: as asked\n")


def test_the_last_requests_are_told_by_kind(node: TestNode) -> None:
    trace = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    _invoke(node, "b", "fail", **{"X-Request-Id": "bad-1"}, **trace)
    _invoke(node, "b", **{"X-Request-Id": "good-1"})
    failed, *_ = node.admin.requests("", "failed", 9)
    assert (failed["function"], failed["id"], failed["trace"], failed["outcome"]) == (
        "b",
        "bad-1",
        TRACE,
        "function_raised",
    )
    assert failed["error"] == "ValueError: as asked"
    newest = node.admin.requests("b", "", 1)
    assert [(row["id"], row["outcome"], row["model"]) for row in newest] == [("good-1", "ok", "gpu")]
    _invoke(node, "c", **{"X-Request-Id": "cold-1"})
    cold = node.admin.requests("c", "cold", 9)[0]
    assert (cold["id"], cold["model"]) == ("cold-1", "host")
    assert cold["ms"] >= cold["run_ms"] > 0
    assert node.admin.requests("a", "slow", 9) == []
    answer = node.http("GET", "/admin/requests?kind=wrong", headers={"Authorization": "Bearer dm_no"})
    assert answer.status == 401
    with pytest.raises(CallRefused):
        node.admin.requests("nobody", "", 9)


def test_a_log_is_searched_and_asked_since_when(node: TestNode) -> None:
    began = time.time()
    node.wait(lambda: time.time() > began + 2.5, 60, "the clock")  # marks of time are a second apart
    since = time.time()
    _invoke(node, "c", **{"X-Request-Id": "late-1"})
    whole, late = node.log_of("c"), b"".join(node.admin.logs("c", 200, False, since - 0.1)).decode()
    assert "told late-1" in late
    assert len(late) < len(whole)
    assert whole.endswith(late)
