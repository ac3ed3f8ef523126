"""Reports to the controller: the store's totals, soon and once for many changes; and use of host memory over time."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from dormouse.core.decisions.memory.holdings import STATE_S
from dormouse.gpuserver.store.metering import HostMeter
from dormouse.schemas import messages as m

REPORT_S: Final = 0.02
"""Delay of StoreStatus: people read it."""


class Telling:
    """``totals`` returns them as they are now; ``send`` goes to the controller."""

    def __init__(
        self,
        meter: HostMeter,
        totals: Callable[[], m.StoreStatus],
        send: Callable[[m.StoreToController], None],
        log: Any,
    ) -> None:
        self._meter, self._totals, self._send, self._log = meter, totals, send, log
        self._loop = asyncio.get_running_loop()
        self._told: m.StoreStatus | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stating: asyncio.TimerHandle | None = None

    def close(self) -> None:
        for timer in (self._timer, self._stating):
            if timer is not None:
                timer.cancel()

    def soon(self) -> None:
        """Something has changed: a load changes the numbers hundreds of times in a second."""
        if self._timer is None:
            self._timer = self._loop.call_later(REPORT_S, self.now)
        self._meter.sync(self._loop.time())
        if self._stating is None and not self._meter.empty:
            self._stating = self._loop.call_later(STATE_S, self._state)

    def now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        totals = self._totals()
        if totals != self._told:
            if self._told is not None and totals.trouble != self._told.trouble:
                self._log.warning("store_trouble", text=totals.trouble)
            self._told = totals
            self._send(totals)

    def _state(self) -> None:
        for statement in self._meter.state(self._loop.time()):
            self._send(statement)
        self._stating = None if self._meter.empty else self._loop.call_later(STATE_S, self._state)
