"""CUDA graphs: what a thread gives a GPU, captured once and given again in one call."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class CudaCapture:
    """Graphs with one memory between them: no two run at once, and no result is used after the next replay of any."""

    def __init__(self) -> None:
        stream: Any = torch.cuda.Stream
        self._stream, self._pool = stream(), torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], T]) -> Callable[[], T]:
        """What computes the same anew, at the same places; it is not computed yet. Raises RuntimeError if it cannot be
        captured.
        """
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                made = call()
                graph.capture_end()
            except Exception:
                for end in (graph.capture_end, partial(_end_allocations, self._pool)):
                    with suppress(RuntimeError, AttributeError):
                        end()
                raise

        def replay() -> T:
            graph.replay()
            return made

        return replay


def _end_allocations(pool: Any) -> None:
    """Where a capture that failed did not come to it: until then nothing is given back to the driver."""
    private: Any = torch._C
    private._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
