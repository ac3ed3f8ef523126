"""A client leaves while coroutines of a function run: wherever the signal meets the process, the request ends, what it
had open is closed, and the instance can serve the next one.
"""

import asyncio
import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from types import FrameType
from typing import Any, Final

import pytest

from dormouse.client_shim.instance import cancel
from dormouse.client_shim.instance.cancel import Cancellation, RequestCancelled, SignalPlace
from dormouse.client_shim.instance.coroutines import Coroutines
from dormouse.client_shim.instance.handler import Handler

pytestmark = [
    pytest.mark.timeout(300, method="thread"),  # a loop that never ends would catch what the other one raises
    pytest.mark.filterwarnings(
        "ignore:.*coroutine:pytest.PytestUnraisableExceptionWarning"
    ),  # cancelled before it began
]


class Instance:
    """What an instance has of its requests. A signal can be made to come at any line."""

    def __init__(self) -> None:
        self.word = bytearray(8)
        self.coroutines = Coroutines()
        self.cancellation = Cancellation(memoryview(self.word), self.coroutines)
        self.handler = Handler(self.coroutines)
        self.requests = 0

    def run(self, request: Callable[[], object], line: int | None = None) -> bool:
        """Whether it was cancelled. A signal comes before the so-manieth line that runs."""
        self.requests += 1
        try:
            with self.cancellation.window(self.requests):
                self.word[:] = self.requests.to_bytes(8, "little")
                try:
                    if line is not None:
                        sys.settrace(self._tracer(line))
                    request()
                finally:
                    sys.settrace(None)
            return False
        except RequestCancelled:
            return True
        finally:
            # A signal that is sent once more must not come while the next request is traced: it would be met by the
            # tracer, and once a process has died of that.
            for thread in threading.enumerate():
                if thread.name == "dormouse-cancel":
                    thread.join(60)
                    assert not thread.is_alive()
            self.handler.finish()

    def _tracer(self, line: int) -> Any:
        left = line

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            if event == "line":
                left -= 1
                if left == 0:
                    sys.settrace(None)
                    self.cancellation._on_signal(signal.SIGUSR1, frame)
            return trace

        # It stands for Python, which calls handlers of signals without a frame of its own.
        trace.__code__ = trace.__code__.replace(co_filename=cancel.__file__)
        return trace


@pytest.fixture
def instance() -> Iterator[Instance]:
    made = Instance()
    before = signal.getsignal(signal.SIGUSR1), sys.unraisablehook
    made.cancellation.install()
    yield made
    signal.signal(signal.SIGUSR1, before[0])
    sys.unraisablehook = before[1]
    made.coroutines.close()


LINES: Final = 400
"""The requests below are in their loops by then."""


@pytest.mark.parametrize("pause_s", [0.0, 0.0001])
def test_a_stream_ends_wherever_it_is_interrupted(instance: Instance, pause_s: float) -> None:
    seen: list[str] = []

    async def apart() -> AsyncIterator[int]:
        try:
            seen.append("begun")
            while True:
                await asyncio.sleep(pause_s)
                yield 1
        finally:
            seen.append("ended")

    def request() -> None:
        parts = instance.handler.parts(instance.handler.call(apart))
        assert parts is not None
        with closing(parts):
            for _ in parts:
                pass

    whole = 0
    for line in range(1, LINES):
        seen.clear()
        assert instance.run(request, line), line
        assert seen in ([], ["begun", "ended"], ["ended"]), line
        whole += seen == ["begun", "ended"]
    assert whole > LINES / 2


def test_whom_the_event_loop_calls_in_the_midst_of_its_work_is_not_interrupted(instance: Instance) -> None:
    """Such as a hook of `sys.audit`, which libraries install: what it raised would leave the loop half done."""
    places: list[SignalPlace] = []

    def here(*_: object) -> None:
        places.append(cancel._place(sys._getframe()))

    async def apart() -> None:
        loop = asyncio.get_running_loop()
        here()
        before = loop.get_exception_handler()
        loop.set_exception_handler(here)
        loop.call_exception_handler({})
        loop.set_exception_handler(before)
        task = loop.create_task(beside())
        loop.call_soon(here)
        await asyncio.wait_for(beside(), 60)
        await task

    async def beside() -> None:
        here()

    instance.coroutines.complete(apart)
    code = SignalPlace.CODE
    assert places == [code, SignalPlace.LOOP, code, code, code]


def test_a_coroutine_ends_wherever_it_is_interrupted(instance: Instance) -> None:
    seen: list[str] = []

    async def beside() -> None:
        for _ in range(10**9):
            await asyncio.sleep(0)

    async def handle() -> None:
        try:
            await asyncio.gather(beside(), beside(), return_exceptions=True)
        finally:
            seen.append("ended")

    for line in range(1, LINES):
        seen.clear()
        assert instance.run(lambda: instance.handler.call(handle), line), line
        assert seen in ([], ["ended"]), line
    assert seen == ["ended"]


def test_what_a_task_beside_swallows_ends_the_request(instance: Instance) -> None:
    async def computes() -> None:
        signal.raise_signal(signal.SIGUSR1)

    async def handle() -> None:
        await asyncio.gather(computes(), return_exceptions=True)
        await asyncio.sleep(3600)

    assert instance.run(lambda: instance.handler.call(handle))


def test_what_a_callback_raises_ends_the_request(instance: Instance) -> None:
    async def handle() -> None:
        asyncio.get_running_loop().call_soon(lambda: signal.raise_signal(signal.SIGUSR1))
        await asyncio.sleep(3600)

    assert instance.run(lambda: instance.handler.call(handle))


def test_a_signal_that_python_would_only_print_comes_again(instance: Instance) -> None:
    """What is raised while an object dies goes no further."""

    class Dies:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGUSR1)

    def handle() -> None:
        Dies()
        time.sleep(3600)

    def handle_too() -> None:
        dies = type("Dies", (), {})()
        seen = weakref.ref(dies, lambda _: signal.raise_signal(signal.SIGUSR1))
        del dies
        gc.collect()
        time.sleep(3600 if seen() is None else 0)

    assert instance.run(lambda: instance.handler.call(handle))
    assert instance.run(lambda: instance.handler.call(handle_too))


def test_other_errors_of_dying_objects_are_shown(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[sys.UnraisableHookArgs] = []
    sys.unraisablehook = shown.append
    instance.cancellation.install()

    class Dies:
        def __del__(self) -> None:
            raise ValueError("of its own")

    assert not instance.run(Dies)
    assert [str(each.exc_value) for each in shown] == ["of its own"]


def test_who_is_cancelled_and_answers_all_the_same_has_not_answered(instance: Instance) -> None:
    async def handle() -> int:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGUSR1)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return 3
        return 4

    assert instance.run(lambda: instance.handler.call(handle))
