"""What codes of the driver mean, and whether there is a GPU at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_child import cuda_server, in_child
from fake_cuda.harness import Control

from dormouse.gpuserver.device.cuda.probe import probe

__all__ = ["cuda_server"]


def test_without_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    found = probe()
    assert not found.gpus
    assert "install dormouse[cuda]" in found.reason


@pytest.mark.parametrize("before", ["", "sys.modules['cuda'] = None; "])
def test_the_probe_as_a_program_loads_no_torch(before: str) -> None:
    """On this machine, whatever it has, and without CUDA's bindings; doctor reads this line."""
    code = (
        f"import sys; {before}from dormouse.gpuserver.device.cuda import probe; probe.main(); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"gpus", "driver", "bindings", "reason", "places"}
    assert bool(found["gpus"]) != bool(found["reason"])
    assert not before or "install dormouse[cuda]" in found["reason"]


@in_child(FAKE_CUDA_DEVICES=2)
def test_a_driver_with_gpus(control: Control) -> None:
    found = probe()
    assert len(found.gpus) == 2
    assert found.reason == ""
    assert found.bindings
    assert found.driver.count(".") == 1


@in_child()
def test_a_torch_without_cuda(control: Control) -> None:
    """A GPU that torch cannot use is none, unless device memory is the fake's."""
    from dormouse.gpuserver.device.cuda import probe as module
    from dormouse.gpuserver.device.cuda import torch_adapter
    from dormouse.gpuserver.device.cuda.streams import CudaContext
    from dormouse.gpuserver.device.protocol import DeviceError

    vars(module)["version_of"] = lambda distribution: "2.13.0+cpu"
    assert probe().gpus
    for user in (module, torch_adapter):
        vars(user)["device_memory_is_host_memory"] = lambda: False
    assert probe().gpus == ()
    assert "torch 2.13.0+cpu is built without CUDA" in probe().reason
    with pytest.raises(DeviceError, match="cannot use it; install a build of torch with CUDA"):
        torch_adapter.torch_adapter(CudaContext(0), 0, 0, 0)
    vars(module)["version_of"] = lambda distribution: "2.11.0"
    assert probe().gpus


@in_child()
def test_a_driver_without_gpus(control: Control) -> None:
    for function, code, reason in (
        ("cuInit", 100, "cuInit gives CUDA_ERROR_NO_DEVICE (100)"),
        ("cuInit", 803, "cuInit gives"),
        ("cuDeviceGetCount", 999, "cuDeviceGetCount gives"),
        ("cuInit", 65535, "the driver refuses"),
    ):
        control.fail(function, 1, code)
        found = probe()
        assert found.gpus == ()
        assert reason in found.reason
        assert str(code) in found.reason
        assert "CUDA_VISIBLE_DEVICES" not in found.reason
    for value in ("", "GPU-1234"):
        os.environ["CUDA_VISIBLE_DEVICES"] = value
        control.fail("cuInit", 1, 100)
        assert f"(CUDA_VISIBLE_DEVICES is {value!r}: unset it, or name others)" in probe().reason


@in_child()
def test_a_driver_that_is_older_than_torch(control: Control) -> None:
    from dormouse.gpuserver.device.cuda import probe as module

    vars(module)["torch_cuda"] = lambda: "14.1"
    assert probe().gpus == ()
    assert "its driver does CUDA 13.0, and torch" in probe().reason
    assert "is for 14.1: install a newer driver, or a torch for CUDA 13" in probe().reason
    vars(module)["torch_cuda"] = lambda: "13.9"  # the same major version will do
    assert probe().gpus


def test_what_torch_is_built_for_is_read_without_importing_it(tmp_path: Path) -> None:
    code = (
        "import sys; from dormouse.gpuserver.device.cuda.probe import torch_cuda; found = torch_cuda(); "
        "assert 'torch' not in sys.modules; print(found)"
    )
    ours = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ours.stdout.strip() == (torch.version.cuda or ""), ours.stderr
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for line, cuda in (("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = '12.8'", "12.8"), ("cuda = None", "")):
        (package / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip = None\n")
        paths = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        other = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
        )
        assert other.stdout.strip() == cuda, other.stderr


@in_child()
def test_only_named_codes_are_refusals(control: Control) -> None:
    from dormouse.gpuserver.device.cuda import driver
    from dormouse.gpuserver.device.protocol import DeviceLost

    driver.initialise()
    driver.set_current(driver.retain_primary(driver.device(0)))
    for code in (1, 2, 217, 304, 712, 800, 801):
        control.fail("cuStreamCreate", 1, code)
        control.fail("cuStreamCreateWithPriority", 1, code)
        with pytest.raises(driver.DriverRefused, match=rf"cuStreamCreate: .*\({code}\)") as refused:
            driver.create_stream()
        assert refused.value.code == code
        control.fail("cuStreamCreate", 1, 0)
        control.fail("cuStreamCreateWithPriority", 1, 0)
    event = driver.create_event()
    stream = driver.create_stream()
    driver.fill(driver.allocate(4096), 0, 4096, stream)
    driver.record_event(event, stream)
    assert not driver.event_passed(event)
    driver.synchronize_event(event)
    assert driver.event_passed(event)
    for code in (3, 201, 214, 700, 719, 999, 65535):
        driver._lost = None
        control.fail("cuMemGetInfo", 1, code)
        with pytest.raises(DeviceLost, match=rf"cuMemGetInfo: .*{code}"):
            driver.memory_info()
        with pytest.raises(DeviceLost, match=rf"cuMemGetInfo: .*{code}"):
            driver.create_event()


@in_child()
def test_what_can_be_gone_without_is_refused_by_any_code_if_the_context_works(control: Control) -> None:
    from dormouse.gpuserver.device.cuda import driver
    from dormouse.gpuserver.device.protocol import DeviceLost

    driver.initialise()
    driver.set_current(driver.retain_primary(driver.device(0)))
    for code in (201, 401, 719, 999, 65535):
        control.fail("cuMemHostRegister", 1, code)
        with pytest.raises(driver.DriverRefused, match=rf"cuMemHostRegister: .*{code}"):
            driver.register(4096, 4096)
        assert driver.lost() is None
    for broken in (999, 65535):  # what the context answers when it is asked
        driver._lost = None
        control.fail("cuMemHostRegister", 1, 999)
        control.fail("cuCtxSynchronize", 1, broken)
        with pytest.raises(DeviceLost, match=r"cuMemHostRegister: .*\(999\)"):
            driver.register(4096, 4096)


@in_child()
def test_a_function_that_the_driver_lacks_is_refused(control: Control) -> None:
    from dormouse.gpuserver.device.cuda import driver

    driver.initialise()
    with pytest.raises(driver.DriverRefused, match="cuGraphCreate"):
        driver.call("cuGraphCreate", 0)
