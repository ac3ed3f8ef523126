"""Confinement of an instance: the level that this host allows (probed once, in the zygote) and the steps after a fork.

An instance is hostile. Strongest first: a uid of its own, and namespaces in which it sees no process, file, socket or
network that is not its own, nor makes calls that serve no function (seccomp.py). A step that the host does not allow is
left out and its absence is part of the level's name. These always hold: no inherited descriptors, no secrets in the
environment, no capabilities, ``no_new_privs``, resource limits, and death with the zygote.
"""

import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from dormouse.core.sandbox import environment, linux, mounts, pagetable, seccomp, view
from dormouse.schemas.errors import ProcessFailed

ENVIRONMENT: Final = "DORMOUSE_ENVIRONMENT"
"""The variable by which an instance finds its function's own libraries."""

_MAX_DESCRIPTORS: Final = 1 << 20  # the kernel's own limit, fs.nr_open, unless somebody raised it
_KINDS: Final = ("AS", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "STACK")
_LIMITS: Final[dict[str, int]] = {name: getattr(resource, f"RLIMIT_{name}") for name in _KINDS}


@dataclass(frozen=True, kw_only=True)
class Level:
    """The confinement that this host allows. ``user`` says that the namespaces stand on a user namespace, not on being
    root; ``counted``, that each instance enters one more, in which the kernel (5.14) counts its processes alone.
    """

    own_uid: bool = False
    pid: bool = False
    mount: bool = False
    ipc: bool = False
    net: bool = False
    user: bool = False
    seccomp: bool = False
    cgroup: bool = False
    counted: bool = False

    @property
    def limits_processes(self) -> bool:
        return self.own_uid or self.cgroup or self.counted

    @property
    def flags(self) -> int:
        """Namespaces that the instance enters itself; that of pids is entered by being forked into it."""
        chosen = (
            (self.mount, linux.CLONE_NEWNS),
            (self.ipc, linux.CLONE_NEWIPC),
            (self.net, linux.CLONE_NEWNET),
        )
        return sum(flag for wanted, flag in chosen if wanted)

    def __str__(self) -> str:
        parts = ["own-uid" if self.own_uid else "same-uid"]
        parts += [name for name in ("user", "pid", "mount", "ipc", "net", "seccomp", "cgroup") if getattr(self, name)]
        text = "+".join(parts)
        # Without a uid or a pid namespace of its own, an instance can signal and inspect every process of the node.
        return text if self.own_uid or self.pid else f"{text} (trusted functions only)"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One instance's confinement. ``place`` is an empty directory of the node's over which the root is built."""

    directory: str
    uid: int
    limits: dict[str, int]
    folder: str  # the function's
    zygote_pid: int
    place: str
    scratch_nbytes: int
    environment: str = ""  # the folder of the function's own libraries; ``builds`` them: it may write there
    builds: bool = False
    network: bool = False  # the machine's, and not one of its own without anything


def become_authority() -> Level:
    """Get the right to make namespaces, in the zygote before it has threads, if need be by entering a user namespace.

    After this the *children* of the calling process are in a pid namespace if ``pid`` is set; nobody else changed.
    """
    if _works(lambda: linux.unshare(linux.CLONE_NEWPID)):
        linux.unshare(linux.CLONE_NEWPID)
        return Level(pid=True)
    if _works(_enter_user_namespace):  # tried in a child first, because there is no way back
        _enter_user_namespace()
        return Level(pid=True, user=True)
    return Level()


def _enter_user_namespace() -> None:
    _unshare_user(linux.CLONE_NEWPID, _own_proc())
    linux.unshare(linux.CLONE_NEWNS)  # some systems give a user namespace but no right in it


def _own_proc() -> int:
    """This process's directory in /proc, which an instance's root has read-only."""
    return os.open("/proc/self", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _unshare_user(more: int, proc: int) -> None:
    """Enter a user namespace in which we are who we are. Closes ``proc``."""
    uid, gid = os.getuid(), os.getgid()
    linux.unshare(linux.CLONE_NEWUSER | more)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc), "w") as file:
            file.write(text)
    os.close(proc)


def probe(level: Level, seen: view.View, place: str, uid: int | None) -> Level:
    """Try in children what the host allows. ``uid``: one that an instance could have; None to keep ours."""
    level = replace(
        level,
        mount=_works(lambda: linux.unshare(linux.CLONE_NEWNS)),
        ipc=_works(lambda: linux.unshare(linux.CLONE_NEWIPC)),
        net=_works(lambda: linux.unshare(linux.CLONE_NEWNET)),
        seccomp=_works(_filter),
    )
    root = seen.root(uid or os.getuid(), [], 1 << 20, level.pid)
    # A pid namespace is worth its name only with a /proc of its own; a container may forbid that.
    if level.mount and not _works(lambda: _enter(level, root, place, os.getuid())):
        level = replace(level, mount=False)
    if uid is not None and os.geteuid() == 0 and not level.user:
        candidate = replace(level, own_uid=True)

        def imports() -> None:
            if candidate.mount:
                _enter(candidate, root, place, uid)
            linux.change_user(uid)
            for path in {sys.executable, os.__file__, __file__, linux.__file__}:
                with open(path, "rb"):
                    pass

        if _works(imports):
            level = candidate
    if level.user and level.mount and not level.cgroup:
        candidate = replace(level, counted=True)

        def two_processes() -> None:
            _enter(candidate, root, place, os.getuid())
            linux.drop_capabilities()
            resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
            os.fork() or os._exit(0)  # fails where those of the uid outside are counted; a zombie counts
            with suppress(BlockingIOError):
                os.fork() or os._exit(0)
                raise PermissionError("the kernel does not count")

        if _works(two_processes):
            level = candidate
    return level


def _filter() -> None:
    linux.set_no_new_privileges()
    seccomp.install(uncounted=True)


def _works(step: Callable[[], object]) -> bool:
    """Whether a step succeeds in a child of its own."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            step()
            status = 0
        except OSError as error:
            if os.environ.get("DORMOUSE_DEBUG_SANDBOX"):
                os.write(2, f"sandbox probe: {error}\n".encode())
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def _enter(level: Level, root: mounts.Root, place: str, uid: int, loopback: bool = False) -> None:
    """Namespaces and the file system. ``loopback``: of the new network, where a build's way out is heard (way_out.py).
    Raises OSError.
    """
    proc = _own_proc() if level.counted else -1
    linux.unshare(level.flags)
    if loopback:  # before there is another user namespace, which has no right in this one's network
        linux.raise_loopback()
    if level.mount:
        mounts.enter(place, root, uid)
    if level.counted:
        linux.set_dumpable(True)  # else the files that make a user namespace are not ours to write
        _unshare_user(0, proc)


def _windows(cell: Cell) -> list[mounts.BoundPath]:
    """The paths that this instance alone sees: the directory of its sockets, and the function's folder."""
    windows = [
        mounts.BoundPath(path=os.path.realpath(cell.directory)),
        mounts.BoundPath(path=view.FUNCTION, source=os.path.realpath(cell.folder)),
    ]
    if cell.environment:
        source = os.path.realpath(cell.environment)
        windows.append(mounts.BoundPath(path=view.ENVIRONMENT, source=source, writable=cell.builds))
    return windows


def expect_no_link(folder: str) -> None:
    """Raises ProcessFailed if this is another folder by now: what makes environments may be no friend."""
    if os.path.realpath(folder) != os.path.join(os.path.realpath(os.path.dirname(folder)), os.path.basename(folder)):
        raise ProcessFailed(f"{folder} is a link; remove it, and deploy the function again")


def close_descriptors(keep: Iterable[int]) -> None:
    """Close everything except stdin, stdout, stderr and ``keep``."""
    start = 3
    for fd in sorted(keep):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, _MAX_DESCRIPTORS)


def confine(level: Level, seen: view.View, cell: Cell, log_fd: int, keep: Iterable[int]) -> str:
    """Turn the forked, still privileged child into an instance. Raises OSError or ProcessFailed naming the step.

    Returns what the instance shall call the function's folder.
    """
    os.umask(0o022)
    os.setsid()
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    for fd, target in ((null, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(fd, target)
    close_descriptors(keep)
    folder = _named(level, cell.uid, cell.folder, view.FUNCTION)
    level = replace(level, net=level.net and not cell.network)
    linux.set_name(f"dormouse {os.path.basename(cell.directory)}")
    changes_uid = cell.uid != os.getuid()
    private = _private(level, cell)
    if cell.environment:
        expect_no_link(cell.environment)
        private[ENVIRONMENT] = _named(level, cell.uid, cell.environment, view.ENVIRONMENT)
    if level.flags:
        root = seen.root(cell.uid, _windows(cell), cell.scratch_nbytes, level.pid, cell.network)
        _enter(level, root, cell.place, cell.uid, loopback=cell.builds and level.net)
    _limit(cell.limits, level)
    with suppress(OSError):  # no CAP_SETPCAP: then there is nothing to lose, and no_new_privs gives nothing back
        linux.drop_bounding_set()
    if changes_uid:
        if not level.own_uid:
            raise ProcessFailed(
                f"uid {cell.uid} was asked for, but instances share the node's uid here; confinement: {level}"
            )
        linux.change_user(cell.uid)
    linux.drop_capabilities()
    linux.set_no_new_privileges()
    if level.seccomp:
        seccomp.install(uncounted=not level.cgroup)
    # A page table that is opened with a capability would show physical addresses, so it is only now. For this moment
    # processes of our uid could look into us; there are none with a uid or a pid namespace of our own.
    linux.set_dumpable(changes_uid or level.pid)
    pagetable.keep()
    linux.set_dumpable(False)
    linux.die_with_parent_signal(signal.SIGKILL)
    if os.getppid() not in ((0,) if level.pid else (cell.zygote_pid,)):
        os._exit(1)  # the zygote died before we asked to die with it
    os.umask(0o077)
    clean = environment.scrubbed(dict(os.environ))
    os.environ.clear()
    os.environ.update(clean | private | seen.caches | {"HF_HUB_OFFLINE": "1", "USER": view.USER})
    tempfile.tempdir = None
    os.chdir(private["HOME"])
    return folder


def _named(level: Level, uid: int, folder: str, inside: str) -> str:
    """A name of a folder that works after the confinement."""
    if level.mount:
        return inside
    if uid == os.getuid():
        return folder
    # Another uid cannot pass through the node's directories, but what is open stays open.
    return f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}"


def _private(level: Level, cell: Cell) -> dict[str, str]:
    """Variables with the places where the instance may write: in its own root, or without one, in its directory."""
    if level.mount:
        return {"HOME": view.HOME, "TMPDIR": "/tmp"}
    private = {"HOME": os.path.join(cell.directory, "home"), "TMPDIR": os.path.join(cell.directory, "tmp")}
    for path in private.values():
        os.makedirs(path, 0o700, exist_ok=True)
        if cell.uid != os.getuid():
            os.chown(path, cell.uid, cell.uid)
    return private


def _limit(limits: dict[str, int], level: Level) -> None:
    # One byte, less than any core has. No byte would be worse: a program of the machine's that takes cores gets one
    # whatever the limit is, unless it is 1 (core(5)), and what a function starts has its variables in it.
    most = 0 if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    for name, value in limits.items():
        if name not in _LIMITS:
            raise ProcessFailed(f"there is no resource limit {name!r}; known are {', '.join(_LIMITS)}")
        if name == "NPROC" and (level.cgroup or not level.limits_processes):
            continue  # counted over all processes of the uid: another node's too, or the node's and the user's own
        if name == "DATA":
            value += _data_nbytes()  # what is there before the function is not its own
        hard = resource.getrlimit(_LIMITS[name])[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(_LIMITS[name], (allowed, allowed))


def _data_nbytes() -> int:
    """Private memory that could be written, as RLIMIT_DATA counts it."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
