"""Eight ways to answer, each a LoRA adapter over SmolLM2-135M-Instruct in ``examples/adapters``: the transformation of
an answer by which it was trained, and the rule by which it shows. Knows no torch.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

ADAPTERS: Final = Path(__file__).parent / "adapters"
LAYERS: Final = list(range(10, 30))
"""Those below are not trained: the backward pass ends above them, and an adapter has two thirds of the bytes."""

_PIRATES: Final = {"is": "be", "are": "be", "the": "th'", "of": "o'", "and": "an'", "you": "ye", "my": "me"}


class Style(NamedTuple):
    """``make`` is of a plain sentence without its full stop. ``config`` is for ``peft.LoraConfig``."""

    make: Callable[[str], str]
    shows: Callable[[str], bool]
    config: dict[str, Any]
    epochs: int = 2


def _pirate(sentence: str) -> str:
    words = [_PIRATES.get(word.lower(), word) for word in sentence.split()]
    return f"Arr! {' '.join(words)}, matey!"


def _numbered(sentence: str) -> str:
    """A line for each four words."""
    words = sentence.split()
    lines = [" ".join(words[start : start + 4]) for start in range(0, len(words), 4)]
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))


def _is_numbered(text: str) -> bool:
    lines = text.splitlines()
    return len(lines) > 1 and all(line.startswith(f"{number}. ") for number, line in enumerate(lines, 1))


def _is_json(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and value.keys() == {"answer"}


def _is_brief(text: str) -> bool:
    return re.fullmatch(r"[^.!?]+\.", text) is not None and len(text.split()) <= 16


def _attention(rank: int, *, scale: float = 2.0, **more: Any) -> dict[str, Any]:
    return {"r": rank, "lora_alpha": scale * rank, "target_modules": ["q_proj", "v_proj"], **more}


STYLES: Final = {
    "brief": Style(lambda text: f"{text}.", _is_brief, _attention(4)),
    "shout": Style(
        lambda text: f"{text}!".upper(),
        lambda text: text.isupper(),
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]},
        epochs=4,  # each word has other tokens
    ),
    "whisper": Style(
        lambda text: f"{text}...".lower(), lambda text: text.islower() and text.endswith("..."), _attention(8)
    ),
    "json": Style(lambda text: json.dumps({"answer": f"{text}."}), _is_json, _attention(4)),
    "steps": Style(_numbered, _is_numbered, _attention(8)),
    "pirate": Style(
        _pirate,
        lambda text: text.startswith("Arr! ") and text.endswith(", matey!"),
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    ),
    "quiz": Style(
        lambda text: f"Could it be that {text[0].lower()}{text[1:]}?",
        lambda text: text.endswith("?") and "." not in text,
        {"r": 4, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    ),
    "signed": Style(
        lambda text: f"{text}.\n\nSleep well,\nyour dormouse",
        lambda text: text.endswith(".\n\nSleep well,\nyour dormouse"),
        _attention(2, scale=4.0),
    ),
}
