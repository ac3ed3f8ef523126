"""What a runtime asks for and gives back of its memory for KV; the executor is the test."""

import socket
from collections.abc import Iterator

import pytest
import torch
from language_models import reference, spec_of

from dormouse.core.decisions.batches.blocks import BlockTable
from dormouse.core.decisions.batches.recompute import PRIOR, RecomputeCost
from dormouse.core.links.fds import PacketSocket
from dormouse.gpuserver.runtime import models
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.engine import Engine, kv_layout
from dormouse.gpuserver.runtime.executor_link import ExecutorLink
from dormouse.gpuserver.runtime.extents import EXTENT_NBYTES, KvExtents
from dormouse.gpuserver.runtime.mapping import HostMapping
from dormouse.schemas import messages as m

MIB = 1 << 20
SHARE = PRIOR[0] / PRIOR[1]


class Asked:
    """A runtime's KV memory, with three extents: some tokens of a running sequence, a finished prompt, nothing."""

    def __init__(self) -> None:
        self.sockets = ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.settimeout(60)
        self.executor: PacketSocket[m.RuntimeToExecutor, m.ExecutorToRuntime] = PacketSocket(
            theirs, m.RuntimeToExecutor
        )
        mapping = HostMapping(64 * MIB)
        self.kv = KvExtents(ExecutorLink(ours, mapping), mapping)
        spec = spec_of(reference("llama"))
        attention = BlockAttention(kv_layout(spec), torch.zeros(1))
        self.engine = self.kv.engine = Engine(models.build(spec, attention), attention, self.kv.grow)
        self.per_extent = EXTENT_NBYTES // self.engine.layout.block_nbytes
        self.executor.send(m.KvGiven(extents=[(-1, 0), (-2, 4 * MIB), (-3, 8 * MIB)]))
        assert self.kv.grow(3 * self.per_extent)
        self.heard()
        blocks = self.engine.blocks
        tables = [BlockTable() for _ in range(3)]
        tokens = self.per_extent * blocks.block_tokens
        for table in tables:
            blocks.extend(table, tokens)
        blocks.filled(tables[1], [7] * tokens, tokens)
        for table in tables[1:]:
            blocks.release(table)
        blocks.check(tables[:1])
        self.tokens, self.extent_nbytes = tokens, self.per_extent * self.engine.layout.block_nbytes
        self.empty, self.finished = blocks.returnable(3)

    def heard(self) -> m.RuntimeToExecutor:
        packet = self.executor.recv()
        assert packet is not None
        return packet[0]


@pytest.fixture
def asked() -> Iterator[Asked]:
    made = Asked()
    yield made
    for sock in made.sockets:
        sock.close()


def returned(asked: Asked) -> m.KvReturned:
    message = asked.heard()
    assert isinstance(message, m.KvReturned)
    return message


def test_what_holds_nothing_goes_first_and_a_running_sequence_keeps_all(asked: Asked) -> None:
    assert asked.kv.idle.nbytes == 2 * asked.extent_nbytes
    asked.kv.reclaim(1)
    answer = returned(asked)
    assert answer.extents == [asked.empty]
    assert answer.idle == m.IdleKv(nbytes=asked.extent_nbytes, recompute_us=0)
    asked.kv.reclaim(1 << 40)
    assert returned(asked).extents == [asked.finished]
    asked.kv.reclaim(1)
    assert returned(asked) == m.KvReturned(extents=[], idle=m.IdleKv(nbytes=0, recompute_us=0))
    assert asked.engine.blocks.count == asked.per_extent


def test_one_that_waits_for_memory_gives_back_what_it_is_asked_for(asked: Asked) -> None:
    """Who asks may be whom it waits for."""
    asked.executor.send(m.KvReclaim(nbytes=1))
    asked.executor.send(m.KvGiven(extents=[(-4, 12 * MIB)]))
    assert asked.kv.grow(1)
    assert isinstance(asked.heard(), m.KvWanted)
    assert returned(asked).extents == [asked.empty]


@pytest.mark.parametrize(("extents", "wish"), [(1, 3), (4, 0), (5, 0)])
def test_what_is_needed_is_asked_for_and_the_rest_wished(asked: Asked, extents: int, wish: int) -> None:
    asked.executor.send(m.KvGiven(extents=[]))
    assert not asked.kv.grow(extents * asked.per_extent)
    assert asked.heard() == m.KvWanted(extents=extents, nbytes=asked.extent_nbytes, wish=wish)


def test_a_runtime_without_a_model_answers_too(asked: Asked) -> None:
    asked.kv.engine = None
    asked.kv.reclaim(1)
    assert returned(asked).extents == []


def test_idle_kv_costs_the_time_to_compute_it_again_if_it_is_asked_again(asked: Asked) -> None:
    asked.kv.cost.stepped(2000, 100, 0)
    assert asked.kv.idle.recompute_us == int(20 * asked.tokens * SHARE)


def test_the_cost_follows_what_is_measured() -> None:
    cost = RecomputeCost()
    assert cost.expected_us(100) == 0
    cost.stepped(5000, 4, 4)  # not mostly of prompts
    assert cost.expected_us(100) == 0
    cost.stepped(1000, 10, 0)
    assert cost.expected_us(100) == int(100 * 100 * SHARE)
    for _ in range(2000):
        cost.began(100, 90)
    assert cost.expected_us(100) == pytest.approx(0.9 * 100 * 100, rel=0.01)
    for _ in range(50):
        cost.stepped(100, 10, 0)
    assert cost.expected_us(100) == pytest.approx(0.9 * 10 * 100, rel=0.02)
