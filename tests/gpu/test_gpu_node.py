"""A whole node on a real GPU: functions whose models come and go, against PyTorch on the CPU."""

from pathlib import Path

import pytest
import torch
from engine_suite import loaded
from gpu_marks import NEEDS_GPU

from dormouse.core.config import machine_nbytes
from dormouse.core.node.testing import running_node

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
