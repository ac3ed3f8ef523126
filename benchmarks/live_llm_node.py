"""The real half of benchmarks/live_llm.py: a node with language models and functions, and open-loop clients."""

import http.client
import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.live_node import shape
from benchmarks.models import function
from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.controller.simulator.streams.model import Lengths
from dormouse.core import modelfolder
from dormouse.core.folder import FunctionFolder

FUNCTIONS: Final = 4
REQUESTS: Final = 8
LINK_BPS: Final = 0.7e9
ALONE: Final = (16, 200, 60) * 4
"""Prompts of the streams that are alone: their first tokens say what a prompt costs, and what is outside of steps. Of
each base so many, or one of each length for each model.
"""

PROMPT: Final = Lengths(mean=60.0, variation=0.6, most=200)
OUTPUT: Final = Lengths(mean=40.0, variation=0.5, most=120)
TTFT_S, TPOT_S = 1.0, 0.2


@dataclass(frozen=True, kw_only=True)
class Model:
    """A language model that is deployed, or an ``adapter`` over the one that is called ``base``."""

    name: str
    base: str
    adapter: Path | None = None
    dtype: str = "bfloat16"
    ttft_s: float = TTFT_S
    tpot_s: float = TPOT_S


@dataclass(frozen=True, kw_only=True)
class World:
    """What a node has. Models of one base are the same ``folder``; ``schedule`` is of the node file."""

    folder: Path
    models: tuple[Model, ...]
    isolation: str = "tenant"
    functions: int = 0
    gpus: int = 1
    gpu_mib: int = 900
    threads: int = 2
    seat_idle_s: float = 600.0
    schedule: Mapping[str, str | bool] = field(default_factory=dict)

    @property
    def runtimes(self) -> dict[str, str]:
        """What each model's runtime is called here."""
        return {each.name: each.base if self.isolation == "tenant" else each.name for each in self.models}

    @property
    def bases(self) -> dict[str, str]:
        return {each.name: each.base for each in self.models}


@dataclass
class Heard:
    """A stream as its client saw it; times of the monotonic clock."""

    name: str
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
    """At ``at_s``: a stream, or a request to an ordinary function if there is no ``prompt``."""

    at_s: float
    name: str
    prompt: int = 0
    output: int = 0


def load(world: World, seed: int, seconds: float, streams: float, functions: float, apart: bool = False) -> list[Asked]:
    """Two Poisson processes, in the order of time; ``apart``: functions after all streams."""
    rng = np.random.default_rng(seed)
    count = int(rng.poisson(streams * seconds))
    lengths = zip(PROMPT.draw(rng, count).tolist(), OUTPUT.draw(rng, count).tolist(), strict=True)
    names = [world.models[number].name for number in rng.integers(0, len(world.models), count).tolist()]
    times = rng.uniform(0, seconds, count).tolist()
    found = [Asked(at_s, name, *pair) for at_s, name, pair in zip(times, names, lengths, strict=True)]
    count = int(rng.poisson(functions * seconds)) if world.functions else 0
    chosen = rng.integers(0, max(1, world.functions), count).tolist()
    times_s = (rng.uniform(0, seconds, count) + seconds * apart).tolist()
    found += [Asked(at_s, f"f{who}") for at_s, who in zip(times_s, chosen, strict=True)]
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
            if each.prompt:
                heard = Heard(each.name, due_s, each.prompt, each.output)
                streams.append(heard)
                threads.append(threading.Thread(target=self._stream, args=(heard, next(self._seeds))))
            else:
                args = int(each.name[1:]), number % REQUESTS, due_s, latencies
                threads.append(threading.Thread(target=self._request, args=args))
            threads[-1].start()
        for thread in threads:
            thread.join()
        return streams, latencies

    def _stream(self, heard: Heard, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(100, 40_000, (heard.prompt,), generator=generator).tolist()
        body = {
            "model": heard.name, "prompt": prompt, "max_tokens": heard.output, "temperature": 0, "stream": True,
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
            self.wrong.append(f"a stream of {heard.name}, {heard.prompt} and {heard.output} tokens, has no end")
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
    """``alone``: streams one at a time, on seats that are kept."""

    alone: list[Heard]
    streams: list[Heard]
    latencies: list[float]
    wrong: list[str]


def measure(world: World, record: Path, asked: Sequence[Asked], expected: list[list[list[float]]]) -> Measured:
    with running_node(node_file(world, record)) as node:
        for model in world.models:
            _deploy(node, world, model)
        clients = Clients(node, expected)
        for model in world.models:
            clients.ask([Asked(0.0, model.name, 60, 8)] * 2)
        # Before there are functions: beside them prompts are cut, and the simulator would add what that costs again.
        alone = [clients.ask([each])[0][0] for each in lone(world)]
        for number in range(world.functions):
            node.deployed(f"f{number}", function(shape(number), number, True), deadline="2s")
        for number in range(world.functions):
            clients.ask([Asked(0.0, f"f{number}")] * 2)
        streams, latencies = clients.ask(asked)
        if world.functions:  # whose leases tell what they took
            node.wait(lambda: all(g["busy_with"] is None for g in node.status()["gpus"].values()), 20, "the last lease")
    return Measured(alone, streams, latencies, clients.wrong)


def lone(world: World) -> list[Asked]:
    """Models in turn, and each length for each of them."""
    names = [each.name for each in world.models]
    if len(names) == 1:
        return [Asked(0.0, names[0], prompt, 12) for prompt in ALONE]
    return [Asked(0.0, name, prompt, 12) for prompt in dict.fromkeys(ALONE) for name in names]


def node_file(world: World, record: Path) -> str:
    schedule = "\n".join(f"{key} = {json.dumps(value)}" for key, value in world.schedule.items())
    return f"""
[sandbox]
[gpu]
count = {world.gpus}
memory = "{world.gpu_mib}MiB"
link = "{LINK_BPS / 1e6:.0f}MB"
threads = {world.threads}
pool = "pages"
seat_idle_ms = {world.seat_idle_s * 1000:.0f}
[limits]
disk = "0"
[schedule]
{schedule}
[record]
path = "{record}"
"""


def _deploy(node: TestNode, world: World, model: Model) -> None:
    settings = {
        "ttft": f"{model.ttft_s * 1e3:.0f}ms", "tpot": f"{model.tpot_s * 1e3:.0f}ms", "isolation": world.isolation,
    }  # fmt: skip
    if model.adapter is not None:
        node.admin.deploy(model.name, modelfolder.find_adapter(str(model.adapter)), {"base": model.base, **settings})
        return
    folder = FunctionFolder(world.folder.absolute(), "config.json", False)
    node.admin.deploy(model.name, folder, {"llm": True, "dtype": model.dtype, **settings})
