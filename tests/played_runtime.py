"""A runtime's process without its executor and its instances, which a test plays: it runs on a thread."""

import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import pytest
import torch
from language_models import reference, spec_of

from dormouse.core.decisions.rules.batching import BatchRule
from dormouse.core.links.fds import PacketSocket
from dormouse.gpuserver.runtime.low_rank import LowRank
from dormouse.gpuserver.runtime.mapping import HostMapping
from dormouse.gpuserver.runtime.process import RuntimeProcess
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost
from dormouse.schemas.llm import DOWN, UP, AdapterModule, AdapterSpec, DecoderSpec

Said = TypeVar("Said")

MIB = 1 << 20
KV_AT = 32 * MIB
NEW = 5


def tensors_of(added: Mapping[str, LowRank]) -> dict[str, torch.Tensor]:
    """As they are called among the weights of a model."""
    return {name + end: of for name, low in added.items() for end, of in ((DOWN, low.down), (UP, low.up))}


class Played:
    """A runtime with a model, a seat and room for KV. What is said before it is ``started`` is heard all at once."""

    def __init__(self, rule: BatchRule | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs = theirs
        self.executor: PacketSocket[m.RuntimeToExecutor, m.ExecutorToRuntime] = PacketSocket(ours, m.RuntimeToExecutor)
        ours.settimeout(60)
        self.process = RuntimeProcess(theirs, HostMapping(64 * MIB), rule)
        self.thread = threading.Thread(target=self._run)
        self.model = reference("llama")
        self.spec = spec_of(self.model)
        self.tokens: list[int] = []  # of the first lease
        self.finishes: dict[tuple[int, int], str] = {}  # by lease and number
        self.refused: dict[int, str] = {}  # by lease
        self.made: dict[tuple[int, int], list[int]] = {}  # tokens, by lease and number
        self.steps: list[m.Stepped] = []  # that it has told of
        self.grants = True  # its wishes for KV
        self.last: Any = None  # what it has said last, of what was waited for
        data, weights = b"", []
        for name, parameter in self.model.named_parameters():
            weights.append(m.WeightAt(name=name, storage=1, offset=len(data), shape=list(parameter.shape)))
            data += parameter.data.numpy().tobytes()
        nbytes = -(-len(data) // MIB) * MIB
        self._data = data
        self.weights, self.nbytes = weights, nbytes
        self.give_base()
        self.join(1)

    def join(
        self,
        serial: int,
        spec: DecoderSpec | None = None,
        weights: list[m.WeightAt] | None = None,
        adapter: AdapterSpec | None = None,
    ) -> None:
        """A lease has a seat, and its instance says what its model is: that of all, unless it is said."""
        told = self.weights if weights is None else weights
        self.seat(serial)
        self.tell(m.OpenModel(spec=spec or self.spec, weights=len(told), adapter=adapter), serial)
        self.tell(m.Weights(weights=told), serial)

    def give_base(self) -> None:
        """Its granules, and those for KV."""
        self._granule(0, self.nbytes, self._data)
        self._granule(KV_AT, 16 * MIB)

    def seat(self, serial: int, *missing: int, adapter_at: int = 0, joins: m.JoinRule | None = None) -> None:
        """Of storage 1, the base, and 2, an adapter if it lies somewhere, in segments of the same numbers."""
        storages = [m.StorageAt(storage=1, segment=1, offset=0, nbytes=self.nbytes)]
        if adapter_at:
            storages.append(m.StorageAt(storage=2, segment=2, offset=adapter_at, nbytes=MIB))
        self.executor.send(m.SeatGiven(serial=serial, storages=storages, missing=list(missing), joins=joins))

    def join_adapted(self, serial: int, added: Mapping[str, LowRank], at: int, missing: bool = False) -> None:
        """The same with an adapter, in a granule of its own there."""
        modules = [
            AdapterModule(name=name, kind="linear", rank=low.rank, scale=low.scale, bias=False)
            for name, low in added.items()
        ]
        self.join_spec(serial, AdapterSpec(modules=modules, replaced=[]), tensors_of(added), at, missing)

    def join_spec(
        self, serial: int, adapter: AdapterSpec, tensors: Mapping[str, torch.Tensor], at: int, missing: bool = False
    ) -> None:
        weights = [*self.weights, *self.give_adapter(tensors, at)]
        self.seat(serial, *[2] * missing, adapter_at=at)
        first, *parts = adapter.parts(2)
        self.tell(m.OpenModel(spec=self.spec, weights=len(weights), adapter=first, parts=len(parts)), serial)
        self.tell(m.Weights(weights=weights), serial)
        for part in parts:
            self.tell(m.AdapterPart(adapter=part), serial)

    def give_adapter(self, tensors: Mapping[str, torch.Tensor], at: int) -> list[m.WeightAt]:
        """A granule with these; returns where they are in it."""
        data, weights = b"", []
        for name, tensor in tensors.items():
            weights.append(m.WeightAt(name=name, storage=2, offset=len(data), shape=list(tensor.shape)))
            data += tensor.numpy().tobytes()
        self._granule(at, MIB, data)
        return weights

    def _granule(self, offset: int, nbytes: int, data: bytes = b"") -> None:
        fd = os.memfd_create("granule")
        try:
            os.ftruncate(fd, nbytes)
            os.pwrite(fd, data, 0)
            granule = m.GranuleAt(offset=offset, physical=0, nbytes=nbytes)
            self.executor.send(m.GranulesGiven(granules=[granule], writable=not data), [fd])
        finally:
            os.close(fd)

    def _run(self) -> None:
        with suppress(PeerLost):
            self.process.run()

    def tell(self, message: m.InstanceToRuntime, serial: int = 1) -> None:
        self.executor.send(m.ForRuntime(data=msgspec.msgpack.encode(message), serial=serial))

    def submit(self, number: int, prompt: list[int], serial: int = 1, new: int = NEW) -> None:
        limit = len(prompt) + new
        message = m.Submit(number=number, tokens=prompt, more=False, prompt=len(prompt), limit=limit, stops=[])
        self.tell(message, serial)

    def said(self, kind: type[Said]) -> Said:
        """The next of this kind."""
        self.until(kind)
        assert isinstance(self.last, kind)
        return self.last

    def compute(self, *ends: tuple[int, int]) -> None:
        """Until these sequences, by lease and number, have ended."""
        while not all(each in self.finishes for each in ends):
            self.until(m.Tokens)

    def until(self, kind: type[Any], in_step: Sequence[m.ExecutorToRuntime] = ()) -> list[str]:
        """Kinds of what it says, up to this one; its wish for KV is granted once, after it was told ``in_step``."""
        said: list[str] = []
        while True:
            packet = self.executor.recv()
            assert packet is not None
            message = packet[0]
            match message:
                case m.KvWanted(extents=count, nbytes=nbytes, wish=wish):
                    for each in in_step:
                        self.executor.send(each)
                    extents = [(-1 - n, KV_AT + n * nbytes) for n in range(count + wish)] if self.grants else []
                    self.executor.send(m.KvGiven(extents=extents))
                    continue
                case m.LoadChanged() | m.KvReturned() if not isinstance(message, kind):
                    continue
                case m.FromRuntime(data=data, serial=serial):
                    told = msgspec.msgpack.decode(data, type=m.RuntimeToInstance)
                    if isinstance(told, m.ModelRefused):
                        self.refused[serial] = told.text
                    else:
                        self._made(serial, told)
                    message = told
            if isinstance(message, m.Stepped):
                self.steps.append(message)
            elif isinstance(message, m.TurnGivenBack) and message.stepped is not None:
                self.steps.append(message.stepped)
            said.append(type(message).__name__)
            if isinstance(message, kind):
                self.last = message
                return said

    def _made(self, serial: int, told: m.Tokens) -> None:
        for each in told.tokens:
            self.made.setdefault((serial, each.number), []).append(each.token)
            if serial == 1:
                self.tokens.append(each.token)
            if each.finish:
                self.finishes[serial, each.number] = each.finish

    def close(self) -> None:
        self.executor.close()
        if self.thread.ident is not None:
            self.thread.join(60)
        self.theirs.close()


@pytest.fixture
def played() -> Iterator[Played]:
    made = Played()
    yield made
    made.close()
