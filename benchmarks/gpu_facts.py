"""Facts about a GPU's driver that the design relies on and documentation leaves open, each tried in a process of its
own: it may be the last thing that one does. benchmarks/gpu.py reports them; docs/gpu.md says what was found.
"""

import subprocess
import sys

READ_ONLY = """
from dormouse.gpuserver.device.cuda import driver, virtual
from dormouse.gpuserver.device.cuda.streams import CudaContext
context = CudaContext(0)
nbytes = 2 << 20
base = virtual.reserve_addresses(nbytes)
virtual.map_granule(base, nbytes, virtual.create_granule(nbytes, 0))
virtual.grant(base, nbytes, 0, write=False)
stream = driver.create_stream()
driver.fill(base, 1, 4, stream)
driver.synchronize_stream(stream)
print("it is written")
"""


GRAPH = """
import ctypes
from cuda.bindings import driver as cu
from dormouse.gpuserver.device.cuda import driver, virtual
from dormouse.gpuserver.device.cuda.streams import CudaContext
context = CudaContext(0)
nbytes = 2 << 20

def ok(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) > 1 else None

def read(address):
    into = (ctypes.c_ubyte * 4)()
    ok(cu.cuMemcpyDtoH(ctypes.addressof(into), address, 4))
    return bytes(into)

base, stream = virtual.reserve_addresses(nbytes), driver.create_stream()
one, two = (virtual.create_granule(nbytes, 0) for _ in range(2))
virtual.map_granule(base, nbytes, one)
virtual.grant(base, nbytes, 0)
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
driver.fill(base, 7, nbytes, stream)
graph = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
ok(cu.cuGraphLaunch(graph, stream))
driver.synchronize_stream(stream)
first = read(base)
virtual.unmap(base, nbytes)
virtual.map_granule(base, nbytes, two)
virtual.grant(base, nbytes, 0)
driver.fill(base, 1, nbytes, stream)
ok(cu.cuGraphLaunch(graph, stream))
driver.synchronize_stream(stream)
print("it writes the new memory" if (first, read(base)) == (bytes([7] * 4),) * 2 else f"wrong: {first}, {read(base)}")
"""


CONFINED = """
import os
from cuda.bindings import driver as cu
from dormouse.core.sandbox import linux, seccomp

def begun(own, seen, memory):
    if own:
        linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWIPC)
        linux.change_user(70_000)
        linux.drop_capabilities()
    linux.set_no_new_privileges()
    linux.set_dumpable(seen)
    seccomp.install(uncounted=True, driver=memory)
    code = int(cu.cuInit(0)[0])
    return code or int(cu.cuDevicePrimaryCtxRetain(0)[0])

said = []
for rights in ((False, True, True), (True, True, True), (True, False, True), (True, True, False)):
    if not (child := os.fork()):
        try:
            code = begun(*rights)
        except OSError as error:
            code = error.errno or 255
        os._exit(code % 256)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    names = ("root", "a user")[rights[0]], ("unseen", "seen")[rights[1]], ("no files in memory", "files")[rights[2]]
    said.append(f"{', '.join(names)}: {status}")
print("; ".join(said))
"""


def facts() -> dict[str, str]:
    return {
        "a write through a read-only mapping": said(READ_ONLY),
        "what a context begins with, by rights (304 modulo 256 is 48)": said(CONFINED),
        "a captured graph, replayed when other memory is at its address": said(GRAPH),
    }


def said(code: str) -> str:
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return "it did not end"
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[-1] if lines else f"the process ended with {done.returncode}"
