"""Who asks a supervisor for a successor, at its socket: who is heard, and what is said."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dormouse.core import log
from dormouse.core.links.fds import PacketSocket
from dormouse.core.node import succession as e
from dormouse.core.node.children import SILENCE_S, START_S, patience_s
from dormouse.core.node.heir import LATE_S, Heirs
from dormouse.schemas import succession as s

ASK = s.Replace(command=["/nowhere/python"], wait_s=1.0)
STAYS = s.Replace(command=["/bin/sh", "-c", "exec sleep 600"], wait_s=1.0)


class Node:
    """One that never comes to give anything: its successors cannot be started."""

    def __init__(self, refusal: str = "") -> None:
        self.log, self.loop, self._refusal = log.get_logger(), asyncio.get_running_loop(), refusal
        self.begun, self.served_on, self.dropped = 0, list[bool](), 0

    def refusal(self) -> str:
        return self._refusal

    def estate(self) -> tuple[s.Estate, list[int]]:
        self.begun += 1
        return s.Estate(run="", state="", epochs={}, generation=0), []

    def have_router_leave(self, wait_s: float) -> None:
        raise AssertionError

    def stop_for_heir(self) -> None:
        raise AssertionError

    def retire(self, heir_pid: int) -> None:
        raise AssertionError

    def drop_way_back(self) -> None:
        self.dropped += 1

    def serve_on(self, anew: bool) -> None:
        self.served_on.append(anew)


def _heard(path: Path, askers: int, ask: Callable[[list[Any]], None], refusal: str = "") -> tuple[list[Any], Node]:
    """What the last asker hears to the end; ``ask`` has them all."""

    async def asked() -> tuple[list[Any], Node]:
        node = Node(refusal)
        heirs = Heirs(node, str(path / "replace"), {}, path / "errors")
        try:
            connected = [await asyncio.to_thread(_connect, path) for _ in range(askers)]
            ask(connected)
            return await asyncio.to_thread(_all, connected[-1]), node
        finally:
            heirs.close()
            while len(node.served_on) < node.begun:  # noqa: ASYNC110  # until its process has ended
                await asyncio.sleep(0.01)
            heirs.close()  # who goes on listens
            for each in connected:
                each.close()

    return asyncio.run(asked())


def _connect(path: Path) -> Any:
    found: PacketSocket[s.SaidToAsker, s.Replace] = PacketSocket.connect(str(path / "replace"), s.SaidToAsker)
    found.sock.settimeout(60.0)
    return found


def _all(asker: Any) -> list[Any]:
    said = []
    while (packet := asker.recv()) is not None:
        said.append(packet[0])
    return said


def test_why_a_successor_was_not_started_is_said_and_nothing_after_the_way(tmp_path: Path) -> None:
    said, node = _heard(tmp_path, 1, lambda askers: askers[0].send(ASK))
    failed = s.NotReplaced(text="/nowhere/python: No such file or directory", status=1)
    assert said == [s.Going(text="imports"), failed]
    assert node.served_on == [False]


FAILS = """
import sys
from dormouse.core.links.fds import PacketSocket
import socket
from dormouse.schemas import succession as s
end = PacketSocket(socket.socket(fileno=int(sys.argv[-1])), s.ToHeir)
end.recv()
end.send(s.HeirFailed(text="the disk is full"))
sys.exit(2)
"""


def test_what_a_successor_says_last_is_heard_also_where_it_can_write_no_file(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()  # as little of a file as a full disk has
    ask = s.Replace(command=[sys.executable, "-c", FAILS], wait_s=1.0)
    said, _ = _heard(tmp_path, 1, lambda askers: askers[0].send(ask))
    assert said == [s.Going(text="imports"), s.NotReplaced(text="the disk is full", status=2)]


def test_a_node_that_is_not_all_up_refuses(tmp_path: Path) -> None:
    said, node = _heard(tmp_path, 1, lambda askers: askers[0].send(ASK), "router starts")
    assert said == [s.NotReplaced(text="router starts")]
    assert node.served_on == []


def test_who_says_nothing_keeps_nobody_from_asking(tmp_path: Path) -> None:
    said, _ = _heard(tmp_path, 2, lambda askers: askers[1].send(ASK))
    assert said[0] == s.Going(text="imports")


def test_who_asks_second_is_refused_also_when_the_first_has_left(tmp_path: Path) -> None:
    def ask(askers: list[Any]) -> None:
        askers[0].send(STAYS)
        askers[0].close()
        askers[1].send(ASK)

    said, _ = _heard(tmp_path, 2, ask)
    assert said == [s.NotReplaced(text="the node is being replaced already")]


def test_who_waits_for_its_turn_may_be_silent() -> None:
    assert patience_s(waits=True, ready=False) == float("inf")
    assert patience_s(waits=False, ready=False) == START_S
    assert patience_s(waits=False, ready=True) == SILENCE_S


def test_a_time_limit_that_a_stopped_supervisor_has_slept_through_is_no_fault_of_its_successor(tmp_path: Path) -> None:
    """It may have said long ago that it serves. Only then it is killed."""

    async def overdue() -> list[bool]:
        node = Node()
        heirs = Heirs(node, str(tmp_path / "replace"), {}, tmp_path / "errors")
        asker = await asyncio.to_thread(_connect, tmp_path)
        try:
            asker.send(STAYS)
            assert await asyncio.to_thread(asker.recv) == (s.Going(text="imports"), [])
            now_s = node.loop.time()
            heirs._overdue(now_s - LATE_S)
            late = heirs._succession._why != ""
            heirs._overdue(now_s + 3600.0)
            return [late, heirs._succession._why != ""]
        finally:
            heirs.close()
            while not node.served_on:  # noqa: ASYNC110  # until its process has ended
                await asyncio.sleep(0.01)
            heirs.close()
            asker.close()

    assert asyncio.run(overdue()) == [False, True]


SERVES = FAILS.replace('s.HeirFailed(text="the disk is full")', "s.HeirServes()")


def test_a_successor_that_dies_before_it_is_heard_that_it_serves_leaves_the_node_to_the_old_one(tmp_path: Path) -> None:
    """That it serves is heard with its end. Nothing is given up by then."""

    async def served() -> tuple[int, list[bool], e.Stage]:
        node = Node()
        heirs = Heirs(node, str(tmp_path / "replace"), {}, tmp_path / "errors")
        heirs._command = [sys.executable, "-c", SERVES]
        heirs.handle(e.SuccessionAsked(1.0))
        heirs._succession.stage = e.Stage.STARTING
        heir = heirs._heir
        assert heir is not None
        heir._process.wait()  # both are there to be seen
        while not node.served_on:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stage = heirs._succession.stage
        heirs.close()
        return node.dropped, node.served_on, stage

    assert asyncio.run(served()) == (0, [True], e.Stage.IDLE)


def test_a_successor_is_killed_if_the_way_back_cannot_be_dropped(tmp_path: Path) -> None:
    class Full(Node):
        def drop_way_back(self) -> None:
            raise OSError(28, "No space left on device")

    async def asked() -> tuple[list[bool], list[Any]]:
        node = Full()
        heirs = Heirs(node, str(tmp_path / "replace"), {}, tmp_path / "errors")
        asker = await asyncio.to_thread(_connect, tmp_path)
        asker.send(STAYS)
        while heirs._heir is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        heirs._succession.stage = e.Stage.STARTING
        heirs.handle(e.HeirUp())
        while not node.served_on:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        heirs.close()
        said = await asyncio.to_thread(_all, asker)
        asker.close()
        return node.served_on, said

    served_on, said = asyncio.run(asked())
    assert served_on == [True]
    assert "the way back from a migration cannot be dropped" in said[-1].text
