"""What an executor makes of other executors' memory that comes late, or in two streams at once. No process, no GPU."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dormouse.core.config import NodeConfig
from dormouse.core.paths import RunPaths
from dormouse.gpuserver.executor.peers import PeerLinks
from dormouse.schemas import messages as m


class Device:
    """Which epochs' memory has been mapped, as the inodes of its descriptors; None where it was dropped."""

    def __init__(self) -> None:
        self.mapped: list[list[int] | None] = []

    def map_peer(self, gpu: int, nbytes: int, handle: bytes, descriptors: list[int]) -> None:
        self.mapped.append([os.fstat(fd).st_ino for fd in descriptors])

    def drop_peer(self, gpu: int) -> None:
        self.mapped.append(None)


class Executor:
    """GPU 1's; it hears of GPU 0 only what a test tells."""

    def __init__(self, directory: Path) -> None:
        self.device = Device()
        owner = SimpleNamespace(
            gpu=1,
            epoch=1,
            config=NodeConfig(),
            paths=RunPaths(directory),
            device=self.device,
            leases=SimpleNamespace(
                wakes=SimpleNamespace(peer_lost=lambda gpu: None),
                lending=SimpleNamespace(unpin_all=lambda gpu: []),
            ),
            loop=asyncio.new_event_loop(),
            log=None,
            spawn=lambda work: work.close(),
        )
        owner.loop.close()
        self.peers = PeerLinks(cast(Any, owner))

    def hear(self, epoch: int, part: int, parts: int = 2) -> int:
        """A part of GPU 0's memory arrives; returns its inode."""
        fd = os.memfd_create("part", os.MFD_CLOEXEC)
        inode = os.fstat(fd).st_ino
        exported = m.PoolExported(gpu=0, epoch=epoch, nbytes=1, handle=b"", part=part, parts=parts)
        fds = [fd]
        self.peers.heard(exported, fds)
        for left in fds:  # as the executor does
            os.close(left)
        return inode


@pytest.fixture
def executor(tmp_path: Path) -> Executor:
    return Executor(tmp_path)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_memory_of_one_whose_death_is_known_already_is_not_mapped(executor: Executor) -> None:
    before = descriptors()
    executor.peers.changed({"gpu0": 1, "gpu1": 1})
    executor.peers.changed({"gpu1": 1})
    executor.device.mapped.clear()
    executor.hear(epoch=1, part=0, parts=1)
    assert executor.device.mapped == []
    assert descriptors() == before


def test_half_of_a_memory_is_let_go_with_its_owner(executor: Executor) -> None:
    before = descriptors()
    executor.peers.changed({"gpu0": 1, "gpu1": 1})
    executor.hear(epoch=1, part=0)
    executor.peers.changed({"gpu0": 2, "gpu1": 1})
    executor.hear(epoch=1, part=1)
    assert descriptors() == before


def test_a_successors_memory_is_not_mixed_with_what_its_predecessor_had_sent(executor: Executor) -> None:
    executor.hear(epoch=1, part=0)
    first = executor.hear(epoch=2, part=0)
    executor.hear(epoch=1, part=1)
    second = executor.hear(epoch=2, part=1)
    assert executor.device.mapped[-1] == [first, second]


def test_a_predecessors_memory_does_not_replace_its_successors(executor: Executor) -> None:
    inode = executor.hear(epoch=2, part=0, parts=1)
    executor.hear(epoch=1, part=0, parts=1)
    assert executor.device.mapped == [[inode]]
