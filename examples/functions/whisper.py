"""Speech to tokens with Whisper-tiny's layers, for sounds of five seconds instead of thirty (37.3 M parameters; only
the table of positions is shorter); seeded random weights. The log-mel spectrogram is made on the CPU, as usual."""

import common
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

SECONDS = 5


def load():
    config = WhisperConfig(max_source_positions=SECONDS * 50)  # the other defaults are Whisper-tiny's
    model = common.seeded(WhisperForConditionalGeneration, config, seed=37).to("cuda")
    return model, WhisperFeatureExtractor(chunk_length=SECONDS)


@torch.inference_mode()
def handle(state, request):
    model, extractor = state
    features = extractor(common.sound(request).numpy(), sampling_rate=16000, return_tensors="pt").input_features
    encoded = model.get_encoder()(features.to("cuda"))
    step = torch.full((1, 1), model.config.decoder_start_token_id, device="cuda")
    cache, tokens = None, []
    for _ in range(int(request["new_tokens"])):
        output = model(encoder_outputs=encoded, decoder_input_ids=step, past_key_values=cache, use_cache=True)
        cache, step = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(step)
    return {"tokens": torch.cat(tokens, 1)[0].tolist()}
