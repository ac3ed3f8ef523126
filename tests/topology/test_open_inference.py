"""The Open Inference Protocol, version 2, through a whole node, over plain HTTP."""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from inference_wire import ANYTHING, JSON_LENGTH, SIGNED, Sender, binary, described, outputs, texts

from benchmarks.nodes.testnode import TestNode, running_node

pytestmark = pytest.mark.timeout(300)

HINTED = """
from typing import TypedDict
import numpy as np
from numpy.typing import NDArray

class Request(TypedDict):
    text: str
    weights: list[float]
    image: np.ndarray[tuple[int, int], np.dtype[np.uint8]]

class Answer(TypedDict):
    said: str
    total: float

def handle(state, request: Request) -> Answer:
    total = sum(request["weights"]) + float(request["image"].sum())
    return {"said": request["text"] * 2, "total": total}
"""

BATCHED = """
def handle_batch(state, requests):
    return [{"y": each["x"] + len(each["x"])} for each in requests]
"""

CONCURRENT = """
async def handle(state, request):
    return {"y": request["x"] * 3}
"""

PARTS = """
def handle(state, request):
    yield "a"
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    settings = '[gpu]\ncount = 1\nmemory = "64MiB"\n[limits]\nbody = "2MiB"\nresponse = "4MiB"\n'
    with running_node(settings) as node:
        node.deployed("a", ANYTHING)
        node.deployed("signed", SIGNED)
        node.deployed("hinted", HINTED)
        yield node


@pytest.fixture(scope="module")
def send(node: TestNode) -> Iterator[Sender]:
    sender = Sender(node.port)
    yield sender
    sender.close()


def test_the_server_says_what_it_is_and_that_it_lives(send: Sender) -> None:
    said = send("GET", "/v2").json
    assert (said["name"], send("GET", "/v2/").json) == ("dormouse", said)
    assert "binary_tensor_data" in said["extensions"]
    assert send("GET", "/v2/health/live").json == {"live": True}
    ready = send("GET", "/v2/health/ready")
    assert (ready.status, ready.json) == (200, {"ready": True, "live": True})


def test_a_model_says_its_tensors(send: Sender) -> None:
    assert send("GET", "/v2/models").json == {"models": ["a", "hinted", "signed"]}
    said = send("GET", "/v2/models/signed").json
    assert said == {
        "name": "signed",
        "versions": ["1"],
        "platform": "dormouse_python",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [-1, 4]},
            {"name": "sum", "datatype": "FP64", "shape": [1]},
            {"name": "names", "datatype": "BYTES", "shape": [2]},
        ],
    }
    assert send("GET", "/v2/models/signed/versions/1").json == said
    said = send("GET", "/v2/models/hinted").json
    inputs = {each["name"]: (each["datatype"], each["shape"]) for each in said["inputs"]}
    assert inputs == {"text": ("BYTES", [1]), "weights": ("FP64", [-1]), "image": ("UINT8", [-1, -1])}
    assert {each["name"]: each["datatype"] for each in said["outputs"]} == {"said": "BYTES", "total": "FP64"}
    assert send("GET", "/v2/models/a").json["inputs"] == []
    config = send("GET", "/v2/models/signed/config").json
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 4]}]
    assert config["output"][2]["data_type"] == "TYPE_STRING"


def test_a_model_is_ready_by_its_name_and_its_version(send: Sender) -> None:
    assert send("GET", "/v2/models/a/ready").json == {"name": "a", "ready": True}
    assert send("GET", "/v2/models/a/versions/1/ready").status == 200
    for path in ("/v2/models/a/versions/7", "/v2/models/a/versions/7/ready"):
        assert (send("GET", path).status, send("GET", path).error.split(":")[0]) == (404, "unknown_version")


@pytest.mark.parametrize("name", ["b", "org/a"])
def test_an_unknown_model_is_not_there(send: Sender, name: str) -> None:
    """No name here has a stroke, so that such a one is always unknown; it is found in the path all the same."""
    for path in (f"/v2/models/{name}", f"/v2/models/{name}/versions/1/ready", f"/v2/models/{name}/config"):
        reply = send("GET", path)
        assert (reply.status, reply.error) == (
            404,
            f"unknown_function: there is no function {name!r}; `dormouse ls` says which there are",
        )
    assert send.infer(name, {"inputs": []}).status == 404
    native = send("POST", f"/functions/{name.replace('/', '%2F')}/invoke", b"{}", content_type="application/json")
    assert (native.status, native.json["error"]["type"]) == (404, "invalid_request_error")


NUMBERS = {
    "BOOL": np.array([True, False]),
    "UINT8": np.array([0, 255], np.uint8),
    "UINT16": np.array([0, 65535], np.uint16),
    "UINT32": np.array([0, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 127], np.int8),
    "INT16": np.array([-32768, 32767], np.int16),
    "INT32": np.array([-(2**31), 2**31 - 1], np.int32),
    "INT64": np.array([-(2**63), 2**63 - 1], np.int64),
    "FP16": np.array([-1.5, 65504], np.float16),
    "FP32": np.array([-1.5, 0.125], np.float32),
    "FP64": np.array([-1.5, 1e300]),
}


@pytest.mark.parametrize("datatype", NUMBERS)
def test_numbers_go_and_come_as_they_are(send: Sender, datatype: str) -> None:
    array = NUMBERS[datatype]
    one, data = binary("x", array, datatype)
    request = {"id": "7", "inputs": [one], "parameters": {"binary_data_output": True}}
    reply = send.infer("a", request, data)
    assert outputs(reply) == {"x": (datatype, [2], data)}
    assert reply.headers["content-type"] == "application/octet-stream"
    said = json.loads(reply.data[: int(reply.headers[JSON_LENGTH.lower()])])
    assert (said["model_name"], said["model_version"], said["id"]) == ("a", "1", "7")
    plain = {"name": "x", "shape": [2], "datatype": datatype, "data": array.tolist()}
    assert outputs(send.infer("a", {"inputs": [plain]})) == {"x": (datatype, [2], array.tolist())}


def test_bfloat16_is_a_tensor_of_torch(send: Sender) -> None:
    data = torch.tensor([1.5, -2.0], dtype=torch.bfloat16).view(torch.int16).numpy().tobytes()
    one = described("x", [1, 2], "BF16", data)
    reply = send.infer("a", {"inputs": [one], "parameters": {"binary_data_output": True}}, data)
    assert outputs(reply) == {"x": ("BF16", [1, 2], data)}
    assert outputs(send.infer("a", {"inputs": [one]}, data)) == {"x": ("BF16", [1, 2], [1.5, -2.0])}


def test_bytes_are_any_bytes(send: Sender) -> None:
    data = texts(b"a\0", b"", b"\xff\xfe")
    reply = send.infer(
        "a",
        {
            "inputs": [described("x", [3], "BYTES", data)],
            "outputs": [{"name": "x", "parameters": {"binary_data": True}}],
        },
        data,
    )
    assert outputs(reply) == {"x": ("BYTES", [3], data)}
    plain = {"name": "x", "shape": [1, 2], "datatype": "BYTES", "data": [["a\0", "é"]]}
    assert outputs(send.infer("a", {"inputs": [plain]})) == {"x": ("BYTES", [1, 2], ["a\0", "é"])}
    refused = send.infer("a", {"inputs": [described("x", [3], "BYTES", data)]}, data)
    assert (refused.status, "binary_data" in refused.error) == (500, True)  # JSON has no such text


def test_json_and_binary_stand_in_one_request(send: Sender) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    one, data = binary("x", array, "FP32")
    other = {"name": "k", "shape": [1], "datatype": "INT32", "data": [3]}
    wanted = [{"name": "x", "parameters": {"binary_data": True}}, {"name": "k"}]
    reply = send.infer("a", {"inputs": [other, one], "outputs": wanted}, data)
    assert outputs(reply) == {"x": ("FP32", [2, 3], data), "k": ("INT32", [1], [3])}
    alone = send.infer("a", {"inputs": [other, one], "outputs": [{"name": "k"}]}, data)
    assert outputs(alone) == {"k": ("INT32", [1], [3])}
    mixed = {
        "inputs": [one],
        "parameters": {"binary_data_output": True},
        "outputs": [{"name": "x", "parameters": {"binary_data": False}}],
    }
    assert outputs(send.infer("a", mixed, data)) == {"x": ("FP32", [2, 3], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])}


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_bodies_may_be_compressed_both_ways(send: Sender, encoding: str) -> None:
    array = np.zeros(100_000, np.float32)
    one, data = binary("x", array, "FP32")
    head = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}}).encode()
    packed = gzip.compress(head + data) if encoding == "gzip" else zlib.compress(head + data)
    sizes = {"Inference-Header-Content-Length": str(len(head))}
    reply = send("POST", "/v2/models/a/infer", packed, content_encoding=encoding, accept_encoding=encoding, **sizes)
    assert (reply.status, reply.headers["content-encoding"]) == (200, encoding)
    assert len(reply.data) < len(data) / 10
    reply.data = gzip.decompress(reply.data) if encoding == "gzip" else zlib.decompress(reply.data)
    assert outputs(reply) == {"x": ("FP32", [100_000], data)}
    both = send(
        "POST", "/v2/models/a/infer", packed, content_encoding=encoding, accept_encoding="gzip, deflate", **sizes
    )
    assert "content-encoding" not in both.headers  # what clients say unasked
    assert send("POST", "/v2/models/a/infer", packed[:-9], content_encoding=encoding, **sizes).status == 400
    bomb = gzip.compress(bytes(3 << 20)) if encoding == "gzip" else zlib.compress(bytes(3 << 20))
    refused = send("POST", "/v2/models/a/infer", bomb, content_encoding=encoding, **sizes)
    assert (refused.status, "limits.body" in refused.error) == (400, True)


def test_a_whole_body_is_the_only_tensor(send: Sender) -> None:
    """A header of 0 bytes is not the same as none."""
    data = np.arange(8, dtype=np.float32).tobytes()
    raw = {JSON_LENGTH: "0"}
    reply = send("POST", "/v2/models/signed/infer", data, **raw)
    found = outputs(reply)
    assert found["y"] == ("FP32", [2, 4], (np.arange(8, dtype=np.float32) * 2).tobytes())
    assert found["names"] == ("BYTES", [2], texts(b"a", "bé".encode()))
    assert send("POST", "/v2/models/signed/infer", data[:-4], **raw).status == 400
    assert send("POST", "/v2/models/a/infer", data, **raw).status == 400  # nobody knows what it is
    assert send("POST", "/v2/models/signed/infer", data).status == 400  # it is no JSON


def test_text_and_lists_are_made_as_types_name_them(send: Sender) -> None:
    image = np.full((2, 3), 2, np.uint8)
    one, data = binary("image", image, "UINT8")
    inputs: list[Any] = [
        {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["ab"]},
        {"name": "weights", "shape": [2], "datatype": "FP32", "data": [0.5, 1]},
        one,
    ]
    assert outputs(send.infer("hinted", {"inputs": inputs}, data)) == {
        "said": ("BYTES", [1], ["abab"]),
        "total": ("FP64", [1], [13.5]),
    }
    wrong = binary("image", image.astype(np.int16), "INT16")
    refused = send.infer("hinted", {"inputs": [*inputs[:2], wrong[0]]}, wrong[1])
    assert (refused.status, "uint8" in refused.error) == (400, True)
    assert send.infer("hinted", {"inputs": inputs[:2]}).status == 400


X = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("request_", "binary_", "text"),
    [
        ([], None, "not one of the Open Inference Protocol"),
        ({"inputs": 3}, None, "not one of the Open Inference Protocol"),
        ({"inputs": []}, None, "expected 1 inputs but got 0 inputs"),
        ({"inputs": [X, X]}, None, "stands twice"),
        ({"inputs": [X, X | {"name": "z"}]}, None, "unexpected inference input 'z'"),
        ({"inputs": [X | {"shape": [4]}]}, None, "unexpected shape for input 'x' for model 'signed'. Expected [-1, 4]"),
        ({"inputs": [X | {"shape": [1, 5]}]}, None, "its shape is to be [1, 5]"),
        ({"inputs": [X | {"shape": [-1, 4]}]}, None, "a shape that is none"),
        ({"inputs": [X | {"shape": [1 << 62, 1 << 62]}]}, None, "has a shape that is none"),
        ({"inputs": [X | {"datatype": "FP64"}]}, None, "data-type is 'FP64', but model 'signed' expects 'FP32'"),
        ({"inputs": [X | {"datatype": "FP8"}]}, None, "there are BOOL"),
        ({"inputs": [X | {"data": [1, 2, 3, "a"]}]}, None, "not FP32"),
        ({"inputs": [X | {"data": [1, 2, 3, None]}]}, None, "not FP32"),
        ({"inputs": [X | {"data": [[1, 2, 3], [4]]}]}, None, "not in even rows"),
        ({"inputs": [X | {"datatype": "INT8", "data": [1, 2, 3, 128]}]}, None, "not INT8"),
        ({"inputs": [X | {"datatype": "INT32", "data": [1, 2, 3, 0.5]}]}, None, "not INT32"),
        ({"inputs": [X | {"datatype": "UINT8", "data": [1, 2, 3, -1]}]}, None, "not UINT8"),
        ({"inputs": [X | {"datatype": "BOOL"}]}, None, "not BOOL"),
        ({"inputs": [X | {"datatype": "BYTES"}]}, None, "is to be text"),
        ({"inputs": [X], "outputs": [{"name": "no"}]}, None, "unexpected inference output 'no'"),
        ({"inputs": [X | {"parameters": {"shared_memory_region": "r"}}]}, None, "shared_memory_region"),
        ({"inputs": [X], "outputs": [{"name": "y", "parameters": {"classification": 1}}]}, None, "classification"),
        ({"inputs": [described("x", [1, 4], "FP32", b"1234")]}, b"1234", "has 4 bytes, and FP32 of the shape"),
        ({"inputs": [described("x", [1, 4], "FP32", bytes(16))]}, bytes(15), "15 bytes are left"),
        ({"inputs": [described("x", [1, 4], "FP32", bytes(16))]}, bytes(17), "unexpected additional input data: 1"),
        ({"inputs": [described("x", [1, 4], "BOOL", bytes(4))]}, b"\0\1\2\0", "no BOOL"),
        ({"inputs": [described("x", [2], "BYTES", bytes(8))]}, texts(b"abcd"), "2 elements of BYTES"),
        ({"inputs": [described("x", [1], "BYTES", bytes(4))]}, b"\xff\xff\xff\xff", "1 elements of BYTES"),
        ({"inputs": [described("x", [1], "BYTES", bytes(3))]}, b"\0\0\0", "1 elements of BYTES"),
        ({"inputs": [X | {"parameters": {"binary_data_size": 16}}]}, bytes(16), "either data or a binary_data_size"),
        ({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32"}]}, None, "either data or a binary_data_size"),
        ({"inputs": [X | {"parameters": {"binary_data_size": True}, "data": 1}]}, b"", "either data or"),
    ],
)
def test_what_is_wrong_is_said(send: Sender, request_: Any, binary_: bytes | None, text: str) -> None:
    reply = send.infer("signed", request_, binary_)
    assert (reply.status, text in reply.error) == (400, True), reply.data


def test_a_header_that_is_none_is_refused_before_the_body(send: Sender) -> None:
    for length in ("-1", "a", "1" * 30):
        assert send("POST", "/v2/models/a/infer", b"{}", **{JSON_LENGTH: length}).status == 400
    assert send("POST", "/v2/models/a/infer", b"{}", **{JSON_LENGTH: "3"}).status == 400
    assert send("POST", "/v2/models/a/infer", b"{}", content_encoding="br").status == 400
    assert send("POST", "/v2/models/a/versions/2/infer", b"{}").status == 404
    sender = Sender(send.port)
    sender._connection.putrequest("POST", "/v2/models/a/infer")
    sender._connection.putheader("Content-Length", str(3 << 20))
    sender._connection.endheaders()  # no byte of it follows
    response = sender._connection.getresponse()
    assert (response.status, json.loads(response.read())["error"].split(":")[0]) == (413, "body_too_large")
    sender.close()


def test_errors_of_functions_are_worded_alike(node: TestNode, send: Sender) -> None:
    failed = send.infer("a", {"inputs": [X | {"name": "fails"}]})
    assert (failed.status, failed.error.startswith("function_raised: ")) == (500, True)
    assert "as was asked" in failed.error
    stats = send("GET", "/v2/models/a/stats").json["model_stats"][0]
    assert (stats["name"], stats["inference_stats"]["fail"]["count"] >= 1) == ("a", True)
    assert {each["name"] for each in send("GET", "/v2/models/stats").json["model_stats"]} >= {"a", "signed"}


def test_answers_of_batches_and_of_coroutines(node: TestNode, send: Sender) -> None:
    node.deployed("batched", BATCHED, batch=4)
    node.deployed("many", CONCURRENT, concurrency=4)
    node.deployed("parts", PARTS)
    one, data = binary("x", np.array([1.0, 2.0]), "FP64")
    assert outputs(send.infer("batched", {"inputs": [one]}, data)) == {"y": ("FP64", [2], [3.0, 4.0])}
    assert outputs(send.infer("many", {"inputs": [one]}, data)) == {"y": ("FP64", [2], [3.0, 6.0])}
    assert send.infer("batched", {"inputs": [one]}, data[1:]).status == 400
    asked = {"inputs": [one], "outputs": [{"name": "no"}]}
    assert (send.infer("batched", asked, data).status, send.infer("many", asked, data).status) == (400, 400)
    refused = send.infer("parts", {"inputs": []})
    assert (refused.status, "in parts" in refused.error) == (500, True)


def test_a_signature_that_is_none_is_not_deployed(node: TestNode) -> None:
    source = 'signature = {"inputs": {"x": ("FP8", [1])}}\ndef handle(state, request): pass\n'
    failed = node.deploy("wrong", source)
    assert failed.status == 422
    assert "'x' is of 'FP8'; write one of BOOL" in str(failed.body)


def test_the_repository_has_an_index(send: Sender) -> None:
    rows = {row["name"]: row for row in send("POST", "/v2/repository/index").json}
    assert rows["signed"] == {"name": "signed", "version": "1", "state": "READY", "reason": ""}
    assert send("POST", "/v2/repository/index", b'{"ready": true}').status == 200
    assert send("POST", "/v2/repository/index", b'{"ready": 3}').status == 400
    for deep in (b'{"ready": ' + b"[" * 30_000, b'{"other": ' + b"[" * 30_000 + b"]" * 30_000 + b"}"):
        reply = send("POST", "/v2/repository/index", deep)
        assert (reply.status, reply.error.split(":")[0]) == (400, "bad_body"), reply.data


def test_what_is_not_done_says_so(send: Sender) -> None:
    for path in ("/v2/systemsharedmemory/status", "/v2/trace/setting", "/v2/logging"):
        reply = send("GET", path)
        assert (reply.status, reply.error.split(":")[0]) == (501, "unsupported"), path
    assert send("GET", "/v2/models/a/infer").status == 405
    assert send("DELETE", "/v2/models/a").status == 405


def test_a_page_of_another_site_sends_nothing(send: Sender) -> None:
    one = {"inputs": [X | {"name": "x"}]}
    assert send.infer("a", one, origin="http://evil.example").status == 403
    assert send.infer("a", one, content_type="text/plain").status == 400  # 415, as the protocol has it
    assert send.infer("a", one).status == 200
