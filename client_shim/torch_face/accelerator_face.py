"""Gives `torch.accelerator` the answers of `torch.cuda`: its Python asks the C++ module, whose functions are replaced
here.
"""

from typing import Any

import torch

from dormouse.client_shim import torch_private
from dormouse.client_shim.commands import metas
from dormouse.client_shim.patches import patch
from dormouse.client_shim.torch_face import cuda_streams


def install() -> None:
    """After `torch.cuda` is patched, which these ask."""
    cuda: Any = torch.cuda

    def exchange(index: int) -> int:
        if index >= 0:
            cuda.set_device(index)
        return 0

    answers: dict[str, Any] = {
        "getAccelerator": lambda: torch.device("cuda"),
        "getDeviceIndex": lambda: 0,
        "setDeviceIndex": exchange,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": exchange,
        "hooks_device_count": lambda: 1,
        "hooks_get_current_device": lambda: 0,
        "hooks_set_current_device": exchange,
        "hooks_exchange_device": exchange,
        "hooks_maybe_exchange_device": exchange,
        "getStream": lambda index: cuda.current_stream(index),
        "setStream": lambda stream: cuda.set_stream(stream),
        "synchronizeDevice": lambda index: cuda.synchronize(index),
        "getDeviceCapability": _capability,
        "isAllocatorInitialized": lambda: True,
        "getDeviceStats": lambda index: nested(cuda.memory_stats(index)),
        "getMemoryInfo": lambda index: cuda.mem_get_info(index),
        "emptyCache": lambda: cuda.empty_cache(),
        "emptyHostCache": lambda: None,
        "resetAccumulatedStats": lambda index: cuda.reset_accumulated_memory_stats(index),
        "resetPeakStats": lambda index: cuda.reset_peak_memory_stats(index),
    }
    bindings = torch_private.bindings()
    for name, answer in answers.items():
        if hasattr(bindings, f"_accelerator_{name}"):  # emptyHostCache is new in 2.12
            patch(bindings, f"_accelerator_{name}", answer)
    patch(bindings, "_get_accelerator", lambda check=None: torch.device("cuda"))
    patch(torch.accelerator, "Graph", cuda_streams.CUDAGraph)


def _capability(index: int) -> dict[str, Any]:
    return {"supported_dtypes": set(metas.SUPPORTED)}


def nested(stats: dict[str, int]) -> dict[str, Any]:
    """The result of `torch.cuda.memory_stats`, as it was before PyTorch flattened it."""
    tree: dict[str, Any] = {}
    for name, value in stats.items():
        *path, last = name.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return tree
