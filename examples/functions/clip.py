"""Matching a picture with captions by CLIP ViT-B/32 at its published size (151.3 M parameters); seeded random
weights."""

import common
import torch
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig

END = 49407


def load():
    text = CLIPTextConfig(hidden_size=512, bos_token_id=49406, eos_token_id=END)
    return common.seeded(CLIPModel, CLIPConfig(text_config=text.to_dict()), seed=151).to("cuda")


@torch.inference_mode()
def handle(model, request):
    captions = [list(caption.encode()[:24]) for caption in request["captions"]]
    width = 1 + max(map(len, captions))
    rows = [caption + [END] * (width - len(caption)) for caption in captions]
    tokens = torch.tensor(rows, device="cuda")
    mask = torch.tensor([[1] * (len(c) + 1) + [0] * (width - len(c) - 1) for c in captions], device="cuda")
    output = model(input_ids=tokens, attention_mask=mask, pixel_values=common.picture(request))
    return {"scores": (output.image_embeds @ output.text_embeds.T)[0].tolist()}
