"""Bodies that are not JSON, through a whole node: forms, pictures, arrays, bytes both ways; and what is malformed."""

import http.client
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core.node.refusals import CallRefused

FUNCTION = """
import io, sys
import numpy as np
import torch

def load():
    return torch.ones(4).to("cuda")

def handle(ones, request):
    if isinstance(request, dict) and "image" in request:
        from PIL import Image
        image = Image.open(io.BytesIO(request["image"].data))
        return image.resize((int(request["width"]), 1))
    if isinstance(request, dict) and "returns" in request:
        return eval(request["returns"])
    if isinstance(request, np.ndarray):
        return (torch.from_numpy(request).to("cuda") * 2).cpu().numpy()
    if hasattr(request, "content_type"):
        return request.data, request.content_type
    return {"type": type(request).__name__, "seen": request, "form": "python_multipart" in sys.modules}
"""


@dataclass
class Said:
    status: int
    data: bytes
    headers: dict[str, str]

    @property
    def code(self) -> str:
        return str(json.loads(self.data)["error"]["code"])


def send_to(node: TestNode, name: str, data: bytes, path: str = "/functions/{}/invoke", **headers: str) -> Said:
    connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=60)
    try:
        said = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", path.format(name), data, {"Content-Type": "application/json"} | said)
        response = connection.getresponse()
        return Said(response.status, response.read(), {k.lower(): v for k, v in response.getheaders()})
    finally:
        connection.close()


def send(node: TestNode, data: bytes, kind: str | None, **headers: str) -> Said:
    connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=60)
    try:
        said = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", "/functions/f/invoke", data, said if kind is None else {"Content-Type": kind} | said)
        response = connection.getresponse()
        return Said(response.status, response.read(), {k.lower(): v for k, v in response.getheaders()})
    finally:
        connection.close()


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\n[limits]\nbody = "8MiB"\nresponse = "8MiB"\n') as node:
        node.deployed("f", FUNCTION)
        yield node


def picture(size: tuple[int, int] = (4, 4)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, "PNG")
    return file.getvalue()


def test_json_needs_nothing_of_forms(node: TestNode) -> None:
    assert node.result("f", [1]) == {"type": "list", "seen": [1], "form": False}


def test_a_form_from_curl_is_answered_with_a_picture(node: TestNode, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(picture())
    url = f"http://127.0.0.1:{node.port}/functions/f/invoke"
    form = ["-F", f"image=@{tmp_path / 'x.png'}", "-F", "width=7"]
    refused = json.loads(subprocess.check_output(["curl", "-s", *form, url]))
    assert refused["error"]["code"] == "content_type"
    assert "x-request-id" in refused["error"]["message"]
    data = subprocess.check_output(["curl", "-s", "-H", "x-request-id: 1", *form, url])
    assert Image.open(io.BytesIO(data)).size == (7, 1)


def test_bytes_go_and_come_with_their_type(node: TestNode) -> None:
    answer = send(node, b"\x00\xff", "image/x-odd; a=b")
    assert (answer.status, answer.data, answer.headers["content-type"]) == (200, b"\x00\xff", "image/x-odd; a=b")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "sandbox"  # a function's page is none of the node's


def test_arrays_go_and_come_as_numpy_saves_them(node: TestNode) -> None:
    array = np.arange(300_000, dtype=np.float32)  # more than what goes in a message
    file = io.BytesIO()
    np.save(file, array)
    answer = send(node, file.getvalue(), "application/x-npy", accept="application/x-npy")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-npy")
    assert np.array_equal(np.load(io.BytesIO(answer.data)), array * 2)
    file = io.BytesIO()
    np.save(file, array[:3])
    answer = send(node, file.getvalue(), "application/x-npy")
    assert (answer.headers["content-type"], json.loads(answer.data)) == ("application/json", [0.0, 2.0, 4.0])


def test_large_ones_keep_each_byte(node: TestNode) -> None:
    data = np.random.default_rng(1).bytes((8 << 20) - 100)
    answer = send(node, data, "application/octet-stream")
    assert answer.data == data


@pytest.mark.parametrize(
    ("data", "kind", "status", "code"),
    [
        (b"--x\r\n", "multipart/form-data; boundary=x", 400, "bad_body"),
        (b"", "multipart/form-data", 400, "bad_body"),
        (b"\x93NUMPY", "application/x-npy", 400, "bad_body"),
        (b"{", "application/vnd.x+json", 400, "bad_json"),
        (b"x", "a/b; c=" + "d" * 600, 415, "content_type"),
    ],
)
def test_malformed_bodies_are_their_senders_mistakes(
    node: TestNode, data: bytes, kind: str, status: int, code: str
) -> None:
    errors = node.status()["functions"]["f"]["errors"]
    answer = send(node, data, kind, x_request_id="1")
    assert (answer.status, answer.code) == (status, code)
    assert node.status()["functions"]["f"]["errors"] == errors


def test_what_cannot_be_an_answer_is_the_functions_mistake(node: TestNode) -> None:
    answer = node.invoke("f", {"returns": "(b'x', 'a/b\\r\\nset-cookie: c=d')"})
    assert (answer.status, answer.code) == (500, "bad_response")
    answer = node.invoke("f", {"returns": "b'x' * (9 << 20)"})
    assert (answer.status, answer.code) == (500, "bad_response")
    assert "[limits] response" in answer.message


def test_the_command_line_sends_files_and_writes_bytes(node: TestNode, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(picture())
    command = [sys.executable, "-m", "dormouse.core.cli.main", "--run", str(node.run), "invoke", "f"]
    said = subprocess.run([*command, f"@{tmp_path / 'x.png'}"], capture_output=True, check=True)
    assert said.stdout == picture()
    said = subprocess.run([*command, "raw", "--type", "a/b"], capture_output=True, check=True)
    assert said.stdout == b"raw"
    said = subprocess.run([*command, "[1]"], capture_output=True, check=True)
    assert json.loads(said.stdout)["seen"] == [1]


def test_a_job_keeps_the_type_of_its_body_and_of_its_answer(node: TestNode) -> None:
    first = send(node, b"\x00", "image/x-odd", idempotency_key="k")
    again = send(node, b"\x00", "image/x-odd", idempotency_key="k")
    assert (again.data, again.headers["idempotency-replayed"]) == (b"\x00", "true")
    for answer in (first, again):
        assert (answer.headers["content-type"], answer.headers["content-security-policy"]) == ("image/x-odd", "sandbox")
    other = send(node, b"\x00", "image/x-other", idempotency_key="k")
    assert (other.status, other.code) == (422, "idempotency_key_reused")


PUBLIC = """
from dormouse import PublicError, Response

class Missing(LookupError):
    status_code = 404
    code = "no_such_image"
    headers = {"X-Seen": "yes"}

class Upstream(Exception):
    status_code = 404

Upstream.__module__ = "json"  # as if a library had it

def load():
    pass

def one(request):
    what = request if isinstance(request, str) else ""
    if what == "error":
        raise PublicError(409, "there is one already", code="taken", headers={"Retry-After": "7"})
    if what == "missing":
        raise Missing("no image of that name")
    if what == "upstream":
        raise Upstream("a service has said so")
    if what == "status":
        raise PublicError(200, "fine")
    if what == "created":
        return Response({"id": 5}, status=201, headers={"Location": "/images/5"})
    if what == "text":
        return Response("<p>text</p>", kind="text/html")
    if what == "empty":
        return Response(status=204)
    if what == "split":
        return Response(1, headers={"x-a": "b\\r\\nx-evil: 1"})
    if what == "framing":
        return Response(1, headers={"Transfer-Encoding": "chunked"})
    if what == "cookie":
        return Response(1, headers={"set-cookie": "a=b"})
    if what == "flask":
        return {"a": 1}, 404
    if what == "bytes":
        return b"x", 404
    return request
"""
FORMS = {
    "plain": "def handle(state, request):\n    return one(request)\n",
    "many": "async def handle(state, request):\n    return one(request)\n",
    "batch": (
        "def tried(request):\n    try:\n        return one(request)\n"
        "    except Exception as error:\n        return error\n"
        "def handle_batch(state, requests):\n    return [tried(each) for each in requests]\n"
    ),
}
SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "many": {"concurrency": 4}, "batch": {"batch": 4}}


@pytest.mark.parametrize("form", FORMS)
def test_a_function_says_status_headers_and_errors_for_who_has_asked(node: TestNode, form: str) -> None:
    """Which none of its own failures are; what it may not say is its mistake, by name."""
    name = f"public-{form}"
    node.deployed(name, PUBLIC + FORMS[form], **SETTINGS[form])

    def said(what: str) -> tuple[int, str, str]:
        answer = send_to(node, name, json.dumps(what).encode())
        error = json.loads(answer.data)["error"]
        return answer.status, error["code"], error["message"]

    taken = send_to(node, name, b'"error"')
    assert (taken.status, taken.code, taken.headers["retry-after"]) == (409, "taken", "7")
    error = json.loads(taken.data)["error"]
    assert (error["message"], error["type"]) == ("there is one already", "function_error")
    missing = send_to(node, name, b'"missing"')
    assert (missing.status, missing.code, missing.headers["x-seen"]) == (404, "no_such_image", "yes")
    created = send_to(node, name, b'"created"')
    assert (created.status, created.data, created.headers["location"]) == (201, b'{"id":5}', "/images/5")
    text = send_to(node, name, b'"text"')
    assert (text.status, text.data, text.headers["content-type"]) == (200, b"<p>text</p>", "text/html")
    assert text.headers["content-security-policy"] == "sandbox"
    empty = send_to(node, name, b'"empty"')
    assert (empty.status, empty.data, empty.headers.get("content-length")) == (204, b"", None)
    (row,) = [row for row in node.admin.functions() if row["name"] == name]
    assert (row["errors"], row["outcomes"]) == (0, {"function_refused": 2, "ok": 3})
    assert said("upstream")[:2] == (500, "function_raised")
    wrong = {what: said(what) for what in ("status", "split", "framing", "cookie", "flask", "bytes")}
    assert {each[:2] for each in wrong.values()} == {(500, "bad_response")}
    assert "the status 200: a function answers with 400 to 499" in wrong["status"][2]
    assert "'x-a' with the value 'b\\r\\nx-evil: 1'" in wrong["split"][2]
    assert "'transfer-encoding', which is the node's own" in wrong["framing"][2]
    assert "'set-cookie', which is the node's own" in wrong["cookie"][2]
    assert "Response(body, status=404" in wrong["flask"][2]
    assert "Response(body, status=404" in wrong["bytes"][2]


def test_jobs_streams_and_replays_have_them_too(node: TestNode) -> None:
    streamed = """
from dormouse import PublicError, Response

def load(): pass

def handle(state, request):
    if request == "stream":
        return Response(iter(["a", "b"]), status=202, headers={"x-part": "1"})
    if request == "late":
        return Response(late())
    raise PublicError(410, "it is gone", headers={"x-gone": "1"})

def late():
    yield "a"
    raise PublicError(429, "slowly", code="slowly")
"""
    node.deployed("s", streamed)
    stream = send_to(node, "s", b'"stream"')
    assert (stream.status, stream.headers["x-part"], stream.data) == (202, "1", b"data: a\n\ndata: b\n\n")
    assert stream.headers["cache-control"] == "no-cache"
    late = send_to(node, "s", b'"late"')
    assert (late.status, late.data.startswith(b"data: a\n\nevent: error\ndata: ")) == (200, True)
    assert json.loads(late.data.rpartition(b"data: ")[2])["error"]["code"] == "slowly"
    first, again = (send_to(node, "s", b'"x"', Idempotency_Key="one") for _ in range(2))
    assert [(each.status, each.code, each.headers["x-gone"]) for each in (first, again)] == [(410, "gone", "1")] * 2
    assert again.headers["idempotency-replayed"] == "true"
    made = send_to(node, "s", b'"x"', Prefer="respond-async")
    assert made.status == 202
    answer = node.http("GET", f"{made.headers['location']}/result", headers={"Prefer": "wait=60"})
    assert (answer.status, answer.code, answer.headers["x-gone"]) == (410, "gone", "1")
    assert answer.message == "it is gone"
    asked: list[Callable[[], object]] = [
        lambda: node.admin.invoke("s", b'"x"'),
        lambda: node.admin.result(made.headers["location"].removeprefix("/jobs/")),
    ]
    for ask in asked:
        with pytest.raises(CallRefused, match=r"^it is gone$") as refused:
            ask()
        assert (refused.value.status, refused.value.code, refused.value.of_function) == (410, "gone", True)
    with pytest.raises(CallRefused) as refused:
        node.admin.invoke("nobody", b"1")
    assert (refused.value.code, refused.value.of_function) == ("unknown_function", False)
    replayed = [send_to(node, "s", b'"stream"', Idempotency_Key="two") for _ in range(2)]
    assert [(each.status, each.headers["x-part"]) for each in replayed] == [(202, "1")] * 2
    tensors = json.dumps({"inputs": [{"name": "input", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}).encode()
    inferred = send_to(node, "s", tensors, "/v2/models/{}/infer")
    assert (inferred.status, json.loads(inferred.data)) == (410, {"error": "gone: it is gone"})


def test_only_who_may_deploy_reads_where_it_was_raised(node: TestNode) -> None:
    """Others read what was raised, without a path; also of one that cannot be loaded."""
    source = "def load():\n    pass\ndef handle(state, request):\n    open('/srv/models/private/weights.bin')\n"
    node.deployed("raises", source)
    said = json.loads(send_to(node, "raises", b"1").data)["error"]["message"]
    assert said.startswith("FileNotFoundError: [Errno 2] No such file or directory: 'weights.bin'\n")
    assert [word in said for word in ("private", "line 4")] == [False, False]
    assert said.endswith("\nthe function's log has the rest")
    with pytest.raises(CallRefused, match=r"line 4, in handle\n.*private/weights.bin"):
        list(node.admin.invoke("raises", b"1"))
