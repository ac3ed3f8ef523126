"""A language model on a node with one emulated GPU: what comes out, how fast, and what the way to the client costs.

    python -m benchmarks.llm [--folder build/smollm2] [--prompts N --data GSM8K.jsonl.gz] [--dtype float32]

* *Outputs*, and nothing else: the engine's greedy answers to so many prompts, judged by `transformers`.
* *Throughput*: output tokens per second with 1 and 16 clients, and of the engine alone in this process.
* *First token*: with the model on the GPU, asleep, and of a prefill in this process.
"""

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import openai
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dormouse.client_shim.llm.folder import read_json, spec_of
from dormouse.core.folder import FunctionFolder
from dormouse.core.node.testing import TestNode, kept_running
from dormouse.gpuserver.runtime import models
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.batch import Sequence as Tokens
from dormouse.gpuserver.runtime.engine import Engine, Generation, kv_layout
from dormouse.gpuserver.runtime.sampling import Sampling
from examples import smollm2

NEW: Final = 48
PROMPT: Final = 66
"""Tokens of output and prompt where throughput is measured, as in what others report of this model."""

ROUNDS: Final = 5
IDLE_S: Final = 3.0  # after which a seat is left


class Alone:
    """The engine in this process."""

    def __init__(self, folder: Path, dtype: str, fused: bool = True) -> None:
        self.spec = spec_of(read_json(str(folder), "config.json"), dtype, 2048)
        layout = kv_layout(self.spec)
        memory = torch.zeros(400 * layout.block_nbytes // layout.dtype.itemsize, dtype=layout.dtype)
        self.attention = BlockAttention(layout, memory)
        self.model = models.build(self.spec, self.attention, fused)
        weights = load_file(folder / "model.safetensors")
        models.bind(self.model, {name: tensor.to(models.DTYPES[dtype]) for name, tensor in weights.items()})

    def answers(self, prompts: list[list[int]], new: int) -> dict[int, list[int]]:
        """Tokens, by the prompt's number."""
        engine = Engine(self.model, self.attention, lambda blocks: False)
        engine.add_extent(0, 0, self.attention.memory.nbytes)
        found: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
        for number, prompt in enumerate(prompts):
            sequence = Tokens(number, list(prompt), len(prompt), len(prompt) + new)
            engine.add(number, Generation(sequence, Sampling(), frozenset()))
        while not engine.batch.idle:
            for made in engine.step() or ():
                found[made.number].append(made.chosen.token)
        return found

    def generate(self, prompts: list[list[int]], new: int) -> int:
        """How many tokens were made."""
        return sum(len(each) for each in self.answers(prompts, new).values())

    def tokens_s(self, clients: int) -> float:
        began_s = time.perf_counter()
        made = self.generate([random_prompt(number) for number in range(clients)], NEW)
        return made / (time.perf_counter() - began_s)

    def prefill_ms(self) -> float:
        engine = Engine(self.model, self.attention, lambda blocks: False)
        engine.add_extent(0, 0, self.attention.memory.nbytes)
        sequence = Tokens(0, random_prompt(1000), PROMPT, PROMPT + 1)
        engine.add(0, Generation(sequence, Sampling(), frozenset()))
        began_s = time.perf_counter()
        engine.step()
        return (time.perf_counter() - began_s) * 1000


def random_prompt(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(100, 40_000, (PROMPT,), generator=generator).tolist()
    return tokens


class Served:
    """The same behind a node's OpenAI interface."""

    def __init__(self, node: TestNode) -> None:
        self.node = node
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{node.port}/v1", api_key="none", max_retries=0)
        self._seeds = iter(range(10_000, 1_000_000))

    def first_ms(self) -> float:
        """Time to the first token of a new prompt."""
        began_s = time.perf_counter()
        stream = self.client.completions.create(
            model="chat", prompt=random_prompt(next(self._seeds)), max_tokens=2, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        first_ms = (time.perf_counter() - began_s) * 1000
        stream.close()
        return first_ms

    def tokens_s(self, clients: int) -> float:
        made: list[int] = []

        def talk(seed: int) -> None:
            answer = self.client.completions.create(
                model="chat", prompt=random_prompt(seed), max_tokens=NEW, temperature=0, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None
            made.append(answer.usage.completion_tokens)

        began_s = time.perf_counter()
        at_once(talk, [next(self._seeds) for _ in range(clients)], clients)
        return sum(made) / (time.perf_counter() - began_s)


def at_once(work: Callable[[Any], None], items: Sequence[Any], threads: int) -> None:
    todo = list(reversed(items))

    def go_on() -> None:
        while todo:
            work(todo.pop())

    running = [threading.Thread(target=go_on) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


@torch.inference_mode()
def outputs(alone: Alone, folder: Path, questions: Sequence[str]) -> dict[str, Any]:
    """The engine's tokens, sixteen sequences at a time, judged by one forward of the reference over each: every token
    is its choice, or is listed with what it lacks.
    """
    words: Any = AutoTokenizer.from_pretrained(folder)
    loaded: Any = AutoModelForCausalLM
    reference = loaded.from_pretrained(folder, dtype=torch.float32)
    tokens, lacking = 0, []
    for start in range(0, len(questions), 16):
        asked = [[{"role": "user", "content": each}] for each in questions[start : start + 16]]
        prompts = [words.apply_chat_template(each, add_generation_prompt=True, return_dict=True) for each in asked]
        given = [list(each["input_ids"]) for each in prompts]
        for number, answer in alone.answers(given, NEW).items():
            logits = reference(torch.tensor([given[number] + answer])).logits[0, len(given[number]) - 1 : -1]
            gaps = logits.max(-1).values - logits[torch.arange(len(answer)), torch.tensor(answer)]
            tokens += len(answer)
            lacking += [[start + number, at, float(gaps[at])] for at in gaps.nonzero()[:, 0].tolist()]
        print(f"{start + len(given)} prompts, {tokens} tokens, others: {lacking}", file=sys.stderr, flush=True)
    return {"prompts": len(questions), "tokens": tokens, "others: prompt, index, logits below the largest": lacking}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--prompts", type=int, default=0)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    folder = smollm2.build(options.folder)
    torch.set_num_threads(2)
    config = '[gpu]\ncount = 1\nmemory = "1GiB"\nthreads = 2\npool = "pages"\n'
    found: dict[str, Any] = {"dtype": options.dtype}
    alone = Alone(folder, options.dtype)
    if options.prompts:
        with gzip.open(options.data, "rt") as file:
            questions = [str(json.loads(line)["question"]) for line in file][: options.prompts]
        print(json.dumps(outputs(alone, folder, questions), indent=1))
        return
    with tempfile.TemporaryDirectory(prefix="dm") as place:
        Path(place).chmod(0o755)
        with kept_running(TestNode(Path(place), config)) as node:
            settings = {"llm": True, "dtype": options.dtype}
            node.admin.deploy("chat", FunctionFolder(folder.absolute(), "config.json", False), settings)
            served = Served(node)
            asleep = [served.first_ms()]
            for clients in (1, 16):
                pairs = [(served.tokens_s(clients), alone.tokens_s(clients)) for _ in range(ROUNDS)]
                here, there = (statistics.median(side) for side in zip(*pairs, strict=True))
                found[f"tokens/s, {clients} clients"] = round(here, 1)
                found[f"of the engine alone, {clients}"] = round(there, 1)
                found[f"ratio, {clients}"] = round(statistics.median(one / other for one, other in pairs), 3)
            served.first_ms()
            pairs = [(served.first_ms(), alone.prefill_ms()) for _ in range(4 * ROUNDS)]
            found["first token, on the GPU, ms"] = round(statistics.median(one for one, _ in pairs), 1)
            found["prefill alone, ms"] = round(statistics.median(other for _, other in pairs), 1)
            for _ in range(ROUNDS):
                time.sleep(IDLE_S)  # until the seat is left
                asleep.append(served.first_ms())
            found["first token, the very first, ms"] = round(asleep[0], 1)
            found["first token, seat left, ms"] = round(statistics.median(asleep[1:]), 1)
            told = node.status()["functions"]["chat"]
            found["as the node tells"] = {"llm": told["llm"], "runtimes": told["runtimes"]}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
