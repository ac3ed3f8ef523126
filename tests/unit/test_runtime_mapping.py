"""What a runtime gets of the pool's memory, tried by an attacker inside it."""

import ctypes
import faulthandler
import mmap
import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from dormouse.core.decisions.memory.pools.protocol import Mapping
from dormouse.gpuserver.device.host.device import HostDevice
from dormouse.gpuserver.runtime.mapping import HostMapping
from dormouse.schemas import messages as m
from dormouse.schemas.errors import DormouseError

MIB = 1 << 20
STRANGER = 61_234
"""A uid that owns nothing here."""


@pytest.fixture
def device() -> Iterator[HostDevice]:
    made = HostDevice(16 * MIB, pool="pages")
    made.remap([], [Mapping(2 * MIB * number, number, 2 * MIB) for number in range(2)])
    for number in range(2):
        ctypes.memset(made.storage(2 * MIB * number, 1).data_ptr(), number + 1, 2 * MIB)
    yield made
    made.close()


def granule(number: int) -> m.GranuleAt:
    return m.GranuleAt(offset=2 * MIB * number, physical=2 * MIB * number, nbytes=2 * MIB)


def in_a_child(act: Callable[[], int]) -> int:
    """Exit status of a process that does it; negative is a signal."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        faulthandler.disable()
        status = 99
        try:
            status = act()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def mapped(device: HostDevice, number: int, writable: bool) -> HostMapping:
    mapping = HostMapping(device.address_nbytes)
    fd = device.granule(2 * MIB * number, writable)
    try:
        mapping.map([granule(number)], [fd], writable)
    finally:
        os.close(fd)
    return mapping


def first_byte(mapping: HostMapping, number: int) -> torch.Tensor:
    return mapping.tensor(2 * MIB * number, 1, torch.uint8)


def test_what_is_given_can_be_read_and_kv_written(device: HostDevice) -> None:
    assert first_byte(mapped(device, 0, writable=False), 0).item() == 1
    first_byte(mapped(device, 1, writable=True), 1).fill_(9)
    assert ctypes.string_at(device.storage(2 * MIB, 1).data_ptr(), 1) == b"\x09"


def test_another_granule_that_is_given_at_the_same_place_is_what_is_read_there(device: HostDevice) -> None:
    mapping = mapped(device, 0, writable=False)
    fd = device.granule(2 * MIB, writable=False)
    mapping.map([m.GranuleAt(offset=0, physical=2 * MIB, nbytes=2 * MIB)], [fd], writable=False)
    os.close(fd)
    assert first_byte(mapping, 0).item() == 2


def test_a_write_to_weights_ends_the_writer_and_changes_nothing(device: HostDevice) -> None:
    def act() -> int:
        first_byte(mapped(device, 0, writable=False), 0).fill_(9)
        return 0

    assert in_a_child(act) == -signal.SIGSEGV
    assert ctypes.string_at(device.storage(0, 1).data_ptr(), 1) == b"\x01"


def test_neighbours_and_what_was_given_back_cannot_be_read(device: HostDevice) -> None:
    assert in_a_child(lambda: int(first_byte(mapped(device, 0, writable=False), 1).item())) == -signal.SIGSEGV

    def given_back() -> int:
        mapping = mapped(device, 0, writable=False)
        mapping.clear()
        return int(first_byte(mapping, 0).item())

    assert in_a_child(given_back) == -signal.SIGSEGV


def test_kv_that_was_returned_cannot_be_written(device: HostDevice) -> None:
    """Also not where a piece that is kept lies in the same granule's neighbour."""

    def returned() -> int:
        mapping = mapped(device, 0, writable=True)
        fd = device.granule(2 * MIB, writable=True)
        mapping.map([granule(1)], [fd], writable=True)
        mapping.keep_written([(2 * MIB + 512, 512)])
        first_byte(mapping, 1).fill_(7)  # kept
        first_byte(mapping, 0).fill_(7)
        return 0

    assert in_a_child(returned) == -signal.SIGSEGV
    assert ctypes.string_at(device.storage(0, 1).data_ptr(), 1) == b"\x01"
    assert ctypes.string_at(device.storage(2 * MIB, 1).data_ptr(), 1) == b"\x07"


def test_a_descriptor_for_reading_gives_no_writing(device: HostDevice) -> None:
    fd = device.granule(0, writable=False)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 2 * MIB, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_another_user_cannot_open_it_anew(device: HostDevice) -> None:
    fd = device.granule(0, writable=False)

    def act() -> int:
        os.setgroups([])
        os.setresgid(STRANGER, STRANGER, STRANGER)
        os.setresuid(STRANGER, STRANGER, STRANGER)
        try:
            os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        except PermissionError:
            return 7
        return 0

    assert in_a_child(act) == 7
    os.close(fd)


@pytest.mark.parametrize("offset", [-4096, 1 << 60])
def test_nothing_is_mapped_outside_of_the_address_space(device: HostDevice, offset: int) -> None:
    mapping = HostMapping(device.address_nbytes)
    fd = device.granule(0, writable=False)
    with pytest.raises(DormouseError, match="outside of the pool"):
        mapping.map([m.GranuleAt(offset=offset, physical=0, nbytes=2 * MIB)], [fd], writable=False)
    os.close(fd)
    with pytest.raises(ValueError, match="outside"):
        mapping.tensor(offset, 8, torch.float32)
