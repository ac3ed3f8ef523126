"""The compute thread, played: compute.py with values for bytes. It holds those who order to what they may order."""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgpack
from lease_memory import UNIT, Board, Coming, Memory, Stage, size

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.gate import FrameHeader, follows
from dormouse.core.decisions.leases.wake import Sources
from dormouse.core.decisions.memory.pools.protocol import Pool, PoolChange
from dormouse.gpuserver.executor import orders
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

if TYPE_CHECKING:
    from lease_world import World


SECRET: Final = 5


class Seen(deque[Any]):
    """A queue that one can look into."""

    put = deque.append
    get = deque.popleft

    def empty(self) -> bool:
        return not self


class Orders(orders.Orders):
    def __init__(self) -> None:
        super().__init__()
        self.close()  # nobody listens to its bell here
        self.items: Any = Seen()
        self.urgent: Any = Seen()

    @property
    def asked(self) -> bool:
        return self._asked

    def give(self, order: orders.Item) -> None:
        assert self._asked or not isinstance(order, o.ComputeAnswer), "an answer to nothing, or a second one"
        super().give(order)


@dataclass(frozen=True)
class Listening:
    """An order to hear an instance, once the compute thread has begun with its lease."""

    begin: o.Begin


class Failed(Exception):
    """A command cannot run, and it is not the machine's fault."""


@dataclass
class Stored:
    """One storage of an instance: in the pool (``segment``), in memory of its own (``value``), or in neither."""

    nbytes: int
    segment: int | None = None
    offset: int = 0
    coming: Coming | None = None
    value: int | None = None
    persistent: bool = True
    dirty: bool = False
    in_place: bool = False
    error: bool = False
    refused: bool = False  # it cannot be brought


@dataclass
class Tenant:
    """An instance, as tenant.py and the interpreter's table have it. Each storage is a whole segment."""

    name: str
    manifest: m.Manifest
    table: dict[int, Stored] = field(default_factory=dict)
    bound: dict[int, int] = field(default_factory=dict)  # segment by storage
    own: set[int] = field(default_factory=set)
    claimed: dict[int, int] = field(default_factory=dict)  # new number by segment
    freed: dict[int, None] = field(default_factory=dict)
    used: dict[int, None] = field(default_factory=dict)

    def unbind(self, storages: Any) -> None:
        for storage in list(storages):
            self.table.pop(storage, None)
            self.bound.pop(storage, None)

    def keep(self, storage: int) -> None:
        self.bound.pop(storage, None)
        self.own.add(storage)

    def over(self) -> list[int]:
        dropped, self.claimed, self.own = list(self.claimed.values()), {}, set()
        return dropped

    def end(self, keep: bool) -> tuple[list[int], list[tuple[int, int]], list[int], list[int]]:
        """(dirty, created, freed, spoiled)."""
        dirty = [n for n, s in self.table.items() if s.persistent and s.dirty and not s.error]
        spoiled = [n for n, s in self.table.items() if s.persistent and s.error]
        made = {n: s for n, s in self.table.items() if not s.persistent}
        created = [(n, s.nbytes) for n, s in made.items() if keep and not s.error]
        for number in [*spoiled, *(made.keys() - {n for n, _ in created})]:
            del self.table[number]
        freed, self.freed = list(self.freed), {}
        return dirty, created, freed, spoiled


@dataclass
class Running:
    """A lease that has begun on the compute thread. ``expect``: what it has to find, by storage."""

    serial: int
    tenant: Tenant
    expect: dict[int, int]
    number: int = 0
    board: Board | None = None
    coming: dict[int, Coming] = field(default_factory=dict)  # what its wakes have brought, or not
    offsets: dict[int, int] = field(default_factory=dict)  # by segment
    writing: list[int] | None = None
    waits: bool = False  # its END does
    seated: bool = True


Wait = Callable[[], bool]
"""Whether the compute thread can go on."""


def always() -> bool:
    return True


class Compute:
    """compute.py with values for bytes; `go` lets it do a little."""

    def __init__(self, world: "World", pool: Pool, share: bool) -> None:
        self.world, self.share = world, share
        self.orders = Orders()
        self.memory = Memory(pool)
        self.tenants: dict[str, Tenant] = {}
        self.leases: dict[int, Running] = {}
        self.unmapped: dict[int, str] = {}
        self.limit_nbytes = pool.capacity
        self.beside_nbytes = 4 * UNIT  # if activations have memory of their own
        self.refuses = False  # the next plan that needs the device to do something fails
        self.peak_nbytes = 0
        self._steps = self._run()
        self._until = next(self._steps)

    def able(self) -> bool:
        return self._until()

    def go(self) -> None:
        self._until = next(self._steps)

    @property
    def now_nbytes(self) -> int:
        stored = (stored for tenant in self.tenants.values() for stored in tenant.table.values())
        return sum(each.nbytes for each in stored if each.value is not None)

    def _use(self) -> e.Use:
        return e.Use(self.now_nbytes, max(self.peak_nbytes, self.now_nbytes))

    def _run(self) -> Iterator[Wait]:
        while True:
            yield lambda: bool(self.orders.items)
            yield from self._carry_out(self.orders.items.get())

    def _carry_out(self, item: o.Order | Listening | o.ComputeAnswer) -> Iterator[Wait]:
        self._arrange()
        match item:
            case o.Arrange() | o.ComputeAnswer():
                pass
            case o.Adopt(manifest=manifest):
                self._adopt(manifest)
            case o.Begin():
                self._begin(item)
            case o.Bring(serial=serial, missing=missing):
                refused = self.unmapped.pop(serial, "")
                coming = {segment: Coming(segment, offset, nbytes) for segment, offset, nbytes in missing}
                for each in coming.values() if refused else ():
                    each.stage = Stage.LOST
                self.world.later(partial(self.world.begin_ahead, Board(serial, coming, ahead=True)))
            case o.Execute(serial=serial, data=data):
                if (run := (yield from self._run_frame(serial, data))) is not None:
                    self.world.post(e.Executed(serial, run[0], 0.001, self._use(), run[1]))
            case Listening(begin=begin):
                yield from self._listen(begin)
            case o.CopyOut():
                if (lease := self.leases.get(item.serial)) is not None:
                    self._copy_out(lease, item)
            case o.Own():
                if (lease := self.leases.get(item.serial)) is not None:
                    yield from self._own(lease)
            case o.Return():
                if (lease := self.leases.get(item.begin.serial)) is not None:
                    self._return(lease, item)
            case o.Close():
                if (lease := self.leases.get(item.serial)) is not None:
                    yield from self._close(lease, item)
                self.orders.skipped.discard(item.serial)
                self.unmapped.pop(item.serial, None)
            case o.Detach(instance=instance):
                self.tenants.pop(instance, None)
                assert all(lease.tenant.name != instance for lease in self.leases.values())

    # --- memory

    def _arrange(self) -> None:
        while self.orders.plans:
            arrange = self.orders.plans.popleft()
            for plan in arrange.plans:
                if not self._make(plan, arrange.serial):
                    self.memory.torn = True
                    self.unmapped[arrange.serial] = "refused"
                    moving = [move.segment for move in plan.moves]
                    self.world.post(e.Unmapped(arrange.serial, "refused", moving))
                    self.world.hear_posts()  # before another plan is made: else the executor is replaced
                    break
                if plan.moves:
                    self.world.post(e.Came(arrange.serial, [move.segment for move in plan.moves]))
            self.limit_nbytes = arrange.limit_nbytes

    def _make(self, plan: PoolChange, serial: int) -> bool:
        homeless = [*plan.evicted, *(move.segment for move in plan.moves)]
        for lease in self.leases.values():
            if lease.seated:
                self._spare(lease, homeless)
        for tenant in self.tenants.values():
            for storage, segment in list(tenant.bound.items()):
                if segment in homeless and segment not in tenant.claimed:
                    coming = tenant.table[storage].coming if storage in tenant.table else None
                    if coming is not None and coming.stage is Stage.LOST:
                        tenant.keep(storage)
                    else:
                        tenant.unbind([storage])
        needs = bool(plan.mapped or plan.moves)
        mapped = sum(each.nbytes for each in plan.mapped) - sum(each.nbytes for each in plan.unmapped)
        full = self.share and mapped > 0 and self.memory.mapped_nbytes + mapped + self.now_nbytes > self.world.capacity
        begins = [item.begin if isinstance(item, o.Return) else item for item in self.orders.items]
        others = any(isinstance(each, o.Begin | o.Bring) and each.serial != serial for each in begins)
        fails = needs and (self.refuses or full) and not self.orders.plans  # else the executor is replaced
        fails = fails and not others  # waits for a mend: see test_memory_that_the_device_has_refused
        for span in plan.freed:
            self.memory.poison(span)
        if plan.mapped or plan.unmapped:
            self.memory.remap(plan, fails)
        if fails:
            self.refuses = False
            return False
        for move in plan.moves:
            self.memory.move(move)
        return True

    def _spare(self, lease: Running, homeless: list[int]) -> None:
        """What a seat that has begun holds stays, but for what never came."""
        tenant = lease.tenant
        for segment in set(homeless) & set(tenant.bound.values()) - tenant.claimed.keys():
            coming = lease.coming.get(segment)
            lost = coming is not None and coming.stage in (Stage.LOST, Stage.CANCELLED)
            assert lost or self.memory.torn, f"segment {segment} left the seat of lease {lease.serial}"

    def _ask(self, question: e.MayWrite | e.Relieve) -> Iterator[Wait]:
        """The answer is in ``answer``."""
        self.world.post(question)
        while True:
            yield lambda: bool(self.orders.urgent)
            item = self.orders.urgent.get()
            if isinstance(item, o.ComputeAnswer):
                break
            yield from self._carry_out(item)
        self._arrange()
        self.answer = item.value

    def _room(self, lease: Running, nbytes: int) -> Iterator[Wait]:
        for again in (False, True):
            limit_nbytes = self.limit_nbytes if self.share else self.beside_nbytes
            if self.now_nbytes + nbytes <= limit_nbytes:
                self.peak_nbytes = max(self.peak_nbytes, self.now_nbytes + nbytes)
                return
            if not again:
                refused = (nbytes, self.now_nbytes) if self.share else (0, 0)
                yield from self._ask(e.Relieve(lease.serial, *refused))
                if self.answer is not None:
                    break
        raise Failed

    # --- leases

    def _adopt(self, manifest: m.Manifest) -> None:
        tenant = self.tenants[manifest.instance]
        assert all(lease.tenant is not tenant for lease in self.leases.values()), "in the middle of a lease"
        tenant.manifest = manifest
        current = {entry.storage: entry.segment for entry in manifest.entries}
        tenant.unbind([n for n, segment in tenant.bound.items() if current.get(n) != segment])

    def _begin(self, begin: o.Begin) -> None:
        tenant = self.tenants[begin.instance]
        assert all(lease.tenant is not tenant for lease in self.leases.values()), "two leases at once"
        values = self.world.store.values
        expect = {entry.storage: values[entry.segment] for entry in tenant.manifest.entries}
        lease = self.leases[begin.serial] = Running(begin.serial, tenant, expect)
        tenant.used.clear()
        self._bind(lease, begin)

    def _bind(self, lease: Running, begin: o.Begin) -> None:
        tenant = lease.tenant
        gone = tenant.own | tenant.freed.keys()
        entries = [entry for entry in tenant.manifest.entries if entry.storage not in gone]
        if begin.refused or self.unmapped.pop(lease.serial, ""):
            lease.seated = not begin.refused
            tenant.unbind([entry.storage for entry in entries])
            for entry in entries:
                tenant.table[entry.storage] = Stored(entry.nbytes, refused=True)
            return
        lease.seated = True
        missing = {segment: Coming(segment, offset, nbytes) for segment, offset, nbytes in begin.missing}
        if missing:
            lease.board = Board(lease.serial, missing)
            lease.coming |= missing
            self.world.later(partial(self.world.begin_copies, lease.board))
            self.world.post(e.Begun(lease.serial))
        places = begin.places or {}
        for entry in tenant.manifest.entries if begin.places is not None else ():
            lease.offsets[entry.segment], nbytes = places[entry.segment]
            assert nbytes == entry.nbytes
        for entry in entries:
            segment = entry.segment
            if begin.places is not None and (segment in missing or tenant.bound.get(entry.storage) != segment):
                offset = lease.offsets[segment]
                tenant.table[entry.storage] = Stored(entry.nbytes, segment, offset, missing.get(segment))
                tenant.bound[entry.storage] = segment
            if segment in missing:
                assert (missing[segment].offset, missing[segment].nbytes) == begin.places[segment]  # type: ignore[index]
                continue
            assert tenant.bound.get(entry.storage) == segment, f"segment {segment} is not within reach"
            lease.offsets[segment] = tenant.table[entry.storage].offset
            found = self.memory.read(tenant.table[entry.storage].offset, entry.nbytes)
            assert found == self.world.store.values[segment], f"segment {segment} is said to be here"

    def _listen(self, begin: o.Begin) -> Generator[Wait, None, None]:
        """The frames that its instance sends, until there is something else to do, or time is up."""
        serial, heard = begin.serial, self.world.lent[begin.instance]
        yield always
        count, replies, ended = 0, list[bytes](), None
        while heard and not self.orders.items and ended is None:
            if not follows(heard[0], FrameHeader(serial, SECRET, 0), count + 1):
                break
            self.world.given[serial] += 1
            if (run := (yield from self._run_frame(serial, heard.popleft()))) is None:
                break
            count, ended = count + 1, run[1]
            replies += run[0]
        self.world.post(e.Executed(serial, replies, 0.001 * count, self._use(), ended, count, count))
        self.world.later(partial(self.world.take_back, begin.instance))

    def _run_frame(self, serial: int, data: bytes) -> Generator[Wait, None, tuple[list[bytes], e.Ended | None] | None]:
        """Replies, and what its END did; None if it is not to be run, or ends its instance."""
        lease = self.leases.get(serial)
        if lease is None or serial in self.orders.skipped:
            return None
        try:
            serial, secret, number, _, commands = msgpack.unpackb(data)
        except ValueError:
            self.world.post(e.Escaped(lease.tenant.name, "a frame that does not decode"))
            return None
        assert (serial, secret) == (lease.serial, SECRET)
        assert not self.world.dones[serial], "a frame of a lease that is over"
        if number != lease.number + 1 or lease.writing is not None:
            assert lease.writing is not None, "frames out of order"
            self.world.post(e.Escaped(lease.tenant.name, "a frame behind the END"))
            return None
        lease.number = number
        ended: e.Ended | None = None
        for command in commands:
            yield always
            if command[0] == "bad":
                self.world.post(e.Escaped(lease.tenant.name, "no command"))
                return None
            if command[0] == "end":
                lease.waits = command[1]
                yield from self._end(lease)
                ended = self.ended
                break
            with contextlib.suppress(Failed):
                yield from self._command(lease, *command)
        self.world.executed[serial] = number
        return [bytes(msgpack.packb([wire.ACK, serial, number]))], ended

    def _command(self, lease: Running, what: str, which: int, flag: int) -> Iterator[Wait]:
        table = lease.tenant.table
        if what == "create":
            number = self.world.fresh()
            try:
                yield from self._room(lease, size(flag))
            except Failed:
                table[number] = Stored(size(flag), persistent=False, error=True)
                return
            lease.expect[number] = self.world.fresh()
            table[number] = Stored(size(flag), value=lease.expect[number], persistent=False)
            return
        if not lease.expect:
            return
        number = sorted(lease.expect)[which % len(lease.expect)]
        assert number in table, f"storage {number} was lost"
        stored = table[number]
        if what == "read":
            assert (yield from self._read(lease, number)) == lease.expect[number]
        elif what == "write":
            try:
                yield from self._write(lease, number, bool(flag % 2))
            except Failed:
                stored.error = stored.dirty = True
                del lease.expect[number]
        else:
            del lease.expect[number], table[number]
            if stored.persistent:
                lease.tenant.freed[number] = None

    def _read(self, lease: Running, number: int) -> Generator[Wait, None, int]:
        """Returns its value once it is there."""
        stored = lease.tenant.table[number]
        if stored.error or stored.refused:
            raise Failed
        if stored.value is not None:
            return stored.value
        assert stored.segment is not None, "it is elsewhere"
        lease.tenant.used.setdefault(stored.segment)
        if (coming := stored.coming) is not None:
            while coming.open:
                yield lambda: not coming.open
            if coming.stage is not Stage.THERE:
                raise Failed
        return self.memory.read(stored.offset, stored.nbytes)

    def _write(self, lease: Running, number: int, grows: bool) -> Iterator[Wait]:
        tenant = lease.tenant
        stored = tenant.table[number]
        if stored.error or stored.refused:
            raise Failed
        if stored.segment is not None and (grows or not stored.in_place):
            if not grows:
                yield from self._ask(e.MayWrite(lease.serial, stored.segment))
                if self.answer is not None:
                    tenant.claimed[stored.segment] = self.answer
                    stored.in_place = True
            if not stored.in_place or grows:
                tenant.keep(number)
                value = yield from self._read(lease, number)
                yield from self._room(lease, stored.nbytes)
                stored.value, stored.segment = value, None
        assert (yield from self._read(lease, number)) == lease.expect[number]
        value = lease.expect[number] = self.world.fresh()
        stored.dirty = True
        if stored.segment is None:
            stored.value = value
        else:
            self.memory.write(stored.offset, stored.nbytes, value)

    # --- ends

    def _join(self, lease: Running, cancel: bool) -> Iterator[Wait]:
        """What came of its wake is in ``left``."""
        board, lease.board = lease.board, None
        self.left = e.WakeRemains()
        if board is None:
            return
        self.world.later(partial(self.world.stop_copies, board, cancel))
        yield lambda: board.stopped and not any(coming.open for coming in board.segments.values())
        there = [each.segment for each in board.segments.values() if each.stage is Stage.THERE]
        lost = [each.segment for each in board.segments.values() if each.stage is not Stage.THERE]
        tenant = lease.tenant
        for storage, segment in list(tenant.bound.items()):
            if segment in lost:
                if board.segments[segment].stage is Stage.LOST:
                    tenant.keep(storage)
                else:
                    tenant.unbind([storage])
        self.world.copied[lease.serial] += sum(board.segments[segment].nbytes for segment in there)
        self.left = e.WakeRemains(there, lost, Sources())

    def _end(self, lease: Running) -> Iterator[Wait]:
        """What came of it is in ``ended``."""
        yield from self._join(lease, cancel=False)
        tenant = lease.tenant
        dirty, created, freed, spoiled = tenant.end(keep=lease.waits)
        if lease.waits:
            freed += spoiled
        else:
            tenant.unbind(dirty)
            spoiled, dirty = spoiled + dirty, []
        freed = [n for n in freed if n in {entry.storage for entry in tenant.manifest.entries}]
        gone = [*spoiled, *freed]
        storages = [*((n, tenant.table[n].nbytes) for n in dirty), *created]
        claims = {n: tenant.claimed.get(tenant.bound.get(n, 0)) for n, _ in storages}
        claimed = {n: claim for n, claim in claims.items() if claim is not None}
        tenant.unbind(gone)
        dropped = [claim for claim in tenant.over() if claim not in claimed.values()]
        used = list(tenant.used)
        self.ended = e.Ended(storages, claimed, freed, dropped, bool(dirty), bool(gone), used, e.Counts(), self.left)
        lease.writing = [n for n, _ in storages]
        if self.ended.over:
            self._forget(lease)

    def _forget(self, lease: Running) -> None:
        del self.leases[lease.serial]
        lease.tenant.over()

    def _value(self, lease: Running, number: int) -> int:
        stored = lease.tenant.table[number]
        found = stored.value if stored.value is not None else self.memory.read(stored.offset, stored.nbytes)
        assert found == lease.expect[number], f"storage {number} is not what it was made"
        return found

    def _copy_out(self, lease: Running, order: o.CopyOut) -> None:
        for number, place in zip(order.storages, order.places, strict=True):
            assert place.nbytes == lease.tenant.table[number].nbytes
            self.world.store.write(place, self._value(lease, number))
        dropped: list[int] = []
        if order.spill:
            lease.seated = False
            tenant = lease.tenant
            dropped, tenant.claimed = list(tenant.claimed.values()), {}
            for number in order.storages:
                stored = tenant.table[number]
                stored.value = stored.segment = stored.coming = None
                stored.in_place = False
            for number, stored in tenant.table.items():
                if stored.persistent and (number in order.storages or stored.error):
                    tenant.keep(number)
        self.world.post(e.CopiedOut(lease.serial, order.spill, dropped, self._use()))

    def _own(self, lease: Running) -> Iterator[Wait]:
        yield from self._join(lease, cancel=True)
        table = lease.tenant.table
        own = [(n, s.nbytes) for n, s in table.items() if not s.error and (s.dirty or not s.persistent)]
        for number, _ in own:
            self._value(lease, number)
        self.world.post(e.Owned(lease.serial, own, self.left))

    def _return(self, lease: Running, order: o.Return) -> None:
        self._bind(lease, order.begin)
        for number, place in zip(order.storages, order.places, strict=True):
            stored = lease.tenant.table[number]
            assert stored.value is stored.segment is None, "it has not left"
            if self.now_nbytes + stored.nbytes > (self.limit_nbytes if self.share else self.beside_nbytes):
                self.world.no_room.add(lease.serial)
                self.orders.skipped.add(lease.serial)
                self.world.post(e.SeatReturned(lease.serial, self._use(), "no room"))
                return
            stored.value = self.world.store.read(place)
            assert stored.value == lease.expect[number], "something else came back"
        self.world.post(e.SeatReturned(lease.serial, self._use()))

    def _close(self, lease: Running, close: o.Close) -> Iterator[Wait]:
        tenant, kept = lease.tenant, list[int]()
        yield from self._join(lease, close.cancel)
        left = self.left
        if close.version is not None:
            if lease.serial not in self.unmapped:
                for number, segment, offset, nbytes in close.brought:
                    self.memory.write(offset, nbytes, self._value(lease, number))
                    kept.append(segment)
            tenant.unbind(lease.writing or ())
        else:
            dirty, _, freed, spoiled = tenant.end(keep=False)
            tenant.unbind([*dirty, *freed, *spoiled])
        dropped, used = tenant.over(), list(tenant.used)
        self._forget(lease)
        self.world.post(e.Closed(lease.serial, [], dropped, kept, used, e.Counts(), left, self._use()))
