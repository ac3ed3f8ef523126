"""Image classification with ViT-base/16 at its published size (86.6 M parameters); seeded random weights."""

import common
import torch
from transformers import ViTConfig, ViTForImageClassification


def load():
    return common.seeded(ViTForImageClassification, ViTConfig(num_labels=1000), seed=16).to("cuda")


@torch.inference_mode()
def handle(model, request):
    return common.ranked(model(common.picture(request)).logits[0])
