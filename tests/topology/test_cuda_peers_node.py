"""GPU-to-GPU copies between real executors that drive CudaDevice, over the fake driver with two GPUs."""

import os
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
from engine_suite import loaded
from fake_cuda.build import NoCompiler, build

from dormouse.core.paths import StatePaths
from dormouse.schemas import messages as m

Kit: TypeAlias = Any

NUMEL: Final = 3 << 18  # one and a half granules, so that segments lie in several
NBYTES: Final = 4 * NUMEL
STORAGES: Final = (1, 2, 3)


def floats(value: float) -> bytes:
    return struct.pack("<f", value) * NUMEL


def model(value: float) -> dict[int, bytes]:
    return {storage: floats(100 * value + storage) for storage in STORAGES}


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kit]:
    """A store and two executors; the parameter is the kind of pool, and whether the GPUs reach each other."""
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda.bindings.driver: make setup")
    try:
        library = build(Path(tempfile.gettempdir()) / f"dormouse-fake-cuda-{os.getuid()}")
    except NoCompiler as error:
        pytest.skip(str(error))
    pool, reach = request.param
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(2 << 30))
    monkeypatch.setenv("FAKE_CUDA_PEER", str(int(reach)))
    kit = loaded(Path(__file__).with_name("conftest.py")).Kit(
        device="cuda", memory="1200MiB", activations="16MiB", pool=pool
    )  # more granules than one packet takes
    yield kit
    assert kit.stop() == []


def log(kit: Kit, gpu: int) -> str:
    return StatePaths(kit.config.state_directory).role_log(f"gpu{gpu}").read_text()


def until_logged(kit: Kit, gpu: int, event: str) -> None:
    end_s = time.monotonic() + 60
    while event not in log(kit, gpu):
        assert time.monotonic() < end_s, log(kit, gpu)
        time.sleep(0.02)


async def request(kit: Kit, instance: Any, gpu: int, version: int, peers: tuple[int, ...], value: float) -> int:
    """A lease that reads all of a model, none of which is there; bytes that came from other GPUs."""
    lease = kit.wake(instance, gpu, version, peers=peers)
    instance.define(lease, NUMEL)
    for storage in STORAGES:
        assert await instance.download(lease, storage, NBYTES) == floats(100 * value + storage)
    await instance.end(lease, wait=False)
    done: m.Done = await kit.done(lease)
    assert (done.outcome, done.copied_nbytes) == ("ended", 3 * NBYTES)
    assert done.peers == (list(peers) if done.peer_nbytes else [])
    return done.peer_nbytes


def both(kit: Kit, value: float) -> int:
    """A new model on GPU 0, then on GPU 1; bytes that came from GPU 0."""
    instance = kit.instance(f"i{value:g}")

    async def scenario() -> int:
        version = await instance.upload(model(value))
        assert await request(kit, instance, 0, version, (), value) == 0
        return await request(kit, instance, 1, version, (0,), value)

    taken: int = kit.run(scenario())
    kit.forget(instance)
    return taken


@pytest.mark.parametrize("gpus", [("regions", True), ("pages", True), ("buddy", True)], indirect=True)
def test_a_model_comes_from_the_gpu_that_has_it(gpus: Kit) -> None:
    attempts = (float(number) for number in range(1, 20))  # until they have met
    assert next(taken for value in attempts if (taken := both(gpus, value))) == 3 * NBYTES
    assert both(gpus, 50.0) == 3 * NBYTES  # over the same memory again
    assert "warning" not in log(gpus, 1)


@pytest.mark.parametrize("gpus", [("regions", False), ("pages", False)], indirect=True)
def test_gpus_that_do_not_reach_each_other_take_the_host(gpus: Kit) -> None:
    until_logged(gpus, 1, "device_trouble")
    assert "GPU 1 cannot read from GPU 0: no peer access between them" in log(gpus, 1)
    assert both(gpus, 1.0) == 0


@pytest.mark.parametrize("gpus", [("pages", True)], indirect=True)
def test_a_peer_that_died_is_passed_over_and_its_successor_is_read(gpus: Kit) -> None:
    attempts = (float(number) for number in range(1, 20))
    assert next(taken for value in attempts if (taken := both(gpus, value))) == 3 * NBYTES
    instance = gpus.instance("survivor")

    async def scenario() -> None:
        version = await instance.upload(model(30.0))
        await request(gpus, instance, 0, version, (), 30.0)
        await gpus.kill("gpu0")
        assert await request(gpus, instance, 1, version, (0,), 30.0) == 0
        await gpus.restart("gpu0")

    gpus.run(scenario())
    gpus.forget(instance)
    attempts = (float(number) for number in range(51, 70))
    assert next(taken for value in attempts if (taken := both(gpus, value))) == 3 * NBYTES
