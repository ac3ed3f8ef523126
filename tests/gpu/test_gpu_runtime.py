"""What only a real GPU can show of a runtime's process: that its rights are enough for CUDA and Triton, and what
becomes of one that writes to weights that it may only read. Each is a process of its own: a context can be lost.
"""

import os
import socket
import subprocess
import sys

import pytest
import torch
from device_suite import MIB, content
from gpu_marks import FAKE, NEEDS_GPU

from dormouse.core.decisions.memory.pools.protocol import Mapping

pytestmark = NEEDS_GPU

G = 2 * MIB
AT = 10 * MIB
UID = 93_999 if os.getuid() == 0 else os.getuid()

RIGHTS = """
import os, sys
from dormouse.core.sandbox import linux, seccomp
from dormouse.gpuserver.runtime import zygote
zygote.import_for_cuda()
import torch
fake, uid, given_up = sys.argv[1] == "True", int(sys.argv[2]), sys.argv[3:]
steps = {
    "namespaces": lambda: linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWIPC),
    "user": lambda: linux.change_user(uid),
    "capabilities": linux.drop_capabilities,
    "new privileges": linux.set_no_new_privileges,
    "dumpable": lambda: linux.set_dumpable(False),
    "system calls": lambda: seccomp.install(uncounted=True, driver=True),
    "all": lambda: zygote.confine(uid, driver=True),
}
if os.fork() == 0:
    try:
        for name in given_up:
            steps[name]()
        mapping = zygote.mapping_for(zygote.m.SpawnRuntime(
            number=1, uid=uid, address_nbytes=1 << 30, threads=1, gpu=0, activation_nbytes=256 << 20))
        print("context", flush=True)
        ones = torch.ones(64, 64, device=mapping.device)
        assert float((ones @ ones).sum()) == 64**3
        print("product", flush=True)
        if not fake:
            from dormouse.gpuserver.runtime.backends import on_triton
            from dormouse.gpuserver.runtime.tables import KvLayout
            assert not on_triton.trouble(), on_triton.trouble()
            layout = KvLayout(layers=2, kv_heads=2, head_dim=64, block_tokens=16, dtype=torch.bfloat16)
            backend = on_triton.TritonBackend(layout, torch.zeros(1, dtype=torch.bfloat16, device=mapping.device))
            backend.warm(8, False, [64])
            torch.cuda.synchronize()
        print("kernels", flush=True)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(0)
os.wait()
"""
STEPS = ["namespaces", "user", "capabilities", "new privileges", "dumpable", "system calls"]


def ran(*given_up: str) -> list[str]:
    """How far it came."""
    command = [sys.executable, "-c", RIGHTS, str(FAKE), str(UID), *given_up]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    return done.stdout.splitlines() + done.stderr.splitlines()[-8:]


def test_a_runtime_that_has_given_up_its_rights_computes() -> None:
    """If it does not, what it did with fewer of them given up says which one it was."""
    found = ran("all")
    if found[:3] != ["context", "product", "kernels"]:
        steps = STEPS if os.getuid() == 0 else STEPS[3:]
        told = [f"without giving up anything: {ran()}"]
        told += [f"after {steps[count]!r}: {ran(*steps[: count + 1])}" for count in range(len(steps))]
        pytest.fail("\n".join([f"with all given up: {found}", *told]))


WRITES = """
import os, socket, sys
from dormouse.gpuserver.device.cuda import driver
from dormouse.gpuserver.runtime.cuda_mapping import CudaMapping
from dormouse.schemas import messages as m
sock = socket.socket(fileno=int(sys.argv[1]))
nbytes, at, writable = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
_, fds, _, _ = socket.recv_fds(sock, 100, 2)
mapping = CudaMapping(0, nbytes, 64 << 20)
size = 2 << 20
mapping.map([m.GranuleAt(offset=at, physical=0, nbytes=size)], fds, writable)
location = driver.cu.CUmemLocation()
location.type, location.id = driver.cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
print("access", int(driver.cu.cuMemGetAccess(location, mapping._base + at)[1]), flush=True)
there = mapping.tensor(at, size, __import__("torch").uint8)
print("read", int(there[:1].cpu()), flush=True)
there.fill_(9)
mapping.settle()
print("written", int(there[:1].cpu()), flush=True)
"""


@pytest.mark.parametrize("writable", [False, True])
def test_who_writes_to_weights_ends_itself_and_nothing_else(writable: bool) -> None:
    """The same process may write to KV."""
    from dormouse.gpuserver.device.cuda.device import CudaDevice

    device = CudaDevice(0, memory_nbytes=128 * MIB, activation_nbytes=64 * MIB, pool="pages")
    device.attach_thread()
    device.remap([], [Mapping(AT, 0, G)])
    storage = device.storage(AT, G)
    ours_there = torch.empty(0, dtype=torch.uint8, device=device.torch_device).set_(storage)
    ours_there.fill_(7)
    device.synchronize()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        fd = device.granule(0, writable=writable)
        socket.send_fds(ours, [b"granule"], [fd])
        os.close(fd)
        done = subprocess.run(
            [sys.executable, "-c", WRITES, str(theirs.fileno()), str(device.address_nbytes), str(AT), str(writable)],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
        )
    told = dict(line.split() for line in done.stdout.splitlines())
    assert told.get("read") == "7", done.stderr
    device.synchronize()  # this process's context is as it was
    held = content(device, AT, G)
    if writable:
        assert (done.returncode, told["written"], held) == (0, "9", bytes([9]) * G), done.stderr
    else:
        assert told["access"] == "1", f"the driver has granted {told['access']} and not reading alone"
        assert (done.returncode != 0, "written" in told, held) == (True, False, bytes([7]) * G), done.stderr
    device.close()
