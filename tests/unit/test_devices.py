"""Which device an executor gets, and the reason that it gives."""

from pathlib import Path

import pytest
from cuda_child import cuda_server, in_child
from fake_cuda.harness import Control

from dormouse.core.config import GpuSection, NodeConfig
from dormouse.gpuserver.device import opening as devices
from dormouse.gpuserver.device.cuda.probe import Probe
from dormouse.gpuserver.device.host.device import HostDevice
from dormouse.schemas.errors import ConfigError

__all__ = ["cuda_server"]


def config(**settings: str | int) -> NodeConfig:
    return NodeConfig(gpu=GpuSection(**{"memory": "16MiB", **settings}))  # type: ignore[arg-type]


def test_without_a_gpu_it_is_emulated_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "probe", lambda: Probe(reason="no driver: none"))
    device, reason = devices.open_device(config(pool="pages", link="1GB"), 0, tmp_path)
    assert isinstance(device, HostDevice)
    assert (reason, device.strategy) == ("no driver: none", "pages")
    device.set_activation_limit(1 << 62)
    device.close()
    with pytest.raises(ConfigError, match="device is 'cuda', but no driver: none"):
        devices.open_device(config(device="cuda"), 0, tmp_path)


def test_emulation_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "probe", lambda: pytest.fail("it looked"))
    choice = devices.choose_device(config(device="host"), 0)
    assert (choice.cuda, choice.pool, choice.reason) == (False, "regions", "[gpu] device is 'host'")


def test_more_executors_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "probe", lambda: Probe(("A GPU",), "13.0", "13.5.0"))
    assert devices.choose_device(config(), 0) == devices.DeviceChoice(
        True, "regions", "A GPU, CUDA 13.0, cuda-bindings 13.5.0"
    )
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match="finds only 1 GPUs, and this is number 1, from 0"):
            devices.choose_device(config(device=device), 1)
    assert not devices.choose_device(config(device="host"), 1).cuda


@in_child()
def test_a_gpu_is_used(control: Control) -> None:
    device, reason = devices.open_device(config(activations="6MiB", pool="pages"), 0, Path("/"))
    assert "cuda-bindings" in reason
    assert device.strategy == "pages"
    assert device.pool_nbytes == 10 << 20
    assert device.activation_stats()[2] == 6 << 20
    assert control.live("handles") == 5
    device.close()
