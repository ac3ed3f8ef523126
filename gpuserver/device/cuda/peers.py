"""A pool's memory shared with other executors: its export as a handle, and the import there.

No handle carries a right: an importer sets its own access. Importers are the node's own processes.
"""

import struct
from collections.abc import Sequence
from typing import Final

from dormouse.gpuserver.device.cuda import driver, virtual
from dormouse.gpuserver.device.cuda.host import Source
from dormouse.gpuserver.device.cuda.streams import CudaContext
from dormouse.gpuserver.device.protocol import DeviceError, Exported

_UUID_NBYTES: Final = 16
_CLASS: Final = struct.Struct("<QQ")  # granule size, count
_TRIAL_NBYTES: Final = 512


def export_allocation(device: int, address: int) -> Exported:
    """The handle is the GPU's UUID, then the driver's IPC handle."""
    return Exported(driver.device_uuid(device) + virtual.export_allocation(address), [])


def export_granules(device: int, classes: Sequence[tuple[int, int]], descriptors: list[int]) -> Exported:
    """The handle is the GPU's UUID, then the granule classes as ``(size, count)`` in the order of the descriptors: laid
    end to end, these are what ``Pool.extents`` names.
    """
    packed = b"".join(_CLASS.pack(size, count) for size, count in classes)
    return Exported(driver.device_uuid(device) + packed, descriptors)


class PeerBlock(Source):
    """Another process's allocation."""

    def __init__(self, handle: bytes, nbytes: int) -> None:
        super().__init__(virtual.open_allocation(handle), nbytes)

    def _free(self) -> None:
        virtual.close_allocation(self.address)


class PeerGranules(Source):
    """Another process's granules, end to end, for reading. The descriptors stay the caller's."""

    def __init__(self, device: int, sizes: Sequence[int], descriptors: Sequence[int]) -> None:
        self._sizes: list[int] = []  # mapped so far
        super().__init__(virtual.reserve_addresses(sum(sizes)), sum(sizes))
        try:
            end = self.address
            for size, descriptor in zip(sizes, descriptors, strict=True):
                granule = virtual.import_granule(descriptor)
                try:
                    virtual.map_granule(end, size, granule, optional=True)
                finally:
                    virtual.release_granule(granule)  # the mapping holds it
                self._sizes.append(size)
                end += size
            self._grant(device)
        except DeviceError:
            self._free()
            raise

    def _grant(self, device: int) -> None:
        """To read. A driver that only grants both is granted both: nothing here writes to a source."""
        try:
            virtual.grant(self.address, self.nbytes, device, write=False, optional=True)
        except driver.DriverRefused:
            virtual.grant(self.address, self.nbytes, device, optional=True)

    def _free(self) -> None:
        end = self.address
        for size in self._sizes:
            virtual.unmap(end, size)
            end += size
        virtual.free_addresses(self.address, self.nbytes)


def _try(source: Source) -> None:
    """Copy a little. Raises DeviceError if the driver maps that memory but does not copy from it: a wake's copy that is
    refused loses the device.
    """
    nbytes = min(_TRIAL_NBYTES, source.nbytes)
    target = driver.allocate(_TRIAL_NBYTES)
    try:
        stream = driver.create_stream()
        try:
            driver.copy_on_device(target, source.address, nbytes, stream)
            driver.synchronize_stream(stream)
        finally:
            driver.destroy_stream(stream)
    finally:
        driver.free(target)


def open_peer(context: CudaContext, nbytes: int, handle: bytes, descriptors: Sequence[int]) -> Source:
    """Another executor's exported pool, readable by this GPU; leaves the descriptors to the caller.

    Raises DeviceError if that GPU cannot be reached or what came is not an export.
    """
    uuid, rest = handle[:_UUID_NBYTES], handle[_UUID_NBYTES:]
    devices = [driver.device(ordinal) for ordinal in range(driver.device_count())]
    peer = next((device for device in devices if driver.device_uuid(device) == uuid), None)
    if peer is None:
        raise DeviceError("the GPU of that pool is not visible to this process")
    if peer != context.device and not driver.can_access_peer(context.device, peer):
        raise DeviceError(f"GPU {context.device} cannot read from GPU {peer}: no peer access between them")
    source = _source(context.device, nbytes, rest, descriptors)
    try:
        _try(source)
    except DeviceError:
        source.retire()
        raise
    return source


def _source(device: int, nbytes: int, rest: bytes, descriptors: Sequence[int]) -> Source:
    if not descriptors:
        return PeerBlock(rest, nbytes)
    if len(rest) % _CLASS.size:
        raise DeviceError("not an exported pool: its granule classes are cut off")
    classes = [_CLASS.unpack_from(rest, at) for at in range(0, len(rest), _CLASS.size)]
    if sum(count for _, count in classes) != len(descriptors) or sum(size * count for size, count in classes) != nbytes:
        raise DeviceError(f"not an exported pool: {classes} is not {nbytes} bytes in {len(descriptors)} descriptors")
    return PeerGranules(device, [size for size, count in classes for _ in range(count)], descriptors)
