"""`dormouse run` programs whose node goes away, or which break the protocol: an error at once, never silence."""

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.nodes.testnode import TestNode, running_node

CONFIG = """
[gpu]
count = 1
memory = "256MiB"
[limits]
idle_ms = 300
compute_ms = 600000
[schedule]
turn_ms = 60000 # who computes keeps its turn, however busy the machine is
"""

LOOP = """
    import time, torch
    x = torch.ones(64, 64, device="cuda")
    print("computing", (x @ x).sum().item(), flush=True)
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        (x @ x).sum().item()
"""

WITHOUT_WAITING = """
    import time, torch
    x = torch.ones(64, 64, device="cuda")
    print("computing", (x @ x).sum().item(), flush=True)
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        y = x @ x
"""

UPLOADING = """
    import time, torch
    print("computing", flush=True)
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        x = torch.ones(64, 64).to("cuda")
"""


def session(node: TestNode, source: str) -> "subprocess.Popen[str]":
    script = node.directory / "script.py"
    script.write_text(textwrap.dedent(source))
    command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", str(node.run), "run", str(script)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@contextmanager
def computing(node: TestNode, source: str) -> "Iterator[subprocess.Popen[str]]":
    """A session that has said so."""
    with session(node, source) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("computing"), process.communicate(timeout=60)
            yield process
        finally:
            process.kill()


def last_words(process: "subprocess.Popen[str]") -> str:
    """What the session says on its way out. One that is not told computes on for a minute and ends with status 0;
    75 has a service manager run it again.
    """
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 75, stderr
    assert stderr.count("the node has ended this session") == 1, stderr
    assert "SessionEnded" in stderr, stderr
    assert "script.py" in stderr, "the line that was interrupted is named"
    return stderr


def ready_again(node: TestNode, role: str, pid: int) -> None:
    node.replaced(role, pid)
    node.wait(lambda: node.http("GET", "/readyz").status == 200, 90, "the node to be ready again")


@pytest.fixture(scope="module")
def lone_gpu() -> Iterator[TestNode]:
    with running_node(CONFIG) as node:
        yield node


def test_the_store_is_killed(lone_gpu: TestNode) -> None:
    with computing(lone_gpu, LOOP) as process:
        pid = lone_gpu.kill("store")
        words = last_words(process)
    assert "run the program again" in words
    ready_again(lone_gpu, "store", pid)


def test_the_controller_is_killed(lone_gpu: TestNode) -> None:
    """Of who computes, and of who waits for a GPU: that one has no executor yet, and waits for the router's answer."""
    waiting = 'print("computing", flush=True)\nimport torch\nprint((torch.ones(2).cuda() + 1).sum())'
    with computing(lone_gpu, WITHOUT_WAITING) as holder, computing(lone_gpu, waiting) as waiter:
        lone_gpu.wait(lambda: lone_gpu.status()["waiting"] == 1, 60, "the second to wait")
        pid = lone_gpu.kill("controller")
        for process in (holder, waiter):
            assert "run the program again" in last_words(process)
    ready_again(lone_gpu, "controller", pid)


def test_the_router_is_killed(lone_gpu: TestNode) -> None:
    """Who computes hears it at once; who does not is interrupted, and hears it at each further command."""
    idle_program = """
        import torch
        x = torch.ones(8, device="cuda")
        print("computing", x.sum().item(), flush=True)
        try:
            input()
        except KeyboardInterrupt:
            print("interrupted")
        try:
            print(x.sum().item())
        except RuntimeError as error:
            print("first:", error)
        try:
            torch.ones(3).cuda()
        except RuntimeError as error:
            print("second:", error)
    """
    with computing(lone_gpu, idle_program) as idle, computing(lone_gpu, UPLOADING) as busy:
        pid = lone_gpu.kill("router")
        assert "run the program again" in last_words(busy)
        ready_again(lone_gpu, "router", pid)
        assert idle.wait(60) == 75
        stdout, stderr = idle.communicate()
    assert "interrupted" in stdout, stdout + stderr
    assert "first: the node has ended this session" in stdout, stdout + stderr
    assert "second: the node has ended this session" in stdout, stdout + stderr


def test_the_node_is_stopped_or_killed(lone_gpu: TestNode) -> None:
    node = lone_gpu
    for stop in (signal.SIGTERM, signal.SIGKILL):
        with computing(node, LOOP) as process:
            assert node.process is not None
            everyone = node.descendants()
            node.process.send_signal(stop)
            words = last_words(process)
        node.process.wait()
        node.expect_nothing_left(everyone)
        assert "dormouse up" in words
        assert ("was stopped" in words) == (stop == signal.SIGTERM), words
        node.start()


def test_a_violation_is_named(lone_gpu: TestNode) -> None:
    program = """
        import torch
        from dormouse.client_shim.torch_face.remote_tensor import world
        x = torch.ones(8, device="cuda")
        print("computing", x.sum().item(), flush=True)
        world.stream._connection.channel.send(b"garbage")
        print(x.sum().item())
        print(x.sum().item())
    """
    with computing(lone_gpu, program) as process:
        words = last_words(process)
    assert "broke the protocol" in words


def test_a_program_goes_on_after_the_death_of_its_executor(lone_gpu: TestNode) -> None:
    """What it had made there is gone; with new tensors it may go on, on the executor's successor."""
    program = """
        import time, torch
        def compute():
            x = torch.ones(64, 64).cuda()
            return (x @ x).sum().item()
        print("computing", compute(), flush=True)
        for attempt in range(10**6):
            try:
                compute()
            except RuntimeError as error:
                print(type(error).__name__, error, flush=True)
                break
        print("again", compute(), flush=True)
    """
    with computing(lone_gpu, program) as process:
        lone_gpu.kill("gpu0")
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stdout.splitlines()[0].startswith("ExecutorLost"), stdout
    assert stdout.splitlines()[1] == f"again {64.0**3}", stdout


@pytest.mark.parametrize("theirs", ["0.0.1 (messages 12345678)", None])
def test_another_version_is_refused_by_name(lone_gpu: TestNode, theirs: str | None) -> None:
    path = lone_gpu.run / "t" / "version"
    ours = path.read_text()
    path.unlink()
    if theirs is not None:
        path.write_text(theirs)
    try:
        with session(lone_gpu, LOOP) as process:
            _, stderr = process.communicate(timeout=60)
    finally:
        path.write_text(ours)
    assert process.returncode == 2
    assert "this node runs Dormouse " + (theirs or "of an older version") in stderr, stderr
    assert f"this command is Dormouse {ours}" in stderr, stderr
    assert "restart the node" in stderr
