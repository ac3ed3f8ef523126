"""Image classification with ResNet-152 at its published size (60.2 M parameters); seeded random weights."""

import common
import torch
from transformers import ResNetConfig, ResNetForImageClassification


def load():
    config = ResNetConfig(depths=[3, 8, 36, 3], num_labels=1000)
    return common.seeded(ResNetForImageClassification, config, seed=152, norm=0.5).to("cuda")


@torch.inference_mode()
def handle(model, request):
    return common.ranked(model(common.picture(request)).logits[0])
