"""`dormouse drain` on a real node: what is turned away, what ends, what waits; what outlives a router, and a node."""

import http.client
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from held_requests import FUNCTION, held

from dormouse.core.node.refusals import CallRefused
from dormouse.core.node.testing import TestNode, running_node

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
