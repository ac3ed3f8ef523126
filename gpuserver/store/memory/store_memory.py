"""The upper tier: owns the slabs' memory and the threads that copy and hash in it.

Makes room by moving segments down to their files; segments.py decides which ones. The loop only does copies and scrubs
of microseconds; the rest happens in threads, while the caller keeps the bytes pinned.
"""

import asyncio
import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Final, TypeVar, TypeVarTuple

from dormouse.core.quantities import size, sizes
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.store.memory.fingerprint import fingerprint
from dormouse.gpuserver.store.memory.notifier import Notifier
from dormouse.gpuserver.store.memory.segments import Segment, Segments
from dormouse.gpuserver.store.memory.shares import HostShares
from dormouse.gpuserver.store.memory.slabs import HostFull, Slabs, SlabSpan

Ts = TypeVarTuple("Ts")
T = TypeVar("T")

ROOM_S: Final = 10.0
"""How long room is waited for while files are being written or segments are pinned: a batch of the writer takes about a
second, and an executor's patience with a lease that ends is of that order."""

COPY_INLINE_NBYTES: Final = 256 << 10
"""Copied in the loop: 25 µs, less than a hand-over to a thread and back (56-82 µs)."""

HASH_INLINE_NBYTES: Final = 64 << 10
"""Likewise: 8 µs."""

SCRUB_INLINE_NBYTES: Final = 4 << 20
"""Given back in the loop: freeing a thousand pages takes about 0.2 ms, clearing them in place as long."""

THREADS: Final = 4


class StoreMemory:
    """The slabs.

    Args:
        on_slab: called with the number of each new slab.
        on_slab_gone: called with the number of each that is there no more.
        on_change: called when bytes have been taken or given back.
        press: asked to write files so that room can be made: ``press(nbytes)`` is whether that may help soon.
        maps: those that the slabs have already.
        shares: limits of tenants; by default, all that there is.
        displace: asked to end an instance that loads: whether room may come of it.
    """

    def __init__(
        self,
        segments: Segments,
        slabs: Slabs,
        on_slab: Callable[[int], None],
        on_slab_gone: Callable[[int], None],
        on_change: Callable[[], None],
        press: Callable[[int], bool],
        maps: Mapping[int, SharedMemory] = MappingProxyType({}),
        shares: HostShares | None = None,
        displace: Callable[[], bool] = lambda: False,
    ) -> None:
        self._shares = shares or HostShares(segments, lambda _: None, lambda _: slabs.budget_nbytes)
        self._displace = displace
        self.slabs = slabs
        self.maps = dict(maps)  # by slab
        self.changed = Notifier()  # room, or bytes that could become room
        self.hashing = 0  # jobs after which something may be shared or moved
        self._segments = segments
        self._on_slab = on_slab
        self._on_slab_gone = on_slab_gone
        self._on_change = on_change
        self._press = press
        self._scrubbing_nbytes = 0
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "store")
        self._few = asyncio.Semaphore(32)
        self._jobs: set[asyncio.Task[None]] = set()

    # --- threads

    async def run(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run ``work`` in a thread."""
        return await self._loop.run_in_executor(self._pool, work, *args)

    async def hash(self, key: bytes, span: SlabSpan) -> bytes:
        """The fingerprint of a span, which the caller keeps as it is."""
        self.hashing += 1
        try:
            if span.nbytes > HASH_INLINE_NBYTES:
                return await self.run(fingerprint, key, self.view(span))
            async with self._few:
                await asyncio.sleep(0)  # of thousands, the loop does a few between two looks at all else
                return fingerprint(key, self.view(span))
        finally:
            self.hashing -= 1
            self.changed.set()

    async def copy(self, source: int, span: SlabSpan, offset: int, nbytes: int) -> None:
        """``nbytes`` from an address to ``offset`` of a span; both stay mapped until this returns."""
        target = self.address(span) + offset
        if nbytes <= COPY_INLINE_NBYTES:
            ctypes.memmove(target, source, nbytes)
        else:
            await self.run(ctypes.memmove, target, source, nbytes)

    def address(self, span: SlabSpan) -> int:
        return self.maps[span.slab].address + span.offset

    def view(self, span: SlabSpan) -> memoryview:
        return self.maps[span.slab].view[span.offset : span.offset + span.nbytes]

    # --- room

    async def place(self, owner: object, nbytes: int) -> SlabSpan:
        """A span of zeros for the bytes of a file, behind the owner's last one if possible: it takes precedence over
        models being loaded. Raises HostFull.
        """
        return await self._placed(partial(self.slabs.place, owner, nbytes), nbytes, self._displace)

    async def announce(self, owner: object, instance: str, nbytes: int) -> SlabSpan:
        """A span of zeros for bytes that are to :meth:`come`, behind the owner's last one if possible. Raises
        HostFull.
        """
        announced = self._shares.announced(instance) + nbytes
        if announced > self.slabs.budget_nbytes:  # address space is not free, either
            would, most = sizes(announced, self.slabs.budget_nbytes)
            text = f"no host memory for {size(nbytes)}: with what is being loaded it would be {would}, of {most} in all"
            raise HostFull(f"{text}; load less, or raise limits.host in the node's configuration", nbytes)
        counted = nbytes if self.slabs.pinnable else 0
        await self._shared(instance, counted)
        span = await self._placed(partial(self.slabs.place, owner, nbytes, owed=True), nbytes)
        self._shares.came(span, instance, counted)
        return span

    async def come(self, span: SlabSpan, instance: str, nbytes: int) -> None:
        """So many of its bytes will be there next. Raises HostFull."""
        if counted := self.slabs.owes(span, nbytes):
            await self._shared(instance, counted)
            await self._placed(partial(self.slabs.come, span, nbytes), nbytes)
            self._shares.came(span, instance, counted)

    async def _shared(self, instance: str, nbytes: int) -> None:
        """As soon as the instance's tenant may have so much: files that are being written make room. Raises
        HostFull.
        """
        tenant, _, most = self._shares.held(instance)
        if most >= self.slabs.budget_nbytes:
            return
        end_s = self._loop.time() + ROOM_S
        while (lacking := self._shares.lacking(instance, nbytes)) > 0:
            left_s = end_s - self._loop.time()
            if left_s <= 0 or not (self._press(lacking) or self.hashing > 0):
                _, held, _ = self._shares.held(instance)
                text = (
                    f"no host memory for {size(nbytes)}: models of tenant {tenant!r} have {size(held)} there that are "
                    f"in no file, of {size(most)}; remove functions, or raise [tenants.{tenant}] host (and "
                    "limits.disk, if the files have no room) in the node's configuration"
                )
                raise HostFull(text, lacking)
            await self.changed.wait(left_s)

    async def place_all(self, owner: object, sizes: Iterable[int]) -> list[SlabSpan]:
        """Several spans and the end of this owner; nothing is taken if they do not all fit. Raises HostFull."""
        sizes = list(sizes)
        try:
            return await self._placed(partial(self.slabs.place_all, owner, sizes), sum(sizes))
        finally:
            self.done_placing(owner)

    def done_placing(self, owner: object) -> None:
        """The owner places nothing more for now."""
        self.slabs.close(owner)
        if self.slabs.gone:
            self._changed()

    async def _placed(self, attempt: Callable[[], T], nbytes: int, displace: Callable[[], bool] = lambda: False) -> T:
        """The result of ``attempt``, as soon as it finds room. Where nothing else makes any, ``displace`` may."""
        if nbytes > self.slabs.budget_nbytes:
            raise HostFull(self._full(nbytes), nbytes)  # before others' segments are moved down for nothing
        end_s = self._loop.time() + ROOM_S
        while True:
            try:
                found = attempt()
            except HostFull as full:
                lacking = full.lacking_nbytes
            else:
                self._follow()
                self._on_change()
                return found
            missing = lacking - self._scrubbing_nbytes
            if missing > 0 and not self._segments.move_down(missing):
                soon = self._press(lacking) or self.hashing > 0 or self._segments.pinned_room()
                left_s = end_s - self._loop.time()
                if not self._segments.freed:
                    if not soon or left_s <= 0:
                        if left_s <= -ROOM_S or not displace():
                            raise HostFull(self._full(nbytes), lacking)
                        left_s += ROOM_S
                    await self.changed.wait(left_s)
            elif not self._segments.freed:
                await self.changed.wait(ROOM_S)
            self.collect()

    def _full(self, nbytes: int) -> str:
        return (
            f"no host memory for {size(nbytes)}: models use {size(self.slabs.held_nbytes)} of "
            f"{size(self.slabs.budget_nbytes)} and nothing more can be moved to files, which have "
            f"{size(self._segments.filed_nbytes)}; remove functions, or raise limits.host (and limits.disk, if the "
            "files have no room) in the node's configuration"
        )

    def _follow(self) -> None:
        """The slabs have changed: give memory to slabs that they have added, and give back those that are gone."""
        slabs = self.slabs
        for slab, nbytes in slabs.slabs.items():
            if slab not in self.maps:
                self.maps[slab] = SharedMemory.create(f"dormouse-slab-{slab}", nbytes, slabs.pinnable)
                self._on_slab(slab)
        gone, slabs.gone = slabs.gone, []
        for slab in gone:
            if slab in self.maps:  # else it was added and emptied in one step
                self._on_slab_gone(slab)
                self.maps.pop(slab).close()

    def collect(self) -> None:
        """Scrub freed spans and give them back."""
        freed, self._segments.freed = self._segments.freed, []
        self.give_back(freed)

    def give_back(self, freed: list[SlabSpan]) -> None:
        self._shares.freed(freed)
        for span in freed:
            if span.nbytes <= SCRUB_INLINE_NBYTES:
                self.maps[span.slab].scrub(span.offset, span.nbytes)
                self.slabs.free(span)
            else:
                self._scrubbing_nbytes += span.nbytes
                job = self._loop.create_task(self._scrub(span))
                self._jobs.add(job)
                job.add_done_callback(self._jobs.discard)
        if freed:
            self._changed()

    async def _scrub(self, span: SlabSpan) -> None:
        await self.run(self.maps[span.slab].scrub, span.offset, span.nbytes)
        self._scrubbing_nbytes -= span.nbytes
        self.slabs.free(span)
        self._changed()

    def _changed(self) -> None:
        self.changed.set()
        self._follow()
        self._on_change()

    def unpin(self, segment: Segment) -> None:
        """A pin that was taken from the loop is over."""
        self._segments.unpin(segment)
        self.collect()
        self.changed.set()

    def rest(self) -> None:
        """Wait for the threads: nothing is written any more."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """Wait for the threads, then unmap."""
        self.rest()
        for memory in self.maps.values():
            memory.close()
