"""`torch.cuda.Stream`, `Event` and graphs: there is one ordered stream, so streams are names for it; calls that would
need more are refused."""

import time
from contextlib import nullcontext
from typing import Any, Final

import torch

from dormouse.client_shim.patches import patch, raising, raising_class
from dormouse.client_shim.torch_face.device_numbers import expect_device
from dormouse.client_shim.torch_face.remote_tensor import DEVICE, stream
from dormouse.schemas import stream as wire


def synchronize(device: Any = None) -> None:
    expect_device(device)
    if stream().leased:
        stream().wait(wire.SYNC)


class Stream:
    """All streams of a function are its one command stream: work is in order, whichever of them it names."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        expect_device(device if device is not None else kwargs.get("device_index"))
        self.device = DEVICE
        self.device_index = 0
        self.device_type = 1
        self.stream_id = 0
        self.cuda_stream = 0
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def synchronize(self) -> None:
        synchronize()

    def query(self) -> bool:
        synchronize()
        return True

    def is_capturing(self) -> bool:
        return False

    def wait_event(self, event: "Event") -> None:
        """Work is in order already."""

    def wait_stream(self, other: "Stream") -> None:
        """Work is in order already."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


_NOT_SHARED: Final = "events cannot be shared between processes on Dormouse"


class Event:
    """A point in the stream. Times are the host's, taken after everything before the event has finished."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        if interprocess:
            raise NotImplementedError(_NOT_SHARED)
        self._timing = enable_timing
        self._at_s: float | None = None
        self.device = DEVICE

    def ipc_handle(self) -> bytes:
        raise NotImplementedError(_NOT_SHARED)

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> "Event":
        raise NotImplementedError(_NOT_SHARED)

    def record(self, stream: Stream | None = None) -> None:
        if self._timing:
            synchronize()
        self._at_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Work is in order already."""

    def query(self) -> bool:
        synchronize()
        return True

    def synchronize(self) -> None:
        synchronize()

    def elapsed_time(self, end_event: "Event") -> float:
        if not self._timing or self._at_s is None or end_event._at_s is None:
            raise ValueError("both events must have been recorded and made with enable_timing=True")
        return (end_event._at_s - self._at_s) * 1000


_DEFAULT = Stream()


def current_stream(device: Any = None) -> Stream:
    expect_device(device)
    return _DEFAULT


def _set_stream(stream: Any) -> None:
    if not isinstance(stream, Stream):
        raise TypeError(f"a stream is a torch.cuda.Stream, and no {type(stream).__name__}")


class StreamContext(nullcontext[None]):
    """`with torch.cuda.stream(s)`: the one stream goes on."""

    def __init__(self, stream: Stream | None) -> None:
        super().__init__()
        if stream is not None:
            _set_stream(stream)
        self.stream = stream


_NO_GRAPHS: Final = (
    "CUDA graphs cannot be captured in a Dormouse function: its process has no GPU, "
    "and the GPU changes from request to request. Run the code eagerly"
)
_NO_EXTERNAL_STREAM: Final = "a Dormouse function's process has no CUDA streams of other libraries: it has no GPU"
CUDAGraph = raising_class("CUDAGraph", _NO_GRAPHS)


def install() -> None:
    cuda: Any = torch.cuda
    for module in (cuda, cuda.streams):
        patch(module, "Stream", Stream)
        patch(module, "Event", Event)
        patch(module, "ExternalStream", raising_class("ExternalStream", _NO_EXTERNAL_STREAM))
    patch(torch, "Stream", Stream)
    patch(torch, "Event", Event)
    for module in (cuda, cuda.graphs):
        patch(module, "CUDAGraph", CUDAGraph)
        patch(module, "graph", CUDAGraph)
        patch(module, "make_graphed_callables", raising(_NO_GRAPHS))
        patch(module, "graph_pool_handle", raising(_NO_GRAPHS))
    answers: dict[str, Any] = {
        "current_stream": current_stream,
        "default_stream": current_stream,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "set_stream": _set_stream,
        "get_stream_from_external": raising(_NO_EXTERNAL_STREAM),
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: False,
    }
    for name, answer in answers.items():
        patch(cuda, name, answer)
    patch(cuda.graphs, "is_current_stream_capturing", answers["is_current_stream_capturing"])
