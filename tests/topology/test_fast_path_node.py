"""Which way a node's instances record operations, and its executors run plain ones."""

from pathlib import Path

import pytest
from fast_paths import built

from benchmarks.nodes.testnode import running_node
from dormouse.core.native import RECORDER

SOURCE = """
import torch
def load():
    return torch.arange(4.0).to("cuda")
def handle(state, request):
    return (state * request).relu().tolist() + [type(state).__name__]
"""


@pytest.mark.parametrize("on", [True, False])
def test_operations_are_recorded_and_run_by_cpp_unless_the_node_file_says_otherwise(on: bool) -> None:
    built()
    RECORDER.build()
    kind = "Tensor" if on else "RemoteTensor"
    with running_node(f"[gpu]\ncount = 1\nfast_path = {str(on).lower()}\n") as node:
        node.deployed("f", SOURCE)
        assert node.result("f", -2) == [0.0] * 4 + [kind]
        assert node.result("f", 2) == [0.0, 2.0, 4.0, 6.0, kind]
        maps = Path(f"/proc/{node.pids()['gpu0']}/maps").read_text()
        assert ("/fast_path-" in maps) == on
