"""Memory figures of `torch.cuda`: this function's own, from the shim's state.

Allocated are the bytes of its live storages, its model's included, whether a GPU holds them now or sleeps; a tensor to
which nothing was written takes none. Free is the rest of the device: other functions' bytes there are evicted for this
one. Figures that only the executor's allocator knows are refused by name.
"""

from typing import Any, NoReturn

from dormouse.client_shim.commands.room import Room
from dormouse.client_shim.patches import nothing, patch
from dormouse.client_shim.torch_face.accelerator_face import nested
from dormouse.client_shim.torch_face.device_numbers import expect_device
from dormouse.client_shim.torch_face.remote_tensor import world


class _Shown:
    total_nbytes = 0
    fraction = 1.0


class Stats(dict[str, int]):
    """`torch.cuda.memory_stats()`."""

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(
            f"{name}: a Dormouse function's memory_stats() has {', '.join(self)}; the GPU's memory is managed by its "
            "executor"
        )


def allocated(device: Any = None) -> int:
    expect_device(device)
    return world.stream.held_nbytes if world.stream is not None else 0


def peak(device: Any = None) -> int:
    expect_device(device)
    return world.stream.peak_nbytes if world.stream is not None else 0


def _reset_peak(device: Any = None) -> None:
    expect_device(device)
    if world.stream is not None:
        world.stream.reset_peak()


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    return max(0, _Shown.total_nbytes - allocated(device)), _Shown.total_nbytes


def _stats(device: Any = None) -> Stats:
    kinds = {"current": allocated(device), "peak": peak(device)}
    names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    figures = {f"{name}.all.{kind}": nbytes for name in names for kind, nbytes in kinds.items()}
    return Stats(figures | {"num_alloc_retries": 0, "num_ooms": Room.refused})


def _reset_accumulated(device: Any = None) -> None:
    expect_device(device)
    Room.refused = 0


def _allow_fraction(fraction: float, device: Any = None) -> None:
    """More than that part of the device raises `OutOfMemoryError`."""
    expect_device(device)
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    patch(_Shown, "fraction", fraction)
    _allow()


def _fraction(device: Any = None) -> float:
    expect_device(device)
    return _Shown.fraction


def _allow() -> None:
    patch(Room, "allowed_nbytes", int(_Shown.total_nbytes * _Shown.fraction) if _Shown.fraction < 1 else 1 << 62)
    if world.stream is not None:
        world.stream.allow()


def connect(total_nbytes: int) -> None:
    patch(_Shown, "total_nbytes", total_nbytes)
    _allow()


def answers() -> dict[str, Any]:
    """By the names that `torch.cuda` and `torch.cuda.memory` have for them."""
    found: dict[str, Any] = {
        "empty_cache": nothing,
        "mem_get_info": _mem_get_info,
        "memory_stats": _stats,
        "memory_stats_as_nested_dict": lambda device=None: nested(_stats(device)),
        "memory_summary": lambda device=None, abbreviated=False: (
            f"cuda:0: {allocated(device)} bytes allocated, {peak(device)} at most"
        ),
        "device_memory_used": allocated,
        "reset_accumulated_memory_stats": _reset_accumulated,
        "set_per_process_memory_fraction": _allow_fraction,
        "get_per_process_memory_fraction": _fraction,
    }
    for name in ("memory_allocated", "memory_reserved", "memory_cached"):
        found |= {name: allocated, f"max_{name}": peak}
    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"):
        found[name] = _reset_peak
    return found
