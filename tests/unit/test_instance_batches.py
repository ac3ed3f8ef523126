"""An instance's batches: what it does when it gets a lease or none, and what it says of the batch that it had."""

import json
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dormouse.client_shim.instance.batches import NOBODY, Batches, FailedRequest
from dormouse.client_shim.instance.hints import Hints
from dormouse.client_shim.node.router_port import LeaseRefusal
from dormouse.schemas import messages as m

News = tuple[list[m.Run | m.Exit], list[int]]

NOTHING: News = [], []


class Router:
    """What an instance is told, in turn, and what it says. ``grants``: the answers to its wishes for a lease, each with
    what it is told meanwhile.
    """

    link, has_news, granted = None, True, 0

    def __init__(self, *grants: tuple[int | LeaseRefusal, News]) -> None:
        self.grants = deque(grants)
        self.next: News = NOTHING
        self.said: list[tuple[int, str]] = []  # requests, and what they were answered or failed of
        self.batches: list[tuple[int, int]] = []  # taken and together

    def news(self) -> News:
        found, self.next = self.next, NOTHING if self.grants else ([m.Exit()], [])
        return found

    def send(self, message: m.Returned | m.Raised) -> None:
        self.said.append((message.request, message.code if isinstance(message, m.Raised) else str(message.body)))


class Stream:
    used = True

    def __init__(self, router: Router, backend: Any) -> None:
        self.leased, self._router, self._backend = False, router, backend

    def begin_lease(self, lease: None) -> None:
        self.leased = True

    def end_lease(self) -> None:
        self.leased = False
        self._router.batches.append(self._backend.batch)

    def remains(self) -> str:
        return ""


def run(number: int, body: Any = 1) -> m.Run:
    return m.Run(request=number, lease=None, body=json.dumps(body).encode(), nbytes=0)


def served(handle_batch: Callable[[None, list[int]], Any], first: News, router: Router) -> Router:
    def acquire() -> None:
        granted, router.next = router.grants.popleft()
        if isinstance(granted, LeaseRefusal):
            raise granted
        router.granted = granted

    backend: Any = SimpleNamespace(router=router, acquire=acquire, may_acquire=False, batch=(0, 0))
    runner: Any = SimpleNamespace(
        backend=backend,
        stream=Stream(router, backend),
        function=SimpleNamespace(handle_batch=handle_batch),
        state=None,
        hints=Hints(handle_batch, each=True),
        call=lambda function, *arguments: function(*arguments),
        failure=lambda error, *_: FailedRequest(
            getattr(error, "code", "function_raised"), str(error), getattr(error, "param", "")
        ),
    )
    router.next = first
    Batches(runner).serve()
    return router


def doubled(state: None, requests: list[int]) -> list[int]:
    if 13 in requests:
        raise ValueError("thirteen")
    return [2 * each for each in requests]


def test_who_comes_while_a_batch_loses_all_others_asks_anew() -> None:
    """It is in no batch that was refused, and does not fail with it."""
    meanwhile: News = [run(2)], [1]
    router = served(doubled, ([run(1)], []), Router((LeaseRefusal(NOBODY, "all have left"), meanwhile), (1, NOTHING)))
    assert router.said == [(1, "cancelled"), (2, "b'2'")]
    assert router.batches == [(1, 1)]


def test_who_waits_fails_with_any_other_refusal() -> None:
    meanwhile: News = [run(2)], []
    router = served(doubled, ([run(1)], []), Router((LeaseRefusal("gpus_full", "no GPU has room"), meanwhile)))
    assert router.said == [(1, "gpus_full"), (2, "gpus_full")]


@pytest.mark.parametrize(
    ("bodies", "left", "said"),
    [
        ([1, 2, 3], [], (3, 3)),
        ([1, "wrong", 3], [], (3, 2)),
        (["wrong"], [], (1, 0)),
        ([1, 2, 3], [3], (2, 2)),
        ([1], [1], (0, 0)),
        ([1, 13, 3], [], (3, 0)),
        ([13], [], (1, 0)),
    ],
)
def test_what_is_said_of_a_batch(bodies: list[Any], left: list[int], said: tuple[int, int]) -> None:
    """How many it took of those that were granted, and how many were computed in its only call."""
    first: News = [run(number, body) for number, body in enumerate(bodies, 1)], []
    router = served(doubled, first, Router((len(bodies), ([], left))))
    assert router.batches == [said]
    assert len(router.said) == len(bodies)
