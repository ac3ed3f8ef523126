"""Greedy text generation with a small Llama of SmolLM-135M's published size (134.5 M parameters; rotary embeddings and
grouped-query attention), written as the loop over its key-value cache; seeded random weights."""

import common
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def load():
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return common.seeded(LlamaForCausalLM, config, seed=135).to("cuda")


@torch.inference_mode()
def handle(model, request):
    step = common.byte_tokens(request["text"], 32).to("cuda")
    cache, tokens, scores = None, [], []
    for _ in range(int(request["new_tokens"])):
        output = model(step, past_key_values=cache, use_cache=True)
        score, token = output.logits[:, -1].max(-1)
        cache, step = output.past_key_values, token[:, None]
        tokens.append(token.item())
        scores.append(score.item())
    return {"tokens": tokens, "scores": scores}
