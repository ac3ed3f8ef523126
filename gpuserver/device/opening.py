"""Decides which device an executor drives: a GPU where CUDA finds one, else an emulated one; and gives the reason.

Imports nothing of CUDA unless it is chosen.
"""

from dataclasses import dataclass
from pathlib import Path

from dormouse.core.config import NodeConfig, parse_nbytes
from dormouse.gpuserver.device.cuda.probe import probe
from dormouse.gpuserver.device.host.device import HostDevice
from dormouse.gpuserver.device.host.links import emulated_links
from dormouse.gpuserver.device.protocol import Device
from dormouse.schemas.errors import ConfigError


@dataclass(frozen=True)
class DeviceChoice:
    """``pool`` is the strategy; ``reason`` says, for a person, why CUDA is used or not."""

    cuda: bool
    pool: str
    reason: str


def choose_device(config: NodeConfig, index: int) -> DeviceChoice:
    """For executor ``index``. Raises ConfigError if it is one of more than there are, or none where ``[gpu] device =
    "cuda"`` wants one: core/gpus.py refuses that before an executor is started.
    """
    pool = config.pool
    if config.gpu.device == "host":
        return DeviceChoice(False, pool, "[gpu] device is 'host'")
    found = probe()
    if index < len(found.gpus):
        return DeviceChoice(True, pool, f"{found.gpus[index]}, CUDA {found.driver}, cuda-bindings {found.bindings}")
    if found.gpus:
        raise ConfigError(f"the driver finds only {len(found.gpus)} GPUs, and this is number {index}, from 0")
    if config.gpu.device == "cuda":
        raise ConfigError(f"[gpu] device is 'cuda', but {found.reason}")
    return DeviceChoice(False, pool, found.reason)


def open_device(config: NodeConfig, index: int, directory: Path) -> tuple[Device, str]:
    """The device of executor ``index``, and why it is that one. ``directory`` is shared by the node's processes.

    Raises ConfigError, DeviceError, DeviceLost.
    """
    choice = choose_device(config, index)
    gpu = config.gpu
    if choice.cuda:
        from dormouse.gpuserver.device.cuda.device import CudaDevice

        cuda = CudaDevice(
            index,
            memory_nbytes=parse_nbytes(gpu.memory) if gpu.memory else 0,
            activation_nbytes=parse_nbytes(gpu.activations) if gpu.activations else 0,
            pool=choice.pool,
            threads=config.gpu_threads,
            poison=gpu.poison,
        )
        return cuda, choice.reason
    links, peer_links = emulated_links(config, index, directory)
    host = HostDevice(
        config.gpu_nbytes,
        threads=config.gpu_threads,
        links=links,
        peer_links=peer_links,
        poison=gpu.poison,
        pool=choice.pool,
    )
    return host, choice.reason
