"""Image classification with ResNet-50 at its published size (25.6 M parameters); seeded random weights."""

import common
import torch
from transformers import ResNetConfig, ResNetForImageClassification


def load():
    config = ResNetConfig(num_labels=1000)  # the defaults are ResNet-50's
    return common.seeded(ResNetForImageClassification, config, seed=50, norm=0.7).to("cuda")


@torch.inference_mode()
def handle(model, request):
    return common.ranked(model(common.picture(request)).logits[0])
