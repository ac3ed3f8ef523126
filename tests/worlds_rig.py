"""Worlds without torch, and their zygotes as real processes, driven by a router that is a test."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from dormouse.core.config import NodeConfig, NodeSection, StartSection
from dormouse.core.links.fds import PacketSocket
from dormouse.core.paths import RunPaths
from dormouse.core.sandbox.world import World
from dormouse.core.shm import SharedMemory
from dormouse.schemas import messages as m

WAIT_S = 60.0
LAYOUT = m.Arena(request_nbytes=4096, response_nbytes=4096, stream_nbytes=4096)
DEVICE = m.DeviceInfo(name="test", total_nbytes=1 << 30, capability=(8, 0), multiprocessors=1)

# Both worlds run this; each has its own copy, under its own name and where only its interpreter finds it.
LIVE = """
import json, os, socket, sys

IMPORTED_BY = os.getpid()
prepared = False

def prepare():
    global prepared
    prepared = True

def met(what):
    try:
        return repr(what())
    except OSError as error:
        return type(error).__name__

def live(fork, source, folder, arena_fd, setting):
    status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
    said = {
        "executable": sys.executable,
        "prefix": sys.prefix,
        "preloaded": sorted(name for name in sys.modules if name.startswith("world_of_") or name == "torch"),
        "imported before the fork": IMPORTED_BY != os.getpid(),
        "prepared": prepared,
        "source": source.decode(),
        "confined": {
            "level": setting.confinement,
            "status": {name: status[name].strip() for name in ("NoNewPrivs", "CapEff", "CapPrm", "Seccomp")},
            "own uid": os.getuid() == fork.uid,
            "shadow": met(lambda: open("/etc/shadow").read()),
            "secret": met(lambda: open(source.decode().strip()).read()),
            "neighbours": met(lambda: set(os.listdir(os.path.dirname(fork.directory))) - {fork.instance}),
            "processes": sum(name.isdigit() for name in os.listdir("/proc")),
            "devices": sorted(os.listdir("/dev")),
            "environment": sorted(set(os.environ) - {"LC_CTYPE"}),
        },
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.connect(fork.directory + "/ask")
        while asked.recv(16):
            asked.send(json.dumps(said).encode())
    os._exit(0)
"""


def make_second_python(folder: Path) -> str:
    """An interpreter with an environment of its own, in ``folder``, which finds what is installed beside ours too."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=WAIT_S)
    python = folder / "bin" / "python"
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.check_output(asked, text=True, timeout=WAIT_S).strip())
    (site / "first.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (site / "world_of_second.py").write_text(LIVE)
    return str(python)


class Instance:
    """A child of a zygote's, asked over a socket in its directory."""

    def __init__(self, zygote: "Zygote", number: int) -> None:
        rig, self.name = zygote.rig, f"1-{number}"
        uid = 61_000 + number if zygote.level.startswith("own-uid") else os.getuid()
        directory = rig.paths.instance(self.name)
        os.mkdir(directory, 0o700)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.settimeout(WAIT_S)
        listening.bind(f"{directory}/ask")
        listening.listen()
        for path in (directory, f"{directory}/ask"):
            os.chown(path, uid, uid)
        self.log = rig.folder / f"{self.name}.log"
        fork = m.Fork(
            instance=self.name,
            function="f",
            directory=directory,
            uid=uid,
            folder=str(rig.folder / "function"),
            entry="secret.txt",
            arena=LAYOUT,
            device=DEVICE,
            gpus=1,
            limits={"NOFILE": 64},
        )
        arena = SharedMemory.create(self.name, LAYOUT.nbytes)
        with open(self.log, "wb") as log:
            zygote.socket.send(fork, [log.fileno(), arena.fd])
        arena.close()
        forked = zygote.heard()
        assert isinstance(forked, m.Forked), forked
        self.pid = forked.pid
        self._pidfd = os.pidfd_open(self.pid)
        with listening:
            self._socket, _ = listening.accept()
        self._socket.settimeout(WAIT_S)

    def ask(self) -> Any:
        self._socket.send(b"?")
        return json.loads(self._socket.recv(1 << 16))

    def ended(self) -> None:
        """Wait until it has: its socket is closed by nobody else."""
        assert self._socket.recv(1) == b""

    def close(self) -> None:
        self._socket.close()
        os.close(self._pidfd)


class Zygote:
    """One world's, and its router's connection."""

    def __init__(self, rig: "Rig", world: World, epoch: int) -> None:
        self.rig = rig
        ready, theirs = os.pipe()
        self.process = rig.start(world.python, world.role, epoch, {"DORMOUSE_READY_FD": str(theirs)}, theirs)
        os.close(theirs)
        line = os.read(ready, 64)
        self._ready = ready
        assert line == b"ready\n", rig.errors(world.role)
        self.socket: PacketSocket[m.FromZygote, m.ToZygote] = PacketSocket.connect(
            rig.paths.zygote(epoch, world.role), m.FromZygote, WAIT_S
        )
        greeting = self.heard()
        assert isinstance(greeting, m.ZygoteReady), greeting
        assert greeting.torch == ""
        self.level = greeting.confinement

    def heard(self) -> m.FromZygote:
        packet = self.socket.recv()
        assert packet is not None
        return packet[0]

    def fork(self) -> Instance:
        self.rig.instances.append(Instance(self, len(self.rig.instances)))
        return self.rig.instances[-1]

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(WAIT_S)

    def close(self) -> None:
        self.stop()
        self.socket.close()
        os.close(self._ready)


class Rig:
    """A run directory in which several worlds' zygotes are started, as a supervisor does."""

    def __init__(self, folder: Path, *worlds: World) -> None:
        self.folder = folder
        self.worlds = {world.name: world for world in worlds}
        self.zygotes: list[Zygote] = []
        self.instances: list[Instance] = []
        self.paths = RunPaths(tempfile.mkdtemp(prefix="dz-"))
        self.paths.make()
        (folder / "function").mkdir()
        (folder / "modules").mkdir()
        (folder / "modules" / "world_of_first.py").write_text(LIVE)
        secret = folder / "function" / "secret.txt"  # the zygote reads it; where it lies is not seen by an instance
        secret.write_text(str(secret))
        config = NodeConfig(
            node=NodeSection(run=str(self.paths.run), state=str(folder / "state")), start=StartSection(worlds=worlds)
        )
        self.paths.node_json.write_bytes(msgspec.json.encode(config))

    def start(self, python: str, role: str, epoch: int, more: dict[str, str], *fds: int) -> "subprocess.Popen[bytes]":
        module = "dormouse.core.sandbox.zygote"
        command = [python, "-P", "-m", module, "--run", str(self.paths.run), "--role", role, "--epoch", str(epoch)]
        path = os.pathsep.join(filter(None, [str(self.folder / "modules"), os.environ.get("PYTHONPATH")]))
        environment = os.environ | more | {"PYTHONPATH": path, "AWS_SECRET": "hunter2"}
        environment["DORMOUSE_PARENT"] = str(os.getpid())
        with open(self.folder / f"{role}.err", "wb") as sink:
            return subprocess.Popen(command, pass_fds=fds, env=environment, stdout=sink, stderr=sink)

    def errors(self, role: str) -> str:
        return (self.folder / f"{role}.err").read_text()

    def zygote(self, name: str, epoch: int = 1) -> Zygote:
        self.zygotes.append(Zygote(self, self.worlds[name], epoch))
        return self.zygotes[-1]

    def close(self) -> None:
        for zygote in self.zygotes:
            zygote.close()
        for instance in self.instances:
            instance.close()
        shutil.rmtree(self.paths.run)


@contextlib.contextmanager
def rig(folder: Path, *worlds: World) -> Iterator[Rig]:
    made = Rig(folder, *worlds)
    try:
        yield made
    finally:
        made.close()


def first_world() -> World:
    return World(name="first", python=sys.executable, modules=("world_of_first",), entry="world_of_first:live")


def second_world(python: str) -> World:
    module = "world_of_second"
    return World(name="second", python=python, modules=(module,), prepare=f"{module}:prepare", entry=f"{module}:live")
