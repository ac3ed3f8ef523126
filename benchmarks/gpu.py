"""What a GPU costs the executor: pinning, chunks, granules, views, a wake against plain copies; and facts about the
driver (gpu_facts.py).

Drives gpuserver/device/cuda as an executor does; ``--part`` chooses one of PARTS. Without a GPU it says why and exits
with status 1. Results: docs/gpu.md.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from benchmarks.gpu_facts import facts
from benchmarks.report import Goal, arguments, report
from dormouse.core.decisions.memory.transfer import Copy, Kind, slab
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device.cuda.probe import probe

MIB = 1 << 20
GRANULE = 2 * MIB


def seconds(work: Callable[..., Any], *operands: Any) -> float:
    began = time.perf_counter()
    work(*operands)
    return time.perf_counter() - began


def rate(nbytes: int, spent_s: float) -> float:
    """GB/s."""
    return nbytes / spent_s / 1e9


def open_device(pool: str, nbytes: int, chunk_nbytes: int = 4 * MIB) -> Any:
    from dormouse.gpuserver.device.cuda.device import CudaDevice

    device = CudaDevice(
        0, memory_nbytes=nbytes + 64 * MIB, activation_nbytes=64 * MIB, pool=pool, chunk_nbytes=chunk_nbytes
    )
    device.attach_thread()
    return device


def plain_copies(nbytes: int, repetitions: int) -> dict[str, Any]:
    """Pinning, and one stream of plain copies by chunk size: what a wake is measured against."""
    from dormouse.gpuserver.device.cuda import driver
    from dormouse.gpuserver.device.cuda.streams import CudaContext

    context = CudaContext(0)
    memory = SharedMemory.create("bench", nbytes, pinnable=True)
    driver.register(memory.address, nbytes)
    target, stream = driver.allocate(nbytes), driver.create_stream()
    result: dict[str, Any] = {"gb_s": {}, "issue_us": {}}
    for kib in (256, 1024, 2048, 4096, 8192, 32768):
        chunk = min(kib << 10, nbytes)
        spent, issued = [], []
        for _ in range(repetitions):
            first = context.recorded(stream)
            began = time.perf_counter()
            for at in range(0, nbytes, chunk):
                driver.copy_to_device(target + at, memory.address + at, min(chunk, nbytes - at), stream)
            issued.append((time.perf_counter() - began) / -(-nbytes // chunk))
            last = context.recorded(stream)
            last.synchronize()
            spent.append(last.seconds_after(first))
        result["gb_s"][f"{kib} KiB"] = rate(nbytes, max(statistics.median(spent), 1e-9))
        result["issue_us"][f"{kib} KiB"] = statistics.median(issued) * 1e6
    driver.unregister(memory.address)
    driver.free(target)
    driver.destroy_stream(stream)
    context.close()
    return result


def pinning(nbytes: int) -> dict[str, Any]:
    """Seconds per GiB: taking the pages and registering them, by threads and by the bytes of a registration; and giving
    them back.
    """
    from dormouse.gpuserver.device.cuda import driver
    from dormouse.gpuserver.device.cuda.streams import CudaContext

    context = CudaContext(0)
    result: dict[str, Any] = {}

    def pin(memory: SharedMemory, start: int, size: int) -> None:
        context.use()
        memory.populate(start, size)
        driver.register(memory.address + start, size)

    for threads in (1, 2, 4, 8):
        for piece in (32 * MIB, 64 * MIB, 256 * MIB):
            memory = SharedMemory.create("bench", nbytes, pinnable=True)
            starts = range(0, nbytes, min(piece, nbytes))
            sizes = [min(piece, nbytes - start) for start in starts]
            with ThreadPoolExecutor(threads) as pool:
                began = time.perf_counter()
                list(pool.map(pin, [memory] * len(sizes), starts, sizes))
                spent = time.perf_counter() - began
            began = time.perf_counter()
            for start in starts:
                driver.unregister(memory.address + start)
            gone = time.perf_counter() - began
            memory.close()
            name = f"{threads} threads, {piece // MIB} MiB"
            result[name] = {"s_per_gib": spent / nbytes * (1 << 30), "back_s_per_gib": gone / nbytes * (1 << 30)}
    context.close()
    return result


def wake(pool: str, nbytes: int, repetitions: int) -> dict[str, Any]:
    """Place, map, copy in chunks with events, compute waits for each; evict between. Median of the copies' GB/s."""
    device = open_device(pool, nbytes + 64 * MIB)
    memory = SharedMemory.create("bench", nbytes, pinnable=True)
    ready_s = seconds(lambda: (device.map_host(0, memory), device.settle()))
    segment_nbytes = 32 * MIB
    needs = [(number, min(segment_nbytes, nbytes - at)) for number, at in enumerate(range(0, nbytes, segment_nbytes))]
    walls, maps = [], []
    for _ in range(repetitions):
        books = device.make_pool()
        began = time.perf_counter()
        plan = books.place(needs, cost=float)
        maps.append(seconds(device.remap, [], plan.mapped) if plan.mapped else 0.0)
        copies = [Copy(slab(0), n * segment_nbytes, plan.placed[n], size) for n, size in needs]
        job = device.copy_in(copies, lambda: None)
        for event in job.events:
            device.wait(event)
        device.synchronize()
        walls.append(time.perf_counter() - began)
        job.join()
        if plan.mapped:
            device.remap(plan.mapped, [])
    result = {
        "gb_s": rate(nbytes, statistics.median(walls)),
        "copies_gb_s": device.bandwidth(Kind.SLAB) / 1e9,
        "remap_ms": statistics.median(maps) * 1e3,
        "pinned_s": ready_s,
    }
    device.close()
    return result


def granules(count: int) -> dict[str, Any]:
    """Microseconds of each call by granule size, and whether one call unmaps many granules."""
    from dormouse.gpuserver.device.cuda import virtual
    from dormouse.gpuserver.device.cuda.streams import CudaContext
    from dormouse.gpuserver.device.protocol import DeviceError

    context = CudaContext(0)
    result: dict[str, Any] = {}
    for size in (GRANULE, 8 * GRANULE, 32 * GRANULE, 128 * GRANULE):
        base = virtual.reserve_addresses(count * size)
        spots = [base + at * size for at in range(count)]
        handles: list[int] = []
        spent = {"create": 0.0, "map": 0.0, "grant": 0.0, "unmap": 0.0}
        for spot in spots:
            began = time.perf_counter()
            handles.append(virtual.create_granule(size, 0))
            spent["create"] += time.perf_counter() - began
            spent["map"] += seconds(virtual.map_granule, spot, size, handles[-1])
        for spot in spots:
            spent["grant"] += seconds(virtual.grant, spot, size, 0)
        for spot in spots:
            spent["unmap"] += seconds(virtual.unmap, spot, size)
        for spot, handle in zip(spots, handles, strict=True):
            virtual.map_granule(spot, size, handle)
        spent["grant all at once"] = seconds(virtual.grant, base, count * size, 0)
        result[f"{size // MIB} MiB"] = {name: total / count * 1e6 for name, total in spent.items()}
        try:
            virtual.unmap(base, count * size)
            result["one call unmaps many"] = "yes"
        except DeviceError as error:
            result["one call unmaps many"] = str(error)
            for spot in spots:
                virtual.unmap(spot, size)
        for handle in handles:
            virtual.release_granule(handle)
        virtual.free_addresses(base, count * size)
    context.close()
    return result


RESERVED = 1 << 40
"""As much as a pool of pages reserves."""


def mapping(nbytes: int, repetitions: int) -> dict[str, Any]:
    """Milliseconds to put granules of all of ``nbytes`` behind addresses and to take them away, by their size: in one
    thread and in several, and beside copies to the GPU, whose rate is then told, too.
    """
    from dormouse.gpuserver.device.cuda import driver, virtual
    from dormouse.gpuserver.device.cuda.streams import CudaContext

    context = CudaContext(0)
    base = virtual.reserve_addresses(RESERVED)
    memory = SharedMemory.create("bench", nbytes, pinnable=True)
    driver.register(memory.address, nbytes)
    target, stream = driver.allocate(nbytes), driver.create_stream()
    result: dict[str, Any] = {}

    def put(spots: list[tuple[int, int]], size: int, at_once: bool) -> None:
        context.use()
        for spot, handle in spots:
            virtual.map_granule(spot, size, handle)
            if not at_once:
                virtual.grant(spot, size, 0)
        if at_once:
            virtual.grant(spots[0][0], len(spots) * size, 0)

    def take(spots: list[tuple[int, int]], size: int) -> None:
        context.use()
        for spot, _ in spots:
            virtual.unmap(spot, size)

    def copy() -> float:
        """GB/s of all of it."""
        context.use()
        first = context.recorded(stream)
        for at in range(0, nbytes, 4 * MIB):
            driver.copy_to_device(target + at, memory.address + at, min(4 * MIB, nbytes - at), stream)
        last = context.recorded(stream)
        last.synchronize()
        return rate(nbytes, max(last.seconds_after(first), 1e-9))

    for size in (GRANULE, 8 * GRANULE, 32 * GRANULE, 128 * GRANULE):
        spots = [(base + at, virtual.create_granule(size, 0)) for at in range(0, nbytes // size * size, size)]
        told: dict[str, float] = {"granules": len(spots)}
        result[f"{size // MIB} MiB"] = told
        if not spots:
            continue
        for name, at_once in (("each granted", False), ("granted at once", True)):
            told[f"put, {name}"] = seconds(put, spots, size, at_once) * 1e3
            told[f"taken, {name}"] = seconds(take, spots, size) * 1e3
        for threads in (2, 4):
            parts = [spots[start::threads] for start in range(threads)]
            with ThreadPoolExecutor(threads) as pool:
                began = time.perf_counter()
                list(pool.map(put, parts, [size] * threads, [False] * threads))
                told[f"put, {threads} threads"] = (time.perf_counter() - began) * 1e3
            take(spots, size)
        with ThreadPoolExecutor(1) as pool:
            told["copies alone gb_s"] = statistics.median(copy() for _ in range(repetitions))
            copying = pool.submit(lambda: [copy() for _ in range(repetitions)])
            for name in ("put", "taken"):
                work = (put, spots, size, True) if name == "put" else (take, spots, size)
                told[f"{name}, beside copies"] = seconds(*work) * 1e3
            told["copies beside gb_s"] = copying.result()[0]
        for _, handle in spots:
            virtual.release_granule(handle)
    driver.unregister(memory.address)
    driver.free(target)
    driver.destroy_stream(stream)
    virtual.free_addresses(base, RESERVED)
    context.close()
    return result


def views(repetitions: int) -> dict[str, Any]:
    """Microseconds to make a storage of a span of the pool."""
    device = open_device("regions", 64 * MIB)
    spent = seconds(lambda: [device.storage(at * 512, 512) for at in range(repetitions)])
    device.close()
    return {"storage_us": spent / repetitions * 1e6}


PARTS: Final[dict[str, Callable[[int, int], Any]]] = {
    "driver": lambda nbytes, repetitions: {
        "granules": granules(8 if nbytes < 1 << 30 else 16),
        "views": views(10 * repetitions),
        "facts": facts(),
    },
    "mapping": mapping,
    "pinning": lambda nbytes, repetitions: pinning(nbytes),
    "plain": plain_copies,
    "wake": lambda nbytes, repetitions: {pool: wake(pool, nbytes, repetitions) for pool in ("regions", "pages")},
}
"""By name: of the bytes of a copy, and repetitions."""


def goals(results: dict[str, Any]) -> list[Goal]:
    """Only where a wake and plain copies were both measured."""
    if not {"plain", "wake"} <= results.keys():
        return []
    best = max(results["plain"]["gb_s"].values())
    return [
        Goal(
            name=f"wake ({pool}) / plain pinned copies",
            goal=">= 0.95",
            measured=measured["gb_s"] / best,
            met=measured["gb_s"] >= 0.95 * best,
        )
        for pool, measured in results["wake"].items()
    ]


def main(args: argparse.Namespace) -> None:
    found = probe()
    if not found.gpus:
        print(f"no GPU here: {found.reason}", file=sys.stderr)
        sys.exit(1)
    import torch

    nbytes = args.mib * MIB or (256 * MIB if args.quick else 4 << 30)
    repetitions = 3 if args.quick or args.mib else 7
    results = {part: PARTS[part](nbytes, repetitions) for part in args.part or PARTS}
    where = {"gpu": found.gpus[0], "cuda": found.driver, "bindings": found.bindings, "torch": torch.__version__}
    report(goals(results), args, {"device": where, "results": results})


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; can be repeated")
    parser.add_argument("--mib", type=int, default=0, help="of each copy; for rehearsals")
    main(parser.parse_args())
