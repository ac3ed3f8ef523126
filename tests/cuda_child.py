"""Run tests under the fake CUDA driver, each in a process of its own.

A process can load one libcuda, and one that has met a sticky error is lost, so every test needs a fresh one. Importing
torch takes seconds, so one server imports it and forks for each test, before any driver is loaded: a driver does not
survive a fork. ``@in_child()`` makes a test of a function that takes the fake's Control; ``@in_children()`` of one that
runs in two processes, ``f(control, socket, first)``, with a socket between them. A test fails if the fake driver saw a
rule of use broken.
"""

import contextlib
import ctypes
import importlib.util
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cuda.build import NoCompiler, build
from fake_cuda.harness import Control, load

TESTS = Path(__file__).parent
PR_SET_PDEATHSIG = 1


class Server:
    """The process that forks."""

    def __init__(self, library: Path) -> None:
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cuda_child", str(library)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def run(self, function: Callable[..., None], two: bool, env: dict[str, str]) -> None:
        """Raises AssertionError with the traceback of a child that failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"file": inspect.getfile(function), "name": function.__name__, "two": two, "env": env}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server died"
        trouble = json.loads(answer)
        assert not trouble, "\n" + trouble

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="session")
def cuda_server() -> Iterator[Server]:
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda.bindings.driver: make setup")
    try:
        server = Server(build(Path(tempfile.gettempdir()) / f"dormouse-fake-cuda-{os.getuid()}"))
    except NoCompiler as error:
        pytest.skip(str(error))
    yield server
    server.close()


def in_child(**env: str | int) -> Callable[[Callable[[Control], None]], Callable[[Server], None]]:
    return lambda function: _test(function, False, env)


def in_children(
    **env: str | int,
) -> Callable[[Callable[[Control, socket.socket, bool], None]], Callable[[Server], None]]:
    return lambda function: _test(function, True, env)


def _test(function: Callable[..., None], two: bool, env: dict[str, str | int]) -> Callable[[Server], None]:
    def test(cuda_server: Server) -> None:
        cuda_server.run(function, two, {name: str(value) for name, value in env.items()})

    test.__name__ = function.__name__
    test.__doc__ = function.__doc__
    test.body = function  # type: ignore[attr-defined]
    return test


# --- in the server


def _serve(library: Path) -> None:
    import dormouse.gpuserver.device.cuda.device  # noqa: F401  # what takes seconds

    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(_run(job, library)), flush=True)


def _run(job: dict[str, Any], library: Path) -> str:
    """What went wrong; empty if nothing did."""
    if not job["two"]:
        return _collect([_fork(job, library, None, True)])
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    children = [_fork(job, library, end, end is ends[0]) for end in ends]
    for end in ends:
        end.close()
    return _collect(children)


def _fork(job: dict[str, Any], library: Path, end: socket.socket | None, first: bool) -> tuple[int, int]:
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a test that hangs ends with the server
    os.close(out)
    os.dup2(2, 1)  # the server's answers are on 1
    trouble = "did not end"
    try:
        trouble = _child(job, library, end, first)
    except BaseException:
        trouble = traceback.format_exc()
    with contextlib.suppress(OSError), os.fdopen(into, "w") as stream:
        stream.write(trouble)
    os._exit(0)


def _child(job: dict[str, Any], library: Path, end: socket.socket | None, first: bool) -> str:
    os.environ.update(job["env"])
    control = load(library)
    spec = importlib.util.spec_from_file_location("cuda_test", job["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    body = getattr(module, job["name"]).body
    if end is None:
        body(control)
    else:
        body(control, end, first)
    return "\n".join(control.violations())


def _collect(children: list[tuple[int, int]]) -> str:
    troubles = []
    for pid, out in children:
        with os.fdopen(out) as stream:
            trouble = stream.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        troubles.append(trouble or (f"the child ended with {code}" if code else ""))
    return "\n".join(filter(None, troubles))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
