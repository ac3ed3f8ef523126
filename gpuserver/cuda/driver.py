"""The CUDA driver, call by call: arguments and results are plain integers, every code is checked.

The only module that drives a GPU through ``cuda.bindings``; runs with 13.0.3 to 13.5 (CI: against a fake driver).
It decides what a code means: those in :data:`REFUSALS` say that this call did nothing and the next may work, and become
:class:`Refused`; after any other the state of the context is not known, so it becomes DeviceLost.
"""

import ctypes
import importlib
from typing import Any, Final

from dormouse.gpuserver.cuda.probe import remedy
from dormouse.gpuserver.device import DeviceError, DeviceLost

_cu: Final[Any] = importlib.import_module("cuda.bindings.driver")  # compiled, without type information

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
IPC_HANDLE_NBYTES: Final = 64
_BLOCKING_SYNC: Final = 1  # of events: the waiting thread sleeps instead of spinning
_NON_BLOCKING: Final = 1  # of streams: unordered with the legacy default stream
_REGISTER_PORTABLE: Final = 1
_LAZY_ENABLE_PEER_ACCESS: Final = 1
_CAPABILITY_MAJOR: Final = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"
_CAPABILITY_MINOR: Final = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"
_MULTIPROCESSORS: Final = "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"
_VMM: Final = "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
_VMM_DESCRIPTORS: Final = "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"


class Refused(DeviceError):
    """One call was refused with ``code``; nothing was done."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


_lost: DeviceLost | None = None


def lost() -> DeviceLost | None:
    """What ended the use of CUDA in this process, if anything has: it is noticed by one thread and holds for all."""
    return _lost


def lose(error: DeviceLost) -> None:
    """From now on, no call is made."""
    global _lost
    _lost = _lost or error


def require() -> None:
    """Raises DeviceLost once it is."""
    if _lost is not None:
        raise DeviceLost(*_lost.args)


def _call(name: str, *arguments: Any, optional: bool = False) -> Any:
    """The results after the code: None, one, or a tuple. ``optional``: what can be gone without is refused by any code,
    if the context still works: drivers answer with codes that no documentation has for these.
    """
    require()
    try:
        code, *results = getattr(_cu, name)(*arguments)
    except RuntimeError as error:  # no libcuda, or one without this function: the call was not made
        raise Refused(f"{name}: {error}", NOT_SUPPORTED) from error
    except (ValueError, KeyError) as error:  # a code that is newer than the bindings: their enumeration refuses it
        number, text = UNKNOWN, f"{name}: unknown code: {error}"
    else:
        number = int(code)  # the enumeration's own text differs between 13.0 and 13.4
        text = f"{name}: {error_name(number)} ({number}){'; ' + remedy(number) if name in _OPENING else ''}"
    if number:
        if number in REFUSALS or (optional and _works()):
            raise Refused(text, number)
        lose(DeviceLost(text))
        require()
    return results[0] if len(results) == 1 else tuple(results) or None


def _works() -> bool:
    """Whether the current context can still be used; waits for all that it was given."""
    try:
        return int(_cu.cuCtxSynchronize()[0]) == 0
    except (ValueError, KeyError, RuntimeError):
        return False


def error_name(number: int) -> str:
    """``CUDA_ERROR_...``, or "unknown error"."""
    try:
        code, name = _cu.cuGetErrorName(_cu.CUresult(number))
    except (ValueError, KeyError, RuntimeError):  # newer than the bindings
        return "unknown error"
    return "unknown error" if int(code) or name is None else bytes(name).decode()


# --- devices and contexts


def initialise() -> None:
    _call("cuInit", 0)


def device_count() -> int:
    return int(_call("cuDeviceGetCount"))


def device(ordinal: int) -> int:
    return int(_call("cuDeviceGet", ordinal))


def device_name(device: int) -> str:
    return bytes(_call("cuDeviceGetName", 256, device)).split(b"\0")[0].decode(errors="replace")


def device_uuid(device: int) -> bytes:
    """16 bytes that name a GPU in every process."""
    return bytes(_call("cuDeviceGetUuid", device).bytes)


def capability(device: int) -> tuple[int, int]:
    return _attribute(_CAPABILITY_MAJOR, device), _attribute(_CAPABILITY_MINOR, device)


def multiprocessors(device: int) -> int:
    return _attribute(_MULTIPROCESSORS, device)


def has_granules(device: int) -> bool:
    """Whether physical memory can be mapped at chosen addresses and given to other processes by descriptor."""
    return bool(_attribute(_VMM, device) and _attribute(_VMM_DESCRIPTORS, device))


def _attribute(name: str, device: int) -> int:
    return int(_call("cuDeviceGetAttribute", getattr(_cu.CUdevice_attribute, name), device))


def can_access_peer(device: int, peer: int) -> bool:
    return bool(_call("cuDeviceCanAccessPeer", device, peer))


def retain_primary(device: int) -> int:
    """The context that torch uses too."""
    return int(_call("cuDevicePrimaryCtxRetain", device))


def release_primary(device: int) -> None:
    _call("cuDevicePrimaryCtxRelease", device)


def set_current(context: int) -> None:
    """Of the calling thread."""
    _call("cuCtxSetCurrent", context)


def memory_info() -> tuple[int, int]:
    """``(free, total)`` bytes of the current device."""
    free, total = _call("cuMemGetInfo")
    return int(free), int(total)


# --- streams and events


def create_stream() -> int:
    return int(_call("cuStreamCreate", _NON_BLOCKING))


def destroy_stream(stream: int) -> None:
    _call("cuStreamDestroy", stream)


def synchronize_stream(stream: int) -> None:
    _call("cuStreamSynchronize", stream)


def create_event() -> int:
    """With time stamps; waiting for it sleeps."""
    return int(_call("cuEventCreate", _BLOCKING_SYNC))


def destroy_event(event: int) -> None:
    _call("cuEventDestroy", event)


def record_event(event: int, stream: int) -> None:
    _call("cuEventRecord", event, stream)


def wait_event(stream: int, event: int) -> None:
    """The stream goes on only after the event as it was last recorded; returns at once."""
    _call("cuStreamWaitEvent", stream, event, 0)


def event_passed(event: int) -> bool:
    try:
        _call("cuEventQuery", event)
    except Refused as error:
        if error.code != NOT_READY:
            raise
        return False
    return True


def synchronize_event(event: int) -> None:
    _call("cuEventSynchronize", event)


def elapsed_s(first: int, second: int) -> float:
    """Seconds between two events that have passed."""
    return float(_call("cuEventElapsedTime", first, second)) / 1e3


# --- plain memory and copies


def allocate(nbytes: int) -> int:
    return int(_call("cuMemAlloc", nbytes))


def free(address: int) -> None:
    _call("cuMemFree", address)


def allocation_of(address: int) -> tuple[int, int] | None:
    """``(start, nbytes)`` of the device memory around an address; None if there is none."""
    try:
        start, nbytes = _call("cuMemGetAddressRange", address)
    except Refused:
        return None
    return int(start), int(nbytes)


def allocate_pinned(nbytes: int) -> int:
    """Host memory that every context can copy from and to asynchronously."""
    return int(_call("cuMemHostAlloc", nbytes, _REGISTER_PORTABLE))


def free_pinned(address: int) -> None:
    _call("cuMemFreeHost", address)


def register(address: int, nbytes: int) -> None:
    """Pin whole pages of this process's memory, for every context."""
    _call("cuMemHostRegister", address, nbytes, _REGISTER_PORTABLE, optional=True)


def unregister(address: int) -> None:
    _call("cuMemHostUnregister", address)


def copy_to_device(target: int, source: int, nbytes: int, stream: int) -> None:
    _call("cuMemcpyHtoDAsync", target, source, nbytes, stream)


def copy_to_host(target: int, source: int, nbytes: int, stream: int) -> None:
    _call("cuMemcpyDtoHAsync", target, source, nbytes, stream)


def copy_on_device(target: int, source: int, nbytes: int, stream: int) -> None:
    """Also from a peer's memory that was imported: one address space. The ranges must not overlap."""
    _call("cuMemcpyDtoDAsync", target, source, nbytes, stream)


def fill(address: int, value: int, nbytes: int, stream: int) -> None:
    _call("cuMemsetD8Async", address, value, nbytes, stream)


# --- granules


def _properties(device: int) -> Any:
    properties = _cu.CUmemAllocationProp()
    properties.type = _cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = _cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    properties.requestedHandleTypes = (
        _descriptor_type()
    )  # must be asked for when it is made; nothing else is (vllm #35489)
    return properties


def _descriptor_type() -> Any:
    return _cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def granularity(device: int) -> int:
    """Size of a granule is a multiple of this, in bytes."""
    flag = _cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_call("cuMemGetAllocationGranularity", _properties(device), flag))


def create_granule(nbytes: int, device: int) -> int:
    return int(_call("cuMemCreate", nbytes, _properties(device), 0))


def release_granule(granule: int) -> None:
    _call("cuMemRelease", granule)


def export_granule(granule: int) -> int:
    """A new descriptor, which is the caller's."""
    return int(_call("cuMemExportToShareableHandle", granule, _descriptor_type(), 0, optional=True))


def import_granule(descriptor: int) -> int:
    """Another process's granule; the descriptor stays the caller's."""
    return int(_call("cuMemImportFromShareableHandle", descriptor, _descriptor_type(), optional=True))


def reserve_addresses(nbytes: int) -> int:
    return int(_call("cuMemAddressReserve", nbytes, 0, 0, 0))


def free_addresses(address: int, nbytes: int) -> None:
    _call("cuMemAddressFree", address, nbytes)


def map_granule(address: int, nbytes: int, granule: int, optional: bool = False) -> None:
    """At ``address``; nobody may touch it before :func:`grant`. ``optional``: nothing is lost if it cannot be done."""
    _call("cuMemMap", address, nbytes, 0, granule, 0, optional=optional)


def unmap(address: int, nbytes: int) -> None:
    """Exactly what one :func:`map_granule` mapped. Does not wait for anything that still uses it."""
    _call("cuMemUnmap", address, nbytes)


def grant(address: int, nbytes: int, device: int, write: bool = True, optional: bool = False) -> None:
    """Let a device read, and write, a mapped range; it may span many granules. ``optional`` as in map_granule."""
    access = _cu.CUmemAccessDesc()
    access.location.type = _cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    flags = _cu.CUmemAccess_flags
    access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if write else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    _call("cuMemSetAccess", address, nbytes, [access], 1, optional=optional)


# --- whole allocations between processes


def export_allocation(address: int) -> bytes:
    """Names a whole :func:`allocate` for other processes: IPC_HANDLE_NBYTES bytes."""
    handle = _call("cuIpcGetMemHandle", address, optional=True)
    return ctypes.string_at(handle.getPtr(), IPC_HANDLE_NBYTES)  # 13.4 has no .reserved any more


def open_allocation(handle: bytes) -> int:
    """Address here of another process's allocation, readable by the current context."""
    if len(handle) != IPC_HANDLE_NBYTES:
        raise Refused(f"an IPC handle of {len(handle)} bytes", INVALID_VALUE)
    structure = _cu.CUipcMemHandle()
    ctypes.memmove(structure.getPtr(), handle, IPC_HANDLE_NBYTES)
    return int(_call("cuIpcOpenMemHandle", structure, _LAZY_ENABLE_PEER_ACCESS, optional=True))


def close_allocation(address: int) -> None:
    _call("cuIpcCloseMemHandle", address)
