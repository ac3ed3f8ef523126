"""`dormouse run --restart`: a program that is run again whenever its node was replaced or has come back."""

import os
import signal
import subprocess
import sys
import time
from typing import Final

from dormouse.core.exits import SESSION_ENDED, UNREACHABLE
from dormouse.core.sandbox.linux import die_with_parent_signal

FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 30.0

STEADY_S: Final = 60.0
"""A program that has run so long was well: the next wait is the first one again."""

_STOP: Final = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}


def next_wait_s(status: int, lasted_s: float, last_wait_s: float) -> float | None:
    """The pause before the program is run again; None: it has ended for a reason of its own."""
    if status not in (SESSION_ENDED, UNREACHABLE):
        return None
    if not last_wait_s or lasted_s >= STEADY_S:
        return FIRST_WAIT_S
    return min(2 * last_wait_s, LONGEST_WAIT_S)


def run_again(arguments: list[str]) -> int:
    """Run `dormouse` with ``arguments`` as often as it takes; its last exit status."""
    command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", *arguments]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_STOP, signal.SIGCHLD})
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent_signal(signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(SESSION_ENDED)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    wait_s = 0.0
    while True:
        began_s = time.monotonic()
        process = subprocess.Popen(command, preexec_fn=prepare)
        stopped = False
        while process.poll() is None:
            number = signal.sigwait({*_STOP, signal.SIGCHLD})
            stopped |= number != signal.SIGCHLD
            if number in (signal.SIGTERM, signal.SIGHUP):  # a terminal's Ctrl-C goes to the program, too
                process.send_signal(number)
        status = process.returncode
        next_s = next_wait_s(status, time.monotonic() - began_s, wait_s)
        if stopped or next_s is None:
            return status if status >= 0 else 128 - status
        wait_s = next_s
        print(f"dormouse: the program is run again in {wait_s:g} s", file=sys.stderr, flush=True)
        if (told := signal.sigtimedwait(_STOP, wait_s)) is not None:
            return 128 + told.si_signo
