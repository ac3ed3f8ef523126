"""Serves many requests in one instance: coroutines of an ``async def handle``, on one event loop and one command
stream.

Owns the open requests and the end of the lease that they share. One lease serves those that began within LEASE_S of it;
the next ones wait until it has ended, so that others have the GPU between.

Attribution of GPU errors: all requests' commands share one stream, and an executor reports a failure at the next
answer, whichever request waits for it. Coroutines switch only at an ``await``. So before the commands of one request
follow those of another, the other's are synchronized (SYNC), if any of them may have failed unreported; their error is
raised in the request that issued them. A request that reads its results before it awaits needs no SYNC. Threads of a
function are not distinguished.
"""

import asyncio
import inspect
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, Final

from dormouse.client_shim.instance import context, report
from dormouse.client_shim.instance.batches import FailedRequest, LoadedFunction, Outcome, said
from dormouse.client_shim.instance.codec import BadResponse
from dormouse.client_shim.instance.handler import leave
from dormouse.client_shim.instance.hints import EncodedAnswer
from dormouse.schemas import messages as m

LEASE_S: Final = 0.25
"""A quarter of the deadline that functions have unless they say otherwise."""

CANCELLED: Final = FailedRequest("cancelled", "the request was cancelled")

_OWNER: Final[ContextVar[int]] = ContextVar("dormouse_owner", default=0)


class CoroutineTurn(Coroutine[Any, Any, Any]):
    """A coroutine of a request, or of a task that it has made: each step is reported to ``Concurrent`` first."""

    def __init__(self, inner: Coroutine[Any, Any, Any], owner: int, whole: "Concurrent") -> None:
        self._inner, self._owner, self._whole = inner, owner, whole
        self.__name__ = getattr(inner, "__name__", "coroutine")

    def send(self, value: Any) -> Any:
        error = self._whole.enter(self._owner)
        try:
            return self._inner.send(value) if error is None else self._inner.throw(error)
        finally:
            self._whole.stepped()

    def throw(self, *error: Any) -> Any:
        self._whole.enter(self._owner)  # its own error, if it has one, is raised at its next step
        try:
            return self._inner.throw(*error)
        finally:
            self._whole.stepped()

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise TypeError("it is a task's alone")


class Concurrent:
    """The requests of one instance, of a function that has loaded."""

    def __init__(self, runner: LoadedFunction) -> None:
        self._runner = runner
        self._router, self._stream = runner.backend.router, runner.stream
        self._pid = os.getpid()
        self._waiting: deque[m.Run] = deque()
        self._open: dict[int, asyncio.Task[Outcome]] = {}
        self._tasks: dict[int, set[asyncio.Task[Any]]] = {}  # by request: all that run for it
        self._owner = 0  # the request whose commands were recorded last
        self._errors: dict[int, Exception] = {}  # by request: the error of its commands
        self._leased_s = 0.0  # since when the lease is held that they share
        self._leaving = False
        self._pumping = False

    def serve(self) -> None:
        """Until the router says Exit. Raises PeerLost."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._task)
        self._over = self._loop.create_future()
        self._runner.backend.may_acquire = True
        self._loop.add_reader(self._router.link.fileno(), self._pump)
        self._router.read_elsewhere = self._pump_soon
        self._loop.call_soon(self._pump)
        try:
            self._loop.run_until_complete(self._over)
        finally:
            self._runner.backend.may_acquire = False
            self._loop.remove_reader(self._router.link.fileno())
            if tasks := asyncio.all_tasks(self._loop):
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    # --- messages of the router

    def _pump_soon(self) -> None:
        """For threads."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        try:
            runs, abandoned = self._router.news()
        except BaseException as error:
            self._end(error)
            return
        for run in runs:
            if isinstance(run, m.Run):
                self._waiting.append(run)
            else:
                self._leaving = True
        for number in abandoned:
            self._abandon(number)
        self._begin()

    def stepped(self) -> None:
        """A coroutine has made a step: it may have read messages of the router while it waited for something."""
        if os.getpid() != self._pid:
            leave(SystemExit(0))
        if not self._pumping and self._router.has_news:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _abandon(self, number: int) -> None:
        if (task := self._open.get(number)) is not None:
            task.cancel()
            return
        for run in self._waiting:
            if run.request == number:
                self._waiting.remove(run)
                self._send(m.Raised(request=number, code=CANCELLED.code, text=CANCELLED.text))
                return

    def _begin(self) -> None:
        while self._waiting and not self._lease_ends():
            run = self._waiting.popleft()
            own = copy_context()
            own.run(_OWNER.set, run.request)
            own.run(context.begin, run)
            task = self._loop.create_task(self._request(run), context=own)
            task.add_done_callback(partial(self._ended, run), context=own)
            self._open[run.request] = task
        if self._leaving and not self._open and not self._waiting and not self._over.done():
            self._over.set_result(None)

    def _lease_ends(self) -> bool:
        """Whether the lease that is held serves no further requests."""
        return bool(self._open) and self._stream.leased and time.monotonic() >= self._leased_s + LEASE_S

    def _end(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    def _send(self, message: m.InstanceToRouter) -> None:
        try:
            self._router.send(message)
        except BaseException as error:
            self._end(error)

    # --- turns on the stream

    def _task(
        self, loop: asyncio.AbstractEventLoop, inner: Any, *, context: Context | None = None
    ) -> asyncio.Task[Any]:
        owner = _OWNER.get() if context is None else context.get(_OWNER, 0)
        if owner == 0:
            return asyncio.Task(inner, loop=loop, context=context)
        task: asyncio.Task[Any] = asyncio.Task(CoroutineTurn(inner, owner, self), loop=loop, context=context)
        tasks = self._tasks.setdefault(owner, set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def enter(self, owner: int) -> Exception | None:
        """Commands of this request follow; the error that its commands before have ended with, once."""
        if owner != self._owner:
            self._answer_for(self._owner)
            self._owner = owner
        if not self._stream.leased:
            self._leased_s = time.monotonic()  # of the lease that it may take now
        return self._errors.pop(owner, None)

    def _answer_for(self, owner: int) -> None:
        """Wait for the outcome of the commands that were recorded last."""
        try:
            self._stream.answer_for_all()
        except Exception as error:
            if owner in self._open:
                self._errors[owner] = error

    # --- one request

    async def _request(self, run: m.Run) -> Outcome:
        """It has none of its tasks any more at its end, but for this one. Cancelled before its first step, it has none,
        and nothing here runs.
        """
        answer: Outcome
        try:
            answer = await self._answer(run)
        except asyncio.CancelledError:
            answer = CANCELLED
        except BaseException as error:
            answer = self._failure(error)
        with suppress(asyncio.CancelledError):  # it is at its end anyway
            if isinstance(answer, FailedRequest):
                await asyncio.sleep(0)  # the step that has raised the error is over, and its locals are gone
            await self._end_tasks(run.request)
        return answer

    def _ended(self, run: m.Run, task: "asyncio.Task[Outcome]") -> None:
        """Its answer is sent, however its task has ended, when its commands were answered for."""
        try:
            outcome = task.result()
        except asyncio.CancelledError:
            outcome = CANCELLED
        try:
            if self._owner == run.request:
                self._stream.answer_for_all()
            if (error_of_late := self._errors.pop(run.request, None)) is not None:
                raise error_of_late
            if len(self._open) == 1 and self._stream.leased:
                self._stream.end_lease()
        except BaseException as error:
            if report.code(error, "") in ("executor_lost", "seat_lost"):
                self._stream.lose_lease()
            outcome = outcome if isinstance(outcome, FailedRequest) else self._failure(error)
        if isinstance(outcome, FailedRequest) and outcome.code not in (*report.CLIENTS, "cancelled"):
            print(report.record(context.of(run), outcome.text), file=sys.stderr, flush=True)
        if len(self._open) == 1 and (remains := self._stream.remains()):  # tensors of others may go with them
            print(f"dormouse: this instance is replaced: {remains}", file=sys.stderr, flush=True)
            self._send(m.Spoiled(text=remains))
        sys.stdout.flush()
        sys.stderr.flush()
        self._send(said(run.request, outcome))
        del self._open[run.request]
        self._tasks.pop(run.request, None)
        self._begin()
        self.stepped()

    def _failure(self, error: BaseException) -> FailedRequest:
        return self._runner.failure(error, "handle()")

    async def _answer(self, run: m.Run) -> EncodedAnswer:
        assert run.body is not None, "requests of many come in messages"
        asked = self._runner.hints.asked(run.body, run.kind, run.accept)
        result = self._runner.function.handle(self._runner.state, asked.value)
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, AsyncIterator | Iterator):
            raise BadResponse("handle() returned an iterator: deploy without --concurrency to answer in parts")
        return asked.answer(result, m.MESSAGE_BODY_NBYTES)

    async def _end_tasks(self, number: int) -> None:
        """The tasks that remain."""
        mine = asyncio.current_task()
        if left := [task for task in self._tasks[number] if task is not mine and not task.done()]:
            for task in left:
                task.cancel()
            await asyncio.wait(left)
