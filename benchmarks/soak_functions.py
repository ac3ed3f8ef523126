"""The functions of benchmarks/soak.py: good ones, whose answers PyTorch knows too, and hostile neighbours."""

from typing import Final

from benchmarks import models

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
    "greedy": ("    return torch.ones(1 << 40, dtype=torch.uint8, device='cuda')", ("out_of_memory",)),
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
        "    from dormouse.client_shim.torch_face.remote_tensor import world\n"
        "    lease = world.stream._connection.lease\n"
        "    world.stream.backend.executor(lease).send(b'\\xc1garbage')\n"
        "    return (state + 1).tolist()",
        ("violation",),
    ),
}


def good(number: int) -> str:
    return models.function(SHAPES[number % len(SHAPES)], number, small=True)


def hostile(name: str) -> str:
    return _BEGIN + HOSTILE[name][0] + "\n"


def native(functions: int, requests: int) -> list[list[list[float]]]:
    """PyTorch's own answers, by function and request."""
    return models.native([SHAPES[number % len(SHAPES)] for number in range(functions)], requests, small=True)
