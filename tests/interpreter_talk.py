"""An interpreter that is talked to in frames, as an executor's compute thread does."""

from typing import Any

import msgpack
import torch

from dormouse.gpuserver.commands.interpreter import FindFastPath, Interpreter
from dormouse.gpuserver.device.protocol import Capture, DeviceLost
from dormouse.schemas import stream as wire

F4 = ["float32", [4], [1], 0, 0]


class Device:
    torch_device = torch.device("cpu")

    def __init__(self, capture: Capture | None) -> None:
        self.capture = capture
        self.relief = 0
        self.relieved = 0
        self.lost = False

    def generator(self) -> torch.Generator:
        return torch.Generator()

    def relieve(self) -> str | None:
        self.relieved += 1
        return None if self.relief > 0 else "and nothing can be evicted"

    def activation_stats(self) -> tuple[int, int, int]:
        return 1, 2, 3

    def synchronize(self) -> None:
        if self.lost:
            raise DeviceLost("cuStreamSynchronize: CUDA_ERROR_ASSERT (710)")


class Talk:
    """Frames to an interpreter that holds lease (1, 2)."""

    def __init__(self, find_fast: FindFastPath = lambda: None, capture: Capture | None = None) -> None:
        self.device = Device(capture)
        self.arena = bytearray(4096)
        self.interpreter = Interpreter(self.device, memoryview(self.arena), find_fast)
        self.interpreter.begin(1, 2)
        self.number = 0

    def __call__(self, commands: list[Any], metas: list[Any] | None = None, keys: list[Any] | None = None) -> list[Any]:
        self.number += 1
        frame = msgpack.packb([1, 2, self.number, [metas or [], keys or []], commands])
        return [msgpack.unpackb(reply) for reply in self.interpreter.execute(frame)]

    def put(self, number: int, values: list[float]) -> None:
        content = torch.tensor(values).numpy().tobytes()
        self([wire.UPLOAD_INLINE, number, len(content), 0, content])

    def get(self, number: int, meta: int = 0) -> Any:
        replies = self([wire.DOWNLOAD, 99, number, meta, -1])
        return replies[0]


def unary(op: str, result: Any = 0) -> list[Any]:
    return [op, [[wire.TENSOR, 0]], [], [[[wire.FRESH, result, 0]], [], False], "float32"]


def values(reply: Any) -> list[float]:
    assert reply[0] == wire.VALUE, reply
    return torch.frombuffer(bytearray(reply[2]), dtype=torch.float32).tolist()
