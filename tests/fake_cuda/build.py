"""Compile the fake driver: which compiler, which flags, where the result is kept. Loading it is harness.py's."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent
LIBRARY = "libcuda.so.1"  # also the SONAME: a later dlopen() of this name finds the one that is loaded
FLAGS = [
    "-std=gnu11",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-fvisibility=hidden",
    "-shared",
    f"-Wl,-soname,{LIBRARY}",
    "-Wl,-z,defs",
    "-Wl,-Bsymbolic",
]


class NoCompiler(Exception):
    """needs a C compiler: gcc, clang, or $CC"""


def compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    raise NoCompiler(NoCompiler.__doc__)


def build(directory: Path) -> Path:
    """``directory/<hash of sources and flags>/libcuda.so.1``, compiled unless it is there.

    Safe against others that build it at the same time. Raises NoCompiler; subprocess.CalledProcessError with the
    compiler's output in ``stderr``.
    """
    sources = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(repr(FLAGS).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    library = directory / digest.hexdigest()[:16] / LIBRARY
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    own = library.with_name(f"{LIBRARY}.{os.getpid()}")
    names = [str(source) for source in sources if source.suffix == ".c"]
    subprocess.run([compiler(), *FLAGS, "-o", str(own), *names, "-pthread"], check=True, capture_output=True, text=True)
    own.rename(library)
    return library
