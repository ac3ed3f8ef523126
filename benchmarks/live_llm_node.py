"""The real half of benchmarks/live_llm.py: a node with a language model and four functions, and open-loop clients."""

import http.client
import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.live_node import shape
from benchmarks.models import function
from dormouse.controller.simulator.streams.model import Lengths
from dormouse.core.folder import FunctionFolder
from dormouse.core.node.testing import TestNode, running_node

FUNCTIONS: Final = 4
REQUESTS: Final = 8
GPU_MIB: Final = 900
LINK_BPS: Final = 0.7e9
ALONE: Final = (16, 200, 60) * 4
"""Prompts of the streams that are alone: their first tokens say what a prompt costs, and what is outside of steps."""

PROMPT: Final = Lengths(mean=60.0, variation=0.6, most=200)
OUTPUT: Final = Lengths(mean=40.0, variation=0.5, most=120)
TTFT_S, TPOT_S = 1.0, 0.2


@dataclass
class Heard:
    """A stream as its client saw it; times of the monotonic clock."""

    arrived_s: float
    prompt: int
    output: int
    tokens_s: list[float] = field(default_factory=list)
    ended: bool = False

    @property
    def first_s(self) -> float:
        return self.tokens_s[0] - self.arrived_s if self.ended and self.tokens_s else float("inf")

    @property
    def tpot_s(self) -> float:
        """Of the whole stream: the last token's time is known, whether or not each had a text."""
        return (self.tokens_s[-1] - self.tokens_s[0]) / max(1, self.output - 1) if self.ended else float("inf")


@dataclass(frozen=True)
class Asked:
    """At ``at_s``: a stream if ``function`` is -1."""

    at_s: float
    function: int
    prompt: int = 0
    output: int = 0


def load(seed: int, seconds: float, streams: float, functions: float, apart: bool = False) -> list[Asked]:
    """Two Poisson processes, in the order of time; ``apart``: functions after all streams."""
    rng = np.random.default_rng(seed)
    count = int(rng.poisson(streams * seconds))
    lengths = zip(PROMPT.draw(rng, count).tolist(), OUTPUT.draw(rng, count).tolist(), strict=True)
    found = [
        Asked(at_s, -1, *pair) for at_s, pair in zip(rng.uniform(0, seconds, count).tolist(), lengths, strict=True)
    ]
    count = int(rng.poisson(functions * seconds))
    chosen = rng.integers(0, FUNCTIONS, count).tolist()
    times_s = (rng.uniform(0, seconds, count) + seconds * apart).tolist()
    found += [Asked(at_s, who) for at_s, who in zip(times_s, chosen, strict=True)]
    return sorted(found, key=lambda each: each.at_s)


class Clients:
    """A thread for each request."""

    def __init__(self, node: TestNode, expected: list[list[list[float]]]) -> None:
        self._node, self._expected = node, expected
        self._seeds = iter(range(1, 1 << 30))
        self.wrong: list[str] = []

    def ask(self, asked: Sequence[Asked]) -> tuple[list[Heard], list[float]]:
        """Streams, and the latencies of the functions' requests."""
        streams: list[Heard] = []
        latencies: list[float] = []
        threads = []
        began_s = time.monotonic() + 0.1
        for number, each in enumerate(asked):
            due_s = began_s + each.at_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            if each.function < 0:
                heard = Heard(due_s, each.prompt, each.output)
                streams.append(heard)
                threads.append(threading.Thread(target=self._stream, args=(heard, next(self._seeds))))
            else:
                args = each.function, number % REQUESTS, due_s, latencies
                threads.append(threading.Thread(target=self._request, args=args))
            threads[-1].start()
        for thread in threads:
            thread.join()
        return streams, latencies

    def _stream(self, heard: Heard, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(100, 40_000, (heard.prompt,), generator=generator).tolist()
        body = {
            "model": "chat", "prompt": prompt, "max_tokens": heard.output, "temperature": 0, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._node.port, timeout=120)
        with suppress(OSError, http.client.HTTPException):
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            while line := response.readline():
                if line.startswith(b"data: {"):
                    heard.tokens_s.append(time.monotonic())
                heard.ended = heard.ended or line.startswith(b"data: [DONE]")
        if not heard.ended:
            self.wrong.append(f"a stream of {heard.prompt} and {heard.output} tokens has no end")
        connection.close()

    def _request(self, who: int, number: int, due_s: float, latencies: list[float]) -> None:
        latency_s = float("inf")
        with suppress(OSError, http.client.HTTPException):
            answer = self._node.http("POST", f"/functions/f{who}/invoke", number)
            right = torch.allclose(torch.tensor(answer.body), torch.tensor(self._expected[who][number]), atol=1e-4)
            if answer.status == 200 and right:
                latency_s = time.monotonic() - due_s
        if latency_s == float("inf"):
            self.wrong.append(f"f{who}")
        latencies.append(latency_s)


@dataclass
class Measured:
    """``alone``: streams one at a time, on a seat that is kept."""

    alone: list[Heard]
    streams: list[Heard]
    latencies: list[float]
    wrong: list[str]


def measure(folder: Path, record: Path, asked: Sequence[Asked], expected: list[list[list[float]]]) -> Measured:
    config = f"""
        [gpu]
        count = 1
        memory = "{GPU_MIB}MiB"
        link = "{LINK_BPS / 1e6:.0f}MB"
        threads = 2
        pool = "pages"
        seat_idle_ms = 2000
        [limits]
        disk = "0"
        [record]
        path = "{record}"
    """
    with running_node(config) as node:
        for number in range(FUNCTIONS):
            node.deployed(f"f{number}", function(shape(number), number, True), deadline="2s")
        settings = {"llm": True, "dtype": "bfloat16", "ttft": f"{TTFT_S:g}s", "tpot": f"{TPOT_S * 1000:g}ms"}
        node.admin.deploy("chat", FunctionFolder(folder.absolute(), "config.json", False), settings)
        clients = Clients(node, expected)
        for number in range(FUNCTIONS):
            clients.ask([Asked(0.0, number)] * 2)
        clients.ask([Asked(0.0, -1, 60, 8)] * 2)
        alone = [clients.ask([Asked(0.0, -1, prompt, 12)])[0][0] for prompt in ALONE]
        streams, latencies = clients.ask(asked)
        node.wait(lambda: all(g["busy_with"] is None for g in node.status()["gpus"].values()), 20, "the last lease")
    return Measured(alone, streams, latencies, clients.wrong)
