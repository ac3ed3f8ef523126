"""How fast a sleeping model comes to a GPU, against plain copies of the same chunks between the same buffers.

One process: the executor's engine with its device, a manifest as the store lays it out, and for each turn
(alternating) a wake through the engine (books, poison off, chunks, events, until Awake) and a bare loop of
``memmove`` over the same chunks on a thread like the copy stream's. Ratios of medians are quoted; the machine's
absolute bandwidth is in the JSON.
"""

import argparse
import ctypes
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.report import Goal, arguments, report
from dormouse.core.freelist import aligned
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.engine import Effect, Engine
from dormouse.gpuserver.host_device import HostDevice
from dormouse.gpuserver.transfer import Copy, chunked
from dormouse.schemas import messages as m

MIB = 1 << 20
BERT = [2 * 1024 * 1024 * 4, *[1024 * 1024 * 4] * 4, 1024 * 4, 1024 * 4096 * 4, 4096 * 4, 4096 * 1024 * 4, 1024 * 4]
"""Storages of one of BERT-large's layers, roughly: few large ones and many of a few KiB."""


def shapes(total_nbytes: int) -> list[int]:
    """Sizes of a model's storages, of at least ``total_nbytes`` together."""
    sizes: list[int] = []
    while sum(sizes) < total_nbytes:
        sizes += [*BERT, *[3072, 4096, 4096, 3072]]
    return sizes


class Bench:
    """One engine with one sleeping model."""

    def __init__(self, sizes: Sequence[int], chunk_nbytes: int, contiguous: bool) -> None:
        segments, offset = [], 0
        for number, nbytes in enumerate(sizes):
            segments.append(m.Segment(storage=number, segment=number + 1, slab=0, offset=offset, nbytes=nbytes))
            offset += aligned(nbytes) + (0 if contiguous else 512)
        self.nbytes = sum(sizes)
        self.device = HostDevice(aligned(offset) + 64 * MIB, chunk_nbytes=chunk_nbytes)
        self.device.populated.wait()
        slab = SharedMemory.create("slab", -(-offset // MIB) * MIB)
        slab.populate()
        self.effects: queue.SimpleQueue[Effect] = queue.SimpleQueue()
        self.engine = Engine(self.device, self.effects.put)
        self.engine.slab(0, slab)
        arena = m.Arena(request_nbytes=0, response_nbytes=0, stream_nbytes=4096)
        attach = m.AttachInstance(instance="i", tenant="t", directory="", uid=0, arena=arena, quota_nbytes=0)
        self.engine.attach(attach, SharedMemory.create("arena", arena.nbytes))
        self.engine.manifest(m.Manifest(instance="i", version=1, segments=segments))
        self.copies = [Copy(0, segment.offset, 0, segment.nbytes) for segment in segments]
        self.serial = 0

    def until(self, kind: type[Any]) -> Any:
        while not isinstance(effect := self.effects.get(), kind):
            pass
        return effect

    def wake(self) -> float:
        """Seconds from Wake to Awake; the model is asleep again afterwards."""
        self.serial += 1
        lease = m.Lease(gpu=0, epoch=1, serial=self.serial, secret=0)
        began = time.perf_counter()
        self.engine.wake(m.Wake(lease=lease, instance="i", version=1, evict=[]))
        awake = self.until(m.Awake)
        took = time.perf_counter() - began
        assert awake.copied_nbytes == self.nbytes
        spans = self.engine.residency.spans("i")
        self.copies = [Copy(0, copy.host, spans[n + 1].offset, copy.nbytes) for n, copy in enumerate(self.copies)]
        self.engine.revoke(self.serial)
        self.until(m.Done)
        self.engine.residency.evict("i")
        self.engine._tenants["i"].unbind_all()
        return took

    def plain(self) -> float:
        """Seconds for the same chunks between the same addresses, with nothing around them."""
        pool = self.device.storage(0, 1).data_ptr()
        chunks = [
            (pool + chunk.device, self.device.host_address(0, chunk.host, chunk.nbytes), chunk.nbytes)
            for chunk in chunked(self.copies, self.device.chunk_nbytes)
        ]
        return on_a_thread(lambda: copy_all(chunks))


def copy_all(chunks: list[tuple[int, int, int]]) -> float:
    memmove = ctypes.memmove
    began = time.perf_counter()
    for target, source, nbytes in chunks:
        memmove(target, source, nbytes)
    return time.perf_counter() - began


def on_a_thread(work: Callable[[], float]) -> float:
    """Run like the copy stream: beside a thread that waits."""
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def measure(bench: Bench, turns: int) -> dict[str, float]:
    """Medians over alternating turns, the first of each thrown away."""
    wakes, plains = [], []
    for turn in range(turns + 1):
        wake, plain = bench.wake(), bench.plain()
        if turn:
            wakes.append(wake)
            plains.append(plain)
    wake, plain = statistics.median(wakes), statistics.median(plains)
    return {
        "nbytes": bench.nbytes,
        "wake_ms": wake * 1e3,
        "wake_gb_s": bench.nbytes / wake / 1e9,
        "plain_gb_s": bench.nbytes / plain / 1e9,
        "ratio": plain / wake,
    }


def main(args: argparse.Namespace) -> None:
    turns = 5 if args.quick else 21
    sizes = shapes((256 if args.quick else 512) * MIB)
    results: dict[str, dict[str, float]] = {}
    for name, chunk, contiguous in [
        ("contiguous, 4 MiB chunks", 4 * MIB, True),
        ("contiguous, 2 MiB chunks", 2 * MIB, True),
        ("contiguous, 8 MiB chunks", 8 * MIB, True),
        ("segments apart, 4 MiB chunks", 4 * MIB, False),
    ]:
        bench = Bench(sizes, chunk, contiguous)
        results[name] = measure(bench, turns)
        bench.device.close()
        line = "  ".join(f"{key} {value:.4g}" for key, value in results[name].items())
        print(f"{name:30} {line}", flush=True)
    main_result = results["contiguous, 4 MiB chunks"]
    report(
        [
            Goal(
                name=f"a model of {main_result['nbytes'] / MIB:.0f} MiB wakes at / plain copies",
                goal=">= 0.80",
                measured=main_result["ratio"],
                met=main_result["ratio"] >= 0.8,
            )
        ],
        args,
        {"results": results, "turns": turns},
    )


if __name__ == "__main__":
    main(arguments(__doc__.splitlines()[0] if __doc__ else "").parse_args())
