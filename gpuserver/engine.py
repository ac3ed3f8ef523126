"""The device thread's half of an executor: wakes, runs, ends and evicts; has the device and no socket.

Methods are called one at a time on the device thread. What they cause outside is emitted as effects; the I/O thread
carries them out in order. A lease passes through::

    wake -> running -> END, nothing to write                                          -> done "ended"
                       END, something to write -> AskPlace -> Placed -> Written -> Manifest -> done "ended"
                       Revoke, Forget, Dropped at any point                           -> done "revoked"
                       ProtocolViolation at any point, or whatever else an instance's commands raise
                                                                                      -> done "violated"

A storage that a lease wrote and that was not written back is forgotten on this GPU, so that the next wake brings the
committed bytes. What is raised on an instance's behalf ends that instance and nothing else, unless it is the device's
or the pool's books do not agree afterwards.
"""

import itertools
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import msgpack
import torch

from dormouse.core.shm import SharedMemory
from dormouse.gpuserver import transfer
from dormouse.gpuserver.device import Device, DeviceError, DeviceLost
from dormouse.gpuserver.effects import BeginWake, Effect, Reply, StopWake, Violated, WakeOver
from dormouse.gpuserver.interpreter import EndRequest, ProtocolViolation
from dormouse.gpuserver.lease.arrivals import Board
from dormouse.gpuserver.lease.wake import Sources
from dormouse.gpuserver.pools.protocol import Plan
from dormouse.gpuserver.residency import ModelTooLarge, Residency
from dormouse.gpuserver.storages import Failure
from dormouse.gpuserver.tenant import Ending, Running, Tenant
from dormouse.gpuserver.transfer import Copy, Kind
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

STORY_LETTERS: Final = 4000
"""Of a traceback that goes to the log: its end, some dozen frames."""


class InstanceDevice:
    """The device as interpreters see it."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.torch_device = engine.device.torch_device

    def generator(self) -> torch.Generator:
        return torch.Generator(self.torch_device)

    def relieve(self) -> str | None:
        return self._engine.relieve()

    def activation_stats(self) -> tuple[int, int, int]:
        return self._engine.device.activation_stats()

    def contains(self, pointer: int, nbytes: int) -> bool:
        return self._engine.device.contains(pointer, nbytes)

    def synchronize(self) -> None:
        self._engine.device.synchronize()


class Engine:
    """One GPU's residency, tenants and lease.

    Attributes:
        revoked: newest serial whose frames are to be skipped; written by the I/O thread, so that a revocation
        overtakes them.
    """

    def __init__(self, device: Device, emit: Callable[[Effect], None]) -> None:
        self.device = device
        self.residency = Residency(device.make_pool())
        self.revoked = 0
        self._emit = emit  # from any thread
        self._tenants: dict[str, Tenant] = {}  # by instance
        self._lease: Running | None = None
        self._tickets = itertools.count(2, 2)  # of write-backs; the odd ones are questions of wakes
        self._owners = itertools.count(2)  # of activations; 1 is the executor itself
        self._view = InstanceDevice(self)

    # --- instances and memory

    def attach(self, attach: m.AttachInstance, arena: SharedMemory) -> None:
        self._tenants[attach.instance] = Tenant(attach, arena, self._view, next(self._owners))

    def forget(self, instance: str) -> None:
        """The instance is gone."""
        self._end_if_leased(instance)
        gone = self.residency.unlearn(instance)
        tenant = self._tenants.pop(instance, None)
        if tenant is not None:
            gone += tenant.entries
            tenant.close()
            self._retire(gone)

    def dropped(self, instance: str) -> None:
        """The store has no manifest of it any more."""
        self._end_if_leased(instance)
        gone = self.residency.unlearn(instance)
        tenant = self._tenants.get(instance)
        if tenant is not None:
            version = tenant.newest.version
            tenant.newest = m.Manifest(instance=instance, version=version, entries=[], segments=[])
            gone += tenant.adopt()
        self._retire(gone)

    def manifest(self, manifest: m.Manifest) -> None:
        """A newer version, or the same one in a better order: taken over at once, or when the instance's lease ends."""
        with self._session(manifest.instance):
            self._manifest(manifest)

    def _manifest(self, manifest: m.Manifest) -> None:
        before_nbytes = self.residency.resident_nbytes(manifest.instance)
        self.residency.learn(manifest)
        if self.residency.leased != manifest.instance and (
            self.residency.resident_nbytes(manifest.instance) > before_nbytes
        ):  # others have its segments here: who places its requests should know before the first of them runs
            self._emit(m.Pressed(resident=self.residency.changed(), stats=self.stats()))
        tenant = self._tenants.get(manifest.instance)
        if tenant is None or manifest.version < tenant.newest.version:
            return
        tenant.newest = manifest
        lease = self._lease
        if lease is None or lease.tenant is not tenant:
            self._retire(tenant.adopt())
        elif lease.ending is not None and lease.ending.places is not None:
            committed = {segment for segment, _ in manifest.segments}
            newer = manifest.version > tenant.manifest.version  # and not only in a better order
            if newer and all(place.segment in committed for place in lease.ending.places):
                self._written_back(lease, lease.ending, lease.ending.places)

    def _retire(self, segments: Iterable[int]) -> None:
        """Forget those that no manifest has any more, but for what the lease still uses: its end sees to that."""
        used = self._lease.tenant.entries if self._lease is not None else {}
        self._carry_out(self.residency.retire(segment for segment in segments if segment not in used))

    def relieve(self) -> str | None:
        """An operation was refused memory: evict every idle model, if that makes enough room; else why not."""
        if not self.device.activations_share_pool:  # evicting would not help
            return None if self.device.relieve() else ""
        keep = self._lease.tenant.entries if self._lease is not None else {}
        refused_nbytes, beside_nbytes = self.device.refused()
        most_nbytes = self.residency.capacity - self.residency.fixed_nbytes(keep)
        if refused_nbytes + beside_nbytes > most_nbytes:
            return (
                f"With every idle model evicted there would be {most_nbytes:,} bytes; {beside_nbytes:,} were in use, "
                f"{refused_nbytes:,} asked for. So none was evicted."
            )
        plan = self.residency.relieve(keep)
        if not plan.evicted:
            return ""
        self._carry_out(plan)
        self._emit(m.Pressed(resident=self.residency.changed(), stats=self.stats()))
        return None

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

    def _carry_out(self, plan: Plan) -> None:
        """Make the device as the pool's books say. No storage of what is evicted or moved can be reached afterwards."""
        homeless = [*plan.evicted, *(move.segment for move in plan.moves)]
        if homeless:
            for tenant in self._tenants.values():
                tenant.unbind_segments(homeless)
        for span in plan.freed:
            self.device.poison(span.offset, span.nbytes)
        if plan.unmapped or plan.mapped:
            self.device.remap(plan.unmapped, plan.mapped)
        if plan.moves:
            moves = [Copy(transfer.POOL, move.source, move.target, move.nbytes) for move in plan.moves]
            self.device.copy_in(moves, lambda: None).join()
            for move in plan.moves:
                self.residency.arrived(move.segment)
        self._limit_activations()

    def _limit_activations(self) -> None:
        self.device.set_activation_limit(self.residency.capacity - self.residency.occupied_nbytes)

    def stats(self) -> m.PoolStats:
        """What the memory is used for now. Any thread."""
        return self.residency.stats(self._activations())

    def _activations(self) -> int:
        """Bytes of activations that the pool cannot have."""
        return self.device.activation_stats()[0] if self.device.activations_share_pool else 0

    # --- leases

    def wake(self, wake: m.Wake) -> None:
        """Begin a lease. The instance is attached, the manifest is there."""
        assert self._lease is None, "one lease at a time"
        with self._session(wake.instance):
            self._wake(wake)

    def _wake(self, wake: m.Wake) -> None:
        tenant = self._tenants[wake.instance]
        lease = Running(wake, tenant, repaired_before=tenant.interpreter.repaired_strides)
        self._lease = lease
        self.device.reset_peak()
        self.device.set_owner(tenant.number)
        try:
            plan = self.residency.wake(
                tenant.name,
                tenant.manifest,
                wake.worth,
                self.device.bandwidth(Kind.SLAB),
                tenant=tenant.owner,
                reserve_nbytes=self._activations(),
                wish_nbytes=wake.activation_nbytes if self.device.activations_share_pool else 0,
            )
        except ModelTooLarge as error:
            self._carry_out(error.plan)
            self._refuse(lease, str(error))
            return
        try:
            for part in plan.plans:
                self._carry_out(part)
        except DeviceError as error:  # what was missing or moving is not there after all; the rest is as before
            moving = [move.segment for part in plan.plans for move in part.moves]
            self._carry_out(self.residency.forget([*(segment for segment, _, _ in plan.missing), *moving]))
            self._refuse(lease, f"the GPU refused memory for the model: {error}")
            return
        if plan.missing:
            lease.board = Board(self.device, {segment: nbytes for segment, _, nbytes in plan.missing})
            peers = wake.peers if self.device.bandwidth(Kind.PEER) > self.device.bandwidth(Kind.SLAB) else []
            after = self.device.record()
            self._emit(BeginWake(lease.serial, lease.board, after, plan.missing, peers, lease.began_s))
        tenant.used.clear()
        tenant.bind_all(self.device, self.residency, lease.board)
        tenant.interpreter.begin(lease.serial, wake.lease.secret)

    @staticmethod
    def _refuse(lease: Running, text: str) -> None:
        """The lease is held without the model: what needs it is out of memory, as it would be on a GPU of its own."""
        lease.tenant.used.clear()
        lease.tenant.bind_none(Failure("OutOfMemoryError", text, None))
        lease.tenant.interpreter.begin(lease.serial, lease.wake.lease.secret)

    def frame(self, instance: str, serial: int, data: bytes) -> None:
        lease = self._lease
        if lease is None or lease.serial != serial or serial <= self.revoked or lease.tenant.name != instance:
            return  # the lease ended while the frame waited; the gate has told the instance
        began = time.perf_counter()
        interpreter = lease.tenant.interpreter
        try:
            replies = interpreter.execute(data)
            lease.busy_s += time.perf_counter() - began
            self._emit(Reply(instance, serial, 1, replies))
            if interpreter.ending is not None and lease.ending is None:
                self._end(lease, interpreter.ending)
        except Exception as error:  # the outermost frame of this instance's session
            self._escaped(instance, error)

    @contextmanager
    def _session(self, instance: str) -> Iterator[None]:
        """The outermost frame of what is done on an instance's behalf."""
        try:
            yield
        except Exception as error:
            self._escaped(instance, error)

    def _escaped(self, instance: str, error: Exception) -> None:
        """What an instance has caused ends it. Raises what is the executor's: a device that is lost, books of the pool
        that do not agree.
        """
        if isinstance(error, ProtocolViolation):
            text, story = str(error), ""
        else:
            if isinstance(error, DeviceLost):
                raise error
            if isinstance(error, torch.AcceleratorError):
                self.device.synchronize()
            self.residency.check()
            text = f"what it sent raised {type(error).__name__} in the executor"
            story = "".join(traceback.format_exception(error))[-STORY_LETTERS:]
        self._emit(Violated(instance, text, story))
        self._end_if_leased(instance, "violated")

    def revoke(self, serial: int) -> None:
        lease = self._lease
        if lease is None or lease.serial != serial:
            return
        if lease.ending is not None and lease.ending.places is not None:
            return  # it has been committed: the manifest, which is on its way, ends it
        self._finish("revoked")

    def violate(self, serial: int) -> None:
        """The gate expelled the instance that holds this lease."""
        if self._lease is not None and self._lease.serial == serial:
            self._finish("violated")

    def _end_if_leased(self, instance: str, outcome: str = "revoked") -> None:
        if self._lease is not None and self._lease.tenant.name == instance:
            self._finish(outcome)

    def forget_segments(self, segments: list[int]) -> None:
        """What was kept only for another GPU."""
        self._retire(segments)

    # --- end and write-back

    def _end(self, lease: Running, request: EndRequest) -> None:
        tenant = lease.tenant
        self._end_wake(lease, cancel=False)  # before anything is dropped: what comes late must not land in its place
        report = tenant.interpreter.report()
        known = {entry.storage for entry in tenant.manifest.entries}
        freed = [storage for storage in report.freed if storage in known]
        lost = report.spoiled if request.wait else report.spoiled + report.dirty
        self._carry_out(self.residency.forget(tenant.unbind([*lost, *freed])))
        storages: list[tuple[int, int]] = []
        if request.wait:
            storages = [(storage, tenant.interpreter.storage(storage).nbytes()) for storage in report.dirty]
            storages += report.created
            lease.wrote = bool(report.dirty)
        if not storages and not freed:
            self._reply_end(lease, tenant.manifest.version)
            return
        ticket = next(self._tickets)
        lease.ending = Ending(request, ticket, [storage for storage, _ in storages], freed)
        self._emit(m.AskPlace(ticket=ticket, instance=tenant.name, storages=storages))

    def placed(self, placed: m.Placed) -> None:
        """Write back to these places."""
        lease = self._lease
        if lease is None or lease.ending is None or lease.ending.ticket != placed.ticket:
            return  # revoked meanwhile; LetGo has given the ticket up
        with self._session(lease.tenant.name):
            interpreter = lease.tenant.interpreter
            pairs = zip(lease.ending.storages, placed.places, strict=True)
            self.device.copy_out([(interpreter.storage(storage), place.slab, place.offset) for storage, place in pairs])
            lease.ending.places = placed.places
            self._emit(m.Written(ticket=placed.ticket, freed=lease.ending.freed))

    def place_refused(self, refused: m.PlaceRefused) -> None:
        """No room on the host, or over quota: END fails, and what the lease wrote is gone."""
        lease = self._lease
        if lease is None or lease.ending is None or lease.ending.ticket != refused.ticket:
            return
        failed = [wire.FAILED, lease.ending.request.token, "RuntimeError", refused.text, None]
        self._emit(Reply(lease.tenant.name, lease.serial, 0, [msgpack.packb(failed)]))
        self._finish("ended", keep=False)

    def _written_back(self, lease: Running, ending: Ending, places: list[m.Place]) -> None:
        """The new manifest is there: what was written in place is resident under its new segment, the rest moves into
        the pool.
        """
        tenant, residency = lease.tenant, self.residency
        old = {storage: tenant.segment_of(storage) for storage in ending.storages}
        before = set(tenant.entries)
        sources = {storage: tenant.interpreter.storage(storage) for storage in ending.storages}
        tenant.unbind(ending.storages)
        for storage, place in zip(ending.storages, places, strict=True):
            segment = old[storage]
            if segment is not None and segment in tenant.written:
                residency.rename(segment, place.segment)
                tenant.written.discard(segment)
            else:
                self._bring_in(place, sources[storage], tenant.owner)
            del sources[storage]
        tenant.adopt()
        self._retire(before)
        self._limit_activations()
        self._reply_end(lease, tenant.newest.version)

    def _bring_in(self, place: m.Place, source: torch.UntypedStorage, owner: str) -> None:
        """Into the pool, if there is room beside what is in use; else the next wake brings it from the host."""
        plan = self.residency.adopt(place.segment, place.nbytes, self._activations(), owner)
        if plan is None:
            return
        try:
            self._carry_out(plan)
        except DeviceError:
            self._carry_out(self.residency.forget([place.segment]))
            return
        self.device.storage(self.residency.pool.offset(place.segment), place.nbytes).copy_(source)
        self.device.synchronize()  # another GPU reads without regard to our stream
        self.residency.arrived(place.segment)

    def _reply_end(self, lease: Running, version: int) -> None:
        replies = lease.tenant.interpreter.finish_end(version)
        self._emit(Reply(lease.tenant.name, lease.serial, 0, replies))
        self._finish("ended")

    def _finish(self, outcome: str, keep: bool = True) -> None:
        """The lease is over: exactly one Done."""
        lease = self._lease
        assert lease is not None
        tenant = lease.tenant
        self.device.synchronize()  # what it has queued is its own: its time, and its fault if it fails
        self._end_wake(lease, cancel=outcome != "ended")
        if lease.ending is not None and (outcome != "ended" or not keep):
            self._emit(m.LetGo(ticket=lease.ending.ticket))
        if outcome != "ended" or not keep:
            report = tenant.interpreter.abort()
            tenant.unbind([*report.dirty, *report.spoiled, *report.freed])
        self._carry_out(self.residency.forget(tenant.written))  # in place, and not committed
        tenant.written.clear()
        self.residency.end_lease()
        self._lease = None
        self._tell_first_use(tenant, outcome)
        before = list(tenant.entries)
        if tenant.newest is not tenant.manifest:
            tenant.adopt()
        self._retire(before)
        sources = lease.board.sources if lease.board is not None else Sources()
        self._emit(
            m.Done(
                serial=lease.serial,
                outcome=outcome,
                gpu_us=int(lease.busy_s * 1e6),
                copied_nbytes=lease.copied_nbytes,
                peer_nbytes=sources.peer_nbytes,
                file_nbytes=sources.file_nbytes,
                resident=self.residency.changed(),
                peak_activation_nbytes=self.device.activation_stats()[1],
                version=tenant.manifest.version,
                stats=self.stats(),
                wrote=lease.wrote and keep and outcome == "ended",
                peers=sources.gave,
                repaired=tenant.interpreter.repaired_strides - lease.repaired_before,
            )
        )

    def _end_wake(self, lease: Running, cancel: bool) -> None:
        """No copy is under way any more; what did not arrive is not here."""
        board = lease.board
        if board is None or lease.awake:
            return
        lease.awake = True
        if not cancel:
            board.await_sources()
        self._emit(StopWake(lease.serial, cancel))
        there, lost = board.join(cancel)
        self._emit(WakeOver(lease.serial))
        for segment in there:  # a job that was cancelled does not say so
            self.residency.arrived(segment)
        lease.copied_nbytes = board.nbytes(there)
        lease.tenant.unbind_segments(lost)
        self._carry_out(self.residency.forget(lost))

    def _tell_first_use(self, tenant: Tenant, outcome: str) -> None:
        """Let the store know the order in which segments were needed, so that the next wake copies them in it."""
        order = [segment for segment in tenant.used if segment in tenant.entries]
        known = [segment for segment, _ in tenant.manifest.segments]
        if outcome == "ended" and len(order) > len(known) // 2 and known[: len(order)] != order:
            self._emit(m.FirstUse(instance=tenant.name, version=tenant.manifest.version, segments=order))
