"""What a runtime maps of a CUDA device's pool, over the fake driver: the executor's device in one process, the
runtime's mapping in the other.
"""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_child import cuda_server, in_child, in_children
from device_suite import MIB, content
from fake_cuda.harness import Control, ok

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.memory.pools.protocol import Mapping
from dormouse.core.evidence import Evidence
from dormouse.gpuserver.device.cuda import driver
from dormouse.gpuserver.device.cuda.device import CudaDevice
from dormouse.gpuserver.device.protocol import DeviceError
from dormouse.gpuserver.executor.compute import Compute
from dormouse.gpuserver.executor.orders import Orders
from dormouse.gpuserver.runtime.cuda_mapping import CudaMapping, kernel_cache
from dormouse.schemas import messages as m
from dormouse.schemas.errors import DormouseError

__all__ = ["cuda_server"]

G = 2 * MIB
AT = 10 * MIB  # where the granules are mapped
WAIT_S = 60.0  # for the other process, which may have failed
READ, BOTH = 1, 3  # CU_MEM_ACCESS_FLAGS_PROT_READ, _READWRITE


def opened(pool: str = "pages") -> CudaDevice:
    """Sixteen granules."""
    device = CudaDevice(0, memory_nbytes=48 * MIB, activation_nbytes=16 * MIB, pool=pool)
    device.attach_thread()
    return device


def granule(number: int) -> m.GranuleAt:
    return m.GranuleAt(offset=AT + number * G, physical=number * G, nbytes=G)


def access(mapping: CudaMapping, number: int) -> int:
    """What the driver lets the GPU do there."""
    cu: Any = driver.cu
    location = cu.CUmemLocation()
    location.type, location.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    return int(ok(cu.cuMemGetAccess(location, mapping._base + AT + number * G)))


def first_byte(mapping: CudaMapping, number: int) -> torch.Tensor:
    return mapping.tensor(AT + number * G, 1, torch.uint8)


def give(device: CudaDevice, sock: socket.socket, numbers: list[int]) -> None:
    fds = [device.granule(number * G, writable=False) for number in numbers]
    socket.send_fds(sock, [b"granules"], fds)
    for fd in fds:
        os.close(fd)


def take(mapping: CudaMapping, sock: socket.socket, numbers: list[int], writable: bool) -> None:
    _, fds, _, _ = socket.recv_fds(sock, 100, 16)
    try:
        mapping.map([granule(number) for number in numbers], fds, writable)
    finally:
        for fd in fds:
            os.close(fd)


@in_children()
def test_granules_are_seen_at_the_pool_s_offsets(control: Control, sock: socket.socket, first: bool) -> None:
    """Weights to read, KV to read and write; what one process writes there, the other has."""
    sock.settimeout(WAIT_S)
    if first:
        device = opened()
        device.remap([], [Mapping(AT + number * G, number, G) for number in range(3)])
        for number in range(3):
            driver.fill(device._memory.base + AT + number * G, number + 1, G, device._compute)
        device.synchronize()
        sock.send(device.address_nbytes.to_bytes(8, "little"))
        give(device, sock, [0, 2])
        give(device, sock, [1])
        assert sock.recv(10) == b"written"
        assert content(device, AT + G, G) == bytes([9]) + bytes([2]) * (G - 1)
        assert content(device, AT, 1) == b"\1"
        device.close()
        return
    mapping = CudaMapping(0, int.from_bytes(sock.recv(8), "little"), 16 * MIB)
    take(mapping, sock, [0, 2], writable=False)
    take(mapping, sock, [1], writable=True)
    assert [int(first_byte(mapping, number).item()) for number in range(3)] == [1, 2, 3]
    assert [access(mapping, number) for number in range(3)] == [READ, BOTH, READ]
    first_byte(mapping, 1).fill_(9)
    mapping.settle()
    sock.send(b"written")
    mapping.keep_written([(AT, G)])  # of KV nothing: weights stay
    assert control.live("mappings") == 2
    mapping.clear()
    assert (control.live("mappings"), control.live("handles")) == (0, 0)


@in_children()
def test_nothing_is_unmapped_under_a_kernel(control: Control, sock: socket.socket, first: bool) -> None:
    """The driver would not wait; the fake calls it a violation, which ends the test."""
    sock.settimeout(WAIT_S)
    if first:
        device = opened()
        device.remap([], [Mapping(AT, 0, G)])
        give(device, sock, [0])
        give(device, sock, [0])
        assert sock.recv(10) == b"done"
        device.close()
        return
    mapping = CudaMapping(0, 1 << 40, 16 * MIB)
    stream = driver.create_stream()
    take(mapping, sock, [0], writable=True)
    results = [control.kernel_sum(stream, mapping._base + AT, G)]
    mapping.keep_written([])
    take(mapping, sock, [0], writable=False)
    results.append(control.kernel_sum(stream, mapping._base + AT, G))
    mapping.clear()
    assert all(each.value != 2**64 - 1 for each in results), "the kernels have run"
    driver.destroy_stream(stream)
    sock.send(b"done")


@in_children()
def test_what_a_driver_only_grants_for_both_is_granted(control: Control, sock: socket.socket, first: bool) -> None:
    sock.settimeout(WAIT_S)
    if first:
        device = opened()
        give(device, sock, [0])
        assert sock.recv(10) == b"done"
        device.close()
        return
    mapping = CudaMapping(0, 1 << 40, 16 * MIB)
    control.fail("cuMemSetAccess", 1, 801)
    take(mapping, sock, [0], writable=False)
    assert access(mapping, 0) == BOTH
    mapping.clear()
    sock.send(b"done")


@in_child()
def test_what_is_no_granule_is_refused(control: Control) -> None:
    mapping = CudaMapping(0, 1 << 40, 16 * MIB)
    fd = os.memfd_create("anything")
    os.ftruncate(fd, G)
    with pytest.raises(DeviceError, match="cuMemImportFromShareableHandle"):
        mapping.map([granule(0)], [fd], writable=False)
    for offset in (-G, (1 << 40) - MIB):
        with pytest.raises(DormouseError, match="outside of the pool"):
            mapping.map([m.GranuleAt(offset=offset, physical=0, nbytes=G)], [fd], writable=False)
        with pytest.raises(ValueError, match="outside of the pool"):
            mapping.tensor(offset, G, torch.uint8)
    assert (control.live("mappings"), control.live("handles")) == (0, 0)


@in_child()
def test_a_device_gives_whole_granules_of_pages_only(control: Control) -> None:
    device = opened()
    for physical in (-G, MIB, 16 * G):
        with pytest.raises(DeviceError, match=f"no granule begins at {physical}"):
            device.granule(physical, writable=False)
    device.close()
    device = opened("regions")
    with pytest.raises(DeviceError, match=r"\[gpu\] pool = 'pages' on CUDA devices, not 'regions'"):
        device.granule(0, writable=False)
    device.close()


@in_child()
def test_a_seat_is_told_of_when_the_device_has_done_what_was_planned_for_it(control: Control) -> None:
    """Memory is cleared on the executor's stream; a runtime's context is not ordered after that."""
    device, told = opened(), []
    compute = Compute(
        device, Orders(), lambda event: told.append((event, control.pending(device._compute))), Evidence()
    )
    device.remap([], [Mapping(AT, 0, G, clear=True)])
    driver.fill(device._memory.base + AT, 1, G, device._compute)
    assert control.pending(device._compute) > 0
    compute.carry_out(o.Mark(1, [3]))
    assert told == [(e.Marked(1, [3]), 0)]
    device.close()


def test_kernels_are_kept_where_nobody_else_can_put_any(tmp_path: Path) -> None:
    """Else another user could have this one's runtime compute anything."""
    own = tmp_path / f"dormouse-kernels-{os.getuid()}"
    assert kernel_cache(tmp_path) == kernel_cache(tmp_path) == own
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o770)
    open_to_a_group = kernel_cache(tmp_path)
    own.rmdir()
    (tmp_path / "elsewhere").mkdir(0o700)
    own.symlink_to(tmp_path / "elsewhere")
    behind_a_link = kernel_cache(tmp_path)
    assert own not in (open_to_a_group, behind_a_link)
    assert {each.stat().st_mode & 0o777 for each in (open_to_a_group, behind_a_link)} == {0o700}
