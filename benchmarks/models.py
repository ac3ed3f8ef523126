"""Functions of four shapes of model, which PyTorch runs too: for benchmarks that check their answers."""

from typing import Any, Final

SHAPES: Final = ("deep", "wide", "attention", "picture")

SOURCE: Final = """
import torch
from torch import nn

def make(shape, small):
    if shape == "deep":
        layers = [layer for _ in range(6 if small else 14) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        return nn.Sequential(*layers), (8 if small else 32, 1024)
    if shape == "wide":
        return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(2048, 2048), nn.GELU())]), (48, 2048)
    if shape == "attention":
        count = 3 if small else 5
        layers = [nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True) for _ in range(count)]
        return nn.Sequential(*layers), (1, 24 if small else 48, 384)
    layers = [layer for _ in range(4 if small else 8) for layer in (nn.Conv2d(256, 256, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers), (1, 256, 8, 8) if small else (1, 256, 12, 12)

def model(shape, seed, small):
    torch.manual_seed(seed)
    module, inputs = make(shape, small)
    return module.eval(), inputs

def answer(module, inputs, request, device):
    x = torch.randn(inputs, generator=torch.Generator().manual_seed(request)).to(device)
    with torch.no_grad():
        return module(x).flatten()[:: 997][:16].tolist()
"""

_FUNCTION: Final = """
def load():
    module, inputs = model(*MODEL)
    return module.to("cuda"), inputs

def handle(loaded, request):
    return answer(*loaded, request, "cuda")
"""


def function(shape: str, seed: int, small: bool = False) -> str:
    """Its source; a request is a number."""
    return SOURCE + _FUNCTION.replace("*MODEL", f"{shape!r}, {seed}, {small}")


def native(shapes: list[str], requests: int, small: bool = False) -> list[list[list[float]]]:
    """PyTorch's own answers, by function (its shape; its place is the seed) and request."""
    world: dict[str, Any] = {}
    exec(SOURCE, world)
    answers = []
    for seed, shape in enumerate(shapes):
        module, inputs = world["model"](shape, seed, small)
        answers.append([world["answer"](module, inputs, request, "cpu") for request in range(requests)])
    return answers
