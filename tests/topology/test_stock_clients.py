"""tritonclient and kserve against a node, each in an environment of its own: `scripts/stock-clients` makes them."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inference_wire import ANYTHING, SIGNED

from dormouse.core.node.testing import TestNode, running_node

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
