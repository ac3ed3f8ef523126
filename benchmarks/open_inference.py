"""What the Open Inference Protocol costs: ``python -m benchmarks.open_inference``, after `scripts/stock-clients`.

tritonclient's default path (binary tensors, in and out) against the node's own for arrays (`application/x-npy`), with
the same HTTP client, alternately: one function, one tensor, as many bytes back. Then a load as perf_analyzer makes it:
so many requests at once for so many seconds. The client is a process of its own, in the environment of tritonclient.
"""

import argparse
import asyncio
import io
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

PYTHON = Path("build/stock/tritonclient/bin/python")

FUNCTION = """
def handle(state, request):
    return {"y": request["x"]} if isinstance(request, dict) else request
"""


def alternate(port: int, nbytes: int, times: int) -> dict[str, list[float]]:
    """Seconds of each call, by path."""
    import tritonclient.http as triton

    client = triton.InferenceServerClient(f"127.0.0.1:{port}", network_timeout=600.0)
    array = np.random.default_rng(1).random(nbytes // 4, np.float32)

    def inferred() -> np.ndarray[Any, Any]:
        tensor = triton.InferInput("x", list(array.shape), "FP32").set_data_from_numpy(array)
        found: np.ndarray[Any, Any] = client.infer("f", [tensor]).as_numpy("y")
        return found

    def native() -> np.ndarray[Any, Any]:
        file = io.BytesIO()
        np.save(file, array)
        kinds = {"Content-Type": "application/x-npy", "Accept": "application/x-npy"}
        answer = client._client_stub.post(request_uri="functions/f/invoke", body=file.getvalue(), headers=kinds)
        found: np.ndarray[Any, Any] = np.load(io.BytesIO(answer.read()))
        return found

    took_s: dict[str, list[float]] = {"native": [], "tritonclient": []}
    for number in range(times + 20):
        for name, call in (("native", native), ("tritonclient", inferred)):
            began_s = time.perf_counter()
            found = call()
            if number >= 20:
                took_s[name].append(time.perf_counter() - began_s)
            assert np.array_equal(found, array)
    return took_s


async def load(port: int, nbytes: int, at_once: int, seconds: float) -> list[float]:
    """Latencies of all that was answered in that time."""
    import tritonclient.http as triton
    import tritonclient.http.aio as aio

    latencies_s: list[float] = []
    async with aio.InferenceServerClient(f"127.0.0.1:{port}", conn_limit=at_once, conn_timeout=600.0) as client:
        array = np.zeros(nbytes // 4, np.float32)
        tensor = triton.InferInput("x", list(array.shape), "FP32").set_data_from_numpy(array)
        end_s = time.perf_counter() + seconds

        async def ask() -> None:
            while (began_s := time.perf_counter()) < end_s:
                await client.infer("f", [tensor])
                latencies_s.append(time.perf_counter() - began_s)

        await asyncio.gather(*(ask() for _ in range(at_once)))
    return latencies_s


def client(arguments: argparse.Namespace) -> None:
    took_s = alternate(arguments.client, arguments.kib << 10, arguments.times)
    print(json.dumps(took_s))
    for at_once in arguments.at_once:
        print(json.dumps(asyncio.run(load(arguments.client, arguments.kib << 10, at_once, arguments.seconds))))


def milliseconds(latencies_s: list[float], percent: int) -> float:
    return 1000 * sorted(latencies_s)[min(len(latencies_s) - 1, len(latencies_s) * percent // 100)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kib", type=int, default=1024)
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client is not None:
        client(arguments)
        return
    if not PYTHON.exists():
        sys.exit(f"{PYTHON} is not there: scripts/stock-clients tritonclient makes it")
    from benchmarks.nodes.testnode import running_node  # the client's Python does not have it

    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\n') as node:
        node.deployed("f", FUNCTION)
        command = [str(PYTHON), __file__, *sys.argv[1:], "--client", str(node.port)]
        lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    took_s = json.loads(lines[0])
    for name, each in took_s.items():
        spread = ", ".join(f"p{percent} {milliseconds(each, percent):.2f} ms" for percent in (10, 50, 90))
        print(f"{name:12} {arguments.kib} KiB in and out, {len(each)} calls: {spread}")
    both = took_s["tritonclient"], took_s["native"]
    over_ms = 1000 * (statistics.median(both[0]) - statistics.median(both[1]))
    paired_ms = 1000 * statistics.median(one - other for one, other in zip(*both, strict=True))
    print(f"tritonclient over native: p50 {over_ms:+.2f} ms, median of pairs {paired_ms:+.2f} ms")
    for at_once, line in zip(arguments.at_once, lines[1:], strict=True):
        latencies_s = json.loads(line)
        spread = ", ".join(f"p{percent} {milliseconds(latencies_s, percent):.2f} ms" for percent in (50, 90, 99))
        rate = len(latencies_s) / arguments.seconds
        print(f"{at_once} at once for {arguments.seconds:g} s: {rate:.0f} requests/s, {spread}")


if __name__ == "__main__":
    main()
