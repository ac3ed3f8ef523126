"""What `dormouse doctor` says of GPUs: which device is chosen, and why CUDA is not."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from dormouse.core import gpus, torchbuild
from dormouse.core.cli import doctor
from dormouse.core.config import GpuSection, NodeConfig, NodeSection, SandboxSection
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
        assert arguments == [sys.executable, "-m", "dormouse.gpuserver.device.cuda.probe"]
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
    monkeypatch.setattr(gpus, "CUDA_PROBE", "dormouse.gpuserver.device.cuda.nowhere")
    assert "did not answer" in gpu()[0].found


def test_the_real_probe_on_this_machine() -> None:
    finding, count = gpu()
    assert finding.name == "gpu"
    assert ("emulated in host memory: " in finding.found) == (count == 0)


def test_who_starts_a_node_reads_what_its_machine_has_not() -> None:
    wanted = NodeConfig(
        gpu=GpuSection(device="host", count=1, memory="900TiB"), sandbox=SandboxSection(read=("/", "/no/where"))
    )
    memory, read = doctor.too_large(wanted)
    assert memory.startswith("memory: ")
    assert "that is more than the machine has; set [gpu] memory, count or [limits] host lower" in memory
    assert read == "[sandbox] read has /no/where, which is not there"
    assert doctor.too_large(NodeConfig(gpu=GpuSection(device="host", count=1, memory="1MiB"))) == []


def test_real_gpus_take_no_host_memory() -> None:
    large = NodeConfig(gpu=GpuSection(memory="1000TiB"))
    assert doctor._memory(large, 0).state == "fail"
    assert doctor._memory(large, 1).state == "ok"
    assert "emulated" not in doctor._memory(large, 1).found


def state(capability: tuple[int, int] = (9, 0), error: str = "", free: int = 80 << 30) -> gpus.GpuState:
    return gpus.GpuState(capability=capability, error=error, free_nbytes=free, total_nbytes=80 << 30)


KERNELS = ("sm_75", "sm_80", "sm_86", "sm_90a", "sm_120", "compute_120")


def test_a_torch_without_kernels_for_a_gpu_is_named() -> None:
    found = gpus.GpuSurvey(("Tesla V100", "NVIDIA H200"), states=(state((7, 0)), state()))
    [finding] = doctor._gpus(found, KERNELS)
    assert (finding.name, finding.state) == ("gpu 0", "fail")
    assert finding.found == f"torch has no kernels for Tesla V100 (7.0), only {' '.join(KERNELS)}"
    assert finding.advice == "install a torch that is built for it"
    assert doctor._gpus(found, ()) == []  # a torch without CUDA is another finding
    filled = gpus.GpuSurvey(("Tesla V100",), states=(state((7, 0), free=20 << 30),))
    assert [finding.state for finding in doctor._gpus(filled, KERNELS)] == ["warn", "fail"]
    broken = gpus.GpuSurvey(("Tesla V100",), states=(state((0, 0), error="it is broken"),))
    assert [finding.found for finding in doctor._gpus(broken, KERNELS)] == ["it is broken"]


@pytest.mark.parametrize(
    ("capability", "covered"),
    [("7.5", True), ("8.0", True), ("8.9", True), ("9.0", True), ("7.0", False), ("10.0", False), ("13.1", True)],
)
def test_kernels_run_on_later_minor_versions_and_are_compiled_for_later_gpus(capability: str, covered: bool) -> None:
    major, minor = map(int, capability.split("."))
    assert torchbuild.covers(KERNELS, (major, minor)) == covered


def test_a_part_of_a_gpu_is_named() -> None:
    [finding] = doctor._gpus(gpus.GpuSurvey(("NVIDIA H100 MIG 1g.10gb",), states=(state(),)), ())
    assert (finding.name, finding.state) == ("gpu 0", "ok")
    assert "is a part of a GPU (MIG), of which CUDA shows a process one alone" in finding.found
    assert "CUDA_VISIBLE_DEVICES" in finding.advice


def test_a_gpu_that_others_have_filled_or_that_is_broken_is_named() -> None:
    states = (state(free=30 << 30), state(error="it is broken"), state(free=79 << 30))
    found = gpus.GpuSurvey(("A", "B", "C"), states=states)
    filled, broken = doctor._gpus(found, ())
    assert (filled.name, filled.state) == ("gpu 0", "warn")
    assert filled.found == "50.0 GiB of 80.0 GiB are held by other processes"
    assert (broken.name, broken.state, broken.found) == ("gpu 1", "warn", "it is broken")
    [alone] = doctor._gpus(gpus.GpuSurvey(("B",), states=(state(error="it is broken"),)), ())
    assert (alone.state, alone.advice) == ("fail", "no GPU can be used")


def test_builds_of_torch_are_told_by_their_files(tmp_path: Path) -> None:
    """The version of the ordinary build says of CUDA what pip's does not."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda: str = '13.0'\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec env PYTHONPATH={tmp_path} {sys.executable} -P "$2" "$3"\n')
    python.chmod(0o755)
    builds = torchbuild.builds(NodeConfig(sandbox=SandboxSection(python=str(python))))
    assert str(builds["sandbox"]) == "torch 2.13.0+cu130 for CUDA 13.0"
    assert builds["node"] == torchbuild.Build(torch.__version__, torch.version.cuda or "")
    nowhere = torchbuild.builds(NodeConfig(sandbox=SandboxSection(python=str(tmp_path / "nowhere"))))
    assert nowhere["sandbox"] == torchbuild.Build()


@pytest.mark.parametrize(
    ("pool", "root", "uid", "tenants", "state", "advice"),
    [
        ("pages", True, "auto", "many", "ok", ""),
        ("auto", True, "auto", "many", "ok", ""),  # it is pages by then
        ("buddy", True, "auto", "many", "warn", 'pool = "pages"'),
        ("regions", True, "auto", "one", "ok", 'pool = "pages"'),
        ("pages", False, "auto", "many", "warn", "as root"),
        ("pages", True, "same", "many", "warn", "as root"),
    ],
)
def test_language_models_that_cannot_be_kept_apart_are_named(
    monkeypatch: pytest.MonkeyPatch, pool: str, root: bool, uid: str, tenants: str, state: str, advice: str
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0 if root else 1000)
    node = NodeConfig(gpu=GpuSection(pool=pool), sandbox=SandboxSection(uid=uid), node=NodeSection(tenants=tenants))
    found = doctor._models(node)
    assert (found.state, bool(found.advice)) == (state, bool(advice))
    assert advice in found.advice


def test_the_pool_is_named_also_where_it_is_chosen(tmp_path: Path) -> None:
    node = NodeConfig(node=NodeSection(state=str(tmp_path)))
    assert doctor._pool(node).found.startswith("regions, and pages once")
    (tmp_path / "language-models").touch()
    assert doctor._pool(node).found.startswith("pages, because")
    set_ = NodeConfig(node=NodeSection(state=str(tmp_path)), gpu=GpuSection(pool="buddy"))
    assert doctor._pool(set_).found == "buddy"


@pytest.mark.parametrize(
    ("compiler", "headers", "fast", "gpus", "state", "found"),
    [
        (True, True, True, 0, "ok", "g++: activations are counted exactly, and operations are recorded and run by C++"),
        (True, True, True, 1, "ok", "g++: operations are recorded and run by C++"),
        (True, True, False, 1, "ok", "g++: Python records and runs each operation, because [gpu] fast_path is false"),
        (True, False, True, 1, "warn", "g++: Python records and runs each operation, because its headers are missing"),
        (
            False,
            True,
            True,
            0,
            "warn",
            "none: activations are counted approximately, and Python records and runs each operation",
        ),
        (False, True, True, 1, "warn", "none: Python records and runs each operation"),
    ],
)
def test_who_runs_operations_is_told(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    compiler: bool,
    headers: bool,
    fast: bool,
    gpus: int,
    state: str,
    found: str,
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: name if compiler and name == "g++" else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    if headers:
        (tmp_path / "Python.h").touch()
    finding = doctor._compiler(NodeConfig(gpu=GpuSection(fast_path=fast)), gpus)
    assert (finding.state, finding.found, bool(finding.advice)) == (state, found, state == "warn")
