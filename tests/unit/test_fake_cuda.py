"""The fake driver keeps its promises: what is not waited for is not done, and misuse is noticed.

Each function named ``child_…`` runs in a process of its own, under ``cuda.bindings.driver``; the test of the same name
calls it and says which environment it has.
"""

import ctypes
import importlib
import mmap
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_cuda.build import NoCompiler, build
from fake_cuda.fixtures import fake_cuda_library
from fake_cuda.harness import LIBRARY_ENV, CallFailed, Control, load, ok, run_child

__all__ = ["fake_cuda_library"]

KIB = 1024
GRANULE = 64 * KIB
ENV: dict[str, str | int] = {"FAKE_CUDA_GRANULARITY": GRANULE, "FAKE_CUDA_MEMORY": 64 * GRANULE}
TWO = ENV | {"FAKE_CUDA_DEVICES": 2}
INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, INVALID_HANDLE, ILLEGAL_STATE = 1, 2, 201, 400, 401
NOT_READY, ILLEGAL_ADDRESS, ALREADY_REGISTERED, NOT_REGISTERED, NOT_PERMITTED = 600, 700, 712, 713, 800
FD = 1


class World:
    """In a child: the driver with the primary context of device 0 current."""

    def __init__(self, device: int = 0) -> None:
        self.control: Control = load()
        self.driver: Any = importlib.import_module("cuda.bindings.driver")
        ok(self.driver.cuInit(0))
        self.context = ok(self.driver.cuDevicePrimaryCtxRetain(device))
        ok(self.driver.cuCtxSetCurrent(self.context))
        self.keep: list[Any] = []

    def pages(self, nbytes: int, fill: bytes = b"") -> int:
        """Host memory with a page beyond it that is not registered either."""
        memory = mmap.mmap(-1, nbytes + 4096)
        pin = ctypes.c_char.from_buffer(memory)
        self.keep += [memory, pin]
        address = ctypes.addressof(pin)
        ctypes.memmove(address, (fill * nbytes)[:nbytes], len((fill * nbytes)[:nbytes]))
        return address

    def host(self, nbytes: int, fill: bytes = b"", flags: int = 0) -> int:
        address = self.pages(nbytes, fill)
        ok(self.driver.cuMemHostRegister(address, nbytes, flags))
        return address

    def device(self, nbytes: int) -> int:
        return int(ok(self.driver.cuMemAlloc(nbytes)))

    def stream(self, flags: int = 1) -> Any:
        return ok(self.driver.cuStreamCreate(flags))

    def event(self) -> Any:
        return ok(self.driver.cuEventCreate(2))

    def properties(self, device: int = 0) -> Any:
        kinds = self.driver
        wish = kinds.CUmemAllocationProp()
        wish.type = kinds.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wish.location.type = kinds.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wish.location.id = device
        wish.requestedHandleTypes = kinds.CUmemAllocationHandleType(FD)
        return wish

    def access(self, flags: int, device: int = 0) -> Any:
        wish = self.driver.CUmemAccessDesc()
        wish.location.type = self.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wish.location.id = device
        wish.flags = self.driver.CUmemAccess_flags(flags)
        return wish

    def handle(self, nbytes: int = GRANULE) -> Any:
        return ok(self.driver.cuMemCreate(nbytes, self.properties(), 0))

    def mapped(self, nbytes: int = GRANULE, access: int | None = 3) -> int:
        """Mapped memory of one handle, which is released; at an address of its own."""
        address = int(ok(self.driver.cuMemAddressReserve(nbytes, 0, 0, 0)))
        handle = self.handle(nbytes)
        ok(self.driver.cuMemMap(address, nbytes, 0, handle, 0))
        ok(self.driver.cuMemRelease(handle))
        if access is not None:
            ok(self.driver.cuMemSetAccess(address, nbytes, [self.access(access)], 1))
        return address


def code(result: tuple[Any, ...]) -> int:
    return int(result[0])


# ---- lookup, devices, contexts


def child_lookup() -> None:
    control = load()
    c = ctypes.CDLL(str(control.library))

    def find(name: str, version: int) -> tuple[int, int | None, int]:
        pointer, status = ctypes.c_void_p(1), ctypes.c_int(-1)
        args = (name.encode(), ctypes.byref(pointer), version, ctypes.c_uint64(0), ctypes.byref(status))
        return c.cuGetProcAddress_v2(*args), pointer.value, status.value

    def address(symbol: str) -> int | None:
        return ctypes.cast(getattr(c, symbol), ctypes.c_void_p).value

    assert find("cuMemAlloc", 3020) == (0, address("cuMemAlloc_v2"), 0)
    assert find("cuMemAlloc", 13000) == (0, address("cuMemAlloc_v2"), 0)
    assert find("cuMemAlloc", 2000) == (500, None, 2)  # another signature, which is not here
    assert find("cuNoSuchThing", 13000) == (500, None, 1)
    assert find("cuCtxGetDevice", 12080) == (0, address("cuCtxGetDevice"), 0)
    assert find("cuCtxGetDevice", 13000) == (0, address("cuCtxGetDevice_v2"), 0)


def test_a_name_and_a_version_choose_the_function(fake_cuda_library: Path) -> None:
    run_child(child_lookup, fake_cuda_library)


def child_contexts() -> None:
    control = load()
    driver = importlib.import_module("cuda.bindings.driver")
    assert code(driver.cuDeviceGetCount()) == 3  # not initialized
    ok(driver.cuInit(0))
    assert ok(driver.cuDeviceGetCount()) == 2
    assert code(driver.cuDeviceGet(2)) == 101
    assert ok(driver.cuDeviceGetUuid(0)).bytes != ok(driver.cuDeviceGetUuid(1)).bytes
    assert code(driver.cuMemAlloc(64)) == INVALID_CONTEXT
    first = ok(driver.cuDevicePrimaryCtxRetain(0))
    assert code(driver.cuCtxSetCurrent(first)) == 0
    assert ok(driver.cuMemGetInfo()) == (64 * GRANULE, 64 * GRANULE)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(code(driver.cuMemAlloc(64))))
    thread.start()
    thread.join()
    assert seen == [INVALID_CONTEXT]  # a context is current to a thread
    second = ok(driver.cuDevicePrimaryCtxRetain(1))
    ok(driver.cuCtxPushCurrent(second))
    assert int(ok(driver.cuCtxGetDevice())) == 1
    assert int(ok(driver.cuCtxPopCurrent())) == int(second)
    assert int(ok(driver.cuCtxGetDevice())) == 0
    stream, pointer = ok(driver.cuStreamCreate(1)), ok(driver.cuMemAlloc(100))
    assert ok(driver.cuMemGetInfo())[0] == 64 * GRANULE - 4096
    ok(driver.cuDevicePrimaryCtxRelease(0))
    assert code(driver.cuMemFree(pointer)) == 709  # destroyed with its last user
    left, freed = control.violations()
    assert "released with 2 streams or regions of memory left" in left
    assert "released" in freed
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
    assert ok(driver.cuMemGetInfo())[0] == 64 * GRANULE
    assert code(driver.cuStreamSynchronize(stream)) == INVALID_HANDLE
    assert str(ok(driver.cuGetErrorName(driver.CUresult(700)))) == "b'CUDA_ERROR_ILLEGAL_ADDRESS'"


def test_contexts_belong_to_threads_and_own_what_was_made_in_them(fake_cuda_library: Path) -> None:
    run_child(child_contexts, fake_cuda_library, env=TWO)


def child_fork() -> None:
    world = World()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, str(code(world.driver.cuCtxGetDevice())).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 8) == b"3"
    assert int(ok(world.driver.cuCtxGetDevice())) == 0


def child_fork_before() -> None:
    driver = importlib.import_module("cuda.bindings.driver")
    child = os.fork()
    if not child:
        os._exit(code(driver.cuInit(0)))
    assert os.waitpid(child, 0)[1] == 0


def test_a_process_can_fork_before_it_begins(fake_cuda_library: Path) -> None:
    run_child(child_fork_before, fake_cuda_library)


def test_a_forked_process_has_no_driver(fake_cuda_library: Path) -> None:
    run_child(child_fork, fake_cuda_library)


# ---- lazy streams


def child_lazy() -> None:
    world = World()
    d, control = world.driver, world.control
    source, target, other = world.host(4096, b"a"), world.device(4096), world.device(4096)
    stream, idle, event = world.stream(), world.stream(), world.event()
    assert code(d.cuEventSynchronize(event)) == 0  # never recorded: nothing to wait for
    ok(d.cuMemcpyHtoDAsync(target, source, 2048, stream))
    ok(d.cuEventRecord(event, stream))
    ok(d.cuMemcpyHtoDAsync(target + 2048, source, 2048, stream))
    ok(d.cuMemcpyHtoDAsync(other, source, 4096, idle))
    time.sleep(0.05)
    assert ctypes.string_at(target, 4096) == bytes(4096)  # nobody has waited for anything
    assert [code(d.cuEventQuery(event)), control.pending(stream)] == [NOT_READY, 3]
    ok(d.cuEventSynchronize(event))
    assert ctypes.string_at(target, 4096) == b"a" * 2048 + bytes(2048)  # exactly what the event covers
    assert [code(d.cuEventQuery(event)), control.pending(stream)] == [0, 1]
    assert code(d.cuStreamQuery(stream)) == NOT_READY
    ok(d.cuStreamSynchronize(stream))
    assert ctypes.string_at(target, 4096) == b"a" * 4096
    assert ctypes.string_at(other, 4096) == bytes(4096)  # another stream's business
    ok(d.cuCtxSynchronize())
    assert ctypes.string_at(other, 4096) == b"a" * 4096
    assert control.violations() == []


def test_work_is_undone_until_somebody_waits_for_it(fake_cuda_library: Path) -> None:
    run_child(child_lazy, fake_cuda_library, env=ENV)


def child_wait_chain() -> None:
    world = World()
    d, control = world.driver, world.control
    source, target = world.host(4096, b"\1"), world.device(4096)
    copies, compute, event = world.stream(), world.stream(), world.event()

    def wake(waits: bool) -> int:
        ok(d.cuMemsetD8Async(target, 0, 4096, copies))
        ok(d.cuMemcpyHtoDAsync(target, source, 4096, copies))
        ok(d.cuEventRecord(event, copies))
        if waits:
            ok(d.cuStreamWaitEvent(compute, event, 0))
        total = control.kernel_sum(compute, target, 4096)
        ok(d.cuMemsetD8Async(target, 9, 4096, copies))
        ok(d.cuEventRecord(event, copies))  # does not disturb the wait that is queued
        ok(d.cuStreamSynchronize(compute))
        assert control.pending(copies) == (2 if waits else 5)  # forced: what the wait covers, and no more
        ok(d.cuStreamSynchronize(copies))
        return total.value

    assert wake(waits=True) == 4096
    ok(d.cuMemsetD8(target, 0, 4096))
    ok(d.cuCtxSynchronize())
    assert wake(waits=False) == 0
    # the default stream and blocking streams wait for one another, others do not
    for flags, expected in ((0, 4096), (1, 0)):
        ok(d.cuMemsetD8(target, 0, 4096))
        ok(d.cuCtxSynchronize())
        stream = world.stream(flags)
        ok(d.cuMemcpyHtoDAsync(target, source, 4096, stream))
        total = control.kernel_sum(0, target, 4096)
        ok(d.cuStreamSynchronize(0))
        assert total.value == expected
    assert control.violations() == []


def test_only_waits_order_streams(fake_cuda_library: Path) -> None:
    run_child(child_wait_chain, fake_cuda_library, env=ENV)


def child_progress() -> None:
    world = World()
    d, control = world.driver, world.control
    source, target, stream, event = world.host(4096, b"a"), world.device(4096), world.stream(), world.event()

    def until(condition: Any) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    # lazy: a loop that polls comes to an end, after one query that moves nothing; unless told otherwise
    ok(d.cuMemcpyHtoDAsync(target, source, 4096, stream))
    ok(d.cuEventRecord(event, stream))
    assert [code(d.cuEventQuery(event)), control.pending(stream)] == [NOT_READY, 2]
    until(lambda: code(d.cuEventQuery(event)) == 0)
    control.polls(-1)
    ok(d.cuMemcpyHtoDAsync(target, source, 4096, stream))
    ok(d.cuEventRecord(event, stream))
    assert {code(d.cuEventQuery(event)) for _ in range(100)} == {NOT_READY}
    # op by op
    assert [control.step(stream), control.pending(stream), control.step(stream, 5)] == [1, 1, 1]
    # late: by itself, after a while
    control.mode("late")
    control.delay_ms(100)
    begun = time.monotonic()
    ok(d.cuMemsetD8Async(target, 0, 4096, stream))
    ok(d.cuMemcpyHtoDAsync(target, source, 4096, stream))
    until(lambda: control.pending(stream) == 0)
    assert time.monotonic() - begun >= 0.1
    # eager: by itself
    control.mode("eager")
    ok(d.cuMemsetD8Async(target, 0, 4096, stream))
    until(lambda: control.pending(stream) == 0)
    assert ctypes.string_at(target, 4096) == bytes(4096)


def test_modes(fake_cuda_library: Path) -> None:
    run_child(child_progress, fake_cuda_library, env=ENV)


def child_host_functions() -> None:
    world = World()
    d, control = world.driver, world.control
    seen: list[int] = []

    def call(value: int | None) -> None:
        seen.append(value or 0)
        if value == 2:
            seen.append(code(d.cuCtxGetDevice()))

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call)
    address = ctypes.cast(function, ctypes.c_void_p).value
    stream = world.stream()
    for value in (1, 2, 3):
        ok(d.cuLaunchHostFunc(stream, address, value))
    assert seen == []
    ok(d.cuStreamSynchronize(stream))
    assert seen == [1, 2, NOT_PERMITTED, 3]  # no CUDA in there
    assert len(control.violations()) == 1
    word = world.host(8)
    ok(d.cuStreamWaitValue32(stream, word, 5, 1))
    ok(d.cuLaunchHostFunc(stream, address, 4))
    ok(d.cuStreamWriteValue64(stream, word, 6, 0))
    control.mode("eager")
    time.sleep(0.01)
    assert seen[-1] == 3
    ctypes.memmove(word, (5).to_bytes(4, "little"), 4)
    ok(d.cuStreamSynchronize(stream))
    assert [seen[-1], ctypes.string_at(word, 8)] == [4, (6).to_bytes(8, "little")]
    timed = [ok(d.cuEventCreate(0)) for _ in range(2)]
    ok(d.cuEventRecord(timed[0], stream))
    ok(d.cuMemsetD32Async(world.device(4096), 1, 1024, stream))
    ok(d.cuEventRecord(timed[1], stream))
    ok(d.cuEventSynchronize(timed[1]))
    assert 0 <= ok(d.cuEventElapsedTime(*timed)) < 10_000


def test_host_functions_and_values(fake_cuda_library: Path) -> None:
    run_child(child_host_functions, fake_cuda_library, env=ENV)


def child_threads() -> None:
    world = World()
    d, control = world.driver, world.control
    control.mode("eager")
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            ok(d.cuCtxSetCurrent(world.context))
            copies, compute, event = world.stream(), world.stream(), world.event()
            source, target = world.host(8 * KIB, bytes([number])), world.mapped()
            for _ in range(50):
                ok(d.cuMemsetD8Async(target, 0, 8 * KIB, copies))
                ok(d.cuMemcpyHtoDAsync(target, source, 8 * KIB, copies))
                ok(d.cuEventRecord(event, copies))
                ok(d.cuStreamWaitEvent(compute, event, 0))
                total = control.kernel_sum(compute, target, 8 * KIB)
                ok(d.cuStreamSynchronize(compute))
                assert total.value == number * 8 * KIB
            ok(d.cuMemUnmap(target, GRANULE))
            ok(d.cuMemHostUnregister(source))
            for stream in (copies, compute):
                ok(d.cuStreamDestroy(stream))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert control.violations() == []
    assert [control.live(what) for what in ("streams", "mappings", "handles", "registrations")] == [0] * 4


def test_many_threads(fake_cuda_library: Path) -> None:
    run_child(child_threads, fake_cuda_library, env=ENV)


# ---- memory that queued work needs


def child_in_use() -> None:
    world = World()
    d, control = world.driver, world.control
    stream = world.stream()
    pinned, other = world.host(GRANULE, b"a"), int(ok(d.cuMemHostAlloc(GRANULE, 0)))
    block, address = world.device(GRANULE), world.mapped(2 * GRANULE)
    ok(d.cuMemcpyHtoDAsync(block, pinned, GRANULE, stream))
    ok(d.cuMemcpyDtoHAsync(other, block, GRANULE, stream))
    ok(d.cuMemcpyDtoDAsync(address + GRANULE, block, GRANULE, stream))
    taken_away: list[Callable[[], tuple[Any, ...]]] = [
        lambda: d.cuMemUnmap(address, 2 * GRANULE),
        lambda: d.cuMemFree(block),
        lambda: d.cuMemHostUnregister(pinned),
        lambda: d.cuMemFreeHost(other),
    ]
    assert [code(take()) for take in taken_away] == [ILLEGAL_STATE] * 4
    violations = control.violations()
    assert len(violations) == 4
    assert all("under queued work" in line for line in violations)
    ok(d.cuStreamSynchronize(stream))
    assert ctypes.string_at(address + GRANULE, 4) == b"aaaa"
    assert [code(take()) for take in taken_away] == [0] * 4
    # a "kernel" holds its memory, too
    address = world.mapped()
    control.kernel_sum(stream, address, 16)
    assert code(d.cuMemUnmap(address, GRANULE)) == ILLEGAL_STATE
    assert len(control.violations()) == 5
    control.forgive()
    assert control.violations() == []


def test_memory_is_not_taken_away_under_queued_work(fake_cuda_library: Path) -> None:
    run_child(child_in_use, fake_cuda_library, env=ENV)


def child_registration() -> None:
    world = World()
    d, control = world.driver, world.control
    stream, target = world.stream(), world.device(3 * 4096)
    loose = world.pages(4096, b"a")
    assert code(d.cuMemcpyHtoDAsync(target, loose, 4096, stream)) == INVALID_VALUE
    assert len(control.violations()) == 1
    ok(d.cuMemcpyHtoD(target, loose, 4096))  # a synchronous copy takes any memory
    ok(d.cuMemcpyHtoD(target, b"bytes", 5))
    assert ctypes.string_at(target, 6) == b"bytesa"
    both = world.pages(8192)
    ok(d.cuMemHostRegister(both, 4096, 3))
    assert code(d.cuMemHostRegister(both, 8192, 0)) == ALREADY_REGISTERED
    assert code(d.cuMemcpyHtoDAsync(target, both, 4097, stream)) == INVALID_VALUE
    ok(d.cuMemHostRegister(both + 4096, 4096, 0))
    assert code(d.cuMemcpyHtoDAsync(target, both, 4097, stream)) == INVALID_VALUE  # neighbours do not join
    ok(d.cuMemcpyHtoDAsync(target, both + 100, 3996, stream))
    ok(d.cuStreamSynchronize(stream))
    assert code(d.cuMemHostUnregister(both + 1)) == NOT_REGISTERED
    ok(d.cuMemHostUnregister(both))
    assert code(d.cuMemHostUnregister(both)) == NOT_REGISTERED
    # a file mapped for reading
    with open(__file__, "rb") as file:
        text = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(4096), 1, 2, os.open(__file__, os.O_RDONLY), ctypes.c_long(0))
    assert code(d.cuMemHostRegister(address, 4096, 0)) == INVALID_VALUE
    ok(d.cuMemHostRegister(address, 4096, 8))
    ok(d.cuMemcpyHtoDAsync(target, address, 4096, stream))
    assert code(d.cuMemcpyDtoHAsync(address, target, 4096, stream)) == INVALID_VALUE
    ok(d.cuStreamSynchronize(stream))
    assert ctypes.string_at(target, 4096) == text[:]
    # unmapped behind the driver's back, with a copy queued
    ok(d.cuMemcpyHtoDAsync(target, address, 4096, stream))
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(4096))
    control.forgive()
    assert code(d.cuStreamSynchronize(stream)) == ILLEGAL_ADDRESS
    assert ["unmapped under the driver" in line for line in control.violations()] == [True]
    assert code(d.cuMemAlloc(64)) == ILLEGAL_ADDRESS


def test_asynchronous_copies_need_registered_memory(fake_cuda_library: Path) -> None:
    run_child(child_registration, fake_cuda_library, env=ENV)


def child_pins() -> None:
    """Three pages; the one in the middle is punched out of the file and written anew."""
    world = World()
    d = world.driver
    fd = os.memfd_create("pins")
    os.ftruncate(fd, 3 * 4096)
    memory = mmap.mmap(fd, 3 * 4096)
    world.keep += [memory, ctypes.c_char.from_buffer(memory)]
    address = ctypes.addressof(world.keep[-1])
    memory[:] = b"a" * 4096 + b"b" * 4096 + b"c" * 4096
    ok(d.cuMemHostRegister(address, 3 * 4096, 0))
    stream, target = world.stream(), world.device(3 * 4096)
    punch = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    assert fallocate(fd, punch, ctypes.c_long(4096), ctypes.c_long(4096)) == 0
    assert memory[4096:8192] == bytes(4096)
    memory[:] = b"A" * 4096 + b"B" * 4096 + b"C" * 4096
    ok(d.cuMemcpyHtoDAsync(target, address + 100, 3 * 4096 - 200, stream))
    ok(d.cuStreamSynchronize(stream))
    assert ctypes.string_at(target, 3 * 4096 - 200) == b"A" * 3996 + b"b" * 4096 + b"C" * 3996
    ok(d.cuMemsetD8Async(target, ord("x"), 3 * 4096, stream))
    ok(d.cuMemcpyDtoHAsync(address + 100, target, 3 * 4096 - 200, stream))
    ok(d.cuStreamSynchronize(stream))
    assert memory[:] == b"A" * 100 + b"x" * 3996 + b"B" * 4096 + b"x" * 3996 + b"C" * 100
    ok(d.cuMemHostUnregister(address))
    ok(d.cuMemHostRegister(address, 3 * 4096, 0))
    ok(d.cuMemcpyHtoDAsync(target, address, 3 * 4096, stream))
    ok(d.cuStreamSynchronize(stream))
    assert ctypes.string_at(target, 3 * 4096) == memory[:]
    ok(d.cuMemHostUnregister(address))
    assert len(os.listdir("/proc/self/fd")) < 32


def test_what_is_pinned_are_pages(fake_cuda_library: Path) -> None:
    run_child(child_pins, fake_cuda_library, env=ENV | {"FAKE_CUDA_PINS": 1})


def child_access() -> None:
    world = World()
    d, control = world.driver, world.control
    host, stream = world.host(GRANULE, b"a"), world.stream()
    none, read = world.mapped(access=None), world.mapped(access=1)
    assert code(d.cuMemcpyDtoHAsync(host, none, 8, stream)) == INVALID_VALUE
    assert code(d.cuMemcpyHtoDAsync(read, host, 8, stream)) == INVALID_VALUE
    assert code(d.cuMemsetD8Async(read, 1, 8, stream)) == INVALID_VALUE
    ok(d.cuMemcpyDtoHAsync(host, read, 8, stream))
    block = world.device(64)
    for dst, src in ((block, host + GRANULE), (block + 1, host), (host, block), (0, host)):
        assert code(d.cuMemcpyHtoDAsync(dst, src, 64, stream)) == INVALID_VALUE
    assert code(d.cuMemcpyDtoDAsync(block, block + 8, 9, stream)) == INVALID_VALUE  # overlaps
    ok(d.cuMemcpyDtoDAsync(block, block + 8, 8, stream))
    ok(d.cuStreamSynchronize(stream))
    assert len(control.violations()) == 8
    # taken away while the copy is queued
    ok(d.cuMemcpyHtoDAsync(block, host + 64, 8, stream))
    ok(d.cuMemcpyDtoHAsync(host, read, 8, stream))
    ok(d.cuMemcpyHtoDAsync(block + 8, host + 64, 8, stream))
    ok(d.cuMemSetAccess(read, GRANULE, [world.access(0)], 1))
    control.forgive()
    assert code(d.cuStreamSynchronize(stream)) == ILLEGAL_ADDRESS
    assert ["when carried out" in line for line in control.violations()] == [True]
    assert ctypes.string_at(block, 16) == b"a" * 8 + bytes(8)  # in a broken context nothing moves
    broken = [d.cuMemAlloc(64), d.cuStreamCreate(1), d.cuMemUnmap(read, GRANULE), d.cuCtxSynchronize()]
    assert [code(result) for result in broken] == [ILLEGAL_ADDRESS] * 4
    ok(d.cuDevicePrimaryCtxRelease(0))
    ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(0))))
    ok(d.cuStreamSynchronize(world.stream()))


def test_copies_are_checked_when_issued_and_when_carried_out(fake_cuda_library: Path) -> None:
    run_child(child_access, fake_cuda_library, env=ENV)


# ---- virtual memory


def child_vmm() -> None:
    world = World()
    d, control = world.driver, world.control
    free = ok(d.cuMemGetInfo())[0]
    assert ok(d.cuMemGetAllocationGranularity(world.properties(), d.CUmemAllocationGranularity_flags(0))) == GRANULE
    span = int(ok(d.cuMemAddressReserve(4 * GRANULE, 0, 0, 0)))
    first, second = world.handle(), world.handle(2 * GRANULE)
    assert ok(d.cuMemGetInfo())[0] == free - 3 * GRANULE
    assert code(d.cuMemCreate(GRANULE + 1, world.properties(), 0)) == INVALID_VALUE
    assert code(d.cuMemCreate(64 * GRANULE, world.properties(), 0)) == OUT_OF_MEMORY
    assert code(d.cuMemMap(span, GRANULE, 0, second, 0)) == INVALID_VALUE  # a handle is mapped whole
    assert code(d.cuMemMap(span + 3 * GRANULE, 2 * GRANULE, 0, second, 0)) == INVALID_VALUE  # beyond the reservation
    ok(d.cuMemMap(span, GRANULE, 0, first, 0))
    ok(d.cuMemMap(span + GRANULE, 2 * GRANULE, 0, second, 0))
    assert code(d.cuMemMap(span, GRANULE, 0, first, 0)) == INVALID_VALUE  # something is there
    assert code(d.cuMemSetAccess(span, 4 * GRANULE, [world.access(3)], 1)) == INVALID_VALUE  # with a hole
    ok(d.cuMemSetAccess(span, 3 * GRANULE, [world.access(3)], 1))
    ctypes.memset(span, 7, 3 * GRANULE)
    host = world.host(3 * GRANULE)
    ok(d.cuMemcpyDtoHAsync(host, span, 3 * GRANULE, 0))  # across mappings
    ok(d.cuStreamSynchronize(0))
    assert ctypes.string_at(host, 3 * GRANULE) == b"\7" * 3 * GRANULE
    assert code(d.cuMemUnmap(span + GRANULE, GRANULE)) == INVALID_VALUE  # half of a mapping
    assert code(d.cuMemAddressFree(span, 4 * GRANULE)) == INVALID_VALUE
    assert len(control.violations()) == 3
    # the mapping holds the memory, the handle holds its bytes
    ok(d.cuMemRelease(second))
    assert code(d.cuMemRelease(second)) == INVALID_VALUE
    assert ok(d.cuMemGetInfo())[0] == free - 3 * GRANULE
    again = ok(d.cuMemRetainAllocationHandle(span + GRANULE))
    ok(d.cuMemUnmap(span, 3 * GRANULE))
    ok(d.cuMemRelease(again))
    assert ok(d.cuMemGetInfo())[0] == free - GRANULE
    assert code(d.cuMemcpyDtoHAsync(host, span, GRANULE, 0)) == INVALID_VALUE
    ok(d.cuMemMap(span + 3 * GRANULE, GRANULE, 0, first, 0))
    ok(d.cuMemSetAccess(span + 3 * GRANULE, GRANULE, [world.access(1)], 1))
    assert ctypes.string_at(span + 3 * GRANULE, GRANULE) == b"\7" * GRANULE
    ok(d.cuMemUnmap(span + 3 * GRANULE, GRANULE))
    ok(d.cuMemRelease(first))
    ok(d.cuMemAddressFree(span, 4 * GRANULE))
    assert int(ok(d.cuMemAddressReserve(GRANULE, 0, span, 0))) == span  # the hint, as it is free
    assert int(ok(d.cuMemAddressReserve(GRANULE, 0, span, 0))) != span
    assert ok(d.cuMemGetInfo())[0] == free
    assert [control.live(what) for what in ("handles", "mappings", "reservations")] == [0, 0, 2]


def test_mapping(fake_cuda_library: Path) -> None:
    run_child(child_vmm, fake_cuda_library, env=ENV)


def child_touch(how: str) -> None:
    world = World()
    address = world.mapped(access={"no access": None, "read only": 1, "unmapped": 3}[how])
    if how == "unmapped":
        ok(world.driver.cuMemUnmap(address, GRANULE))
    if how == "read only":
        assert ctypes.string_at(address, 1) == b"\0"
        ctypes.memset(address, 1, 1)
    ctypes.string_at(address, 1)


@pytest.mark.parametrize("how", ["no access", "read only", "unmapped"])
def test_touching_what_is_not_mapped_so_is_fatal(fake_cuda_library: Path, how: str) -> None:
    with pytest.raises(AssertionError, match=f"exited with -{int(signal.SIGSEGV)}\n"):
        run_child(child_touch, fake_cuda_library, how, env=ENV)


def child_importer(descriptor: int, address: int) -> str:
    world = World(device=1)
    d = world.driver
    handle = ok(d.cuMemImportFromShareableHandle(descriptor, d.CUmemAllocationHandleType(FD)))
    os.close(descriptor)
    assert ok(d.cuMemGetAllocationPropertiesFromHandle(handle)).location.id == 0
    at = int(ok(d.cuMemAddressReserve(GRANULE, 0, address, 0)))
    ok(d.cuMemMap(at, GRANULE, 0, handle, 0))
    ok(d.cuMemRelease(handle))
    ok(d.cuMemSetAccess(at, GRANULE, [world.access(3, device=1)], 1))
    seen = ctypes.string_at(at, 5)
    ctypes.memmove(at, b"child", 5)
    return seen.decode()


def child_exporter() -> None:
    world = World()
    d = world.driver
    at = int(ok(d.cuMemAddressReserve(GRANULE, 0, 0, 0)))
    handle = world.handle()
    ok(d.cuMemMap(at, GRANULE, 0, handle, 0))
    ok(d.cuMemSetAccess(at, GRANULE, [world.access(3)], 1))
    ctypes.memmove(at, b"hello", 5)
    descriptor = int(ok(d.cuMemExportToShareableHandle(handle, d.CUmemAllocationHandleType(FD), 0)))
    library = Path(os.environ[LIBRARY_ENV])
    assert run_child(child_importer, library, descriptor, at, pass_fds=[descriptor]) == "hello"
    assert ctypes.string_at(at, 5) == b"child"
    null = os.open("/dev/null", os.O_RDWR)
    assert code(d.cuMemImportFromShareableHandle(null, d.CUmemAllocationHandleType(FD))) == INVALID_VALUE


def test_two_processes_share_memory_by_descriptor(fake_cuda_library: Path) -> None:
    run_child(child_exporter, fake_cuda_library, env=TWO)


def child_ipc_importer(raw: str) -> str:
    world = World()
    d = world.driver
    handle = d.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), bytes.fromhex(raw), 64)
    lazy = d.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    at = int(ok(d.cuIpcOpenMemHandle(handle, lazy)))
    assert int(ok(d.cuIpcOpenMemHandle(handle, lazy))) == at  # counted
    ok(d.cuIpcCloseMemHandle(at))
    target = world.host(8)
    ok(d.cuMemcpyDtoHAsync(target, at, 5, 0))
    assert code(d.cuIpcCloseMemHandle(at)) == ILLEGAL_STATE
    ok(d.cuStreamSynchronize(0))
    ok(d.cuMemsetD8(at, ord("x"), 5))
    ok(d.cuCtxSynchronize())
    ok(d.cuIpcCloseMemHandle(at))
    assert world.control.live("imports") == 0
    return ctypes.string_at(target, 5).decode()


def child_ipc_exporter() -> None:
    world = World()
    d = world.driver
    block = world.device(100)
    ok(d.cuMemcpyHtoD(block, b"hello", 5))
    handle = ok(d.cuIpcGetMemHandle(block))
    assert code(d.cuIpcOpenMemHandle(handle, d.CUipcMem_flags(1))) == INVALID_CONTEXT  # one's own
    raw = ctypes.string_at(handle.getPtr(), 64).hex()
    assert run_child(child_ipc_importer, Path(os.environ[LIBRARY_ENV]), raw) == "hello"
    assert ctypes.string_at(block, 6) == b"xxxxx\0"
    assert code(d.cuIpcGetMemHandle(world.mapped())) == INVALID_VALUE  # not for mapped memory


def test_two_processes_share_an_allocation_by_legacy_handle(fake_cuda_library: Path) -> None:
    run_child(child_ipc_exporter, fake_cuda_library, env=ENV)


def child_peers() -> None:
    world = World()
    d, control = world.driver, world.control
    other = ok(d.cuDevicePrimaryCtxRetain(1))
    here = world.mapped()
    ok(d.cuCtxPushCurrent(other))
    there, strange = world.device(GRANULE), world.event()
    ok(d.cuMemsetD8(there, 3, GRANULE))
    ok(d.cuCtxSynchronize())
    ok(d.cuCtxPopCurrent())
    assert ok(d.cuDeviceCanAccessPeer(0, 1)) == 1
    ok(d.cuCtxEnablePeerAccess(other, 0))
    assert code(d.cuCtxEnablePeerAccess(other, 0)) == 704
    stream = world.stream()
    wrong = [d.cuMemcpyPeerAsync(here, context, there, world.context, 8, stream) for context in (world.context, other)]
    assert [code(result) for result in wrong] == [INVALID_VALUE] * 2
    ok(d.cuMemcpyPeerAsync(here, world.context, there, other, GRANULE, stream))
    ok(d.cuStreamSynchronize(stream))
    assert ctypes.string_at(here, GRANULE) == b"\3" * GRANULE
    assert code(d.cuEventRecord(strange, stream)) == INVALID_HANDLE  # of another context
    # mapped memory is reached by whom cuMemSetAccess named, peers or not
    ok(d.cuCtxPushCurrent(other))
    theirs = world.stream()
    assert code(d.cuMemcpyDtoDAsync(there, here, 8, theirs)) == INVALID_VALUE
    ok(d.cuMemSetAccess(here, GRANULE, [world.access(1, device=1)], 1))
    ok(d.cuMemcpyDtoDAsync(there, here, 8, theirs))
    ok(d.cuStreamSynchronize(theirs))
    assert len(control.violations()) == 4


def child_no_peers() -> None:
    world = World()
    d = world.driver
    assert ok(d.cuDeviceCanAccessPeer(0, 1)) == 0
    assert code(d.cuCtxEnablePeerAccess(ok(d.cuDevicePrimaryCtxRetain(1)), 0)) == 217
    assert code(d.cuMemSetAccess(world.mapped(), GRANULE, [world.access(3, device=1)], 1)) == 101


def test_peers(fake_cuda_library: Path) -> None:
    run_child(child_peers, fake_cuda_library, env=TWO)
    run_child(child_no_peers, fake_cuda_library, env=TWO | {"FAKE_CUDA_PEER": 0})


# ---- failures


def child_ordered_failures() -> None:
    world = World()  # FAKE_CUDA_FAIL=cuMemAlloc:2:2
    d, control = world.driver, world.control
    assert [code(d.cuMemAlloc(64)) for _ in range(3)] == [0, OUT_OF_MEMORY, 0]
    assert control.live("allocations") == 2
    control.fail("cuMemCreate", 0, OUT_OF_MEMORY)
    assert [code(d.cuMemCreate(GRANULE, world.properties(), 0)) for _ in range(2)] == [OUT_OF_MEMORY] * 2
    control.fail("cuMemCreate", 0, 0)
    world.handle()
    # a copy fails while it is carried out: the next call learns of it, once
    stream, source, target = world.stream(), world.host(64, b"a"), world.device(64)
    control.fail("copy", 2, 999)
    for offset in (0, 16, 32):
        ok(d.cuMemcpyHtoDAsync(target + offset, source, 16, stream))
    assert control.step(stream, 3) == 3
    assert [code(d.cuMemGetInfo()), code(d.cuMemGetInfo())] == [999, 0]
    assert ctypes.string_at(target, 48) == b"a" * 16 + bytes(16) + b"a" * 16
    # sticky: for ever, in that context and no other
    control.clear_log()
    control.fail("copy", 1, ILLEGAL_ADDRESS, sticky=True)
    ok(d.cuMemcpyHtoDAsync(target, source, 16, stream))
    assert code(d.cuStreamSynchronize(stream)) == ILLEGAL_ADDRESS
    calls = [d.cuMemFree(target), d.cuEventCreate(0), d.cuStreamQuery(stream), d.cuMemHostUnregister(source)]
    assert [code(result) for result in calls] == [ILLEGAL_ADDRESS] * 4
    names = ["cuMemcpyHtoDAsync", "cuStreamSynchronize", "cuMemFree", "cuEventCreate", "cuStreamQuery"]
    assert control.calls() == [*names, "cuMemHostUnregister"]
    assert [line for line in control.log() if line.startswith("> copy")] != []
    assert control.log()[-1].endswith(" = 700")
    ok(d.cuCtxPushCurrent(ok(d.cuDevicePrimaryCtxRetain(1))))
    ok(d.cuMemFree(world.device(64)))
    control.fail("cuStreamCreate", 1, 719, sticky=True)
    with pytest.raises(CallFailed, match="719"):
        world.stream()
    assert code(d.cuMemAlloc(64)) == 719
    assert control.violations() == []


def test_ordered_failures(fake_cuda_library: Path) -> None:
    run_child(child_ordered_failures, fake_cuda_library, env=TWO | {"FAKE_CUDA_FAIL": "cuMemAlloc:2:2"})


def child_stale_handles() -> None:
    world = World()
    d, control = world.driver, world.control
    stream, event, target = world.stream(), world.event(), world.device(64)
    ok(d.cuMemsetD8Async(target, 1, 64, stream))
    ok(d.cuEventRecord(event, stream))
    ok(d.cuStreamDestroy(stream))  # which finishes its work
    ok(d.cuEventSynchronize(event))
    assert ctypes.string_at(target, 64) == b"\1" * 64
    ok(d.cuEventDestroy(event))
    for _ in range((1 << 16) - 1):  # all the way round the table: the next is where the dead one was
        ok(d.cuEventDestroy(ok(d.cuEventCreate(2))))
    renewed = [world.stream(), world.event()]
    assert int(renewed[1]) & 0xFFFF == int(event) & 0xFFFF
    uses = [
        d.cuStreamSynchronize(stream),
        d.cuMemsetD8Async(target, 1, 64, stream),
        d.cuStreamDestroy(stream),
        d.cuEventQuery(event),
        d.cuEventDestroy(event),
        d.cuStreamWaitEvent(renewed[0], event, 0),
    ]
    assert [code(result) for result in uses] == [INVALID_HANDLE] * 6
    assert len(control.violations()) == 6
    assert code(d.cuMemFree(target + 1)) == INVALID_VALUE
    ok(d.cuMemFree(target))
    assert code(d.cuMemFree(target)) == INVALID_VALUE
    assert [control.live("streams"), control.live("events")] == [1, 1]


def test_handles_are_dead_after_their_end(fake_cuda_library: Path) -> None:
    run_child(child_stale_handles, fake_cuda_library, env=ENV)


def child_attributes() -> None:
    world = World()
    d = world.driver
    of = d.CUpointer_attribute
    block, pinned = world.device(100), world.host(4096)
    kinds = [ok(d.cuPointerGetAttribute(of.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at)) for at in (block, pinned)]
    assert [int(kind) for kind in kinds] == [2, 1]
    assert int(ok(d.cuPointerGetAttribute(of.CU_POINTER_ATTRIBUTE_RANGE_SIZE, block + 50))) == 100
    assert code(d.cuPointerGetAttribute(of.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, world.pages(10))) == INVALID_VALUE
    assert [int(value) for value in ok(d.cuMemGetAddressRange(block + 50))] == [block, 100]
    assert ok(d.cuDeviceGetAttribute(d.CUdevice_attribute(102), 0)) == 1
    text = "result = [driver.cuInit(0)[0] == 0, len(control.log())]"
    assert run_child(text, Path(os.environ[LIBRARY_ENV])) == [True, 1]


def test_attributes_and_source_text(fake_cuda_library: Path) -> None:
    run_child(child_attributes, fake_cuda_library, env=ENV)


# ---- the harness


def test_a_child_that_fails_says_why(fake_cuda_library: Path) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_child("1 / 0", fake_cuda_library)


def test_build_is_kept_and_says_if_it_cannot(
    fake_cuda_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build(fake_cuda_library.parents[1]) == fake_cuda_library
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert build(fake_cuda_library.parents[1]) == fake_cuda_library
    with pytest.raises(NoCompiler):
        build(tmp_path)
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(subprocess.CalledProcessError):
        build(tmp_path)
