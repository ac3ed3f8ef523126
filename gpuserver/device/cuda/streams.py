"""The context, and the streams and events in it.

Owns the primary context of one GPU, which it makes current on every thread that asks, and the events, which are used
again once nobody holds them. The order between streams is decided in copies.py and device.py.
"""

import threading
from typing import Final

from dormouse.gpuserver.device.cuda import driver
from dormouse.gpuserver.device.protocol import DeviceError, DeviceLost


class CudaContext:
    """The primary context of GPU ``ordinal``, current on the thread that made it. Raises DeviceError, DeviceLost."""

    def __init__(self, ordinal: int) -> None:
        driver.initialise()
        count = driver.device_count()
        if not 0 <= ordinal < count:
            raise DeviceError(f"GPU {ordinal} is not there: the driver finds {count}; set [gpu] count lower")
        self.device: Final = driver.device(ordinal)
        try:
            self._handle: Final = driver.retain_primary(self.device)
        except (driver.DriverRefused, DeviceLost) as error:
            raise DeviceError(f"GPU {ordinal} cannot be used: {error}") from error
        self._current = threading.local()
        self._free: list[int] = []  # events that nobody holds; append and pop are atomic
        self.use()

    def use(self) -> None:
        """Before any call on this thread. Raises DeviceLost once the context is lost."""
        driver.require()
        if not getattr(self._current, "set", False):
            driver.set_current(self._handle)
            self._current.set = True

    def event(self) -> "CudaEvent":
        """One that no stream has been given yet."""
        return CudaEvent(self)

    def recorded(self, stream: int) -> "CudaEvent":
        """A point on a stream after everything that it was given so far."""
        event = CudaEvent(self)
        event.record(stream)
        return event

    def take_event(self) -> int:
        try:
            return self._free.pop()
        except IndexError:
            return driver.create_event()

    def give_event(self, handle: int) -> None:
        """From any thread, without a call to the driver. Whoever waits for it already is not disturbed when it is
        recorded again.
        """
        self._free.append(handle)

    def close(self) -> None:
        """Every stream is gone. Events that are still held are left to the context."""
        while self._free:
            driver.destroy_event(self._free.pop())
        driver.release_primary(self.device)


class CudaEvent:
    """A point on a stream, that may lie in the future: on the copy stream, it is *issued* when the copy before it is.

    An event that was never recorded counts as passed in CUDA, so nothing may wait for it before it is issued.
    """

    __slots__ = ("__weakref__", "_context", "_handle", "_issued", "_passed")

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._handle: int | None = None
        self._issued = threading.Event()
        self._passed = False

    def record(self, stream: int) -> None:
        handle = self._context.take_event()
        try:
            driver.record_event(handle, stream)
        except DeviceError:
            self._context.give_event(handle)
            raise
        self._handle = handle
        self._issued.set()

    def give_up(self) -> None:
        """It will never be issued: wake all that wait for that."""
        self._issued.set()

    def handle(self) -> int:
        """Block until it is issued. Raises DeviceLost, and DeviceError if it never will be: its job was cancelled."""
        self._issued.wait()
        self._context.use()
        if self._handle is None:
            raise DeviceError("waiting for a copy that was cancelled")
        return self._handle

    def done(self) -> bool:
        if not self._passed and self._handle is not None:
            self._context.use()
            self._passed = driver.event_passed(self._handle)
        return self._passed

    def synchronize(self) -> None:
        """Block the host until the stream has passed it."""
        if not self._passed:
            driver.synchronize_event(self.handle())
            self._passed = True

    def seconds_after(self, before: "CudaEvent") -> float:
        """Between two events that have passed."""
        return driver.elapsed_s(before.handle(), self.handle())

    def __del__(self) -> None:
        if self._handle is not None:
            self._context.give_event(self._handle)
