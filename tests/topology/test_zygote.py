"""A real zygote and real instances, driven by a router that is this test. No executor: functions without cuda."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from dormouse.core.config import NodeConfig, NodeSection
from dormouse.core.links.fds import PacketSocket
from dormouse.core.links.link import Link, RawLink
from dormouse.core.paths import RunPaths
from dormouse.core.shm import SharedMemory
from dormouse.schemas import messages as m

COLD = True  # what a zygote has of its environment and memory
LAYOUT = m.Arena(request_nbytes=1 << 20, response_nbytes=1 << 20, stream_nbytes=1 << 20)
DEVICE = m.DeviceInfo(name="test", total_nbytes=1 << 30, capability=(8, 0), multiprocessors=1)
ECHO = "def load():\n    return 1\n\ndef handle(state, request):\n    return {'state': state, 'request': request}\n"
WAIT_S = 60.0


class Instance:
    """The router's and the store's side of one instance."""

    def __init__(self, rig: "Rig", name: str, source: str, path: str, uid: int) -> None:
        self.name = name
        self.directory = rig.paths.instance(name)
        os.mkdir(self.directory, 0o700)
        os.chown(self.directory, uid, uid)
        self.arena = SharedMemory.create(name, LAYOUT.nbytes)
        self.said: asyncio.Queue[Any] = asyncio.Queue()  # by the instance to the router
        self.fate: asyncio.Future[m.Exited | m.ForkFailed] = asyncio.get_running_loop().create_future()
        self.pid = 0
        self.forked = asyncio.Event()  # the zygote has said the pid
        self.versions = 0
        self.requests = 0
        self.router: Link[m.InstanceToRouter, m.RouterToInstance] = Link(
            f"{self.directory}/router", bind=True, incoming=m.InstanceToRouter, on_message=self.said.put_nowait
        )
        self.store: Link[m.InstanceToStore, m.StoreToInstance] = Link(
            f"{self.directory}/store", bind=True, incoming=m.InstanceToStore, on_message=self._stored
        )
        self.executor = RawLink(f"{self.directory}/gpu0.1", bind=True, on_message=lambda frame: None)
        for end in ("router", "store", "gpu0.1"):
            os.chown(f"{self.directory}/{end}", uid, uid)
        self.log = rig.folder / f"{name}.log"
        path = path or str(rig.folder / f"{name}.py")
        if os.path.isdir(os.path.dirname(path)):
            Path(path).write_text(source)
        log_fd = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        fork = m.Fork(
            instance=name,
            function=name,
            directory=self.directory,
            uid=uid,
            folder=os.path.dirname(path),
            entry=os.path.basename(path),
            arena=LAYOUT,
            device=DEVICE,
            gpus=1,
            limits={"NOFILE": 256, "NPROC": 64, "DATA": 16 << 30},
        )
        assert rig.zygote is not None
        rig.zygote.send(fork, [log_fd, self.arena.fd])
        os.close(log_fd)

    def _stored(self, message: m.InstanceToStore) -> None:
        if isinstance(message, m.Commit):
            self.versions += 1
            self.store.send(m.Committed(version=self.versions, nbytes=0))
        elif isinstance(message, m.StoreUpload):
            self.store.send(m.Uploaded())

    async def next(self, kind: type[Any]) -> Any:
        message = await asyncio.wait_for(self.said.get(), WAIT_S)
        assert isinstance(message, kind), (message, self.log.read_text())
        return message

    async def loaded(self) -> "Instance":
        await self.next(m.Importing)
        await self.next(m.Loaded)
        await asyncio.wait_for(self.forked.wait(), WAIT_S)  # another process says it, over another socket
        return self

    def run(self, request: object) -> None:
        self.requests += 1
        body = orjson.dumps(request)
        lease = m.Lease(gpu=0, epoch=1, serial=self.requests, secret=7)
        if len(body) > 1000:
            self.arena.view[: len(body)] = body
            self.router.send(m.Run(request=self.requests, lease=lease, body=None, nbytes=len(body)))
        else:
            self.router.send(m.Run(request=self.requests, lease=lease, body=body, nbytes=len(body)))

    def give_up(self, request: int) -> None:
        """What the router writes before it sends SIGUSR1."""
        start = LAYOUT.control_offset
        self.arena.view[start : start + m.CONTROL_NBYTES] = request.to_bytes(m.CONTROL_NBYTES, "little")

    async def call(self, request: object) -> Any:
        self.run(request)
        answer = await self.next(m.Returned | m.Raised)  # type: ignore[arg-type]
        assert answer.request == self.requests
        if isinstance(answer, m.Raised):
            return answer
        body = answer.body
        if body is None:
            body = self.arena.view[LAYOUT.request_nbytes : LAYOUT.request_nbytes + answer.nbytes]
        return orjson.loads(body)

    def close(self) -> None:
        self.router.close()
        self.store.close()
        self.executor.close()
        self.arena.close()


class Rig:
    """A run directory, a zygote, and its router's connection."""

    def __init__(self, folder: Path, secrets: dict[str, str]) -> None:
        self.folder = folder
        self.instances: dict[str, Instance] = {}
        self.zygote: PacketSocket[m.FromZygote, m.ToZygote] | None = None
        self.paths = RunPaths(tempfile.mkdtemp(prefix="dz-"))
        self.paths.make()
        config = NodeConfig(node=NodeSection(run=str(self.paths.run), state=str(folder / "state")))
        self.paths.node_json.write_bytes(msgspec.json.encode(config))
        self.ready, theirs = os.pipe()
        self.errors = folder / "zygote.err"
        module = "dormouse.core.sandbox.zygote"
        command = [sys.executable, "-P", "-m", module, "--run", str(self.paths.run), "--role", "zygote", "--epoch", "1"]
        environment = os.environ | secrets | {"DORMOUSE_READY_FD": str(theirs), "DORMOUSE_PARENT": str(os.getpid())}
        with self.errors.open("wb") as sink:
            self.process = subprocess.Popen(command, pass_fds=[theirs], env=environment, stdout=sink, stderr=sink)
        os.close(theirs)

    async def start(self) -> m.ZygoteReady:
        line = await asyncio.to_thread(os.read, self.ready, 64)
        assert line == b"ready\n", self.errors.read_text()
        return await self.connect()

    async def connect(self) -> m.ZygoteReady:
        self.zygote = PacketSocket.connect(self.paths.zygote(1), m.FromZygote)
        greeting = await asyncio.to_thread(self.zygote.recv)
        assert greeting is not None
        assert isinstance(greeting[0], m.ZygoteReady)
        self.confined = "mount" in greeting[0].confinement
        self.own_uid = greeting[0].confinement.startswith("own-uid")
        self.gone = asyncio.Event()
        self.zygote.serve(self._told, self.gone.set)
        return greeting[0]

    def _told(self, message: m.FromZygote, _: list[int]) -> None:
        if isinstance(message, m.Forked):
            self.instances[message.instance].pid = message.pid
            self.instances[message.instance].forked.set()
        elif isinstance(message, m.Exited | m.ForkFailed):
            self.instances[message.instance].fate.set_result(message)

    def fork(self, source: str = ECHO, *, path: str = "") -> Instance:
        name = f"f{len(self.instances)}"
        uid = 61_000 + len(self.instances) if self.own_uid else os.getuid()
        instance = self.instances[name] = Instance(self, name, source, path, uid)
        return instance

    def signal(self, instance: Instance, number: int) -> None:
        assert self.zygote is not None
        self.zygote.send(m.Signal(instance=instance.name, signal=number))

    async def stop(self) -> None:
        self.process.terminate()
        await asyncio.to_thread(self.process.wait, WAIT_S)
        os.close(self.ready)
        if self.zygote is not None:
            self.zygote.close()
        for instance in self.instances.values():
            instance.close()
        shutil.rmtree(self.paths.run)


@asynccontextmanager
async def rig(folder: Path, **secrets: str) -> AsyncIterator[Rig]:
    made = Rig(folder, secrets)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


def scenario(body: Callable[[Rig], Awaitable[None]], folder: Path, **secrets: str) -> None:
    """Run one scenario on a zygote of its own; afterwards no process of it lives."""

    async def main() -> None:
        async with rig(folder, **secrets) as made:
            await body(made)
        left = [instance.pid for instance in made.instances.values() if instance.pid and _alive(instance.pid)]
        assert left == []

    asyncio.run(main())


def _known(pid: int) -> bool:
    """Whether it lives, or its parent has not heard of its end."""
    return Path(f"/proc/{pid}").exists()


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_requests(shared_rig: "Shared") -> None:
    source = """
import sys
print("imported", __name__, __file__)

def load():
    print("loading")
    return {"n": 0}

def handle(state, request):
    state["n"] += 1
    match request:
        case "raise":
            raise ValueError("no such thing")
        case "exit":
            sys.exit(3)
        case "object":
            return object()
        case "tensor":
            import torch
            return {"a": torch.zeros(2, 3)}
        case "numpy":
            import numpy as np
            return {"a": np.arange(6).reshape(2, 3), "t": np.arange(6).reshape(2, 3).T, "f": np.float32(0.5)}
        case "large":
            return "x" * 100_000
        case "too large":
            return "x" * 2_000_000
        case "memory":
            import torch
            raise torch.OutOfMemoryError("full")
    return [state["n"], len(request)]
"""

    async def body(rig: Rig) -> None:
        instance = await rig.fork(source).loaded()
        assert await instance.call("abc") == [1, 3]
        raised = await instance.call("raise")
        assert raised.code == "function_raised"
        assert raised.text.startswith("Traceback (most recent call last):\n  File ")
        assert raised.text.endswith("ValueError: no such thing")
        assert 'raise ValueError("no such thing")' in raised.text
        assert "client_shim" not in raised.text
        exited = await instance.call("exit")
        assert exited.code == "function_raised"
        assert "asked to exit" in exited.text
        wrong = await instance.call("object")
        assert (wrong.code, "type object" in wrong.text) == ("bad_response", True)
        tensor = await instance.call("tensor")
        assert (tensor.code, ".tolist()" in tensor.text) == ("bad_response", True)
        assert await instance.call("numpy") == {"a": [[0, 1, 2], [3, 4, 5]], "t": [[0, 3], [1, 4], [2, 5]], "f": 0.5}
        assert await instance.call("large") == "x" * 100_000
        assert (await instance.call("too large")).code == "bad_response"
        assert (await instance.call("memory")).code == "out_of_memory"
        assert await instance.call("y" * 200_000) == [10, 200_000]
        log = instance.log.read_text()
        assert f"imported {instance.name}" in log
        assert "loading" in log
        instance.router.send(m.Exit())
        fate = await asyncio.wait_for(instance.fate, WAIT_S)
        assert fate == m.Exited(instance=instance.name, pid=instance.pid, status=0)

    shared_rig.run(body)


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("def load(:\n", "bad_source", "SyntaxError"),
        ("x = 1\n", "no_handle", "define handle(state, request)"),
        ("def load(): pass\n", "no_handle", "define handle(state, request)"),
        ("def handle(request): pass\n", "no_handle", "too many positional arguments); define handle(state, request)"),
        ("def load(size): pass\ndef handle(s, r): pass\n", "no_load", "argument: 'size'); define load()"),
        ("load = 1\ndef handle(s, r): pass\n", "no_load", "cannot be called"),
        ("unload = None\ndef handle(s, r): pass\n", "no_unload", "define unload(state)"),
        ("def load(): return {}['k']\ndef handle(s, r): pass\n", "load_raised", "KeyError: 'k'"),
        ("import nothing_of_that_name\n", "load_raised", "ModuleNotFoundError"),
        ("import sys\nsys.exit()\n", "load_raised", "asked to exit"),
    ],
)
def test_functions_that_cannot_load(source: str, code: str, words: str, shared_rig: "Shared") -> None:
    async def body(rig: Rig) -> None:
        instance = rig.fork(source)
        await instance.next(m.Importing)
        failed = await instance.next(m.LoadFailed)
        assert failed.code == code
        assert words in failed.text
        assert words in instance.log.read_text()
        rig.signal(instance, signal.SIGKILL)
        assert (await asyncio.wait_for(instance.fate, WAIT_S)) == m.Exited(
            instance=instance.name, pid=instance.pid, status=-9
        )

    shared_rig.run(body)


class Shared:
    """One zygote for several small tests."""

    def __init__(self, folder: Path) -> None:
        self._runner = asyncio.Runner()
        self._rig = self._runner.run(self._start(folder))

    async def _start(self, folder: Path) -> Rig:
        made = Rig(folder, {"AWS_SECRET": "hunter2"})
        await made.start()
        return made

    def run(self, body: Callable[[Rig], Awaitable[None]]) -> None:
        async def main() -> None:
            await body(self._rig)

        self._runner.run(main())

    def close(self) -> None:
        self._runner.run(self._rig.stop())
        self._runner.close()


@pytest.fixture(scope="module")
def shared_rig(tmp_path_factory: pytest.TempPathFactory) -> Any:
    shared = Shared(tmp_path_factory.mktemp("zygote"))
    yield shared
    shared.close()


CANCELLABLE = """
import time

def load():
    return None

def handle(state, request):
    if request == "loop":
        print("looping", flush=True)
        while True:
            pass
    if request == "sleep":
        print("sleeping", flush=True)
        try:
            time.sleep(60)
        except Exception:
            return "swallowed"
    return "done"
"""


@pytest.mark.parametrize("how", ["loop", "sleep"])
def test_cancel(how: str, shared_rig: Shared) -> None:
    async def body(rig: Rig) -> None:
        instance = await rig.fork(CANCELLABLE).loaded()
        instance.run(how)
        while f"{how}ing" not in instance.log.read_text():  # noqa: ASYNC110  (a file is all that it says)
            await asyncio.sleep(0.01)
        instance.give_up(instance.requests)
        rig.signal(instance, signal.SIGUSR1)
        assert (await instance.next(m.Raised)).code == "cancelled"
        assert await instance.call("go") == "done"
        for _ in range(20):  # late signals spare the requests that run meanwhile
            rig.signal(instance, signal.SIGUSR1)
            assert await instance.call("go") == "done"

    shared_rig.run(body)


def test_death_in_the_middle_of_a_request(shared_rig: Shared) -> None:
    source = """
import os, signal, subprocess

def load():
    return subprocess.Popen(["sleep", "300"], start_new_session=True).pid

def handle(state, request):
    if request == "hello":
        return "hello"
    os.kill(os.getpid(), signal.SIGKILL)
"""

    async def body(rig: Rig) -> None:
        instance = await rig.fork(source).loaded()
        assert await instance.call("hello") == "hello"
        started = _descendants(instance.pid)
        assert len(started) == 1
        instance.run("die")
        fate = await asyncio.wait_for(instance.fate, WAIT_S)
        assert fate == m.Exited(instance=instance.name, pid=instance.pid, status=-signal.SIGKILL)
        assert not any(map(_alive, started))

    shared_rig.run(body)


def _descendants(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


HEAVY = ECHO.replace("return 1", "return bytes(1) * (256 << 20)")  # whose end takes the kernel tens of milliseconds


def test_router_and_zygote_lost(tmp_path: Path) -> None:
    async def gone(instances: list[Instance]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while any(_alive(instance.pid) for instance in instances):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)

    async def body(rig: Rig) -> None:
        first = await rig.fork(HEAVY).loaded()
        assert rig.zygote is not None
        rig.zygote.close()
        await rig.connect()  # the next router is served when the instances of this one are gone, and not before
        assert not _known(first.pid)
        second = await rig.fork().loaded()
        assert await second.call(1) == {"state": 1, "request": 1}
        third = await rig.fork().loaded()
        rig.process.kill()
        await asyncio.wait_for(rig.gone.wait(), WAIT_S)
        await gone([second, third])

    scenario(body, tmp_path)


def test_no_secrets_no_gpu_no_strangers(shared_rig: Shared) -> None:
    source = """
import ctypes, os, threading

def load():
    return None

def stack():  # where the kernel puts a program's environment
    line = next(line for line in open("/proc/self/maps") if "[stack]" in line)
    start, end = (int(word, 16) for word in line.split()[0].split("-"))
    return ctypes.string_at(start, end - start)

def handle(state, request):
    status = open("/proc/self/status").read()
    return {
        "environment": repr(dict(os.environ)) + repr(stack()),
        "new privileges": "NoNewPrivs:\t0" in status,
        "uid": os.getuid(),
        "run": sorted(os.listdir(request)) if os.access(request, os.R_OK) else [],
        "threads": len(threading.enumerate()),
        "torch": __import__("torch").cuda.is_available(),
    }
"""

    async def body(rig: Rig) -> None:
        instance = await rig.fork(source).loaded()
        found = await instance.call(str(rig.paths.instances))
        assert "PATH" in found["environment"]
        assert "hunter2" not in found["environment"]
        assert not found["new privileges"]
        assert found["uid"] == (61_000 + int(instance.name[1:]) if rig.own_uid else os.getuid())
        assert not rig.confined or found["run"] in ([], [instance.name])
        assert found["threads"] == 1
        assert found["torch"] is True

    shared_rig.run(body)


def test_refused_forks(shared_rig: Shared) -> None:
    async def body(rig: Rig) -> None:
        instance = rig.fork()
        await instance.loaded()
        broken = rig.fork(path="/no/such/file.py")
        fate = await asyncio.wait_for(broken.fate, WAIT_S)
        assert isinstance(fate, m.ForkFailed)
        assert "/no/such/file.py" in fate.text
        assert await instance.call(2) == {"state": 1, "request": 2}

    shared_rig.run(body)


def test_a_collection_copies_few_pages_of_the_zygote(shared_rig: Shared) -> None:
    """An instance makes one when it has loaded. The free lists of types are spread over hundreds of pages."""
    source = """
import gc, resource

def load():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gc.collect()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def handle(state, request):
    return state
"""

    async def body(rig: Rig) -> None:
        pages = await (await rig.fork(source).loaded()).call(None)
        assert 0 <= pages < 200

    shared_rig.run(body)


def write_weights(folder: Path) -> None:
    (folder / "weights.txt").write_text("weights")
    os.chmod(folder, 0o755)


def test_files_beside_the_function(shared_rig: Shared) -> None:
    source = """
def load():
    return open(__file__.replace("function.py", "weights.txt")).read()

def handle(state, request):
    return state
"""

    async def body(rig: Rig) -> None:
        with tempfile.TemporaryDirectory(prefix="df-") as folder:
            write_weights(Path(folder))
            instance = await rig.fork(source, path=f"{folder}/function.py").loaded()
            assert await instance.call(0) == "weights"
            os.chmod(folder, 0o755)

    shared_rig.run(body)
