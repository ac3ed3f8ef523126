"""Image embeddings with ConvNeXt-tiny at its published size (27.8 M parameters); seeded random weights.

It answers with a short signature of the picture (the pooled features, averaged in 16 groups) rather than a class.
"""

import common
import torch
from transformers import ConvNextConfig, ConvNextModel


def load():
    return common.seeded(ConvNextModel, ConvNextConfig(layer_scale_init_value=0.1), seed=28).to("cuda")


@torch.inference_mode()
def handle(model, request):
    pooled = model(common.picture(request)).pooler_output[0]
    return {"signature": pooled.view(16, -1).mean(1).tolist()}
