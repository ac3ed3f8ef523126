"""A whole node on a real GPU: functions whose models come and go, against PyTorch on the CPU."""

from pathlib import Path

import pytest
import torch
from engine_suite import loaded
from gpu_marks import NEEDS_GPU

from benchmarks.nodes.testnode import running_node
from dormouse.core.config import machine_nbytes

NODE = loaded(Path(__file__).parents[1] / "topology" / "test_cuda_node.py")
pytestmark = NEEDS_GPU


@pytest.mark.parametrize("pool", ["regions", "pages"])
def test_models_come_and_go(pool: str) -> None:
    memory = f'memory = "544MiB"\nactivations = "512MiB"\npool = "{pool}"\n'  # room for two of the three models
    host_mib = min(24 << 30, machine_nbytes() // 2) >> 20  # all that the store takes of it is pinned
    limits = f'[limits]\nhost = "{host_mib}MiB"\n'
    with running_node(f'[gpu]\ndevice = "cuda"\ncount = 1\npoison = true\n{memory}{limits}') as node:
        NODE.deploy(node)
        for turn in range(3):
            for seed in NODE.SEEDS:
                request = (turn + 1) / 4
                answer = node.result(f"f{seed}", request)
                torch.testing.assert_close(answer, NODE.native(seed, request), rtol=1e-3, atol=1e-3)
        assert sum(node.status()["functions"][f"f{seed}"]["evictions"] for seed in NODE.SEEDS) > 0


def test_a_language_model_beside_functions(tmp_path: Path) -> None:
    """Its answers are those of `transformers`, woken beside functions that need its room."""
    pytest.importorskip("tokenizers", reason="needs tokenizers: make setup")
    from language_models import make_folder
    from llm_node import ask, connected, deploy, expected

    model = make_folder(tmp_path)
    memory = 'memory = "544MiB"\nactivations = "512MiB"\npool = "pages"\n'
    with running_node(f'[gpu]\ndevice = "cuda"\ncount = 1\npoison = true\n{memory}') as node, connected(node) as client:
        NODE.deploy(node)
        deploy(node, "chat", tmp_path)
        for turn in range(2):
            assert ask(client, f"turn {turn}") == expected(model, f"turn {turn}", 40)
            for seed in NODE.SEEDS:
                torch.testing.assert_close(node.result(f"f{seed}", 0.5), NODE.native(seed, 0.5), rtol=1e-3, atol=1e-3)
