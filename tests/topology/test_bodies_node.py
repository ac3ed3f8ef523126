"""Bodies that are not JSON, through a whole node: forms, pictures, arrays, bytes both ways; and what is malformed."""

import http.client
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dormouse.core.node.testing import TestNode, running_node

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
    command = [sys.executable, "-m", "dormouse.core.node.cli", "--run", str(node.run), "invoke", "f"]
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
