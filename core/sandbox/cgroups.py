"""Control groups: one for each instance, in which the kernel counts its memory of every kind, processes and CPU.

Owns a folder of one zygote's in the hierarchies that the machine has (v2, or v1's memory, pids and cpu), where the node
may write to them. The usable limits are found by trial: a child that exceeds a small limit must be ended for it. The
processes of the node itself stay where they are, but for one case (`_make_room`).
"""

import hashlib
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

CONTROLLERS: Final[tuple[str, ...]] = ("memory", "pids", "cpu")
NEEDED: Final[tuple[str, ...]] = ("memory", "pids")

_NODE: Final = "dormouse-node"
"""The group of a node's own processes, where they may not stay in the one that they were started in."""

_TRIAL_NBYTES: Final = 32 << 20
_TRIAL_PROCESSES: Final = 4
_BUSY_S: Final = 2.0
"""A group is busy for a moment after its last process has been reaped."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """``cpus`` 0: as much as is free; an instance's share is that of every other."""

    memory_nbytes: int
    processes: int
    cpus: float = 0.0

    def files(self, unified: bool) -> dict[str, tuple[str, str]]:
        """The files to write, by name: the controller, and the text. A file whose name ends in "?" may be missing."""
        nbytes, period_us = str(self.memory_nbytes), 100_000
        quota = str(int(self.cpus * period_us)) if self.cpus else ""
        if unified:
            found = {
                "memory.max": ("memory", nbytes),
                "memory.swap.max?": ("memory", "0"),
                "memory.oom.group?": ("memory", "1"),  # the whole instance ends, not the largest of its processes
                "pids.max": ("pids", str(self.processes)),
            }
            return found | ({"cpu.max": ("cpu", f"{quota} {period_us}")} if quota else {})
        found = {
            "memory.limit_in_bytes": ("memory", nbytes),
            "memory.memsw.limit_in_bytes?": ("memory", nbytes),
            "pids.max": ("pids", str(self.processes)),
        }
        return found | ({"cpu.cfs_quota_us": ("cpu", quota)} if quota else {})


class Group:
    """The control group of one instance: its directories, by controller. In v2 they are all the same directory."""

    def __init__(self, directories: dict[str, Path]) -> None:
        self._directories = directories

    def join(self) -> None:
        """Put the calling process into it, and all that it will start. Raises OSError."""
        for directory in _distinct(self._directories):
            (directory / "cgroup.procs").write_text("0")

    def exceeded(self) -> str:
        """The limit for which the kernel has ended a process: "memory", or ""."""
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError, KeyError):
                counts = dict(line.split() for line in (self._directories["memory"] / name).read_text().splitlines())
                return "memory" if int(counts["oom_kill"]) else ""
        return ""

    def remove(self) -> None:
        """When nothing runs in it any more; what cannot be removed is left to the next zygote."""
        for directory in _distinct(self._directories):
            _remove(directory)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """A zygote's folders, by controller, in which those of its instances are made."""

    folders: dict[str, Path]
    unified: bool

    @classmethod
    def claim(cls, tag: str) -> Self | None:
        """Make the folders where this process may, and remove what an earlier zygote of this ``tag`` left there. To be
        called while all of the node's processes can be seen, by one at a time. None: no limit can be set here.
        """
        for folders, unified in _candidates(folder_name(tag)):
            found = cls(folders=folders, unified=unified)
            try:
                for folder in _distinct(folders):
                    folder.mkdir(exist_ok=True)
                    if unified:
                        _enable(folder)
                for stale in [inner for folder in _distinct(folders) for inner in folder.iterdir() if inner.is_dir()]:
                    _remove(stale)
                if found._holds():
                    return found
            except OSError:
                pass
            found.remove()
        return None

    def make(self, name: str, limits: Limits) -> Group:
        """Raises OSError."""
        directories = {controller: folder / name for controller, folder in self.folders.items()}
        group = Group(directories)
        try:
            for directory in _distinct(directories):
                directory.mkdir()
            for file, (controller, text) in limits.files(self.unified).items():
                if controller not in directories:
                    continue
                path = directories[controller] / file.rstrip("?")
                if path.exists() or not file.endswith("?"):
                    path.write_text(text)
        except BaseException:
            group.remove()
            raise
        return group

    def remove(self) -> None:
        for folder in _distinct(self.folders):
            with suppress(OSError):
                for inner in folder.iterdir():
                    if inner.is_dir():
                        _remove(inner)
            _remove(folder)

    def _holds(self) -> bool:
        """Whether a child is ended for its shared memory, and is refused processes. Raises OSError."""
        group = self.make("trial", Limits(memory_nbytes=_TRIAL_NBYTES, processes=_TRIAL_PROCESSES))
        try:
            pid = os.fork()
            if pid == 0:
                os._exit(_exceed(group))
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return status == -9 and group.exceeded() == "memory"
        finally:
            group.remove()


def folder_name(tag: str) -> str:
    return "dormouse-" + hashlib.blake2b(tag.encode(), digest_size=6).hexdigest()


def _exceed(group: Group) -> int:
    """In a child: 1 if it is not limited; it does not return if it is."""
    try:
        group.join()
        waiting, hold = os.pipe()
        for _ in range(_TRIAL_PROCESSES):
            try:
                if os.fork() == 0:
                    os.close(hold)
                    os.read(waiting, 1)
                    os._exit(0)
            except BlockingIOError:
                break
        else:
            return 1
        memory = os.memfd_create("dormouse-trial")
        for _ in range(2 * _TRIAL_NBYTES >> 20):
            os.write(memory, bytes(1 << 20))
    except OSError:
        return 2
    return 1


def _distinct(directories: dict[str, Path]) -> list[Path]:
    return list(dict.fromkeys(directories.values()))


def _remove(directory: Path) -> None:
    end_s = time.monotonic() + _BUSY_S
    while True:
        try:
            directory.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > end_s:
                return
            time.sleep(0.001)


# --- where the hierarchies are


def _candidates(name: str) -> list[tuple[dict[str, Path], bool]]:
    """Folders that could be ours, best first."""
    mounts, own = _mounts(Path("/proc/self/mountinfo").read_text()), _own(Path("/proc/self/cgroup").read_text())
    found: list[tuple[dict[str, Path], bool]] = []
    if "" in mounts and "" in own:
        here = _started_in(_directory(*mounts[""], own[""]))
        with suppress(OSError):
            offered = (here / "cgroup.controllers").read_text().split() if here else []
            if here is not None and set(NEEDED) <= set(offered):
                used = [controller for controller in CONTROLLERS if controller in offered]
                if _make_room(here):
                    found.append((dict.fromkeys(used, here / name), True))
                top = mounts[""][0]
                above = [parent for parent in here.parents if parent == top or top in parent.parents]
                found += [(dict.fromkeys(used, parent / name), True) for parent in above]
    old: dict[str, Path] = {}
    for controller in CONTROLLERS:
        if controller in mounts and controller in own and (here := _directory(*mounts[controller], own[controller])):
            old[controller] = here / name
    if set(NEEDED) <= set(old):
        found.append((old, False))
    return found


def _mounts(mountinfo: str) -> dict[str, tuple[Path, str]]:
    """The mount point of each hierarchy, and its directory mounted there, by controller; v2's is ""."""
    found: dict[str, tuple[Path, str]] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        _, _, _, root, place, *_ = left.split()
        kind, _, options = right.split()
        names: Iterable[str] = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in names:
            found.setdefault(name, (Path(place), root))
    return found


def _own(cgroup: str) -> dict[str, str]:
    """The path of this process's group, by controller."""
    rows = [line.split(":", 2) for line in cgroup.splitlines()]
    return {name: path for _, names, path in rows for name in names.split(",")}


def _directory(place: Path, root: str, path: str) -> Path | None:
    """The path at which a group is seen; None if the mount does not show it."""
    if root == "/":
        return place / path.lstrip("/")
    inner = path.removeprefix(root)
    return place / inner.lstrip("/") if inner != path and inner[:1] in ("", "/") else None


# --- v2


def _enable(folder: Path) -> None:
    """Have the groups in ``folder`` counted, and ``folder`` itself by its parents. Raises OSError."""
    offered = (folder / "cgroup.controllers").read_text().split()
    if not set(NEEDED) <= set(offered):
        wanted = " ".join(f"+{controller}" for controller in CONTROLLERS)
        (folder.parent / "cgroup.subtree_control").write_text(wanted)
        offered = (folder / "cgroup.controllers").read_text().split()
    wanted = " ".join(f"+{controller}" for controller in CONTROLLERS if controller in offered)
    (folder / "cgroup.subtree_control").write_text(wanted)


def _started_in(here: Path | None) -> Path | None:
    """The group in which this node was started: another zygote, or the one before, may have made room there."""
    return here.parent if here is not None and here.name == _NODE else here


def _make_room(here: Path) -> bool:
    """A v2 group has processes or groups with limits, not both: if all processes of ours are the node's (a service that
    systemd delegates to, or a container of its own), they move into a group below. Whether there is room now.
    """
    pids = [int(word) for word in (here / "cgroup.procs").read_text().split()]
    if not pids:
        return True
    supervisor = os.getppid()
    if any(supervisor not in _lineage(pid) and pid not in _lineage(supervisor) for pid in pids):
        return False
    try:
        leaf = here / _NODE
        leaf.mkdir(exist_ok=True)
        for pid in pids:
            (leaf / "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    return True


def _lineage(pid: int) -> list[int]:
    """A process and its ancestors."""
    found: list[int] = []
    while pid > 0 and pid not in found:
        found.append(pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
    return found
