"""An instance's end of its link to the router, where several threads wait at it: each gets what it waits for, whichever
of them reads.
"""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dormouse.client_shim.node.router_port import RouterPort
from dormouse.core.links.blocking_link import BlockingLink
from dormouse.schemas import messages as m

RUN = m.Run(request=7, lease=None, body=b"1", nbytes=0)


class Router:
    """The other end."""

    def __init__(self, path: Path) -> None:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen()
        self.port = RouterPort(str(path), None)
        accepted, _ = listening.accept()
        listening.close()
        self._link = BlockingLink(str(path), sock=accepted)

    def heard(self) -> Any:
        data = self._link.recv(60.0)
        assert data is not None
        return msgspec.msgpack.decode(data, type=m.InstanceToRouter)

    def says(self, message: m.RouterToInstance) -> None:
        self._link.send(msgspec.msgpack.encode(message))

    def answers(self, number: int) -> None:
        self.says(m.CallAnswered(number=number, status=200, headers={}, body=b"%d" % number))

    def close(self) -> None:
        self.port.link.close()
        self._link.close()


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    made = Router(tmp_path / "router")
    yield made
    made.close()


def asks(router: Router, number: int) -> None:
    router.port.call(m.CallFunction(number=number, request=1, function="f", body=b""), 8)
    assert router.heard().number == number


def test_each_thread_gets_its_own_answer_in_any_order(router: Router) -> None:
    for number in range(8):
        asks(router, number)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(router.port.call_answer, number) for number in range(8)]
        for number in (5, 0, 7, 1, 6, 2, 4, 3):
            router.answers(number)
            answer = waiting[number].result(60)
            assert answer is not None
            assert answer.body == b"%d" % number


def test_who_waits_for_a_request_lets_others_read(router: Router) -> None:
    asks(router, 1)
    asks(router, 2)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(router.port.call_answer, number) for number in (1, 2)]

        def speaks() -> None:
            router.answers(2)
            assert others[1].result(60) is not None, "while the main thread waits, too"
            router.says(RUN)

        speaking = threading.Thread(target=speaks)
        speaking.start()
        assert router.port.next_run() == RUN
        speaking.join()
        assert not others[0].done()
        router.answers(1)
        assert all(other.result(60) is not None for other in others)


def test_a_request_that_another_thread_reads_is_told(router: Router) -> None:
    """An event loop listens for it, and would hear nothing more."""
    told: list[int] = []
    router.port.read_elsewhere = lambda: told.append(1)
    asks(router, 1)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(router.port.call_answer, 1)
        router.says(RUN)
        router.answers(1)
        assert waits.result(60) is not None
    assert told == [1]
    assert router.port.news() == ([RUN], [])


def test_a_call_that_is_left_wakes_who_waits_and_its_late_answer_is_nobodys(router: Router) -> None:
    asks(router, 1)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(router.port.call_answer, 1)
        router.port.leave_call(1)
        assert waits.result(60) is None
    assert router.heard() == m.LeaveCall(number=1)
    router.port.leave_call(1)  # again, and nothing is said
    router.answers(1)
    asks(router, 2)
    router.answers(2)
    answer = router.port.call_answer(2)
    assert answer is not None
    assert answer.number == 2
    assert router.port._called == {}


def test_so_many_calls_are_open_and_the_next_waits_for_a_place(router: Router) -> None:
    for number in range(8):
        asks(router, number)
    given_up: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        ninth = pool.submit(asks, router, 9)
        left = pool.submit(
            router.port.call, m.CallFunction(number=10, request=1, function="f", body=b""), 8, lambda: bool(given_up)
        )
        given_up.append(1)
        router.port.leave_call(10)
        left.result(60)
        assert router.port.call_answer(10) is None, "it was given up, and never sent"
        assert not ninth.done()
        router.answers(3)
        assert router.port.call_answer(3) is not None
        ninth.result(60)
