"""Memory behind addresses, call by call as in driver.py: granules, and whole allocations of other processes.

Physical memory is made in granules, which are put behind addresses that were reserved, here or in another process that
was given a descriptor. The places of granules are decided in pools/, the order of calls in device.py and memory.py.
"""

import ctypes
from typing import Any, Final

from dormouse.gpuserver.device.cuda.driver import INVALID_VALUE, DriverRefused, call, cu

IPC_HANDLE_NBYTES: Final = 64
_LAZY_ENABLE_PEER_ACCESS: Final = 1

# --- granules


def _properties(device: int) -> Any:
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    # Must be asked for when it is made; nothing else is (vllm #35489).
    properties.requestedHandleTypes = _descriptor_type()
    return properties


def _descriptor_type() -> Any:
    return cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def granularity(device: int) -> int:
    """Size of a granule is a multiple of this, in bytes."""
    flag = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call("cuMemGetAllocationGranularity", _properties(device), flag))


def create_granule(nbytes: int, device: int) -> int:
    return int(call("cuMemCreate", nbytes, _properties(device), 0))


def release_granule(granule: int) -> None:
    call("cuMemRelease", granule)


def export_granule(granule: int) -> int:
    """A new descriptor, which is the caller's."""
    return int(call("cuMemExportToShareableHandle", granule, _descriptor_type(), 0, optional=True))


def import_granule(descriptor: int) -> int:
    """Another process's granule; the descriptor stays the caller's."""
    return int(call("cuMemImportFromShareableHandle", descriptor, _descriptor_type(), optional=True))


def reserve_addresses(nbytes: int) -> int:
    return int(call("cuMemAddressReserve", nbytes, 0, 0, 0))


def free_addresses(address: int, nbytes: int) -> None:
    call("cuMemAddressFree", address, nbytes)


def map_granule(address: int, nbytes: int, granule: int, optional: bool = False) -> None:
    """At ``address``; nobody may touch it before :func:`grant`. ``optional``: nothing is lost if it cannot be done."""
    call("cuMemMap", address, nbytes, 0, granule, 0, optional=optional)


def unmap(address: int, nbytes: int) -> None:
    """Exactly what one :func:`map_granule` mapped. Does not wait for anything that still uses it."""
    call("cuMemUnmap", address, nbytes)


def grant(address: int, nbytes: int, device: int, write: bool = True, optional: bool = False) -> None:
    """Let a device read, and write, a mapped range; it may span many granules. ``optional`` as in map_granule."""
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    flags = cu.CUmemAccess_flags
    access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if write else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    call("cuMemSetAccess", address, nbytes, [access], 1, optional=optional)


# --- whole allocations between processes


def export_allocation(address: int) -> bytes:
    """Names a whole allocation of driver.py for other processes: IPC_HANDLE_NBYTES bytes."""
    handle = call("cuIpcGetMemHandle", address, optional=True)
    return ctypes.string_at(handle.getPtr(), IPC_HANDLE_NBYTES)  # 13.4 has no .reserved any more


def open_allocation(handle: bytes) -> int:
    """Address here of another process's allocation, readable by the current context."""
    if len(handle) != IPC_HANDLE_NBYTES:
        raise DriverRefused(f"an IPC handle of {len(handle)} bytes", INVALID_VALUE)
    structure = cu.CUipcMemHandle()
    ctypes.memmove(structure.getPtr(), handle, IPC_HANDLE_NBYTES)
    return int(call("cuIpcOpenMemHandle", structure, _LAZY_ENABLE_PEER_ACCESS, optional=True))


def close_allocation(address: int) -> None:
    call("cuIpcCloseMemHandle", address)
