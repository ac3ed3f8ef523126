"""A language model on a node with one emulated GPU: what comes out, how fast, and what the way to the client costs.

    python -m benchmarks.llm [--folder build/smollm2] [--dtype float32]
    python -m benchmarks.llm --prompts 200 --data gsm8k_prompts_500.jsonl.gz

* *Outputs*, and nothing else: greedy answers to so many prompts, sixteen at once, judged by `transformers`.
* *Throughput*: output tokens per second with 1 and 16 clients, and of the engine alone in this process.
* *First token*: with the model on the GPU, asleep, and of a prefill in this process.
"""

import argparse
import gzip
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import openai

from dormouse.core import openmp

if __name__ == "__main__":
    os.environ |= openmp.WAITING  # as runtimes have it: threads that wait leave the cores to the others

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.llm_alone import NEW, Alone, random_prompt
from benchmarks.llm_judge import GAP, Judged, judged
from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.report import Goal, arguments, report
from dormouse.core.folder import FunctionFolder
from examples import smollm2

ROUNDS: Final = 5
IDLE_S: Final = 3.0  # after which a seat is left
CLIENTS: Final = 16


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


def outputs(alone: Alone, folder: Path, questions: Sequence[str]) -> Judged:
    """The engine's tokens, and what one forward of the reference over each answer says of them."""
    words: Any = AutoTokenizer.from_pretrained(folder)
    loaded: Any = AutoModelForCausalLM
    reference = loaded.from_pretrained(folder, dtype=torch.float32)
    asked = [[{"role": "user", "content": each}] for each in questions]
    made = [words.apply_chat_template(each, add_generation_prompt=True, return_dict=True) for each in asked]
    prompts = [list(each["input_ids"]) for each in made]
    found = Judged()
    for start in range(0, len(prompts), CLIENTS):
        given = prompts[start : start + CLIENTS]
        part = judged(reference, given, alone.answers(given, NEW))
        found.answers, found.tokens = found.answers + part.answers, found.tokens + part.tokens
        found.others += [(start + number, at, lacks) for number, at, lacks in part.others]
        print(f"{found.answers} answers, {found.tokens} tokens, others: {found.others}", file=sys.stderr, flush=True)
    return found


def served(alone: Alone, folder: Path, dtype: str, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    config = '[gpu]\ncount = 1\nmemory = "1GiB"\nthreads = 2\npool = "pages"\nseat_idle_ms = 2000\n'
    with running_node(config) as node:
        settings = {"llm": True, "dtype": dtype}
        node.admin.deploy("chat", FunctionFolder(folder.absolute(), "config.json", False), settings)
        here = Served(node)
        asleep = [here.first_ms()]
        for clients in (1, CLIENTS):
            pairs = [(here.tokens_s(clients), alone.tokens_s(clients)) for _ in range(rounds)]
            mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
            found[f"tokens/s, {clients} clients"] = mine
            found[f"of the engine alone, {clients}"] = other
            found[f"ratio, {clients}"] = statistics.median(one / other for one, other in pairs)
        here.first_ms()
        firsts = [(here.first_ms(), alone.prefill_ms(random_prompt(1000))) for _ in range(4 * rounds)]
        found["first token, on the GPU, ms"] = statistics.median(one for one, _ in firsts)
        found["prefill alone, ms"] = statistics.median(other for _, other in firsts)
        for _ in range(rounds):
            time.sleep(IDLE_S)  # until the seat is left
            asleep.append(here.first_ms())
        found["first token, the very first, ms"] = asleep[0]
        found["first token, seat left, ms"] = statistics.median(asleep[1:])
        told = node.status()["functions"]["chat"]
        found["as the node tells"] = {"llm": told["llm"], "runtimes": told["runtimes"]}
    return found


def main(args: argparse.Namespace) -> None:
    folder = smollm2.build(args.folder)
    torch.set_num_threads(2)
    alone = Alone(folder, args.dtype)
    if args.prompts:
        if args.data is None:
            sys.exit("--prompts needs --data, a file with a question in each line: gsm8k_prompts_500.jsonl.gz")
        with gzip.open(args.data, "rt") as file:
            questions = [str(json.loads(line)["question"]) for line in file][: 16 if args.quick else args.prompts]
        judged_ = outputs(alone, folder, questions)
        name = f"tokens of {judged_.answers} answers ({judged_.tokens}) that lack {GAP:g} or more of the reference's"
        goals = [
            Goal(name=name, goal="0", measured=judged_.wrong(), met=not judged_.wrong()),
            Goal(name="tokens that lack less, listed", goal="", measured=len(judged_.others), met=True),
        ]
        report(goals, args, {"others: prompt, index, what its logit lacks": judged_.others})
        return
    found = served(alone, folder, args.dtype, 1 if args.quick else ROUNDS)
    goals = [
        Goal(name=name, goal="", measured=value, met=True) for name, value in found.items() if isinstance(value, float)
    ]
    report(goals, args, {"dtype": args.dtype, "results": found})


if __name__ == "__main__":
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.set_defaults(out=Path("build/llm/llm.json"))
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--prompts", type=int, default=0)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    main(parser.parse_args())
