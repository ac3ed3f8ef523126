"""The suite that every device passes, on CudaDevice over the fake driver, which does nothing that is not waited for and
holds the pages of what is pinned.
"""

from cuda_child import cuda_server, in_child
from device_suite import MIB, SUITE
from fake_cuda.harness import Control

from dormouse.gpuserver.device.cuda.device import CudaDevice

__all__ = ["cuda_server"]

WORDS = ("streams", "handles", "mappings", "reservations", "allocations", "registrations", "host_allocations")
"""Of which nothing may be left."""


def run(control: Control, pool: str, nbytes: int = 64 * MIB, chunk_nbytes: int = 4 * MIB) -> None:
    for check in SUITE:
        device = CudaDevice(
            0,
            memory_nbytes=nbytes + 32 * MIB,
            activation_nbytes=32 * MIB,
            pool=pool,
            poison=True,
            chunk_nbytes=chunk_nbytes,
        )
        device.attach_thread()
        check(device)
        device.close()
        assert {word: control.live(word) for word in WORDS} == dict.fromkeys(WORDS, 0), check.__name__
        assert control.violations() == [], check.__name__


@in_child(FAKE_CUDA_PINS=1)
def test_regions(control: Control) -> None:
    run(control, "regions")


@in_child(FAKE_CUDA_PINS=1)
def test_pages(control: Control) -> None:
    run(control, "pages")


@in_child(FAKE_CUDA_PINS=1)
def test_buddy(control: Control) -> None:
    run(control, "buddy", nbytes=256 * MIB)


@in_child(FAKE_CUDA_MODE="late")
def test_copies_that_take_time(control: Control) -> None:
    run(control, "regions", chunk_nbytes=MIB)
