"""When a runtime computes: its steps in a turn, how much of prompts is in each; the executor is the test."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from language_models import prompts, reference, spec_of, wrong_tokens

from dormouse.core.links.fds import PacketSocket
from dormouse.gpuserver.runtime.mapping import HostMapping
from dormouse.gpuserver.runtime.pace import LEAST
from dormouse.gpuserver.runtime.process import RuntimeProcess
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost

MIB = 1 << 20
KV_AT = 32 * MIB
NEW = 5


class Played:
    """A runtime with a model, a seat and room for KV. What is said before it is ``started`` is heard all at once."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs = theirs
        self.executor: PacketSocket[m.RuntimeToExecutor, m.ExecutorToRuntime] = PacketSocket(ours, m.RuntimeToExecutor)
        ours.settimeout(20)
        self.process = RuntimeProcess(theirs, HostMapping(64 * MIB))
        self.thread = threading.Thread(target=self._run)
        self.model = reference("llama")
        self.tokens: list[int] = []
        data, weights = b"", []
        for name, parameter in self.model.named_parameters():
            weights.append(m.WeightAt(name=name, storage=1, offset=len(data), shape=list(parameter.shape)))
            data += parameter.data.numpy().tobytes()
        nbytes = -(-len(data) // MIB) * MIB
        self._granule(0, nbytes, data)
        self._granule(KV_AT, 16 * MIB)
        storages = [m.StorageAt(storage=1, segment=1, offset=0, nbytes=nbytes)]
        self.executor.send(m.SeatGiven(serial=1, storages=storages, missing=[]))
        self.tell(m.OpenModel(spec=spec_of(self.model), weights=len(weights)))
        self.tell(m.Weights(weights=weights))

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

    def tell(self, message: m.InstanceToRuntime) -> None:
        self.executor.send(m.ForRuntime(data=msgspec.msgpack.encode(message)))

    def submit(self, number: int, prompt: list[int]) -> None:
        limit = len(prompt) + NEW
        self.tell(m.Submit(number=number, tokens=prompt, more=False, prompt=len(prompt), limit=limit, stops=[]))

    def until(self, kind: type[Any]) -> list[str]:
        """Kinds of what it says, up to this one; its wish for KV is granted once."""
        said: list[str] = []
        while True:
            packet = self.executor.recv()
            assert packet is not None
            message = packet[0]
            match message:
                case m.KvWanted(extents=count, nbytes=nbytes):
                    self.executor.send(m.KvGiven(extents=[(-1 - n, KV_AT + n * nbytes) for n in range(count)]))
                    continue
                case m.LoadChanged() | m.KvReturned():
                    continue
                case m.FromRuntime(data=data):
                    told = msgspec.msgpack.decode(data, type=m.RuntimeToInstance)
                    assert isinstance(told, m.Tokens)
                    self.tokens += [each.token for each in told.tokens]
                    message = told  # type: ignore[assignment]
            said.append(type(message).__name__)
            if isinstance(message, kind):
                return said

    def close(self) -> None:
        self.executor.close()
        if self.thread.ident is not None:
            self.thread.join(20)
        self.theirs.close()


@pytest.fixture
def played() -> Iterator[Played]:
    made = Played()
    yield made
    made.close()


def test_a_turn_that_ends_at_once_has_one_step(played: Played) -> None:
    played.submit(1, prompts(1, 40)[0])
    for message in (m.TurnBegins(), m.TurnEnds()):
        played.executor.send(message)
    played.thread.start()
    assert played.until(m.TurnGivenBack) == ["Tokens", "Stepped", "TurnGivenBack"]
    for message in (m.TurnBegins(), m.TurnEnds()):
        played.executor.send(message)
    assert played.until(m.TurnGivenBack).count("Stepped") == 1


def test_a_turn_without_anything_to_do_ends_at_once(played: Played) -> None:
    for message in (m.TurnBegins(), m.TurnEnds()):
        played.executor.send(message)
    played.thread.start()
    assert played.until(m.TurnGivenBack) == ["TurnGivenBack"]


@pytest.mark.parametrize("brief_ms", [0, 3_600_000])
def test_steps_are_brief_for_as_long_as_was_said(played: Played, brief_ms: int) -> None:
    (prompt,) = prompts(2, 10 * LEAST)
    played.submit(1, prompt)
    played.executor.send(m.TurnBegins(brief_ms=brief_ms))
    played.thread.start()
    steps = played.until(m.Tokens).count("Stepped") + 1
    assert steps == (10 if brief_ms else 1)
    while len(played.tokens) < NEW:
        played.until(m.Tokens)
    assert wrong_tokens(played.model, prompt + played.tokens, len(prompt)) == []
