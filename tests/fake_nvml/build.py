"""Compile the fake libnvidia-ml.so.1 (see nvml.c). It is found through LD_LIBRARY_PATH, as the real one is."""

import hashlib
import os
import subprocess
from pathlib import Path

from fake_cuda.build import compiler

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"
FLAGS = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-shared"]


def build(directory: Path) -> Path:
    """``directory/<hash>/libnvidia-ml.so.1``, compiled unless it is there. Raises NoCompiler."""
    digest = hashlib.sha256(repr(FLAGS).encode() + SOURCE.read_bytes()).hexdigest()[:16]
    library = directory / digest / LIBRARY
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        own = library.with_name(f"{LIBRARY}.{os.getpid()}")
        words = [compiler(), *FLAGS, "-o", str(own), str(SOURCE)]
        subprocess.run(words, check=True, capture_output=True, text=True)
        own.rename(library)
    return library


def fake_uuid(ordinal: int) -> str:
    """That of the fake driver's GPU, as NVML writes it."""
    text = (b"fake-cuda-gpu-#" + bytes([ordinal])).hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
