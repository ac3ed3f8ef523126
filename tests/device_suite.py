"""What every device must do, written once: tests/unit runs it on CudaDevice over the fake driver, tests/gpu on a GPU.

Each function gets an open device of at least 64 MiB and asserts on bytes only. Pools of pages get their span mapped
first, so that an offset means the same for all.
"""

import threading
from collections.abc import Callable
from typing import Final

import pytest
import torch
from pool_costs import place

from dormouse.core.decisions.memory.pools.protocol import PoolChange
from dormouse.core.decisions.memory.transfer import POOL, Copy, Kind, slab
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device.protocol import Device

MIB: Final = 1 << 20
SLAB_NBYTES: Final = 12 * MIB


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Bytes that differ at every distance that a wrong chunk could be off by."""
    words = torch.arange(seed, seed + -(-nbytes // 4), dtype=torch.int32)
    return bytes(words.numpy().tobytes()[:nbytes])


def with_slab(device: Device, number: int = 0) -> SharedMemory:
    memory = SharedMemory.create("slab", SLAB_NBYTES, pinnable=True)
    memory.view[:] = pattern(SLAB_NBYTES, number << 24)
    device.map_host(number, memory)
    device.settle()
    return memory


def carry_out(device: Device, plan: PoolChange) -> None:
    if device.strategy == "pages":
        device.remap(plan.unmapped, plan.mapped)
    for span in plan.freed:
        device.poison(span.offset, span.nbytes)


def room(device: Device, nbytes: int) -> int:
    """Offset of so many bytes of the pool that may be used."""
    pool = device.make_pool()
    plan = place(pool, [(1, nbytes)], cost=lambda segment: 0.0)
    carry_out(device, plan)
    return plan.placed[1]


def tensor(device: Device, offset: int, nbytes: int) -> torch.Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=device.torch_device)
    return view.set_(device.storage(offset, nbytes), 0, (nbytes,))  # type: ignore[call-overload, no-any-return]


def content(device: Device, offset: int, nbytes: int) -> bytes:
    """What the compute stream sees."""
    device.synchronize()
    return bytes(tensor(device, offset, nbytes).cpu().numpy())


def copies_arrive_and_say_so(device: Device) -> None:
    at = room(device, 16 * MIB)
    memory = with_slab(device)
    done = threading.Event()
    copies = [
        Copy(slab(0), 0, at, 5 * MIB),
        Copy(slab(0), 5 * MIB, at + 5 * MIB, 100),
        Copy(slab(0), 512, at + 8 * MIB, 3 * MIB),
        Copy(slab(0), 9 * MIB, at + 12 * MIB, 0),
    ]
    job = device.copy_in(copies, done.set)
    assert len(job.events) == len(copies)
    device.wait(job.events[1])
    assert content(device, at, 5 * MIB + 100) == bytes(memory.view[: 5 * MIB + 100])
    device.wait(job.events[3])
    assert content(device, at + 8 * MIB, 3 * MIB) == bytes(memory.view[512 : 512 + 3 * MIB])
    job.join()
    assert done.is_set()
    assert all(event.done() for event in job.events)


def copies_come_after_what_was_computed_before(device: Device) -> None:
    at = room(device, 4 * MIB)
    memory = with_slab(device)
    tensor(device, at, 4 * MIB).fill_(1)
    job = device.copy_in([Copy(slab(0), 0, at, 4 * MIB)], lambda: None)
    device.wait(job.events[0])
    tensor(device, at, MIB).add_(1)
    job = device.copy_in([Copy(slab(0), MIB, at + 2 * MIB, MIB)], lambda: None)
    device.wait(job.events[0])
    read = content(device, at, 4 * MIB)
    assert read[:MIB] == bytes((torch.frombuffer(bytearray(memory.view[:MIB]), dtype=torch.uint8) + 1).numpy())
    assert read[MIB : 2 * MIB] == bytes(memory.view[MIB : 2 * MIB])
    assert read[2 * MIB : 3 * MIB] == bytes(memory.view[MIB : 2 * MIB])


def storages_are_written_back(device: Device) -> None:
    at = room(device, 8 * MIB)
    memory = with_slab(device)
    tensor(device, at, 6 * MIB).fill_(7)
    memory.view[:] = bytes(SLAB_NBYTES)
    device.copy_out([(device.storage(at, 5 * MIB), 0, 512), (device.storage(at + MIB, 100), 0, 6 * MIB)])
    assert bytes(memory.view[: 512 + 5 * MIB + 1]) == bytes(512) + b"\7" * (5 * MIB) + b"\0"
    assert bytes(memory.view[6 * MIB : 6 * MIB + 101]) == b"\7" * 100 + b"\0"
    computed = torch.full((1000,), 3, dtype=torch.uint8, device=device.torch_device)
    device.copy_out([(computed.untyped_storage(), 0, 0)])
    assert bytes(memory.view[:1000]) == b"\3" * 1000


def scrubbed_memory_is_read_and_written_as_it_is_now(device: Device) -> None:
    """What a driver pins are pages: memory that changed its pages would be one thing to the host, another to the GPU.

    Both halves of a slab are copied, scrubbed and copied; one is written anew by the host, one by the device.
    """
    half = 6 * MIB
    at = room(device, SLAB_NBYTES)
    memory = with_slab(device)
    whole = [Copy(slab(0), 0, at, SLAB_NBYTES)]
    device.wait(device.copy_in(whole, lambda: None).events[0])
    assert content(device, at, SLAB_NBYTES) == pattern(SLAB_NBYTES)
    memory.scrub(0, SLAB_NBYTES)
    device.wait(device.copy_in(whole, lambda: None).events[0])
    assert content(device, at, SLAB_NBYTES) == bytes(SLAB_NBYTES)
    memory.view[:half] = pattern(half, 7)
    tensor(device, at + half, half).fill_(9)
    device.copy_out([(device.storage(at + half, half), 0, half)])
    assert bytes(memory.view) == pattern(half, 7) + b"\x09" * half
    device.wait(device.copy_in(whole, lambda: None).events[0])
    assert content(device, at, SLAB_NBYTES) == pattern(half, 7) + b"\x09" * half


def spans_move_inside_the_pool(device: Device) -> None:
    """Both ways, with overlaps from one alignment unit to more than the scratch buffer."""
    if device.strategy != "regions":
        return
    memory = with_slab(device)
    nbytes = 10 * MIB + 512
    for distance in (512, 4096, 3 * MIB, 11 * MIB):
        for source, target in ((0, distance), (distance, 0)):
            device.copy_in([Copy(slab(0), 0, source, nbytes)], lambda: None)
            job = device.copy_in([Copy(POOL, source, target, nbytes)], lambda: None)
            device.wait(job.events[0])
            assert content(device, target, nbytes) == bytes(memory.view[:nbytes]), (source, target)


def wild_copies_are_refused(device: Device) -> None:
    at = room(device, 2 * MIB)
    with_slab(device)
    for wrong in (
        Copy(slab(0), SLAB_NBYTES - 1, at, 2),
        Copy(slab(0), -1, at, 1),
        Copy(slab(0), 0, -1, 1),
        Copy(slab(0), 0, 1 << 50, 1),
        Copy(POOL, 1 << 50, at, 1),
    ):
        with pytest.raises(ValueError, match="outside"):
            device.copy_in([wrong], lambda: None)
    job = device.copy_in([Copy(slab(0), 0, at, MIB)], lambda: None)
    job.join()


def a_cancelled_job_claims_nothing_more(device: Device) -> None:
    at = room(device, 16 * MIB)
    memory = with_slab(device)
    done: list[int] = []
    jobs = [device.copy_in([Copy(slab(0), 0, at, 8 * MIB)], lambda: done.append(1)) for _ in range(8)]
    for job in jobs[1:]:
        job.cancel()
    for job in jobs:
        job.join()
    assert done[:1] == [1]
    device.wait(jobs[0].events[0])
    assert content(device, at, 8 * MIB) == bytes(memory.view[: 8 * MIB])


def evicted_memory_comes_back_with_other_bytes(device: Device) -> None:
    """A wake, an eviction, another wake, through the pool's own books."""
    pool = device.make_pool()
    memory = with_slab(device)
    quarter = device.pool_nbytes // 4
    segment_nbytes = min(quarter, SLAB_NBYTES)
    for wake in range(6):
        needs = [(2 * wake, segment_nbytes), (2 * wake + 1, 3 * MIB + 512)]
        plan = place(pool, needs, cost=float)
        carry_out(device, plan)
        moves = [Copy(POOL, move.source, move.target, move.nbytes) for move in plan.moves]
        copies = [Copy(slab(0), wake * 512, plan.placed[segment], nbytes - wake * 512) for segment, nbytes in needs]
        device.copy_in(moves, lambda: None)
        job = device.copy_in(copies, lambda: None)
        for event in job.events:
            device.wait(event)
        for segment, nbytes in needs:
            expected = bytes(memory.view[wake * 512 : nbytes])
            assert content(device, pool.offset(segment), nbytes - wake * 512) == expected, (wake, segment)


def rates_are_measured(device: Device) -> None:
    at = room(device, 16 * MIB)
    with_slab(device)
    assert device.bandwidth(Kind.PEER) == 0
    assumed = device.bandwidth(Kind.SLAB)
    device.copy_in([Copy(slab(0), 0, at, 12 * MIB)], lambda: None).join()
    measured = device.bandwidth(Kind.SLAB)
    assert measured > 0
    assert measured != assumed


def activations_are_counted_and_bounded(device: Device) -> None:
    _, _, free = device.activation_stats()
    device.reset_peak()
    held = torch.empty(4 * MIB, dtype=torch.uint8, device=device.torch_device)
    used, peak, left = device.activation_stats()
    assert used >= 4 * MIB
    assert peak >= 4 * MIB
    assert left <= free - 4 * MIB
    assert device.contains(held.data_ptr(), 4 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free + MIB, dtype=torch.uint8, device=device.torch_device)
    del held
    assert device.activation_stats()[0] < used


SUITE: Final[list[Callable[[Device], None]]] = [
    copies_arrive_and_say_so,
    copies_come_after_what_was_computed_before,
    storages_are_written_back,
    scrubbed_memory_is_read_and_written_as_it_is_now,
    spans_move_inside_the_pool,
    wild_copies_are_refused,
    a_cancelled_job_claims_nothing_more,
    evicted_memory_comes_back_with_other_bytes,
    rates_are_measured,
    activations_are_counted_and_bounded,
]
