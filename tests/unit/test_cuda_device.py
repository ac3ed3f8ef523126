"""CudaDevice over the fake driver: who waits for whom, in which order the driver is called, and what its errors become.

The fake carries out nothing that nobody waits for, and says so when memory goes that queued work needs: each test of
the first part fails if the wait that it is about is taken out.
"""

import ctypes
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_child import cuda_server, in_child
from device_suite import MIB, SLAB_NBYTES, content, pattern, room, tensor, with_slab
from fake_cuda.harness import Control
from torch.utils._python_dispatch import TorchDispatchMode

from dormouse.core.decisions.memory.pools.protocol import Mapping
from dormouse.core.decisions.memory.transfer import POOL, Copy, Kind, slab
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device.cuda import copies, driver, host, torch_adapter
from dormouse.gpuserver.device.cuda.budget import CONTEXT_NBYTES, context_nbytes
from dormouse.gpuserver.device.cuda.device import CudaDevice
from dormouse.gpuserver.device.cuda.memory import CudaGranules
from dormouse.gpuserver.device.cuda.steps import SCRATCH_NBYTES
from dormouse.gpuserver.device.protocol import DeviceError, DeviceLost

__all__ = ["cuda_server"]

G = 2 * MIB


def opened(pool: str = "regions", nbytes: int = 64 * MIB, chunk_nbytes: int = MIB) -> CudaDevice:
    device = CudaDevice(
        0, memory_nbytes=nbytes + 16 * MIB, activation_nbytes=16 * MIB, pool=pool, chunk_nbytes=chunk_nbytes
    )
    device.attach_thread()
    return device


def compute(device: CudaDevice) -> int:
    """The stream, for what stands for a kernel: only kernels on it show whether it waits."""
    return device._compute


def address(device: CudaDevice, offset: int) -> int:
    return device.storage(offset, 1).data_ptr()


def last(control: Control, *names: str) -> list[str]:
    return [name for name in control.calls() if name in names]


# --- who waits for whom


@in_child()
def test_a_job_begins_after_what_compute_was_given(control: Control) -> None:
    device = opened()
    with_slab(device)
    driver.fill(address(device, 0), 9, MIB, compute(device))
    device.copy_in([Copy(slab(0), 0, 0, MIB)], lambda: None).join()
    assert content(device, 0, MIB) == pattern(MIB)
    device.close()


@in_child()
def test_a_job_can_begin_after_an_earlier_point(control: Control) -> None:
    device = opened()
    with_slab(device)
    driver.fill(address(device, 0), 9, MIB, compute(device))
    evicted = device.record()
    driver.fill(address(device, 32 * MIB), 9, MIB, compute(device))
    device.copy_in([Copy(slab(0), 0, 0, MIB)], lambda: None, after=evicted).join()
    assert control.pending(compute(device)) == 1
    assert content(device, 0, MIB) == pattern(MIB)
    device.close()


@in_child()
def test_compute_waits_for_a_copy_on_the_stream(control: Control) -> None:
    device = opened()
    memory = with_slab(device)
    job = device.copy_in([Copy(slab(0), 0, 0, 3 * MIB)], lambda: None)
    device.wait(job.events[0])
    total = control.kernel_sum(compute(device), address(device, 0), 3 * MIB)
    device.synchronize()
    assert total.value == sum(memory.view[: 3 * MIB])
    job.join()
    device.close()


@in_child()
def test_compute_waits_for_a_copy_that_is_not_issued_yet(control: Control) -> None:
    copies.AHEAD_NBYTES = MIB  # type: ignore[misc]
    device = opened()
    with_slab(device)
    many = [Copy(slab(0), 0, 0, SLAB_NBYTES), Copy(slab(0), 0, 32 * MIB, SLAB_NBYTES)]
    job = device.copy_in(many, lambda: None)
    device.wait(job.events[1])
    assert content(device, 32 * MIB, SLAB_NBYTES) == pattern(SLAB_NBYTES)
    assert control.pending(compute(device)) == 0
    job.join()
    device.close()


@in_child()
def test_kernels_of_the_cpu_come_after_the_stream(control: Control) -> None:
    """They stand for kernels on the compute stream, so the thread must not be ahead of it."""
    device = opened("pages")
    with_slab(device)
    device.remap([], [Mapping(0, 20, G)])
    job = device.copy_in([Copy(slab(0), 0, 0, MIB)], lambda: None)
    driver.fill(address(device, MIB), 9, MIB, compute(device))
    device.wait(job.events[0])
    assert bytes(tensor(device, MIB, MIB).numpy()) == b"\x09" * MIB
    device.remap([], [Mapping(G, 21, G, True)])
    assert control.pending(compute(device)) == 0
    job.join()
    device.close()


@in_child(FAKE_CUDA_POLLS=-1)
def test_an_event_is_done_when_the_stream_has_passed_it(control: Control) -> None:
    device = opened()
    driver.fill(address(device, 0), 9, MIB, compute(device))
    event = device.record()
    assert not event.done()
    control.fail("cuEventQuery", 1, 1)
    with pytest.raises(DeviceError, match="cuEventQuery"):
        event.done()
    device.synchronize()
    assert event.done()
    device.close()


@in_child()
def test_no_stream_is_ordered_with_the_default_one(control: Control) -> None:
    device = opened()
    made = [line for line in control.log() if line.startswith("cuStreamCreate")]
    assert len(made) == 3
    assert all(line.startswith("cuStreamCreate(1)") for line in made), made  # CU_STREAM_NON_BLOCKING
    device.close()


@in_child()
def test_events_that_nobody_holds_are_used_again(control: Control) -> None:
    device = opened()
    with_slab(device)
    for _ in range(20):
        device.copy_in([Copy(slab(0), 0, 0, 4 * MIB)], lambda: None).join()
        device.synchronize()
    assert control.live("events") <= 3 * 6  # a job has four, its beginning and compute's point; of three jobs at most
    device.close()


@in_child()
def test_done_is_said_when_the_bytes_are_there(control: Control) -> None:
    device = opened()
    with_slab(device)
    seen: list[bytes] = []
    at = address(device, 0)
    job = device.copy_in([Copy(slab(0), 0, 0, 3 * MIB)], lambda: seen.append(ctypes.string_at(at, 3 * MIB)))
    job.join()
    assert seen == [pattern(3 * MIB)]
    device.close()


@in_child(FAKE_CUDA_MODE="late", FAKE_CUDA_DELAY_MS=5)
def test_a_rate_counts_each_moment_of_the_link_once(control: Control) -> None:
    device = opened()
    with_slab(device)
    began = time.perf_counter()
    device.copy_in([Copy(slab(0), 0, 0, 8 * MIB)], lambda: None).join()
    assert device.bandwidth(Kind.SLAB) >= 8 * MIB / (time.perf_counter() - began)
    device.close()


@in_child()
def test_a_write_back_comes_after_compute_and_is_complete_on_return(control: Control) -> None:
    device = opened()
    memory = with_slab(device)
    driver.fill(address(device, 0), 5, 3 * MIB, compute(device))
    device.copy_out([(device.storage(0, 3 * MIB), 0, 0)])
    assert bytes(memory.view[: 3 * MIB]) == b"\5" * (3 * MIB)
    elsewhere = torch.frombuffer(bytearray(16), dtype=torch.uint8).untyped_storage()
    with pytest.raises(ValueError, match="not on this GPU"):
        device.copy_out([(elsewhere, 0, 0)])
    device.close()


@in_child()
def test_memory_is_unmapped_after_compute_has_used_it(control: Control) -> None:
    device = opened("pages")
    mapping = Mapping(8 * MIB, 30, G)
    device.remap([], [mapping])
    tensor(device, 8 * MIB, G).fill_(1)
    total = control.kernel_sum(compute(device), address(device, 8 * MIB), G)
    device.remap([mapping], [])
    assert total.value == G
    with pytest.raises(ValueError, match="not mapped"):
        device.storage(8 * MIB, 1)
    device.close()


@in_child()
def test_memory_is_unmapped_after_copies_have_used_it(control: Control) -> None:
    device = opened("pages")
    with_slab(device)
    mappings = [Mapping(index * G, 30 - index, G) for index in range(4)]
    device.remap([], mappings)
    device.copy_in([Copy(slab(0), 0, 0, 4 * G)], lambda: None)
    device.copy_in([Copy(slab(0), 0, 3 * G, G)], lambda: None)
    device.remap(mappings[2:], [])
    assert content(device, 0, 2 * G) == pattern(2 * G)
    device.close()


@in_child()
def test_memory_is_unmapped_after_copies_have_read_it(control: Control) -> None:
    device = opened("pages")
    first, second = Mapping(0, 30, G), Mapping(G, 29, G)
    device.remap([], [first, second])
    tensor(device, 0, G).fill_(7)
    retire = device._copies._retire

    def late() -> None:  # else it may have waited for the copy before we unmap
        time.sleep(0.05)
        retire()

    device._copies._retire = late  # type: ignore[method-assign]
    device.copy_in([Copy(POOL, 0, G, G)], lambda: None)
    device.remap([first], [])
    assert content(device, G, G) == b"\7" * G
    device.close()


@in_child()
def test_a_slab_goes_after_the_last_copy_that_reads_it(control: Control) -> None:
    device = opened()
    with_slab(device)
    job = device.copy_in([Copy(slab(0), 0, 0, 4 * MIB)], lambda: None)
    device.unmap_host(0)
    with pytest.raises(DeviceError, match="host 0 is not mapped"):
        device.copy_in([Copy(slab(0), 0, 0, 1)], lambda: None)
    job.join()
    device.settle()
    assert control.live("registrations") == 0
    assert content(device, 0, 4 * MIB) == pattern(4 * MIB)
    device.close()


@in_child()
def test_closing_waits_for_everything(control: Control) -> None:
    device = opened("pages")
    with_slab(device)
    device.remap([], [Mapping(0, 30, G)])
    done = threading.Event()
    device.copy_in([Copy(slab(0), 0, 0, G)], done.set)
    total = control.kernel_sum(compute(device), address(device, 0), G)
    device.close()
    assert done.is_set()
    assert total.value != 2**64 - 1


@in_child()
def test_a_context_is_made_current_on_every_thread(control: Control) -> None:
    device = opened()
    troubles: list[BaseException] = []

    def elsewhere() -> None:
        try:
            with_slab(device)
            job = device.copy_in([Copy(slab(0), 0, 0, MIB)], lambda: None)
            job.join()
            assert job.events[0].done()
            device.unmap_host(0)
        except BaseException as error:
            troubles.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert troubles == []
    device.close()


# --- pages


@in_child()
def test_access_is_granted_once_for_each_range(control: Control) -> None:
    device = opened("pages")
    control.clear_log()
    device.remap([], [Mapping(0, 20, G), Mapping(G, 9, G), Mapping(2 * G, 10, G), Mapping(64 * MIB, 11, G, True)])
    names = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async", "cuMemUnmap", "cuMemRelease")
    assert last(control, *names) == ["cuMemMap"] * 4 + ["cuMemSetAccess"] * 2 + ["cuMemsetD8Async"]
    device.close()


@in_child()
def test_another_tenants_bytes_are_cleared(control: Control) -> None:
    device = opened("pages")
    first, kept = Mapping(0, 20, G), Mapping(G, 21, G)
    device.remap([], [first, kept])
    tensor(device, 0, 2 * G).fill_(0x5A)
    device.remap([first, kept], [Mapping(4 * G, 20, G, True), Mapping(6 * G, 21, G)])
    assert content(device, 4 * G, G) == bytes(G)
    assert content(device, 6 * G, G) == b"\x5a" * G
    tensor(device, 4 * G, G).fill_(0x33)
    device.remap([Mapping(4 * G, 20, G)], [Mapping(8 * G, 20, G)])
    assert content(device, 8 * G, G) == b"\x33" * G  # once: it is the new tenant's
    device.close()


@in_child()
def test_what_a_failed_remap_did_not_clear_is_cleared_later(control: Control) -> None:
    """The pool's books take it for cleared, so nobody asks again; remaps of other granules may come between."""
    device = opened("pages")
    first = Mapping(0, 20, G)
    device.remap([], [first])
    tensor(device, 0, G).fill_(0x5A)
    control.fail("cuMemMap", 1, 2)
    with pytest.raises(DeviceError, match="cannot map"):
        device.remap([first], [Mapping(4 * G, 20, G, True)])
    device.remap([], [Mapping(6 * G, 21, G, True)])
    device.remap([], [Mapping(4 * G, 20, G)])
    assert content(device, 4 * G, G) == bytes(G)
    device.close()


@in_child()
def test_no_memory_in_the_middle_of_a_remap(control: Control) -> None:
    """What was mapped stays; nothing of the failed call does; the pool's books can then be put right."""
    device = opened("pages")
    old = [Mapping(0, 20, G), Mapping(G, 21, G)]
    device.remap([], old)
    tensor(device, 0, 2 * G).fill_(3)
    new = [Mapping((8 + index) * G, index, G) for index in range(4)]
    for function, code in (("cuMemMap", 2), ("cuMemSetAccess", 2), ("cuMemMap", 205)):
        control.fail(function, 1 if function == "cuMemSetAccess" else 3, code)
        with pytest.raises(DeviceError, match=r"cannot map 4 granules of 8388608 bytes.*GPU are free"):
            device.remap([old[1]], new)
        assert content(device, 0, G) == b"\3" * G
        with pytest.raises(ValueError, match="not mapped"):
            device.storage(8 * G, 1)
        assert control.live("mappings") == 1
        device.remap(new, [old[1]])  # the failed ones are not there to be unmapped
        assert content(device, G, G) == b"\3" * G
    device.remap([], new)
    device.close()


@in_child()
def test_what_a_context_takes_is_measured_unless_others_hold_memory(control: Control) -> None:
    """What is free beside the pool and the activations is for the contexts of runtimes."""
    machine = Path(tempfile.mkdtemp()) / "machine"
    os.environ["FAKE_CUDA_MACHINE"] = str(machine)
    machine.write_text(f"0 context {40 * MIB}\n")
    device = opened()
    assert device.context_nbytes == 40 * MIB
    free_nbytes, whole_nbytes = driver.memory_info()
    assert device.beside_nbytes == free_nbytes - 16 * MIB
    assert whole_nbytes - 40 * MIB - 80 * MIB - SCRATCH_NBYTES == device.beside_nbytes
    device.close()


def test_where_others_hold_memory_a_context_is_taken_to_be_as_published() -> None:
    assert context_nbytes(80 << 30, (80 << 30) + (600 << 20)) == 600 << 20
    assert context_nbytes(60 << 30, 80 << 30) == CONTEXT_NBYTES


@in_child()
def test_both_classes_are_made_and_wild_mappings_refused(control: Control) -> None:
    device = opened("pages", nbytes=200 * MIB)
    memory = device._memory
    assert isinstance(memory, CudaGranules)
    assert memory.classes == [(64 * MIB, 2), (G, 36)]
    assert device.pool_nbytes == 200 * MIB
    device.remap([], [Mapping(64 * MIB, 0, 64 * MIB), Mapping(128 * MIB, 2, G)])
    tensor(device, 64 * MIB, 66 * MIB).fill_(1)
    for wrong in (Mapping(0, 0, G), Mapping(0, 38, G), Mapping(0, -1, G), Mapping(-G, 2, G), Mapping(1 << 60, 2, G)):
        with pytest.raises(ValueError, match="is not a mapping"):
            device.remap([], [wrong])
    with pytest.raises(ValueError, match="not mapped"):
        device.storage(127 * MIB, 4 * MIB)
    device.close()


# --- pinned memory


@in_child()
def test_a_slab_is_pinned_in_pieces_and_copies_keep_to_them(control: Control) -> None:
    host.PIECE_NBYTES = 4 * MIB  # type: ignore[misc]
    device = opened()
    memory = with_slab(device)
    assert control.live("registrations") == 3
    job = device.copy_in([Copy(slab(0), 4 * MIB - 512, 0, 6 * MIB)], lambda: None)
    device.wait(job.events[0])
    assert content(device, 0, 6 * MIB) == bytes(memory.view[4 * MIB - 512 :][: 6 * MIB])
    device.copy_out([(device.storage(0, 6 * MIB), 0, 4 * MIB + 512)])
    assert bytes(memory.view[4 * MIB + 512 :][: 6 * MIB]) == pattern(10 * MIB)[4 * MIB - 512 :][: 6 * MIB]
    job.join()
    device.close()
    assert control.live("registrations") == 0


@in_child()
def test_only_pinnable_memory_is_pinned(control: Control) -> None:
    device = opened()
    memory = SharedMemory.create("slab", 4 * MIB)
    memory.view[:] = pattern(4 * MIB)
    device.map_host(0, memory)
    device.settle()
    assert control.live("registrations") == 0
    device.wait(device.copy_in([Copy(slab(0), 0, 0, 4 * MIB)], lambda: None).events[0])
    assert content(device, 0, 4 * MIB) == pattern(4 * MIB)
    device.close()


def held_pins(control: Control, device: CudaDevice) -> threading.Event:
    """From now on, pinning waits for this."""
    go = threading.Event()
    pin = host.HostSlab.pin

    def late(self: host.HostSlab, index: int) -> None:
        assert go.wait(60)
        pin(self, index)

    host.HostSlab.pin = late  # type: ignore[method-assign]
    return go


def unpinned(device: CudaDevice, number: int = 0) -> SharedMemory:
    """A slab whose pinning has not come to its end."""
    memory = SharedMemory.create("slab", SLAB_NBYTES, pinnable=True)
    memory.view[:] = pattern(SLAB_NBYTES)
    device.map_host(number, memory)
    return memory


@in_child()
def test_copies_do_not_wait_until_a_slab_is_pinned(control: Control) -> None:
    host.PIECE_NBYTES = 4 * MIB  # type: ignore[misc]
    device = opened()
    go = held_pins(control, device)
    memory = unpinned(device)
    job = device.copy_in([Copy(slab(0), 0, 0, SLAB_NBYTES)], lambda: None)
    device.wait(job.events[0])
    assert content(device, 0, SLAB_NBYTES) == pattern(SLAB_NBYTES)
    device.copy_out([(device.storage(0, 5 * MIB), 0, 7 * MIB)])
    assert bytes(memory.view[7 * MIB :]) == pattern(5 * MIB)
    assert control.live("registrations") == 0
    assert control.live("host_allocations") == 2
    go.set()
    device.settle()
    assert control.live("registrations") == 3
    control.clear_log()
    device.copy_in([Copy(slab(0), 0, 0, MIB)], lambda: None).join()
    assert [line for line in control.log() if f"{memory.address:#x}" in line], control.log()  # from there, at last
    device.close()


@in_child()
def test_a_slab_that_goes_before_it_is_pinned_is_not_pinned(control: Control) -> None:
    host.PIECE_NBYTES = MIB  # type: ignore[misc]
    device = opened()
    go = held_pins(control, device)
    memory = unpinned(device)
    device.unmap_host(0)
    go.set()
    device.settle()
    assert control.live("registrations") == 0
    assert "cuMemHostRegister" not in control.calls()
    with pytest.raises(ValueError, match="released"):
        memory.view[0]
    device.close()


@in_child()
def test_what_cannot_be_pinned_is_copied_through_buffers(control: Control) -> None:
    host.PIECE_NBYTES = 4 * MIB  # type: ignore[misc]
    device = opened()
    troubles: list[str] = []
    device.on_trouble = troubles.append
    control.fail("cuMemHostRegister", 0, 304)
    memory = with_slab(device)
    with_slab(device, 1)
    assert len(troubles) == 1, troubles  # it is said once
    assert "4.0 MiB of host memory cannot be pinned" in troubles[0]
    assert "ulimit -l" in troubles[0]
    assert "cuMemHostRegister" in troubles[0]
    control.clear_log()
    job = device.copy_in([Copy(slab(0), 512, 0, 11 * MIB)], lambda: None)
    device.wait(job.events[0])
    assert content(device, 0, 11 * MIB) == bytes(memory.view[512:][: 11 * MIB])
    tensor(device, 0, 11 * MIB).add_(1)
    device.copy_out([(device.storage(0, 11 * MIB), 0, 0)])
    assert bytes(memory.view[: 11 * MIB]) == content(device, 0, 11 * MIB)
    assert control.live("host_allocations") == 2  # one for each direction, whatever the slabs are
    assert not last(control, "cuMemHostAlloc")
    job.join()
    device.close()
    assert control.live("host_allocations") == 0


@in_child()
def test_no_pinned_memory_at_all(control: Control) -> None:
    control.fail("cuMemHostAlloc", 0, 2)
    with pytest.raises(DeviceError, match=r"not even 2\.0 MiB of pinned memory"):
        opened()


# --- room


@in_child(FAKE_CUDA_MEMORY=1 << 30)
def test_the_pool_is_what_is_free_less_headroom_and_activations(control: Control) -> None:
    device = CudaDevice(0)
    free = 1 << 30
    total = free - free // 16 - 16 * MIB
    assert device.activation_nbytes == total // 4
    assert device.pool_nbytes == (total - total // 4) // G * G
    assert device.info.total_nbytes == device.pool_nbytes + device.activation_nbytes
    assert device.info.name
    assert device.activation_stats()[2] == device.activation_nbytes
    device.close()
    with pytest.raises(DeviceError, match=r"no room for a pool.*activations"):
        CudaDevice(0, activation_nbytes=1 << 30)


@in_child()
def test_no_such_gpu(control: Control) -> None:
    with pytest.raises(DeviceError, match="GPU 1 is not there: the driver finds 1"):
        CudaDevice(1)


@in_child()
def test_out_of_memory_at_the_start(control: Control) -> None:
    for pool, function, match in (
        ("regions", "cuMemAlloc", "cannot reserve a pool of 64.0 MiB: cuMemAlloc: .*OUT_OF_MEMORY"),
        ("pages", "cuMemCreate", "cannot reserve a pool of 64.0 MiB: .* after 2 granules"),
        ("pages", "cuMemAddressReserve", "cannot reserve a pool of 64.0 MiB: .* after 32 granules"),
    ):
        control.fail(function, 3 if function == "cuMemCreate" else 1, 2)
        with pytest.raises(DeviceError, match=match):
            opened(pool)
        assert control.live("handles") == 0
    opened().close()


# --- errors


@in_child()
def test_a_refused_call_is_an_error_and_the_device_goes_on(control: Control) -> None:
    device = opened()
    with_slab(device)
    for code in (1, 2, 801):
        control.fail("cuEventRecord", 1, code)
        with pytest.raises(DeviceError, match="cuEventRecord"):
            device.record()
    assert control.live("events") == 1  # the one that was refused each time
    job = device.copy_in([Copy(slab(0), 0, 0, MIB)], lambda: None)
    job.join()
    assert content(device, 0, MIB) == pattern(MIB)
    device.close()


@in_child()
def test_a_refusal_of_the_stream_loses_the_device(control: Control) -> None:
    """It is about something that was issued before: nobody can say what was not done."""
    device = opened()
    control.fail("cuStreamSynchronize", 1, 1)
    for _ in range(2):
        with pytest.raises(DeviceLost, match="the compute stream failed"):
            device.synchronize()


def use(device: CudaDevice, done: list[int]) -> None:
    """Everything that an executor does with a device."""
    job = device.copy_in([Copy(slab(0), 0, 0, 8 * MIB)], lambda: done.append(1))
    device.wait(job.events[0])
    device.synchronize()
    job.join()
    device.copy_out([(device.storage(0, 8 * MIB), 0, 0)])
    device.synchronize()


def lost(control: Control, function: str, code: int, nth: int = 2, sticky: bool = True) -> None:
    """The call that notices says so, so does every later one, and nobody waits for ever."""
    noticed: list[DeviceLost] = []
    device = CudaDevice(0, memory_nbytes=96 * MIB, activation_nbytes=32 * MIB, chunk_nbytes=MIB)
    device.on_lost = noticed.append
    device.attach_thread()
    with_slab(device)
    done: list[int] = []
    control.fail(function, nth, code, sticky=sticky)
    with pytest.raises(DeviceLost, match=rf"\({code}\)"):
        use(device, done)
    for call in (
        device.synchronize,
        device.record,
        lambda: device.copy_in([Copy(slab(0), 0, 0, MIB)], lambda: done.append(2)),
        lambda: device.copy_out([]),
        lambda: with_slab(device, 1),
        device.export,
    ):
        with pytest.raises(DeviceLost, match=rf"\({code}\)"):
            call()
    assert done in ([], [1])
    device.close()
    assert all(error.args[0].endswith(f"({code})") for error in noticed)


@in_child()
def test_a_copy_that_fails_on_the_way_loses_the_device(control: Control) -> None:
    lost(control, "copy", 700)


@in_child()
def test_a_copy_that_cannot_be_issued_loses_the_device(control: Control) -> None:
    lost(control, "cuMemcpyHtoDAsync", 719)


@in_child()
def test_a_refused_copy_loses_the_device(control: Control) -> None:
    """Nobody is there to whom a copy thread could refuse."""
    lost(control, "cuMemcpyHtoDAsync", 1, sticky=False)


@in_child()
def test_an_event_that_fails_loses_the_device(control: Control) -> None:
    lost(control, "cuEventSynchronize", 999)


@in_child()
def test_a_wait_that_fails_loses_the_device(control: Control) -> None:
    lost(control, "cuStreamWaitEvent", 716)


@in_child()
def test_a_synchronisation_that_fails_loses_the_device(control: Control) -> None:
    lost(control, "cuStreamSynchronize", 214)


@in_child()
def test_a_write_back_that_fails_loses_the_device(control: Control) -> None:
    lost(control, "cuMemcpyDtoHAsync", 700, nth=1)


@in_child()
def test_an_error_that_nobody_asked_for_is_noticed(control: Control) -> None:
    """No call waits for the job: the copy thread says it, so that the process can be replaced."""
    noticed = threading.Event()
    device = CudaDevice(0, memory_nbytes=96 * MIB, activation_nbytes=32 * MIB)
    device.on_lost = lambda error: noticed.set()
    with_slab(device)
    control.fail("copy", 1, 700, sticky=True)
    job = device.copy_in([Copy(slab(0), 0, 0, MIB)], lambda: None)
    assert noticed.wait(60)
    assert job.finished.is_set()
    for wait in (job.events[0].handle, job.join):
        with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
            wait()
    device.close()


@in_child()
def test_whatever_ends_the_copy_thread_is_noticed(control: Control) -> None:
    """Not only what the driver says: else those who wait for copies would wait for ever."""
    noticed: list[DeviceLost] = []
    device = CudaDevice(0, memory_nbytes=96 * MIB, activation_nbytes=32 * MIB)
    device.on_lost = noticed.append
    device.attach_thread()
    with_slab(device)

    def wrong(*arguments: object) -> None:
        raise TypeError("a mistake of ours")

    vars(driver)["copy_to_device"] = wrong
    job = device.copy_in([Copy(slab(0), 0, 0, MIB)], lambda: None)
    for wait in (job.join, job.events[0].handle, device.synchronize):
        with pytest.raises(DeviceLost, match="a copy failed: TypeError: a mistake of ours"):
            wait()
    assert [str(error) for error in noticed] == ["a copy failed: TypeError: a mistake of ours"]
    device.close()


@in_child()
def test_the_first_request_does_not_load_libraries(control: Control) -> None:
    """They are loaded when a thread becomes the device's."""
    names: set[str] = set()

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(f"{func.name()} {args[0].dtype}" if isinstance(args[0], torch.Tensor) else func.name())
            return func(*args, **(kwargs or {}))

    device = CudaDevice(0, memory_nbytes=96 * MIB, activation_nbytes=32 * MIB)
    with Watch():  # type: ignore[no-untyped-call]
        device.attach_thread()
    for kind in ("float32", "float16", "bfloat16"):
        for name in ("linear", "conv2d", "scaled_dot_product_attention", "layer_norm", "softmax.int", "embedding"):
            assert f"aten::{name} torch.{kind}" in names, sorted(names)
    device.close()


@in_child()
def test_a_type_that_a_gpu_cannot_compute_with_is_passed_over(control: Control) -> None:
    compute, seen = torch_adapter._compute, []

    def old_gpu(rows: torch.Tensor) -> None:
        seen.append(rows.dtype)
        if rows.dtype is torch.bfloat16:
            raise RuntimeError("bfloat16 is only supported on GPUs with compute capability of at least 8.0")
        compute(rows)

    vars(torch_adapter)["_compute"] = old_gpu
    opened().close()
    assert seen == [torch.float32, torch.float16, torch.bfloat16]

    def no_kernels(rows: torch.Tensor) -> None:
        if rows.dtype is torch.float16:
            raise torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device")

    vars(torch_adapter)["_compute"] = no_kernels
    with pytest.raises(torch.AcceleratorError, match="no kernel image"):
        opened()


@in_child()
def test_an_activation_may_lie_in_several_pieces_of_the_driver(control: Control) -> None:
    """As torch's expandable segments do: the driver knows each piece alone."""
    device = opened("pages")
    device.remap([], [Mapping(index * G, 30 - index, G) for index in range(3)])
    face = torch_adapter.TorchOnCuda(device._context, 0, compute(device), 16 * MIB)
    start = address(device, 0)
    assert driver.allocation_of(start) == (start, G)
    assert face.holds(start + 100, 3 * G - 100)
    assert not face.holds(start + 100, 3 * G)
    device.close()


@in_child()
def test_memory_that_will_not_be_unmapped_loses_the_device(control: Control) -> None:
    device = opened("pages")
    device.remap([], [Mapping(0, 20, G)])
    control.fail("cuMemUnmap", 1, 1)
    with pytest.raises(DeviceLost, match="cannot be unmapped"):
        device.remap([Mapping(0, 20, G)], [])
    with pytest.raises(DeviceLost, match="cannot be unmapped"):
        device.synchronize()


@in_child()
def test_a_cancelled_job_has_little_on_its_way(control: Control) -> None:
    copies.AHEAD_NBYTES = 2 * MIB  # type: ignore[misc]
    device = opened()
    with_slab(device)
    slow, cancelled = threading.Event(), threading.Event()
    synchronize = driver.synchronize_event

    def over_a_slow_link(event: int) -> None:
        slow.set()
        cancelled.wait()
        synchronize(event)

    vars(driver)["synchronize_event"] = over_a_slow_link
    control.clear_log()
    job = device.copy_in([Copy(slab(0), 0, 0, MIB), Copy(slab(0), MIB, 32 * MIB, SLAB_NBYTES - MIB)], lambda: None)
    slow.wait()
    assert len(last(control, "cuMemcpyHtoDAsync")) == 2
    job.cancel()
    cancelled.set()
    job.join()
    assert job.events[0].done()
    assert not job.events[1].done()
    assert len(last(control, "cuMemcpyHtoDAsync")) == 3  # the one that it was about to issue
    device.close()


@in_child()
def test_waiting_for_a_cancelled_copy_does_not_hang(control: Control) -> None:
    copies.AHEAD_NBYTES = MIB  # type: ignore[misc]
    device = opened()
    with_slab(device)
    first = device.copy_in([Copy(slab(0), 0, 0, SLAB_NBYTES)], lambda: None)
    second = device.copy_in([Copy(slab(0), 0, 0, SLAB_NBYTES)], lambda: pytest.fail("it was cancelled"))
    second.cancel()
    second.join()
    assert not second.events[0].done()
    with pytest.raises(DeviceError, match="cancelled"):
        device.wait(second.events[0])
    first.join()
    assert room(device, MIB) == 0
    device.close()


@in_child()
def test_a_peer_in_host_memory_is_refused(control: Control) -> None:
    device = opened()
    memory = SharedMemory.create("peer", MIB)
    with pytest.raises(DeviceError, match="not visible"):
        device.map_peer(1, MIB, b"", [memory.fd])
    device.close()


@in_child()
def test_d6_what_torch_keeps_is_cleared_when_the_owner_changes(control: Control) -> None:
    """On the compute stream, and only what nobody holds. Torch's part is played: it has no CUDA here."""
    device = opened()
    base = driver.allocate(5 * MIB)
    driver.fill(base, 0xA7, 5 * MIB, compute(device))
    states = ["inactive", "active_allocated", "inactive", "inactive", "inactive"]
    blocks: list[dict[str, Any]] = [
        {"address": base + n * MIB, "size": MIB, "state": state} for n, state in enumerate(states)
    ]
    snapshot = [{"blocks": blocks[:3]}, {"blocks": blocks[3:]}]  # of torch's allocations, the first ends with the third
    torch.cuda.memory_snapshot = lambda *ignored: snapshot
    face = torch_adapter.TorchOnCuda(device._context, 0, compute(device), MIB)

    def secrets() -> list[int]:
        device.synchronize()
        return [ctypes.string_at(base + n * MIB, MIB).count(0xA7) for n in range(5)]

    face.set_owner(2)
    assert secrets() == [0, MIB, 0, 0, 0]
    spans = [(base, MIB), (base + 2 * MIB, MIB), (base + 3 * MIB, 2 * MIB)]
    assert list(torch_adapter.idle_spans(snapshot)) == spans, "a span over two allocations, which no driver fills"
    driver.fill(base, 0xA7, MIB, compute(device))
    face.set_owner(2)
    assert secrets() == [MIB, MIB, 0, 0, 0], "its own bytes it may see again"
    face.set_owner(3)
    assert secrets() == [0, MIB, 0, 0, 0]
    driver.free(base)
    device.close()
