"""Leases of runtimes: seats with KV that grows, and turns of steps. Pure, on `MachineState`.

A runtime's turn ends between two of its steps. The controller is notified that the turn may pass to another (Idle): at
once, if the runtime goes on in its current seat, for it computes one step in any case; else after its first step,
without which the seat would have been of no use. If no other lease wants the turn, the steps go on. So others wait for
one step, which is a brief one where ordinary functions have leases, or have computed lately. Runtimes wait for each
other's whole prompts, as the sequences of a batch do: pieces would cost each of them a turn. The seat ends when
everything is unmapped there, or its runtime is dead.

Instances of one group whose models are the same bytes, except for adapters, share a runtime: each has a lease of its
own, with a seat that costs its adapter and nothing more. The runtime computes for all of them in one batch, whichever
of them has the turn, so one of them asks for it. KV belongs to the runtime. One lease may end while others go on: then
its adapter is unmapped before its memory is reused. When the seat has to be left, all leave it.
"""

from collections.abc import Iterable
from typing import Final, assert_never

from dormouse.core.decisions.leases import adapters, endings, growth, preloads, reclaim, seats
from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.held import SEATED, TURN, AttachedInstance, HeldLease, LeaseState, RuntimeBooks
from dormouse.core.decisions.leases.state import MachineState
from dormouse.core.decisions.rules.pace import SHARED_S
from dormouse.schemas import messages as m

MAX_MEMBERS: Final = 500
"""Most leases of one runtime, which has numbers for so many adapters and a few more; a later instance gets another
runtime.
"""


def runtime_for(state: MachineState, name: str, instance: AttachedInstance) -> str:
    """Returns the runtime that is to compute for this instance: that of its group, if its model is the one there."""
    if not instance.group:
        return name
    own, others = _segments(state, name), [lease.instance for lease in state.members(instance.group)]
    if len(others) < MAX_MEMBERS and all(
        _fits(own, instance.adapter, _segments(state, other), state.adapted(other)) for other in others
    ):
        return instance.group
    return name


def _fits(own: set[int], adapter: bool, theirs: set[int], their_adapter: bool) -> bool:
    """Whether two models may be the same, except for adapters. Of two models with adapters, the base's segments are not
    known here; the runtime checks them, and refuses a different base.
    """
    if adapter and their_adapter:
        return not own.isdisjoint(theirs)
    return (own >= theirs if adapter else own == theirs) or (their_adapter and own <= theirs)


def open_ahead(state: MachineState, name: str) -> None:
    """Its model comes before any request: starting its process takes longer than copying most models."""
    instance = state.instances[name]
    if instance.llm:
        state.emit(o.OpenRuntime(name, runtime_for(state, name, instance)))


def _segments(state: MachineState, name: str) -> set[int]:
    known = state.manifests.get(name)
    return set() if known is None else {segment for segment, _ in known.segments}


def may_begin(state: MachineState, runtime: str) -> bool:
    """Whether it may begin: not while it has a turn to give back, nor while its mapping is about to be cleared:
    anything given now would be lost with it.
    """
    books = state.runtimes.get(runtime)
    return not (books is not None and books.owes) and not any(
        other.state in (LeaseState.LEAVING, LeaseState.CLOSING) and not other.vacated
        for other in state.members(runtime)
    )


def seated(state: MachineState, lease: HeldLease) -> None:
    """It has a seat. The runtime is notified once the device is in the state of the books."""
    books = state.runtimes.setdefault(lease.runtime, RuntimeBooks(lease.runtime))
    if not any(other.state in SEATED for other in state.members(lease.runtime) if other is not lease):
        reclaim.forget(books)
    lease.vacated = lease.parts = False
    lease.seated_s = state.now_s
    state.press(seated=True)  # its lease can last for long, and a report at its end would be late
    state.emit(o.Mark(lease.serial, []))
    if lease.state is LeaseState.RUNNING:
        turn_begins(state, lease)


def turn_begins(state: MachineState, lease: HeldLease, lent: bool = False) -> None:
    books = state.runtimes[lease.runtime]
    books.wanting, books.lent, books.short = False, lent, False
    ordinary = any(not other.runtime for other in state.leases.values())
    brief_s = SHARED_S if ordinary else max(0.0, state.ordinary_s + SHARED_S - state.now_s)
    state.tell(lease, m.TurnBegins(brief_ms=round(brief_s * 1000), lent=lent))


def may_be_anothers(state: MachineState, lease: HeldLease, rests: bool = False) -> None:
    if not lease.idle:
        lease.idle = True
        state.emit(m.Idle(serial=lease.serial, rests=rests))


def marked(state: MachineState, event: e.Marked) -> None:
    """The compute thread has carried out the plans for this seat, or for these extents of KV."""
    if event.extents:
        _grown(state, event.extents)
        return
    lease = state.leases.get(event.serial)
    if lease is None or lease.state not in SEATED:
        return
    if not lease.refused:
        _give(state, lease, state.residency.places(lease.instance), writable=False)
    state.tell(lease, _seat(state, lease))


def _grown(state: MachineState, numbers: list[int]) -> None:
    """Extents have been mapped. The lease that asked may be gone while others of its runtime remain."""
    for books in state.runtimes.values():
        lease = growth.seated(state, books)
        if lease is not None and not set(numbers).isdisjoint(state.kv(books)):
            _give(state, lease, numbers, writable=True)
            extents = [(number, state.residency.pool.offset(number)) for number in numbers]
            state.tell(lease, m.KvGiven(extents=extents))


def _give(state: MachineState, lease: HeldLease, segments: Iterable[int], writable: bool) -> None:
    granules = [m.GranuleAt(**each._asdict()) for each in state.residency.pool.granules(segments)]
    state.tell(lease, m.GranulesGiven(granules=granules, writable=writable))


def _seat(state: MachineState, lease: HeldLease) -> m.SeatGiven:
    if lease.refused:
        return m.SeatGiven(serial=lease.serial, storages=[], missing=[], refused=lease.refused)
    manifest, places = state.instances[lease.instance].manifest, state.residency.places(lease.instance)
    return m.SeatGiven(
        serial=lease.serial,
        storages=[
            m.StorageAt(
                storage=entry.storage,
                segment=entry.segment,
                offset=places[entry.segment][0] + entry.offset,
                nbytes=entry.nbytes,
            )
            for entry in manifest.entries
        ],
        missing=[segment for segment in places if state.residency.arriving(segment)],
        joins=lease.wake.joins,
    )


def said(state: MachineState, event: e.SaidByRuntime) -> None:
    speaker = state.leases.get(event.serial)
    if speaker is None or not speaker.runtime:
        return
    books, members = state.runtimes[speaker.runtime], state.members(speaker.runtime)
    books.waits = False  # it goes on, or this message says otherwise
    match event.message:
        case m.SeatLeft():
            _lent_over(state, books)
            _left(state, books)
        case m.TurnGivenBack(wants=wants, due=due, stepped=stepped):
            if stepped is not None:
                _stepped(state, books, speaker, stepped)
            there, books.owes = growth.seated(state, books) is not None, False
            for lease in members:
                if lease.state is LeaseState.YIELDING:
                    state.to(lease, LeaseState.PAUSED)
                elif there and lease.state is LeaseState.CLOSING and not (lease.vacated or lease.parts):
                    endings.vacate(state, lease)
            books.wanting, books.due = wants, _checked(due, members)
            if books.lent:
                _lent_over(state, books)
                _tell_due(state, books)
        case m.Stepped():
            _stepped(state, books, speaker, event.message)
        case m.StepsWanted(due=due):
            books.wanting, books.due = True, _checked(due, members)
            _tell_due(state, books)
        case m.StepWaits():
            books.waits = True
        case m.LoadChanged(load=load, busy=busy):
            rested, books.rests, books.running = books.rests, not load.running and not load.waiting, load.running
            books.wanting &= not books.rests  # the work that it wanted when it was given the turn is computed
            if not books.rests:
                preloads.give_up(state)
            elif not rested and (turns := [each for each in members if each.state is LeaseState.RUNNING and each.idle]):
                state.emit(m.Idle(serial=turns[0].serial, rests=True))
            adapters.told_busy(state, members, set(busy))
        case m.MemberLeft(serial=serial):
            for lease in members:
                if lease.serial == serial:
                    adapters.left(state, lease)
        case m.KvWanted():
            growth.grow(state, books, event.message)
        case m.KvReturned() if any(state.residency.seated(lease.instance) for lease in members):
            reclaim.returned(state, books, event.message)
        case m.KvReturned():
            pass  # its seat was left meanwhile, and that with it
        case _:
            assert_never(event.message)


def _tell_due(state: MachineState, books: RuntimeBooks) -> None:
    """Sends the controller its work, if its wish for a turn was sent already."""
    for lease in state.members(books.name):
        if lease.wants and books.due is not None:
            state.emit(m.WantsTurn(serial=lease.serial, due=books.due))


def _stepped(state: MachineState, books: RuntimeBooks, speaker: HeldLease, step: m.Stepped) -> None:
    reclaim.told(books, step.idle)
    if step.busy_us:
        preloads.give_up(state)
    lease = growth.seated(state, books) or speaker
    _meter(state, books, lease, step)
    lease.reached = lease.used = True
    lease.since_s = state.now_s
    if lease.state is LeaseState.RUNNING:
        may_be_anothers(state, lease, rests=not step.busy_us)


def _checked(due: m.StepsDue | None, members: Iterable[HeldLease]) -> m.StepsDue | None:
    """Keeps the entries of its own leases, each once."""
    if due is None:
        return None
    serials = {lease.serial for lease in members}
    own = {each.serial: each for each in due.prompts if each.serial in serials and each.tokens > 0}
    return m.StepsDue(prompts=list(own.values()), decoding=max(0, due.decoding))


def _meter(state: MachineState, books: RuntimeBooks, turn: HeldLease, step: m.Stepped) -> None:
    """Its time is divided among all whose tokens were in the step; it is that of ``turn``, the lease with the turn, if
    none is named.
    """
    members = {lease.serial: lease for lease in state.members(books.name)}
    named = {members[share.serial].instance: share for share in step.shares if share.serial in members}
    if not named:
        turn.busy_us += state.meter.busy(turn.instance, step.busy_us / 1e6)
        return
    parts = state.meter.stepped(books.kv_owner, step.busy_us, named)
    for lease in members.values():
        lease.busy_us += parts.get(lease.instance, 0)


def want(state: MachineState) -> None:
    """For each runtime that has work, one lease asks for a turn, unless one has it, or is about to."""
    adapters.want(state)
    for books in state.runtimes.values():
        if not books.wanting:
            continue
        members = state.members(books.name)
        if any(lease.state in TURN or lease.wants for lease in members) or _comes(state, books):
            continue
        waiting = (LeaseState.PAUSED, LeaseState.LEAVING, LeaseState.AWAY)
        if (lease := next((each for each in members if each.state in waiting), None)) is not None:
            lease.wants = True
            state.emit(m.WantsTurn(serial=lease.serial, due=books.due))


def lend(state: MachineState) -> None:
    """While a step of the runtime with the turn, or of one about to give it back, waits for its weights, another
    runtime with all of its weights has a step: the one that has had none for longest. The turn stays where it is. Once
    the weights have come, two may compute for the rest of that step.
    """
    turns = [lease for lease in state.leases.values() if lease.runtime and lease.state in TURN]
    if not any(state.runtimes[lease.runtime].waits for lease in turns) or seats.lent(state):
        return
    able = [lease for lease in state.leases.values() if lease.state is LeaseState.PAUSED and _may_borrow(state, lease)]
    if (lease := min(able, key=lambda each: each.since_s, default=None)) is not None:
        turn_begins(state, lease, lent=True)
        state.end_turn(lease)


def _lent_over(state: MachineState, books: RuntimeBooks) -> None:
    if books.lent:
        books.lent = False
        state.look()


def _may_borrow(state: MachineState, lease: HeldLease) -> bool:
    books = state.runtimes.get(lease.runtime)
    if books is None or not books.wanting or books.short or not may_begin(state, lease.runtime):
        return False
    return not any(each.state in TURN for each in state.members(lease.runtime)) and not any(
        state.residency.arriving(segment) for segment in state.instances[lease.instance].segments
    )


def _comes(state: MachineState, books: RuntimeBooks) -> bool:
    """Whether a lease that it will compute for waits for its segments, with a turn."""
    for first in state.coming:
        if isinstance(first, int):
            found = state.leases.get(first)
            if found is not None and found.runtime == books.name:
                return True
        elif (instance := state.instances.get(first.wake.instance)) is not None and instance.group == books.name:
            return True
    return False


def _left(state: MachineState, books: RuntimeBooks) -> None:
    """Nothing of the pool is mapped there any more: its KV is gone, and leases that waited for that go on."""
    going = (LeaseState.LEAVING, LeaseState.CLOSING)
    left = [lease for lease in state.members(books.name) if lease.state in going and not lease.vacated]
    if not left:
        return
    books.kv_wanted = None
    state.drop(state.kv(books))
    for lease in left:
        if lease.state is LeaseState.LEAVING:
            lease.vacated = True
            state.emit(o.Own(lease.serial))
        else:
            endings.vacate(state, lease)


def gone(state: MachineState, event: e.RuntimeGone) -> None:
    """All of its leases end: their instances ask again."""
    books = state.runtimes.get(event.runtime)
    if books is None:
        return
    members = state.members(books.name)
    waiting = [lease for lease in members if lease.state is not LeaseState.CLOSING or not lease.vacated]
    for lease in waiting:
        if lease.state is not LeaseState.CLOSING:
            state.to(lease, LeaseState.CLOSING)
            lease.outcome = "revoked"
    books.kv_wanted, books.waits, books.lent, books.owes = None, False, False, False
    state.drop(state.kv(books))
    for lease in waiting:
        endings.vacate(state, lease)


def unwanted(state: MachineState, event: e.SeatUnwanted) -> None:
    lease = state.leases.get(event.serial)
    if lease is not None and lease.state is not LeaseState.CLOSING:
        endings.close(state, lease, event.outcome)
