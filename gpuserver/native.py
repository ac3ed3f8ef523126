"""Small C++ libraries, compiled once per source and torch into a cache directory when they are first needed."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from dormouse.core.paths import home_directory
from dormouse.schemas.errors import ConfigError

BUILD_TIMEOUT_S: Final = 300


def cache_directory() -> Path:
    """Where built libraries are kept: ``$XDG_CACHE_HOME/dormouse`` or ``~/.cache/dormouse``. Raises ConfigError."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home_directory("XDG_CACHE_HOME") / ".cache") / "dormouse"


def find_compiler() -> str | None:
    """The C++ compiler: ``$CXX``, else c++, g++ or clang++ on the path."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def library_path(source: Path, flags: Sequence[str]) -> Path:
    """Name of the built library: any change of torch, Python's platform, this machine's processor, the source or the
    headers beside it gives another one.
    """
    processor = _processor() if "-march=native" in flags else ""
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = "\0".join((torch.__version__, sysconfig.get_platform(), processor, " ".join(flags), *texts))
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return cache_directory() / f"{source.stem}-{torch.__version__}-{digest}.so"


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
    torch_directory = Path(torch.__file__).parent
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the second process waits for the first one's build
        if path.exists():
            return path
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        command = [compiler, *flags, f"-I{torch_directory / 'include'}", str(source), "-o", str(unfinished)]
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


def build_now(build: Callable[[], Path]) -> int:
    """As a program: build it and say where it is; returns the exit status."""
    try:
        print(build())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _processor() -> str:
    """What it can do, as the kernel says."""
    with open("/proc/cpuinfo") as file:
        return next((line for line in file if line.startswith("flags")), "")
