"""Encoder-decoder text generation with T5-small at its published size (60.5 M parameters); seeded random weights."""

import common
import torch
from transformers import T5Config, T5ForConditionalGeneration


def load():
    config = T5Config(decoder_start_token_id=0)  # the defaults are T5-small's
    return common.seeded(T5ForConditionalGeneration, config, seed=60, norm=0.5, embedding=1.0).to("cuda")


@torch.inference_mode()
def handle(model, request):
    source = common.byte_tokens(request["text"], 48).to("cuda")
    encoded = model.get_encoder()(source)
    step, cache, tokens = torch.zeros((1, 1), dtype=torch.long, device="cuda"), None, []
    for _ in range(int(request["new_tokens"])):
        output = model(encoder_outputs=encoded, decoder_input_ids=step, past_key_values=cache, use_cache=True)
        cache, step = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(step)
    return {"tokens": torch.cat(tokens, 1)[0].tolist()}
