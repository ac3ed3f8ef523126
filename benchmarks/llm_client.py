"""A node with a language model on one emulated GPU, and a client of its OpenAI interface, for benchmarks."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import openai

from benchmarks.llm_alone import random_prompt
from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core.folder import FunctionFolder

PROMPT: Final = 128
GRANULES: Final = 64 << 20
"""Room on a GPU beside the models: KV, activations and what granules leave."""


def prompt(seed: int) -> list[int]:
    return random_prompt(seed, PROMPT)


class Client:
    """Of a node's OpenAI interface; no two prompts are equal."""

    def __init__(self, node: TestNode) -> None:
        self.openai = openai.OpenAI(base_url=f"http://127.0.0.1:{node.port}/v1", api_key="none", max_retries=0)
        self._port = node.port
        self._seeds = iter(range(10_000, 10_000_000))

    def first_ms(self, name: str = "chat") -> float:
        began_s = time.perf_counter()
        stream = self._stream(name, 2)
        next(iter(stream))
        first_ms = (time.perf_counter() - began_s) * 1e3
        for _ in stream:
            pass
        return first_ms

    def added_ms(self, name: str = "chat") -> float:
        """What router and instance add to a first token, as a plain client sees it: all but what was spent on it, or on
        waiting for others, as the node tells.
        """
        asked = {"model": name, "prompt": prompt(next(self._seeds)), "max_tokens": 2, "temperature": 0, "stream": True}
        body, headers = json.dumps(asked), {"content-type": "application/json"}
        with closing(http.client.HTTPConnection("127.0.0.1", self._port)) as connection:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            began_s = time.perf_counter()
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            assert response.readline().startswith(b"data: {"), response.status
            first_ms = (time.perf_counter() - began_s) * 1e3
            response.read()
        said = str(response.getheader("server-timing")).split(", ")
        parts = dict(part.split(";dur=") for part in said if ";dur=" in part)
        return first_ms - sum(float(parts[name]) for name in ("queue", "runtime", "wake", "prefill"))

    def speak(self, new: int, name: str = "chat") -> None:
        """A whole stream."""
        for _ in self._stream(name, new):
            pass

    def _stream(self, name: str, new: int) -> Any:
        return self.openai.completions.create(
            model=name, prompt=prompt(next(self._seeds)), max_tokens=new, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip


@contextmanager
def serving(folder: Path, dtype: str, gpu: str) -> Iterator[tuple[TestNode, Client]]:
    with running_node(f'[gpu]\ncount = 1\nthreads = 2\npool = "pages"\nseat_idle_ms = 2000\n{gpu}\n') as node:
        deploy(node, "chat", folder, dtype)
        yield node, Client(node)


def deploy(node: TestNode, name: str, folder: Path, dtype: str) -> None:
    settings = {"llm": True, "dtype": dtype, "context": 2048}
    node.admin.deploy(name, FunctionFolder(folder.absolute(), "config.json", False), settings)
