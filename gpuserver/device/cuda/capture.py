"""CUDA graphs: a thread's work for a GPU, captured once and issued again in one call."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch

T = TypeVar("T")


class CudaCapture:
    """Graphs with one memory between them: no two run at once, and no result is used after the next replay of any.

    Memory whose last graph has died, or in which a capture has failed, is not used again: torch gives it back.
    """

    def __init__(self) -> None:
        stream: Any = torch.cuda.Stream
        self._stream = stream()
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # that live in it

    def __call__(self, call: Callable[[], T]) -> Callable[[], T]:
        """A function that computes the same anew, at the same addresses; nothing is computed yet. Raises RuntimeError
        if it cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        pool = self._pool
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                made = call()
                graph.capture_end()
            except Exception:
                self._graphs = WeakSet()
                for end in (graph.capture_end, partial(_end_allocations, pool), partial(_release, pool)):
                    with suppress(RuntimeError, AttributeError):
                        end()
                raise
        self._graphs.add(graph)

        def replay() -> T:
            graph.replay()
            return made

        return replay


def _end_allocations(pool: Any) -> None:
    """Where a capture that failed did not come to it: until then nothing is given back to the driver."""
    private: Any = torch._C
    private._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


def _release(pool: Any) -> None:
    """The part in it of a capture that failed, which its graph does not give back."""
    private: Any = torch._C
    private._cuda_releasePool(torch.cuda.current_device(), pool)
