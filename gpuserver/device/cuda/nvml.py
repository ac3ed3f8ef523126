"""Shared PCIe switches and NVLinks of the GPUs, as NVML reports them. Looks, takes nothing, never raises.

NVML is called by ctypes, not by ``cuda.bindings.nvml``, which the oldest supported bindings do not have. GPUs are known
by UUID: NVML counts all of the machine in an order of its own, CUDA those of CUDA_VISIBLE_DEVICES.
"""

import ctypes
from typing import Final

from dormouse.schemas.messages import GpuPlace

LIBRARY: Final = "libnvidia-ml.so.1"

SWITCHES: Final = 20
"""NVML_TOPOLOGY_MULTIPLE: a path through PCIe switches only, not through a host bridge. GPUs that have one between them
reach the host over one port.
"""

NVLINK: Final = 2
"""NVML_P2P_CAPS_INDEX_NVLINK: also true of GPUs that NVSwitches connect."""

MAX_GPUS: Final = 256
UUID_NBYTES: Final = 96


class NvmlRefused(Exception):
    """NVML answered a call with an error."""


class Nvml:
    """One session with the library."""

    def __init__(self) -> None:
        """Raises OSError, AttributeError (a library that lacks a function) or Refused."""
        self._c = ctypes.CDLL(LIBRARY)
        self._c.nvmlErrorString.restype = ctypes.c_char_p
        self._call("nvmlInit_v2")

    def close(self) -> None:
        self._c.nvmlShutdown()

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._c, name)(*arguments)
        if code:
            text = (self._c.nvmlErrorString(code) or b"").decode(errors="replace")
            raise NvmlRefused(f"{name} gives {text or 'an unknown error'} ({code})")

    def devices(self) -> dict[str, ctypes.c_void_p]:
        """Handles by UUID, without GPUs that this process may not ask."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found: dict[str, ctypes.c_void_p] = {}
        refusal: NvmlRefused | None = None
        for index in range(min(count.value, MAX_GPUS)):
            handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(UUID_NBYTES)
            try:
                self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
                self._call("nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(UUID_NBYTES))
            except NvmlRefused as error:
                refusal = error
                continue
            found[uuid.value.decode(errors="replace")] = handle
        if refusal is not None and not found:
            raise refusal
        return found

    def share_switch(self, one: ctypes.c_void_p, other: ctypes.c_void_p) -> bool:
        level = ctypes.c_int()
        self._call("nvmlDeviceGetTopologyCommonAncestor", one, other, ctypes.byref(level))
        return level.value <= SWITCHES

    def nvlinked(self, one: ctypes.c_void_p, other: ctypes.c_void_p) -> bool:
        status = ctypes.c_int(-1)
        self._call("nvmlDeviceGetP2PStatus", one, other, ctypes.c_int(NVLINK), ctypes.byref(status))
        return status.value == 0


def look(uuid: str) -> GpuPlace:
    """The place of the GPU with this UUID (that of CUDA's driver), according to NVML."""
    try:
        nvml = Nvml()
    except OSError as error:
        return GpuPlace(uuid=uuid, reason=f"{LIBRARY} cannot be loaded ({error})")
    except (AttributeError, NvmlRefused) as error:
        return GpuPlace(uuid=uuid, reason=f"NVML does not answer: {error}")
    try:
        devices = nvml.devices()
        own = devices.pop(uuid, None)
        if own is None:
            return GpuPlace(uuid=uuid, reason=f"NVML does not know {uuid}, which may be a part of a GPU (MIG)")
        return GpuPlace(
            uuid=uuid,
            switch_with=sorted(other for other, handle in devices.items() if nvml.share_switch(own, handle)),
            nvlink_with=sorted(other for other, handle in devices.items() if nvml.nvlinked(own, handle)),
        )
    except (AttributeError, NvmlRefused) as error:
        return GpuPlace(uuid=uuid, reason=f"NVML does not answer: {error}")
    finally:
        nvml.close()


def named(uuid: bytes) -> str:
    """The driver's 16 bytes as NVML writes them."""
    text = uuid.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
