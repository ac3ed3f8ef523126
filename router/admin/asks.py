"""Queries of administration to the policy and the controller, and their pending answers: deploys, removals, restarts,
the controller's status. Decides nothing.
"""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any, Final

import orjson

from dormouse.core.decisions.requests import events as e
from dormouse.router.front.exchange import HttpError
from dormouse.schemas import messages as m

STATUS_TIMEOUT_S: Final = 5.0
MOVE_TIMEOUT_S: Final = 50.0
"""Of a model: stock clients give up after 60 s."""


class Asks:
    """Questions without an answer yet."""

    def __init__(self, dispatch: Callable[[e.Event], None], tell: Callable[[m.RouterToController], None]) -> None:
        self._dispatch = dispatch
        self._tell = tell
        self._numbers = count(1)
        self._asks: dict[int, asyncio.Future[e.Settled]] = {}
        self._queries: dict[int, asyncio.Future[m.Status]] = {}

    async def change(self, event: Callable[[int], e.Event]) -> e.Settled:
        """``event`` by its number; returns how it was settled. Raises HttpError."""
        ask = next(self._numbers)
        future: asyncio.Future[e.Settled] = asyncio.get_running_loop().create_future()
        self._asks[ask] = future
        self._dispatch(event(ask))
        settled = await future
        if settled.failure is not None:
            raise HttpError(settled.failure)
        return settled

    def settled(self, action: e.Settled) -> None:
        if (future := self._asks.pop(action.ask, None)) is not None and not future.done():
            future.set_result(action)

    async def controller_status(self) -> dict[str, Any]:
        """The controller's own status, or nothing if it does not say in time."""
        answer = await self._query(lambda query: m.AskStatus(query=query))
        return {} if answer is None else orjson.loads(answer.json)

    async def policy(self, changes: dict[str, str | int | float | bool]) -> m.Status | None:
        """The scheduler's policy, changed so; None if the controller does not reply in time."""
        return await self._query(lambda query: m.AskPolicy(query=query, changes=changes))

    async def pin(self, name: str, pinned: bool) -> m.Status | None:
        """None if the controller does not reply in time."""
        return await self._query(lambda query: m.AskPin(query=query, name=name, pinned=pinned))

    async def share(self, name: str, share: int) -> m.Status | None:
        """None if the controller does not reply in time."""
        return await self._query(lambda query: m.AskTraffic(query=query, name=name, share=share))

    async def move(self, name: str, to: str) -> m.Status | None:
        """None if that takes too long."""
        return await self._query(lambda query: m.AskMove(query=query, name=name, to=to), MOVE_TIMEOUT_S)

    async def drain_gpu(self, gpu: int, undo: bool, waits: bool) -> m.Status | None:
        """None if the controller does not reply in time; with ``waits`` it has all the time that there is."""
        timeout_s = None if waits else STATUS_TIMEOUT_S
        return await self._query(lambda query: m.AskDrainGpu(query=query, gpu=gpu, undo=undo, waits=waits), timeout_s)

    async def usage(self, since_s: float) -> m.Status | None:
        """Usage of functions; None if the controller does not reply in time."""
        return await self._query(lambda query: m.AskUsage(query=query, since_s=since_s))

    async def _query(
        self, question: Callable[[int], m.RouterToController], timeout_s: float | None = STATUS_TIMEOUT_S
    ) -> m.Status | None:
        query = next(self._numbers)
        self._queries[query] = asyncio.get_running_loop().create_future()
        self._tell(question(query))
        try:
            return await asyncio.wait_for(self._queries[query], timeout_s)
        except TimeoutError:
            return None
        finally:
            self._queries.pop(query, None)

    def status_came(self, status: m.Status) -> None:
        if (future := self._queries.pop(status.query, None)) is not None and not future.done():
            future.set_result(status)
