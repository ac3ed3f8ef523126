"""A runtime's main loop: hears its executor and, through it, its instance; computes a step while it has a turn.

It owns one socket and its mappings of the pool's memory (mapping.py). One thread: what it hears is heard between two
steps, and where a layer waits for its weights.
"""

import os
import select
import signal
import socket
import time
from collections import deque
from contextlib import suppress
from typing import Any, Final

import msgspec
import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from dormouse.core.links.fds import PacketSocket, close_all
from dormouse.core.sandbox import linux, seccomp
from dormouse.gpuserver.runtime import models
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.batch import Sequence
from dormouse.gpuserver.runtime.engine import BadLogits, Engine, Generation, Made, kv_layout
from dormouse.gpuserver.runtime.mapping import PoolMapping
from dormouse.gpuserver.runtime.sampling import Sampling
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError, DormouseError, PeerLost

EXTENT_NBYTES: Final = 2 << 20
"""About the size of an extent: the small granule."""

EXTENTS: Final = 4
"""Asked for at once, at least: a question takes as long as a token of a small model."""

PACKET_TOKENS: Final = 256
"""Tokens in one packet to the instance, at most."""

SILENT_S: Final = 60.0
"""Longest wait for memory, or for weights that are on their way."""


class WeightsLost(DormouseError):
    """Some of the model's memory will not come."""


class StepCut(Exception):
    """The seat ends in the middle of a step that waits for weights; what it has computed does not count."""


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


class RuntimeProcess:
    """See the module. ``address_nbytes``: of the pool's address space."""

    def __init__(self, sock: socket.socket, address_nbytes: int) -> None:
        self._executor: PacketSocket[m.ExecutorToRuntime, m.RuntimeToExecutor] = PacketSocket(sock, m.ExecutorToRuntime)
        sock.setblocking(True)
        self._mapping = PoolMapping(address_nbytes)
        self._heard: deque[m.ExecutorToRuntime] = deque()
        self._spec: m.OpenModel | None = None
        self._weights: dict[str, m.WeightAt] = {}
        self._parts: dict[int, list[int]] = {}  # tokens of sequences whose Submit is not whole
        self._model: PreTrainedModel | None = None
        self._engine: Engine | None = None
        self._seat: m.SeatGiven | None = None
        self._missing: set[int] = set()  # segments that are on their way
        self._turn = False
        self._turn_ends = False
        self._told_idle = False  # in this turn
        self._wants = False  # that was said
        self._refused = ""  # why no token will come
        self._extents: dict[int, tuple[int, int]] = {}  # of KV: where each is mapped
        self._segments: dict[int, int] = {}  # by address of a parameter
        self._hooks: list[RemovableHandle] = []  # of modules that wait for theirs

    # --- the loop

    def run(self) -> None:
        """Until the executor hangs up. Raises PeerLost."""
        while True:
            self._hear(block=not self._heard and not self._ready)
            while self._heard:
                self._act(self._heard.popleft())
            if self._turn_ends:
                self._turn = self._turn_ends = False
                self._say(m.TurnGivenBack(wants=self._working))
                self._wants = self._working
            if self._ready:
                self._step()
            elif self._turn and not self._told_idle:
                self._told_idle = True
                self._say(m.Stepped(busy_us=0))
            elif self._working and not self._turn and not self._wants:
                self._wants = True
                self._say(m.StepsWanted())

    @property
    def _working(self) -> bool:
        return self._engine is not None and not self._engine.batch.idle

    @property
    def _ready(self) -> bool:
        return self._turn and self._seat is not None and self._working and not self._refused

    def _hear(self, block: bool) -> None:
        """Take in what is there; at least one packet if ``block``."""
        while block or select.select([self._executor.sock], [], [], 0)[0]:
            packet = self._executor.recv()
            if packet is None:
                raise PeerLost("the executor has hung up")
            message, fds = packet
            try:
                if isinstance(message, m.GranulesGiven):  # at once: descriptors do not wait
                    self._mapping.map(message.granules, fds, message.writable)
                else:
                    self._heard.append(message)
            finally:
                close_all(fds)
            block = False

    def _say(self, message: m.RuntimeToExecutor) -> None:
        self._executor.send(message)

    def _tell(self, message: m.RuntimeToInstance) -> None:
        self._say(m.FromRuntime(data=msgspec.msgpack.encode(message)))

    def _await(self, *kinds: type[Any]) -> Any:
        """The next message of these kinds; others wait. Raises WeightsLost if none comes."""
        end_s = time.monotonic() + SILENT_S
        while True:
            for index, message in enumerate(self._heard):
                if isinstance(message, kinds):
                    del self._heard[index]
                    return message
            if not select.select([self._executor.sock], [], [], max(0.0, end_s - time.monotonic()))[0]:
                raise WeightsLost(f"the executor has said nothing in {SILENT_S:g} s")
            self._hear(block=True)

    def _act(self, message: m.ExecutorToRuntime) -> None:
        match message:
            case m.SeatGiven():
                self._sit(message)
            case m.SegmentsCame():
                self._came(message)
            case m.SeatEnds():
                self._leave()
                self._say(m.SeatLeft())
            case m.TurnBegins():
                self._turn, self._turn_ends, self._told_idle, self._wants = True, False, False, False
            case m.TurnEnds():
                self._turn_ends = True
            case m.ForRuntime(data=data):
                self._from_instance(msgspec.msgpack.decode(data, type=m.InstanceToRuntime))
            case m.KvGiven(extents=extents):  # nobody waits for it any more
                self._return([number for number, _ in extents])

    # --- the instance

    def _from_instance(self, message: m.InstanceToRuntime) -> None:
        match message:
            case m.OpenModel():
                self._spec, self._weights, self._refused = message, {}, ""
                self._open()
            case m.Weights(weights=weights):
                self._weights.update({weight.name: weight for weight in weights})
                self._open()
            case m.Submit():
                self._submit(message)
            case m.Abort(number=number):
                self._parts.pop(number, None)
                if self._engine is not None:
                    self._engine.remove(number)

    def _open(self) -> None:
        """Build the model when everything about it is known, and bind it when its memory is here."""
        if self._spec is None or len(self._weights) < self._spec.weights:
            return
        try:
            if self._engine is None:
                spec = self._spec.spec
                layout = kv_layout(spec)
                attention = BlockAttention(layout, self._mapping.elements(layout.dtype))
                self._model = models.build(spec, attention)
                self._engine = Engine(self._model, attention, self._grow)
            if self._seat is not None:
                self._bind(self._seat)
        except (ConfigError, ValueError) as error:
            self._refused = str(error)
            self._tell(m.ModelRefused(text=self._refused))

    def _bind(self, seat: m.SeatGiven) -> None:
        """Raises ConfigError."""
        assert self._model is not None
        assert self._spec is not None
        storages = {storage.storage: storage for storage in seat.storages}
        dtype = models.DTYPES[self._spec.spec.dtype]
        tensors: dict[str, torch.Tensor] = {}
        self._segments = {}
        for weight in self._weights.values():
            storage = storages.get(weight.storage)
            numel = 1
            for size in weight.shape:
                numel *= size
            if storage is None or weight.offset < 0 or weight.offset + numel * dtype.itemsize > storage.nbytes:
                raise ConfigError(f"the weight {weight.name!r} lies outside of what is here")
            tensor = self._mapping.tensor(storage.offset + weight.offset, numel, dtype).view(weight.shape)
            tensors[weight.name] = tensor
            self._segments[tensor.data_ptr()] = storage.segment
        models.bind(self._model, tensors)
        self._wait_by_layer()

    def _submit(self, submit: m.Submit) -> None:
        tokens = self._parts.pop(submit.number, [])
        tokens += submit.tokens
        if submit.more:
            self._parts[submit.number] = tokens
            return
        if self._refused:
            self._tell(m.ModelRefused(text=self._refused))
            return
        if self._engine is None or submit.number in self._engine.generations:
            return
        vocabulary = self._spec.spec.vocabulary if self._spec is not None else 0
        if not tokens or min(tokens) < 0 or max(tokens) >= vocabulary or submit.limit <= len(tokens):
            self._tell(m.Tokens(tokens=[m.ChosenToken(number=submit.number, token=-1, finish="refused")]))
            return
        sampling = Sampling(
            temperature=submit.temperature,
            top_p=submit.top_p,
            top_k=submit.top_k,
            min_p=submit.min_p,
            presence_penalty=submit.presence_penalty,
            frequency_penalty=submit.frequency_penalty,
            repetition_penalty=submit.repetition_penalty,
            bias={token: bias for token, bias in submit.bias if 0 <= token < vocabulary},
            seed=submit.seed,
            logprobs=submit.logprobs,
        )
        sequence = Sequence(submit.number, tokens, submit.prompt, submit.limit)
        self._engine.add(submit.number, Generation(sequence, sampling, frozenset(submit.stops)))

    # --- the seat

    def _sit(self, seat: m.SeatGiven) -> None:
        self._seat, self._missing = seat, set(seat.missing)
        self._open()

    def _came(self, came: m.SegmentsCame) -> None:
        if came.lost and self._missing.intersection(came.segments):
            raise WeightsLost("some of the model's memory will not come")
        self._missing.difference_update(came.segments)

    def _leave(self) -> None:
        """Nothing of the pool is mapped here after this; sequences begin anew with the next seat."""
        if self._engine is not None:
            self._engine.batch.preempt_all()
            for extent in self._engine.blocks.returnable(1 << 30):
                self._engine.drop_extent(extent)
        self._mapping.clear()
        self._extents.clear()
        self._seat, self._missing = None, set()

    def _wait_by_layer(self) -> None:
        """Each module waits for its own parameters before it computes: a wake and a prefill run beside each other."""
        assert self._model is not None
        self._unhook()
        for module in self._model.modules():
            own = [parameter.data_ptr() for parameter in module.parameters(recurse=False)]
            segments = {self._segments[pointer] for pointer in own if pointer in self._segments}
            if segments & self._missing:
                handle = module.register_forward_pre_hook(lambda *_, wanted=segments: self._wait_for(wanted))
                self._hooks.append(handle)

    def _wait_for(self, segments: set[int]) -> None:
        while segments & self._missing:
            message: m.SegmentsCame | m.SeatEnds = self._await(m.SegmentsCame, m.SeatEnds)
            if isinstance(message, m.SeatEnds):
                self._heard.appendleft(message)
                raise StepCut
            self._came(message)
        if not self._missing:
            self._unhook()

    def _unhook(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    # --- memory for KV

    def _grow(self, blocks: int) -> bool:
        assert self._engine is not None
        block_nbytes = self._engine.layout.block_nbytes
        per_extent = max(1, EXTENT_NBYTES // block_nbytes)
        wanted = -(-blocks // per_extent)
        for count in dict.fromkeys((max(wanted, EXTENTS), wanted)):
            self._say(m.KvWanted(extents=count, nbytes=per_extent * block_nbytes))
            given: m.KvGiven = self._await(m.KvGiven)
            if given.extents:
                for number, offset in given.extents:
                    self._extents[number] = offset, per_extent * block_nbytes
                    self._engine.add_extent(number, offset, per_extent * block_nbytes)
                return True
        return False

    def _give_back(self) -> None:
        """What holds nothing, when there is nothing to do."""
        assert self._engine is not None
        extents = self._engine.blocks.returnable(1 << 30, keep_idle=True)
        for extent in extents:
            self._engine.drop_extent(extent)
        self._return(extents)

    def _return(self, extents: list[int]) -> None:
        """Unmapped first: the next moment they may be anybody's."""
        for extent in extents:
            self._extents.pop(extent, None)
        if extents:
            self._mapping.keep_written(list(self._extents.values()))
            self._say(m.KvReturned(extents=extents))

    # --- steps

    def _step(self) -> None:
        assert self._engine is not None
        began_s = time.perf_counter()
        known = {each.number for each in self._engine.batch.running}
        try:
            made = self._engine.step()
        except StepCut:
            return
        except BadLogits as error:  # those that are open fail; the next ones may be well
            for number in list(self._engine.generations):
                self._engine.remove(number)
            self._tell(m.ModelRefused(text=str(error)))
            return
        busy_us = int((time.perf_counter() - began_s) * 1e6)
        if made is None:
            self._stuck()
            return
        begun = [each for each in self._engine.batch.running if each.number not in known]
        self._tell_made(made, [(each.number, each.reused) for each in begun])
        if not self._working:
            self._give_back()
        self._told_idle = True
        self._say(m.Stepped(busy_us=busy_us))

    def _stuck(self) -> None:
        """No room for even one sequence, though all others have given theirs: it never fits."""
        assert self._engine is not None
        if not self._engine.batch.running and self._engine.batch.waiting:
            number = self._engine.batch.waiting[0].number
            self._engine.remove(number)
            self._tell(m.Tokens(tokens=[m.ChosenToken(number=number, token=-1, finish="no_room")]))

    def _tell_made(self, made: list[Made], reused: list[tuple[int, int]]) -> None:
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
            self._tell(m.Tokens(tokens=part, reused=reused if not start else []))
