"""The functions of benchmarks/soak.py: good ones, whose answers PyTorch knows too, and hostile neighbours."""

from typing import Any, Final

SHARED: Final = """
import torch
from torch import nn

def make(shape):
    if shape == "deep":
        return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]), (8, 1024)
    if shape == "attention":
        layers = [nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True) for _ in range(3)]
        return nn.Sequential(*layers), (1, 24, 384)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Conv2d(256, 256, 3, padding=1), nn.ReLU())]), (
        1, 256, 8, 8
    )

def model(shape, seed):
    torch.manual_seed(seed)
    module, inputs = make(shape)
    return module.eval(), inputs

def answer(module, inputs, request, device):
    x = torch.randn(inputs, generator=torch.Generator().manual_seed(request)).to(device)
    with torch.no_grad():
        return module(x).flatten()[:: 97][:16].tolist()
"""

GOOD: Final = (
    SHARED
    + """
def load():
    module, inputs = model("SHAPE", SEED)
    return module.to("cuda"), inputs

def handle(loaded, request):
    return answer(*loaded, request, "cuda")
"""
)

SHAPES: Final = ("deep", "attention", "picture")

_BEGIN: Final = """
import os, signal, sys, time
import torch

def load():
    return torch.arange(8.0).to("cuda")

def handle(state, request):
    (state + 1).sum().item()
"""

HOSTILE: Final = {
    # name: (what its handle does next, the codes that its client may be answered with)
    "raises": ("    raise ValueError('on purpose')", ("function_raised",)),
    "lies": ("    return object()", ("bad_response", "function_raised")),
    "exits": ("    os._exit(3)", ("sandbox_died",)),
    "crashes": ("    os.kill(os.getpid(), signal.SIGSEGV)", ("sandbox_died",)),
    "loops": ("    while True: pass", ("timed_out",)),
    "greedy": ("    return torch.empty(1 << 40, dtype=torch.uint8, device='cuda')", ("out_of_memory",)),
    "hoards": (
        "    kept = [bytearray(64 << 20) for _ in range(10**4)]",
        ("function_raised", "sandbox_died", "limit_exceeded", "out_of_memory", "timed_out"),
    ),
    "forks": (
        "    [os.fork() for _ in range(10**4)]",
        ("function_raised", "sandbox_died", "limit_exceeded", "timed_out"),
    ),
    "floods": ("    [print('x' * 1000) for _ in range(10**4)]\n    return 0", ("",)),
    "garbage": (
        "    from dormouse.client_shim.remote_tensor import world\n"
        "    lease = world.stream._lease\n"
        "    world.stream.backend.executor(lease).send(b'\\xc1garbage')\n"
        "    return (state + 1).tolist()",
        ("violation",),
    ),
}


def good(number: int) -> str:
    return GOOD.replace("SHAPE", SHAPES[number % len(SHAPES)]).replace("SEED", str(number))


def hostile(name: str) -> str:
    return _BEGIN + HOSTILE[name][0] + "\n"


def native(functions: int, requests: int) -> list[list[list[float]]]:
    """PyTorch's own answers, by function and request."""
    world: dict[str, Any] = {}
    exec(SHARED, world)
    answers = []
    for number in range(functions):
        module, inputs = world["model"](SHAPES[number % len(SHAPES)], number)
        answers.append([world["answer"](module, inputs, request, "cpu") for request in range(requests)])
    return answers
