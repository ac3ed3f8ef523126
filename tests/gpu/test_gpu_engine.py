"""The engine's own tests on a real GPU, in every kind of pool."""

from typing import Any

import pytest
from engine_suite import MIB, TOTALS, cases, engine_tests
from gpu_marks import NEEDS_GPU

from dormouse.gpuserver.device.protocol import DeviceLost

pytestmark = NEEDS_GPU
ACTIVATIONS_NBYTES = 256 * MIB  # cuBLAS takes 32 MiB for each stream, and a test that fails leaves its own
CASES = [
    pytest.param(pool, test, rest, id="-".join([pool, name, *map(str, rest)]))
    for pool in TOTALS
    for name, test, rest in cases(engine_tests(), pool)
]


@pytest.mark.parametrize(("pool", "test", "rest"), CASES)
def test_engine(pool: str, test: Any, rest: list[Any]) -> None:
    from dormouse.gpuserver.device.cuda import driver
    from dormouse.gpuserver.device.cuda.device import CudaDevice

    tests, lost = engine_tests(), list[DeviceLost]()
    device = CudaDevice(
        0,
        memory_nbytes=TOTALS[pool] + ACTIVATIONS_NBYTES,
        activation_nbytes=ACTIVATIONS_NBYTES,
        pool=pool,
        poison=True,
        chunk_nbytes=MIB,
    )
    device.on_lost = lost.append
    device.attach_thread()
    world = tests.World(pool, device=device)
    test(world, *rest)
    tests.close(world)
    stats = world.engine.residency.stats(0)
    left = (world.leases.machine.leases, world.raised, stats.segments, stats.weights_nbytes + stats.lost_nbytes)
    assert left == ({}, [], 0, 0)
    assert (lost, driver.lost()) == ([], None)
