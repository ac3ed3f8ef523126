"""The second zygote, as the router has it: what waits for it."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import structlog

from dormouse.core.config import EnvironmentsSection, NodeConfig
from dormouse.core.decisions.requests import events as e
from dormouse.core.links.fds import PacketSocket
from dormouse.core.links.sockets import listener_at
from dormouse.core.paths import RunPaths
from dormouse.core.sandbox.world import PLAIN_ZYGOTE
from dormouse.router.instances.instances import Instances
from dormouse.router.instances.plain import PlainZygote
from dormouse.schemas import messages as m


class _Node:
    """As the router is while no zygote has started."""

    def __init__(self, run: Path) -> None:
        self.config = NodeConfig(environments=EnvironmentsSection(idle_ms=1))
        self.paths, self.log = RunPaths(str(run)), structlog.get_logger()
        self.instances = Instances(self.config, self.paths, lambda *_: None, lambda *_: None, self.log)
        self.supervisor: Any = self
        self.peers: dict[str, int] = {}
        self.asked: list[Any] = []
        self.told = asyncio.Event()
        self.events: list[e.Event] = []

    def send(self, message: Any) -> None:
        self.asked.append(message)
        self.told.set()

    def dispatch(self, event: e.Event) -> None:
        self.events.append(event)


def _fork(name: str, build: m.BuildOrder | None) -> m.Fork:
    return m.Fork(
        instance=name,
        function="",
        directory="/none",
        uid=0,
        folder="/none",
        entry="f.py",
        arena=m.Arena(request_nbytes=0, response_nbytes=0, stream_nbytes=0),
        device=m.DeviceInfo(name="", total_nbytes=0, capability=(0, 0), multiprocessors=0),
        gpus=0,
        limits={},
        build=build,
    )


def test_what_waits_is_forgotten_with_all_others(tmp_path: Path) -> None:
    """Else it would be forked later, and nobody would end it."""
    node = _Node(tmp_path)
    heard: list[tuple[str, str]] = []
    plain = PlainZygote(node, lambda name, how: heard.append((name, how)))
    before = len(os.listdir("/proc/self/fd"))
    plain.fork(_fork("0-1", m.BuildOrder(index="")), (0, 1))
    plain.fork(_fork("1-1", None), (0, 1))
    assert [type(message) for message in node.asked] == [m.WantRole, m.WantRole]
    plain.reset()
    assert heard == [("0-1", "was ended with all others")]
    assert node.events == [], "the policy has forgotten its instance"
    assert not plain.has("0-1")
    assert not plain.has("1-1")
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_is_forked_from_one_that_is_to_end(tmp_path: Path) -> None:
    """It would die with it: it waits for the next one."""
    node = _Node(tmp_path)
    heard: list[tuple[str, str]] = []
    plain = PlainZygote(node, lambda name, how: heard.append((name, how)))
    path = node.paths.zygote(3, PLAIN_ZYGOTE)
    Path(path).parent.mkdir(parents=True)

    async def dismissed() -> None:
        with listener_at(path, socket.SOCK_SEQPACKET) as listener:
            node.peers = {PLAIN_ZYGOTE: 3}
            plain.peers_changed(node.peers, {})
            zygote: PacketSocket[m.ToZygote, m.FromZygote] = PacketSocket(listener.accept()[0], m.ToZygote)
            zygote.send(m.ZygoteReady(confinement="none", python="", torch="", modules=[]))
            async with asyncio.timeout(60):
                await node.told.wait()
            assert node.asked == [m.DismissRole(role=PLAIN_ZYGOTE, epoch=3)]
            plain.fork(_fork("0-1", m.BuildOrder(index="")), (0, 1))
            plain.peers_changed(node.peers, {})  # the supervisor has not heard of it yet
            assert node.asked[1:] == [m.WantRole(role=PLAIN_ZYGOTE)]
            assert plain.has("0-1")
            assert heard == []
            assert zygote.recv() is None, "nothing came, and it has no router any more"
            zygote.close()
            plain.close()

    asyncio.run(dismissed())
