"""What /proc says of processes; of one that is not there, nothing."""

import contextlib
from pathlib import Path


def state(pid: int) -> str:
    """One letter, as "T" for stopped and "Z" for a zombie; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def words(pid: int) -> list[str]:
    """Its command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # this thread has ended; the others' children are there
                found += [int(word) for word in (task / "children").read_text().split()]
    return found


def inner_pid(pid: int) -> int:
    """Its number in the innermost pid namespace that it is in; 0 if it is not there."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0
