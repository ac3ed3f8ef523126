"""Carries functions' calls out as requests, and returns their answers, in the form of HTTP, to the caller.

core/decisions/requests/calls.py decides whether a call may be, and its deadline.
"""

import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing
from itertools import count
from typing import Any, Protocol

from dormouse.core.decisions.requests import circles, failures, queueing, splits
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.state import RouterState
from dormouse.router.front import tracing
from dormouse.router.front.bodies import TYPE_NBYTES
from dormouse.router.front.exchange import JSON, HttpError, error_answer, own_head, receiving, refused
from dormouse.router.front.requests import Labels, Requests
from dormouse.router.front.streams import AnswerStream, Outcome
from dormouse.schemas import messages as m


class Node(Protocol):
    """The part of the router that this module uses."""

    epoch: int
    requests: Requests

    @property
    def picture(self) -> RouterState: ...

    def dispatch(self, event: e.Event) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> object: ...


class FunctionCalls:
    """``send(instance, message)``: nothing if that is gone."""

    def __init__(self, node: Node, send: Callable[[str, m.RouterToInstance], None]) -> None:
        self._node, self._send = node, send
        self._numbers = count(1)

    def begin(self, begin: e.BeginCall) -> None:
        self._node.spawn(self._carry_out(begin, self._node.requests.labels(begin.caller)))

    def refuse(self, instance: str, number: int, failure: m.Failure, label: str = "") -> None:
        body, headers = error_answer(failure, label)
        self._answer(instance, number, failure.status, label, JSON.decode(), headers, body)

    def _answer(
        self,
        instance: str,
        number: int,
        status: int,
        label: str,
        kind: str,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes,
    ) -> None:
        said = {name.decode(): value.decode() for name, value in headers}
        said |= {"content-type": kind, **({"x-request-id": label} if label else {})}
        self._send(instance, m.CallAnswered(number=number, status=status, headers=said, body=body))

    async def _carry_out(self, begin: e.BeginCall, caller: Labels) -> None:
        """``caller``: the labels of the request that calls."""
        requests = self._node.requests
        trace = tracing.traced(
            caller.trace.parent.encode() or None, (caller.trace.state.encode(),), requests.trace_share
        )
        by = f"{begin.spec.name} {caller.id}"
        labels = Labels(f"k{self._node.epoch}-{next(self._numbers)}", trace, by=by)
        try:
            outcome, data, kind, head = await self._asked(begin, labels)
        except HttpError as error:
            outcome, data, kind, head = e.Fail(0, error.failure, e.Timing()), b"", "", None
        match outcome:
            case e.Answer():
                status, headers = own_head(outcome.head or head)
                said = kind or outcome.kind or JSON.decode()
                self._answer(begin.instance, begin.number, status, labels.id, said, headers, data)
            case e.Fail(failure=failure):
                self.refuse(begin.instance, begin.number, failure, labels.id)
            case e.Drop():
                self.refuse(begin.instance, begin.number, failures.call_left(), labels.id)
        self._node.dispatch(e.CallOver(begin.instance, begin.number))

    async def _asked(self, begin: e.BeginCall, labels: Labels) -> tuple[Outcome, bytes, str, m.AnswerHead | None]:
        """The whole outcome; of an answer in parts, its kind and head too. Raises HttpError."""
        requests, picture, call, tenant = self._node.requests, self._node.picture, begin.call, begin.spec.tenant
        with receiving(requests.bodies, tenant) as body:
            await body.add(call.body, len(call.body))
            body.complete()
            body.kind, body.accept = call.kind[:TYPE_NBYTES], call.accept[:TYPE_NBYTES]
            name = splits.picked(picture, call.function)
            if not circles.serves(picture, name, tenant):  # while there was no room, it may have gone
                raise HttpError(queueing.absent(picture, call.function))
            if (refusal := requests.tenants.enter(tenant, time.monotonic())) is not None:  # a drain lets it through
                error = refused(refusal)
                requests.turned_away(error.failure, name, labels)
                raise error
        number, future = requests.submit(name, body, labels=labels, call=(begin.instance, begin.number))
        answer = await future
        if not isinstance(answer, AnswerStream):
            outcome, data = answer
            if len(data) > m.MESSAGE_BODY_NBYTES:
                raise HttpError(failures.call_answer_too_large(m.MESSAGE_BODY_NBYTES))
            return outcome, data, "", None
        parts, came_nbytes = [], 0
        async with aclosing(answer.parts()) as coming:
            async for part in coming:
                came_nbytes += len(part)
                if came_nbytes > m.MESSAGE_BODY_NBYTES:
                    requests.leave(number)
                    raise HttpError(failures.call_answer_too_large(m.MESSAGE_BODY_NBYTES))
                parts.append(part)
        assert answer.outcome is not None, "it has ended"
        return answer.outcome, b"".join(parts), answer.kind, answer.head
