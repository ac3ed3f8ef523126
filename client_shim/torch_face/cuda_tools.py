"""The fringes of `torch.cuda`: profiler marks, switches, the driver's library, allocators, several devices.

Functions that only observe do nothing; those that one device makes trivial do the trivial thing; the rest raise with
the reason.
"""

import contextlib
import errno
import importlib
import itertools
import socket
import sys
import threading
from typing import Any

import torch

from dormouse.client_shim import torch_private
from dormouse.client_shim.patches import nothing, patch, raising, raising_class
from dormouse.client_shim.torch_face import synchronizing
from dormouse.client_shim.torch_face.device_numbers import expect_first
from dormouse.client_shim.torch_face.import_hooks import when_imported


def refuse(what: str, instead: str) -> Any:
    """A function that raises, saying so."""
    return raising(_text(what, instead))


def _text(what: str, instead: str) -> str:
    return f"{what} cannot work in a Dormouse function: its process has no GPU and no CUDA library. {instead}"


def install() -> None:
    cuda: Any = torch.cuda
    plain = "Use PyTorch's own operations."
    allocator = "The GPU's memory is managed by its executor."
    driver = "The driver's figures are not visible here."
    answers: dict[str, Any] = {
        "get_sync_debug_mode": synchronizing.get_mode,
        "set_sync_debug_mode": synchronizing.set_mode,
        "get_allocator_backend": lambda: "native",
        "reset_accumulated_host_memory_stats": nothing,
        "reset_peak_host_memory_stats": nothing,
        "check_error": _check_error,
        "_sleep": nothing,
    }
    for name in ("temperature", "power_draw", "clock_rate", "utilization", "memory_usage", "list_gpu_processes"):
        answers[name] = refuse(f"torch.cuda.{name}()", driver)
    for name in ("current_blas_handle", "current_solver_handle"):
        answers[name] = refuse(f"torch.cuda.{name}()", plain)
    for name in (
        *("caching_allocator_alloc", "caching_allocator_delete", "caching_allocator_enable"),
        *("caching_allocator_disabled", "change_current_allocator", "use_mem_pool"),
        *("host_memory_stats", "host_memory_stats_as_nested_dict"),
    ):
        answers[name] = refuse(f"torch.cuda.{name}()", allocator)
    for name in ("memory_snapshot", "_record_memory_history", "_snapshot", "_dump_snapshot"):
        answers[name] = refuse(f"torch.cuda.memory.{name}()", f"{allocator} See torch.cuda.memory_summary().")
    for name in ("MemPool", "CUDAPluggableAllocator"):
        answers[name] = raising_class(name, _text(f"torch.cuda.{name}", allocator))
    answers["GreenContext"] = raising_class("GreenContext", _text("torch.cuda.GreenContext", plain), "create")
    for name, answer in answers.items():
        if hasattr(cuda, name):  # versions of torch differ
            patch(cuda, name, answer)
        if hasattr(cuda.memory, name):
            patch(cuda.memory, name, answer)
    _install_modules(cuda)
    _install_one_device()
    _install_backends()
    when_imported("torch.distributed.distributed_c10d", _install_process_groups)


def _install_modules(cuda: Any) -> None:
    patch(cuda.nvtx, "_nvtx", _Marks())
    for name in ("init", "start", "stop"):
        patch(cuda.profiler, name, nothing)
    patch(cuda.profiler, "profile", contextlib.nullcontext)
    patch(cuda.profiler, "cudart", cuda.cudart)
    collectives = ("all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter")
    for name in (*collectives, "init_rank", "unique_id", "version"):
        patch(cuda.nccl, name, refuse(f"torch.cuda.nccl.{name}()", "There is one device."))
    patch(cuda.nccl, "is_available", lambda tensors: False)
    for name in cuda.tunable.__all__:
        if name.endswith(("enable", "is_enabled")) or name.startswith("set_"):
            patch(cuda.tunable, name, _off)  # hints about speed
        else:
            patch(cuda.tunable, name, refuse(f"torch.cuda.tunable.{name}()", "Kernels are chosen by the executor."))
    files = "Read the file on the CPU and move the tensor."
    for name in ("gds_register_buffer", "gds_deregister_buffer"):
        patch(cuda.gds, name, refuse(f"torch.cuda.gds.{name}()", files))
    patch(cuda.gds, "GdsFile", raising_class("GdsFile", _text("torch.cuda.gds.GdsFile", files)))


def _install_backends() -> None:
    backend: Any = torch.backends.cuda
    patch(backend, "is_built", lambda: True)
    for name in ("blas_workspace_size", "cublas_workspace_size", "cublaslt_workspace_size"):
        if hasattr(backend, name):  # versions of torch differ
            refusal = refuse(f"torch.backends.cuda.{name}()", "The libraries are the executor's.")
            patch(backend, name, refusal)
    props = vars(backend.cuFFTPlanCache)  # which hold PyTorch's own functions
    patch(props["max_size"], "getter", lambda device: _Plans.most)
    patch(props["max_size"], "setter", _Plans.set_most)
    size = refuse("the size of cuFFT's plan cache", "The plans are the executor's.")
    patch(props["size"], "getter", size)
    patch(torch, "_cufft_clear_plan_cache", nothing)


class _Plans:
    """The number of cuFFT's plans that are kept. It changes speed only: remembered."""

    most = 4096  # cuFFT's own

    @classmethod
    def set_most(cls, device: int, most: int) -> None:
        cls.most = most


def _install_one_device() -> None:
    """The functions that `nn.DataParallel` and `torch.cuda.comm` call, for the only device there is."""
    patch(importlib.import_module("torch.nn.parallel.scatter_gather"), "Scatter", _Scatter)
    bindings = torch_private.bindings()
    patch(bindings, "_scatter", _scatter)
    for name in ("broadcast", "gather", "scatter"):  # which a torch for the CPU has not
        patch(bindings, f"_{name}_out", refuse(f"torch.cuda.comm.{name}() with out", "Copy to it, of one device."))
    patch(bindings, "_broadcast", lambda tensor, devices: [_to_one(tensor, devices)])
    patch(bindings, "_broadcast_coalesced", lambda tensors, devices, size: [[_to_one(t, devices) for t in tensors]])
    patch(bindings, "_gather", _gather)


def _install_process_groups(module: Any) -> None:
    real = module.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if backend is None or "nccl" in str(backend) or not _has_loopback():
            raise RuntimeError(
                f"a process group ({backend or 'nccl'}) cannot work in a Dormouse function: it is one process with one "
                "GPU, and has no network to others. Use the model without DistributedDataParallel or FSDP"
            )
        real(backend, *args, **kwargs)

    patch(module, "init_process_group", init_process_group)
    if "torch.distributed" in sys.modules:
        patch(sys.modules["torch.distributed"], "init_process_group", init_process_group)


def _has_loopback() -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", 1)) != errno.ENETUNREACH


class _Scatter:
    """PyTorch's makes a stream for each device by number, which a CPU build cannot."""

    @staticmethod
    def apply(devices: Any, chunk_sizes: Any, dim: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_to_one(tensor, devices),)


def _scatter(tensor: torch.Tensor, devices: Any, chunk_sizes: Any = None, dim: int = 0, *args: Any) -> list[Any]:
    moved = _to_one(tensor, devices)
    if chunk_sizes is not None and list(chunk_sizes) != [tensor.size(dim)]:
        raise RuntimeError(
            f"Expected sum of chunk_sizes to be the same as the size of the dimension {dim}, {tensor.size(dim)}, which "
            f"goes to one device, but got {list(chunk_sizes)}"
        )
    return [moved]


def _to_one(tensor: torch.Tensor, devices: Any) -> torch.Tensor:
    indices = [device if isinstance(device, int) else torch.device(device).index or 0 for device in devices]
    if indices != [0]:
        raise RuntimeError(f"a Dormouse function has one device, cuda:0; there are no devices {list(devices)}")
    return tensor.to("cuda")


def _gather(tensors: Any, dim: int, destination: Any = None) -> torch.Tensor:
    if destination not in (None, -1):
        expect_first(destination)
    return torch.cat(list(tensors), dim).to("cpu" if destination == -1 else "cuda")


def _check_error(res: int) -> None:
    if int(res) != 0:
        raise RuntimeError(f"CUDA error {int(res)}")


def _off(*args: Any, **kwargs: Any) -> bool:
    return False


class _Marks(threading.local):
    """NVTX, which nobody listens to: depths and handles are right, in each thread."""

    def __init__(self) -> None:
        self._depth = 0
        self._handles = itertools.count(1)

    def rangePushA(self, message: str) -> int:
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:
        self._depth = max(self._depth - 1, 0)
        return self._depth

    def rangeStartA(self, message: str) -> int:
        return next(self._handles)

    def deviceRangeStart(self, message: str, stream: int = 0) -> int:
        return next(self._handles)

    rangeEnd = deviceRangeEnd = markA = nothing
