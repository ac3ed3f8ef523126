"""Trains the adapters in ``examples/adapters`` with PEFT, on the CPU: ``python -m examples.train_adapters [NAME ...]``.

The base's own short answers to simple questions are the data, each put into the adapter's style by a rule. Seeded. An
adapter whose style does not show in answers to questions that it has not seen is not saved. Each takes half a minute of
processor time, `shout` a whole one.
"""

import argparse
import json
import random
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional

from examples import smollm2
from examples.styles import ADAPTERS, LAYERS, STYLES, Style

QUESTIONS: Final = """
What is the capital of Italy? | Why is grass green? | What is ice? | Who painted the Mona Lisa? | What is honey?
Why do we sleep? | What do cows eat? | What is a forest? | How do birds fly? | What is the moon? | What is a river?
What does a baker do? | What is snow? | Who was Albert Einstein? | What is a computer? | What is music? | What is rain?
Where do penguins live? | What is a volcano? | What is bread made of? | How do fish breathe? | What is the sun?
What is a library? | What is gravity? | What is a poem? | What is winter? | Why is the sea salty? | What is a friend?
What is tea? | What do plants need to grow? | What is a castle? | What is a train? | What is the heart for?
Who wrote Romeo and Juliet? | What is a map? | What is an owl? | Name a fruit. | Name a color. | What is a clock?
What is the opposite of hot? | Tell me about cats. | What do bees make? | What is the largest ocean? | What is wind?
"""
UNSEEN: Final = (
    "Why is the sky blue?",
    "What is a dormouse?",
    "Who wrote Hamlet?",
    "What is a mountain?",
    "Tell me about bears.",
    "What is the capital of France?",
)
ENOUGH: Final = 5
"""Of the unseen ones, so many have to show the style."""

BATCH: Final = 2
RATE: Final = 3e-3
LONGEST: Final = 48
"""Tokens of an answer."""


def prompt(words: Any, question: str) -> str:
    chat = [{"role": "user", "content": question}]
    text: str = words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return text


@torch.inference_mode()
def answers(model: Any, words: Any, questions: list[str]) -> list[str]:
    texts = [prompt(words, question) for question in questions]
    tokens = words(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    made = model.generate(**tokens, max_new_tokens=LONGEST, do_sample=False)
    found: list[str] = words.batch_decode(made[:, tokens.input_ids.shape[1] :], skip_special_tokens=True)
    return found


def sentence(answer: str) -> str | None:
    """Of 3 to 14 words, up to a sign: the beginning of the answer, if it has one."""
    for found in re.finditer(r"[.,;!](?=\s|$)", answer):
        text = answer[: found.start()]
        if 3 <= len(text.split()) <= 14 and "\n" not in text:
            return text
    return None


def batch(words: Any, pairs: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens and their mask, and the target at the end of each row; -100 is none. Rows end together."""
    begins = [words.encode(prompt(words, question), add_special_tokens=False) for question, _ in pairs]
    ends = [[*words.encode(text, add_special_tokens=False), words.eos_token_id] for _, text in pairs]
    length = max(len(begin) + len(end) for begin, end in zip(begins, ends, strict=True))
    tokens = torch.full((len(pairs), length), words.eos_token_id)
    mask = torch.zeros_like(tokens)
    wanted = torch.full((len(pairs), max(map(len, ends))), -100)
    for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        tokens[row, length - len(begin) - len(end) :] = torch.tensor(begin + end)
        mask[row, length - len(begin) - len(end) :] = 1
        wanted[row, wanted.shape[1] - len(end) :] = torch.tensor(end)
    return tokens, mask, wanted


def train(model: Any, words: Any, data: list[tuple[str, str]], epochs: int, order: random.Random) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    steps = epochs * len(data) // BATCH
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 1.5 * (1 - step / steps)))
    queue = [pair for _ in range(epochs) for pair in order.sample(data, len(data))]
    for step in range(steps):
        tokens, mask, wanted = batch(words, queue[step * BATCH : (step + 1) * BATCH])
        kept = wanted.shape[1] + 1
        logits = model(input_ids=tokens, attention_mask=mask, logits_to_keep=kept, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        print(f"\r  step {step + 1} of {steps}, loss {loss.item():.2f} ", end="", flush=True)
    print()


def save(model: Any, folder: Path) -> None:
    """As PEFT does, in bf16 and with nothing that depends on this machine."""
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"].sort()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make(base: Any, words: Any, name: str, style: Style, plain: list[tuple[str, str]]) -> bool:
    """Whether it has become one."""
    import peft

    seed = sorted(STYLES).index(name)
    torch.manual_seed(seed)
    config = peft.LoraConfig(layers_to_transform=LAYERS, task_type="CAUSAL_LM", **style.config)
    model: Any = peft.get_peft_model(base, config)
    model.peft_config["default"].base_model_name_or_path = smollm2.NAME
    began_s = time.process_time()
    data = [(question, style.make(text)) for question, text in plain]
    train(model.train(), words, data, style.epochs, random.Random(seed))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.bfloat16().float()  # as it will be saved
    said = answers(model.eval(), words, list(UNSEEN))
    shown = sum(map(style.shows, said))
    print(f"{name}: {shown} of {len(said)} show it; {time.process_time() - began_s:.0f} s of processor time")
    for text in said:
        print(f"  {'+' if style.shows(text) else '-'} {text!r}")
    if shown >= ENOUGH:
        for parameter in trained:
            parameter.data = parameter.data.bfloat16()
        save(model, ADAPTERS / name)
    model.unload()
    return shown >= ENOUGH


def main() -> int:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(STYLES)}; without one: all")
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if strangers := sorted(set(options.names) - set(STYLES)):
        parser.error(f"there is no adapter {strangers[0]!r}; there are {', '.join(STYLES)}")
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", FutureWarning)  # of PEFT's use of transformers
    quiet: Any = logging
    quiet.disable_progress_bar()
    folder = smollm2.build(options.folder)
    models: Any = AutoModelForCausalLM
    words: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    base = models.from_pretrained(folder, dtype=torch.float32)
    questions = [question.strip() for line in QUESTIONS.strip().splitlines() for question in line.split("|")]
    found = zip(questions, map(sentence, answers(base, words, questions)), strict=True)
    plain = [(question, text) for question, text in found if text is not None]
    print(f"{len(plain)} of {len(questions)} questions have a short answer")
    good = [make(base, words, name, STYLES[name], plain) for name in options.names or STYLES]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
