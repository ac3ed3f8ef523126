"""A runtime's main loop: receives from its executor and, through it, its instances; computes steps during its turns.

It owns one socket (executor_link.py) and its mappings of the pool's memory (mapping.py). One thread: messages are
received between two steps, and where a layer waits for its weights (weights.py) or a step for KV memory (extents.py).
"""

import socket
import time

import msgspec

from dormouse.core.decisions.batches.batch import NO_ADAPTER
from dormouse.core.decisions.rules.batching import BatchRule
from dormouse.gpuserver.runtime.engine import BadLogits, Engine
from dormouse.gpuserver.runtime.executor_link import ExecutorLink
from dormouse.gpuserver.runtime.extents import KvExtents
from dormouse.gpuserver.runtime.mapping import PoolMapping
from dormouse.gpuserver.runtime.members import Member, Members
from dormouse.gpuserver.runtime.progress import StepProgress
from dormouse.gpuserver.runtime.sequences import MemberSequences
from dormouse.gpuserver.runtime.serving_model import ServingModel
from dormouse.gpuserver.runtime.turn import RuntimeTurn
from dormouse.gpuserver.runtime.weights import SeatWeights, StepCut
from dormouse.gpuserver.runtime.work import step_shares
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError


class RuntimeProcess:
    """See the module."""

    def __init__(self, sock: socket.socket, mapping: PoolMapping, rule: BatchRule | None = None) -> None:
        self._mapping = mapping
        self._link = ExecutorLink(sock, self._mapping)
        self._link.leaves = self._member_leaves
        self._bound = SeatWeights(self._link, self._mapping)
        self._kv = KvExtents(self._link, self._mapping)
        self._members = Members()
        self._progress = StepProgress()
        self._serving = ServingModel(mapping, self._bound, self._kv)
        self._sequences = MemberSequences(self._link, self._serving, self._members, self._progress, rule)
        self._seats: dict[int, m.SeatGiven] = {}  # by lease
        self._awaited: set[int] = set()  # leases whose adapter is on its way
        self._turn = RuntimeTurn()
        self._offered_s = 0.0  # as it was before the step

    # --- the loop

    def run(self) -> None:
        """Until the executor hangs up. Raises PeerLost."""
        heard = self._link.heard
        while True:
            self._link.hear(not heard and not self._ready, self._sequences.due_s)
            while heard:
                self._act(heard.popleft())
            self._sequences.join_gathered()
            for serial in list(self._awaited):  # segments come between steps, and in their middle
                self._open(serial)
            if self._turn.over(self._ready):
                self._give_turn_back()
            if self._ready:
                self._step()
            elif self._turn.held and not self._turn.told_idle:
                self._turn.told_idle = True
                self._link.say(m.Stepped(busy_us=0, idle=self._kv.idle))
            elif self._working and not self._turn.held and (not self._turn.wants or self._progress.news):
                self._turn.wants = True
                self._link.say(m.StepsWanted(due=self._sequences.due()))

    @property
    def _engine(self) -> Engine | None:
        return self._serving.engine

    @property
    def _working(self) -> bool:
        return self._engine is not None and self._engine.batch.ready

    @property
    def _ready(self) -> bool:
        return self._turn.held and self._serving.placed and self._working

    def _give_turn_back(self, stepped: m.Stepped | None = None) -> None:
        self._turn.given_back(wants := self._working)
        self._link.say(m.TurnGivenBack(wants=wants, due=self._sequences.due() if wants else None, stepped=stepped))

    def _act(self, message: m.ExecutorToRuntime) -> None:
        match message:
            case m.SeatGiven(serial=serial):
                self._bound.missing.update(message.missing)
                self._seats[serial] = message
                if message.joins is not None:
                    self._sequences.wanted(serial, message.joins)
                self._open(serial)
            case m.MemberLeaves():
                self._member_leaves(message)
            case m.SegmentsCame():
                self._bound.came(message)
            case m.SeatEnds():
                self._leave()
                self._link.say(m.SeatLeft())
            case m.TurnBegins(brief_ms=brief_ms, lent=lent):
                self._turn.begins(brief_ms, time.perf_counter(), lent)
            case m.TurnEnds():
                self._turn.ends()
            case m.ForRuntime(data=data, serial=serial):
                self._from_instance(serial, msgspec.msgpack.decode(data, type=m.InstanceToRuntime))
            case m.KvReclaim(nbytes=nbytes):
                self._kv.reclaim(nbytes)
            case m.KvGiven(extents=extents):  # nobody waits for it any more
                self._kv.send_back([number for number, _ in extents])

    def _member_leaves(self, message: m.MemberLeaves) -> None:
        """Between steps, or in the plan of one."""
        (self._unseat if message.stays else self._dismiss)(message.serial)
        if message.granules:
            self._mapping.unmap(message.granules)
        if message.granules or message.stays:  # no step reads its memory any more
            self._link.say(m.MemberLeft(serial=message.serial))
        self._sequences.tell_load()

    def _leave(self) -> None:
        """Nothing of the pool is mapped here after this; sequences begin anew with the next seat."""
        if self._engine is not None:
            self._engine.batch.preempt_all()
            for member in self._members.by_serial.values():
                if member.number != NO_ADAPTER:
                    self._engine.unbind(member.number)
        self._serving.left()
        self._kv.clear()
        self._bound.missing.clear()
        self._seats.clear()
        self._awaited.clear()
        self._turn.held = False
        self._sequences.tell_load()

    # --- instances

    def _from_instance(self, serial: int, message: m.InstanceToRuntime) -> None:
        if isinstance(message, m.OpenModel):
            self._dismiss(serial, keep_seat=True)
            self._members.open(serial, message)
            self._open(serial)
        elif (member := self._members.by_serial.get(serial)) is not None:
            self._from_member(member, message)

    def _from_member(self, member: Member, message: m.Weights | m.AdapterPart | m.Submit | m.Mask | m.Abort) -> None:
        match message:
            case m.Weights(weights=weights):
                member.weights.update({weight.name: weight for weight in weights})
                self._open(member.serial)
            case m.AdapterPart(adapter=part):
                try:
                    member.part(part)
                except ConfigError as error:
                    self._refuse_model(member, error)
                else:
                    self._open(member.serial)
            case m.Submit() | m.Mask() | m.Abort():
                self._sequences.heard(member, message)

    def _dismiss(self, serial: int, keep_seat: bool = False) -> None:
        """Nothing more is computed for it. Weights that it has bound stay: others have the same."""
        if not keep_seat:
            self._forget_seat(serial)
        member = self._members.by_serial.get(serial)
        self._awaited.discard(serial)
        for number in self._members.leave(serial):
            self._sequences.remove(number)
        if not keep_seat:
            self._sequences.lease_over(serial)
        if member is not None and member.number != NO_ADAPTER and self._engine is not None:
            self._engine.adapters.close(member.number)

    def _unseat(self, serial: int) -> None:
        """Its adapter leaves; others have the same base."""
        self._forget_seat(serial)
        self._awaited.discard(serial)
        member = self._members.by_serial.get(serial)
        if member is not None and member.number != NO_ADAPTER and self._engine is not None:
            self._engine.unbind(member.number)

    def _forget_seat(self, serial: int) -> None:
        """Segments that only that seat had are no longer missing."""
        self._seats.pop(serial, None)
        others = {each.segment for seat in self._seats.values() for each in seat.storages}
        self._bound.missing.intersection_update(others)

    def _open(self, serial: int) -> None:
        """Build the model when everything about it is known, and bind it when its memory is here."""
        member, seat = self._members.by_serial.get(serial), self._seats.get(serial)
        if member is None or not member.known:
            return
        try:
            self._serving.build(member, alone=len(self._members.by_serial) == 1)
            if seat is not None:
                self._awaited.discard(serial)
                if self._serving.bind(member, seat):
                    self._awaited.add(serial)
        except (ConfigError, ValueError) as error:
            self._refuse_model(member, error)

    def _refuse_model(self, member: Member, error: Exception) -> None:
        member.refused = str(error)
        self._link.tell(member.serial, m.ModelRefused(text=member.refused))

    # --- steps

    def _step(self) -> None:
        assert self._engine is not None
        began_s, waited_s, room_s = time.perf_counter(), self._bound.waited_s, self._kv.waited_s
        known = {each.number for each in self._engine.batch.running}
        self._offered_s = self._bound.offered_s
        self._turn.stepped = True
        # a step that waits for weights takes as long as their copies in any case
        self._engine.batch.brief = self._turn.brief(began_s) and not self._bound.missing
        try:
            made = self._engine.step()
        except StepCut:  # the time until then was its turn's all the same
            self._link.say(self._stepped(began_s))
            return
        except BadLogits as error:  # the others are well: they have the next step; this one took its time
            for number in error.numbers:
                self._sequences.refuse(number, "bad_logits")
            made = []
        self._mapping.settle()  # a turn that is given back is over on the device too
        took_s = time.perf_counter() - began_s
        if made is None:
            if self._turn.lent:  # others make room in its own
                self._engine.batch.retry()
            else:
                self._stuck()
            return
        begun = [each for each in self._engine.batch.running if each.number not in known]
        waited_s, room_s = self._bound.waited_s - waited_s, self._kv.waited_s - room_s
        if not waited_s:
            self._kv.cost.stepped(int((took_s - room_s) * 1e6), *self._engine.step_tokens)
        for each in begun:
            if not each.preempted:
                self._kv.cost.began(each.prompt, each.reused)
        firsts = self._progress.stepped(began_s, waited_s, room_s, self._engine, made)
        if self._engine.batch.idle:
            self._kv.give_back()
        self._turn.told_idle = True
        stepped = self._stepped(began_s, self._kv.idle)
        self._link.hear(block=False)
        ends = self._turn.over_by(self._link.heard)
        if ends:  # first: whoever has the next turn computes while this is reported
            self._give_turn_back(stepped)
        self._sequences.tell_made(made, firsts)
        if not ends:
            self._link.say(stepped)
        self._sequences.tell_load()

    def _stepped(self, began_s: float, idle: m.IdleKv | None = None) -> m.Stepped:
        assert self._engine is not None
        took_s = time.perf_counter() - began_s
        offered_s = self._bound.offered_s - self._offered_s  # whoever has computed then reports it itself
        busy_us = max(1, int((took_s - offered_s) * 1e6))
        shares = step_shares(self._engine.step_work, self._engine.batch.running)
        return m.Stepped(busy_us=busy_us, idle=idle, shares=shares)

    def _stuck(self) -> None:
        """No room for even one sequence, though all others have given theirs: it never fits."""
        assert self._engine is not None
        if not self._engine.batch.running and (first := self._engine.batch.next(time.perf_counter())) is not None:
            self._sequences.refuse(first.number, "no_room")
