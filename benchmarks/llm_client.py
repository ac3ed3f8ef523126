"""A node with a language model on one emulated GPU, and a client of its OpenAI interface, for benchmarks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import openai

from benchmarks.llm_alone import random_prompt
from dormouse.core.folder import FunctionFolder
from dormouse.core.node.testing import TestNode, running_node

PROMPT: Final = 128
GRANULES: Final = 64 << 20
"""Room on a GPU beside the models: KV, activations and what granules leave."""


def prompt(seed: int) -> list[int]:
    return random_prompt(seed, PROMPT)


class Client:
    """Of a node's OpenAI interface; no two prompts are equal."""

    def __init__(self, node: TestNode) -> None:
        self.openai = openai.OpenAI(base_url=f"http://127.0.0.1:{node.port}/v1", api_key="none", max_retries=0)
        self._seeds = iter(range(10_000, 10_000_000))

    def first_ms(self, name: str = "chat") -> float:
        began_s = time.perf_counter()
        stream = self._stream(name, 2)
        next(iter(stream))
        first_ms = (time.perf_counter() - began_s) * 1e3
        for _ in stream:
            pass
        return first_ms

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
