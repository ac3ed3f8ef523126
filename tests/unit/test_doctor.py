"""What `dormouse doctor` says of GPUs: which device is chosen, and why CUDA is not."""

import json
import subprocess
import sys
from typing import Any

import pytest

from dormouse.core import doctor, gpus
from dormouse.core.config import GpuSection, NodeConfig
from dormouse.core.gpus import counted
from dormouse.schemas.errors import ConfigError

RUN = subprocess.run


def config(device: str = "auto", count: int = 0) -> NodeConfig:
    return NodeConfig(gpu=GpuSection(device=device, count=count))


def gpu(device: str = "auto", count: int = 0) -> tuple[doctor.Finding, int]:
    wanted = config(device, count)
    return doctor._cuda(wanted, gpus.find(wanted))


def answering(monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
    told = {"gpus": [], "driver": "13.0", "bindings": "13.5.0", "reason": "", "places": [], **found}
    program = f"print({json.dumps(told)!r})"

    def instead(arguments: list[str], **settings: Any) -> Any:
        assert arguments == [sys.executable, "-m", "dormouse.gpuserver.cuda.probe"]
        return RUN([sys.executable, "-I", "-c", program], **settings)

    monkeypatch.setattr(subprocess, "run", instead)


def test_no_gpu_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, reason="no driver: libcuda.so.1 is not there")
    finding, count = gpu()
    assert (finding.state, count) == ("ok", 0)
    assert finding.found == "emulated in host memory: no driver: libcuda.so.1 is not there"
    finding, count = gpu("cuda")
    assert finding.state == "fail"
    assert "no driver: libcuda.so.1 is not there" in finding.found
    assert 'device = "auto"' in finding.advice


def test_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, gpus=["NVIDIA H200", "NVIDIA H200"])
    finding, count = gpu()
    assert (finding.state, finding.found, count) == ("ok", "2 x NVIDIA H200, CUDA 13.0, cuda-bindings 13.5.0", 2)
    finding, count = gpu(count=1)
    assert (finding.state, count) == ("ok", 2)
    assert finding.found.endswith("; [gpu] count takes 1 of them")


def test_more_than_there_are_is_refused_by_up_as_by_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, gpus=["NVIDIA H200", "NVIDIA H200"])
    for device in ("auto", "cuda"):
        finding, count = gpu(device, count=3)
        assert (finding.state, finding.found, count) == ("fail", "[gpu] count is 3, but there are 2 (NVIDIA H200)", 2)
        with pytest.raises(ConfigError, match=r"count is 3, but there are 2 .*; set count lower, or to 0 for all"):
            counted(config(device, 3))
    assert counted(config("host", 3)).gpu_count == 3


def test_one_executor_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, gpus=["NVIDIA H200"] * 8)
    assert counted(config()).gpu_count == 8
    assert counted(config(count=3)).gpu_count == 3
    answering(monkeypatch, reason="none")
    assert counted(config()) == config()
    with pytest.raises(ConfigError, match="'cuda', but none; install the driver"):
        counted(config("cuda"))


def test_emulation_that_was_asked_for_probes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it looked"))
    assert gpu("host")[0].found == "emulated in host memory: [gpu] device is 'host'"


def test_a_probe_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "CUDA_PROBE", "dormouse.gpuserver.cuda.nowhere")
    assert "did not answer" in gpu()[0].found


def test_the_real_probe_on_this_machine() -> None:
    finding, count = gpu()
    assert finding.name == "gpu"
    assert ("emulated in host memory: " in finding.found) == (count == 0)


def test_real_gpus_take_no_host_memory() -> None:
    large = NodeConfig(gpu=GpuSection(memory="1000TiB"))
    assert doctor._memory(large, 0).state == "fail"
    assert doctor._memory(large, 1).state == "ok"
    assert "emulated" not in doctor._memory(large, 1).found
