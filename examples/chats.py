"""Chats with language models through the official `openai` client, and compares their answers, word for word, with
those of `transformers` and PEFT.
"""

import contextlib
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import openai
import torch

TOKENS: Final = 48
"""At most, of an answer."""


@dataclass
class Chat:
    """One question to a function and its outcome. Times in seconds."""

    question: str
    model: str = "chat"
    text: str = ""
    tokens: int = 0
    first_s: float = 0.0
    whole_s: float = 0.0
    error: str = ""


def messages(question: str) -> Any:
    return [{"role": "user", "content": question}]


def talk(client: openai.OpenAI, chat: Chat, aloud: bool = False) -> None:
    began_s = time.monotonic()
    try:
        stream = client.chat.completions.create(
            model=chat.model,
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


def talk_at_once(client: openai.OpenAI, chats: list[Chat]) -> None:
    """Each in a thread of its own."""
    talking = [threading.Thread(target=talk, args=(client, chat)) for chat in chats]
    for thread in talking:
        thread.start()
    for thread in talking:
        thread.join()


class Reference:
    """A base in fp32, and adapters over it, by function. Adapters are not merged."""

    def __init__(self, folder: Path, base: str, adapters: Mapping[str, Path]) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        quiet: Any = logging
        quiet.disable_progress_bar()
        models: Any = AutoModelForCausalLM
        self._words: Any = AutoTokenizer.from_pretrained(folder)
        self._base = base
        model = models.from_pretrained(folder, dtype=torch.float32)
        (first, place), *others = adapters.items()
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of PEFT's use of transformers
            self._model: Any = PeftModel.from_pretrained(model, place, adapter_name=first)
            for name, place in others:
                self._model.load_adapter(place, adapter_name=name)
        self._model.eval()

    def wrong(self, chats: list[Chat]) -> list[str]:
        """Those that are not the reference's answer, always choosing the most probable token."""
        wrong = []
        for chat in chats:
            expected = "" if chat.error else self._answer(chat)
            if chat.error or chat.text != expected:
                wrong.append(f"{chat.model}: {chat.question} {chat.error or repr(chat.text)}, expected {expected!r}")
        return wrong

    @torch.inference_mode()
    def _answer(self, chat: Chat) -> str:
        words, model, end = self._words, self._model, self._words.eos_token_id
        start = words.apply_chat_template(messages(chat.question), tokenize=False, add_generation_prompt=True)
        prompt = words.encode(start, add_special_tokens=False)
        # Where each token is the reference's choice after those before it, they are the reference's answer: one forward
        # instead of one for each token.
        tokens = words.encode(chat.text, add_special_tokens=False)[:TOKENS]
        tokens += [end] if len(tokens) < TOKENS else []
        with self._speaking(chat.model):
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            if logits.argmax(-1).tolist() != tokens:
                given = torch.tensor([prompt])
                made = model.generate(
                    input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=TOKENS, do_sample=False
                )
                tokens = made[0, len(prompt) :].tolist()
        text: str = words.decode(tokens, skip_special_tokens=True)
        return text

    def _speaking(self, name: str) -> contextlib.AbstractContextManager[Any]:
        if name != self._base:
            self._model.set_adapter(name)
            return contextlib.nullcontext()
        without: contextlib.AbstractContextManager[Any] = self._model.disable_adapter()
        return without
