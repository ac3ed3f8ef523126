"""The Open Inference Protocol over plain HTTP, written here once more, against what a node makes of it."""

import http.client
import json
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

JSON_LENGTH = "Inference-Header-Content-Length"

ANYTHING = """
import numpy as np
import torch

def load():
    return torch.ones(4).to("cuda")

def handle(ones, request):
    if "fails" in request:
        raise ValueError("as was asked")
    return request
"""

SIGNED = """
import numpy as np
import torch

signature = {
    "inputs": {"x": ("FP32", [-1, 4])},
    "outputs": {"y": ("FP32", [-1, 4]), "sum": ("FP64", [1]), "names": ("BYTES", [2])},
}

def load():
    return torch.full((4,), 2.0).to("cuda")

def handle(twos, request):
    y = torch.from_numpy(request["x"]).to("cuda") * twos
    return {"y": y, "sum": float(y.sum()), "names": ["a", "b\\u00e9"]}
"""


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> str:
        assert self.headers["content-type"] == "application/json"
        said = self.json
        assert list(said) == ["error"], said
        return str(said["error"])


@dataclass
class Sender:
    """To one node, over one connection. No Content-Type is sent: stock clients send none."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def close(self) -> None:
        self._connection.close()

    def __call__(self, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
        said = self.headers | {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in said.items():
            self._connection.putheader(name, value)
        if method == "POST":
            self._connection.putheader("Content-Length", str(len(body)))
        self._connection.endheaders(body)
        response = self._connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def infer(self, name: str, request: dict[str, Any], binary: bytes | None = None, **headers: str) -> Reply:
        data = json.dumps(request).encode()
        if binary is not None:
            headers[JSON_LENGTH] = str(len(data))
        return self("POST", f"/v2/models/{name}/infer", data + (binary or b""), **headers)


def binary(name: str, array: np.ndarray, datatype: str) -> tuple[dict[str, Any], bytes]:
    data = array.tobytes()
    return described(name, list(array.shape), datatype, data), data


def described(name: str, shape: list[int], datatype: str, data: bytes) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(data)}}


def texts(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(each)) + each for each in elements)


def outputs(reply: Reply) -> dict[str, tuple[str, list[int], Any]]:
    """By name: datatype, shape, and the data: as JSON has it, or the bytes."""
    assert reply.status == 200, reply
    length = reply.headers.get(JSON_LENGTH.lower())
    start = len(reply.data) if length is None else int(length)
    found: dict[str, tuple[str, list[int], Any]] = {}
    for each in json.loads(reply.data[:start])["outputs"]:
        nbytes = each.get("parameters", {}).get("binary_data_size")
        data = each["data"] if nbytes is None else reply.data[start : start + nbytes]
        start += nbytes or 0
        found[each["name"]] = each["datatype"], each["shape"], data
    assert start == len(reply.data)
    return found
