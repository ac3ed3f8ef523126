"""The Python client without a node: what is sent and sent again, what answers mean, streams in any pieces."""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dormouse.client import (
    ApiError,
    BadAnswer,
    CallError,
    CallTimeout,
    ConnectionBroke,
    FunctionFailed,
    FunctionRefused,
    NodeBusy,
    NotThere,
    OutOfRoom,
    RequestRefused,
    TimedOut,
    Unavailable,
    Unreached,
    tensors,
)
from dormouse.client.wire import (
    NPY,
    SSE,
    Again,
    Came,
    Events,
    HttpReply,
    Rest,
    ToSend,
    calling,
    decoded,
    encoded,
    error_of,
    sent,
    waiting,
)

JSON_REPLY = {"content-type": "application/json; charset=utf-8"}


def _failure(status: int, code: str, again: str = "", type_: str = "x") -> HttpReply:
    error = {"code": code, "message": "no", "type": type_, "request_id": "r1", "param": "p"}
    headers = {"retry-after": again} if again else {}
    return HttpReply(status, headers, json.dumps({"error": error}).encode())


GOOD = HttpReply(200, JSON_REPLY, b"[1]")


@pytest.mark.parametrize(
    ("told", "data"),
    [
        ([("x", "FP32", [2], 8)], bytes(7)),
        ([("x", "FP32", [2], 8)], bytes(9)),
        ([("x", "FP32", [3], 8)], bytes(8)),
        ([("x", "FP32", [2], -8)], b""),
        ([("x", "FP8", [2], 2)], bytes(2)),
        ([("x", "BYTES", [1 << 40], 4)], bytes(4)),
        ([("x", "BYTES", [1], 5)], b"\3\0\0\0a"),
        ([("x", "BYTES", [1], 6)], b"\1\0\0\0ab"),
        ([("x", "FP32", "2", 8)], bytes(8)),
        ([("x", "FP32", [0, 1 << 70], 0)], b""),
        ([("x", "BF16", [3], 4)], bytes(4)),
    ],
)
def test_answers_that_are_no_tensors(told: list[Any], data: bytes) -> None:
    outputs = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": nbytes}}
        for name, datatype, shape, nbytes in told
    ]
    head = json.dumps({"outputs": outputs}).encode()
    with pytest.raises(BadAnswer, match="Open Inference Protocol"):
        tensors.decoded(HttpReply(200, {"inference-header-content-length": str(len(head))}, head + data))


def test_bf16_of_no_elements_is_a_tensor() -> None:
    one = {"name": "x", "datatype": "BF16", "shape": [0, 3], "parameters": {"binary_data_size": 0}}
    found = tensors.decoded(HttpReply(200, {}, json.dumps({"outputs": [one]}).encode()))
    assert (found["x"].dtype, found["x"].shape) == (torch.bfloat16, (0, 3))


def test_an_answer_that_is_not_binary_is_no_tensors() -> None:
    for content in (b"", b"{", b"[]", b'{"outputs": 3}', b'{"outputs": [{"name": "x"}]}', b"[" * 99_999):
        with pytest.raises(BadAnswer):
            tensors.decoded(HttpReply(200, {}, content))
    for length in ("-5", "1000"):
        with pytest.raises(BadAnswer, match=r"its JSON is to have"):
            tensors.decoded(HttpReply(200, {"inference-header-content-length": length}, b'{"outputs": []}12345'))
    error = error_of(HttpReply(404, {"x-request-id": "r7"}, b'{"error": "unknown_function: there is none"}'))
    assert isinstance(error, NotThere)
    assert (error.code, error.message, error.request_id) == ("unknown_function", "there is none", "r7")


class Played:
    """A call whose tries come to this, one after the other; without a clock that runs by itself."""

    def __init__(self, *came: Came, whole: bool = False, due_s: float | None = None, most: int = 3) -> None:
        self.now_s, self.pauses, self.sent = 0.0, list[float](), list[ToSend]()
        self._came = iter(came)
        self._again = Again(most, due_s, whole)

    def run(self) -> HttpReply:
        return self._play(calling(ToSend("POST", "/functions/f/invoke"), self._again, lambda: self.now_s))

    def wait(self, job: str) -> HttpReply:
        return self._play(waiting(job, self._again, lambda: self.now_s))

    def _play(self, steps: Any) -> HttpReply:
        came: Came | None = None
        while True:
            try:
                step = steps.send(came)
            except StopIteration as end:
                reply: HttpReply = end.value
                return reply
            if isinstance(step, Rest):
                self.pauses.append(step.seconds)
                self.now_s += step.seconds
                came = None
            else:
                self.sent.append(step)
                came = next(self._came)


def test_a_call_is_sent_again_while_it_is_turned_away() -> None:
    played = Played(_failure(429, "queue_full", "1"), _failure(503, "bodies_full", "2"), Unreached("down"), GOOD)
    assert played.run() == GOOD
    assert len(played.sent) == 4
    for pause_s, least_s in zip(played.pauses, (1.0, 2.0, 0.4), strict=True):
        assert least_s <= pause_s <= least_s * 1.5, "who was turned away together comes back apart"


@pytest.mark.parametrize(
    ("came", "kind"),
    [
        (_failure(503, "executor_lost", "1"), Unavailable),
        (_failure(502, "sandbox_died", "1"), FunctionFailed),
        (ConnectionBroke("reset"), ConnectionBroke),
    ],
)
def test_what_may_have_run_is_sent_again_only_where_that_is_safe(came: Came, kind: type[CallError]) -> None:
    with pytest.raises(kind):
        Played(came, GOOD).run()
    assert Played(came, GOOD, whole=True).run() == GOOD


@pytest.mark.parametrize(
    "came", [_failure(500, "function_raised"), _failure(404, "unknown_function"), CallTimeout("x")]
)
def test_what_would_fail_again_is_not_sent_again(came: Came) -> None:
    with pytest.raises(CallError):
        Played(came, GOOD, whole=True).run()


@pytest.mark.parametrize(("status", "code"), [(429, "slowly"), (404, "gone"), (401, "unauthorized"), (0, "starting")])
@pytest.mark.parametrize("whole", [False, True])
def test_a_functions_own_error_is_none_of_the_nodes_and_not_sent_again(status: int, code: str, whole: bool) -> None:
    """It has run, and may have said Retry-After."""
    played = Played(_failure(status or 429, code, "1", "function_error"), GOOD, whole=whole)
    with pytest.raises(FunctionRefused) as caught:
        played.run()
    assert (caught.value.code, caught.value.retry_after_s, len(played.sent)) == (code, 1.0, 1)
    assert type(error_of(_failure(status, code, type_="function_error"))) is FunctionRefused


def test_tries_are_counted_and_end_with_the_time_of_the_call() -> None:
    busy = _failure(429, "queue_full", "1")
    played = Played(*[busy] * 9, most=3)
    with pytest.raises(NodeBusy) as caught:
        played.run()
    assert (len(played.sent), caught.value.retry_after_s, caught.value.request_id, caught.value.param) == (
        4,
        1.0,
        "r1",
        "p",
    )
    played = Played(*[busy] * 9, most=9, due_s=4.0)
    with pytest.raises(NodeBusy):
        played.run()
    assert played.now_s < 4.0, "a pause that would end too late is not begun"
    lefts = [each.timeout_s for each in played.sent]
    assert lefts[0] == 4.0
    assert all(later < earlier for earlier, later in pairwise(x for x in lefts if x is not None))


def test_a_job_is_waited_for_until_it_has_ended() -> None:
    early = HttpReply(202, JSON_REPLY, b"{}")
    played = Played(early, _failure(503, "starting", "1"), early, GOOD, whole=True)
    assert played.wait("j/1") == GOOD
    assert {(each.method, each.path, each.headers["Prefer"]) for each in played.sent} == {
        ("GET", "/jobs/j%2F1/result", "wait=30")
    }
    late = Played(early, early, due_s=3.0)

    def passes() -> Iterator[Came]:
        while True:
            late.now_s += 2.0
            yield early

    late._came = passes()
    with pytest.raises(CallTimeout, match="it goes on"):
        late.wait("j1")
    assert [each.headers["Prefer"] for each in late.sent] == ["wait=3", "wait=1"]


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "bad_json", RequestRefused),
        (404, "unknown_job", NotThere),
        (413, "body_too_large", RequestRefused),
        (429, "rate_limited", NodeBusy),
        (500, "bad_response", FunctionFailed),
        (500, "what_comes_later", Unavailable),
        (503, "too_many_connections", NodeBusy),
        (503, "quarantined", Unavailable),
        (504, "timed_out", TimedOut),
        (507, "gpus_full", OutOfRoom),
        (0, "timed_out", TimedOut),
    ],
)
def test_errors_are_of_their_kind(status: int, code: str, kind: type[ApiError]) -> None:
    error = error_of(_failure(status, code))
    assert type(error) is kind
    assert isinstance(error, ApiError)
    assert (error.status, error.code, error.message, error.retry_after_s) == (status, code, "no", None)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"error": "no"}', b'{"error": {"message": 1}}', b"\xff", b"[" * 99_999]
)
def test_an_error_of_something_else_is_said_to_be_one(body: bytes) -> None:
    assert isinstance(error_of(HttpReply(502, {}, body)), BadAnswer)


def test_bodies() -> None:
    assert encoded({"x": [1, 2.5, None]}) == (b'{"x":[1,2.5,null]}', "application/json")
    assert encoded(memoryview(b"ab")) == (b"ab", "application/octet-stream")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    content, kind = encoded(array)
    assert kind == NPY
    back = decoded(HttpReply(200, {"content-type": NPY}, content))
    assert (back.dtype, back.tolist()) == (array.dtype, array.tolist())
    send = sent("a/b", array, {"X-Request-Id": "7"})
    assert (send.path, send.headers) == (
        "/functions/a%2Fb/invoke",
        {"Content-Type": NPY, "Accept": f"{NPY}, */*", "X-Request-Id": "7"},
    )
    for bad in ({1, 2}, float("nan"), np.array([object()])):
        with pytest.raises((TypeError, ValueError)):
            encoded(bad)


def npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header.encode()


def test_answers() -> None:
    assert decoded(HttpReply(200, JSON_REPLY, b'{"a":1}')) == {"a": 1}
    assert decoded(HttpReply(200, {"content-type": "image/png"}, b"\x89")) == b"\x89"
    assert decoded(HttpReply(200, {"content-type": SSE}, b"data: 1\n\ndata: two\n\n")) == [1, "two"]
    for kind, body in (
        ("application/json", b"{"),
        (NPY, b"no"),
        (NPY, b""),
        (NPY, b"PK\x03\x04 a zip of arrays"),
        (NPY, npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1 << 45,)}")),
        (NPY, npy("{'descr': '<f8', 'fortran_order': False, 'shape': (35184372088832,)}")),
        (NPY, npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}")),
        (NPY, npy("(((")),
        (NPY, npy("'" * 3)),
        (SSE, b"data: 1\n"),
        ("application/json", b"[" * 99999),
    ):
        with pytest.raises(BadAnswer):
            decoded(HttpReply(200, {"content-type": kind}, body))


_TEXTS = st.lists(st.one_of(st.integers(), st.text(st.characters(exclude_characters="\r\n", codec="utf-8"))))


@given(values=_TEXTS, cuts=st.lists(st.integers(0, 400)))
def test_a_stream_may_come_in_any_pieces(values: list[Any], cuts: list[int]) -> None:
    data = b"".join(b": waiting\n\ndata: %b\n\n" % json.dumps(value).encode() for value in values)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    events, found = Events(), []
    for start, end in pairwise(places):
        found += events.feed(data[start:end])
    assert found + events.end() == values


def test_a_stream_that_fails_raises_what_it_failed_with() -> None:
    events = Events()
    assert events.feed(b"data: 1\n\nevent: err") == [1]
    with pytest.raises(FunctionFailed) as caught:
        events.feed(b"or\ndata: " + _failure(500, "function_raised").content + b"\n\n")
    assert caught.value.code == "function_raised"
    broken = Events()
    broken.feed(b"data: 1\n")
    with pytest.raises(BadAnswer):
        broken.end()
    deep = Events()
    assert deep.feed(b"data: " + b"[" * 99_999 + b"\n\n") == ["[" * 99_999], "what is no JSON is text"
    lines = Events()
    assert lines.feed(b"data: a\ndata:b\n\n") == ["a\nb"]


def test_it_is_light() -> None:
    """And needs nothing that a node does."""
    code = (
        "import sys, time; began = time.process_time()\n"
        "from dormouse.client import AsyncClient, Client\n"
        "print(time.process_time() - began, *sys.modules)"
    )
    seconds, *modules = subprocess.check_output([sys.executable, "-c", code], text=True, cwd="/").split()
    assert {"torch", "numpy", "msgspec", "orjson", "zmq", "dormouse.core", "dormouse.schemas"} & set(modules) == set()
    assert float(seconds) < 1.0, "70 to 90 ms of processor time on an idle machine"
