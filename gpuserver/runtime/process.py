"""A runtime's main loop: hears its executor and, through it, its instance; computes a step while it has a turn.

It owns one socket (executor_link.py) and its mappings of the pool's memory (mapping.py). One thread: what it hears is
heard between two steps, and where a layer waits for its weights (weights.py) or a step for KV memory (extents.py).
"""

import os
import signal
import socket
import time
from contextlib import suppress
from typing import Final

import msgspec
from transformers import PreTrainedModel

from dormouse.core.sandbox import linux, seccomp
from dormouse.gpuserver.runtime import models
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.engine import BadLogits, Engine, Made, kv_layout
from dormouse.gpuserver.runtime.executor_link import ExecutorLink
from dormouse.gpuserver.runtime.extents import KvExtents
from dormouse.gpuserver.runtime.mapping import HostMapping, PoolMapping
from dormouse.gpuserver.runtime.progress import SequenceBegun, StepProgress
from dormouse.gpuserver.runtime.sampling import BadMask
from dormouse.gpuserver.runtime.submissions import Submissions, generation_of
from dormouse.gpuserver.runtime.weights import SeatWeights, StepCut
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError

PACKET_TOKENS: Final = 256
"""Tokens in one packet to the instance, at most."""


def confine(uid: int) -> None:
    """Give up everything that a runtime does not need: other uids, new rights, being looked into."""
    if uid != os.getuid():
        with suppress(OSError):  # a kernel without network namespaces: the filter below refuses sockets
            linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWIPC)
        linux.change_user(uid)
        linux.die_with_parent_signal(signal.SIGKILL)  # a change of user clears it
    linux.drop_capabilities()
    linux.set_no_new_privileges()
    linux.set_dumpable(False)
    seccomp.install(uncounted=True)


def mapping_for(spawn: m.SpawnRuntime) -> PoolMapping:
    """On its device. Raises DeviceError."""
    if spawn.gpu < 0:
        return HostMapping(spawn.address_nbytes)
    from dormouse.gpuserver.runtime.cuda_mapping import CudaMapping

    return CudaMapping(spawn.gpu, spawn.address_nbytes, spawn.activation_nbytes)


class RuntimeProcess:
    """See the module."""

    def __init__(self, sock: socket.socket, mapping: PoolMapping) -> None:
        self._mapping = mapping
        self._link = ExecutorLink(sock, self._mapping)
        self._bound = SeatWeights(self._link, self._mapping)
        self._kv = KvExtents(self._link, self._mapping)
        self._submissions = Submissions()
        self._progress = StepProgress()
        self._spec: m.OpenModel | None = None
        self._weights: dict[str, m.WeightAt] = {}
        self._model: PreTrainedModel | None = None
        self._engine: Engine | None = None
        self._seat: m.SeatGiven | None = None
        self._turn = False
        self._turn_ends = False
        self._stepped = False  # in this turn
        self._brief_until_s = 0.0  # steps are brief
        self._told_idle = False  # in this turn
        self._wants = False  # that was said
        self._refused = ""  # why no token will come

    # --- the loop

    def run(self) -> None:
        """Until the executor hangs up. Raises PeerLost."""
        heard = self._link.heard
        while True:
            self._link.hear(block=not heard and not self._ready)
            while heard:
                self._act(heard.popleft())
            if self._turn_ends and (self._stepped or not self._ready):
                self._turn = self._turn_ends = False
                self._link.say(m.TurnGivenBack(wants=self._working))
                self._wants = self._working
            if self._ready:
                self._step()
            elif self._turn and not self._told_idle:
                self._told_idle = True
                self._link.say(m.Stepped(busy_us=0))
            elif self._working and not self._turn and not self._wants:
                self._wants = True
                self._link.say(m.StepsWanted())

    @property
    def _working(self) -> bool:
        return self._engine is not None and self._engine.batch.ready

    @property
    def _ready(self) -> bool:
        return self._turn and self._seat is not None and self._working and not self._refused

    def _act(self, message: m.ExecutorToRuntime) -> None:
        match message:
            case m.SeatGiven():
                self._seat, self._bound.missing = message, set(message.missing)
                self._open()
            case m.SegmentsCame():
                self._bound.came(message)
            case m.SeatEnds():
                self._leave()
                self._link.say(m.SeatLeft())
            case m.TurnBegins(brief_ms=brief_ms):
                self._turn, self._stepped = True, False
                self._turn_ends = self._told_idle = self._wants = False
                self._brief_until_s = time.perf_counter() + brief_ms / 1000
            case m.TurnEnds():
                self._turn_ends = True
            case m.ForRuntime(data=data):
                self._from_instance(msgspec.msgpack.decode(data, type=m.InstanceToRuntime))
            case m.KvReclaim(nbytes=nbytes):
                self._kv.reclaim(nbytes)
            case m.KvGiven(extents=extents):  # nobody waits for it any more
                self._kv.send_back([number for number, _ in extents])

    def _leave(self) -> None:
        """Nothing of the pool is mapped here after this; sequences begin anew with the next seat."""
        if self._engine is not None:
            self._engine.batch.preempt_all()
        self._kv.clear()
        self._seat, self._bound.missing = None, set()
        self._tell_load()

    # --- the instance

    def _from_instance(self, message: m.InstanceToRuntime) -> None:
        match message:
            case m.OpenModel():  # of a new lease: what was under way is submitted anew
                for number in list(self._engine.generations) if self._engine is not None else ():
                    self._remove(number)
                self._submissions.clear()
                self._spec, self._weights, self._refused = message, {}, ""
                self._open()
            case m.Weights(weights=weights):
                self._weights.update({weight.name: weight for weight in weights})
                self._open()
            case m.Submit():
                self._submit(message)
            case m.Mask(number=number, position=position, bits=bits):
                self._allow(number, position, bits)
            case m.Abort(number=number):
                self._submissions.forget(number)
                self._remove(number)
                self._tell_load()

    def _open(self) -> None:
        """Build the model when everything about it is known, and bind it when its memory is here."""
        if self._spec is None or len(self._weights) < self._spec.weights:
            return
        spec = self._spec.spec
        try:
            if self._engine is None:
                layout = kv_layout(spec)
                attention = BlockAttention(layout, self._mapping.elements(layout.dtype))
                self._model = models.build(spec, attention)
                self._engine = self._kv.engine = Engine(self._model, attention, self._kv.grow)
            if self._seat is not None:
                assert self._model is not None
                self._bound.bind(self._model, self._weights, self._seat, models.DTYPES[spec.dtype])
        except (ConfigError, ValueError) as error:
            self._refused = str(error)
            self._link.tell(m.ModelRefused(text=self._refused))

    def _submit(self, submit: m.Submit) -> None:
        tokens = self._submissions.whole(submit)
        if tokens is None:
            return
        if self._refused:
            self._link.tell(m.ModelRefused(text=self._refused))
            return
        if self._spec is None or self._engine is None or submit.number in self._engine.generations:
            return
        generation = generation_of(submit, tokens, self._spec.spec.vocabulary)
        if generation is None:
            self._refuse(submit.number, "refused")
            return
        self._engine.add(submit.number, generation)
        self._progress.submitted(generation.sequence)

    def _remove(self, number: int) -> None:
        self._progress.forget(number)
        if self._engine is not None:
            self._engine.remove(number)

    def _allow(self, number: int, position: int, bits: bytes) -> None:
        if self._engine is None:
            return
        try:
            self._engine.allow(number, position, bits)
        except BadMask:
            self._remove(number)
            self._refuse(number, "bad_mask")

    # --- steps

    def _step(self) -> None:
        assert self._engine is not None
        began_s, waited_s = time.perf_counter(), self._bound.waited_s
        known = {each.number for each in self._engine.batch.running}
        self._stepped = True
        # a step that waits for weights takes as long as their copies in any case
        self._engine.batch.brief = began_s < self._brief_until_s and not self._bound.missing
        try:
            made = self._engine.step()
        except StepCut:
            return
        except BadLogits as error:  # the others are well: they have the next step
            for number in error.numbers:
                self._remove(number)
            failed = [m.ChosenToken(number=number, token=-1, finish="bad_logits") for number in error.numbers]
            self._link.tell(m.Tokens(tokens=failed))
            return
        self._mapping.settle()  # a turn that is given back is over on the device too
        busy_us = int((time.perf_counter() - began_s) * 1e6)
        if made is None:
            self._stuck()
            return
        begun = [each for each in self._engine.batch.running if each.number not in known]
        self._kv.cost.stepped(busy_us, *self._engine.step_tokens)
        for each in begun:
            if not each.preempted:
                self._kv.cost.began(each.prompt, each.reused)
        firsts = self._progress.stepped(began_s, self._bound.waited_s - waited_s, self._engine, made)
        self._tell_made(made, firsts)
        if self._engine.batch.idle:
            self._kv.give_back()
        self._told_idle = True
        self._link.say(m.Stepped(busy_us=busy_us, idle=self._kv.idle))
        self._tell_load()

    def _tell_load(self) -> None:
        if self._engine is not None and (load := self._progress.load(self._engine)) is not None:
            self._link.say(m.LoadChanged(load=load))

    def _stuck(self) -> None:
        """No room for even one sequence, though all others have given theirs: it never fits."""
        assert self._engine is not None
        if not self._engine.batch.running and (first := self._engine.batch.next) is not None:
            self._remove(first.number)
            self._refuse(first.number, "no_room")

    def _refuse(self, number: int, why: str) -> None:
        self._link.tell(m.Tokens(tokens=[m.ChosenToken(number=number, token=-1, finish=why)]))

    def _tell_made(self, made: list[Made], firsts: list[SequenceBegun]) -> None:
        for start in range(0, len(made), PACKET_TOKENS):
            part = [
                m.ChosenToken(
                    number=each.number,
                    token=each.chosen.token,
                    finish=each.finish,
                    logprob=each.chosen.logprob,
                    top=each.chosen.top,
                )
                for each in made[start : start + PACKET_TOKENS]
            ]
            numbers = {each.number for each in part}
            told = [first for first in firsts if first.told.number in numbers]
            reused = [(first.told.number, first.reused) for first in told]
            self._link.tell(m.Tokens(tokens=part, reused=reused, firsts=[first.told for first in told]))
