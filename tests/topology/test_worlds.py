"""Zygotes of several worlds at once: real interpreters, one of them a second environment, and real confined children.

The worlds here have no torch; that of functions is in test_zygote.py, and beside others in the node at the end.
"""

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
import pytest

from dormouse.core.config import NodeConfig, NodeSection, StartSection
from dormouse.core.fds import PacketSocket
from dormouse.core.paths import RunPaths
from dormouse.core.sandbox.world import World
from dormouse.core.shm import SharedMemory
from dormouse.core.testing import TestNode, running_node
from dormouse.schemas import messages as m

pytestmark = pytest.mark.timeout(240)
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


@pytest.fixture(scope="module")
def second_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with an environment of its own, which finds what is installed beside ours too."""
    folder = tmp_path_factory.mktemp("second") / "env"
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


def test_two_worlds_at_once_each_with_its_own_interpreter_and_modules(tmp_path: Path, second_python: str) -> None:
    with rig(tmp_path, first_world(), second_world(second_python)) as made:
        zygotes = [made.zygote("first"), made.zygote("second")]
        one, other = (zygote.fork().ask() for zygote in zygotes)
        again = zygotes[0].fork().ask()  # while the other world's child lives
        assert (one["executable"], one["prefix"]) == (sys.executable, sys.prefix)
        assert other["executable"] == second_python
        assert other["prefix"] == os.path.dirname(os.path.dirname(second_python)) != sys.prefix
        assert one["preloaded"] == again["preloaded"] == ["world_of_first"]
        assert other["preloaded"] == ["world_of_second"]
        assert one["imported before the fork"]
        assert other["imported before the fork"]
        assert (one["prepared"], other["prepared"]) == (False, True)
        assert one["confined"] == other["confined"] == again["confined"]
        assert made.errors("zygote.first") == made.errors("zygote.second") == ""


def test_a_child_of_any_world_is_confined(tmp_path: Path, second_python: str) -> None:
    with rig(tmp_path, second_world(second_python)) as made:
        zygote = made.zygote("second")
        zygote.fork()  # a neighbour
        said = zygote.fork().ask()
        found, level = said["confined"], zygote.level
        assert found["level"] == level
        if "trusted functions only" in level:
            pytest.skip("this host allows neither namespaces nor uids of our own")
        assert found["own uid"]
        assert found["status"]["NoNewPrivs"] == "1"
        assert {int(found["status"][name], 16) for name in ("CapEff", "CapPrm")} == {0}
        assert found["status"]["Seccomp"] == ("2" if "seccomp" in level else "0")
        assert "AWS_SECRET" not in found["environment"]
        assert found["shadow"] in ("FileNotFoundError", "PermissionError")
        if "+mount" in level:
            assert said["source"] == str(tmp_path / "function" / "secret.txt")  # its entry file, read before
            assert found["secret"] == "FileNotFoundError"
            assert found["neighbours"] == "set()"
            assert found["processes"] == 2, "itself and its init"
            assert not {name for name in found["devices"] if name.startswith(("nvidia", "sd", "vd"))}


def test_a_zygote_that_dies_takes_no_other_worlds_children_along(tmp_path: Path, second_python: str) -> None:
    with rig(tmp_path, first_world(), second_world(second_python)) as made:
        first, second = made.zygote("first"), made.zygote("second")
        lost, kept = first.fork(), second.fork()
        before = kept.ask()
        first.stop(signal.SIGKILL)
        lost.ended()
        assert kept.ask() == before
        successor = made.zygote("first", epoch=2)
        assert successor.fork().ask()["preloaded"] == ["world_of_first"]
        assert kept.ask() == before
        assert second.fork().ask()["confined"] == before["confined"]


def test_a_zygote_that_ends_takes_no_other_worlds_control_groups_along(tmp_path: Path, second_python: str) -> None:
    with rig(tmp_path, first_world(), second_world(second_python)) as made:
        first, second = made.zygote("first"), made.zygote("second")
        if "cgroup" not in second.level:
            pytest.skip("control groups cannot be made here")
        first.stop()
        assert second.fork().ask()["confined"]["level"] == second.level


@pytest.mark.parametrize(
    ("text", "entry", "words"),
    [
        ("", "world_of_none:live", "(ModuleNotFoundError: No module named 'world_of_none'); install it there, or have"),
        ("import nothing_of_that_name", "world_of_this:live", "(ModuleNotFoundError: No module named 'nothing_of_"),
        ("raise OSError('no licence')", "world_of_this:live", "(OSError: no licence); install it there, or have"),
        ("", "world_of_this:live", "needs world_of_this:live; define this function in world_of_this"),
    ],
)
def test_a_world_that_lacks_what_it_needs_says_so(text: str, entry: str, words: str, tmp_path: Path) -> None:
    with rig(tmp_path, World(name="poor", python=sys.executable, modules=("json",), entry=entry)) as made:
        (tmp_path / "modules" / "world_of_this.py").write_text(text)
        assert made.start(sys.executable, "zygote.poor", 1, {}).wait(WAIT_S) == 1
        said = made.errors("zygote.poor").strip().splitlines()
        assert said[-1].startswith("dormouse: the world 'poor' needs world_of_")
        assert words in said[-1]
        assert len(said) == 1 or "OSError: no licence" in said[-2], said  # a traceback only where there is more to know


# The supervisor of a whole node, with more worlds than a node file can name.
NODE = """
import sys, msgspec, uvloop
from dormouse.core import supervisor
from dormouse.core.config import StartSection, load_config
from dormouse.core.gpus import counted
from dormouse.core.sandbox.world import World
start = StartSection(worlds=msgspec.json.decode(sys.argv[1], type=tuple[World, ...]))
uvloop.run(supervisor.serve(counted(msgspec.structs.replace(load_config(sys.argv[-1]), start=start))))
supervisor.close_context()
"""
ECHO = "import os\ndef load(): ...\ndef handle(state, request): return os.getpid(), request\n"


@pytest.fixture(scope="module")
def node(second_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestNode]:
    second = msgspec.structs.replace(second_world(second_python), libraries=("w_raises", "colorsys"))
    worlds = [
        second,
        msgspec.structs.replace(second, name="lost", python="/no/such/python"),
        World(name="poor", python=sys.executable, modules=("world_of_none",), entry="world_of_none:live"),
    ]
    site = Path(second_python).parents[1].glob("lib/python*/site-packages")
    (next(site) / "w_raises.py").write_text("raise OSError('no')")
    launcher = (sys.executable, "-P", "-c", NODE, msgspec.json.encode(worlds).decode())
    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\n', launcher) as made:
        yield made


def test_a_node_serves_functions_whatever_becomes_of_other_worlds(node: TestNode) -> None:
    ready = json.loads((node.run / "t" / "ready").read_bytes())
    assert {"zygote", "zygote.second"} <= set(ready["up"])
    assert set(ready["down"]) == {"zygote.lost", "zygote.poor"}
    assert ready["down"]["zygote.lost"] == (
        "its interpreter /no/such/python cannot be started (No such file or directory); install it there, or name "
        "another ([sandbox] python is that of functions)"
    )
    assert ready["down"]["zygote.poor"].startswith("status 1: dormouse: the world 'poor' needs world_of_none, which ")
    assert ready["down"]["zygote.poor"].endswith("install it there, or have that world name another interpreter")
    assert node.status()["node"]["down"].keys() == ready["down"].keys()
    node.deployed("echo", ECHO)
    assert node.result("echo", 1)[1] == 1


def test_a_library_that_one_world_cannot_import_is_left_out_of_that_world(node: TestNode) -> None:
    lines = [json.loads(line) for line in (node.state / "logs" / "supervisor.log").read_text().splitlines()]
    left_out = [(line["child"], line["library"]) for line in lines if line["event"] == "library_left_out"]
    assert left_out == [("zygote.second", "w_raises")]
    assert json.loads((node.run / "t" / "ready").read_bytes())["left_out"] == {}, "nothing of functions'"


def test_a_worlds_zygote_is_replaced_alone_and_outlives_the_router(node: TestNode) -> None:
    node.deployed("echo", ECHO)
    instance = node.result("echo", 1)[0]
    zygotes = {role: pid for role, pid in node.pids().items() if role.startswith("zygote")}
    node.replaced("zygote.second", node.kill("zygote.second"))
    assert node.result("echo", 1)[0] == instance, "no function has noticed"
    assert node.pids()["zygote"] == zygotes["zygote"]
    second = node.pids()["zygote.second"]
    assert second != zygotes["zygote.second"]
    node.replaced("router", node.kill("router"))
    node.wait(lambda: node.invoke("echo", 2).status == 200, WAIT_S, "the function")
    assert node.pids()["zygote"] == zygotes["zygote"]
    assert node.pids()["zygote.second"] == second, "it ends its children and stays"
    assert set(node.status()["node"]["down"]) == {"zygote.lost", "zygote.poor"}


def test_without_the_interpreter_of_functions_a_node_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    run = tempfile.mkdtemp(prefix="dm")
    os.rmdir(run)
    file.write_text(f'[node]\nrun = "{run}"\nstate = "{tmp_path}/s"\nport = 0\n[sandbox]\npython = "/no/such/python"\n')
    command = [sys.executable, "-P", "-m", "dormouse.core.supervisor", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1
    (said,) = done.stderr.strip().splitlines()
    assert json.loads(said)["message"] == (
        "zygote did not start: its interpreter /no/such/python cannot be started (No such file or directory); install "
        "it there, or name another ([sandbox] python is that of functions)"
    )
    assert not os.path.exists(run)
