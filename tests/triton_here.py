"""Triton beside the environment (`make setup` puts it there), with its interpreter switched on. Import before what
imports Triton.
"""

import importlib.util
import os
import sys
from pathlib import Path

import torch

from dormouse.gpuserver.device.cuda.probe import device_memory_is_host_memory

BESIDE = Path(__file__).resolve().parents[1] / ".venv" / "triton"

CUDA = not device_memory_is_host_memory() and torch.cuda.is_available()  # torch does not know the fake driver
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
if importlib.util.find_spec("triton") is None and BESIDE.is_dir():
    sys.path.append(str(BESIDE))
HERE = importlib.util.find_spec("triton") is not None
