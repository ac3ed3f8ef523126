"""A real node with language models, for tests: deployed from tiny folders, asked through the `openai` client."""

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
import torch
from language_models import make_folder, tokenizer
from transformers import PreTrainedModel

from benchmarks.nodes.testnode import TestNode
from dormouse.core import procfs
from dormouse.core.folder import FunctionFolder

torch.set_num_threads(1)
"""Of the references: the models are tiny, and a second thread waits for the first, and for the node, most of the time.
"""

# [sandbox] as users have it: imports that all instances need are done once.
CONFIG: Final = '[sandbox]\n[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\npool = "pages"\nseat_idle_ms = 2000\n'
ORDINARY: Final = """
import torch
def load():
    return torch.arange(1000.0).to("cuda")
def handle(weights, request):
    return (weights * request).sum().item()
"""
MESSAGES: Final[Any] = [{"role": "user", "content": "one two three"}]


def connected(node: TestNode) -> openai.OpenAI:
    """To be closed."""
    return openai.OpenAI(base_url=f"http://127.0.0.1:{node.port}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(node: TestNode) -> Iterator[openai.OpenAI]:
    with connected(node) as found:
        yield found


def deploy(node: TestNode, name: str, folder: Path, **settings: Any) -> None:
    node.admin.deploy(name, FunctionFolder(folder, "config.json", False), {"llm": True, "dtype": "float32", **settings})


@pytest.fixture(scope="module")
def model(node: TestNode, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """Of the function "chat", which is deployed."""
    folder = tmp_path_factory.mktemp("llama")
    found = make_folder(folder)
    deploy(node, "chat", folder)
    return found


def prompt_tokens(messages: Any = MESSAGES) -> list[int]:
    words: Any = tokenizer()
    tokens: list[int] = words.encode(words.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
    return tokens


@torch.inference_mode()
def generated(model: PreTrainedModel, prompt: list[int], new: int, end: int | None = None) -> str:
    """What `transformers` makes of it, always the most probable token; until ``end``, if it is one."""
    tokens = list(prompt)
    said: Any = None  # of the last forward; it has the keys and values of all before
    while len(tokens) < len(prompt) + new and tokens[-1] != end:
        fed, before = (tokens, None) if said is None else (tokens[-1:], said.past_key_values)
        said = model(torch.tensor([fed]), past_key_values=before, use_cache=True)
        tokens.append(int(said.logits[0, -1].argmax()))
    words: Any = tokenizer()
    text: str = words.decode(tokens[len(prompt) :], skip_special_tokens=True)
    return text


GREEDY: Final[dict[str, Any]] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def ask(client: openai.OpenAI, text: str = "one two three", new: int = 40, name: str = "chat", **more: Any) -> str:
    messages: Any = [{"role": "user", "content": text}]
    answer = client.chat.completions.create(model=name, messages=messages, max_tokens=new, **GREEDY, **more)
    return answer.choices[0].message.content or ""


def talk(client: openai.OpenAI, asked: Iterable[tuple[str, str]], new: int) -> dict[tuple[str, str], str]:
    """The answers to these, asked at the same time, by name and text."""
    answers: dict[tuple[str, str], str] = {}

    def say(name: str, text: str) -> None:
        answers[name, text] = ask(client, text, new, name)

    threads = [threading.Thread(target=say, args=each) for each in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def same_texts(names: Iterable[str], texts: int = 2) -> list[tuple[str, str]]:
    """So many for each, and the same ones: answers differ by the models alone."""
    return [(name, f"say {number}") for name in names for number in range(texts)]


def runtimes(node: TestNode) -> list[int]:
    """Their processes: children of the process that forks them."""
    zygotes = [pid for pid in node.descendants() if "dormouse.gpuserver.runtime.zygote" in procfs.words(pid)]
    return [pid for pid in zygotes if any(pid in procfs.children(other) for other in zygotes)]


def granules(pid: int, rights: str = "") -> set[str]:
    """What a process has mapped of a pool's memory; with these rights, as /proc has them."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {words[4] for words in lines if "/memfd:" in words[-2] + words[-1] and rights in words[1]}


def sandboxed(node: TestNode) -> set[int]:
    """All processes of instances."""
    found: set[int] = set()
    todo = procfs.children(node.pids()["zygote"])
    while todo:
        found.update(todo)
        todo = [child for pid in todo for child in procfs.children(pid)]
    return found


def only_runtime(node: TestNode) -> int:
    """Once those of models that were removed are gone."""
    node.wait(lambda: len(runtimes(node)) == 1, 60, "one runtime to be left")
    return runtimes(node)[0]


def streaming(client: openai.OpenAI, text: str, new: int, name: str = "chat") -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=name, messages=messages, max_tokens=new, stream=True, **GREEDY)


def rest(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def expected(model: PreTrainedModel, text: str, new: int) -> str:
    """What `ask` or `streaming` of this text must give."""
    return generated(model, prompt_tokens([{"role": "user", "content": text}]), new)
