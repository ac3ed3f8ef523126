"""The pool's memory on the GPU: one allocation for contiguous pools, granules mapped at addresses for pools of pages.

Owns handles and addresses. Order is not decided here: whoever unmaps has waited for the last use, and whoever frees has
waited for all streams. Both kinds hold ``nbytes`` of memory in an address range of ``span_nbytes`` from ``base`` on,
and report whether there is memory behind a part of that (``covers``); the caller closes their exports.
"""

import os
import resource
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from dormouse.core.decisions.memory.pools.protocol import Mapping, Pool
from dormouse.core.quantities import size
from dormouse.gpuserver.device.cuda import driver, virtual
from dormouse.gpuserver.device.cuda.peers import export_allocation, export_granules
from dormouse.gpuserver.device.cuda.streams import CudaContext
from dormouse.gpuserver.device.protocol import DeviceError, DeviceLost, Exported

LARGE_NBYTES: Final = 64 << 20
"""Mapping one costs what one of the small class costs (an H200: 29 to 37 us with its grant), so large weights are
mapped thirty times faster per byte."""

SMALL_NBYTES: Final = 2 << 20
"""The least that every GPU so far can map, and the most that a segment loses to rounding."""

LARGE_SHARE: Final = 0.875
"""Of the pool that is made of large granules. Small ones are for small models, for rounding and for KV: to map a byte
there takes almost as long as to copy it (29 against 38 us for 2 MiB). The pool may use either class for any segment."""

ADDRESS_NBYTES: Final = 1 << 40
"""Reserved at least, and ADDRESS_FACTOR times the pool: a segment keeps its address while it is not resident. Only
address space, of which a GPU has 128 TiB and more."""

ADDRESS_FACTOR: Final = 8

MAX_DESCRIPTORS: Final = 4096
"""Of granules given to another executor: each costs both processes a descriptor, of which a process has 1,024 to
1,048,576. Pools of more granules are not read by peers."""

OTHER_DESCRIPTORS: Final = 512
"""Sockets and slabs that an executor has open besides."""


class CudaBlock:
    """One allocation."""

    def __init__(self, context: CudaContext, nbytes: int, buddy: bool) -> None:
        self._device = context.device
        self._buddy = buddy
        try:
            self.base = driver.allocate(nbytes)
        except driver.DriverRefused as error:
            raise DeviceError(f"cannot reserve a pool of {size(nbytes)}: {error}; {_memory()}") from error
        self.nbytes = self.span_nbytes = nbytes

    def covers(self, offset: int, nbytes: int) -> bool:
        return offset >= 0 and nbytes >= 0 and offset + nbytes <= self.nbytes

    def make_pool(self) -> Pool:
        if self._buddy:
            from dormouse.core.decisions.memory.pools.buddy import Buddy

            return Buddy(self.nbytes)
        from dormouse.core.decisions.memory.pools.regions import Regions

        return Regions(self.nbytes)

    def export(self) -> Exported:
        return export_allocation(self._device, self.base)

    def close(self) -> None:
        driver.free(self.base)


class CudaGranules:
    """Physical granules, and a reservation of addresses at which they come and go. They are made at the start, because
    making costs, too (25 us on an H200, of either size; kvcached saw 193 for 2 MiB on an A100).

    Granules are numbered through both classes, the large first.
    """

    def __init__(
        self,
        context: CudaContext,
        nbytes: int,
        large_nbytes: int = LARGE_NBYTES,
        small_nbytes: int = SMALL_NBYTES,
        large_share: float = LARGE_SHARE,
    ) -> None:
        self._device = context.device
        if not driver.has_granules(self._device):
            raise DeviceError("this GPU cannot map memory at chosen addresses; set [gpu] pool = 'regions'")
        unit = virtual.granularity(self._device)
        if small_nbytes % unit or large_nbytes % unit:
            raise DeviceError(f"this GPU maps multiples of {unit} bytes; set [gpu] pool = 'regions'")
        large = int(nbytes * large_share) // large_nbytes
        small = (nbytes - large * large_nbytes) // small_nbytes
        self._small_nbytes = small_nbytes
        self.classes: Final = [(size, count) for size, count in ((large_nbytes, large), (small_nbytes, small)) if count]
        self.nbytes = sum(size * count for size, count in self.classes)
        self.span_nbytes = max(ADDRESS_NBYTES, ADDRESS_FACTOR * self.nbytes) // large_nbytes * large_nbytes
        self._handles: list[int] = []
        self._mapped: dict[int, Mapping] = {}  # by offset
        try:
            for granule_nbytes, count in self.classes:
                for _ in range(count):
                    self._handles.append(virtual.create_granule(granule_nbytes, self._device))
            self.base = virtual.reserve_addresses(self.span_nbytes)
        except driver.DriverRefused as error:
            made = len(self._handles)
            for handle in self._handles:
                virtual.release_granule(handle)
            raise DeviceError(
                f"cannot reserve a pool of {size(self.nbytes)}: {error} after {made} granules; {_memory()}"
            ) from error

    def covers(self, offset: int, nbytes: int) -> bool:
        end = offset + nbytes
        if nbytes == 0:
            return 0 <= offset <= self.span_nbytes
        while offset < end:
            mapping = self._holding(offset)
            if mapping is None:
                return False
            offset = mapping.offset + mapping.nbytes
        return True

    def _holding(self, offset: int) -> Mapping | None:
        """The granule at an address; mappings begin at multiples of the small size, not necessarily of their own."""
        small = self._small_nbytes
        start = offset // small * small
        largest = self.classes[0][0]
        for candidate in range(start, start - largest, -small):
            mapping = self._mapped.get(candidate)
            if mapping is not None:
                return mapping if offset < candidate + mapping.nbytes else None
        return None

    def is_mapped(self, mapping: Mapping) -> bool:
        """This granule at this address."""
        there = self._mapped.get(mapping.offset)
        return there is not None and there.granule == mapping.granule

    def check(self, mapping: Mapping) -> None:
        """Raises ValueError for an impossible mapping: no such granule, not its size, not in the address range."""
        size = 0
        before = 0
        for nbytes, count in self.classes:
            if before <= mapping.granule < before + count:
                size = nbytes
            before += count
        if not size or size != mapping.nbytes or not 0 <= mapping.offset <= self.span_nbytes - size:
            raise ValueError(f"{mapping} is not a mapping of a pool of {self.classes} in {self.span_nbytes} bytes")

    def unmap(self, mappings: Sequence[Mapping]) -> None:
        """Nothing uses these any more. Raises DeviceLost: memory that the driver will not unmap can never be used
        again.
        """
        for mapping in mappings:
            try:
                virtual.unmap(self.base + mapping.offset, mapping.nbytes)
            except driver.DriverRefused as error:
                driver.lose(DeviceLost(f"{mapping} cannot be unmapped: {error}"))
                driver.require()
            del self._mapped[mapping.offset]

    def map(self, mappings: Sequence[Mapping]) -> None:
        """All of these or, with DeviceError, none; earlier mappings stay."""
        begun: list[Mapping] = []
        try:
            for mapping in mappings:
                virtual.map_granule(self.base + mapping.offset, mapping.nbytes, self._handles[mapping.granule])
                self._mapped[mapping.offset] = mapping
                begun.append(mapping)
            for offset, nbytes in contiguous(mappings):
                virtual.grant(self.base + offset, nbytes, self._device)
        except driver.DriverRefused as error:
            self.unmap(begun)
            raise DeviceError(
                f"cannot map {len(mappings)} granules of {sum(m.nbytes for m in mappings)} bytes: {error} after "
                f"{len(begun)}; {len(self._mapped)} of {len(self._handles)} stay mapped; {_memory()}"
            ) from error

    def make_pool(self) -> Pool:
        from dormouse.core.decisions.memory.pools.pages import Pages

        return Pages(granules=self.classes, address_nbytes=self.span_nbytes)

    def descriptor(self, physical: int) -> int:
        """Of the granule that begins there, as `Pool.extents` counts; it is the caller's. Raises DeviceError."""
        before, granule = 0, 0
        for nbytes, count in self.classes:
            inside = physical - before
            if 0 <= inside < nbytes * count and inside % nbytes == 0:
                return virtual.export_granule(self._handles[granule + inside // nbytes])
            before, granule = before + nbytes * count, granule + count
        raise DeviceError(f"no granule begins at {physical} of {self.nbytes} bytes")

    def export(self) -> Exported:
        if len(self._handles) > MAX_DESCRIPTORS:
            count = len(self._handles)
            raise DeviceError(f"a pool of {count} granules is not given to peers, {MAX_DESCRIPTORS} are the most")
        _allow_descriptors(len(self._handles))
        descriptors: list[int] = []
        try:
            for handle in self._handles:
                descriptors.append(virtual.export_granule(handle))
        except DeviceError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return export_granules(self._device, self.classes, descriptors)

    def close(self) -> None:
        self.unmap(list(self._mapped.values()))
        for handle in self._handles:
            virtual.release_granule(handle)
        virtual.free_addresses(self.base, self.span_nbytes)


CudaMemory = CudaBlock | CudaGranules


def contiguous(mappings: Sequence[Mapping]) -> list[tuple[int, int]]:
    """The ranges ``(offset, nbytes)`` that these cover together, in order: access is granted once for each."""
    ordered = sorted(mappings)
    starts = [mapping.offset for mapping in ordered[:1]]
    ends = []
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes != after.offset:
            ends.append(before.offset + before.nbytes)
            starts.append(after.offset)
    ends += [mapping.offset + mapping.nbytes for mapping in ordered[-1:]]
    return [(start, end - start) for start, end in zip(starts, ends, strict=True)]


def _memory() -> str:
    free, total = driver.memory_info()
    return f"{size(free)} of {size(total)} of the GPU are free"


def _allow_descriptors(count: int) -> None:
    """Raise this process's limit if need be: the driver's error at that limit is not documented."""
    wanted = count + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise DeviceError(f"{wanted} open files are more than this process may have (ulimit -Hn: {hard})")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
