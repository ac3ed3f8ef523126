"""A function that uses `torch.compile`, on a node that compiles graphs: as PyTorch answers, before it is built and
after, on one node and after the executor has been replaced."""

import importlib
import os
import signal
import time
from typing import Any

import needs
import torch
from fast_paths import built

from benchmarks.nodes.testnode import running_node
from dormouse.core.native import RECORDER

SOURCE = """
import torch, transformers
from dormouse.client_shim.commands.handles import cpp

def model():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    return transformers.BertModel(config).eval()

def load():
    assert torch.cuda.is_available()
    return torch.compile(model().cuda(), fullgraph=True)

@torch.no_grad()
def handle(state, ids):
    before = cpp.module.counts()[0]
    found = state(torch.tensor([ids]).cuda())[0]
    commands = cpp.module.counts()[0] - before
    return found.flatten()[:9].tolist(), commands
"""


@needs.COMPILER
def test_a_compiled_function() -> None:
    built()
    RECORDER.build()
    importlib.import_module("transformers")
    native: dict[str, Any] = {}
    exec(compile(SOURCE.replace("from dormouse", "# from dormouse"), "native", "exec"), native)
    there = native["model"]()

    def check(node: Any, ids: list[int]) -> int:
        found, commands = node.result("f", ids)
        with torch.no_grad():
            expected = there(torch.tensor([ids]))[0].flatten()[:9]
        assert torch.allclose(torch.tensor(found), expected, atol=1e-5)
        return int(commands)

    with running_node('[gpu]\ncount = 1\nmemory = "1GiB"\ncompile = true\n') as node:
        node.deployed("f", SOURCE)
        check(node, [1, 2, 3, 4])
        check(node, [4, 3, 2, 1])
        deadline = time.monotonic() + 300
        while check(node, [9, 8, 7, 6]) != 1:
            assert time.monotonic() < deadline, "it was never built"
            time.sleep(0.2)
        assert [check(node, [number, 1, 2, 3]) for number in range(5)] == [1] * 5
        before = node.pids()["gpu0"]
        os.kill(before, signal.SIGKILL)
        node.replaced("gpu0", before)
        check(node, [5, 6, 7, 8])
        while check(node, [9, 8, 7, 6]) != 1:
            assert time.monotonic() < deadline, "who has come since does not know it"
            time.sleep(0.2)
        assert check(node, [1, 2, 3, 4, 5]) > 1, "sizes that vary are called one by one"
