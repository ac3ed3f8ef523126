"""Clients as everybody has them against a node: of HTTP in several languages, each with its defaults, and of the Open
Inference Protocol. `scripts/stock-clients` makes the environments of those that are Python's.
"""

import gzip
import json
import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inference_wire import ANYTHING, SIGNED
from needs import CURL

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.schemas.admin import Wish

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.timeout(300), pytest.mark.stock_clients]


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\n') as node:
        node.deployed("a", ANYTHING)
        node.deployed("signed", SIGNED)
        yield node


def said(node: TestNode, client: str, script: str) -> dict[str, Any]:
    python = ROOT / "build" / "stock" / client / "bin" / "python"
    if not python.exists():
        pytest.skip(f"needs {client}: scripts/stock-clients {client}")
    command = [str(python), str(ROOT / "tests" / script), f"127.0.0.1:{node.port}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}\n{node.logs()}"
    return {key: value for line in ended.stdout.splitlines() for key, value in json.loads(line).items()}


def test_tritonclient(node: TestNode) -> None:
    found = said(node, "tritonclient", "stock_triton.py")
    assert found.pop("model")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert all(found.pop("datatypes").values())
    status, text = found.pop("wrong")
    assert status == "400"
    assert "data-type is 'FP64', but model 'signed' expects 'FP32'" in text
    status, text = found.pop("unknown")
    assert (status, text.split(":")[0]) == ("404", "unknown_function")
    assert found == {
        "lives": [True, True, True],
        "versions": [True, False, False],
        "server": "dormouse",
        "config": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 4]}],
        "index": ["a", "signed"],
        "default": [[[2.0] * 4] * 2, ["a", "bé"], "me"],
        "json": [[16.0], ["sum"]],
        "bf16": [[0.5, -2.0]],
        "bytes": ["61", "c3a9", "ff"],
        "gzip": True,
        "deflate": True,
        "async": [[0.0], [16.0], [32.0], [48.0]],
        "counts": True,
        "aio": [True, [[2.0] * 4]],
    }


def test_kserve(node: TestNode) -> None:
    found = said(node, "kserve", "stock_kserve.py")
    assert "unknown_function" in found.pop("unknown")
    answer = [[[2.0] * 4] * 2, [16.0], "me"]
    assert found == {"lives": [True, True], "model": True, "json": answer, "binary": answer}


# --- HTTP

ECHO = """
import zlib
from dormouse import Response

def load():
    pass

def handle(state, request):
    if request == "nothing":
        return Response(status=204)
    if isinstance(request, dict) and "file" in request:
        request = request["file"]
    data = getattr(request, "data", None)
    return request if data is None else [len(data), zlib.crc32(data)]
"""
STREAM = """
import os, time

def load():
    pass

def handle(state, until):
    yield "one"
    while not os.path.exists(until):
        time.sleep(0.01)
    yield "two"
"""
LARGE = b"a" * (20 << 20)
RECEIVED: tuple[int, Any] = (200, [len(LARGE), zlib.crc32(LARGE)])
ANSWERS: dict[str, tuple[int, Any]] = {
    "json": (200, {"a": [1, "é"]}),
    "upload": RECEIVED,
    "chunked": RECEIVED,
    "form": RECEIVED,
    "413": (413, "body_too_large"),
    "404": (404, "unknown_function"),
    "401": (401, "unauthorized"),
    "415": (415, "content_encoding"),
    "gzip": (200, {"a": [1, "é"]}),
    "head": (200, ""),
    "slash": (404, "unknown_route"),
    "empty": (204, ""),
}


@pytest.fixture(scope="module")
def keyed() -> Iterator[tuple[TestNode, str]]:
    """A node that wants a key."""
    config = '[gpu]\ncount = 1\nmemory = "64MiB"\n[limits]\nbody = "32MiB"\nresponse = "32MiB"\n'
    with running_node(config) as node:
        node.deployed("f", ECHO)
        node.deployed("s", STREAM)
        yield node, str(node.admin.create_key(Wish(scopes=("invoke",)))["key"])


PARTS = "data: one\n\ndata: two\n\n"


def without_comments(events: str) -> str:
    """Which a client hears while a slow machine has nothing to say."""
    return re.sub(r"(?m)^:.*\n\n", "", events)


def understood(status: int, text: str) -> tuple[int, Any]:
    """The value, or the error's code."""
    if not text or text.startswith(("data:", ":")):
        return status, text
    value = json.loads(text)
    return status, value["error"]["code"] if "error" in value else value


CLIENTS: dict[str, tuple[str, list[str]]] = {  # a program, and how it is started: its address and key come behind that
    "requests": ("build/stock/http/bin/python", ["tests/clients/stock_http.py", "requests"]),
    "httpx": ("build/stock/http/bin/python", ["tests/clients/stock_http.py", "httpx"]),
    "aiohttp": ("build/stock/http/bin/python", ["tests/clients/stock_http.py", "aiohttp"]),
    "fetch": ("node", ["tests/clients/stock.mjs"]),
    "net/http": ("go", ["run", "tests/clients/stock.go"]),
    "HttpClient": ("javac", ["tests/clients/Stock.java"]),
}
NEEDS = {"node": "Node", "go": "Go: Debian's golang-go", "javac": "Java: Debian's default-jdk-headless"}


@pytest.mark.parametrize("client", CLIENTS)
def test_clients_of_http_with_their_defaults(keyed: tuple[TestNode, str], client: str, tmp_path: Path) -> None:
    node, key = keyed
    program, rest = CLIENTS[client]
    if shutil.which(ROOT / program if "/" in program else program) is None:
        pytest.skip(f"needs {NEEDS.get(program, 'http: scripts/stock-clients http')}")
    environment = os.environ | {"HOME": str(tmp_path), "PYTHONWARNINGS": "default"}
    command = [program.replace("javac", "java"), *rest, f"127.0.0.1:{node.port}", key, str(node.shared / tmp_path.name)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}\n{node.logs()}"
    found = {case: understood(*said) for line in ended.stdout.splitlines() for case, said in json.loads(line).items()}
    again = [case for case in found if case.startswith("after ")]
    assert {case: found.pop(case) for case in again} == dict.fromkeys(again, ANSWERS["json"])
    assert len(again) == 12
    parts = [found.pop(part)[1] for part in ("first part", "rest")]
    assert without_comments("".join(parts)) == PARTS
    assert all(parts)
    assert found == ANSWERS


@CURL
@pytest.mark.parametrize("how", ["", "--http2", "--http1.0", "--compressed", "-H Expect:"])
def test_curl_as_it_is_called(keyed: tuple[TestNode, str], how: str, tmp_path: Path) -> None:
    node, key = keyed
    (tmp_path / "large").write_bytes(LARGE)
    (tmp_path / "larger").write_bytes(LARGE * 2)
    (tmp_path / "packed").write_bytes(gzip.compress(json.dumps({"a": [1, "é"]}).encode()))

    def command(path: str, *options: str, key: str = key) -> list[str]:
        words = ["curl", "-sS", "-H", f"Authorization: Bearer {key}", *how.split(maxsplit=1), *options]
        return [*words, f"http://127.0.0.1:{node.port}{path}"]

    def said(path: str, *options: str, key: str = key) -> tuple[int, Any]:
        words = command(path, "-w", "\n%{http_code}", *options, key=key)
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert ended.returncode == 0, ended.stderr
        text, _, status = ended.stdout.rpartition("\n")
        return understood(int(status), text)

    invoke, octets = "/functions/f/invoke", ("-H", "Content-Type: application/octet-stream")
    value = ("-H", "Content-Type: application/json", "-d", '{"a": [1, "é"]}')
    large = (*octets, "--data-binary", "@large")
    asked: dict[str, tuple[int, Any]] = {
        "json": said(invoke, *value),
        "upload": said(invoke, *large),
        "form": said(invoke, "-F", "file=@large"),
        "413": said(invoke, *octets, "--data-binary", "@larger"),
        "404": said("/functions/none/invoke", *large),
        "401": said(invoke, *large, key="dm_0_0"),
        "415": said(invoke, *large, "-H", "Content-Encoding: br"),
        "gzip": said(invoke, *value[:2], "-H", "Content-Encoding: gzip", "--data-binary", "@packed"),
        "head": said("/healthz", "-o", "/dev/null", "-I"),
        "slash": said(f"{invoke}/", *value),
        "empty": said(invoke, *value[:3], '"nothing"'),
    }
    if how != "--http1.0":  # which has no way to say it
        asked["chunked"] = said(invoke, *octets, "-X", "POST", "-T", "large", "-H", "Transfer-Encoding: chunked")
    assert asked == {case: ANSWERS[case] for case in asked}
    file = node.shared / tmp_path.name
    words = command("/functions/s/invoke", "-N", *value[:3], json.dumps(str(file)))
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as streaming:
        assert streaming.stdout is not None
        first = streaming.stdout.readline()
        file.touch()
        assert without_comments(first + streaming.stdout.read()) == PARTS
    assert streaming.returncode == 0
