"""Jobs and repeated requests on a real node: over restarts and kills, for several tenants, on a full disk."""

import json
import resource
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.nodes.testnode import HttpAnswer, TestNode, running_node
from dormouse.core.node.refusals import CallRefused
from dormouse.schemas.admin import Wish

CONFIG = '[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\n'

FUNCTION = """
import os, time
import torch

def load():
    return torch.ones(4).to("cuda")

def parts(request):
    for step in range(request["parts"]):
        yield {"step": step}

def handle(weights, request):
    if "parts" in request:
        return parts(request)
    if "count" in request:  # once more for each run
        print("counted", request["count"], flush=True)
    while "until" in request and not os.path.exists(request["until"]):
        time.sleep(0.01)
    if "fail" in request:
        raise ValueError(request["fail"])
    return {"sum": weights.sum().item(), "had": request.get("x")}
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG) as running:
        for name in ("f", "g", "again"):
            running.deployed(name, FUNCTION, timeout="60s", idempotent=name == "again")
        yield running


def _post(node: TestNode, body: Any, function: str = "f", **headers: str) -> HttpAnswer:
    return node.http("POST", f"/functions/{function}/invoke", body, headers=headers)


def _job(node: TestNode, body: Any, function: str = "f", **headers: str) -> str:
    """Makes a job; returns its path."""
    answer = _post(node, body, function, Prefer="respond-async", **headers)
    assert (answer.status, answer.headers["preference-applied"]) == (202, "respond-async"), answer
    assert answer.headers["location"] == f"/jobs/{answer.body['id']}"
    assert answer.headers["retry-after"] == "1"
    return answer.headers["location"]


def _ended(node: TestNode, job: str) -> Any:
    for _ in range(5):
        answer = node.http("GET", job, headers={"Prefer": "wait=20"})
        assert answer.status == 200, answer
        if "ended" in answer.body:
            return answer.body
    raise AssertionError(f"{job} has not ended\n{node.logs()}")


def _running(node: TestNode, job: str) -> None:
    node.wait(lambda: bool(node.http("GET", job).body["state"] == "running"), 60, f"{job} to run")


def _counted(node: TestNode, what: str, function: str = "f") -> int:
    """How often it has run."""
    return node.log_of(function).count(f"counted {what}\n")


def _has_run(node: TestNode, function: str) -> bool:
    return _counted(node, "run", function) > 0


def test_a_job_is_made_and_asked_for(node: TestNode) -> None:
    gate = node.shared / "gate1"
    job = _job(node, {"until": str(gate), "x": 7})
    _running(node, job)
    early = node.http("GET", f"{job}/result")
    assert (early.status, early.body["state"]) == (202, "running")
    assert node.status()["functions"]["f"]["jobs"]["begun"] == 1
    gate.touch()
    told = _ended(node, job)
    assert (told["state"], told["status"], told["function"]) == ("succeeded", 200, "f")
    assert told["expires"] == pytest.approx(told["ended"] + 3600)
    answer = node.http("GET", told["result"])
    assert (answer.status, answer.body) == (200, {"sum": 4.0, "had": 7})
    assert answer.headers["server-timing"].startswith("queue;dur=")
    assert told["id"] in [each["id"] for each in node.http("GET", "/jobs").body["jobs"]]


def test_an_error_and_an_answer_in_parts_are_kept_as_they_are(node: TestNode) -> None:
    failed, parts = _job(node, {"fail": "as asked"}, **{"X-Request-Id": "mine"}), _job(node, {"parts": 3})
    assert [(_ended(node, job)["state"], _ended(node, job).get("code")) for job in (failed, parts)] == [
        ("failed", "function_raised"),
        ("succeeded", None),
    ]
    answer = node.http("GET", f"{failed}/result")
    assert (answer.status, answer.code, answer.body["error"]["request_id"]) == (500, "function_raised", "mine")
    answer = node.http("GET", f"{parts}/result")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
    assert answer.body == "".join(f'data: {{"step":{step}}}\n\n' for step in range(3))


def test_a_job_is_cancelled_where_it_waits_and_where_it_runs(node: TestNode) -> None:
    never = str(node.shared / "never")
    runs, waits = _job(node, {"until": never}), _job(node, {"count": "two"})
    behind = [_job(node, {"count": "two"}) for _ in range(3)]  # f's queue has room for one more than runs
    _running(node, runs)
    for job in (behind[0], waits, runs):
        assert node.http("DELETE", job).body["state"] == "cancelled"
    for job in (behind[0], waits, runs):
        answer = node.http("GET", f"{job}/result")
        assert (answer.status, answer.code) == (503, "cancelled")
    assert [_ended(node, job)["state"] for job in behind[1:]] == ["succeeded"] * 2
    node.wait(lambda: _counted(node, "two") == 2, 60, "what they print to be in the log")
    assert node.http("DELETE", runs).status == 200, "it has ended: forgotten"
    for method, path in (("GET", runs), ("DELETE", runs), ("GET", f"{runs}/result"), ("GET", "/jobs/nothing")):
        answer = node.http(method, path)
        assert (answer.status, answer.code) == (404, "unknown_job"), (method, path)
    assert node.http("DELETE", "/jobs").status == 405


def test_other_requests_come_between_the_jobs_of_a_function(node: TestNode) -> None:
    gate = node.shared / "gate3"
    jobs = [_job(node, {"until": str(gate)}) for _ in range(20)]
    _running(node, jobs[0])
    answers: list[HttpAnswer] = []
    asks = threading.Thread(target=lambda: answers.append(_post(node, {"x": 1})))
    asks.start()
    node.wait(lambda: bool(node.status()["functions"]["f"]["queued"] == 2), 60, "the request to be in the queue")
    gate.touch()
    asks.join(60)
    assert answers[0].status == 200
    assert [_ended(node, job)["state"] for job in jobs] == ["succeeded"] * 20


def test_a_request_with_a_key_runs_once(node: TestNode) -> None:
    gate = node.shared / "gate4"
    body = {"count": "four", "until": str(gate), "x": 4}
    key = {"Idempotency-Key": "four"}
    answers: list[HttpAnswer] = []
    asks = [threading.Thread(target=lambda: answers.append(_post(node, body, **key))) for _ in range(3)]
    for ask in asks:
        ask.start()
    node.wait(lambda: _counted(node, "four") == 1, 60, "the first to run")
    job = _post(node, body, **key, Prefer="respond-async")
    assert (job.status, job.body["state"]) == (202, "running"), "who does not want to wait is told where to ask"
    gate.touch()
    for ask in asks:
        ask.join(60)
    answers.append(_post(node, body, **key))
    assert [(answer.status, answer.body) for answer in answers] == [(200, {"sum": 4.0, "had": 4})] * 4
    assert sorted(answer.headers.get("idempotency-replayed", "") for answer in answers) == ["", "true", "true", "true"]
    assert _counted(node, "four") == 1
    other = _post(node, {"x": 5}, **key)
    assert (other.status, other.code) == (422, "idempotency_key_reused")
    assert _post(node, {"x": 5}, "g", **key).body["had"] == 5, "another function's key is another one"


def test_a_client_that_leaves_does_not_end_a_request_with_a_key(node: TestNode) -> None:
    gate = node.shared / "gate6"
    body, key = {"count": "six", "until": str(gate), "x": 6}, {"Idempotency-Key": "six"}
    connection = node.connect(30)
    connection.request("POST", "/functions/f/invoke", json.dumps(body), {"Content-Type": "application/json", **key})
    node.wait(lambda: _counted(node, "six") == 1, 60, "it to run")
    connection.close()
    job = _post(node, body, **key, Prefer="respond-async").headers["location"]
    gate.touch()
    assert _ended(node, job)["state"] == "succeeded"
    answer = _post(node, body, **key)
    assert (answer.body["had"], answer.headers["idempotency-replayed"], _counted(node, "six")) == (6, "true", 1)


def test_what_was_turned_away_may_be_sent_again_under_its_key(node: TestNode) -> None:
    key = {"Idempotency-Key": "five"}
    with running_node(CONFIG) as other:
        other.deployed("f", FUNCTION, timeout="60s", max_queue=1)
        gate = other.shared / "gate5"
        running = _job(other, {"until": str(gate)})
        _running(other, running)
        queued = _job(other, {"x": 1})
        other.wait(lambda: bool(other.status()["functions"]["f"]["queued"] == 1), 60, "the queue to be full")
        answer = _post(other, {"x": 6}, **key)
        assert (answer.status, answer.code) == (429, "queue_full"), answer
        gate.touch()
        assert [_ended(other, job)["state"] for job in (running, queued)] == ["succeeded"] * 2
        assert _post(other, {"x": 6}, **key).body["had"] == 6


@pytest.mark.parametrize("how", ["stopped", "killed", "router killed"])
def test_jobs_outlive_their_node(how: str) -> None:
    with running_node(CONFIG) as node:
        for name in ("f", "again"):
            node.deployed(name, FUNCTION, timeout="60s", idempotent=name == "again")
        gate = node.shared / "gate"
        done = _job(node, {"x": 1})
        _ended(node, done)
        runs = {name: _job(node, {"until": str(gate), "count": "run"}, name) for name in ("f", "again")}
        for name, job in runs.items():
            _running(node, job)
            node.wait(partial(_has_run, node, name), 60, "it to run")
        waits = [_job(node, {"x": number}) for number in range(5)]
        if how == "router killed":
            pid = node.kill("router")
            node.replaced("router", pid)
        else:
            if how == "stopped":
                node.stop()
            else:
                node.kill_all()
            node.start()
        gate.touch()
        assert node.http("GET", f"{done}/result").body == {"sum": 4.0, "had": 1}
        again = _ended(node, runs["again"])
        assert again["state"] == "succeeded"
        node.wait(lambda: _counted(node, "run", "again") == 2, 60, "one more run: it was declared idempotent")
        broken = node.http("GET", f"{runs['f']}/result")
        assert (broken.status, broken.code, _counted(node, "run")) == (503, "interrupted", 1)
        told = [_ended(node, job) for job in waits]
        assert [each.get("code") for each in told[1:]] == [None] * 4
        # The first was in its function's queue. Whether it had begun, only a node that ends in good order knows.
        assert told[0].get("code") == (None if how == "stopped" else "interrupted")


def test_a_job_of_another_tenant_is_not_there() -> None:
    with running_node(CONFIG, node='tenants = "many"') as node:
        for name in ("a", "b"):
            node.deployed(name, FUNCTION, tenant=name)
        keys = {name: node.admin.create_key(Wish(tenant=name))["key"] for name in ("a", "b")}
        auth = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
        job = _job(node, {"x": 1}, "a", **auth["a"])
        assert node.http("GET", job).status == 401
        for method, path in (("GET", job), ("DELETE", job), ("GET", f"{job}/result")):
            assert node.http(method, path, headers=auth["b"]).code == "unknown_job"
        assert node.http("GET", "/jobs", headers=auth["b"]).body == {"jobs": [], "more": 0}
        assert node.http("GET", job, headers={**auth["a"], "Prefer": "wait=60"}).body["state"] == "succeeded"
        node.remove("a")
        node.deployed("a", FUNCTION, tenant="b")
        assert node.http("GET", job, headers=auth["b"]).code == "unknown_job", "the name is theirs, the job is not"
        same = {"Idempotency-Key": "same"}
        assert _post(node, {"x": 2}, "a", **auth["b"], **same).body["had"] == 2


def test_limits_and_time_are_kept() -> None:
    with running_node(CONFIG + '[jobs]\ntenant_jobs = 3\ntenant_store = "2KiB"\n') as node:
        node.deployed("f", FUNCTION, timeout="60s")
        gate = node.shared / "gate"
        jobs = [_job(node, {"until": str(gate), "x": number}) for number in range(3)]
        full = _post(node, {}, Prefer="respond-async")
        assert (full.status, full.code, full.headers["retry-after"]) == (429, "jobs_full", "1")
        gate.touch()
        for job in jobs:
            _ended(node, job)
        newer = _job(node, {"x": "y" * 900})
        assert node.http("GET", jobs[0]).status == 404, "it has made room"
        assert _ended(node, newer)["state"] == "succeeded"
        large = _post(node, {"x": "y" * 3000}, Prefer="respond-async")
        assert (large.status, large.code) == (429, "jobs_full")
        node.stop()
        node.file.write_text(node.file.read_text().replace("[jobs]", "[jobs]\nkeep_ms = 1000"))
        node.start()
        _job(node, {"x": 1})
        node.wait(lambda: bool(node.http("GET", "/jobs").body["jobs"] == []), 60, "all to be forgotten")
        assert node.http("GET", f"{newer}/result").status == 404


def test_a_full_disk_fails_new_jobs_alone(node: TestNode) -> None:
    pid = node.pids()["router"]
    unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    try:
        for headers in ({"Prefer": "respond-async"}, {"Idempotency-Key": "full"}):
            answer = _post(node, {"x": 1}, **headers)
            assert (answer.status, answer.code) == (507, "disk_full"), answer
            assert "free space" in answer.message
        assert _post(node, {"x": 1}).status == 200, "what is not kept needs no disk"
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
    assert _post(node, {"x": 1}, **{"Idempotency-Key": "full"}).body["had"] == 1


def test_what_cannot_be_read_is_refused(node: TestNode) -> None:
    for headers in ({"Prefer": "respond async"}, {"Prefer": "wait=soon"}, {"Idempotency-Key": "a b"}):
        answer = _post(node, {"x": 1}, **headers)
        assert (answer.status, answer.code) == (400, "bad_headers"), headers
    assert _post(node, {"x": 1}, Prefer="handling=lenient, wait=5").status == 200, "of no interest here"
    bad = _job(node, 0, **{"X-Request-Id": "raw"})
    assert _ended(node, bad)["state"] == "failed", "a number is no request of this function"


def test_a_damaged_file_is_set_aside(tmp_path: Path) -> None:
    with running_node(CONFIG) as node:
        node.deployed("f", FUNCTION)
        _ended(node, _job(node, {"x": 1}))
        node.stop()
        file = node.state / "jobs.sqlite3"
        assert file.stat().st_mode & 0o77 == 0
        file.write_bytes(b"this is no database, " * 500)
        node.start()
        assert node.http("GET", "/jobs").body == {"jobs": [], "more": 0}
        assert file.with_name("jobs.sqlite3.damaged").exists()
        assert _ended(node, _job(node, {"x": 1}))["state"] == "succeeded"


def test_the_command_line_has_jobs_too(node: TestNode) -> None:
    gate = node.shared / "gate9"
    job = node.admin.detach("f", json.dumps({"until": str(gate), "x": 9}).encode())
    assert job["state"] == "queued"
    _running(node, f"/jobs/{job['id']}")
    for early in (lambda: node.admin.result(job["id"]), lambda: node.admin.cancel(job["id"], forget=True)):
        with pytest.raises(CallRefused, match=r"has not ended: wait for it, or cancel it$") as refused:
            early()
        assert refused.value.code == "not_ended"
    gate.touch()
    assert node.admin.job(job["id"], 60)["state"] == "succeeded"
    kind, answer = node.admin.result(job["id"])
    assert (kind, json.loads(answer)) == ("", {"sum": 4.0, "had": 9})
    assert node.admin.jobs("f")[0]["id"] == job["id"]
    assert job["id"] not in [row["id"] for row in node.admin.jobs("g")]
    with pytest.raises(
        CallRefused, match=r"has ended already \(succeeded\): there is nothing to cancel; .* --forget "
    ) as late:
        node.admin.cancel(job["id"])
    assert (late.value.status, late.value.code) == (409, "job_ended")
    assert node.admin.result(job["id"]) == (kind, answer), "it is kept"
    assert node.admin.cancel(job["id"], forget=True)["state"] == "succeeded"
    with pytest.raises(CallRefused) as gone:
        node.admin.job(job["id"])
    assert gone.value.code == "unknown_job"
    failed = node.admin.detach("f", b'{"fail": "as asked"}')
    node.admin.job(failed["id"], 60)
    with pytest.raises(CallRefused, match="as asked"):
        node.admin.result(failed["id"])
