"""How fast large bodies reach a function: ``python -m benchmarks.body_rates``.

Each kind of body goes to a function that takes its size, alternately with the same bytes to the node's own HTTP server
whose application reads and discards them. Ratios are of the medians, and of the fastest, which others on the machine
disturb least. Sent is over loopback, one client at a time.
"""

import argparse
import http.client
import io
import json
import socket
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import uvicorn
import uvloop

from benchmarks.nodes.testnode import running_node
from dormouse.router.front.connection import Bounds, HttpConnection, Onward
from dormouse.router.front.cycle import Cycle
from dormouse.router.front.exchange import raw_error
from dormouse.router.front.places import ConnectionPlaces

FUNCTION = """
def load(): pass
def handle(state, request):
    if isinstance(request, dict):
        request = request["file"]
    data = getattr(request, "data", request)
    return {"nbytes": getattr(data, "nbytes", None) or len(data)}
"""
FORM = "multipart/form-data; boundary=0123456789abcdef"


async def discard(cycle: Cycle) -> None:
    nbytes = 0
    while pieces := await cycle.read():
        nbytes += sum(map(len, pieces))
    await cycle.answer(200, [(b"content-type", b"application/json")], b'{"nbytes": %d}' % nbytes)


def serve_discarding(fd: int) -> None:
    times = {"header_s": 10.0, "body_s": 10.0, "keep_alive_s": 30.0}
    bounds = Bounds(places=ConnectionPlaces(10), onward=Onward(), render=raw_error, **times)
    protocol: Any = partial(HttpConnection, bounds)
    application: Any = discard
    off: Any = {"ws": "none", "lifespan": "off", "proxy_headers": False, "access_log": False, "log_level": "error"}
    config = uvicorn.Config(application, http=protocol, loop="none", interface="asgi3", **off)
    uvloop.run(uvicorn.Server(config).serve(sockets=[socket.socket(fileno=fd)]))


def bodies(nbytes: int) -> dict[str, tuple[bytes, str]]:
    """By kind: the body and its content type."""
    data = np.random.default_rng(1).bytes(nbytes - 1000)
    head = b'--0123456789abcdef\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    file = io.BytesIO()
    np.save(file, np.frombuffer(data, np.uint8))
    return {
        "bytes": (data, "application/octet-stream"),
        "form": (head + data + b"\r\n--0123456789abcdef--\r\n", FORM),
        "array": (file.getvalue(), "application/x-npy"),
        "json": (json.dumps("x" * (nbytes - 1000)).encode(), "application/json"),
    }


def seconds(port: int, body: bytes, kind: str) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    began_s = time.perf_counter()
    connection.request("POST", "/functions/f/invoke", body, {"Content-Type": kind, "X-Request-Id": "1"})
    response = connection.getresponse()
    answer = response.read()
    took_s = time.perf_counter() - began_s
    connection.close()
    assert response.status == 200, answer
    assert json.loads(answer)["nbytes"] > len(body) - 2000, answer
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--discard", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.discard is not None:
        serve_discarding(arguments.discard)
        return
    nbytes = arguments.mib << 20
    listening = socket.create_server(("127.0.0.1", 0))
    fd, port = listening.fileno(), listening.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.body_rates", "--discard", str(fd)]
    other = subprocess.Popen(command, pass_fds=[fd])
    config = f'[gpu]\ncount = 1\nmemory = "64MiB"\n[limits]\nbody = "{arguments.mib}MiB"\n'
    try:
        with running_node(config) as node:
            node.deployed("f", FUNCTION)
            for name, (body, kind) in bodies(nbytes).items():
                both = [
                    (seconds(port, body, kind), seconds(node.port, body, kind)) for _ in range(arguments.times + 1)
                ][1:]
                discarded, served = (statistics.median(each) for each in zip(*both, strict=True))
                fastest, fastest_served = (min(each) for each in zip(*both, strict=True))
                print(
                    f"{name:6} {arguments.mib} MiB: discarded in {discarded * 1000:5.0f} ms, "
                    f"answered in {served * 1000:5.0f} ms: {discarded / served:.2f} of the rate, "
                    f"fastest {fastest / fastest_served:.2f}"
                )
    finally:
        other.terminate()
        other.wait()


if __name__ == "__main__":
    main()
