"""handle_batch on a real node: batches form while one runs, and each request keeps its own answer and error."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.nodes.testnode import HttpAnswer, TestNode, running_node
from dormouse.core.logrecords import having

FUNCTION = """
import os, time
import msgspec, torch

class Asked(msgspec.Struct):
    n: float
    do: str = ""
    gate: str = ""

sizes = []

def load():
    return torch.ones(4).to("cuda")

def handle_batch(weights, requests: list[Asked]) -> list[float]:
    sizes.append(len(requests))
    for each in requests:
        if each.gate:
            print("at", each.gate, flush=True)
        while each.gate and not os.path.exists(each.gate):
            time.sleep(0.01)
        if each.do == "fail the batch":
            raise ValueError(f"number {each.n}")
        if each.do == "gpu":
            weights[torch.tensor([100]).to("cuda")].sum().item()
        if each.do == "one less":
            return [0.0] * (len(requests) - 1)
        if each.do == "die":
            os._exit(7)
    values = (torch.tensor([each.n for each in requests]).to("cuda")[:, None] * weights).sum(1).tolist()
    return [KeyError("mine") if each.do == "own" else sizes if each.do == "sizes" else value
            for each, value in zip(requests, values)]
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\n') as node:
        node.deployed("batched", FUNCTION, batch=8, timeout="100s")
        yield node


def ask(node: TestNode, n: float, do: str = "", gate: str = "", name: str = "batched") -> HttpAnswer:
    return node.invoke(name, {"n": n, "do": do, "gate": gate})


def _running(node: TestNode) -> int:
    return int(node.status()["functions"]["batched"]["running"])


def behind_a_gate(node: TestNode, gate: str, *asked: tuple[float, str]) -> list[HttpAnswer]:
    """All of them come while a batch of one runs, so that they are the next one, in their order."""
    path = node.shared / gate
    answers: list[Any] = [None] * len(asked)

    def call(index: int) -> None:
        answers[index] = ask(node, *asked[index])

    first = threading.Thread(target=ask, args=(node, 0.0, "", str(path)))
    first.start()
    node.wait(lambda: f"at {path}" in node.log_of("batched"), 60, "the first to run")
    threads = []
    for index in range(len(asked)):
        threads.append(threading.Thread(target=call, args=(index,)))
        threads[-1].start()
        node.wait(lambda: _running(node) == len(threads) + 1, 60, "it to come")
    path.touch()
    for thread in (first, *threads):
        thread.join()
    return answers


def test_what_comes_while_a_batch_runs_is_the_next_one(node: TestNode) -> None:
    answers = behind_a_gate(node, "together", *((float(n), "") for n in range(1, 12)))
    assert [answer.body for answer in answers] == [4.0 * n for n in range(1, 12)]
    assert ask(node, 1, "sizes").body[-4:] == [1, 8, 3, 1]


def test_each_request_keeps_its_own_error(node: TestNode) -> None:
    answers = behind_a_gate(node, "own", (1, ""), (2, "own"), (3, ""))
    assert [answer.status for answer in answers] == [200, 500, 200]
    assert answers[1].code == "function_raised"
    assert "KeyError: 'mine'" in answers[1].message


@pytest.mark.parametrize(("do", "words"), [("fail the batch", "ValueError: number 2.0"), ("gpu", "IndexError")])
def test_a_batch_that_fails_is_tried_one_by_one(node: TestNode, do: str, words: str) -> None:
    answers = behind_a_gate(node, do.replace(" ", "-"), (1, ""), (2, do), (3, ""))
    assert [answer.status for answer in answers] == [200, 500, 200]
    assert [answers[0].body, answers[2].body] == [4.0, 12.0]
    assert words in answers[1].message
    said = node.log_of("batched").partition("dormouse: a batch of 3 failed; each of its requests is tried alone\n  ")[2]
    assert words in said
    ids = [answer.headers["x-request-id"] for answer in answers]
    together = having(node.marked_log("batched"), ids[0])
    assert [record[0].origin.request for record in together] == [",".join(ids)], "no other line is of the first"
    assert b"a batch of 3 failed" in together[0][0].text
    own = [record for record in having(node.marked_log("batched"), ids[1]) if record[0].origin.request == ids[1]]
    assert [record[0].text for record in own] == [f"dormouse: request {ids[1]} failed\n".encode()]


def test_a_request_that_is_wrong_is_in_no_batch(node: TestNode) -> None:
    answer = node.invoke("batched", {"n": "one"})
    assert (answer.status, answer.code, answer.body["error"]["param"]) == (422, "invalid_request", "$.n")
    said = node.http("GET", "/functions/batched/schema").body
    assert said["request"]["$defs"]["Asked"]["required"] == ["n"]
    assert said["response"] == {"type": "number"}
    assert ask(node, 1).body == 4.0, "the lease that nothing used has come back"


def test_a_wrong_number_of_results_is_the_functions_mistake(node: TestNode) -> None:
    answer = ask(node, 1, "one less")
    assert (answer.status, answer.code) == (500, "bad_response")
    assert "0 results for 1 requests" in answer.message


def counted(node: TestNode, *names: str) -> list[float]:
    """Of the function, by one scrape that has the controller's part."""
    found: list[float] = []

    def there() -> bool:
        answer = node.http("GET", "/metrics")
        if answer.status != 200 or "\ndormouse_controller_answered 1" not in answer.body:
            return False
        keys = (f'\ndormouse_{name}_total{{function="batched"}} ' for name in names)
        found[:] = (float(answer.body.partition(key)[2].partition("\n")[0] or 0) for key in keys)
        return True

    node.wait(there, 120, "metrics")
    return found


def test_many_clients_are_batched_and_all_are_right(node: TestNode) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda n: ask(node, n).body, range(200))) == [4.0 * n for n in range(200)]
    assert max(ask(node, 1, "sizes").body) <= 8
    batches, requests, places = counted(node, "batches", "batch_requests", "batch_places")
    assert (places, 0 < batches <= requests <= places) == (8 * batches, True)


def test_batches_that_fail_are_counted(node: TestNode) -> None:
    batches, failed = counted(node, "batches", "batches_failed")
    behind_a_gate(node, "counted", (1, ""), (2, "fail the batch"), (3, ""))
    behind_a_gate(node, "not-counted", (1, ""), (2, "own"), (3, ""))
    ask(node, 1, "fail the batch")  # alone
    # One of a test before may be counted only now.
    node.wait(lambda: counted(node, "batches")[0] >= batches + 5, 120, "batches to be counted")
    assert counted(node, "batches_failed") == [failed + 1]


def test_waiting_for_more_is_bounded_and_alone_nobody_waits(node: TestNode) -> None:
    node.deployed("patient", FUNCTION, batch=8, batch_wait="50ms")
    for n in range(5):
        assert ask(node, n, name="patient").body == 4.0 * n
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda n: ask(node, n, name="patient").body, range(64))) == [4.0 * n for n in range(64)]


def test_a_stateless_function_has_batches_in_several_instances() -> None:
    """The second one answers what the first cannot, which waits at a gate."""
    with running_node('[gpu]\ncount = 2\nmemory = "64MiB"\n') as node:
        node.deployed("batched", FUNCTION, batch=2, stateless=True, deadline="1ms")
        assert ask(node, 1).body == 4.0
        gate = node.shared / "several"
        with ThreadPoolExecutor(12) as pool:
            first = pool.submit(ask, node, 0.0, "", str(gate))
            node.wait(lambda: f"at {gate}" in node.log_of("batched"), 60, "the first to run")
            others = [pool.submit(ask, node, float(n)) for n in range(1, 10)]
            node.wait(lambda: sum(each.done() for each in others) >= 5, 60, "the second instance to answer")
            assert not first.done()
            gate.touch()
            assert [each.result().body for each in others] == [4.0 * n for n in range(1, 10)]
            assert first.result().body == 0.0


def test_a_death_fails_its_batch_and_what_comes_next_is_answered(node: TestNode) -> None:
    answer = ask(node, 1, "die")
    assert (answer.status, answer.code) == (502, "sandbox_died")
    assert ask(node, 2).body == 8.0


def test_without_batches_they_come_one_by_one(node: TestNode) -> None:
    node.deployed("alone", FUNCTION)
    assert ask(node, 3, name="alone").body == 12.0
    answer = ask(node, 3, "own", name="alone")
    assert (answer.status, answer.code) == (500, "function_raised")


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({"batch": 1000}, 400, "from 1 to 128"),
        ({"batch": 8, "concurrency": 8}, 400, "leave one of the two out"),
        ({"batch_wait": "5ms"}, 400, "--batch 8"),
        ({"batch": 8}, 422, "handle_batch(state, requests)"),
    ],
)
def test_what_cannot_be_is_refused_at_deploy(node: TestNode, settings: Any, status: int, words: str) -> None:
    answer = node.deploy("plain", "def handle(state, request): return 1\n", **settings)
    assert answer.status == status
    assert words in answer.message
