"""Wakes of 0.25 to 64 GiB, copies beside computation, and two processes that share one GPU.

    python -m benchmarks.gpu_wakes [--part sizes|overlap|shared] [--gib N,...]

Drives gpuserver/device/cuda as an executor does. What does not fit this machine is named and left out. Results:
docs/gpu.md.
"""

import argparse
import array
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from benchmarks.gpu import MIB, open_device, rate, seconds, wake
from benchmarks.report import Goal, arguments, report
from dormouse.core.decisions.memory.pools.protocol import Mapping
from dormouse.core.decisions.memory.transfer import Copy, peer, slab
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device.cuda.probe import opened, probe
from dormouse.gpuserver.device.protocol import Device, DeviceError

GIB: Final = 1 << 30
LARGE: Final = 64 * MIB  # the larger granules of a pool of pages
FDS_A_MESSAGE: Final = 250


def sizes(nbytes: Sequence[int], repetitions: int) -> dict[str, Any]:
    """Each in both pools. A wake's memory has to fit the host twice, as the node's own would, and the GPU."""
    room = min(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, opened(0).free_nbytes * 3 // 4)
    result: dict[str, Any] = {}
    for size in nbytes:
        name = f"{size / GIB:g} GiB"
        if size > room:
            result[name] = f"left out: there is room for {room / GIB:.1f} GiB"
            continue
        result[name] = {pool: wake(pool, size, repetitions) for pool in ("regions", "pages")}
    return result


def overlap(nbytes: int, side: int, spend_s: float) -> dict[str, Any]:
    """Copies to the GPU alone, a loop of matrix products alone, and both at once: what one costs the other."""
    device = open_device("regions", nbytes + 4 * 4 * side * side)
    memory = SharedMemory.create("bench", nbytes, pinnable=True)
    device.map_host(0, memory)
    device.settle()
    left = torch.randn(side, side, device=device.torch_device)
    right = torch.randn(side, side, device=device.torch_device)
    out = torch.empty(side, side, device=device.torch_device)

    def copy() -> Any:
        return device.copy_in([Copy(slab(0), 0, 0, nbytes)], lambda: None, after=passed)

    def multiply() -> None:
        torch.mm(left, right, out=out)
        device.synchronize()

    passed = device.record()
    device.synchronize()
    copy().join()
    multiply()
    alone_gb_s = rate(nbytes, statistics.median(times(lambda: copy().join(), spend_s)))
    alone_ms = statistics.median(times(multiply, spend_s)) * 1e3
    spent, products = [], []
    end_s = time.perf_counter() + spend_s
    while time.perf_counter() < end_s:
        began = time.perf_counter()
        job = copy()
        while not job.finished.is_set():
            products.append(seconds(multiply))
        spent.append(time.perf_counter() - began)
    beside_gb_s, beside_ms = rate(nbytes, statistics.median(spent)), statistics.median(products) * 1e3
    device.close()
    return {
        "copies alone gb_s": alone_gb_s,
        "beside products gb_s": beside_gb_s,
        "copies keep": beside_gb_s / alone_gb_s,
        f"product of {side} alone ms": alone_ms,
        "beside copies ms": beside_ms,
        "products take": beside_ms / alone_ms,
    }


def times(work: Callable[[], Any], spend_s: float) -> list[float]:
    spent: list[float] = []
    while sum(spent) < spend_s or len(spent) < 3:
        spent.append(seconds(work))
    return spent


def shared(pool: str, nbytes: int, repetitions: int) -> dict[str, Any]:
    """Another process's pool on the same GPU: how it travels, and the rate at which it is read."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        command = [sys.executable, "-m", "benchmarks.gpu_wakes", f"--export={theirs.fileno()},{pool},{nbytes}"]
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE)
        theirs.close()
        try:
            head, descriptors, _, _ = socket.recv_fds(ours, 1 << 12, FDS_A_MESSAGE)
            count, pool_nbytes, handle = int.from_bytes(head[:8], "big"), int.from_bytes(head[8:16], "big"), head[16:]
            while len(descriptors) < count:
                descriptors += socket.recv_fds(ours, 8, FDS_A_MESSAGE)[1]
            device: Device = open_device("regions", nbytes)
            try:
                result = _read(device, pool_nbytes, handle, descriptors, nbytes, repetitions)
            except DeviceError as error:
                result = {"refused": str(error)}
            device.close()
            for descriptor in descriptors:
                os.close(descriptor)
        finally:
            child.communicate(b"")  # it ends at the end of its input
    return result | {"descriptors": count}


def first_bytes(device: Device, nbytes: int) -> torch.Tensor:
    """The pool's first, which are mapped."""
    view = torch.empty(0, dtype=torch.uint8, device=device.torch_device)
    return view.set_(device.storage(0, nbytes), 0, (nbytes,))  # type: ignore[call-overload, no-any-return]


def _read(
    device: Device, pool_nbytes: int, handle: bytes, descriptors: list[int], nbytes: int, repetitions: int
) -> dict[str, Any]:
    map_s = seconds(device.map_peer, 1, pool_nbytes, handle, descriptors)
    after = device.record()
    device.synchronize()
    spent = []
    for _ in range(repetitions):
        began = time.perf_counter()
        job = device.copy_in([Copy(peer(1), 0, 0, nbytes)], lambda: None, after=after)
        device.wait(job.events[0])
        device.synchronize()
        spent.append(time.perf_counter() - began)
        job.join()
    view = first_bytes(device, nbytes)
    right = bool((view[:: max(1, nbytes >> 20)] == 7).all())
    return {"gb_s": rate(nbytes, statistics.median(spent)), "map_ms": map_s * 1e3, "right": right}


def export(fd: int, pool: str, nbytes: int) -> None:
    """The other process: fill a pool, send it, and stay until nobody needs it."""
    device = open_device(pool, nbytes + (2 * LARGE if pool == "pages" else 0))
    if pool == "pages":
        device.remap([], [Mapping(0, at, LARGE) for at in range(-(-nbytes // LARGE))])
    view = first_bytes(device, nbytes)
    view.fill_(7)
    device.synchronize()
    handle, descriptors = device.export()
    with socket.socket(fileno=fd) as sock:
        head = len(descriptors).to_bytes(8, "big") + device.pool_nbytes.to_bytes(8, "big") + handle
        for start in range(0, max(len(descriptors), 1), FDS_A_MESSAGE):
            some = array.array("i", descriptors[start : start + FDS_A_MESSAGE])
            sock.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, some)] if some else [])
            head = b"more"
        sys.stdin.buffer.read()
    device.close()


PARTS: Final = ("sizes", "overlap", "shared")


def main(args: argparse.Namespace) -> None:
    if args.export:
        fd, pool, nbytes = args.export.split(",")
        export(int(fd), pool, int(nbytes))
        return
    found = probe()
    if not found.gpus:
        print(f"no GPU here: {found.reason}", file=sys.stderr)
        sys.exit(1)
    gib = [float(each) for each in args.gib.split(",")]
    results: dict[str, Any] = {}
    for part in args.part or PARTS:
        match part:
            case "sizes":
                results[part] = sizes([int(each * GIB) // MIB * MIB for each in gib], 3)
            case "overlap":
                small = max(gib) < 0.1
                results[part] = overlap(64 * MIB if small else GIB, 512 if small else 8192, 0.2 if small else 3.0)
            case "shared":
                nbytes = LARGE if max(gib) < 0.1 else 4 * GIB
                results[part] = {pool: shared(pool, nbytes, 5) for pool in ("regions", "pages")}
    read = [each["right"] for each in results.get("shared", {}).values() if "right" in each]
    goals = [Goal(name="what another process reads is right", goal="yes", measured=str(all(read)), met=all(read))]
    report(goals if read else [], args, {"results": results})
    if not all(read):
        sys.exit(1)


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; can be repeated")
    parser.add_argument("--gib", default="0.25,1,4,16,64", help="sizes of wakes; below 0.1 all is small: a rehearsal")
    parser.add_argument("--export", help=argparse.SUPPRESS)
    main(parser.parse_args())
