"""Reads /proc about processes; one that is not there has empty values."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

_TICKS_S: Final = os.sysconf("SC_CLK_TCK")
_HELD: Final = ("RssAnon:", "RssShmem:")


class Footprint(NamedTuple):
    """Of a process and all that it has started and that lives. ``memory_nbytes``: in RAM without files that it has
    mapped; what it shares with the process that it was forked from counts. ``cpu_s``: of those that have ended, too.
    """

    memory_nbytes: int
    cpu_s: float
    processes: int


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


def footprint(pid: int) -> Footprint | None:
    """None: it is not there."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    held = sum(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith(_HELD))
    spent_s = sum(map(int, fields[11:15])) / _TICKS_S  # utime, stime, cutime and cstime, the fields 14 to 17
    below = [found for child in children(pid) if (found := footprint(child)) is not None]
    return Footprint(
        held + sum(each.memory_nbytes for each in below),
        spent_s + sum(each.cpu_s for each in below),
        1 + sum(each.processes for each in below),
    )


def footprints(pids: Iterable[int]) -> dict[int, Footprint]:
    """Of those that are there."""
    return {pid: found for pid in pids if pid and (found := footprint(pid)) is not None}


def inner_pid(pid: int) -> int:
    """Its number in the innermost pid namespace that it is in; 0 if it is not there."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0
