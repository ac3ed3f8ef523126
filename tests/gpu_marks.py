"""Marks of what needs a GPU: skipped, with the reason, where there is none. The fake driver counts as one."""

import pytest
import torch

from dormouse.gpuserver.device.cuda.probe import device_memory_is_host_memory, probe

FAKE = device_memory_is_host_memory()
FOUND = probe()
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not FOUND.gpus, reason=f"needs a GPU: {FOUND.reason}"),
    pytest.mark.skipif(not (FAKE or torch.cuda.is_available()), reason=f"needs a torch for CUDA: {torch.__version__}"),
]
