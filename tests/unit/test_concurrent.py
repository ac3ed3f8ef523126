"""Requests of one instance at once, and in batches: each has an answer. Router and stream are played."""

import asyncio
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dormouse.client_shim.instance.batches import Batches, FailedRequest
from dormouse.client_shim.instance.concurrent import LEASE_S, Concurrent
from dormouse.client_shim.instance.hints import Hints
from dormouse.schemas import messages as m


class PlayedRouter:
    """Says what the test lets it say, and keeps what it is told."""

    def __init__(self) -> None:
        self.link, self.other = socket.socketpair()
        self.runs: list[Any] = []
        self.abandoned: list[int] = []
        self.told: list[Any] = []
        self.granted = 8

    def asks(self, *numbers: int) -> None:
        self.runs += [m.Run(request=number, lease=None, body=b"%d" % number, nbytes=1) for number in numbers]

    @property
    def has_news(self) -> bool:
        return bool(self.runs or self.abandoned)

    def news(self) -> tuple[list[Any], list[int]]:
        found = self.runs, self.abandoned
        self.runs, self.abandoned = [], []
        return found

    def send(self, message: Any) -> None:
        self.told.append(message)

    def ends(self) -> None:
        self.runs.append(m.Exit())


class PlayedStream:
    used = True

    def __init__(self) -> None:
        self.leased = False
        self.ended = 0

    def begin_lease(self, lease: Any) -> None:
        self.leased = True

    def end_lease(self) -> None:
        self.leased = False
        self.ended += 1

    def answer_for_all(self) -> None: ...

    def remains(self) -> str:
        return ""


class PlayedRunner:
    """What both take of the runner."""

    state = None

    def __init__(self) -> None:
        self.router, self.stream = PlayedRouter(), PlayedStream()
        self.backend = SimpleNamespace(router=self.router, may_acquire=False, acquire=lambda: None)
        self.function = SimpleNamespace()
        self.hints: Any = Hints(lambda state, request: None)

    def verdict(self, error: BaseException, where: str, otherwise: str) -> tuple[str, str]:
        return otherwise, repr(error)

    def failure(self, error: BaseException, where: str) -> FailedRequest:
        return FailedRequest(*self.verdict(error, where, "function_raised"))

    def call(self, what: Any, *arguments: Any) -> Any:
        return what(*arguments)

    def codes(self) -> dict[int, str]:
        return {each.request: getattr(each, "code", "") for each in self.router.told}


@pytest.fixture
def runner() -> Iterator[PlayedRunner]:
    found = PlayedRunner()
    with found.router.link, found.router.other:
        yield found


def serve(runner: Any) -> None:
    concurrent = Concurrent(runner)
    concurrent.serve()
    concurrent._loop.close()


def test_who_leaves_as_its_request_begins_has_an_answer_and_holds_no_lease(
    runner: PlayedRunner,
) -> None:
    """The second one waits for the end of the first one's lease."""
    router, stream = runner.router, runner.stream

    async def handle(state: Any, number: int) -> int:
        stream.leased = True
        if number == 1:
            await asyncio.sleep(LEASE_S + 0.01)
            router.asks(2)
            await asyncio.sleep(0.01)
            router.abandoned.append(2)
            router.asks(3)
            router.ends()
        return number

    runner.function.handle = handle
    router.asks(1)
    serve(runner)
    assert runner.codes() == {1: "", 2: "cancelled", 3: ""}
    assert (stream.leased, stream.ended) == (False, 2)


def test_a_task_that_is_cancelled_before_its_first_step_has_an_answer(runner: PlayedRunner) -> None:

    async def handle(state: Any, number: int) -> int:
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()
        runner.router.ends()
        return number

    runner.function.handle = handle
    runner.router.asks(1, 2)
    serve(runner)
    assert runner.codes() == {1: "", 2: "cancelled"}


@pytest.mark.parametrize("error", [AssertionError, SystemExit])
def test_what_a_types_own_code_raises_fails_one_request_of_a_batch(runner: PlayedRunner, error: type) -> None:
    def value_of(body: bytes, kind: str) -> int:
        if body == b"2":
            raise error
        return int(body)

    runner.function.handle_batch = lambda state, numbers: numbers
    runner.hints.value_of = value_of
    runner.router.asks(1, 2, 3)
    runner.router.ends()
    Batches(runner).serve()  # type: ignore[arg-type]  # played
    assert runner.codes() == {1: "", 2: "function_raised", 3: ""}
