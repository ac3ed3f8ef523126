"""Greedy text generation with GPT-2 at its published size (124.4 M parameters), by transformers' own generate() with
its key-value cache; seeded random weights, so the tokens mean nothing."""

import common
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def load():
    config = GPT2Config(bos_token_id=0, eos_token_id=50256, pad_token_id=50256)
    return common.seeded(GPT2LMHeadModel, config, seed=124).to("cuda")


@torch.inference_mode()
def handle(model, request):
    prompt = common.byte_tokens(request["text"], 24, offset=0).to("cuda")
    mask = torch.ones_like(prompt)
    tokens = model.generate(prompt, attention_mask=mask, max_new_tokens=int(request["new_tokens"]), do_sample=False)
    return {"tokens": tokens[0, prompt.shape[1] :].tolist()}
