"""The traces process: receives requests that are over from the router, and exports them. Decides nothing, keeps
nothing.
"""

import asyncio
from typing import Final

from dormouse.core.actor import Actor, run_actor
from dormouse.core.links.link import Link
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError

TELL_S: Final = 1.0
"""Between two looks at the outcome of spans, while any wait."""


class Traces(Actor):
    """See the module."""

    async def start(self) -> None:
        try:
            from dormouse.router.traces.exporting import Exporting  # an extra: a node without it has no need of it
        except ImportError as error:
            raise ConfigError(
                f"[tracing] endpoint needs OpenTelemetry's SDK ({error}): pip install 'dormouse[otel]', or leave the "
                "setting out"
            ) from None
        self._exporting = Exporting(self.config.tracing, self.config.node.name)
        self._told = self._exporting.said
        self._timer: asyncio.TimerHandle | None = None
        self._router: Link[m.RouterToTraces, m.TracesToRouter] = Link(
            self.paths.link("traces", "router", self.epoch),
            bind=True,
            incoming=m.RouterToTraces,
            on_message=self._put,
        )

    def _put(self, trace: m.TracedRequests) -> None:
        self._exporting.put(trace.requests)
        if self._timer is None:
            self._timer = self.loop.call_later(TELL_S, self._tell)

    def _tell(self) -> None:
        busy, said = self._exporting.busy, self._exporting.said  # in this order: finished ones are reported
        if said != self._told:
            self._told = said
            self._router.send(said)
        self._timer = self.loop.call_later(TELL_S, self._tell) if busy else None

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._exporting.close()
        self._router.close()


if __name__ == "__main__":
    run_actor(Traces)
