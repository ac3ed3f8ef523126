"""The HTTP face: serves the requests that router/access/gate.py lets in, and hands on those below /admin.

connection.py handles a request until it is whole, and the departure of its client.
"""

import asyncio
import re
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from dormouse.core.config import NodeConfig
from dormouse.core.decisions.requests import failures, queueing, splits
from dormouse.core.decisions.requests.policy import RequestPolicy
from dormouse.core.decisions.requests.state import most_open
from dormouse.router.access import tenancy
from dormouse.router.access.access import Act, Caller
from dormouse.router.access.gate import Entered, HttpGate, Turned
from dormouse.router.front import answers, openai, openapi, openinference, tracing
from dormouse.router.front.bodies import TYPE_NBYTES, Body
from dormouse.router.front.cycle import ClientLeft, Cycle
from dormouse.router.front.exchange import (
    Exchange,
    HttpError,
    refuse,
    refused,
    too_large,
)
from dormouse.router.front.heads import part_is_taken
from dormouse.router.front.requests import Labels, Requests
from dormouse.router.front.streams import AnswerStream
from dormouse.schemas import messages as m
from dormouse.schemas.messages import Failure

_PAGE: Final = (Path(__file__).parent / "trypage.html").read_bytes()
_PAGE_HEADERS: Final = (
    (b"content-security-policy", openapi.page_policy(_PAGE)),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)

Wish = TypeVar("Wish")

_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


class Node(Protocol):
    """The part of the router that this module uses."""

    epoch: int
    config: NodeConfig
    log: Any
    policy: RequestPolicy
    requests: Requests

    @property
    def ending(self) -> bool:
        """Whether no answer can be had any more but that the node ends or starts anew."""
        ...


class KeptAnswers(Protocol[Wish]):
    """Jobs (router/jobs/)."""

    def wish(self, x: Exchange) -> Wish | None:
        """The wish that makes this request a job, if it has one. Raises HttpError."""
        ...

    async def take(self, x: Exchange, wish: Wish, name: str, body: Body, route: str, labels: Labels) -> None:
        """Make a job of it, and answer. The body is its own. Raises HttpError."""
        ...

    async def route(self, x: Exchange, entered: Entered) -> None:
        """Serve the routes below /jobs. Raises HttpError."""
        ...


class Application:
    """The application. ``administer`` serves the routes below /admin."""

    def __init__(
        self,
        node: Node,
        gate: HttpGate,
        administer: Callable[[Exchange, Entered], Awaitable[None]],
        jobs: KeptAnswers[Any],
    ) -> None:
        self._node = node
        self._gate = gate
        self._administer = administer
        self._jobs = jobs
        self._documents = openapi.Documents()
        self._numbers = count(1)

    async def __call__(self, cycle: Cycle) -> None:
        given = next((value for key, value in cycle.scope["headers"] if key == b"x-request-id"), b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else b"r%d-%d" % (self._node.epoch, next(self._numbers))
        exchange = Exchange(cycle, request_id)
        try:
            await self._route(exchange)
        except HttpError as error:
            self._turned_away(exchange, error.failure)
            await exchange.fail(error.failure, [*error.headers], error.close)
        except ClientLeft:
            pass
        except (asyncio.CancelledError, Exception) as error:  # the outermost frame of a request
            ending = isinstance(error, asyncio.CancelledError) or self._node.ending  # uvicorn waits no longer
            if not ending:
                said = {"path": cycle.scope["path"], "request": request_id.decode()}
                self._node.log.error("request_raised", **said, story=traceback.format_exc())
            if not exchange.begun:
                failure = failures.stopping() if ending else failures.internal()
                self._turned_away(exchange, failure)
                await exchange.fail(failure, [], close=True)

    def _turned_away(self, x: Exchange, failure: Failure) -> None:
        requests = self._node.requests
        if x.function is None:
            requests.turned_away(failure)
        else:
            requests.turned_away(failure, x.function, self._labels(x))

    def _labels(self, x: Exchange) -> Labels:
        share = self._node.requests.trace_share
        trace = tracing.traced(x.header(b"traceparent"), x.fields(b"tracestate"), share)
        return Labels(x.request_id.decode(), trace)

    async def _route(self, x: Exchange) -> None:
        entered = self._gate.judge(x.scope)
        x.extra = entered.headers
        if entered.caller is not None:
            self._has_place(x, entered.caller)
        if isinstance(entered, Turned):
            picture = self._node.policy.picture
            if entered.caller is not None and tenancy.serves(entered.caller, picture, entered.name):
                x.function = entered.name
            if entered.failure is not None:
                raise HttpError(entered.failure, entered.caller is None)
            x.answer_empty(entered.status)
            return
        x.reads = "deploy" in entered.caller.rights
        if entered.route.method != "GET" and entered.route.act is not Act.INFER:
            x.unpacks()
        match entered.route.act:
            case Act.INVOKE | Act.INFER:
                await self._invoke(x, entered.name, entered.caller)
            case Act.INFERENCE | Act.INDEX:
                await self._inference(x, entered)
            case Act.OPENAI:
                await self._invoke(x, None, entered.caller, openai.route_of(x.scope["path"]))
            case Act.MODELS:
                await self._node.requests.knows_catalogue()
                await x.answer_json(200, openai.models(self._node.policy.picture, entered.caller, entered.name))
            case Act.JOBS | Act.CANCEL:
                await self._jobs.route(x, entered)
            case Act.SCHEMA:
                await self._node.requests.knows_catalogue()
                await x.answer_json(200, openapi.schema_of(self._node.policy.picture, entered.caller, entered.name))
            case Act.OPENAPI:
                await self._node.requests.knows_catalogue()
                await self._document(x, entered.caller)
            case Act.PAGE:
                await x.answer(200, _PAGE, _PAGE_HEADERS, b"text/html; charset=utf-8")
            case Act.HEALTH:
                await x.answer_json(200, openinference.ALIVE.get(x.scope["path"], {"status": "ok"}))
            case Act.READY:
                missing, draining = self._node.policy.missing(), self._node.requests.drain.on
                ready = not missing and not draining
                said = {"ready": ready, "missing": missing, "draining": draining}
                if x.scope["path"] != "/readyz":
                    said = {"ready": ready, "live": True}
                await x.answer_json(200 if ready else 503, said)
            case _:
                await self._administer(x, entered)

    def _has_place(self, x: Exchange, caller: Caller) -> None:
        """Raises HttpError if this caller is answered on all connections that it may have."""
        owner = (caller.tenant or caller.name) if caller.key else ""
        if not x.asks_for(owner) and self._gate.keys.wanted:
            whose = f"tenant {caller.tenant!r}" if caller.tenant else owner or "callers without a key"
            raise HttpError(part_is_taken(self._node.config.limits.connections, whose), close=True)

    async def _document(self, x: Exchange, caller: Caller) -> None:
        """Others are served between functions whose part of it is made for the first time."""
        picture = self._node.policy.picture
        for name in list(picture.functions):
            if self._documents.describe(picture, name):
                await asyncio.sleep(0)
        await x.answer(200, self._documents.document(picture, caller))

    async def _inference(self, x: Exchange, entered: Entered) -> None:
        """Serve the Open Inference Protocol's routes about models. Raises HttpError."""
        picture, stats = self._node.policy.picture, self._node.requests.stats
        await self._node.requests.knows_catalogue()
        if entered.route.act is Act.INDEX:
            limit_nbytes, bodies = openinference.QUESTION_NBYTES, self._node.requests.bodies
            body = await x.receive_body(limit_nbytes, bodies, entered.caller.tenant or entered.caller.name)
            try:
                said: Any = openinference.index(picture, entered.caller, bytes(body.data))
            finally:
                body.close()
        else:
            said = openinference.told(picture, entered.caller, stats, x.scope["path"])
        await x.answer_json(200, said)

    async def _invoke(self, x: Exchange, asked: str | None, caller: Caller, route: str = "") -> None:
        """``asked``: the function, or one version of it; None: the body names it."""
        requests, picture = self._node.requests, self._node.policy.picture
        await requests.knows_catalogue()
        infers = x.scope["path"].startswith("/v2/")
        if asked is not None:
            asked = openinference.addressed(picture, x.scope["path"]) if infers else asked
            x.function = splits.named(picture, asked)
            if not tenancy.serves(caller, picture, x.function):
                x.function = None
                raise HttpError(queueing.absent(picture, asked), close=True)
        if (refusal := requests.drain.refusal()) is not None:  # before its body is read
            raise refused(refusal, close=True)
        wish = None if infers else self._jobs.wish(x)
        kind, accept = ("", "") if asked is None or infers else _types(x)
        if infers and x.function is not None:
            openinference.check(x, picture.functions[x.function].spec)
        body = await x.receive_body(requests.body_nbytes, requests.bodies, caller.tenant or caller.name)
        body.kind, body.accept = kind, accept
        streams = False
        try:
            if asked is None:
                said = openai.addressed(body.data)
                asked, streams = said.model, bool(said.stream) and route in openai.STREAMED
            name = splits.named(picture, asked) if wish is not None else splits.picked(picture, asked)
            if not tenancy.serves(caller, picture, name):  # while it came, the name may have become another tenant's
                known = picture.catalogue_known
                raise HttpError(openai.unknown(asked) if route and known else queueing.absent(picture, asked))
            x.function = name
            if infers:
                body.kind = openinference.kind_of(x, picture.functions[name].spec, requests.body_nbytes)
            if most_open(picture.functions[name].spec) and body.nbytes > m.MESSAGE_BODY_NBYTES:
                raise too_large(m.MESSAGE_BODY_NBYTES, "of a function that has many requests at once")
            if (refusal := requests.refusal(name)) is not None:
                raise refused(refusal)
        except HttpError:
            body.close()
            raise
        if self._node.ending:  # its links close: a request begun now could run, and its answer be lost
            body.close()
            raise HttpError(failures.stopping(), close=True)
        labels = self._labels(x)
        if wish is not None:
            await self._jobs.take(x, wish, asked, body, route, labels)
            return
        x.function = None
        request, future = requests.submit(name, body, route, labels)
        if not future.done():
            x.when_left(partial(requests.leave, request))
        if streams:
            await answers.heartbeats(x, future, requests.heartbeat_s)
        answer = await future
        if isinstance(answer, AnswerStream):
            await answers.streamed(x, answer, requests.heartbeat_s)
            x.when_left(None)
            return
        x.when_left(None)
        outcome, data = answer
        await answers.whole(x, outcome, data, infers)


def _types(x: Exchange) -> tuple[str, str]:
    """The types of the body and of the answer, as Run has them. Raises HttpError."""
    kind, accept = (x.header(name) or b"" for name in (b"content-type", b"accept"))
    if len(kind) > TYPE_NBYTES:
        text = f"the content-type has more than {TYPE_NBYTES} bytes; send a shorter one"
        raise refuse(415, "content_type", text, close=True)
    said = "" if kind == b"application/json" else kind.decode("latin-1")
    return said, "" if accept == b"*/*" else accept[:TYPE_NBYTES].decode("latin-1")
