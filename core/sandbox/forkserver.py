"""Forking instances and reaping them with all that they started: pid namespaces, their inits, reports of failures.

Used by the zygote's loop, which owns the sockets; here are only processes. A child that cannot be confined reports why
in a pipe, so that nothing unconfined ever runs user code.
"""

import json
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NoReturn

from dormouse.core.config import SandboxSection, parse_nbytes
from dormouse.core.sandbox import cgroups, confinement, linux, seccomp, view
from dormouse.core.startup import END_INSTANCES
from dormouse.schemas import messages as m
from dormouse.schemas.errors import DormouseError, ProcessFailed

CONFINEMENT_FAILED: Final = 70  # EX_SOFTWARE


@dataclass(frozen=True, kw_only=True)
class ChildSetting:
    """Settings that a zygote gives to all its children. ``limits`` are those that hold here, worded for people, by
    name.
    """

    confinement: str
    threads: int
    limits: dict[str, str]


Entry = Callable[[m.Fork, bytes, str, int, ChildSetting], object]
"""The code that a confined child runs. Arguments: its Fork, the text of its entry file, its path of the function's
folder, its arena's descriptor, its setting. It does not return.
"""


class ForkRefused(Exception):
    """No process was made; the text says what to do."""


@dataclass(kw_only=True)
class ForkedInstance:
    """A forked instance, and the process that is the init of its pid namespace if it has one."""

    instance: str
    pid: int
    pidfd: int
    host_pid: int  # as processes outside the zygote's pid namespace know it
    report: int  # what the child says when its confinement fails
    init: int
    lifeline: int  # the init ends when this is closed, and the kernel ends its namespace with it
    group: cgroups.Group | None


class ForkServer:
    """Made in a zygote once it is warm; ``place`` is where instances build their roots."""

    def __init__(
        self,
        level: confinement.Level,
        seen: view.View,
        place: str,
        groups: cgroups.Groups | None,
        config: SandboxSection,
        entry: Entry,
    ) -> None:
        self.level = level
        self.children: dict[str, ForkedInstance] = {}  # by instance
        self._seen = seen
        self._place = place
        self._entry = entry
        names = ["memory", "open_files"]
        names += ["processes"] if level.limits_processes else []
        names += ["scratch"] if level.mount else []
        named = {name: config.limit(name) for name in names}
        self._setting = ChildSetting(confinement=str(level), threads=config.threads, limits=named)
        self._scratch_nbytes = parse_nbytes(config.scratch)
        self._groups = groups
        self._limits = cgroups.Limits(
            memory_nbytes=parse_nbytes(config.memory), processes=config.processes, cpus=config.cpus
        )
        self._zygote_pid = os.getpid()
        self._title_place = linux.title_place()
        self._own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._init_program = shutil.which("cat", path="/bin:/usr/bin")
        if level.seccomp:
            seccomp.compiled(uncounted=not level.cgroup)  # once, not in each fork
        if not level.pid:
            linux.adopt_orphans()  # what leaves its process group is still found when its instance ends

    def fork(self, fork: m.Fork, fds: list[int]) -> ForkedInstance:
        """Start an instance; ``fds`` are [log, arena]. Raises ForkRefused, and ProcessFailed if forking is not safe."""
        if len(fds) != 2 + fork.variables or fork.instance in self.children:
            raise ForkRefused("a Fork needs a new name and descriptors: log, arena, and its variables if it has any")
        if len(os.listdir("/proc/self/task")) != 1:
            raise ProcessFailed("the zygote has more than one thread; instances would inherit locks that nobody frees")
        report, report_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        init, lifeline, group = 0, -1, None
        try:
            if self._groups is not None:
                group = self._groups.make(fork.instance, self._limits)
            if self.level.pid:
                linux.unshare(linux.CLONE_NEWPID)
                init, lifeline = self._start_init()
            pid = os.fork()
            if pid == 0:
                self._become(fork, group, fds, report_write)
        except OSError as error:
            os.close(report)
            self._end_init(init, lifeline)
            if group is not None:
                group.remove()
            raise ForkRefused(f"cannot fork: {error}; close other programs or allow more") from error
        finally:  # in the parent only: _become never returns
            if self.level.pid:
                linux.setns(self._own_pid_namespace, linux.CLONE_NEWPID)
            os.close(report_write)
        pidfd = os.pidfd_open(pid)
        child = ForkedInstance(
            instance=fork.instance,
            pid=pid,
            pidfd=pidfd,
            host_pid=linux.host_pid(pidfd),
            report=report,
            init=init,
            lifeline=lifeline,
            group=group,
        )
        self.children[fork.instance] = child
        return child

    def signal(self, child: ForkedInstance, number: int) -> None:
        """Send a signal to the instance's process group. A cancellation goes to its main thread only, because the
        programs that it runs would die of it.
        """
        send = os.kill if number == signal.SIGUSR1 else os.killpg
        try:
            send(child.pid, number)
        except ProcessLookupError:
            with suppress(ProcessLookupError):
                os.kill(child.pid, number)  # it has not made its process group yet

    def finish(self, child: ForkedInstance) -> tuple[int, str, str]:
        """Reap a dead or killed child and all that it started: its status, the limit that it was ended for, or "", and
        why it was not confined, or "".
        """
        del self.children[child.instance]
        status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        self._end_init(child.init, child.lifeline)
        if not self.level.pid:
            self._end_group(child)
        try:
            failure = os.read(child.report, 8192).decode(errors="replace")
        except BlockingIOError:
            failure = ""
        os.close(child.report)
        os.close(child.pidfd)
        limit = ""
        if child.group is not None:
            limit = child.group.exceeded() if status == -signal.SIGKILL else ""
            child.group.remove()
        return status, limit, failure

    def _start_init(self) -> tuple[int, int]:
        """A pid namespace needs an init; if it were the instance, signals would not have their usual effect on it.

        ``cat`` waits for the end of a pipe of which we hold the other side, so it also ends when we are killed. An
        instance with our uid, beside an executed program with no right that it lacks, could look through /proc/1/root
        at our files: there the init is a fork of ours, which is not dumpable.
        """
        if self._init_program is None and not self.level.user:
            return 0, -1
        stdin, lifeline = os.pipe2(os.O_CLOEXEC)
        if self.level.user:
            init = os.fork()
            if init == 0:
                _wait_for_end(stdin)
            os.close(stdin)
            return init, lifeline
        assert self._init_program is not None
        actions = [(os.POSIX_SPAWN_DUP2, fd, target) for fd, target in ((stdin, 0), (self._null, 1), (self._null, 2))]
        init = os.posix_spawn(self._init_program, ["dormouse-init"], {}, file_actions=actions, setpgroup=0)
        os.close(stdin)
        return init, lifeline

    def _end_init(self, init: int, lifeline: int) -> None:
        if init:
            os.close(lifeline)
            os.kill(init, signal.SIGKILL)
            os.waitpid(init, 0)  # returns when the whole namespace is gone

    def _end_group(self, child: ForkedInstance) -> None:
        """Without a pid namespace: the group, then the orphans that came to us because they had left it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        known = {other.pid for other in self.children.values()}
        while orphans := _children_of_mine() - known:
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)  # its own children come to us now: look again

    def _become(self, fork: m.Fork, group: cgroups.Group | None, fds: list[int], report: int) -> NoReturn:
        """In the child. The caller's frames keep the zygote's sockets referenced: none closes a descriptor of ours. Its
        variables are read here and not in the zygote, whose memory other children inherit.
        """
        log_fd, arena_fd = fds[:2]
        try:
            linux.set_title(self._title_place, f"dormouse: {fork.function or 'a build'} {fork.instance}")
            signal.set_wakeup_fd(-1)
            if group is not None:
                group.join()
            for number in (signal.SIGTERM, signal.SIGINT, END_INSTANCES):
                signal.signal(number, signal.SIG_DFL)
            source = b""  # of a model the sandbox reads the entry itself: it may be a file of many GB
            if fork.llm is None and fork.embedding is None:
                with open(os.path.join(fork.folder, fork.entry), "rb") as file:
                    source = file.read()
            cell = confinement.Cell(
                directory=fork.directory,
                uid=fork.uid,
                limits=fork.limits,
                folder=fork.folder,
                zygote_pid=self._zygote_pid,
                place=self._place,
                scratch_nbytes=self._scratch_nbytes,
                environment=fork.environment,
                builds=fork.build is not None,
                network=fork.network,
            )
            variables = _variables(fds[2]) if fork.variables else {}
            folder = confinement.confine(self.level, self._seen, cell, log_fd, [arena_fd, report])
            os.environ.update(variables)
        except (OSError, DormouseError) as error:
            os.write(report, f"cannot confine the instance: {error}".encode())
            os._exit(CONFINEMENT_FAILED)
        except BaseException:
            os.write(report, traceback.format_exc().encode()[-4000:])
            os._exit(CONFINEMENT_FAILED)
        os.close(report)
        try:
            self._entry(fork, source, folder, arena_fd, self._setting)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(CONFINEMENT_FAILED)


def _variables(fd: int) -> dict[str, str]:
    """By name. The descriptor is closed with all others that are not the child's."""
    found: dict[str, str] = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    return found


def _wait_for_end(stdin: int) -> NoReturn:
    """As the init of a pid namespace: its other children have other parents, and end with it."""
    signal.set_wakeup_fd(-1)
    os.setpgid(0, 0)
    confinement.close_descriptors([stdin])
    linux.die_with_parent_signal(signal.SIGKILL)
    while os.read(stdin, 1):
        pass
    os._exit(0)


def _children_of_mine() -> set[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return {int(word) for word in file.read().split()}
