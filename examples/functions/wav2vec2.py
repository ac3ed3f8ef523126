"""Speech to letters with wav2vec 2.0 base at its published size (94.4 M parameters); seeded random weights."""

import common
import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC


def load():
    return common.seeded(Wav2Vec2ForCTC, Wav2Vec2Config(), seed=95).to("cuda")


@torch.inference_mode()
def handle(model, request):
    samples = common.sound(request).to("cuda")
    samples = (samples - samples.mean()) / (samples.std() + 1e-5)
    logits = model(samples[None]).logits[0]
    frames = logits.argmax(-1)
    changed = torch.ones_like(frames, dtype=torch.bool)
    changed[1:] = frames[1:] != frames[:-1]
    letters = frames[changed]
    return {"letters": letters[letters != 0].tolist(), "mean": logits.mean(0).tolist()}
