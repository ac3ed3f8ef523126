"""Watchers of the node: one sampler for all of them, from the arrival of the first until the last has departed.

Each receives a snapshot, then the changes, as an event stream. Nothing is kept for one that does not read: it misses
changes, and receives a new snapshot when it reads again. front/connection.py cuts those that never do.
"""

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import orjson

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.state import Phase, Request, RouterState
from dormouse.router.access import tenancy
from dormouse.router.access.access import Caller
from dormouse.router.dashboard.rows import NodeView, difference, view
from dormouse.router.dashboard.spans import BEFORE_S, GpuSpan, Spans, before
from dormouse.router.front.exchange import HttpError
from dormouse.router.front.requests import Requests
from dormouse.schemas import messages as m

MAX: Final = 16
"""Watchers at once, and of these, OF_TENANTS of tenants and of callers without a key: the rest is for keys that see the
whole node.
"""

OF_TENANTS: Final = 12
OF_ONE: Final = 4
"""Of one tenant, whatever its keys, and of all callers without a key."""

SPANS_S: Final = 0.25
"""Between two tellings of requests."""

MIN_S, PAUSE_S, LONGEST_S = 0.25, 1.0, 5.0
"""Between two samples: after news of processes or deploys, usually, and at most."""

PATIENCE: Final = 20
"""The pause is so many times what the sample took, the controller's answer included: watching takes no more than a part
of any process, however many functions there are.
"""

SILENCE_S: Final = 5.0
"""After which a comment shows that the node is there."""


class Node(Protocol):
    """The part of the router that this module uses."""

    log: Any
    requests: Requests

    @property
    def picture(self) -> RouterState: ...


@dataclass(eq=False, slots=True)
class Watcher:
    """One reader. ``write`` is given a frame, and takes or refuses it. ``left`` is set when it, or the node, ends."""

    write: Callable[[bytes], bool]
    left: "asyncio.Future[None]"
    caller: Caller  # its rights are sent, so that the page sends no request that would be refused
    behind: bool = True  # it lacks something, and needs a snapshot
    missed: int | None = None  # frames since its snapshot; None: it has had none

    def send(self, frame: bytes) -> None:
        if self.behind or not self.write(frame):
            self.behind = True
            self.missed = None if self.missed is None else self.missed + 1

    def leave(self) -> None:
        if not self.left.done():
            self.left.set_result(None)


@dataclass(eq=False, slots=True)
class _Group:
    """Watchers who see the same."""

    caller: Caller  # one of them
    whole: bool
    reads: bool  # the texts of errors
    watchers: set[Watcher] = field(default_factory=set)
    seen: NodeView = field(default_factory=NodeView)


class Sampler:
    """``status`` is all that there is to see of the node; ``admits`` returns whether a caller would be let in now."""

    def __init__(
        self, node: Node, status: Callable[[], Awaitable[dict[str, Any]]], admits: Callable[[Caller], bool]
    ) -> None:
        self._node, self._status, self._admits = node, status, admits
        self._groups: dict[tuple[str | None, tuple[str, ...], bool], _Group] = {}
        self._spans: Spans | None = None
        self._sampler: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._said_s = 0.0
        self._last: dict[str, Any] = {}  # the newest status

    @property
    def watched(self) -> bool:
        return self._sampler is not None

    @property
    def watchers(self) -> int:
        return sum(len(group.watchers) for group in self._groups.values())

    # --- watchers

    def enter(self, caller: Caller, write: Callable[[bytes], bool]) -> Watcher:
        """The watcher is the caller's to :meth:`leave`. Raises HttpError."""
        whole, reads = tenancy.sees_all(caller), "deploy" in caller.rights
        others = [group for group in self._groups.values() if not (group.whole and group.reads)]
        of_tenants = sum(len(group.watchers) for group in others)
        alike = [group for group in others if (group.caller.tenant, group.reads) == (caller.tenant, reads)]
        of_one = sum(len(group.watchers) for group in alike)
        bounded = not (whole and reads) and (of_tenants >= OF_TENANTS or of_one >= OF_ONE)
        if self.watchers >= MAX or bounded:
            text = "too many watch this node already; close other dashboards, or come back later"
            raise HttpError(m.Failure(code="too_many_watchers", status=503, text=text, retryable=True))
        group = self._groups.setdefault((caller.tenant, caller.functions, reads), _Group(caller, whole, reads))
        watcher = Watcher(write, asyncio.get_running_loop().create_future(), caller)
        group.watchers.add(watcher)
        if self._sampler is None:
            self._begin()
        self._news.set()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        for key, group in list(self._groups.items()):
            group.watchers.discard(watcher)
            if not group.watchers:
                del self._groups[key]
        if not self._groups:
            self._end()

    def close(self) -> None:
        """The node ends."""
        for group in self._groups.values():
            for watcher in group.watchers:
                watcher.leave()
        self._end()

    def _begin(self) -> None:
        self._spans = Spans()
        for request in self._node.picture.requests.values():
            self._span(request)
        self._node.requests.watcher = self._ended
        self._sampler = asyncio.get_running_loop().create_task(self._run())
        self._tell_spans()

    def _end(self) -> None:
        self._spans = self._node.requests.watcher = None
        for work in (self._sampler, self._timer):
            if work is not None:
                work.cancel()
        self._sampler = self._timer = None
        self._last = {}

    # --- views

    def poke(self) -> None:
        """Something has changed that a person looks for: do not wait for the next sample."""
        self._news.set()

    def processes(self, up: dict[str, int], gone: list[str]) -> None:
        """One of the node's has ended, or is up: sent at once, because the next sample may find it replaced."""
        self.poke()
        if not self._last:
            return
        gpus = {number: gpu for number, gpu in self._last["gpus"].items() if f"gpu{number}" in up}
        self._last = self._last | {"node": self._last["node"] | {"peers": up, "gone": gone}, "gpus": gpus}
        for group in self._groups.values():
            self._tell(group, self._last)

    async def _run(self) -> None:
        loop, own = asyncio.get_running_loop(), asyncio.current_task()
        try:
            while own is self._sampler:  # wait_for may lose a cancellation
                self._news.clear()
                began_s = loop.time()
                status = self._last = await self._status()
                self._let_go()
                for group in list(self._groups.values()):
                    self._tell(group, status)
                    await asyncio.sleep(0)  # requests first
                pause_s = min(LONGEST_S, max(PAUSE_S, PATIENCE * (loop.time() - began_s)))
                await asyncio.sleep(MIN_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), pause_s - MIN_S)
        except Exception:  # the outermost frame of the sampler: the node serves on
            self._node.log.error("watch_raised", story=traceback.format_exc())
            self._sampler = None
            self.close()

    def _let_go(self) -> None:
        """Those whose key was revoked, or who have none where one is wanted by now."""
        watchers = [watcher for group in self._groups.values() for watcher in group.watchers]
        for watcher in watchers:
            if not self._admits(watcher.caller):
                watcher.leave()
                self.leave(watcher)

    def _tell(self, group: _Group, status: dict[str, Any]) -> None:
        before, now = group.seen, view(tenancy.part_of(group.caller, status), group.whole, group.reads)
        now = replace(now, minutes=self._node.requests.minutes(group.caller)["minutes"])
        group.seen = now
        if changed := difference(before, now):
            self._send(group, "change", changed)
        self._catch_up(group)

    def _catch_up(self, group: _Group) -> None:
        """A snapshot for those who need one."""
        behind = [watcher for watcher in group.watchers if watcher.behind]
        if not behind or not group.seen.node:
            return
        parts = ("node", "problems", "store", "gpus", "functions", "minutes")
        seen = {part: getattr(group.seen, part) for part in parts}
        at, now_s = time.time(), time.monotonic()
        spans = before(self._node.requests.since(group.caller, at - BEFORE_S), at, now_s)
        for watcher in behind:
            told = seen | {
                "whole": group.whole,
                "rights": sorted(watcher.caller.rights),
                "missed": watcher.missed or 0,
                "now": now_s,
                "spans": spans,
                "since": self._node.requests.since_s,
            }
            if watcher.write(frame("snapshot", told)):
                watcher.behind, watcher.missed = False, 0

    def _send(self, group: _Group, name: str, value: Any) -> None:
        self._said_s = time.monotonic()
        said = frame(name, value)
        for watcher in group.watchers:
            watcher.send(said)

    # --- requests

    def handed(self, number: int) -> None:
        """This request has a GPU now."""
        if self._spans is not None and (request := self._node.picture.requests.get(number)) is not None:
            self._span(request)

    def _span(self, request: Request) -> None:
        picture = self._node.picture
        function, ticket = picture.functions.get(request.function), picture.tickets.get(request.ticket)
        if request.phase is not Phase.RUNNING or function is None or ticket is None:
            return
        if (lease := ticket.lease) is None:  # a language model's: its instance has the seat
            instance = picture.instances.get(ticket.instance)
            seat = picture.tickets.get((instance.own if instance is not None else None) or 0)
            lease = seat.lease if seat is not None else None
        assert self._spans is not None, "somebody watches"
        span = GpuSpan(
            number=0,
            function=request.function,
            tenant=function.spec.tenant,
            gpu=-1 if lease is None else lease.gpu,
            begun_s=request.granted_s,
            source=request.source,
            queue_s=request.granted_s - request.arrived_s,
        )
        self._spans.begun(request.number, span)

    def _ended(self, outcome: e.Answer | e.Fail | e.Drop) -> None:
        if self._spans is not None:
            self._spans.ended(outcome, time.monotonic())

    def _tell_spans(self) -> None:
        assert self._spans is not None, "somebody watches"
        self._timer = asyncio.get_running_loop().call_later(SPANS_S, self._tell_spans)
        if all(watcher.behind for group in self._groups.values() for watcher in group.watchers):
            return  # nobody could be reached
        spans, dropped = self._spans.taken()
        now_s = time.monotonic()
        for group in self._groups.values():
            sees = group.caller.sees
            own = [span.told() for span in spans if sees(span.function, span.tenant)]
            lost = sum(count for (name, tenant), count in dropped.items() if sees(name, tenant))
            if own or lost:
                self._send(group, "spans", {"now": now_s, "spans": own, "dropped": lost})
        if now_s - self._said_s >= SILENCE_S:
            self._said_s = now_s
            for group in self._groups.values():
                for watcher in group.watchers:
                    if not watcher.behind:
                        watcher.behind = not watcher.write(b": here\n\n")


def frame(name: str, value: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(value))
