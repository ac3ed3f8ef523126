"""A language model beside ordinary functions: ``make demo-llm``.

    python -m examples.demo_llm [--out build/demo-llm.json] [--folder build/smollm2]

Builds the folder of SmolLM2-135M-Instruct, starts a node with two emulated GPUs that together hold less than all
models, deploys the model and ordinary functions, and lets eight people chat through the official `openai` client while
the functions are asked, too. One answer is shown as it is made. Every answer is compared: chats with `transformers`
(word for word), functions with native PyTorch. Exits 1 if one was wrong or
missing.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import openai
import torch

from dormouse.core.folder import FunctionFolder
from dormouse.core.node.testing import TestNode, kept_running
from examples import smollm2

GPU_NBYTES: Final = 640 << 20
FUNCTIONS: Final = 16
WIDTH: Final = 2048
LAYERS: Final = 4
"""64 MiB a function: sixteen of them and the language model in fp32 are 1.6 GB."""

CHATS: Final = 8
TOKENS: Final = 48
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


@dataclass
class Chat:
    """One question and what came of it. Times in seconds."""

    question: str
    text: str = ""
    tokens: int = 0
    first_s: float = 0.0
    whole_s: float = 0.0
    error: str = ""


def native(number: int, x: float) -> float:
    """What a function's answer is in native PyTorch."""
    made = torch.Generator().manual_seed(number)
    layers = [torch.randn(WIDTH, WIDTH, generator=made) / WIDTH**0.5 for _ in range(LAYERS)]
    value = torch.full((WIDTH,), x)
    for layer in layers:
        value = torch.tanh(layer @ value)
    return float(value.sum())


def messages(question: str) -> Any:
    return [{"role": "user", "content": question}]


def talk(client: openai.OpenAI, chat: Chat, aloud: bool) -> None:
    began_s = time.monotonic()
    try:
        stream = client.chat.completions.create(
            model="chat",
            messages=messages(chat.question),
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for part in stream:
            if part.usage is not None:
                chat.tokens = part.usage.completion_tokens
            text = part.choices[0].delta.content if part.choices else None
            if text:
                chat.first_s = chat.first_s or time.monotonic() - began_s
                chat.text += text
                if aloud:
                    print(text, end="", flush=True)
    except openai.OpenAIError as error:
        chat.error = str(error)
    chat.whole_s = time.monotonic() - began_s


def ask_functions(node: TestNode, stop: threading.Event, answers: list[tuple[int, float, Any]]) -> None:
    """One after the other, in turn, until told to stop."""
    number = 0
    while not stop.is_set():
        x = 0.25 + 0.01 * len(answers)
        answers.append((number, x, node.invoke(f"f{number:02}", x).body))
        number = (number + 5) % FUNCTIONS


def wrong_chats(folder: Path, chats: list[Chat]) -> list[str]:
    """Those that are not what the reference says, always choosing the most probable token, word for word."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    models: Any = AutoModelForCausalLM
    quiet: Any = logging
    quiet.disable_progress_bar()
    model, words = models.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    wrong = []
    for chat in chats:
        start = words.apply_chat_template(messages(chat.question), tokenize=False, add_generation_prompt=True)
        prompt = words.encode(start, add_special_tokens=False)
        with torch.inference_mode():
            tokens = list(prompt)
            while len(tokens) < len(prompt) + chat.tokens:
                logits = model(torch.tensor([tokens])).logits[0, -1]
                tokens.append(int(logits.argmax()))
        expected = words.decode(tokens[len(prompt) :], skip_special_tokens=True)
        if chat.error or chat.text != expected:
            wrong.append(f"{chat.question} {chat.error or repr(chat.text)}, expected {expected!r}")
    return wrong


def run(node: TestNode, folder: Path) -> tuple[list[Chat], list[tuple[int, float, Any]]]:
    for number in range(FUNCTIONS):
        node.deployed(f"f{number:02}", FUNCTION.replace("SEED", str(number)))
    settings = {"llm": True, "dtype": "float32", "ttft": "500ms"}
    node.admin.deploy("chat", FunctionFolder(folder.absolute(), "config.json", False), settings)
    print(f"{FUNCTIONS} functions and a language model on two GPUs of {GPU_NBYTES >> 20} MiB; it speaks:\n")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{node.port}/v1", api_key="none", max_retries=0) as client:
        first = Chat("Tell me about the dormouse.")
        talk(client, first, aloud=True)
        print("\n")
        chats = [Chat(question) for question in QUESTIONS[:CHATS]]
        answers: list[tuple[int, float, Any]] = []
        stop = threading.Event()
        asking = threading.Thread(target=ask_functions, args=(node, stop, answers))
        talking = [threading.Thread(target=talk, args=(client, chat, False)) for chat in chats]
        for thread in (asking, *talking):
            thread.start()
        for thread in talking:
            thread.join()
        stop.set()
        asking.join()
    return [first, *chats], answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/demo-llm.json"))
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"))
    options = parser.parse_args()
    folder = smollm2.build(options.folder)
    config = f'[gpu]\ncount = 2\nmemory = "{GPU_NBYTES}"\nthreads = 1\npool = "pages"\n'
    with tempfile.TemporaryDirectory(prefix="dm") as place:
        Path(place).chmod(0o755)  # instances have uids of their own
        with kept_running(TestNode(Path(place), config)) as node:
            chats, answers = run(node, folder)
    print("comparing with transformers and native PyTorch ...")
    wrong = wrong_chats(folder, chats)
    for number, x, answer in answers:
        if not isinstance(answer, float) or abs(answer - native(number, x)) > 1e-2 + 1e-3 * abs(answer):
            wrong.append(f"f{number:02}({x}): {answer}, expected {native(number, x)}")
    print(f"\n{'question':42} {'tokens':>6} {'first token':>12} {'whole':>8}")
    for chat in chats:
        print(f"{chat.question:42} {chat.tokens:6} {chat.first_s * 1000:9.0f} ms {chat.whole_s:6.1f} s")
    print(f"\n{len(answers)} answers of functions meanwhile; {len(wrong)} of all {len(answers) + len(chats)} are wrong")
    for each in wrong:
        print(f"  {each}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"chats": [vars(chat) for chat in chats], "wrong": wrong}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
