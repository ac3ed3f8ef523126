"""A node under a service manager: what its supervisor says, and that nobody else of the node can say it."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.nodes.testnode import running_node
from dormouse.core import procfs

COLD = True  # this is about environments
VARIABLES = (b"NOTIFY_SOCKET", b"WATCHDOG_USEC", b"WATCHDOG_PID")


def test_it_says_that_it_is_ready_lives_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "30000000")
        with running_node("[gpu]\ncount = 1\n") as node:
            said = [manager.recv(4096).decode()]
            while not said[-1].startswith("READY=1\n"):
                said.append(manager.recv(4096).decode())
            assert set(said[:-1]) <= {"WATCHDOG=1"}  # it lives while it starts, too
            assert said[-1] == f"READY=1\nSTATUS=all processes are up, port {node.port}"
            while (again := manager.recv(4096).decode()) != "WATCHDOG=1":  # of the next second
                assert again == said[-1]
            assert node.process is not None
            started = procfs.children(node.process.pid)
            started += [inner for pid in started for inner in procfs.children(pid)]  # a zygote is a stub's child
            assert len(started) >= 6
            for pid in started:
                assert not any(name in Path(f"/proc/{pid}/environ").read_bytes() for name in VARIABLES)
        manager.settimeout(1)
        left: list[str] = []
        while not left or left[-1] != "STOPPING=1":
            left.append(manager.recv(4096).decode())
        assert set(left[:-1]) <= {"WATCHDOG=1", said[-1]}


def test_a_node_that_takes_over_is_the_main_process_and_says_so_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "30000000")
        with running_node("[gpu]\ncount = 1\n") as node:
            with ThreadPoolExecutor(1) as pool:  # who hears the manager's socket keeps it from filling
                replacing = pool.submit(node.replace)
                said: list[str] = []
                while not any(text.startswith("MAINPID=") for text in said):
                    if replacing.done():
                        replacing.result()  # which says why it is not told of
                    said.append(manager.recv(4096).decode())
                replacing.result()
            ready = f"READY=1\nSTATUS=all processes are up, port {node.port}"
            assert node.process is not None
            assert said[-1] == f"MAINPID={node.process.pid}"
            assert set(said[:-1]) == {"WATCHDOG=1", ready}
            after: list[str] = []
            while not {ready, "WATCHDOG=1"} <= set(after):  # from the new one: the old one has ended
                after.append(manager.recv(4096).decode())
            assert set(after) == {ready, "WATCHDOG=1"}
