"""Run code under the fake driver in a process of its own, and steer the driver from there.

A process can load one libcuda for ever, so every group of tests gets a fresh child: :func:`run_child`. In the child the
driver is loaded before anything asks for it (:func:`load`), and :class:`Control` is the handle on it.
"""

import ctypes
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

TESTS = Path(__file__).parents[1]
LIBRARY_ENV = "FAKE_CUDA_LIBRARY"
RESULT_MARK = "fake-cuda-result:"
LOG_NBYTES = 4 << 20

Mode = Literal["eager", "lazy", "late"]


class Control:
    """The fake driver's exports beyond CUDA's (see the C comments); CUDA's own are called through ``cuda.bindings``."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._c = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._c.fake_cuda_log.restype = ctypes.c_size_t

    def mode(self, mode: Mode) -> None:
        self._c.fake_cuda_mode(["eager", "lazy", "late"].index(mode))

    def delay_ms(self, delay_ms: int) -> None:
        self._c.fake_cuda_delay(delay_ms)

    def polls(self, count: int) -> None:
        """How many queries, in lazy mode, find undone work undone before they ask for it; -1: all."""
        self._c.fake_cuda_polls(count)

    def fail(self, function: str, nth: int, code: int, *, sticky: bool = False) -> None:
        """The ``nth`` call from now of ``cuSomething`` (0: every call) returns ``code`` and does nothing. The point
        ``copy``: the nth copy to be carried out. Code 0 forgets the rules for the function."""
        if self._c.fake_cuda_fail(function.encode(), nth, code, int(sticky)):
            raise ValueError("too many rules, or too long a name")

    def violations(self) -> list[str]:
        """The rules of use that were broken (the last 64)."""
        text = ctypes.create_string_buffer(1 << 14)
        self._c.fake_cuda_violations(text, len(text))
        return text.value.decode().splitlines()

    def forgive(self) -> None:
        self._c.fake_cuda_forgive()

    def log(self) -> list[str]:
        """The last calls ``name(arguments) = code``, work carried out ``> ...``, violations ``! ...``."""
        text = ctypes.create_string_buffer(LOG_NBYTES)
        self._c.fake_cuda_log(text, len(text))
        return text.value.decode().splitlines()

    def calls(self) -> list[str]:
        """Only the names of the logged calls, in order."""
        return [line.partition("(")[0] for line in self.log() if line[:2] not in ("> ", "! ")]

    def clear_log(self) -> None:
        self._c.fake_cuda_log_clear()

    def pending(self, stream: Any = 0) -> int:
        """Ops that were issued to the stream and are not done."""
        return int(self._c.fake_cuda_pending(ctypes.c_void_p(int(stream))))

    def step(self, stream: Any, count: int = 1) -> int:
        """Let the next ops of the stream run, and whatever they wait for; how many ran."""
        return int(self._c.fake_cuda_step(ctypes.c_void_p(int(stream)), count))

    def live(self, what: str) -> int:
        """How many streams, events, handles, mappings, reservations, allocations, imports, registrations or
        host_allocations there are."""
        return int(self._c.fake_cuda_live(what.encode()))

    def kernel_sum(self, stream: Any, pointer: int, nbytes: int) -> ctypes.c_uint64:
        """Queue what stands for a kernel: when the stream gets there, the sum of these bytes. Keep the result alive."""
        result = ctypes.c_uint64(2**64 - 1)
        code = self._c.fake_cuda_sum(
            ctypes.c_void_p(int(stream)), ctypes.c_uint64(pointer), ctypes.c_size_t(nbytes), ctypes.byref(result)
        )
        if code:
            raise RuntimeError(f"fake_cuda_sum: {code}")
        return result


class CallFailed(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"CUresult {code}")
        self.code = code


def ok(result: tuple[Any, ...]) -> Any:
    """What a call of ``cuda.bindings.driver`` gave besides its code: None, one thing or a tuple. Raises CallFailed."""
    if int(result[0]):
        raise CallFailed(int(result[0]))
    return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]


def load(library: Path | None = None) -> Control:
    """Make the fake the libcuda of this process; before the first call through ``cuda.bindings``."""
    return Control(library or Path(os.environ[LIBRARY_ENV]))


def run_child(
    code: str | Callable[..., Any],
    library: Path,
    *arguments: Any,
    timeout_s: float = 30,
    env: Mapping[str, str | int] | None = None,
    pass_fds: Sequence[int] = (),
) -> Any:
    """What ``code`` returned in a fresh process in which the fake driver is loaded.

    ``code`` is a function of a module that can be imported, called with ``arguments`` (both ways by JSON), or source
    text in which ``control`` and ``driver`` are names and ``result`` may be set. ``env`` adds to the environment
    (``{"FAKE_CUDA_DEVICES": 2}``). Raises AssertionError with the child's output if it fails or is killed.
    """
    if callable(code):
        file = inspect.getsourcefile(code)
        assert file is not None
        job = {"file": file, "function": code.__name__, "arguments": arguments}
    else:
        job = {"source": textwrap.dedent(code)}
    environment = {
        **os.environ,
        **{name: str(value) for name, value in (env or {}).items()},
        LIBRARY_ENV: str(library),
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "PYTHONFAULTHANDLER": "1",
    }
    child = subprocess.run(
        [sys.executable, "-m", "fake_cuda.harness", json.dumps(job)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        pass_fds=pass_fds,
    )
    _, mark, result = child.stdout.rpartition("\n" + RESULT_MARK)
    if child.returncode or not mark:
        raise AssertionError(f"child exited with {child.returncode}\n{child.stdout}\n{child.stderr}")
    return json.loads(result)


def _run_job(job: dict[str, Any]) -> Any:
    control = load()
    if "source" in job:
        driver = importlib.import_module("cuda.bindings.driver")
        names: dict[str, Any] = {"control": control, "driver": driver, "result": None}
        exec(compile(job["source"], "<child>", "exec"), names)
        return names["result"]
    spec = importlib.util.spec_from_file_location("fake_cuda_child", job["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, job["function"])(*job["arguments"])


if __name__ == "__main__":
    print(f"\n{RESULT_MARK}{json.dumps(_run_job(json.loads(sys.argv[1])))}")
