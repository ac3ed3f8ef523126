"""Filling a gap in a text with RoBERTa-base at its published size (124.7 M parameters); seeded random weights."""

import common
import torch
from transformers import RobertaConfig, RobertaForMaskedLM

GAP = 4  # the token that stands for the gap


def load():
    config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    return common.seeded(RobertaForMaskedLM, config, seed=125).to("cuda")


@torch.inference_mode()
def handle(model, request):
    tokens = common.byte_tokens(request["text"], 32, offset=5).to("cuda")
    tokens[0, request["gap"]] = GAP
    where = (tokens[0] == GAP).nonzero()[0, 0]
    return common.ranked(model(tokens).logits[0, where])
