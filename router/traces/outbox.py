"""The router's side of the export of traces: a bounded list of requests that are over, sent now and then.

A request here costs an append. Requests that nobody takes are dropped and counted, never waited for.
"""

import asyncio
from typing import Any, Final, Protocol

from dormouse.core.config import TracingSection
from dormouse.core.links.link import Link
from dormouse.core.paths import RunPaths
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost

ROLE: Final = "traces"
MAX: Final = 2048
"""Requests that wait: some seconds of a busy node, in which the process starts or is replaced."""

BATCH: Final = 64
"""Requests in one message, some 20 KB."""

FLUSH_S: Final = 0.5
UNREAD: Final = 64
"""Messages that the process has not read: one that is stopped has no more of the router's memory."""


class Node(Protocol):
    """The part of the router that this module uses."""

    paths: RunPaths
    peers: dict[str, int]
    supervisor: Any


class Outbox:
    """``dropped`` counts spans."""

    def __init__(self, node: Node, config: TracingSection) -> None:
        self._node, self._config = node, config
        self._waiting: list[m.TracedRequest] = []
        self._timer: asyncio.TimerHandle | None = None
        self._link: Link[m.TracesToRouter, m.RouterToTraces] | None = None
        self._epoch = 0
        self._dropped = 0
        self._before = m.SpansSent(exported=0, failed=0, dropped=0, trouble="")  # by processes that have ended
        self._said = self._before  # by this one

    def open(self) -> None:
        if self._config.endpoint:
            self._node.supervisor.send(m.WantRole(role=ROLE))

    @property
    def share(self) -> float | None:
        """Of the requests without a trace, how many begin one; None if nothing is exported."""
        return self._config.share if self._config.endpoint else None

    def add(self, request: m.TracedRequest) -> None:
        if len(self._waiting) >= MAX:
            self._drop([request])
            return
        self._waiting.append(request)
        if len(self._waiting) >= BATCH:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Hand on what waits, if somebody is there to take it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._link is not None:
            some, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            try:
                self._link.send(m.TracedRequests(requests=some))
            except PeerLost:
                self._drop(some)

    def _drop(self, requests: list[m.TracedRequest]) -> None:
        self._dropped += sum(1 + len(each.spent_s) + (each.copy_s is not None) for each in requests)

    def peers_changed(self, peers: dict[str, int]) -> None:
        epoch = peers.get(ROLE, 0)
        if epoch == self._epoch:
            return
        self._part()
        self._epoch = epoch
        if epoch:
            path = self._node.paths.link(ROLE, "router", epoch)
            self._link = Link(
                path, bind=False, incoming=m.TracesToRouter, on_message=self._heard, hwm=UNREAD + MAX // BATCH
            )
            self.flush()

    def _heard(self, said: m.SpansSent) -> None:
        self._said = said

    def _part(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
            before, said = self._before, self._said
            self._before = m.SpansSent(
                exported=before.exported + said.exported,
                failed=before.failed + said.failed,
                dropped=before.dropped + said.dropped,
                trouble="",
            )
            self._said = m.SpansSent(exported=0, failed=0, dropped=0, trouble=said.trouble)

    @property
    def spans(self) -> dict[str, int]:
        """By what has become of them; nothing if nothing is exported."""
        if not self._config.endpoint:
            return {}
        before, said = self._before, self._said
        return {
            "exported": before.exported + said.exported,
            "failed": before.failed + said.failed,
            "dropped": before.dropped + said.dropped + self._dropped,
        }

    def told(self) -> dict[str, Any]:
        """For `dormouse status`."""
        return {"endpoint": self._config.endpoint, "spans": self.spans, "trouble": self._said.trouble}

    def close(self) -> None:
        self.flush()
        self._part()
        if self._timer is not None:
            self._timer.cancel()
