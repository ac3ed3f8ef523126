"""The engine's own tests on a real GPU, in every kind of pool."""

from typing import Any

import pytest
import torch
from engine_suite import MIB, TOTALS, cases, engine_tests

from dormouse.gpuserver.cuda.probe import probe

FOUND = probe()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not FOUND.gpus, reason=f"no GPU here: {FOUND.reason}"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} cannot use CUDA"),
]
CASES = [
    pytest.param(pool, test, rest, id="-".join([pool, name, *map(str, rest)]))
    for pool in TOTALS
    for name, test, rest in cases(engine_tests(), pool)
]


@pytest.mark.parametrize(("pool", "test", "rest"), CASES)
def test_engine(pool: str, test: Any, rest: list[Any]) -> None:
    from dormouse.gpuserver.cuda.device import CudaDevice

    tests = engine_tests()
    device = CudaDevice(
        0,
        memory_nbytes=TOTALS[pool] + 64 * MIB,
        activation_nbytes=64 * MIB,
        pool=pool,
        poison=True,
        chunk_nbytes=MIB,
    )
    device.attach_thread()
    world = tests.World(pool, device=device)
    test(world, *rest)
    tests.close(world)
