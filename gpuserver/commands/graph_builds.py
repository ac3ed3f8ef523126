"""Graphs compiled by Inductor, each once, in a process of its own with limits, while their operations are called one
by one.

A built graph is a library in the cache directory (AOTInductor's package): no Python of the compiler runs in an
executor. One is built at a time, at the lowest priority. A failure is kept: it would fail again.
"""

import fcntl
import hashlib
import os
import queue
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from dormouse.core import native
from dormouse.core.config import NodeConfig
from dormouse.gpuserver.commands import operators
from dormouse.gpuserver.commands.definitions import ProtocolViolation
from dormouse.gpuserver.commands.graphs import NAME, Graph, GraphOperator, Unfit
from dormouse.gpuserver.commands.oplist import Allowed
from dormouse.schemas import stream as wire
from dormouse.schemas.errors import ConfigError

BUILD_S: Final = 600
BUILD_NBYTES: Final = 8 << 30
"""Memory limit of the process that builds, and of each compiler that it starts."""

WAITING: Final = 32
KNOWN: Final = 256
"""Graphs that an executor knows; those requested longest ago are dropped first."""

KEPT: Final = 256
"""Built graphs in the cache directory; a few megabytes each. Those loaded longest ago are dropped first."""

OFF: Final = "this node compiles no graphs: [gpu] compile is off"
_BUSY: Final = "too many graphs are waiting to be built"


class _Build:
    def __init__(self, digest: str, definition: bytes) -> None:
        self.digest, self.definition = digest, definition
        self.outcome: str | None = None  # "": it is an operator; else why not
        self.operator: GraphOperator | None = None


class GraphBuilds:
    """Those of one executor, for all of its instances."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = 1
        self._known: OrderedDict[str, _Build] = OrderedDict()
        self._waiting: queue.Queue[_Build | None] = queue.Queue(WAITING)
        self._worker: threading.Thread | None = None

    def want(self, digest: str, definition: bytes) -> None:
        """Build it, if nobody has asked for it before. Raises ProtocolViolation if it is malformed."""
        build = self._known.get(digest)
        if build is None:
            build = _Build(digest, definition)
            try:
                Graph(definition, self._device)
                self._waiting.put_nowait(build)
            except Unfit as reason:
                build.outcome = str(reason)
            except queue.Full:
                build.outcome = _BUSY
                return
            self._known[digest] = build
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(digest)
        if self._worker is None:
            self._threads = torch.get_num_threads()  # of the computing thread: each thread has its own
            self._worker = threading.Thread(target=self._work, name="graphs", daemon=True)
            self._worker.start()

    def outcome(self, digest: str) -> str | None:
        """Why it is not built; "" if it is, None as long as nobody knows."""
        build = self._known.get(digest)
        return _BUSY if build is None else build.outcome

    def operator(self, digest: str) -> Allowed | None:
        build = self._known.get(digest)
        return None if build is None else build.operator

    def close(self) -> None:
        """Nothing more is built, and builds under way end."""
        if self._worker is not None:
            with suppress(queue.Empty):
                while True:
                    self._waiting.get_nowait()
            self._waiting.put(None)
            for process in list(_running):
                _kill(process)
            self._worker.join(5)

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # the compilers have it from this thread
        while (build := self._waiting.get()) is not None:
            try:
                path = built(build.digest, build.definition, self._device, self._threads)
                graph = Graph(build.definition, self._device)
                build.operator = GraphOperator(build.digest, graph, loaded(path, self._device))
                build.outcome = ""
            except Exception as error:  # whatever a compiler and a loader may raise: it is called as it is
                build.outcome = f"{error}" or type(error).__name__


_running: set[subprocess.Popen[bytes]] = set()
"""Processes that build."""

_builds: GraphBuilds | None = None


def enable(builds: GraphBuilds | None) -> None:
    """This process builds graphs, or does not any more."""
    global _builds
    if _builds is not None:
        _builds.close()
    _builds = builds
    operators.graphs_are_of(_find)


class InstanceGraphs:
    """The graphs that one instance has asked for."""

    def __init__(self) -> None:
        self._asked: set[str] = set()  # digests, ever
        self._unheard: list[str] = []

    def want(self, commands: list[Any], position: int) -> int:
        """GRAPH."""
        digest, definition = commands[position : position + 2]
        if type(definition) is not bytes or len(definition) > wire.MAX_GRAPH_NBYTES:
            raise ProtocolViolation("a graph that is no bytes, or too many of them")
        if digest != wire.graph_digest(definition):
            raise ProtocolViolation("a graph with another digest than its own")
        self._asked.add(digest)
        if len(self._asked) > wire.MAX_GRAPHS:
            raise ProtocolViolation(f"more than {wire.MAX_GRAPHS} graphs")
        if _builds is not None:
            _builds.want(digest, definition)
        self._unheard.append(digest)
        return position + 2

    def outcomes(self) -> list[tuple[str, str]]:
        """Digests, and why they are not built ("" if they are), each once."""
        if not self._unheard:
            return []
        found = [(each, OFF if _builds is None else _builds.outcome(each)) for each in self._unheard]
        self._unheard = [digest for digest, outcome in found if outcome is None]
        return [(digest, outcome) for digest, outcome in found if outcome is not None]


def _find(name: str) -> Allowed | None:
    """The operator of this name, of a graph that is built."""
    found = NAME.match(name)
    return None if found is None or _builds is None else _builds.operator(found[1])


def of_config(config: NodeConfig, device: torch.device) -> GraphBuilds | None:
    """None if the node wants none, or lacks the requirements."""
    tools = native.find_compiler() is not None and (device.type == "cpu" or find_spec("triton") is not None)
    return GraphBuilds(device) if config.gpu.compile and tools else None


def built(digest: str, definition: bytes, device: torch.device, threads: int) -> Path:
    """The library, built unless it is there; safe when several processes do so at once. Raises ConfigError."""
    folder = native.cache_directory() / "graphs"
    path = folder / f"{digest}-{_machine(device, threads)}.pt2"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:  # one at a time, whoever builds
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _build_apart(definition, path, device, threads)
            for old in sorted(folder.glob("*.pt2"), key=lambda each: each.stat().st_mtime)[:-KEPT]:
                old.unlink(missing_ok=True)
    os.utime(path)
    return path


def loaded(path: Path, device: torch.device) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    run: Any = loader(str(path), "model", False, 1, device.index or 0 if device.type == "cuda" else -1).boxed_run
    return lambda inputs: list(run(list(inputs)))


def _machine(device: torch.device, threads: int) -> str:
    kind = torch.cuda.get_device_capability(device) if device.type == "cuda" else native.processor()
    text = "\0".join((torch.__version__, str(kind), str(threads)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _build_apart(definition: bytes, path: Path, device: torch.device, threads: int) -> None:
    with tempfile.TemporaryDirectory(prefix="graph-", dir=path.parent) as work:
        unfinished = Path(work, "graph.pt2")
        command = [sys.executable, "-m", "dormouse.gpuserver.commands.graph_builds"]
        command += [str(unfinished), str(device), str(threads)]
        environment = {**os.environ, "TMPDIR": work, "TORCHINDUCTOR_CACHE_DIR": work, "TRITON_CACHE_DIR": work}
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        _running.add(process)
        try:
            _, said = process.communicate(definition, timeout=BUILD_S)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"to compile it took more than {BUILD_S} s") from None
        finally:
            _kill(process)
            process.communicate()
            _running.discard(process)
        if process.returncode:
            lines = said.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
            raise ConfigError(f"it cannot be compiled: {lines[-1][:500]}")
        os.replace(unfinished, path)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With the compilers that it has started, which are in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class _Module(torch.nn.Module):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        outputs, bad = self._graph.call(list(inputs))
        return outputs if bad is None else [*outputs, bad]


def main() -> int:
    """As a program: read a definition, and write its library to the path in the first argument."""
    path, device, threads = sys.argv[1], torch.device(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_DATA, (BUILD_NBYTES, BUILD_NBYTES))
    torch.set_num_threads(threads)
    graph = Graph(sys.stdin.buffer.read(), device)
    from torch._inductor import aoti_compile_and_package
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():  # whose tensors take no memory
        inputs = tuple(
            torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device=device) for meta in graph.inputs
        )
    with torch.no_grad():
        program = torch.export.export(_Module(graph), inputs, strict=False)
        aoti_compile_and_package(program, package_path=path, inductor_configs={"cpp.threads": threads})
    return 0


if __name__ == "__main__":
    sys.exit(main())
