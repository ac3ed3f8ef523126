"""Who connects as a program of `dormouse run` and does not ask for a session: how many, and for how long."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from dormouse.core.links.fds import PacketSocket
from dormouse.router.instances import sessions
from dormouse.router.instances.sessions import Sessions
from dormouse.schemas import messages as m

WAIT_S = 90.0


class Node:
    """Has no GPU yet."""

    device = None
    leaving = False
    orderly = True


class Connected:
    """So many connections, one after the other."""

    def __init__(self, path: str, number: int) -> None:
        self.socks: list[PacketSocket[m.FromAttach, m.AttachSession]] = [
            PacketSocket.connect(path, m.FromAttach) for _ in range(number)
        ]

    async def told(self, which: int) -> m.FromAttach | None:
        packet = await asyncio.wait_for(asyncio.to_thread(self.socks[which].recv), WAIT_S)
        return None if packet is None else packet[0]


def run(tmp_path: Path, work: Any) -> None:
    async def main() -> None:
        node: Any = Node()
        served = Sessions(node)
        served.open(str(tmp_path / "attach"))
        await work(str(tmp_path / "attach"), served)
        served.close()

    asyncio.run(main())


def test_one_more_silent_connection_takes_the_oldest_one_s_place(tmp_path: Path) -> None:
    async def work(path: str, served: Sessions) -> None:
        came = Connected(path, sessions.SILENT + 2)
        assert [await came.told(which) for which in (0, 1)] == [None, None]
        came.socks[2].send(m.AttachSession(name="late", pid=os.getpid()))
        told = await came.told(2)
        assert isinstance(told, m.AttachRefused)
        assert told.text.startswith("the node has no GPU")
        assert len(served._silent) == sessions.SILENT - 1
        assert await came.told(2) is None, "who was refused is not kept"
        for sock in came.socks:
            sock.close()

    run(tmp_path, work)


def test_who_does_not_ask_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ASK_S", 0.0)

    async def work(path: str, served: Sessions) -> None:
        came = Connected(path, 1)
        assert await came.told(0) is None
        assert served._silent == {}
        came.socks[0].close()

    run(tmp_path, work)
