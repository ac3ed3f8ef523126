"""The process that forks an executor's runtimes: warm with torch and transformers, without a device, with one thread.

``python -m dormouse.gpuserver.runtime.zygote FD [cuda]``: a packet socket to the executor. Its children die with it,
and it dies with the executor.
"""

import gc
import importlib.util
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Final, NoReturn

if __name__ == "__main__":
    gc.disable()  # imports leave no garbage

import torch
import transformers.models.llama.modeling_llama  # noqa: F401  # imports the modules that all families need

from dormouse.core.decisions.rules.batching import BatchRule
from dormouse.core.links.fds import PacketSocket, close_all
from dormouse.core.sandbox import linux, seccomp
from dormouse.core.startup import die_with_parent
from dormouse.gpuserver.runtime import kernels, process
from dormouse.gpuserver.runtime.mapping import HostMapping, PoolMapping
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, RemoteProtocolError

FDS: Final = 1
CUDA: Final = "cuda"
"""Its runtimes have a CUDA device."""


def main() -> int:
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the supervisor
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the executor sees by pidfd that one is gone; nobody waits for it
    torch.set_grad_enabled(False)
    if sys.argv[2:] == [CUDA]:
        import_for_cuda()
    else:
        kernels.load()  # built, if it must be, before the first runtime waits for it
    gc.freeze()  # a collection in a child would copy every page that holds an object
    gc.collect()  # empties the free lists of types, whose pages the first collection of a child would copy
    executor: PacketSocket[m.ToRuntimeZygote, m.FromRuntimeZygote] = PacketSocket(
        socket.socket(fileno=int(sys.argv[1])), m.ToRuntimeZygote
    )
    executor.sock.setblocking(True)
    executor.send(m.RuntimesWarm())
    while True:
        try:
            packet = executor.recv()
        except (PeerLost, RemoteProtocolError):
            packet = None
        if packet is None:
            return 0
        spawn, fds = packet
        if len(fds) == FDS:
            _fork(executor, spawn, fds)
        close_all(fds)


def import_for_cuda() -> None:
    """Import the modules of a runtime of a CUDA device; none of them opens the device. Triton identifies itself by a
    hash of all its files, half a second's work.
    """
    importlib.import_module("dormouse.gpuserver.runtime.cuda_mapping")
    if importlib.util.find_spec("triton") is not None:
        importlib.import_module("dormouse.gpuserver.runtime.backends.on_triton")
        key = getattr(importlib.import_module("triton.runtime.cache"), "triton_key", None)
        if key is not None:
            key()


def _fork(
    executor: PacketSocket[m.ToRuntimeZygote, m.FromRuntimeZygote], spawn: m.SpawnRuntime, fds: list[int]
) -> None:
    pid = os.fork()
    if pid == 0:
        executor.sock.close()
        _live(spawn, fds)
    pidfd = os.pidfd_open(pid)
    try:
        executor.send(m.RuntimeSpawned(number=spawn.number), [pidfd])
    finally:
        os.close(pidfd)


def _live(spawn: m.SpawnRuntime, fds: list[int]) -> NoReturn:
    """A runtime's life. It gives up its rights over others before it receives anything."""
    status = 1
    try:
        linux.die_with_parent_signal(signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        confine(spawn.uid, driver=spawn.gpu >= 0)
        gc.enable()
        torch.set_num_threads(max(1, spawn.threads))  # 0: a CUDA device, which needs none
        mapping = mapping_for(spawn)  # after the fork: the process that forks never touches a device
        batching = spawn.batching
        rule = BatchRule.of(batching.kind, batching.size, batching.delay_ms)
        process.RuntimeProcess(socket.socket(fileno=fds[0]), mapping, rule).run()
        status = 0
    except (PeerLost, KeyboardInterrupt):
        status = 0  # the executor wants nothing more
    except BaseException as error:  # the outermost frame
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stderr.flush()
        os._exit(status)


def confine(uid: int, driver: bool) -> None:
    """Give up everything that a runtime does not need, with CUDA's ``driver`` or without: other uids, new rights, being
    looked into.
    """
    if uid != os.getuid():
        with suppress(OSError):  # a kernel without network namespaces: the filter below refuses sockets
            linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWIPC)
        linux.change_user(uid)
        linux.die_with_parent_signal(signal.SIGKILL)  # a change of user clears it
    linux.drop_capabilities()
    linux.set_no_new_privileges()
    linux.set_dumpable(False)
    seccomp.install(uncounted=True, driver=driver)


def mapping_for(spawn: m.SpawnRuntime) -> PoolMapping:
    """On its device. Raises DeviceError."""
    if spawn.gpu < 0:
        return HostMapping(spawn.address_nbytes)
    from dormouse.gpuserver.runtime.cuda_mapping import CudaMapping

    return CudaMapping(spawn.gpu, spawn.address_nbytes, spawn.activation_nbytes)


if __name__ == "__main__":
    sys.exit(main())
