"""What `dormouse doctor` says of GPUs: which device is chosen, and why CUDA is not."""

import json
import subprocess
import sys
from typing import Any

import pytest

from dormouse.core import doctor
from dormouse.core.config import GpuSection, NodeConfig

GIB = 1 << 30


def gpu(device: str = "auto", count: int = 0) -> tuple[doctor.Finding, int]:
    return doctor._cuda(NodeConfig(gpu=GpuSection(device=device, count=count)))


def answering(monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
    told = {"gpus": [], "driver": "13.0", "bindings": "13.5.0", "reason": "", **found}
    program = f"print({json.dumps(told)!r})"
    run = subprocess.run

    def instead(arguments: list[str], **settings: Any) -> Any:
        assert arguments == [sys.executable, "-m", "dormouse.gpuserver.cuda.probe"]
        return run([sys.executable, "-I", "-c", program], **settings)

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
    finding, count = gpu(count=3)
    assert (finding.state, count) == ("warn", 2)
    assert "[gpu] count is 3" in finding.found


def test_emulation_that_was_asked_for_probes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it looked"))
    assert gpu("host")[0].found == "emulated in host memory: [gpu] device is 'host'"


def test_a_probe_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CUDA_PROBE", "dormouse.gpuserver.cuda.nowhere")
    assert "did not answer" in gpu()[0].found


def test_the_real_probe_on_this_machine() -> None:
    finding, count = gpu()
    assert finding.name == "gpu"
    assert ("emulated in host memory: " in finding.found) == (count == 0)


def test_real_gpus_take_no_host_memory() -> None:
    config = NodeConfig(gpu=GpuSection(memory="1000TiB"))
    assert doctor._memory(config, 0).state == "fail"
    assert doctor._memory(config, 1).state == "ok"
    assert "emulated" not in doctor._memory(config, 1).found
