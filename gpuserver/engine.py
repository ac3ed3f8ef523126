"""The device thread's half of an executor: wakes, runs, ends and evicts; has the device and no socket.

Methods are called one at a time on the device thread. What they cause outside is emitted as effects; the I/O thread
carries them out in order. A lease passes through::

    wake -> running -> END, nothing to write                                          -> done "ended"
                       END, something to write -> Place -> Placed -> Written -> Manifest -> done "ended"
                       Revoke, Forget, Dropped at any point                           -> done "revoked"
                       ProtocolViolation at any point                                 -> done "violated"

A storage that a lease wrote and that was not written back is forgotten on this GPU, so that the next wake brings the
committed bytes.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgpack
import torch

from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device import Device
from dormouse.gpuserver.interpreter import EndRequest, ProtocolViolation
from dormouse.gpuserver.residency import ModelTooLarge, Residency, Span
from dormouse.gpuserver.tenant import Ending, Running, Tenant
from dormouse.gpuserver.transfer import Copy
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

DROPPED: Final = -1  # Settled.version after Dropped


@dataclass(frozen=True, slots=True)
class Reply:
    """Messages for an instance; ``frames`` more of its frames have been executed."""

    instance: str
    serial: int
    frames: int
    messages: list[bytes]


@dataclass(frozen=True, slots=True)
class Violated:
    """The interpreter refused a frame."""

    instance: str
    text: str


Effect = Reply | Violated | m.Done | m.Awake | m.Pressed | m.Place | m.Written | m.Settled


class InstanceDevice:
    """The device as interpreters see it."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.torch_device = engine.device.torch_device

    def generator(self) -> torch.Generator:
        return torch.Generator(self.torch_device)

    def relieve(self) -> bool:
        return self._engine.relieve()

    def activation_stats(self) -> tuple[int, int, int]:
        return self._engine.device.activation_stats()

    def contains(self, pointer: int, nbytes: int) -> bool:
        return self._engine.device.contains(pointer, nbytes)


class Engine:
    """One GPU's residency, tenants and lease.

    Attributes:
        revoked: newest serial whose frames are to be skipped; written by the I/O thread, so that a revocation
        overtakes them.
    """

    def __init__(self, device: Device, emit: Callable[[Effect], None]) -> None:
        self.device = device
        self.residency = Residency(device.pool_nbytes)
        self.revoked = 0
        self._emit = emit  # from any thread
        self._tenants: dict[str, Tenant] = {}  # by instance
        self._lease: Running | None = None
        self._ticket = 0
        self._view = InstanceDevice(self)

    # --- instances and memory

    def attach(self, attach: m.AttachInstance, arena: SharedMemory) -> None:
        self._tenants[attach.instance] = Tenant(attach, arena, self._view)

    def slab(self, slab: int, memory: SharedMemory) -> None:
        self.device.map_host(slab, memory)

    def forget(self, instance: str) -> None:
        """The instance is gone."""
        self._end_if_leased(instance)
        tenant = self._tenants.pop(instance, None)
        if tenant is not None:
            tenant.close()
            self._free(self.residency.evict(instance))
            del tenant
            gc.collect()  # interpreters are cycles, and this one's arena stays mapped as long as it lives

    def dropped(self, instance: str) -> None:
        """The store has no manifest of it any more and waits to use its segments again."""
        self._end_if_leased(instance)
        tenant = self._tenants.get(instance)
        if tenant is not None:
            tenant.newest = m.Manifest(instance=instance, version=tenant.newest.version, segments=[])
            self._adopt_manifest(tenant)
        self._emit(m.Settled(instance=instance, version=DROPPED))

    def manifest(self, manifest: m.Manifest) -> None:
        """A newer version: taken over at once, or when the instance's lease ends."""
        tenant = self._tenants.get(manifest.instance)
        if tenant is None:
            self._emit(m.Settled(instance=manifest.instance, version=manifest.version))
            return
        if manifest.version <= tenant.newest.version:
            return
        tenant.newest = manifest
        lease = self._lease
        if lease is None or lease.tenant is not tenant:
            self._adopt_manifest(tenant)
            self._emit(m.Settled(instance=tenant.name, version=manifest.version))
        elif lease.ending is not None and lease.ending.placed is not None:
            committed = {segment.segment for segment in manifest.segments}
            if all(segment.segment in committed for segment in lease.ending.placed):
                self._written_back(lease, lease.ending, lease.ending.placed)

    def _adopt_manifest(self, tenant: Tenant) -> None:
        tenant.manifest = tenant.newest
        self._free(self.residency.drop(tenant.name, tenant.unbind_stale()))

    def relieve(self) -> bool:
        """Evict every idle model because an operation is out of memory; whether that gave any."""
        victims, freed = self.residency.relieve()
        for victim in victims:
            self._tenants[victim].unbind_all()
        self._free(freed)
        if victims:
            self._emit(m.Pressed(evicted=victims))
        return bool(victims)

    def transient_nbytes(self) -> int:
        """What the leased instance holds outside the pool, as far as its interpreter knows."""
        if self._lease is None:
            return 0
        total = 0
        for stored in self._lease.tenant.interpreter.table.by_id.values():
            if not stored.persistent and stored.error is None:
                storage = stored.storage if stored.tensor is None else stored.tensor.untyped_storage()
                total += storage.nbytes() if storage is not None else 0
        return total

    def _free(self, spans: list[Span]) -> None:
        for span in spans:
            self.device.poison(span.offset, span.nbytes)
        self._limit_activations()

    def _limit_activations(self) -> None:
        self.device.set_activation_limit(self.residency.capacity - self.residency.used_nbytes)

    # --- leases

    def wake(self, wake: m.Wake) -> None:
        """Begin a lease. The instance is attached, the manifest is there and its slabs are mapped."""
        assert self._lease is None, "one lease at a time"
        tenant = self._tenants[wake.instance]
        lease = Running(wake, tenant, time.perf_counter())
        self.device.reset_peak()
        try:
            plan = self.residency.wake(
                tenant.name, tenant.manifest.segments, wake.evict, self.device.activation_stats()[0]
            )
        except ModelTooLarge as error:
            self._lease = lease
            self._emit(Reply(tenant.name, lease.serial, 0, [msgpack.packb([wire.REFUSED, lease.serial, str(error)])]))
            self._finish("revoked")
            return
        lease.evicted = plan.evicted
        for victim in plan.evicted:
            self._tenants[victim].unbind_all()
        self._free(plan.freed)
        copies = [Copy(segment.slab, segment.offset, span.offset, segment.nbytes) for segment, span in plan.missing]
        lease.copied_nbytes = plan.copy_nbytes
        lease.arriving = [segment for segment, _ in plan.missing]
        self._lease = lease
        if copies:
            lease.job = self.device.copy_in(copies, lambda: self._awake(lease))
            for (segment, span), event in zip(plan.missing, lease.job.events, strict=True):
                tenant.bind(self.device, segment, span, event)
        resident = self.residency.spans(tenant.name)
        for segment in tenant.manifest.segments:
            if not tenant.is_bound(segment):
                tenant.bind(self.device, segment, resident[segment.segment], None)
        tenant.interpreter.begin(lease.serial, wake.lease.secret)
        if not copies:
            self._awake(lease)

    def _awake(self, lease: Running) -> None:
        """All copies have arrived; on the copy stream's thread."""
        wake_us = int((time.perf_counter() - lease.began_s) * 1e6)
        self._emit(m.Awake(serial=lease.serial, copied_nbytes=lease.copied_nbytes, wake_us=wake_us))

    def frame(self, instance: str, serial: int, data: bytes) -> None:
        lease = self._lease
        if lease is None or lease.serial != serial or serial <= self.revoked or lease.tenant.name != instance:
            return  # the lease ended while the frame waited; the gate has told the instance
        began = time.perf_counter()
        interpreter = lease.tenant.interpreter
        try:
            replies = interpreter.execute(data)
        except ProtocolViolation as error:
            self._emit(Violated(instance, str(error)))
            self._finish("violated")
            return
        lease.busy_s += time.perf_counter() - began
        self._emit(Reply(instance, serial, 1, replies))
        if interpreter.ending is not None and lease.ending is None:
            self._end(lease, interpreter.ending)

    def revoke(self, serial: int) -> None:
        if self._lease is not None and self._lease.serial == serial:
            self._finish("revoked")

    def violate(self, serial: int) -> None:
        """The gate expelled the instance that holds this lease."""
        if self._lease is not None and self._lease.serial == serial:
            self._finish("violated")

    def _end_if_leased(self, instance: str) -> None:
        if self._lease is not None and self._lease.tenant.name == instance:
            self._finish("revoked")

    # --- end and write-back

    def _end(self, lease: Running, request: EndRequest) -> None:
        tenant = lease.tenant
        report = tenant.interpreter.report()
        known = {segment.storage for segment in tenant.manifest.segments}
        freed = [storage for storage in report.freed if storage in known]
        lost = report.spoiled if request.wait else report.spoiled + report.dirty
        dropped = tenant.unbind([*lost, *freed])
        if dropped:
            self._join(lease)
            self._free(self.residency.drop(tenant.name, dropped))
        storages: list[tuple[int, int]] = []
        if request.wait:
            storages = [(storage, tenant.interpreter.storage(storage).nbytes()) for storage in report.dirty]
            storages += report.created
        if not storages and not freed:
            self._reply_end(lease, tenant.manifest.version)
            return
        self._ticket += 1
        lease.ending = Ending(request, self._ticket, {storage for storage, _ in report.created}, freed)
        self._emit(m.Place(ticket=self._ticket, instance=tenant.name, storages=storages))

    def placed(self, placed: m.Placed) -> None:
        """Write back to these places."""
        lease = self._lease
        if lease is None or lease.ending is None or lease.ending.ticket != placed.ticket:
            return  # revoked meanwhile; Settled has given the ticket up
        interpreter = lease.tenant.interpreter
        copies = [(interpreter.storage(segment.storage), segment.slab, segment.offset) for segment in placed.segments]
        self.device.copy_out(copies)
        lease.ending.placed = placed.segments
        self._emit(m.Written(ticket=placed.ticket, freed=lease.ending.freed))

    def place_refused(self, refused: m.PlaceRefused) -> None:
        """No room on the host, or over quota: END fails, and what the lease wrote is gone."""
        lease = self._lease
        if lease is None or lease.ending is None or lease.ending.ticket != refused.ticket:
            return
        failed = [wire.FAILED, lease.ending.request.token, "RuntimeError", refused.text, None]
        self._emit(Reply(lease.tenant.name, lease.serial, 0, [msgpack.packb(failed)]))
        self._finish("ended", keep=False)

    def _written_back(self, lease: Running, ending: Ending, placed: list[m.Segment]) -> None:
        """The new manifest is there: what was written in place is resident under its new segment, the rest moves into
        the pool.
        """
        tenant = lease.tenant
        old = {segment.storage: segment.segment for segment in tenant.manifest.segments}
        used = self.device.activation_stats()[0]
        for segment in placed:
            if segment.storage not in ending.created:
                self.residency.rename(tenant.name, old[segment.storage], segment.segment)
                tenant.rebound(segment.storage, segment.segment)
                continue
            span = self.residency.adopt(tenant.name, segment, used)
            source = tenant.interpreter.storage(segment.storage)
            if span is not None:
                self.device.storage(span.offset, span.nbytes).copy_(source)
            del source
            tenant.unbind([segment.storage])
            if span is not None:
                tenant.bind(self.device, segment, span, None)
                used = self.device.activation_stats()[0]
        self._limit_activations()
        self._reply_end(lease, tenant.newest.version)

    def _reply_end(self, lease: Running, version: int) -> None:
        replies = lease.tenant.interpreter.finish_end(version)
        self._emit(Reply(lease.tenant.name, lease.serial, 0, replies))
        self._finish("ended")

    def _join(self, lease: Running, cancel: bool = False) -> None:
        """No copy is under way any more; what did not arrive is not resident."""
        job = lease.job
        if job is None:
            return
        if cancel:
            job.cancel()
        job.join()
        lost = [segment for segment, event in zip(lease.arriving, job.events, strict=True) if not event.done()]
        lease.copied_nbytes -= sum(segment.nbytes for segment in lost)
        lease.tenant.unbind([segment.storage for segment in lost])
        self._free(self.residency.drop(lease.tenant.name, [segment.segment for segment in lost]))
        lease.job = None

    def _finish(self, outcome: str, keep: bool = True) -> None:
        """The lease is over: exactly one Done."""
        lease = self._lease
        assert lease is not None
        tenant = lease.tenant
        self._join(lease, cancel=outcome != "ended")
        if outcome != "ended" or not keep:
            report = tenant.interpreter.abort()
            dropped = tenant.unbind([*report.dirty, *report.spoiled, *report.freed])
            self._free(self.residency.drop(tenant.name, dropped))
        self.residency.end_lease()
        self._lease = None
        if tenant.newest is not tenant.manifest:
            self._adopt_manifest(tenant)
        self._emit(m.Settled(instance=tenant.name, version=tenant.manifest.version))
        self._emit(
            m.Done(
                serial=lease.serial,
                outcome=outcome,
                gpu_us=int(lease.busy_s * 1e6),
                copied_nbytes=lease.copied_nbytes,
                evicted=lease.evicted,
                resident_nbytes=self.residency.resident_nbytes(tenant.name),
                peak_activation_nbytes=self.device.activation_stats()[1],
                version=tenant.manifest.version,
            )
        )
