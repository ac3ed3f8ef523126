"""`torch.cuda` and its surroundings as a program in a sandbox sees them."""

import importlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

CUDA = "cuda"


def test_one_device_from_the_snapshot(loopback: Any) -> None:
    cuda: Any = torch.cuda
    assert cuda.is_available()
    assert (cuda.device_count(), cuda.current_device(), cuda.is_initialized()) == (1, 0, True)
    assert cuda.get_device_name() == cuda.get_device_properties(0).name == "Dormouse virtual GPU"
    assert cuda.get_device_capability("cuda:0") == (8, 0)
    assert cuda.get_device_properties().total_memory == 8 << 30
    assert cuda.mem_get_info() == (8 << 30, 8 << 30)
    assert cuda.is_bf16_supported()
    assert cuda.memory_allocated() == 0
    assert loopback.node.acquired == 0, "no question needs a GPU"
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        cuda.get_device_name(1)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(1, device="cuda:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device="cuda:3")


def test_memory_figures_come_from_the_executor_while_leased(loopback: Any) -> None:
    loopback.begin_lease()
    assert torch.cuda.memory_allocated() == 1000
    assert torch.cuda.max_memory_allocated() == 2000
    assert torch.cuda.mem_get_info() == (3000, 8 << 30)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()


def test_streams_and_events(loopback: Any) -> None:
    cuda: Any = torch.cuda
    side = cuda.Stream()
    x = torch.ones(3).to(CUDA)
    with cuda.stream(side):
        y = x + 1
    torch.cuda.current_stream().wait_stream(side)
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    (y * 2).sum()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0
    assert end.query()
    y.record_stream(side)
    with torch.cuda.device(0):
        assert y.tolist() == [2.0] * 3


def test_what_cannot_work_says_why(loopback: Any) -> None:
    cpp_extension: Any = importlib.import_module("torch.utils.cpp_extension")

    with pytest.raises(RuntimeError, match="CUDA graphs cannot be captured"):
        torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="C\\+\\+ or CUDA extension"):
        cpp_extension.load_inline("x", "")
    with pytest.raises(RuntimeError, match="only dense CPU tensors"):
        torch.ones(2, device=CUDA).pin_memory()


def test_compile_is_eager(loopback: Any) -> None:
    @torch.compile
    def one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @torch.compile(mode="max-autotune")
    def two(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    assert two(one(torch.ones(1, device=CUDA))).item() == 4


def test_weights_load_straight_to_cuda(loopback: Any, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import load_file, save_file

    weights = {"a": torch.randn(3, 4), "b": torch.arange(5)}
    buffer = io.BytesIO()
    shared = torch.ones(2)
    torch.save({"state": weights, "one": shared, "two": shared}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, map_location="cuda")
    assert loaded["state"]["a"].is_cuda
    assert loaded["one"] is loaded["two"]
    path = tmp_path / "weights.safetensors"
    save_file(weights, path)
    for read in (load_file(path, device="cuda"), load_file(path, device="cuda:0")):
        assert read["a"].is_cuda
    assert loopback.node.acquired == 0
    for read in (load_file(path, device="cuda"), load_file(path, device="cuda:0")):
        assert torch.equal(read["a"].cpu(), weights["a"])
    with safetensors.safe_open(path, "pt", device="cuda") as file:
        assert file.get_tensor("b").is_cuda
        assert torch.equal(file.get_slice("a")[1:, :2].cpu(), weights["a"][1:, :2])
    save_file({"x": loaded["state"]["a"]}, path)
    assert torch.equal(load_file(path)["x"], weights["a"])


def test_an_unknown_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dormouse.client_shim import torch_private

    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    with pytest.raises(torch_private.UnsupportedTorch, match=r"2\.11, 2\.12, 2\.13.*2\.5\.1"):
        torch_private.check_version()


def test_leaving_puts_everything_back(loopback: Any) -> None:
    assert torch.cuda.is_available()
    loopback.close()
    assert not torch.cuda.is_available()
    assert isinstance(torch.zeros(1).data, torch.Tensor)


def test_preparing_starts_no_thread_and_does_not_import_the_compiler() -> None:
    code = (
        "import threading, sys, os; from dormouse.client_shim.install import prepare; prepare(); "
        "print(threading.active_count(), 'torch._dynamo' in sys.modules, len(os.listdir('/proc/self/task')))"
    )
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    output = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert output.split() == ["1", "False", "1"]


def test_a_jiterator_kernel_may_be_made_but_not_called(loopback: Any) -> None:
    kernel = torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")
    with pytest.raises(RuntimeError, match="no GPU"):
        kernel(torch.ones(1, device="cuda"))
