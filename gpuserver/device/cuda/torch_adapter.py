"""Torch's view of the GPU: the only module that knows whether torch has CUDA.

On a GPU torch computes on our compute stream and allocates activations itself, within a budget: :class:`TorchOnCuda`.
With the fake driver of the tests device memory is host memory, so torch's CPU kernels can compute in it:
:class:`TorchOnHost`. A CPU kernel runs on the calling thread and not on the compute stream, so that thread *is* the end
of the stream there: it waits for the stream wherever torch's work must come after it. Nothing else differs.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from dormouse.gpuserver.device import allocator
from dormouse.gpuserver.device.cuda import driver
from dormouse.gpuserver.device.cuda.capture import CudaCapture
from dormouse.gpuserver.device.cuda.probe import device_memory_is_host_memory
from dormouse.gpuserver.device.cuda.streams import CudaContext
from dormouse.gpuserver.device.protocol import Capture, DeviceError, computed_again


class TorchAdapter(Protocol):
    """All sizes in bytes."""

    device: torch.device
    approximate: bool
    captures: bool

    def attach(self, threads: int) -> None:
        """The calling thread computes from now on, on the compute stream and within the budget."""

    def follow(self) -> None:
        """Order torch's next work after the work that the compute stream has been given."""

    def holds(self, pointer: int, nbytes: int) -> bool:
        """Whether these bytes are an activation."""

    def in_host_memory(self, pointer: int, nbytes: int) -> bool:
        """Whether these bytes, outside the pool, are none that the driver can copy from."""

    def new_capture(self) -> Capture:
        """As of a :class:`~dormouse.gpuserver.device.protocol.Device`."""

    def relieve(self) -> bool:
        """Release memory that is kept only for speed; whether there was any."""

    def held(self) -> int:
        """Bytes that torch has from the driver for activations, used and kept."""

    def stats(self) -> tuple[int, int]:
        """``(used, peak since the last reset)``"""

    def reset_peak(self) -> None: ...

    def set_owner(self, number: int) -> None:
        """As of a :class:`~dormouse.gpuserver.device.protocol.Device`."""

    def detach(self) -> None:
        """The stream is about to go, and with it the memory that torch keeps for it."""


def torch_adapter(context: CudaContext, ordinal: int, stream: int, activation_nbytes: int) -> TorchAdapter:
    """Raises DeviceError for a real driver and a torch that cannot use it."""
    if device_memory_is_host_memory():  # before torch is asked, which would try to use it
        return TorchOnHost(stream, activation_nbytes)
    if torch.cuda.is_available():
        return TorchOnCuda(context, ordinal, stream, activation_nbytes)
    raise DeviceError(
        f"there is a CUDA driver, but this torch ({torch.__version__}) cannot use it; install a build of torch with "
        "CUDA, or set [gpu] device = 'host'"
    )


def warm_up(device: torch.device) -> None:
    """Have each library loaded that most models need (matrix products, convolutions, attention, norms, reductions), so
    that the first request does not wait for it: CUDA loads kernels at their first use. A type that this GPU cannot
    compute with is passed over.
    """
    with torch.inference_mode():
        _compute(torch.ones(16, 64, device=device))
        for dtype in (torch.float16, torch.bfloat16):
            try:
                _compute(torch.ones(16, 64, dtype=dtype, device=device))
            except torch.AcceleratorError:
                raise
            except RuntimeError:
                continue


def _compute(rows: torch.Tensor) -> None:
    functional, heads = torch.nn.functional, rows.view(1, 1, 16, 64)
    functional.linear(rows, rows.new_ones(64, 64), rows.new_ones(64))
    functional.conv2d(rows.view(1, 4, 16, 16), rows.new_ones(4, 4, 3, 3), padding=1)
    functional.scaled_dot_product_attention(heads, heads, heads)
    functional.layer_norm(rows, (64,), rows.new_ones(64), rows.new_ones(64))
    functional.embedding(torch.zeros(1, dtype=torch.int64, device=rows.device), rows)
    functional.gelu(rows).softmax(-1).sum().item()


def idle_spans(snapshot: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    """``(address, nbytes)`` of memory that torch's allocator keeps and nobody holds, of a
    ``torch.cuda.memory_snapshot``; neighbours of one segment together. Segments are allocations of their own: the
    driver fills no two at once, though they often are neighbours.
    """
    for segment in snapshot:
        start = end = 0
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                continue
            if block["address"] != end:
                if end > start:
                    yield start, end - start
                start = block["address"]
            end = block["address"] + block["size"]
        if end > start:
            yield start, end - start


class TorchOnCuda:
    """Torch with CUDA. The budget is torch's own limit on what its allocator takes, which does not count our pool.

    Not a ``torch.cuda.MemPool`` over an allocator of ours: a pool's cached blocks are not given back and tried again
    when it is full (pytorch #159674), so a node that serves models of different shapes would run out for ever.
    """

    approximate = False
    captures = True

    def __init__(self, context: CudaContext, ordinal: int, stream: int, activation_nbytes: int) -> None:
        self.device = torch.device("cuda", ordinal)
        self._context = context
        self._stream = stream
        self._budget_nbytes = activation_nbytes
        self._owner = 0

    def attach(self, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.cuda.set_device(self.device)
        external: Any = torch.cuda.ExternalStream
        torch.cuda.set_stream(external(self._stream, device=self.device))
        total = driver.memory_info()[1]
        torch.cuda.set_per_process_memory_fraction(self._budget_nbytes / total, self.device)
        warm_up(self.device)

    def follow(self) -> None:
        pass

    def holds(self, pointer: int, nbytes: int) -> bool:
        self._context.use()
        end = pointer + nbytes
        while pointer < end:  # the driver may know a segment of torch's allocator in several pieces
            found = driver.allocation_of(pointer)
            if found is None:
                return False
            pointer = found[0] + found[1]
        return True

    def new_capture(self) -> Capture:
        return CudaCapture()

    def relieve(self) -> bool:
        """Give up cuBLAS's workspaces, 32 MiB for each stream on some GPUs, and other memory that torch keeps."""
        clear: Any = torch._C
        clear._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return True

    def in_host_memory(self, pointer: int, nbytes: int) -> bool:
        return False

    def held(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def stats(self) -> tuple[int, int]:
        return torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def set_owner(self, number: int) -> None:
        """Clear the memory that torch keeps, on our stream: nobody can tell which of it the last owner has used.

        Memory that torch takes from the driver later needs no clearing. The driver clears memory of other processes.
        Memory that torch itself has returned to the driver was cleared here, or is this owner's own.
        """
        if number != self._owner:
            self._owner = number
            snapshot: Any = torch.cuda.memory_snapshot
            for address, nbytes in idle_spans(snapshot()):
                driver.fill(address, 0, nbytes, self._stream)

    def detach(self) -> None:
        torch.cuda.set_stream(torch.cuda.default_stream(self.device))
        self.relieve()


class TorchOnHost:
    """Torch on the CPU over the fake driver's memory; activations are counted as HostDevice counts them."""

    captures = False

    def __init__(self, stream: int, activation_nbytes: int) -> None:
        self.device = torch.device("cpu")
        self._stream = stream
        self._activations = allocator.install()
        self.approximate = self._activations.approximate
        self._activations.set_limit(activation_nbytes)

    def attach(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._activations.limit_this_thread()
        warm_up(self.device)

    def new_capture(self) -> Capture:
        return computed_again

    def relieve(self) -> bool:
        return False

    def follow(self) -> None:
        driver.synchronize_stream(self._stream)

    def holds(self, pointer: int, nbytes: int) -> bool:
        return self._activations.contains(pointer, nbytes)

    def in_host_memory(self, pointer: int, nbytes: int) -> bool:
        return self._activations.contains(pointer, nbytes)

    def held(self) -> int:
        return self._activations.used()

    def stats(self) -> tuple[int, int]:
        return self._activations.used(), self._activations.peak()

    def reset_peak(self) -> None:
        self._activations.reset_peak()

    def set_owner(self, number: int) -> None:
        self._activations.set_owner(number)

    def detach(self) -> None:
        self._activations.set_limit(sys.maxsize)
