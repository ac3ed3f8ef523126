"""A process that started warm (tests/warm_start.py) is what it is to a user, who starts it anew."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from warm_start import AT_START, POPEN, TITLE, ZYGOTE, WarmPopen

from benchmarks.nodes.testnode import running_node
from dormouse.core import procfs

START = (sys.executable, "-P", "-m")
CONFIG = '[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\n'


def seen(pid: int) -> dict[str, Any]:
    """What the kernel says of a process; names of this node and of this process are left out."""
    folder = Path(f"/proc/{pid}")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines())
    return {
        "words": [re.sub("/tmp/dm[^/]*", "/tmp", word) for word in procfs.words(pid) if word],
        "parent": "supervisor" if int(fields[1]) != os.getpid() else "this",
        "leads": int(fields[3]) == pid,
        "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
        "cwd": os.readlink(folder / "cwd"),
        "standard": [re.sub("/tmp/dm[^/]*", "/tmp", os.readlink(folder / "fd" / str(n))) for n in range(3)],
    }


def links(pid: int) -> set[str]:
    """Its pipes and sockets."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it has been closed meanwhile
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {each for each in found if each.startswith(("pipe:", "socket:"))}


def node() -> tuple[dict[str, dict[str, Any]], list[int]]:
    """What is seen of each process; and who is there for the supervisor to fork others from. Nobody has his links."""
    with running_node(CONFIG) as running:
        assert running.process is not None
        pids = running.pids() | {"supervisor": running.process.pid}
        forks = [pid for pid in procfs.children(running.process.pid) if procfs.words(pid)[0] == TITLE]
        for own in map(links, forks):
            assert len(own) == 1
            assert not any(own & links(pid) for pid in pids.values())
        return {role: seen(pid) for role, pid in pids.items()}, forks


def test_it_has_what_it_was_to_have(monkeypatch: pytest.MonkeyPatch) -> None:
    warm, forks = node()
    assert len(forks) == 1, "else nothing here starts warm"
    monkeypatch.setattr(subprocess, "Popen", POPEN)
    cold, forks = node()
    assert forks == []
    assert warm == cold


def test_how_it_ends_is_seen() -> None:
    ended = subprocess.Popen([*START, "dormouse.controller.main"], stderr=subprocess.PIPE, text=True)
    said = ended.communicate(timeout=60)[1]
    assert (ended.returncode, "required: --run" in said) == (2, True)


def test_what_cannot_start_warm_starts_cold() -> None:
    """Another interpreter, options of its own, what is no process of a node, and other libraries on the way."""
    env = dict(os.environ)
    assert WarmPopen.source([*START, ZYGOTE], env) is not None
    for argv in (["/usr/bin/python3", "-m", ZYGOTE], [sys.executable, "-I", "-m", ZYGOTE], [*START, "json.tool"]):
        assert WarmPopen.source(argv, env) is None
    for name in AT_START:
        assert WarmPopen.source([*START, ZYGOTE], env | {name: "/other"}) is None
