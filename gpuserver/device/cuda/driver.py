"""The CUDA driver, call by call: arguments and results are plain integers, every code is checked.

With virtual.py the only module that drives a GPU through ``cuda.bindings``; runs with 13.0.3 to 13.5 (CI: against a
fake driver). It decides the meaning of each code: those in :data:`REFUSALS` mean that this call did nothing and the
next may work, and become :class:`DriverRefused`; after any other the state of the context is not known, so it becomes
DeviceLost.
"""

import importlib
from typing import Any, Final

from dormouse.gpuserver.device.cuda.probe import error_name, remedy
from dormouse.gpuserver.device.protocol import DeviceError, DeviceLost

cu: Final[Any] = importlib.import_module("cuda.bindings.driver")  # compiled, without type information

INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
PEER_ACCESS_UNSUPPORTED: Final = 217
NOT_READY: Final = 600
NOT_SUPPORTED: Final = 801
UNKNOWN: Final = -1  # a code that these bindings do not know

REFUSALS: Final = frozenset(
    {
        INVALID_VALUE,
        OUT_OF_MEMORY,
        100,  # NO_DEVICE
        101,  # INVALID_DEVICE
        205,  # MAP_FAILED
        208,  # ALREADY_MAPPED
        211,  # NOT_MAPPED
        PEER_ACCESS_UNSUPPORTED,
        304,  # OPERATING_SYSTEM
        400,  # INVALID_HANDLE
        500,  # NOT_FOUND
        NOT_READY,
        704,  # PEER_ACCESS_ALREADY_ENABLED
        705,  # PEER_ACCESS_NOT_ENABLED
        711,  # TOO_MANY_PEERS
        712,  # HOST_MEMORY_ALREADY_REGISTERED
        713,  # HOST_MEMORY_NOT_REGISTERED
        800,  # NOT_PERMITTED
        NOT_SUPPORTED,
    }
)
"""Named one by one, because the rest grows with each driver and most of it is sticky (cuda.h: "to continue using CUDA,
the process must be terminated and relaunched"): 700, 702, 709, 710, 714 to 719, 721, 214, 220, 999 and others."""

_OPENING: Final = ("cuInit", "cuDevicePrimaryCtxRetain")  # a person must do something if these fail
_BLOCKING_SYNC: Final = 1  # of events: the waiting thread sleeps instead of spinning
_NON_BLOCKING: Final = 1  # of streams: unordered with the legacy default stream
_REGISTER_PORTABLE: Final = 1
_CAPABILITY_MAJOR: Final = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"
_CAPABILITY_MINOR: Final = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"
_MULTIPROCESSORS: Final = "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"
_VMM: Final = "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
_VMM_DESCRIPTORS: Final = "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"


class DriverRefused(DeviceError):
    """One call was refused with ``code``; nothing was done."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


_lost: DeviceLost | None = None


def lost() -> DeviceLost | None:
    """The error that ended the use of CUDA in this process, if any: one thread notices it, and it holds for all."""
    return _lost


def lose(error: DeviceLost) -> None:
    """From now on, no call is made."""
    global _lost
    _lost = _lost or error


def require() -> None:
    """Raises DeviceLost once it is."""
    if _lost is not None:
        raise DeviceLost(*_lost.args)


def call(name: str, *arguments: Any, optional: bool = False) -> Any:
    """The results after the code: None, one, or a tuple. ``optional``: for a call that can be gone without, any code is
    a refusal if the context still works: drivers return undocumented codes for these.
    """
    require()
    try:
        code, *results = getattr(cu, name)(*arguments)
    except RuntimeError as error:  # no libcuda, or one without this function: the call was not made
        raise DriverRefused(f"{name}: {error}", NOT_SUPPORTED) from error
    except (ValueError, KeyError) as error:  # a code that is newer than the bindings: their enumeration refuses it
        number, text = UNKNOWN, f"{name}: unknown code: {error}"
    else:
        number = int(code)  # the enumeration's own text differs between 13.0 and 13.4
        text = f"{name}: {error_name(cu, number) or 'unknown error'} ({number})"
        if name in _OPENING:
            text += f"; {remedy(number)}"
    if number:
        if number in REFUSALS or (optional and _works()):
            raise DriverRefused(text, number)
        lose(DeviceLost(text))
        require()
    return results[0] if len(results) == 1 else tuple(results) or None


def _works() -> bool:
    """Whether the current context can still be used; waits for all that it was given."""
    try:
        return int(cu.cuCtxSynchronize()[0]) == 0
    except (ValueError, KeyError, RuntimeError):
        return False


# --- devices and contexts


def initialise() -> None:
    call("cuInit", 0)


def device_count() -> int:
    return int(call("cuDeviceGetCount"))


def device(ordinal: int) -> int:
    return int(call("cuDeviceGet", ordinal))


def device_name(device: int) -> str:
    return bytes(call("cuDeviceGetName", 256, device)).split(b"\0")[0].decode(errors="replace")


def device_uuid(device: int) -> bytes:
    """16 bytes that name a GPU in every process."""
    return bytes(call("cuDeviceGetUuid", device).bytes)


def capability(device: int) -> tuple[int, int]:
    return _attribute(_CAPABILITY_MAJOR, device), _attribute(_CAPABILITY_MINOR, device)


def multiprocessors(device: int) -> int:
    return _attribute(_MULTIPROCESSORS, device)


def has_granules(device: int) -> bool:
    """Whether physical memory can be mapped at chosen addresses and given to other processes by descriptor."""
    return bool(_attribute(_VMM, device) and _attribute(_VMM_DESCRIPTORS, device))


def _attribute(name: str, device: int) -> int:
    return int(call("cuDeviceGetAttribute", getattr(cu.CUdevice_attribute, name), device))


def can_access_peer(device: int, peer: int) -> bool:
    return bool(call("cuDeviceCanAccessPeer", device, peer))


def retain_primary(device: int) -> int:
    """The context that torch uses too."""
    return int(call("cuDevicePrimaryCtxRetain", device))


def release_primary(device: int) -> None:
    call("cuDevicePrimaryCtxRelease", device)


def set_current(context: int) -> None:
    """Of the calling thread."""
    call("cuCtxSetCurrent", context)


def synchronize() -> None:
    """Wait until the current context has done all that it was given."""
    call("cuCtxSynchronize")


def memory_info() -> tuple[int, int]:
    """``(free, total)`` bytes of the current device."""
    free, total = call("cuMemGetInfo")
    return int(free), int(total)


# --- streams and events


def create_stream() -> int:
    return int(call("cuStreamCreate", _NON_BLOCKING))


def destroy_stream(stream: int) -> None:
    call("cuStreamDestroy", stream)


def synchronize_stream(stream: int) -> None:
    call("cuStreamSynchronize", stream)


def create_event() -> int:
    """With time stamps; waiting for it sleeps."""
    return int(call("cuEventCreate", _BLOCKING_SYNC))


def destroy_event(event: int) -> None:
    call("cuEventDestroy", event)


def record_event(event: int, stream: int) -> None:
    call("cuEventRecord", event, stream)


def wait_event(stream: int, event: int) -> None:
    """The stream goes on only after the event as it was last recorded; returns at once."""
    call("cuStreamWaitEvent", stream, event, 0)


def event_passed(event: int) -> bool:
    try:
        call("cuEventQuery", event)
    except DriverRefused as error:
        if error.code != NOT_READY:
            raise
        return False
    return True


def synchronize_event(event: int) -> None:
    call("cuEventSynchronize", event)


def elapsed_s(first: int, second: int) -> float:
    """Seconds between two events that have passed."""
    return float(call("cuEventElapsedTime", first, second)) / 1e3


# --- plain memory and copies


def allocate(nbytes: int) -> int:
    return int(call("cuMemAlloc", nbytes))


def free(address: int) -> None:
    call("cuMemFree", address)


def allocation_of(address: int) -> tuple[int, int] | None:
    """``(start, nbytes)`` of the device memory around an address; None if there is none."""
    try:
        start, nbytes = call("cuMemGetAddressRange", address)
    except DriverRefused:
        return None
    return int(start), int(nbytes)


def allocate_pinned(nbytes: int) -> int:
    """Host memory that every context can copy from and to asynchronously."""
    return int(call("cuMemHostAlloc", nbytes, _REGISTER_PORTABLE))


def free_pinned(address: int) -> None:
    call("cuMemFreeHost", address)


def register(address: int, nbytes: int) -> None:
    """Pin whole pages of this process's memory, for every context."""
    call("cuMemHostRegister", address, nbytes, _REGISTER_PORTABLE, optional=True)


def unregister(address: int) -> None:
    call("cuMemHostUnregister", address)


def copy_to_device(target: int, source: int, nbytes: int, stream: int) -> None:
    call("cuMemcpyHtoDAsync", target, source, nbytes, stream)


def copy_to_host(target: int, source: int, nbytes: int, stream: int) -> None:
    call("cuMemcpyDtoHAsync", target, source, nbytes, stream)


def copy_on_device(target: int, source: int, nbytes: int, stream: int) -> None:
    """Also from a peer's memory that was imported: one address space. The ranges must not overlap."""
    call("cuMemcpyDtoDAsync", target, source, nbytes, stream)


def fill(address: int, value: int, nbytes: int, stream: int) -> None:
    call("cuMemsetD8Async", address, value, nbytes, stream)
