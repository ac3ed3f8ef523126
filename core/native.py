"""Small C++ libraries, compiled once per source and torch into a cache directory when they are first needed.

An `Extension` is one that is a module of Python.
"""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from dormouse.core.paths import home_directory
from dormouse.schemas.errors import ConfigError

BUILD_TIMEOUT_S: Final = 300

_HERE: Final = Path(__file__).parent
_FLAGS: Final = ("-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wno-attributes")
_LINKS: Final = ("-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10")


def cache_directory() -> Path:
    """The directory of built libraries: ``$XDG_CACHE_HOME/dormouse`` or ``~/.cache/dormouse``. Raises ConfigError."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home_directory("XDG_CACHE_HOME") / ".cache") / "dormouse"


def find_compiler() -> str | None:
    """The C++ compiler: ``$CXX``, else c++, g++ or clang++ on the path."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def library_path(source: Path, flags: Sequence[str]) -> Path:
    """Name of the built library: any change of torch, Python's platform, this machine's processor, the source or the
    headers beside it and here gives another one.
    """
    kind = processor() if "-march=native" in flags else ""
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")), *sorted(_HERE.glob("*.h")))]
    torch = version("torch")
    key = "\0".join((torch, sysconfig.get_platform(), kind, " ".join(flags), *texts))
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return cache_directory() / f"{source.stem}-{torch}-{digest}.so"


def build(source: Path, flags: Sequence[str], links: Sequence[str]) -> Path:
    """Compile the library unless it is there; safe when several processes do so at once. ``links``: what it is linked
    with, beside torch's ``lib`` folder on the search path.

    Raises ConfigError with the reason.
    """
    path = library_path(source, flags)
    if path.exists():
        return path
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError(f"no C++ compiler for {source.name}: install g++ or clang++, or name one in CXX")
    torch_directory = _torch_directory()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the second process waits for the first one's build
        if path.exists():
            return path
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        command = [
            compiler,
            *flags,
            f"-I{torch_directory / 'include'}",
            f"-I{_HERE}",
            str(source),
            "-o",
            str(unfinished),
        ]
        command += [f"-L{torch_directory / 'lib'}", *links]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
            if done.returncode:
                raise ConfigError(f"cannot build {source.name}: {' '.join(command)}\n{done.stderr[-2000:]}")
            os.replace(unfinished, path)  # readers see a whole library or none
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"cannot build {source.name}: {error}") from error
        finally:
            unfinished.unlink(missing_ok=True)
    return path


def _torch_directory() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ConfigError("torch is not installed")
    return Path(spec.origin).parent


class Extension:
    """A module of Python in C++ that makes something quicker and need not be there."""

    def __init__(self, name: str, source: Path, otherwise: str) -> None:
        """``otherwise``: what happens without it, for a person."""
        self.name = name
        self.source = source
        self._otherwise = otherwise
        self._loaded: Any = None
        self._broken = False

    def build(self) -> Path:
        """Compile it unless that was done. Raises ConfigError with the reason."""
        if find_compiler() is not None and not self._can_be_built():
            raise ConfigError(f"no headers of Python for {self.source.name}: install them (python3-dev)")
        return build(self.source, self._flags(), _LINKS)

    def _can_be_built(self) -> bool:
        return find_compiler() is not None and (_headers() / "Python.h").exists()

    def _flags(self) -> tuple[str, ...]:
        return (*_FLAGS, f"-I{_headers()}")

    def _path(self) -> Path:
        return _library_path(self.source, self._flags())

    def load(self) -> Any:
        """The module; None while it is not built, and if it cannot be loaded: from a file system without programs, for
        example.
        """
        if self._loaded is None and not self._broken:
            try:
                if self._path().exists():
                    self._loaded = self._imported()
            except (ImportError, OSError, ConfigError) as error:
                self._broken = True
                print(f"{self._otherwise}: {error}", file=sys.stderr)
        return self._loaded

    def _imported(self) -> Any:
        path = str(self._path())
        loader = importlib.machinery.ExtensionFileLoader(self.name, path)
        spec = importlib.util.spec_from_file_location(self.name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module

    def prepare(self) -> bool:
        """Build it, if it has to be, beside all else and after all else: the first start of a node does not wait for
        it. Whether there will be one.
        """
        if self._path().exists():
            return True
        if not self._can_be_built():
            return False
        threading.Thread(target=self._built, name="build", daemon=True).start()
        return True

    def _built(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # the compiler has it from this thread
        try:
            self.build()
        except ConfigError as error:
            print(f"{self._otherwise}: {error}", file=sys.stderr)


EXECUTOR: Final = Extension(
    "dormouse_fast_path", _HERE.parent / "gpuserver" / "commands" / "fast_path.cpp", "Python runs each operation"
)
RECORDER: Final = Extension(
    "dormouse_recorder", _HERE.parent / "client_shim" / "commands" / "recorder.cpp", "Python records each operation"
)


def _headers() -> Path:
    return Path(sysconfig.get_paths()["include"])


_library_path = cache(library_path)


def build_now(build: Callable[[], Path]) -> int:
    """As a program: build it and say where it is; returns the exit status."""
    try:
        print(build())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def processor() -> str:
    """Its features, as the kernel lists them."""
    with open("/proc/cpuinfo") as file:
        return next((line for line in file if line.startswith("flags")), "")


if __name__ == "__main__":
    sys.exit(max(build_now(EXECUTOR.build), build_now(RECORDER.build)))
