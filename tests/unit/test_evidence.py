"""What an executor leaves when it dies, and whom that blames."""

import os
import signal
import subprocess
import sys

import pytest

from dormouse.core.evidence import (
    BETWEEN,
    COMMAND,
    EVIDENCE_FD,
    FAILED,
    IDLE,
    PageContents,
    blame,
    make_page,
    read_page,
)

DIES = """
import os, signal, sys
from dormouse.core.evidence import Evidence
evidence = Evidence.inherited()
evidence.enter("1-1234567")
evidence.enter("1-7")
if sys.argv[1] == "between":
    evidence.leave()
if sys.argv[1] == "after":
    evidence.leave()
    evidence.clear()
    evidence.failed()
if sys.argv[1] == "lost":
    evidence.failed()
    os._exit(1)
os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("when", "number", "found", "blamed"),
    [
        ("in", signal.SIGSEGV, COMMAND, True),
        ("in", signal.SIGABRT, COMMAND, True),
        ("in", signal.SIGKILL, COMMAND, False),
        ("between", signal.SIGSEGV, BETWEEN, False),
        ("after", signal.SIGSEGV, IDLE, False),
        ("lost", 0, FAILED, True),
    ],
)
def test_d4_a_process_that_dies_leaves_whose_command_it_was_in(
    when: str, number: int, found: int, blamed: bool
) -> None:
    page = make_page()
    try:
        command = [sys.executable, "-c", DIES, when, str(int(number))]
        environment = os.environ | {EVIDENCE_FD: str(page)}
        died = subprocess.run(command, pass_fds=(page,), env=environment)
        assert died.returncode == (1 if when == "lost" else -number)
        assert read_page(page) == PageContents(found, "1-7")
        assert bool(blame(read_page(page), died.returncode, "")) == blamed
    finally:
        os.close(page)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL])
def test_d4_signals_that_code_causes(number: signal.Signals) -> None:
    assert number.name in blame(PageContents(COMMAND, "1-7"), -number, "")
    assert blame(PageContents(IDLE, "1-7"), -number, "") == ""


@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGTERM, 0, 1])
def test_d4_neither_a_kill_from_outside_nor_the_kernels_lack_of_memory(status: int) -> None:
    assert blame(PageContents(COMMAND, "1-7"), status, "") == ""
    assert "not given back" in blame(PageContents(COMMAND, "1-7"), status, "its lease was not given back")
    assert blame(PageContents(BETWEEN, "1-7"), status, "its lease was not given back") == ""
