"""`dormouse drain` on a real node: what is turned away, what ends, what waits; what outlives a router, and a node."""

import http.client
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from held_requests import FUNCTION, held

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core import audit
from dormouse.core.node.refusals import CallRefused

CONFIG = '[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\n'

REFUSED = (503, "draining", "5")


def _new(node: TestNode) -> tuple[int, str, str | None]:
    answer = node.invoke("f", {"x": 0})
    return answer.status, answer.code, answer.headers.get("retry-after")


def _states(node: TestNode) -> list[str]:
    """Of all jobs, oldest first."""
    return [job["state"] for job in reversed(node.http("GET", "/jobs").body["jobs"])]


def test_what_runs_ends_and_what_is_new_waits_elsewhere() -> None:
    with running_node(CONFIG) as node, ThreadPoolExecutor(1) as pool:
        node.deployed("f", FUNCTION)
        with held(node, x=1) as running:
            for x in range(5):  # two of them begin: into the function's queue
                answer = node.http("POST", "/functions/f/invoke", {"x": x}, headers={"Prefer": "respond-async"})
                assert answer.status == 202
            node.wait(lambda: node.status()["node"]["requests_open"] == 3, 60, "two jobs to be requests")
            drained = pool.submit(node.admin.drain)
            node.wait(lambda: node.status()["node"]["draining"], 60, "the drain")

            assert _new(node) == REFUSED
            ready = node.http("GET", "/readyz")
            assert (ready.status, ready.body) == (503, {"ready": False, "missing": [], "draining": True})
            assert node.http("GET", "/healthz").status == 200
            with pytest.raises(CallRefused, match="takes no new requests") as refused:
                node.admin.detach("f", b'{"x": 9}')
            assert (refused.value.status, refused.value.code) == (503, "draining")
            assert not drained.done()

            running.go()
            assert running.answer().body == {"sum": 4.0, "had": 1}
        assert drained.result() is True
        assert _states(node) == ["succeeded", "succeeded", "queued", "queued", "queued"]
        assert node.admin.drain() is True, "at once"

        os.kill(node.pids()["router"], signal.SIGKILL)
        node.wait(lambda: _draining_again(node), 90, "the next router")
        assert _new(node) == REFUSED

        node.replace()
        node.wait(lambda: _draining_again(node), 90, "the next node")
        assert _new(node) == REFUSED

        assert node.admin.drain(undo=True) is False
        node.wait(lambda: node.http("GET", "/readyz").status == 200, 90, "the function to be loaded")
        assert node.result("f", {"x": 2}) == {"sum": 4.0, "had": 2}
        node.wait(lambda: _states(node) == ["succeeded"] * 5, 90, "the jobs that waited")


def _draining_again(node: TestNode) -> bool:
    try:
        return bool(node.http("GET", "/readyz").body["draining"]) and node.status()["functions"]["f"]["state"] == "idle"
    except (OSError, http.client.HTTPException, KeyError):
        return False


def test_a_drain_that_is_undone_while_somebody_waits_says_so() -> None:
    with running_node(CONFIG) as node, ThreadPoolExecutor(1) as pool:
        node.deployed("f", FUNCTION)
        with held(node, x=1) as running:
            drained = pool.submit(node.admin.drain)
            node.wait(lambda: node.status()["node"]["draining"], 60, "the drain")
            node.admin.drain(undo=True)
            assert drained.result() is False
            running.go()
            assert running.answer().status == 200
        assert node.result("f", {"x": 2})["had"] == 2


TWO = '[gpu]\ncount = 2\nmemory = "64MiB"\nthreads = 1\n'


def _gpus(node: TestNode) -> dict[str, str]:
    return {number: gpu["state"] for number, gpu in node.status()["gpus"].items()}


def test_a_gpu_is_drained_while_the_node_runs() -> None:
    """What runs there ends by itself, others go elsewhere, and then its executor is gone; that outlives each process,
    and a node that takes over.
    """
    with running_node(TWO) as node, ThreadPoolExecutor(1) as pool:
        node.deployed("f", FUNCTION)
        node.deployed("g", FUNCTION)
        with held(node, x=1) as running:
            (home,) = (number for number, gpu in node.status()["gpus"].items() if "f" in gpu["seats"])
            other, executor = str(1 - int(home)), node.pids()[f"gpu{home}"]
            drained = pool.submit(node.admin.drain_gpu, int(home), waits=True)
            node.wait(lambda: _gpus(node)[home] == "drains", 60, "the drain")
            for x in range(3):
                assert node.result("g", {"x": x}) == {"sum": 4.0, "had": x}
            assert (drained.done(), node.pids()[f"gpu{home}"]) == (False, executor)
            assert node.status()["functions"]["g"]["gpus"].keys() == {other}
            running.go()
            assert running.answer().body == {"sum": 4.0, "had": 1}
        assert drained.result() == {"gpu": int(home), "state": "drained", "leases": 0}
        assert f"gpu{home}" not in node.pids()
        assert node.status()["node"]["gone"] == []
        assert node.result("f", {"x": 2}) == {"sum": 4.0, "had": 2}
        assert f'dormouse_gpu_drained{{gpu="{home}"}} 1.0' in _metrics(node)

        os.kill(node.pids()["controller"], signal.SIGKILL)
        node.wait(lambda: _answers(node, 3), 90, "the next controller")
        assert _gpus(node) == {home: "drained", other: "serves"}
        node.replace()
        node.wait(lambda: _answers(node, 4), 90, "the next node")
        assert (_gpus(node), f"gpu{home}" in node.pids()) == ({home: "drained", other: "serves"}, False)

        assert node.admin.drain_gpu(int(other), waits=True)["state"] == "drained"
        late = pool.submit(node.invoke, "f", {"x": 5})
        node.wait(lambda: node.status()["waiting"] == 1, 60, "a request to wait")
        assert [row["kind"] for row in node.status()["waits"]["oldest"]] == ["no_gpu"]
        node.admin.drain_gpu(int(home), undo=True)
        assert late.result().body == {"sum": 4.0, "had": 5}
        assert _gpus(node) == {home: "serves", other: "drained"}
        acts = _audited(node, "gpu drain")
        assert acts == [(home, "ok"), (other, "ok"), (f"{home} --undo", "ok")]


def _answers(node: TestNode, x: int) -> bool:
    try:
        return bool(node.invoke("f", {"x": x}).body == {"sum": 4.0, "had": x})
    except (OSError, http.client.HTTPException):
        return False


def _metrics(node: TestNode) -> str:
    node.wait(lambda: node.http("GET", "/metrics").status == 200, 90, "the process that writes it")
    return str(node.http("GET", "/metrics").body)


def _audited(node: TestNode, act: str) -> list[tuple[str, str]]:
    lines = audit.read(node.state / "logs" / "audit.log", 0.0)
    return [(line["name"], line["outcome"]) for line in lines if line["act"] == act]
