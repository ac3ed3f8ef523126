"""Pools that other executors read: exported, imported and read in two processes that share a GPU or have one each."""

import os
import resource
import socket

import pytest
import torch
from cuda_child import cuda_server, in_child, in_children
from device_suite import MIB, content, pattern, tensor
from fake_cuda.harness import Control

from dormouse.core.decisions.memory.pools.protocol import Mapping
from dormouse.core.decisions.memory.transfer import Copy, Kind, peer
from dormouse.gpuserver.device.cuda import driver
from dormouse.gpuserver.device.cuda.device import CudaDevice
from dormouse.gpuserver.device.protocol import DeviceError

__all__ = ["cuda_server"]

G = 2 * MIB
NBYTES = 64 * MIB
TRIAL = ("cuMemcpyDtoDAsync", 1)  # what is mapped can still be refused to copies
READ = 1  # CU_MEM_ACCESS_FLAGS_PROT_READ
UNDOCUMENTED = (201, 401, 999)  # what drivers have answered where a feature was not to be had
MAX_FDS = 250  # in one packet: the kernel's SCM_MAX_FD is 253


def opened(ordinal: int, pool: str) -> CudaDevice:
    device = CudaDevice(
        ordinal, memory_nbytes=NBYTES + 16 * MIB, activation_nbytes=16 * MIB, pool=pool, chunk_nbytes=MIB
    )
    device.attach_thread()
    return device


def give(device: CudaDevice, sock: socket.socket) -> None:
    handle, descriptors = device.export()
    assert len(descriptors) <= MAX_FDS
    socket.send_fds(sock, [handle], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


def take(device: CudaDevice, gpu: int, sock: socket.socket) -> None:
    handle, descriptors, _, _ = socket.recv_fds(sock, 1024, MAX_FDS)
    device.map_peer(gpu, NBYTES, handle, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


def share(control: Control, sock: socket.socket, first: bool, pool: str, reader: int) -> None:
    """The first has bytes, the second reads them, and later ones, and again after a new import of the same pool."""
    if first:
        device = opened(0, pool)
        if pool == "pages":
            device.remap([], [Mapping(0, 3, G), Mapping(G, 2, G)])
        tensor(device, 0, 2 * G).copy_(tensor_of(pattern(2 * G)))
        give(device, sock)
        assert sock.recv(10) == b"read"
        tensor(device, 0, 2 * G).fill_(4)
        sock.send(b"changed")
        assert sock.recv(10) == b"again"
        give(device, sock)
        assert sock.recv(10) == b"done"
        device.close()
        return
    device = opened(reader, pool)
    assert device.bandwidth(Kind.PEER) == 0
    if pool == "pages":
        device.remap([], [Mapping(0, 0, G), Mapping(G, 1, G)])
    take(device, 7, sock)
    assert device.bandwidth(Kind.PEER) > 0
    if pool == "pages":
        granted = [line for line in control.log() if line.startswith("cuMemSetAccess(")][-1]
        assert f", {NBYTES}, 1: {READ} on device {reader})" in granted  # nobody else writes a pool
    extents = [(3 * G, 0), (2 * G, G)] if pool == "pages" else [(0, 0), (G, G)]
    copies = [Copy(peer(7), at, to, G) for at, to in extents]
    job = device.copy_in(copies, lambda: None)
    for event in job.events:
        device.wait(event)
    assert content(device, 0, 2 * G) == pattern(2 * G)
    sock.send(b"read")
    assert sock.recv(10) == b"changed"
    job = device.copy_in(copies[:1], lambda: None)
    sock.send(b"again")
    take(device, 7, sock)  # what that number had goes after the copies that read it
    device.wait(job.events[0])
    assert content(device, 0, 2 * G) == b"\4" * G + pattern(2 * G)[G:]
    with pytest.raises(ValueError, match="outside peer 7 of 67108864 bytes"):
        device.copy_in([Copy(peer(7), NBYTES - 1, 0, 2)], lambda: None)
    job = device.copy_in(copies, lambda: None)
    device.drop_peer(7)
    with pytest.raises(DeviceError, match="peer 7 is not mapped"):
        device.copy_in(copies, lambda: None)
    job.join()
    assert control.live("imports") == 0
    sock.send(b"done")
    device.close()
    assert control.live("mappings") == control.live("handles") == control.live("reservations") == 0


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@in_children()
def test_two_processes_share_an_allocation(control: Control, sock: socket.socket, first: bool) -> None:
    share(control, sock, first, "regions", 0)


@in_children()
def test_two_processes_share_granules(control: Control, sock: socket.socket, first: bool) -> None:
    share(control, sock, first, "pages", 0)


@in_children(FAKE_CUDA_DEVICES=2)
def test_another_gpu_reads_an_allocation(control: Control, sock: socket.socket, first: bool) -> None:
    share(control, sock, first, "regions", 1)


@in_children(FAKE_CUDA_DEVICES=2)
def test_another_gpu_reads_granules(control: Control, sock: socket.socket, first: bool) -> None:
    share(control, sock, first, "pages", 1)


@in_children(FAKE_CUDA_DEVICES=2, FAKE_CUDA_PEER=0)
def test_a_gpu_that_cannot_be_reached_is_refused(control: Control, sock: socket.socket, first: bool) -> None:
    device = opened(0 if first else 1, "pages")
    if first:
        give(device, sock)
    else:
        with pytest.raises(DeviceError, match="GPU 1 cannot read from GPU 0"):
            take(device, 0, sock)
    sock.send(b"done")
    sock.recv(10)
    device.close()


@in_children()
def test_an_import_that_fails_leaves_nothing(control: Control, sock: socket.socket, first: bool) -> None:
    device = opened(0, "pages")
    if first:
        give(device, sock)
    else:
        handle, descriptors, _, _ = socket.recv_fds(sock, 1024, MAX_FDS)
        before = {word: control.live(word) for word in ("handles", "mappings", "reservations")}
        for function, nth in (("cuMemImportFromShareableHandle", 3), ("cuMemMap", 5), ("cuMemSetAccess", 0), TRIAL):
            for code in (driver.OUT_OF_MEMORY, *(() if function == TRIAL[0] else UNDOCUMENTED)):
                control.fail(function, nth, code)
                with pytest.raises(DeviceError, match=rf"{function}.*\({code}\)"):
                    device.map_peer(0, NBYTES, handle, descriptors)
                control.fail(function, 0, 0)
                assert {word: control.live(word) for word in before} == before
        for wrong, nbytes in ((handle, NBYTES - G), (handle[:-1], NBYTES), (handle[:16], NBYTES)):
            with pytest.raises(DeviceError, match="not an exported pool"):
                device.map_peer(0, nbytes, wrong, descriptors)
        with pytest.raises(DeviceError, match="not visible"):
            device.map_peer(0, NBYTES, bytes(80), [])
        with pytest.raises(DeviceError, match="IPC handle of 3 bytes"):
            device.map_peer(0, NBYTES, handle[:16] + b"abc", [])
        with pytest.raises(DeviceError, match="cuIpcOpenMemHandle"):
            device.map_peer(0, NBYTES, handle[:16] + bytes(64), [])
        for code in UNDOCUMENTED:
            control.fail("cuIpcOpenMemHandle", 1, code)
            with pytest.raises(DeviceError, match=rf"cuIpcOpenMemHandle.*\({code}\)"):
                device.map_peer(0, NBYTES, handle[:16] + bytes(64), [])
        control.fail("cuMemSetAccess", 1, UNDOCUMENTED[0])  # to read only: it is granted to write, too
        device.map_peer(0, NBYTES, handle, descriptors)
        device.synchronize()  # it goes on
    sock.send(b"done")
    sock.recv(10)
    device.close()


@in_child()
def test_an_export_that_fails_leaves_no_descriptor(control: Control) -> None:
    device = opened(0, "pages")
    before = len(os.listdir("/proc/self/fd"))
    control.fail("cuMemExportToShareableHandle", 5, driver.NOT_SUPPORTED)
    with pytest.raises(DeviceError, match="cuMemExportToShareableHandle"):
        device.export()
    assert len(os.listdir("/proc/self/fd")) == before
    device.close()


@in_child()
def test_descriptors_are_allowed_or_the_export_is_refused(control: Control) -> None:
    """The limit is looked at first: what a driver answers when it meets that is anybody's guess."""
    device = opened(0, "pages")
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 600))
    handle, descriptors = device.export()
    assert handle
    assert len(descriptors) == 32
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 544
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 100))
    with pytest.raises(DeviceError, match="544 open files are more than"):
        device.export()
    device.close()
