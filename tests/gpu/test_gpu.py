"""The suite of tests/device_suite.py on a real GPU, and what only one can show: kernels, two processes, a lost context.

`make gpu` runs it; it asks for a torch with CUDA. Skipped with the reason where there is none.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from device_suite import MIB, SUITE, carry_out, tensor, with_slab
from gpu_marks import FAKE, NEEDS_GPU
from pool_costs import place

from dormouse.core.decisions.memory.pools.protocol import Mapping
from dormouse.core.decisions.memory.transfer import Copy, slab
from dormouse.gpuserver.device.protocol import Device

pytestmark = NEEDS_GPU

GRANULE = 2 * MIB

READER = """
import sys
from device_suite import MIB, content
from dormouse.gpuserver.device.cuda.device import CudaDevice
from dormouse.core.decisions.memory.transfer import Copy, peer
import os, socket
sock = socket.socket(fileno=int(sys.argv[1]))
nbytes = int(sys.argv[2])
handle, descriptors, _, _ = socket.recv_fds(sock, 1024, 250)
device = CudaDevice(0, memory_nbytes=128 * MIB, activation_nbytes=64 * MIB)
device.attach_thread()
device.map_peer(1, nbytes, handle, descriptors)
job = device.copy_in([Copy(peer(1), 0, 0, 4 * MIB)], lambda: None)
device.wait(job.events[0])
assert content(device, 0, 4 * MIB) == bytes([7]) * (4 * MIB)
job.join()
device.close()
print("read")
"""

CONFINED = """
import torch
from device_suite import MIB
from dormouse.gpuserver.runtime import zygote
from dormouse.gpuserver.runtime.cuda_mapping import CudaMapping
zygote.confine(70_000, driver=True)
mapping = CudaMapping(0, 64 * MIB, 64 * MIB)
print(int(torch.ones(MIB, dtype=torch.int32, device=mapping.device).sum()))
"""

LOST = """
from device_suite import MIB
from dormouse.gpuserver.device.cuda.device import CudaDevice
from dormouse.gpuserver.device.protocol import DeviceLost
import torch
device = CudaDevice(0, memory_nbytes=128 * MIB, activation_nbytes=64 * MIB)
device.attach_thread()
wild = torch._C._construct_storage_from_data_pointer(1 << 20, device.torch_device, MIB)
torch.empty(0, dtype=torch.uint8, device=device.torch_device).set_(wild, 0, (MIB,)).fill_(1)
for call in (device.synchronize, device.record, device.export):
    try:
        call()
    except DeviceLost as error:
        print("lost:", error)
    else:
        raise AssertionError("it went on")
"""


def opened(pool: str) -> Device:
    from dormouse.gpuserver.device.cuda.device import CudaDevice

    device = CudaDevice(0, memory_nbytes=576 * MIB, activation_nbytes=64 * MIB, pool=pool, poison=True)
    device.attach_thread()
    return device


@pytest.fixture(params=["regions", "pages", "buddy"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = opened(request.param)
    yield device
    device.close()


@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
def test_suite(device: Device, check: Callable[[Device], None]) -> None:
    check(device)


def test_torch_computes_on_our_stream_in_our_memory(device: Device) -> None:
    plan = place(device.make_pool(), [(1, 8 * MIB), (2, 4 * MIB)], cost=float)
    carry_out(device, plan)
    memory = with_slab(device)
    weights = torch.randn(1024, 1024)
    memory.view[: 4 * MIB] = bytes(weights.numpy().tobytes())
    job = device.copy_in([Copy(slab(0), 0, plan.placed[1], 4 * MIB)], lambda: None)
    device.wait(job.events[0])
    there = tensor(device, plan.placed[1], 4 * MIB).view(torch.float32).view(1024, 1024)
    data = torch.randn(16, 1024)
    result = (data.to(device.torch_device) @ there).cpu()
    torch.testing.assert_close(result, data @ weights, rtol=1e-3, atol=1e-2)  # TF32 is not on by default
    assert device.contains(there.data_ptr(), 4 * MIB)


def test_a_view_stays_right_when_its_memory_is_mapped_again() -> None:
    device = opened("pages")
    small = 576 * MIB // (64 * MIB)  # behind all that can be large
    first = Mapping(0, small, GRANULE)
    device.remap([], [first])
    view = tensor(device, 0, GRANULE)
    view.fill_(1)
    device.remap([first], [])
    device.remap([], [Mapping(0, small + 1, GRANULE, True)])
    assert int(view.sum().cpu()) == 0
    view.fill_(2)
    assert int(view.sum().cpu()) == 2 * GRANULE
    device.close()


@pytest.mark.parametrize("pool", ["regions", "pages"])
def test_another_process_reads_the_pool(pool: str) -> None:
    import socket

    from dormouse.gpuserver.device.cuda.device import CudaDevice

    device = CudaDevice(0, memory_nbytes=192 * MIB, activation_nbytes=64 * MIB, pool=pool)
    device.attach_thread()
    if pool == "pages":
        device.remap([], [Mapping(0, 0, 64 * MIB)])
    tensor(device, 0, 4 * MIB).fill_(7)
    device.synchronize()
    handle, descriptors = device.export()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(ours, [handle], descriptors)
        done = subprocess.run(
            [sys.executable, "-c", READER, str(theirs.fileno()), str(device.pool_nbytes)],
            pass_fds=[theirs.fileno()],
            cwd="tests",
            capture_output=True,
            text=True,
        )
    for descriptor in descriptors:
        os.close(descriptor)
    assert done.stdout.strip() == "read", done.stderr
    device.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_runtime_computes_after_it_gave_up_its_rights() -> None:
    done = subprocess.run([sys.executable, "-c", CONFINED], cwd="tests", capture_output=True, text=True)
    assert done.stdout.strip() == str(MIB), done.stderr


@pytest.mark.skipif(FAKE, reason="needs a GPU: the CPU ends a process that does that")
def test_a_wild_access_loses_the_device() -> None:
    done = subprocess.run([sys.executable, "-c", LOST], cwd="tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("lost:") == 3
