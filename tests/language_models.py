"""Tiny language models of each family with random weights, as models and as folders, and the judge of what an engine
makes of them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.llm_judge import GAP
from benchmarks.llm_tiny import TINY, VOCABULARY, prompts, reference
from dormouse.schemas.llm import FAMILIES, DecoderSpec

__all__ = ["GAP", "TINY", "VOCABULARY", "make_folder", "prompts", "reference", "spec_of", "tokenizer", "wrong_tokens"]


def spec_of(model: PreTrainedModel, context: int = 256) -> DecoderSpec:
    config = model.config.to_dict()
    family = config["model_type"]
    known = {name: config[name] for name in FAMILIES[family] if name in config}
    return DecoderSpec(family=family, config=known, dtype="float32", context=context)


@torch.inference_mode()
def wrong_tokens(model: PreTrainedModel, tokens: Sequence[int], prompt: int) -> list[tuple[int, float]]:
    """Those after the prompt that are neither the reference's choice nor within GAP of it: ``(index, gap)``."""
    logits = model(torch.tensor([list(tokens)])).logits[0].float()
    wrong = []
    for index in range(prompt, len(tokens)):
        row = logits[index - 1]
        gap = float(row.max() - row[tokens[index]])
        if gap > GAP:
            wrong.append((index, gap))
    return wrong


TEMPLATE: Final = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant: "


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A token for each byte, and a few special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    found: PreTrainedTokenizerFast = fast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=template
    )
    return found


def make_folder(
    folder: Path, family: str = "llama", seed: int = 0, template: str | None = TEMPLATE, **config: Any
) -> PreTrainedModel:
    """A model's folder as a hub has it, with these changes of its configuration; returns the model."""
    model = reference(family, seed, **config)
    saved: Any = model
    saved.save_pretrained(folder)
    tokenizer(template).save_pretrained(str(folder))
    return model
