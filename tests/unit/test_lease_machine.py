"""The machine of leases against a world that is played: a controller, a store, instances, copies and a compute thread
that keep what they may do, in any order. No device, no torch, no thread: memory is a list of units, each of which knows
whose bytes it has.
"""

import contextlib
import itertools
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Final, TypeVar

import msgpack
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from dormouse.core.memory.pools.pages import Pages
from dormouse.core.memory.pools.protocol import Move, Pool, PoolChange, Span
from dormouse.core.memory.pools.regions import Regions
from dormouse.gpuserver.executor import orders
from dormouse.gpuserver.lease import effects as o
from dormouse.gpuserver.lease import events as e
from dormouse.gpuserver.lease.gate import FrameHeader, read_header
from dormouse.gpuserver.lease.held import LeaseState
from dormouse.gpuserver.lease.machine import Machine
from dormouse.gpuserver.lease.wake import Sources
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

UNIT: Final = 512  # what pools round to
SEGMENTS: Final = 6  # that models share
SECRET: Final = 5
ODD: Final = 100  # no segment is a whole number of units
WRONG: Final = -1  # bytes that are nobody's, or of several

POOLS: Final[dict[str, Callable[[], Pool]]] = {
    "regions": lambda: Regions(12 * UNIT),
    "pages": lambda: Pages([(2 * UNIT, 2), (4 * UNIT, 2)], 4096 * UNIT),
}


def size(units: int) -> int:
    return units * UNIT - ODD


# --- the device


class Memory:
    """Whose bytes are where. Behind each address of a pool of pages there is a granule, or nothing."""

    def __init__(self, pool: Pool) -> None:
        self.paged = isinstance(pool, Pages)
        self._pool = pool
        self._units: dict[int, tuple[int, int]] = {}  # (value, which of its units) by physical unit
        self._behind: dict[int, tuple[int, int]] = {}  # (granule, physical unit) by address unit
        self.torn = False  # a plan was not carried out as it says

    def read(self, offset: int, nbytes: int) -> int:
        return self._value(self._where(offset, nbytes))

    def read_extents(self, spans: list[tuple[int, int]]) -> int:
        """As another GPU does, which knows nothing of addresses."""
        units = [unit for start, nbytes in spans for unit in range(start // UNIT, -(-(start + nbytes) // UNIT))]
        return self._value(units)

    def write(self, offset: int, nbytes: int, value: int) -> None:
        for index, unit in enumerate(self._where(offset, nbytes)):
            self._units[unit] = (value, index)

    def move(self, move: Move) -> None:
        found = [self._units.get(unit, (WRONG, 0)) for unit in self._where(move.source, move.nbytes)]
        for unit, content in zip(self._where(move.target, move.nbytes), found, strict=True):
            self._units[unit] = content

    def poison(self, span: Span) -> None:
        for unit in range(span.offset // UNIT, (span.offset + span.nbytes) // UNIT):
            self._units.pop(unit, None)

    def remap(self, plan: PoolChange, fails: bool) -> None:
        for each in plan.unmapped:
            if self._behind.get(each.offset // UNIT, (None, 0))[0] == each.granule:  # not so after one that failed
                for unit in _units(each.offset, each.nbytes):
                    del self._behind[unit]
        for each in plan.mapped[: len(plan.mapped) // 2] if fails else plan.mapped:
            assert each.granule not in {granule for granule, _ in self._behind.values()}, "at two addresses"
            start = self._pool._granules.physical(each.granule) // UNIT  # type: ignore[attr-defined]
            for index, unit in enumerate(_units(each.offset, each.nbytes)):
                self._behind[unit] = (each.granule, start + index)
                self._units.pop(start + index, None)

    @property
    def mapped_nbytes(self) -> int:
        return UNIT * len(self._behind)

    def _where(self, offset: int, nbytes: int) -> list[int]:
        units = _units(offset, nbytes)
        if not self.paged:
            return list(units)
        assert all(unit in self._behind for unit in units), "nothing is behind this address"
        return [self._behind[unit][1] for unit in units]

    def _value(self, units: list[int]) -> int:
        found = [self._units.get(unit, (WRONG, 0)) for unit in units]
        value = found[0][0]
        return value if found == [(value, index) for index in range(len(units))] else WRONG


def _units(offset: int, nbytes: int) -> range:
    return range(offset // UNIT, -(-(offset + nbytes) // UNIT))


class Ledger:
    """What the machine has given out, by what it has ordered."""

    def __init__(self) -> None:
        self._units: set[int] = set()  # of a contiguous pool
        self._granules: dict[int, int] = {}  # nbytes of those that are mapped
        self.limit_nbytes = 0

    @property
    def nbytes(self) -> int:
        return UNIT * len(self._units) + sum(self._granules.values())

    def arrange(self, arrange: o.Arrange) -> None:
        for plan in arrange.plans:
            for span in plan.freed:
                units = set(_units(*span))
                assert units <= self._units, "freed twice"
                self._units -= units
            for each in plan.unmapped:
                assert self._granules.pop(each.granule) == each.nbytes
            for move in plan.moves:
                self._units -= set(_units(move.source, move.nbytes))
                self._give(move.target, move.nbytes)
            for each in plan.mapped:
                assert each.granule not in self._granules
                self._granules[each.granule] = each.nbytes
        self.limit_nbytes = arrange.limit_nbytes

    def give(self, spans: Iterable[tuple[int, int]], paged: bool) -> None:
        for offset, nbytes in spans:
            if not paged:
                self._give(offset, nbytes)

    def _give(self, offset: int, nbytes: int) -> None:
        units = set(_units(offset, nbytes))
        assert not units & self._units, "given out twice"
        self._units |= units


class Stage(Enum):
    WANTED = 0
    COPYING = 1
    THERE = 2
    LOST = 3
    CANCELLED = 4


@dataclass
class Coming:
    """A segment that a wake brings."""

    segment: int
    offset: int
    nbytes: int
    stage: Stage = Stage.WANTED

    @property
    def open(self) -> bool:
        return self.stage in (Stage.WANTED, Stage.COPYING)


@dataclass
class Board:
    """A wake, as its copies go."""

    serial: int
    segments: dict[int, Coming]
    stopped: bool = False
    cancelled: bool = False
    ahead: bool = False  # for no lease


# --- the compute thread


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

    def _carry_out(self, item: o.Order | o.ComputeAnswer) -> Iterator[Wait]:
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
            case o.Execute():
                yield from self._execute(item)
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

    def _execute(self, execute: o.Execute) -> Iterator[Wait]:
        lease = self.leases.get(execute.serial)
        if lease is None or execute.serial in self.orders.skipped:
            return
        try:
            serial, secret, number, _, commands = msgpack.unpackb(execute.data)
        except ValueError:
            self.world.post(e.Escaped(lease.tenant.name, "a frame that does not decode"))
            return
        assert (serial, secret) == (lease.serial, SECRET)
        assert not self.world.dones[serial], "a frame of a lease that is over"
        if number != lease.number + 1 or lease.writing is not None:
            assert lease.writing is not None, "frames out of order"
            self.world.post(e.Escaped(lease.tenant.name, "a frame behind the END"))
            return
        lease.number = number
        ended: e.Ended | None = None
        for command in commands:
            yield always
            if command[0] == "bad":
                self.world.post(e.Escaped(lease.tenant.name, "no command"))
                return
            if command[0] == "end":
                lease.waits = command[1]
                yield from self._end(lease)
                ended = self.ended
                break
            with contextlib.suppress(Failed):
                yield from self._command(lease, *command)
        self.world.executed[serial] = number
        replies = [bytes(msgpack.packb([wire.ACK, serial, number]))]
        self.world.post(e.Executed(serial, replies, 0.001, self._use(), ended))

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
        self.ended = e.Ended(storages, claimed, freed, dropped, bool(dirty), bool(gone), used, 0, self.left)
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
        self.world.post(e.Closed(lease.serial, [], dropped, kept, used, 0, left, self._use()))


class Store:
    """Models by version, and tickets. It answers when it is told to."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.sizes: dict[int, int] = {}  # by segment
        self.values: dict[int, int] = {}  # by segment: for ever
        self.models: dict[str, m.Manifest] = {}  # the newest, of instances that there are
        self.asked: dict[int, m.AskPlace] = {}  # not answered
        self.placed: dict[int, list[m.Place]] = {}  # by ticket, until it is let go or written
        self._owner: dict[int, tuple[str, list[int]]] = {}  # (instance, storages) by ticket
        self._slab: dict[int, int] = {}  # value by offset
        self._tickets: Counter[int] = Counter()
        self._offsets = itertools.count(1)
        for number in range(SEGMENTS):
            self.new(size(1 + number % 3), 100 + number)

    def new(self, nbytes: int, segment: int = 0) -> int:
        segment = segment or self.world.fresh()
        self.sizes[segment], self.values[segment] = nbytes, self.world.fresh()
        return segment

    def publish(self, name: str, entries: dict[int, int], order: list[int] | None = None, newer: bool = True) -> None:
        """``entries``: segment by storage."""
        before = self.models.get(name)
        version = (before.version if before is not None else 0) + newer
        self.models[name] = m.Manifest(
            instance=name,
            version=version,
            entries=[m.Entry(storage=n, segment=s, offset=0, nbytes=self.sizes[s]) for n, s in entries.items()],
            segments=[(s, self.sizes[s]) for s in order or entries.values()],
        )
        self.world.from_store.append(self.models[name])

    def entries(self, name: str) -> dict[int, int]:
        model = self.models.get(name)
        return {} if model is None else {entry.storage: entry.segment for entry in model.entries}

    def drop(self, name: str) -> None:
        if self.models.pop(name, None) is not None:
            self.world.from_store.append(m.Dropped(instance=name))

    def heard(self, message: m.ExecutorToStore) -> None:
        match message:
            case m.AskPlace(ticket=ticket):
                assert not self._tickets[ticket], "asked twice"
                self._tickets[ticket] = 1
                self._owner[ticket] = (message.instance, [storage for storage, _ in message.storages])
                self.asked[ticket] = message
            case m.Written(ticket=ticket, freed=freed):
                assert ticket in self.placed, "written to what is not its own"
                places = self.placed.pop(ticket)
                name, storages = self._owner[ticket]
                assert all(place.offset in self._slab for place in places), "written, and it was not"
                if name in self.models:
                    entries = {n: s for n, s in self.entries(name).items() if n not in freed}
                    for storage, place in zip(storages, places, strict=True):
                        self.values[place.segment] = self._slab[place.offset]
                        entries[storage] = place.segment
                    self.publish(name, entries)
            case m.LetGo(ticket=ticket):
                assert self._tickets[ticket] == 1, "let go twice, or never asked"
                self._tickets[ticket] = 2
                self.asked.pop(ticket, None)
                self.placed.pop(ticket, None)
            case _:
                assert isinstance(message, m.FirstUse)

    def answer(self, ticket: int, refuse: bool) -> None:
        ask = self.asked.pop(ticket)
        if refuse or ask.instance not in self.models:
            self.world.no_room |= {s for s, wake in self.world.wakes.items() if wake.instance == ask.instance}
            self.world.from_store.append(m.PlaceRefused(ticket=ticket, text="no room"))
            return
        places = []
        for _, nbytes in ask.storages:
            segment = self.new(nbytes)
            places.append(m.Place(segment=segment, slab=ticket, offset=next(self._offsets), nbytes=nbytes))
        self.placed[ticket] = places
        self.world.from_store.append(m.Placed(ticket=ticket, places=places))

    def write(self, place: m.Place, value: int) -> None:
        assert place in self.placed[place.slab], "it was let go"
        self._slab[place.offset] = value

    def read(self, place: m.Place) -> int:
        assert place in self.placed[place.slab], "it was let go"
        return self._slab[place.offset]


# --- everybody


@dataclass
class Seat:
    """A lease as the controller knows it."""

    serial: int
    instance: str
    turn: bool = True
    wants: bool = False
    revoked: bool = False


@dataclass
class Sender:
    """A lease as its instance knows it."""

    instance: str
    number: int = 0
    acknowledged: int = 0
    ended: bool = False
    refused: bool = False


class World:
    """Plays all but the machine, and sees to it that everybody keeps the rules."""

    def __init__(self, pool: str, turns: int, share: bool) -> None:
        books = POOLS[pool]()
        self.capacity, self.turns = books.capacity, turns
        self.machine = Machine(books, share=share, turns=turns, turn_s=1.0)
        self.now_s = 0.0
        self._numbers = itertools.count(1000)
        self.store = Store(self)
        self.posts: deque[Callable[[], None]] = deque()  # what other threads have for the executor's
        self.from_store: deque[m.Manifest | m.Dropped | m.Placed | m.PlaceRefused] = deque()
        self.from_controller: deque[e.Event] = deque()
        self.to_controller: deque[o.Effect] = deque()
        self.boards: list[Board] = []
        self._events: deque[e.Event] = deque()
        self._handling = False
        self.compute = Compute(self, books, share)
        self.ledger = Ledger()
        # what the controller knows
        self.seats: dict[int, Seat] = {}
        self._serials = itertools.count(1)
        # what instances know
        self.attached: set[str] = set()
        self.hostile: set[str] = set()
        self.gone: set[str] = set()  # said to the machine, or on the way
        self.senders: dict[int, Sender] = {}
        # what has been, by serial
        self.wakes: dict[int, m.Wake] = {}
        self.given: Counter[int] = Counter()  # frames to the compute thread
        self.executed: Counter[int] = Counter()
        self.dones: Counter[int] = Counter()
        self.copied: Counter[int] = Counter()
        self.begun: set[int] = set()
        self.overs: set[int] = set()
        self.revoked: set[int] = set()
        self.no_room: set[int] = set()  # the store or the device had none for what the lease had made
        self.spilled: set[int] = set()  # that have left once
        self.turn: set[int] = set()  # as the machine has been told
        self.idle: set[int] = set()  # as it has told
        self.expelled: set[str] = set()
        self.pins: list[tuple[int, list[tuple[int, int]], int]] = []  # (segment, extents, value)
        # preloads, by serial
        self.last_ahead = 0  # that has begun
        self.given_up: set[int] = set()  # before they have
        self.preloading = False  # as the controller knows
        self.preloads: Counter[str] = Counter()  # by outcome

    def fresh(self) -> int:
        return next(self._numbers)

    # --- the executor's thread

    def later(self, work: Callable[[], None]) -> None:
        self.posts.append(work)

    def post(self, event: e.Event) -> None:
        self.later(partial(self.handle, event))

    def hear_posts(self) -> None:
        while self.posts:
            self.posts.popleft()()

    def handle(self, event: e.Event) -> None:
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        while self._events:
            first = self._events.popleft()
            if isinstance(first, e.MayWrite | e.Relieve):
                assert not self.compute.orders.asked, "two questions at once"
            self.compute.orders.heard(first)
            self._before(first)
            self.now_s += 0.001
            effects = self.machine.handle(first, self.now_s)
            self.machine.check()
            for effect in effects:
                self._perform(effect)
            if isinstance(first, e.MayWrite):
                assert not self.compute.orders.asked, "no answer"
            stats = self.machine.stats()
            total = (
                stats.weights_nbytes + stats.kv_nbytes + stats.lost_nbytes + stats.activation_nbytes + stats.free_nbytes
            )
            assert total == self.capacity
            occupied_nbytes = self.machine.residency.occupied_nbytes
            assert stats.weights_nbytes + stats.lost_nbytes == occupied_nbytes == self.ledger.nbytes
            assert self.ledger.limit_nbytes in (0, self.capacity - occupied_nbytes), "room that nobody was told of"
        self._handling = False

    def _before(self, event: e.Event) -> None:
        match event:
            case e.WakeAsked(wake=wake):
                self.turn.add(wake.lease.serial)
                self.wakes[wake.lease.serial] = wake
            case m.Turn(serial=serial):
                self.turn.add(serial)
            case m.Pause(serial=serial):
                self.turn.discard(serial)
                self.idle.discard(serial)
            case m.Revoke(serial=serial):
                self.turn.discard(serial)
                self.revoked.add(serial)
            case m.Over(serials=serials):
                self.turn -= set(serials)
                books = self.machine._state
                waiting = {first.wake.lease.serial for first in books.coming if isinstance(first, e.WakeAsked)}
                self.overs |= set(serials) & (books.leases.keys() | waiting)
            case e.Detached(instance=instance):
                self.attached.discard(instance)
            case _:
                pass

    def _perform(self, effect: o.Effect) -> None:
        match effect:
            case o.Skip(serial=serial):
                self.compute.orders.skipped.add(serial)
                for board in self.boards:
                    if board.serial == serial:
                        self._give_up(board)
            case o.Reply(instance=instance, message=message):
                for reply in wire.replies(message):
                    self._replied(instance, reply)
            case o.Expel(instance=instance):
                assert instance in self.hostile, f"{instance} did nothing wrong: {effect.text}"
                assert instance not in self.expelled, "expelled twice"
                self.expelled.add(instance)
                self.to_controller.append(effect)
            case m.Done():
                self._done(effect)
                self.to_controller.append(effect)
            case m.Idle(serial=serial):
                assert serial in self.turn - self.idle
                self.idle.add(serial)
            case m.Busy(serial=serial):
                assert serial in self.idle
                self.idle.discard(serial)
            case m.WantsTurn(serial=serial):
                assert serial not in self.turn
                self.to_controller.append(effect)
            case m.Pressed() | m.Metered():
                pass
            case m.AskPlace() | m.Written() | m.LetGo() | m.FirstUse():
                self.store.heard(effect)
            case o.ToRuntimeOf() | o.OpenRuntime():
                raise AssertionError("no language model is here")
            case o.StopBringing(serial=serial):
                self.stop_ahead(serial)
            case m.Preloaded() | m.Unloaded():
                self.to_controller.append(effect)
            case _:
                self._order(effect)
                self.compute.orders.give(effect)

    def _order(self, order: o.Order | o.ComputeAnswer) -> None:
        match order:
            case o.Arrange():
                self.ledger.arrange(order)
            case o.Bring(missing=missing):
                self.ledger.give([(offset, nbytes) for _, offset, nbytes in missing], self.memory.paged)
            case o.CopyOut(serial=serial, spill=True):
                self.spilled.add(serial)
            case o.Close(brought=brought):
                self.ledger.give([(offset, nbytes) for _, _, offset, nbytes in brought], self.memory.paged)
            case o.Execute(serial=serial, data=data):
                wake = self.wakes[serial]
                self.given[serial] += 1
                assert read_header(data) == FrameHeader(serial, SECRET, self.given[serial])
                assert serial in self.turn, "a frame without a turn"
                assert not self.dones[serial]
                assert wake.instance in self.attached - self.expelled
                assert serial in self.begun
            case o.Begin(serial=serial, instance=instance) | o.Return(begin=o.Begin(serial=serial, instance=instance)):
                begin = order if isinstance(order, o.Begin) else order.begin
                assert (serial in self.begun) == isinstance(order, o.Return)
                self.begun.add(serial)
                assert instance == self.wakes[serial].instance
                assert begin.refused or self.machine.residency.seated(instance), "a turn without a seat"
                self.ledger.give([(offset, nbytes) for _, offset, nbytes in begin.missing], self.memory.paged)
            case _:
                pass

    def _done(self, done: m.Done) -> None:
        serial = done.serial
        wake = self.wakes[serial]
        self.dones[serial] += 1
        assert self.dones[serial] == 1, "two ends"
        assert serial not in self.machine.leases
        assert serial not in self.compute.leases
        self.turn.discard(serial)
        match done.outcome:
            case "ended" if serial not in self.overs:
                assert self.senders[serial].ended
                honest = wake.instance not in self.hostile
                assert not honest or self.executed[serial] == self.given[serial] == self.senders[serial].number
                assert not honest or not self.senders[serial].refused
            case "ended":
                pass
            case "revoked":
                assert serial in self.revoked | self.no_room | self.spilled or wake.instance in self.gone
            case _:
                assert wake.instance in self.expelled
        if not self.memory.torn:
            assert done.copied_nbytes == self.copied[serial]

    @property
    def memory(self) -> Memory:
        return self.compute.memory

    def _replied(self, instance: str, reply: list[Any]) -> None:
        serial = reply[1]
        sender = self.senders[serial]
        if reply[0] == wire.ACK:
            assert reply[2] == sender.acknowledged + 1
            sender.acknowledged += 1
        elif sender.instance == instance:
            sender.refused = True
            if reply[3] == wire.SEAT_LOST:
                assert serial in self.no_room | self.spilled or serial not in self.begun
                self.no_room.add(serial)

    # --- copies

    def begin_copies(self, board: Board) -> None:
        self.boards.append(board)

    def stop_copies(self, board: Board, cancel: bool) -> None:
        self._give_up(board)
        board.stopped, board.cancelled = True, cancel

    def _give_up(self, board: Board) -> None:
        lost = [coming for coming in board.segments.values() if coming.stage is Stage.WANTED]
        for coming in lost:
            coming.stage = Stage.LOST
        if lost:
            self.handle(e.Came(board.serial, [coming.segment for coming in lost], lost=True))

    def begin_ahead(self, board: Board) -> None:
        """What nobody has asked for."""
        self.last_ahead = board.serial
        if board.serial in self.given_up:
            self.given_up.discard(board.serial)
            self.handle(e.Brought(board.serial, e.WakeRemains(lost=list(board.segments))))
            return
        self.boards.append(board)
        self._settle_ahead(board)

    def stop_ahead(self, serial: int) -> None:
        board = next((each for each in self.boards if each.serial == serial), None)
        if board is None:
            if serial < self.last_ahead:
                self.given_up.add(serial)
            return
        for coming in board.segments.values():
            if coming.open:  # the chunk that is being copied ends, and no other begins
                coming.stage = Stage.CANCELLED
        self._settle_ahead(board)

    def _settle_ahead(self, board: Board) -> None:
        if board not in self.boards or any(coming.open for coming in board.segments.values()):
            return
        self.boards.remove(board)
        there = [each.segment for each in board.segments.values() if each.stage is Stage.THERE]
        lost = [each.segment for each in board.segments.values() if each.stage is not Stage.THERE]
        self.handle(e.Brought(board.serial, e.WakeRemains(there, lost, Sources())))

    def _came_ahead(self, board: Board, segment: int) -> None:
        if board in self.boards:  # else it was given up, and what has come by then is known
            self.handle(e.Came(board.serial, [segment]))
            self._settle_ahead(board)

    def copies(self) -> list[tuple[Board, Coming]]:
        return [(board, coming) for board in self.boards for coming in board.segments.values() if coming.open]

    def copy(self, board: Board, coming: Coming, lose: bool = False) -> None:
        """One goes on, or a source fails."""
        if board.ahead and coming.stage is Stage.WANTED and lose:
            coming.stage = Stage.LOST
            self._settle_ahead(board)
        elif coming.stage is Stage.WANTED and lose:
            coming.stage = Stage.LOST
            self.handle(e.Came(board.serial, [coming.segment], lost=True))
        elif coming.stage is Stage.WANTED:
            coming.stage = Stage.COPYING
            self.memory.write(coming.offset, coming.nbytes, WRONG)
        elif board.cancelled and lose:
            coming.stage = Stage.CANCELLED
        else:
            self.memory.write(coming.offset, coming.nbytes, self.store.values[coming.segment])
            coming.stage = Stage.THERE
            if board.ahead:
                self.later(partial(self._came_ahead, board, coming.segment))
            elif not board.cancelled:
                self.post(e.Came(board.serial, [coming.segment]))

    # --- what can go on by itself

    def moves(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        if self.compute.able():
            found.append(self.compute.go)
        if self.posts:
            found.append(lambda: self.posts.popleft()())
        if self.from_store:
            found.append(lambda: self.handle(self.from_store.popleft()))
        if self.from_controller:
            found.append(lambda: self.handle(self.from_controller.popleft()))
        if self.to_controller:
            found.append(lambda: self._controller_hears(self.to_controller.popleft()))
        found += [partial(self.store.answer, ticket, False) for ticket in self.store.asked]
        found += [partial(self.copy, *each) for each in self.copies()]
        return found

    def settle(self) -> None:
        """Until nobody has anything to do."""
        for _ in range(5000):
            moves = self.moves()
            if not moves:
                return
            moves[0]()
        raise AssertionError("it does not come to rest")

    # --- the controller

    def _controller_hears(self, said: o.Effect) -> None:
        match said:
            case m.Done(serial=serial):
                self.seats.pop(serial, None)
            case m.WantsTurn(serial=serial):
                if (seat := self.seats.get(serial)) is not None:
                    assert not seat.turn
                    seat.wants = True
            case o.Expel(instance=instance):
                self.forget(instance)
            case m.Preloaded(outcome=outcome):
                assert self.preloading, "nobody has asked for it"
                self.preloading = False
                self.preloads[outcome] += 1
            case _:
                pass

    def preload(self, instance: str, worth: dict[str, float]) -> None:
        if not self.preloading:
            self.preloading = True
            model = self.store.models.get(instance)
            asked = m.Preload(
                instance=instance, version=model.version if model is not None else 0, worth=worth, peers=[]
            )
            self.from_controller.append(e.PreloadAsked(asked, e.WakeRates(1.0, 0.0)))

    def forget(self, instance: str) -> None:
        """It is gone."""
        if instance in self.gone:
            return
        self.gone.add(instance)
        for seat in self.seats.values():
            if seat.instance == instance:
                self.revoke(seat)
        self.from_controller.append(e.Detached(instance))

    def free_turns(self) -> int:
        return self.turns - sum(seat.turn for seat in self.seats.values())

    def wakeable(self) -> list[str]:
        leased = {seat.instance for seat in self.seats.values()}
        return sorted(self.attached - leased - self.gone - self.expelled)

    def wake(self, instance: str, newest: bool, wish_nbytes: int, worth: dict[str, float]) -> int:
        serial = next(self._serials)
        model = self.store.models.get(instance)
        wake = m.Wake(
            lease=m.Lease(gpu=0, epoch=1, serial=serial, secret=SECRET),
            instance=instance,
            version=model.version if newest and model is not None else 0,
            worth=worth,
            peers=[],
            activation_nbytes=wish_nbytes,
        )
        self.seats[serial], self.senders[serial] = Seat(serial, instance), Sender(instance)
        self.from_controller.append(e.WakeAsked(wake, e.WakeRates(1.0, 0.0)))
        return serial

    def running(self) -> list[Seat]:
        """Who may lose the turn: the executor has said that it has it."""
        told = {event.serial for event in self.from_controller if isinstance(event, m.Turn | m.Pause)}
        leases = self.machine.leases
        return [
            seat
            for serial, seat in self.seats.items()
            if seat.turn
            and serial not in told
            and serial in leases
            and leases[serial].state is LeaseState.RUNNING
            and not self.changed(seat)  # a lease that has left goes on with the model it began with
        ]

    def changed(self, seat: Seat) -> bool:
        """Its model is not the one any more that it began with."""
        instance, model = self.machine._state.instances.get(seat.instance), self.store.models.get(seat.instance)
        return instance is not None and model is not None and instance.manifest.version != model.version

    def pause(self, seat: Seat) -> None:
        seat.turn = False
        self.from_controller.append(m.Pause(serial=seat.serial))

    def give_turn(self, seat: Seat) -> None:
        seat.turn, seat.wants = True, False
        self.from_controller.append(m.Turn(serial=seat.serial))

    def revoke(self, seat: Seat) -> None:
        if not seat.revoked:
            seat.revoked = True
            self.from_controller.append(m.Revoke(serial=seat.serial))

    def unused(self) -> list[Seat]:
        """Whose instances can say that they gave the GPU nothing."""
        return [seat for serial, seat in self.seats.items() if not self.senders[serial].number and not seat.revoked]

    def over(self, seat: Seat) -> None:
        del self.seats[seat.serial]
        self.senders[seat.serial].ended = True
        self.from_controller.append(m.Over(serials=[seat.serial]))

    # --- instances

    def attach(self, name: str) -> None:
        self.attached.add(name)
        manifest = m.Manifest(instance=name, version=0, entries=[], segments=[])
        self.compute.tenants[name] = Tenant(name, manifest)
        self.handle(e.InstanceAttached(name, "t"))

    def sending(self) -> list[Seat]:
        """Who may send a frame."""
        return [
            seat
            for serial, seat in self.seats.items()
            if seat.instance in self.attached - self.gone - self.expelled
            and not (sender := self.senders[serial]).ended
            and not sender.refused
            and sender.number - sender.acknowledged < wire.WINDOW_FRAMES
        ]

    def send(self, seat: Seat, commands: list[list[Any]]) -> None:
        sender = self.senders[seat.serial]
        sender.number += 1
        sender.ended = sender.ended or any(command[0] == "end" for command in commands)
        data = msgpack.packb([seat.serial, SECRET, sender.number, [[], []], commands])
        self.handle(e.Heard(seat.instance, data))

    # --- the end

    def play_out(self) -> None:
        """Everybody comes to his end, if turns are given to those that want them."""
        for _ in range(200):
            self.settle()
            if not self.seats:
                break
            for seat in list(self.seats.values()):
                if seat.instance in self.hostile:
                    self.revoke(seat)
            for seat in self.sending():
                self.send(seat, [["read", 0, 0], ["end", True]])
            self.settle()
            for seat in [seat for seat in self.seats.values() if seat.wants and not seat.turn]:
                if self.free_turns() > 0:
                    self.give_turn(seat)
        assert not self.seats, f"they wait for ever: {self.machine.leases}"
        self.settle()
        books = self.machine._state
        assert not self.machine.leases
        assert not books.coming
        assert books.preload is None
        assert not self.preloading, "no word of a preload"
        assert not any(board.ahead for board in self.boards)
        assert not self.given_up
        assert not self.store.asked
        assert not self.store.placed
        assert not self.compute.leases
        assert not self.compute.orders.asked
        for serial, wake in self.wakes.items():
            without_trace = serial in self.overs and serial not in self.begun
            assert self.dones[serial] == (not without_trace), f"no Done of {wake}"
        while self.pins:
            self.unpin(0)
        for name in sorted(self.attached):
            self.forget(name)
        for name in sorted(self.store.models):
            self.store.drop(name)
        self.settle()
        assert not self.attached
        assert self.machine.residency.occupied_nbytes == 0
        assert self.compute.now_nbytes == 0
        self.compute._arrange()

    # --- other GPUs

    def pin(self, segments: list[int]) -> None:
        for segment, extents in self.machine.residency.pin(segments):
            value = self.memory.read_extents(extents)
            assert value == self.store.values[segment], f"segment {segment} is not here"
            self.pins.append((segment, extents, value))

    def unpin(self, index: int) -> None:
        segment, extents, value = self.pins.pop(index)
        assert self.memory.read_extents(extents) == value, f"segment {segment} has changed while another GPU read it"
        self.handle(e.Forgotten(self.machine.residency.let_go([segment])))


T = TypeVar("T")
PROGRAMS: Final[list[list[list[Any]]]] = [
    [],
    [["read", 0, 0], ["read", 1, 0]],
    [["read", 2, 0], ["read", 3, 0]],
    [["write", 0, 0]],
    [["write", 1, 0], ["read", 1, 0]],
    [["write", 2, 1]],
    [["create", 0, 1]],
    [["create", 0, 2], ["write", 5, 0]],
    [["create", 0, 3]],
    [["free", 1, 0]],
    [["create", 0, 1], ["end", True]],
    [["read", 0, 0], ["end", False]],
    [["write", 0, 0], ["end", True]],
    [["end", True]],
]
NAMES: Final = "abcd"
CHOICE = st.integers(0, 11)
MODEL = st.lists(st.integers(0, SEGMENTS - 1), min_size=1, max_size=4, unique=True)


class Leases(RuleBasedStateMachine):
    """Everybody does what he likes, as far as he may."""

    world: World

    @initialize(
        pool=st.sampled_from(sorted(POOLS)),
        turns=st.sampled_from([1, 2]),
        share=st.booleans(),
        models=st.lists(MODEL, min_size=4, max_size=4),
    )
    def begin(self, pool: str, turns: int, share: bool, models: list[list[int]]) -> None:
        self.world = World(pool, turns, share)
        for name, segments in zip(NAMES, models, strict=True):
            self.publish(name, segments)
            self.world.attach(name)

    def publish(self, name: str, segments: list[int]) -> None:
        self.world.store.publish(name, {number: 100 + segment for number, segment in enumerate(segments)})

    def teardown(self) -> None:
        if hasattr(self, "world") and sys.exception() is None:
            self.world.play_out()

    @rule(choices=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 999)), min_size=10, max_size=40))
    def it_goes_on(self, choices: list[tuple[int, int]]) -> None:
        """Mostly by itself; and now and then the controller and the instances do something."""
        world = self.world
        for kind, which in choices:
            found = world.moves() if kind else []
            found = found or [
                partial(act, which // 16)
                for act in (self.wake, self.pause, self.give_turn, self.send, self.lose, self.preload)
            ]
            found[which % len(found)]()

    @rule()
    def it_comes_to_rest(self) -> None:
        self.world.settle()

    @rule(seconds=st.sampled_from([0.1, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds
        self.world.handle(e.Tick())

    # --- the controller and the instances

    def wake(self, which: int) -> None:
        names = self.world.wakeable()
        if names and self.world.free_turns() > 0:
            worth = {name: float(1 + (which + number) % 3) for number, name in enumerate(NAMES)}
            self.world.wake(names[which % len(names)], bool(which % 3), which % 4 * UNIT, worth)

    def preload(self, which: int) -> None:
        """Or what comes is given up."""
        names = sorted(self.world.attached - self.world.gone)
        if self.world.seats and which % 4:
            return  # it would be refused
        if which % 8 == 7:
            self.world.from_controller.append(m.StopPreload())
        elif names:
            worth = {name: float(1 + (which + number) % 3) for number, name in enumerate(NAMES)}
            name = names[which % len(names)]
            self.world.preload(name, worth | {name: 9.0 if which % 3 else 1.0})

    def pause(self, which: int) -> None:
        if seats := self.world.running():
            self.world.pause(seats[which % len(seats)])

    def give_turn(self, which: int) -> None:
        seats = [seat for seat in self.world.seats.values() if seat.wants and not seat.turn]
        if seats and self.world.free_turns() > 0:
            self.world.give_turn(seats[which % len(seats)])

    def send(self, which: int) -> None:
        if seats := self.world.sending():
            self.world.send(seats[which % len(seats)], PROGRAMS[which // 3 % len(PROGRAMS)])

    def lose(self, which: int) -> None:
        if (copies := self.world.copies()) and which % 3 == 0:
            self.world.copy(*copies[which % len(copies)], lose=True)

    # --- what happens to them

    @rule(kind=st.integers(0, 5), which=st.integers(0, 999), segments=MODEL)
    def something_happens(self, kind: int, which: int, segments: list[int]) -> None:
        world = self.world
        match kind:
            case 0 if world.seats:
                world.revoke(list(world.seats.values())[which % len(world.seats)])
            case 1 if unused := world.unused():
                world.over(unused[which % len(unused)])
            case 2 if world.store.asked:
                world.store.answer(sorted(world.store.asked)[which % len(world.store.asked)], refuse=True)
            case 3:
                world.compute.refuses = True
            case 4:
                self.hostile(which)
            case 5:
                self.dies(which, segments)
            case _:
                pass

    def hostile(self, which: int) -> None:
        """An instance sends what it should not: of any lease, with any secret or number; or no frame at all."""
        world = self.world
        if names := sorted(world.attached - world.gone):
            name, which = names[which % len(names)], which // len(names)
            world.hostile.add(name)
            serial, which = which % (len(world.senders) + 1), which // (len(world.senders) + 1)
            world.senders.setdefault(serial, Sender(""))
            secret, number = SECRET + (which % 3 > 1), which % 4
            own = [seat.serial for seat in world.sending() if seat.instance == name]
            if own and which % 2:
                serial, secret, number = own[0], SECRET + 1, world.senders[own[0]].number + 1
            command = ["bad"] if which % 2 else ["read", 0, 0]
            data = msgpack.packb([serial, secret, number, [[], []], [command]])
            world.handle(e.Heard(name, data[: len(data) // 4] if which % 5 == 4 else data))

    def dies(self, which: int, segments: list[int]) -> None:
        """And another takes its place; both are said by the controller and by the store, in any order."""
        world = self.world
        names = sorted(world.attached - world.gone)
        if not names:
            return
        name = names[which % len(names)]
        for part in (world.forget, world.store.drop) if which % 2 else (world.store.drop, world.forget):
            part(name)
        name = f"{name[0]}{len(world.gone)}"
        for part in (world.attach, partial(self.publish, segments=segments))[:: 1 if which % 3 else -1]:
            part(name)

    # --- the store and other GPUs

    @rule(which=CHOICE, segment=st.integers(0, SEGMENTS - 1), number=st.integers(0, 4), newer=st.booleans())
    def a_model_changes(self, which: int, segment: int, number: int, newer: bool) -> None:
        """By an upload, or only its order."""
        store = self.world.store
        if not (names := sorted(store.models)):
            return
        name = names[which % len(names)]
        entries = store.entries(name)
        paused = any(seat.instance == name and seat not in self.world.running() for seat in self.world.seats.values())
        if (
            newer and 100 + segment not in entries.values() and not paused
        ):  # a lease that has left goes on with the model it began with
            store.publish(name, entries | {number: 100 + segment})
        else:
            store.publish(name, entries, order=sorted(entries.values(), reverse=bool(number % 2)), newer=False)

    @rule(segments=MODEL)
    def another_gpu_reads(self, segments: list[int]) -> None:
        """And what one has read is let go."""
        world = self.world
        if len(world.pins) > 2:
            world.unpin(len(segments) % len(world.pins))
        world.pin([100 + segment for segment in segments])


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=150, stateful_step_count=60, derandomize=True, deadline=None)


# --- what it has found: each as short as it could be made


class Hand:
    """A machine that is told everything by hand."""

    def __init__(self, pool: str = "regions", turns: int = 1, share: bool = False) -> None:
        self.machine = Machine(POOLS[pool](), share=share, turns=turns, turn_s=1.0)
        self.now_s = 0.0

    def __call__(self, event: e.Event) -> list[o.Effect]:
        self.now_s += 1.0
        effects = self.machine.handle(event, self.now_s)
        self.machine.check()
        return effects

    def model(self, name: str, *units: int, first: int = 100, version: int = 1) -> list[o.Effect]:
        """Storage n is a segment of so many units; its number is ``first`` + n."""
        entries = [m.Entry(storage=n, segment=first + n, offset=0, nbytes=size(each)) for n, each in enumerate(units)]
        segments = [(entry.segment, entry.nbytes) for entry in entries]
        return self(m.Manifest(instance=name, version=version, entries=entries, segments=segments))

    def attach(self, name: str, *units: int, first: int = 100) -> None:
        self(e.InstanceAttached(name, "t"))
        self.model(name, *units, first=first)

    def wake(self, serial: int, name: str) -> list[o.Effect]:
        effects = self(e.WakeAsked(wake_of(serial, name), e.WakeRates(1.0, 0.0)))
        missing = [segment for begin in effects if isinstance(begin, o.Begin) for segment, _, _ in begin.missing]
        self(e.Came(serial, missing))
        return effects

    def frame(self, serial: int, number: int, name: str) -> list[o.Effect]:
        return self(e.Heard(name, msgpack.packb([serial, SECRET, number, [[], []], []])))

    def executed(self, serial: int, ended: e.Ended | None = None) -> list[o.Effect]:
        return self(e.Executed(serial, [], 0.0, e.Use(), ended))

    def leaves(self, serial: int, *storages: int) -> list[o.Effect]:
        """It was told to; what comes of that."""
        lease = self.machine.leases[serial]
        left = e.WakeRemains(list(lease.missing_nbytes) if lease.copies else [])
        asked = self(e.Owned(serial, [(storage, size(1)) for storage in storages], left))
        for ask in asked:
            if isinstance(ask, m.AskPlace):
                self(m.Placed(ticket=ask.ticket, places=[place(1000 + number) for number in storages]))
        return self(e.CopiedOut(serial, True, [], e.Use()))


def wake_of(serial: int, name: str) -> m.Wake:
    lease = m.Lease(gpu=0, epoch=1, serial=serial, secret=SECRET)
    return m.Wake(lease=lease, instance=name, version=0, worth={}, peers=[], activation_nbytes=0)


def place(segment: int) -> m.Place:
    return m.Place(segment=segment, slab=0, offset=0, nbytes=size(1))


def of(kind: type[T], effects: list[o.Effect]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def a_seat_that_left(hand: Hand, *storages: int) -> None:
    """Lease 1 of a has left, and its turn is free: lease 2 of b, which has its room, is paused and has no command."""
    hand.attach("a", 8)
    hand.attach("b", 8, first=200)
    hand.wake(1, "a")
    hand.frame(1, 1, "a")
    hand.executed(1)
    hand(m.Pause(serial=1))
    assert of(o.Own, hand.wake(2, "b"))
    hand.leaves(1, *storages)
    hand(e.Came(2, [200]))
    hand(m.Pause(serial=2))


def test_what_only_an_older_version_had_goes_wherever_its_instance_is() -> None:
    hand = Hand()
    hand.attach("a", 1)
    hand.model("b", 1)
    hand.wake(1, "a")
    hand(m.Over(serials=[1]))
    hand(e.Closed(1, [], [], [], [], 0, e.WakeRemains([100]), e.Use()))
    hand(m.Dropped(instance="a"))
    assert 100 in hand.machine.residency.pool
    hand.model("b", 1, first=200, version=2)
    assert 100 not in hand.machine.residency.pool


@pytest.mark.parametrize("ended", [False, True])
def test_what_a_lease_wrote_that_is_cut_off_is_bound_again(ended: bool) -> None:
    """compute.py takes what it wrote, or freed, out of reach: the next lease has to be told where that is."""
    hand = Hand()
    hand.attach("a", 1)
    hand.wake(1, "a")
    hand(m.Over(serials=[1]))
    hand(e.Closed(1, [], [], [], [], 0, e.WakeRemains([100]), e.Use()))
    for serial in (2, 3):
        hand.wake(serial, "a")
        [begin] = of(o.Begin, hand.frame(serial, 1, "a"))
        assert (begin.missing, begin.places) == ([], {100: (0, size(1))})
        if not ended:
            hand.executed(serial)
        hand(m.Revoke(serial=serial))
        if ended:  # its END was under way
            hand.executed(serial, e.Ended([], {}, [0], [], False, True, [], 0, e.WakeRemains()))
        hand(e.Closed(serial, [], [], [], [100], 0, e.WakeRemains(), e.Use()))


def test_a_seat_whose_model_was_changed_behind_its_back_does_not_come_back() -> None:
    hand = Hand()
    a_seat_that_left(hand)
    hand.model("a", 8, first=300, version=2)
    effects = hand(m.Turn(serial=1))
    [told] = [reply for each in of(o.Reply, effects) for reply in wire.replies(each.message)]
    assert told[0] == wire.REFUSED
    assert told[3] == wire.SEAT_LOST
    assert of(o.Close, effects)
    assert not of(o.Return, effects)


def test_a_lease_without_its_model_writes_what_it_has_made() -> None:
    hand = Hand()
    hand.attach("a", 20)
    hand.wake(1, "a")
    hand.frame(1, 1, "a")
    [ask] = of(m.AskPlace, hand.executed(1, e.Ended([(7, size(1))], {}, [], [], False, False, [], 0, e.WakeRemains())))
    hand(m.Placed(ticket=ask.ticket, places=[place(1000)]))
    hand(e.CopiedOut(1, False, [], e.Use()))
    entries = [m.Entry(storage=7, segment=1000, offset=0, nbytes=size(1))]
    hand(m.Manifest(instance="a", version=2, entries=entries, segments=[(1000, size(1))]))  # KeyError


@pytest.mark.parametrize("refused", [False, True])
def test_who_waits_for_a_seat_to_be_left_is_answered_when_that_lease_ends(refused: bool) -> None:
    """Its Close is one of the orders that are carried out while the compute thread waits."""
    hand, given = Hand(), Orders()
    for serial, name in ((1, "a"), (2, "b")):
        hand.attach(name, 1, first=100 * serial)
        hand.wake(serial, name)
        hand.frame(serial, 1, name)
        if serial == 1:
            hand.executed(1)
            hand(m.Pause(serial=1))
    given.heard(relieve := e.Relieve(2, 0, 0))
    [own] = of(o.Own, hand(relieve))
    given.give(own)
    [ask] = of(m.AskPlace, hand(e.Owned(1, [(0, size(1))], e.WakeRemains([100]))))
    [close] = of(o.Close, hand(m.PlaceRefused(ticket=ask.ticket, text="full") if refused else m.Revoke(serial=1)))
    given.give(close)
    assert list(given.urgent) == [own, close]
    assert of(o.ComputeAnswer, hand(e.Closed(1, [], [], [], [], 0, e.WakeRemains(), e.Use())))


def test_a_lease_is_not_asked_what_it_owns_before_it_has_begun() -> None:
    """The compute thread is in a frame of another, which asks for room: it would know nothing of the lease."""
    hand = Hand(turns=2)
    hand.attach("a", 1)
    hand.attach("b", 1, first=200)
    hand.wake(1, "a")
    hand.frame(1, 1, "a")
    assert of(o.Begin, hand.wake(2, "b"))
    hand(m.Pause(serial=2))
    [answer] = hand(e.Relieve(1, 0, 0))
    assert isinstance(answer, o.ComputeAnswer)


def test_a_seat_that_the_device_had_refused_comes_back() -> None:
    """Its model begins to come, is not told to, and is for ever on its way for others."""
    hand = Hand()
    for name, first in (("a", 100), ("b", 200), ("c", 300), ("d", 100)):
        hand.attach(name, 8, first=first)
    hand.wake(1, "a")
    hand(e.Unmapped(1, "the GPU refused memory", []))
    hand(m.Pause(serial=1))
    hand.wake(2, "b")
    hand(m.Pause(serial=2))
    hand.wake(3, "c")
    hand.leaves(1)
    hand.leaves(2)
    hand(m.Over(serials=[3]))
    hand(e.Closed(3, [], [], [], [], 0, e.WakeRemains([300]), e.Use()))
    effects = hand(m.Turn(serial=1))
    assert of(o.Return, effects) or not hand.machine.residency.coming("d")


def test_who_waits_for_seats_that_have_had_no_command_is_answered() -> None:
    hand = Hand(share=True)
    for serial, name in ((1, "a"), (2, "b")):
        hand.attach(name)
        hand.wake(serial, name)
        hand(m.Pause(serial=serial))
    hand.attach("c")
    hand.wake(3, "c")
    hand.frame(3, 1, "c")
    assert of(o.ComputeAnswer, hand(e.Relieve(3, 20 * UNIT, 0)))


def test_a_revoke_of_a_wake_that_waits_is_no_end_of_those_before_it() -> None:
    hand = Hand()
    for serial, name in enumerate("abc", 1):
        hand.attach(name)
        hand.wake(serial, name)
    hand.frame(2, 1, "b")
    assert not of(o.Reply, hand(m.Revoke(serial=3)))


# waits for a mend: the wake was planned on memory that is refused now
@pytest.mark.xfail(strict=True)
def test_memory_that_the_device_has_refused_is_nobodys() -> None:
    """Another wake was planned meanwhile, behind addresses that the books said were mapped."""
    hand = Hand("pages", turns=2)
    hand.attach("a", 1)
    hand.attach("b", 1, first=200)
    [plan] = of(o.Arrange, hand.wake(1, "a"))
    assert plan.plans[0].mapped
    assert of(o.Begin, hand.wake(2, "b"))
    assert 200 in hand.machine.residency.pool
    effects = hand(e.Unmapped(1, "the GPU refused memory", []))
    mapped = [each for arrange in of(o.Arrange, effects) for each in arrange.plans if each.mapped]
    assert mapped or 200 not in hand.machine.residency.pool


def test_over_ends_a_wake_that_waits() -> None:
    """Else it has a turn later of which the controller knows nothing, and keeps it."""
    hand = Hand()
    hand.attach("a")
    hand.attach("b")
    hand.wake(1, "a")
    hand.wake(2, "b")
    hand(m.Over(serials=[2]))
    hand(m.Over(serials=[1]))
    assert not hand.machine.leases


def test_what_another_seat_holds_is_not_written_in_place() -> None:
    """Though its instance has another manifest by now, which has not reached it."""
    hand = Hand(turns=2)
    hand.attach("a", 1)
    hand.attach("b", 1)
    hand.wake(1, "a")
    hand.frame(1, 1, "a")
    hand.model("a", 1, first=200, version=2)
    hand.wake(2, "b")
    hand.frame(2, 1, "b")
    assert hand(e.MayWrite(2, 100)) == [o.ComputeAnswer(None)]


def test_an_instance_dies_when_its_write_back_is_done() -> None:
    """Nobody waits for the manifest then; the lease ends."""
    hand = Hand()
    hand.attach("a", 1)
    hand.wake(1, "a")
    hand.frame(1, 1, "a")
    [ask] = of(
        m.AskPlace, hand.executed(1, e.Ended([(7, size(1))], {}, [], [], False, False, [], 0, e.WakeRemains([100])))
    )
    hand(m.Placed(ticket=ask.ticket, places=[place(1000)]))
    assert of(m.Written, hand(e.CopiedOut(1, False, [], e.Use())))
    effects = hand(e.Detached("a"))
    assert of(o.Close, effects)


def test_what_was_written_in_place_goes_if_the_end_is_too_late() -> None:
    """It was under way when the lease was cut off: the compute thread has named what it wrote with it, once."""
    hand = Hand()
    hand.attach("a", 1)
    hand.wake(1, "a")
    hand.frame(1, 1, "a")
    [answer] = of(o.ComputeAnswer, hand(e.MayWrite(1, 100)))
    assert answer.value in hand.machine.residency.pool
    assert of(o.Close, hand(m.Revoke(serial=1)))
    hand.executed(1, e.Ended([(0, size(1))], {0: answer.value}, [], [], True, False, [100], 0, e.WakeRemains([100])))
    hand(e.Closed(1, [], [], [], [100], 0, e.WakeRemains(), e.Use()))
    assert hand.machine.residency.occupied_nbytes == 0


def test_what_only_a_version_in_between_had_goes() -> None:
    """Its instance had a lease all the while, and was never bound to it."""
    hand = Hand()
    hand.attach("a", 1)
    hand.attach("b", 1, first=200)
    hand.wake(1, "a")
    hand(m.Over(serials=[1]))
    hand(e.Closed(1, [], [], [], [], 0, e.WakeRemains([100]), e.Use()))
    hand.wake(2, "b")
    hand.model("b", 1, first=100, version=2)
    hand(m.Dropped(instance="a"))
    assert 100 in hand.machine.residency.pool
    hand.model("b", 1, first=200, version=3)
    assert 100 not in hand.machine.residency.pool


def test_what_did_not_come_is_bound_again_after_a_lease_that_left_and_came_back() -> None:
    """To that lease it stays lost, though others have brought it meanwhile."""
    hand = Hand()
    hand.attach("a", 1, 1)
    hand.attach("b", 12, first=200)
    hand.attach("c", 1, 1)
    hand(e.WakeAsked(wake_of(1, "a"), e.WakeRates(1.0, 0.0)))
    hand(e.Came(1, [100], lost=True))
    hand(e.Came(1, [101]))
    hand.frame(1, 1, "a")
    hand.executed(1)
    hand(m.Pause(serial=1))
    assert of(o.Own, hand.wake(2, "b"))
    hand(e.Owned(1, [], e.WakeRemains([101], [100])))
    assert of(o.Begin, hand(e.CopiedOut(1, True, [], e.Use())))
    hand(m.Over(serials=[2]))
    hand(e.Closed(2, [], [], [], [], 0, e.WakeRemains([200]), e.Use()))
    hand.wake(3, "c")
    hand(m.Over(serials=[3]))
    hand(e.Closed(3, [], [], [], [], 0, e.WakeRemains([100, 101]), e.Use()))
    [back] = of(o.Return, hand(m.Turn(serial=1)))
    assert not back.begin.missing
    hand(e.SeatReturned(1, e.Use()))
    hand.frame(1, 2, "a")
    hand.executed(1, e.Ended([], {}, [], [], False, False, [], 0, e.WakeRemains()))
    hand.wake(4, "a")
    [begin] = of(o.Begin, hand.frame(4, 1, "a"))
    assert begin.places is not None
