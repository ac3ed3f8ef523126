"""Text classification with DistilBERT-base at its published size (67.0 M parameters); seeded random weights."""

import common
import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification


def load():
    config = DistilBertConfig(num_labels=6)
    return common.seeded(DistilBertForSequenceClassification, config, seed=66).to("cuda")


@torch.inference_mode()
def handle(model, request):
    tokens = common.byte_tokens(request["text"], 48).to("cuda")
    probabilities = model(tokens).logits[0].softmax(-1)
    return {"class": int(probabilities.argmax()), "probabilities": probabilities.tolist()}
