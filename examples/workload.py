"""The demo's workload: functions, seeded requests, and the tolerated distance of an answer from native PyTorch's.

It decides nothing at run time and does no I/O but reading the sentences that the examples ship.

Answers are compared field by field. Integers (classes, tokens, positions) and texts must be equal. Floats may differ by
``tolerance``, absolute and relative: both sides compute in float32 with the same kernels, but a kernel may add up in
another order where its operands lie at other addresses or are shared among another number of threads. One rounding is
6e-8 of the value. A sum of 3,072 terms (the longest here) in another order moves by about sqrt(3072) of them, 3e-6; a
dozen such layers in a row stay below 1e-4, which wrong or stale weights do not. ResNet-152's logits come from 152
layers without a final normalisation to damp them, hence its larger tolerance.
"""

import base64
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

FOLDER: Final = Path(__file__).parent / "functions"
SENTENCES: Final = (FOLDER / "data" / "sentences.txt").read_text(encoding="utf-8").splitlines()
SIDE: Final = 224
RATE: Final = 16_000

Request = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Function:
    """One deployed function: its name is its file's."""

    name: str
    architecture: str
    requests: int  # fewer for those that take longest, so that the demo stays short
    make: Callable[[random.Random], Request]
    tolerance: float = 1e-4

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.py"


def _picture(rng: random.Random) -> str:
    """Waves of three colours, and a little noise."""
    noise = np.frombuffer(rng.randbytes(SIDE * SIDE), np.uint8).reshape(SIDE, SIDE) >> 3
    along = np.arange(SIDE)
    pixels = np.empty((SIDE, SIDE, 3), np.uint8)
    for channel in range(3):
        across = np.sin(rng.uniform(-0.1, 0.1) * along + rng.uniform(0, 6.28))
        down = np.cos(rng.uniform(-0.1, 0.1) * along)
        pixels[:, :, channel] = (112 + 90 * np.outer(down, across)).astype(np.uint8) + noise
    return base64.b64encode(pixels.tobytes()).decode()


def _sound(rng: random.Random, seconds: float) -> str:
    """A chord of four tones that fades, and a little noise: 16-bit samples."""
    count = int(RATE * seconds)
    time_s = np.arange(count) / RATE
    chord = sum(rng.uniform(0.05, 0.2) * np.sin(2 * np.pi * rng.uniform(80, 3000) * time_s) for _ in range(4))
    noise = np.frombuffer(rng.randbytes(count), np.uint8)
    samples = 20_000 * chord * np.linspace(1, 0, count) + noise
    return base64.b64encode(samples.astype("<i2").tobytes()).decode()


def _search(rng: random.Random) -> Request:
    subjects = (
        "saving money",
        "true friends",
        "being patient",
        "hard work",
        "love",
        "home",
        "wisdom and folly",
        "a dog",
        "the weather",
        "cooking",
    )
    forms = (
        "advice about {}",
        "what do people say of {}?",
        "a warning concerning {}",
        "{}",
        "why {} matters",
        "an old man on {}",
    )
    return {"query": rng.choice(forms).format(rng.choice(subjects)), "top": rng.randint(1, 5)}


def _image(rng: random.Random) -> Request:
    return {"image": _picture(rng)}


def _question(rng: random.Random) -> Request:
    context = " ".join(rng.sample(SENTENCES, 4))
    return {"question": f"What is said of {rng.choice(context.split()).strip('.,;').lower()}?", "context": context}


def _text(rng: random.Random) -> Request:
    return {"text": " ".join(rng.sample(SENTENCES, 2))}


def _gap(rng: random.Random) -> Request:
    return _text(rng) | {"gap": rng.randrange(32)}


def _prompt(least: int, most: int) -> Callable[[random.Random], Request]:
    return lambda rng: {"text": rng.choice(SENTENCES), "new_tokens": rng.randint(least, most)}


def _speech(least_s: float, most_s: float) -> Callable[[random.Random], Request]:
    return lambda rng: {"audio": _sound(rng, rng.uniform(least_s, most_s)), "new_tokens": rng.randint(2, 4)}


def _caption(rng: random.Random) -> Request:
    return {"image": _picture(rng), "captions": rng.sample(SENTENCES, 3)}


FUNCTIONS: Final = (
    Function(name="semantic_search", architecture="BERT (all-MiniLM-L6-v2)", requests=40, make=_search),
    Function(name="bert_qa", architecture="BERT-base", requests=22, make=_question),
    Function(name="distilbert", architecture="DistilBERT-base", requests=36, make=_text),
    Function(name="roberta", architecture="RoBERTa-base", requests=18, make=_gap),
    Function(name="gpt2", architecture="GPT-2", requests=22, make=_prompt(2, 3)),
    Function(name="llama", architecture="Llama (135 M)", requests=14, make=_prompt(2, 3)),
    Function(name="t5", architecture="T5-small", requests=26, make=_prompt(2, 4)),
    Function(name="resnet50", architecture="ResNet-50", requests=30, make=_image),
    Function(name="resnet152", architecture="ResNet-152", requests=10, make=_image, tolerance=5e-4),
    Function(name="vit", architecture="ViT-base", requests=10, make=_image),
    Function(name="convnext", architecture="ConvNeXt-tiny", requests=30, make=_image),
    Function(name="clip", architecture="CLIP ViT-B/32", requests=14, make=_caption),
    Function(name="whisper", architecture="Whisper-tiny", requests=22, make=_speech(1.0, 4.0)),
    Function(name="wav2vec2", architecture="wav2vec 2.0 base", requests=18, make=_speech(0.3, 0.5)),
)


def requests(functions: tuple[Function, ...], seed: int) -> dict[str, list[Request]]:
    """Every function's requests, by function name."""
    return {
        f.name: [f.make(random.Random(f"{seed}:{f.name}:{index}")) for index in range(f.requests)] for f in functions
    }


def order(functions: tuple[Function, ...], seed: int) -> list[tuple[str, int]]:
    """(function, number of its request): each function's requests spread evenly over the run, so that between two of
    them most of the others have been asked, and its model has been evicted."""
    rng = random.Random(f"{seed}:order")
    places = [((index + rng.random()) / f.requests, f.name, index) for f in functions for index in range(f.requests)]
    return [(name, index) for _, name, index in sorted(places)]


def differs(answer: object, native: object, tolerance: float, where: str = "answer") -> str | None:
    """The first difference that matters, in words, or None."""
    if isinstance(native, dict) and isinstance(answer, dict) and native.keys() == answer.keys():
        pairs = [(f"{where}.{key}", answer[key], native[key]) for key in native]
    elif isinstance(native, list) and isinstance(answer, list) and len(native) == len(answer):
        pairs = [(f"{where}[{index}]", *pair) for index, pair in enumerate(zip(answer, native, strict=True))]
    elif isinstance(native, float) and isinstance(answer, float):
        if abs(answer - native) <= tolerance * (1.0 + abs(native)):  # also False when either is NaN
            return None
        return f"{where} is {answer!r}, natively {native!r}"
    else:
        same = type(answer) is type(native) and answer == native
        return None if same else f"{where} is {str(answer)[:80]}, natively {str(native)[:80]}"
    return next((found for name, a, n in pairs if (found := differs(a, n, tolerance, name))), None)
