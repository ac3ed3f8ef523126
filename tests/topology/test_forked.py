"""Functions and sessions that fork: the children have no cuda and say so, and the parent goes on."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from benchmarks.nodes.testnode import TestNode, running_node

WORDS = "Cannot re-initialize CUDA in forked subprocess"

FUNCTION = """
    import multiprocessing, os, subprocess, sys, torch

    fork = multiprocessing.get_context("fork")

    def load():
        return torch.ones(64, 64).to("cuda")

    def child(answers, x):
        try:
            answers.put(x.sum().item())
        except RuntimeError as error:
            answers.put(str(error))

    def with_process(x):
        answers = fork.SimpleQueue()
        process = fork.Process(target=child, args=(answers, x))
        process.start()
        process.join(60)
        if process.exitcode is None:
            process.kill()
            return "the child hangs"
        return answers.get()

    def handle(x, how):
        before = (x @ x).sum()
        y = x + 1
        if how == "process":
            found = with_process(x)
        elif how == "pool":
            with fork.Pool(2) as pool:
                found = [pool.map(abs, [-1, 2]), subprocess.check_output(["echo", "hi"]).decode()]
        else:
            pid = os.fork()
            if pid == 0:
                del y
                if how == "exits":
                    sys.exit(3)
                if how == "returns":
                    return "from the child"
                x.sum().item()
            found = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return [found, before.item(), y.sum().item()]
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "256MiB"\npoison = true\n') as running:
        running.deployed("forks", FUNCTION, timeout="40s")
        yield running


@pytest.mark.parametrize(("how", "expected"), [("exits", 3), ("returns", 0), ("raises", 1), ("pool", [[1, 2], "hi\n"])])
def test_a_function_forks(node: TestNode, how: str, expected: object) -> None:
    for _ in range(2):
        assert node.result("forks", how) == [expected, 64.0**3, 2 * 64.0**2]


def test_cuda_in_a_child_of_a_function_is_refused(node: TestNode) -> None:
    text, before, after = node.result("forks", "process")
    assert text.startswith(WORDS)
    assert (before, after) == (64.0**3, 2 * 64.0**2)


def test_a_child_that_raises_is_in_the_functions_log(node: TestNode) -> None:
    node.result("forks", "raises")
    assert WORDS in node.log_of("forks")


SCRIPT = """
    import multiprocessing, sys, threading, torch

    fork = multiprocessing.get_context("fork")
    x = torch.ones(64, 64, device="cuda")
    stop = threading.Event()

    def busy():  # holds the stream's lock nearly all the time
        while not stop.is_set():
            (x @ x).sum().item()

    def child(answers):
        try:
            answers.put(x.sum().item())
        except RuntimeError as error:
            answers.put(str(error))
        sys.exit(0)

    thread = threading.Thread(target=busy)
    thread.start()
    for _ in range(5):
        answers = fork.SimpleQueue()
        process = fork.Process(target=child, args=(answers,))
        process.start()
        process.join(60)
        print(process.exitcode, answers.get() if process.exitcode == 0 else process.kill())
    stop.set()
    thread.join()
    print((x @ x).sum().item())
"""


def command(node: TestNode, source: str) -> list[str]:
    script = node.directory / "script.py"
    script.write_text(textwrap.dedent(source))
    return [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", str(node.run), "run", str(script)]


def test_a_script_forks_while_it_computes(node: TestNode) -> None:
    outcome = subprocess.run(command(node, SCRIPT), capture_output=True, text=True, timeout=150)
    *children, last = outcome.stdout.splitlines()
    assert len(children) == 5, outcome
    assert all(line.startswith(f"0 {WORDS}") for line in children), outcome
    assert float(last) == 64.0**3
    assert (outcome.returncode, outcome.stderr) == (0, "")


def test_a_session_ends_with_its_own_process(node: TestNode) -> None:
    """A child that stays behind does not hold the session's identity, nor its lease."""
    source = """
        import os, sys, torch
        print(torch.ones(2, device="cuda").sum().item(), flush=True)
        if os.fork() == 0:
            sys.stdin.read()
            sys.exit(9)
    """
    with subprocess.Popen(command(node, source), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "2.0\n"
        assert parent.wait(60) == 0
        node.wait(lambda: len(os.listdir(node.run / "i")) == 1, 60, "the session to end; the function's instance stays")
