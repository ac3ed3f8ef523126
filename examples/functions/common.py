"""Helpers of the example functions: seeded weights, texts as tokens, pictures and sounds from JSON.

It imports nothing of Dormouse, as the functions beside it: they run as they are on any machine with a GPU.

The weights are random. A trained model of the published size would be a download of hundreds of megabytes each; the
point of these examples, moving models in and out of GPUs without changing an answer, does not depend on trained
weights. Every tensor has a generator of its own, seeded by (seed, parameter name): any process builds the same model.
"""

import base64
import math
import os
import zlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded; say so before transformers is imported

import torch
from torch import nn
from transformers.initialization import no_init_weights

GAIN = {nn.Conv1d: math.sqrt(2.0), nn.Conv2d: math.sqrt(2.0)}  # a ReLU or GELU follows and halves the variance


def seeded(model_class, config, seed, norm=1.0, embedding=0.02):
    """A model with weights drawn from ``seed``, on the CPU, in eval mode.

    ``norm`` scales the normalisation layers' weights: below 1 it keeps the residual branches of a deep network from
    adding up to numbers that saturate its softmax, as training would.
    """
    with no_init_weights():  # as from_pretrained does: do not draw weights that are about to be replaced
        model = model_class(config)
    model.tie_weights()
    with torch.no_grad():
        for prefix, module in model.named_modules():
            for name, tensor in module.named_parameters(prefix, recurse=False):
                spread = _spread(module, name, tensor, embedding)
                centre = norm if "Norm" in type(module).__name__ and name.endswith("weight") else 0.0
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
                tensor.uniform_(centre - spread, centre + spread, generator=generator)
    return model.eval()


def _spread(module, name, tensor, embedding):
    """Half the width of the uniform distribution: sqrt(3) standard deviations."""
    if tensor.dim() < 2 or "Norm" in type(module).__name__:
        return 0.05
    if isinstance(module, nn.Embedding) or not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
        fan_in = tensor.shape[0] if type(module).__name__ == "Conv1D" else 0  # GPT-2's transposed linear layer
        return math.sqrt(3.0 / fan_in) if fan_in else math.sqrt(3.0) * embedding
    fan_in = tensor[0].numel()
    return GAIN.get(type(module), 1.0) * math.sqrt(3.0 / fan_in)


def byte_tokens(text, length, offset=3):
    """A text as one token per byte, cut to ``length``: the tokenizer of a model without a trained vocabulary."""
    return torch.tensor([[offset + byte for byte in text.encode()[:length]]])


def picture(request, side=224):
    """``request["image"]``: base64 of side x side x 3 bytes, to a normalised batch of one on the GPU."""
    raw = bytearray(base64.b64decode(request["image"], validate=True))
    pixels = torch.frombuffer(raw, dtype=torch.uint8).view(1, side, side, 3).to("cuda")
    mean = torch.tensor([0.485, 0.456, 0.406], device="cuda").view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225], device="cuda").view(1, 3, 1, 1)
    return (pixels.permute(0, 3, 1, 2).float() / 255.0 - mean) / std


def sound(request):
    """``request["audio"]``: base64 of 16-bit samples at 16 kHz, to floats on the CPU."""
    raw = bytearray(base64.b64decode(request["audio"], validate=True))
    return torch.frombuffer(raw, dtype=torch.int16).float() / 32768.0


def ranked(logits, k=5):
    """The ``k`` largest of one row of logits: classes and scores."""
    scores, classes = logits.float().topk(k)
    return {"classes": classes.tolist(), "scores": scores.tolist()}
