"""Triton beside the environment (`make setup` puts it there), with its interpreter switched on. Import before what
imports Triton.
"""

import importlib.util
import os
import sys
from pathlib import Path

import torch

BESIDE = Path(__file__).resolve().parents[1] / ".venv" / "triton"

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if importlib.util.find_spec("triton") is None and BESIDE.is_dir():
    sys.path.append(str(BESIDE))
HERE = importlib.util.find_spec("triton") is not None
