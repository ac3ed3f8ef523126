"""A language model beside ordinary functions: ``make demo-llm``.

    python -m examples.demo_llm [--out build/demo-llm.json] [--folder build/smollm2]

Builds the folder of SmolLM2-135M-Instruct, starts a node with two emulated GPUs that together hold less than all
models, deploys the model and ordinary functions, and lets eight people chat through the official `openai` client while
the functions are asked, too. One answer is shown as it is made. Then eight LoRA adapters come in the functions' place,
and all nine are chatted with at once. Every answer is compared: chats with `transformers` and PEFT (word for word),
functions with native PyTorch. Exits 1 if one was wrong or missing, or if an adapter did not show.
"""

import argparse
import functools
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

import openai
import torch

from benchmarks.nodes.testnode import TestNode, kept_running
from dormouse.core.folder import FunctionFolder
from examples import demo_adapters, smollm2
from examples.chats import Chat, Reference, talk, talk_at_once
from examples.styles import ADAPTERS, STYLES

GPU_NBYTES: Final = 640 << 20
FUNCTIONS: Final = 16
WIDTH: Final = 2048
LAYERS: Final = 4
"""64 MiB a function: sixteen of them and the language model in fp32 are 1.6 GB."""

CHATS: Final = 8
QUESTIONS: Final = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about winter sleep.",
    "What is 17 plus 25?",
    "Name three animals that hibernate.",
    "Explain what a GPU is in one sentence.",
    "Give me a word that rhymes with mouse.",
    "Who wrote Hamlet?",
)
FUNCTION: Final = f"""
import torch

def load():
    made = torch.Generator().manual_seed(SEED)
    return [(torch.randn({WIDTH}, {WIDTH}, generator=made) / {WIDTH}**0.5).to("cuda") for _ in range({LAYERS})]

def handle(layers, x):
    x = torch.full(({WIDTH},), x, device="cuda")
    for layer in layers:
        x = torch.tanh(layer @ x)
    return x.sum().item()
"""


@functools.lru_cache(maxsize=1)
def layers(number: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(number)
    return [torch.randn(WIDTH, WIDTH, generator=made) / WIDTH**0.5 for _ in range(LAYERS)]


def wrong_answers(answers: list[tuple[int, float, Any]]) -> list[str]:
    """Answers of functions that differ from native PyTorch's."""
    wrong = []
    for number, x, answer in sorted(answers, key=lambda each: each[0]):
        value = torch.full((WIDTH,), x)
        for layer in layers(number):
            value = torch.tanh(layer @ value)
        expected = float(value.sum())
        if not isinstance(answer, float) or abs(answer - expected) > 1e-2 + 1e-3 * abs(answer):
            wrong.append(f"f{number:02}({x}): {answer}, expected {expected}")
    return wrong


def ask_functions(node: TestNode, stop: threading.Event, answers: list[tuple[int, float, Any]]) -> None:
    """One after the other, in turn, until told to stop."""
    number = 0
    while not stop.is_set():
        x = 0.25 + 0.01 * len(answers)
        answers.append((number, x, node.invoke(f"f{number:02}", x).body))
        number = (number + 5) % FUNCTIONS


def run(node: TestNode, client: openai.OpenAI, folder: Path) -> tuple[list[Chat], list[tuple[int, float, Any]]]:
    for number in range(FUNCTIONS):
        node.deployed(f"f{number:02}", FUNCTION.replace("SEED", str(number)))
    settings = {"llm": True, "dtype": "float32", "ttft": "500ms"}
    node.admin.deploy("chat", FunctionFolder(folder.absolute(), "config.json", False), settings)
    print(f"{FUNCTIONS} functions and a language model on two GPUs of {GPU_NBYTES >> 20} MiB; it speaks:\n")
    first = Chat("Tell me about the dormouse.")
    talk(client, first, aloud=True)
    print("\n")
    chats = [Chat(question) for question in QUESTIONS[:CHATS]]
    answers: list[tuple[int, float, Any]] = []
    stop = threading.Event()
    asking = threading.Thread(target=ask_functions, args=(node, stop, answers))
    asking.start()
    talk_at_once(client, chats)
    stop.set()
    asking.join()
    for number in range(FUNCTIONS):
        node.remove(f"f{number:02}")
    return [first, *chats], answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/demo-llm.json"))
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"))
    options = parser.parse_args()
    folder = smollm2.build(options.folder)
    gpus = f'count = 2\nmemory = "{GPU_NBYTES}"\nthreads = 1\npool = "pages"\nseat_idle_ms = {demo_adapters.IDLE_MS}'
    with tempfile.TemporaryDirectory(prefix="dm") as place:
        Path(place).chmod(0o755)  # instances have uids of their own
        with (
            kept_running(TestNode(Path(place), f"[gpu]\n{gpus}\n")) as node,
            openai.OpenAI(base_url=f"http://127.0.0.1:{node.port}/v1", api_key="none", max_retries=0) as client,
        ):
            chats, answers = run(node, client, folder)
            adapted, saved = demo_adapters.run(node, client)
    print("comparing with transformers, PEFT and native PyTorch ...")
    reference = Reference(folder, demo_adapters.BASE, {name: ADAPTERS / name for name in STYLES})
    wrong = reference.wrong([*chats, *adapted]) + wrong_answers(answers)
    print(f"\n{'question':42} {'tokens':>6} {'first token':>12} {'whole':>8}")
    for chat in chats:
        print(f"{chat.question:42} {chat.tokens:6} {chat.first_s * 1000:9.0f} ms {chat.whole_s:6.1f} s")
    print(f"{len(answers)} answers of functions meanwhile\n")
    wrong += demo_adapters.show(adapted, saved)
    asked = len(answers) + len(chats) + len(adapted)
    print(f"\n{len(wrong)} of all {asked} answers are wrong")
    for each in wrong:
        print(f"  {each}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found = {"chats": [vars(chat) for chat in [*chats, *adapted]], "saved": saved._asdict(), "wrong": wrong}
    options.out.write_text(json.dumps(found, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
