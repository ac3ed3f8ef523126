"""Counts a node's executors: all GPUs that CUDA finds, else emulated ones, never some of each.

CUDA is asked in a process of its own: a driver that is loaded stays, and does not survive a fork. Placement would take
emulated GPUs beside real ones for their equals, so a node that asks for more than there are is refused.
"""

import subprocess
import sys
from dataclasses import dataclass
from typing import Final

import msgspec

from dormouse.core.config import NodeConfig
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import GpuPlace

PROBE_S: Final = 60.0
CUDA_PROBE: Final = "dormouse.gpuserver.device.cuda.probe"


class GpuState(msgspec.Struct):
    """A GPU that was given a context for a moment. ``error`` says why that has failed, and what to do; it is empty if
    it has not. Sizes in bytes. The memory that the context takes itself, some hundred MiB, does not count as free.
    """

    capability: tuple[int, int] = (0, 0)
    error: str = ""
    free_nbytes: int = 0
    total_nbytes: int = 0


@dataclass(frozen=True)
class GpuSurvey:
    """``reason`` says why there are no ``gpus``, else it is empty."""

    gpus: tuple[str, ...] = ()
    driver: str = ""
    bindings: str = ""
    reason: str = ""
    places: tuple[GpuPlace, ...] = ()  # of the gpus, in their order
    states: tuple[GpuState, ...] = ()  # the same, of those that were opened


def find(config: NodeConfig, opening: bool = False) -> GpuSurvey:
    """The GPUs that executors may drive, ``opening`` each; never raises."""
    if config.gpu.device == "host":
        return GpuSurvey(reason="[gpu] device is 'host'")
    try:
        arguments = [sys.executable, "-m", CUDA_PROBE, *(["--open"] if opening else [])]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=PROBE_S)
        return msgspec.json.decode(done.stdout, type=GpuSurvey)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return GpuSurvey(reason="the probe for CUDA did not answer")


def trouble(config: NodeConfig, found: GpuSurvey) -> tuple[str, str]:
    """Why a node cannot have its executors, and what to do about it; empty if it can."""
    if config.gpu.device == "cuda" and not found.gpus:
        advice = 'install the driver and dormouse[cuda], or set [gpu] device = "auto" to emulate GPUs'
        return f"[gpu] device is 'cuda', but {found.reason}", advice
    if found.gpus and config.gpu.count > len(found.gpus):
        advice = 'set count lower, or to 0 for all of them, or device = "host" to emulate GPUs'
        return f"[gpu] count is {config.gpu.count}, but there are {len(found.gpus)} ({found.gpus[0]})", advice
    return "", ""


def counted(config: NodeConfig) -> NodeConfig:
    """The configuration with the number of executors that ``[gpu] count = 0`` stands for, and ``[start] cuda``. Raises
    ConfigError.
    """
    found = find(config)
    text, advice = trouble(config, found)
    if text:
        raise ConfigError(f"{text}; {advice}")
    if not found.gpus:
        return config
    return msgspec.structs.replace(
        config,
        gpu=msgspec.structs.replace(config.gpu, count=config.gpu.count or len(found.gpus)),
        start=msgspec.structs.replace(config.start, cuda=True),
    )
