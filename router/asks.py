"""What administration asks of the policy and of the controller, and the answers to come: deploys, removals, restarts,
the controller's status. Decides nothing.
"""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any, Final

import orjson

from dormouse.router import events as e
from dormouse.schemas import messages as m

STATUS_TIMEOUT_S: Final = 5.0


class Asks:
    """Questions without an answer yet."""

    def __init__(self, dispatch: Callable[[e.Event], None], tell: Callable[[m.RouterToController], None]) -> None:
        self._dispatch = dispatch
        self._tell = tell
        self._numbers = count(1)
        self._asks: dict[int, asyncio.Future[e.Settled]] = {}
        self._queries: dict[int, asyncio.Future[bytes]] = {}

    async def deploy(self, spec: m.FunctionSpec) -> e.Settled:
        return await self._ask(lambda ask: e.DeployAsked(ask, spec))

    async def remove(self, name: str) -> e.Settled:
        return await self._ask(lambda ask: e.RemoveAsked(ask, name))

    async def restart(self, name: str) -> e.Settled:
        return await self._ask(lambda ask: e.RestartAsked(ask, name))

    async def _ask(self, event: Callable[[int], e.Event]) -> e.Settled:
        ask = next(self._numbers)
        future: asyncio.Future[e.Settled] = asyncio.get_running_loop().create_future()
        self._asks[ask] = future
        self._dispatch(event(ask))
        return await future

    def settled(self, action: e.Settled) -> None:
        if (future := self._asks.pop(action.ask, None)) is not None and not future.done():
            future.set_result(action)

    async def controller_status(self) -> dict[str, Any]:
        """The controller's own status, or nothing if it does not say in time."""
        query = next(self._numbers)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._queries[query] = future
        self._tell(m.AskStatus(query=query))
        try:
            status: dict[str, Any] = orjson.loads(await asyncio.wait_for(future, STATUS_TIMEOUT_S))
            return status
        except TimeoutError:
            return {}
        finally:
            self._queries.pop(query, None)

    def status_came(self, query: int, data: bytes) -> None:
        if (future := self._queries.pop(query, None)) is not None and not future.done():
            future.set_result(data)
