"""A zygote: an interpreter, warm with a world, that forks instances.

``python -m dormouse.core.sandbox.zygote --run RUN --role ROLE --epoch N``; the role names the world (world.py).

It runs no user code and no operation and keeps one thread, because a fork copies neither other threads nor what they
held locked. It has no ZeroMQ socket: it speaks to the router over one SEQPACKET connection and to the supervisor by
bytes in an inherited pipe. Exactly one of Exited and ForkFailed ends each Fork; after it nothing of the instance runs.
"""

import fcntl
import gc
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NoReturn

from dormouse.core.sandbox import environment

if __name__ == "__main__":
    environment.start_clean()  # before the other imports, which would be made twice

from dormouse.core.config import NodeConfig
from dormouse.core.links.fds import PacketSocket, close_all
from dormouse.core.links.sockets import listener_at, remove_path
from dormouse.core.paths import RunPaths
from dormouse.core.sandbox import cgroups, confinement, linux, preload, view
from dormouse.core.sandbox.forkserver import ForkedInstance, ForkRefused, ForkServer
from dormouse.core.sandbox.warming import Warming
from dormouse.core.sandbox.world import World
from dormouse.core.sandbox.worlds import dormant_worlds, worlds
from dormouse.core.startup import END_INSTANCES, die_with_parent, parse_arguments, read_node_config
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, ProcessFailed, RemoteProtocolError

HEARTBEAT_S: Final = 1.0
SEND_S: Final = 5.0  # the router has a loop that always reads; longer means that it is gone
_ORPHANED: Final = signal.SIGUSR2

Connection = PacketSocket[m.ToZygote, m.FromZygote]


class Zygote:
    """The select loop. Children are watched by pidfd, in the same wait as the sockets."""

    def __init__(self, path: str, server: ForkServer, ready_fd: int) -> None:
        self._server = server
        self._path = path
        self._ready_fd = ready_fd
        self._connection: Connection | None = None
        self._selector = selectors.DefaultSelector()
        self._running = True
        self._clearing = False
        self._listener = listener_at(path, socket.SOCK_SEQPACKET)
        self._wakeup, wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(END_INSTANCES, self._on_clear)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the supervisor
        signal.set_wakeup_fd(wakeup_write)
        self._watch(self._wakeup, lambda: os.read(self._wakeup, 64))

    def _watch(self, fd: int, ready: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, ready)

    def _on_term(self, *_: object) -> None:
        self._running = False

    def _on_clear(self, *_: object) -> None:
        self._clearing = True

    def run(self) -> None:
        """Serve one router after the other until SIGTERM, then end all instances."""
        self._watch(self._listener.fileno(), self._accept)
        self._beat(b"ready\n")
        beat_s = time.monotonic() + HEARTBEAT_S
        while self._running:
            for key, _ in self._selector.select(max(0.0, beat_s - time.monotonic())):
                key.data()
                if not self._running:
                    break
            if self._clearing:
                self._clearing = False
                self._disconnect()
                self._beat(b"ready\n")
            if time.monotonic() >= beat_s:
                self._beat(b".")
                beat_s = time.monotonic() + HEARTBEAT_S
        self._disconnect()
        self._listener.close()
        remove_path(self._path)

    def _beat(self, sign: bytes) -> None:
        if self._ready_fd >= 0:
            try:
                os.write(self._ready_fd, sign)
            except OSError:
                self._running = False  # nobody supervises us any more

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.settimeout(SEND_S)
        self._connection = PacketSocket(sock, m.ToZygote)
        self._selector.unregister(self._listener)  # one router at a time; its successor waits in the backlog
        self._watch(sock.fileno(), self._receive)
        version = ".".join(map(str, sys.version_info[:3]))
        torch = getattr(sys.modules.get("torch"), "__version__", "")  # if that is of this world
        level = str(self._server.level)
        self._tell(m.ZygoteReady(confinement=level, python=version, torch=str(torch), modules=list(_imported())))

    def _disconnect(self) -> None:
        """The router is gone: so are its instances, when this returns; the next one may give their uids to others."""
        if self._connection is None:
            return
        self._selector.unregister(self._connection.sock)
        self._connection.close()
        self._connection = None
        children = list(self._server.children.values())
        for child in children:
            self._server.signal(child, signal.SIGKILL)
        for child in children:
            self._selector.unregister(child.pidfd)
            self._server.finish(child)
        if self._running:
            self._watch(self._listener.fileno(), self._accept)

    def _tell(self, message: m.FromZygote) -> None:
        if self._connection is not None:
            try:
                self._connection.send(message)
            except PeerLost:
                self._disconnect()

    def _receive(self) -> None:
        if self._connection is None:
            return  # ended by an earlier event of the same wait
        try:
            packet = self._connection.recv()
        except (PeerLost, RemoteProtocolError):
            packet = None
        if packet is None:
            self._disconnect()
            return
        message, fds = packet
        try:
            if isinstance(message, m.Signal):
                if (child := self._server.children.get(message.instance)) is not None:
                    self._server.signal(child, message.signal)
            else:
                self._fork(message, fds)
        finally:
            close_all(fds)

    def _fork(self, fork: m.Fork, fds: list[int]) -> None:
        try:
            child = self._server.fork(fork, fds)
        except ForkRefused as error:
            self._tell(m.ForkFailed(instance=fork.instance, text=str(error)))
            return
        self._watch(child.pidfd, lambda: self._exited(child))
        self._tell(m.Forked(instance=fork.instance, pid=child.host_pid))

    def _exited(self, child: ForkedInstance) -> None:
        if self._server.children.get(child.instance) is not child:
            return  # ended with its router, by an earlier event of the same wait
        self._selector.unregister(child.pidfd)
        status, limit, failure = self._server.finish(child)
        if failure:
            self._tell(m.ForkFailed(instance=child.instance, text=failure))
        else:
            self._tell(m.Exited(instance=child.instance, pid=child.host_pid, status=status, limit=limit))


def _imported() -> set[str]:
    """The packages and modules at the top that this world has, but for those of Python itself."""
    return {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names


def _stand_by(child: int, groups: cgroups.Groups | None) -> NoReturn:
    """The supervisor sees the parent of the zygote, and the zygote is the init of a pid namespace: mirror its life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, END_INSTANCES):
        signal.signal(number, lambda number, _: os.kill(child, number))
    signal.signal(_ORPHANED, lambda *_: os.kill(child, signal.SIGKILL))
    supervisor = os.getppid()
    linux.die_with_parent_signal(_ORPHANED)  # there are control groups to remove after the last instance
    if os.getppid() != supervisor:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if groups is not None:
        groups.remove()
    os._exit(status if status >= 0 else 128 - status)


def _world(config: NodeConfig, role: str) -> World:
    found = worlds(config) | dormant_worlds(config)
    if role not in found:
        raise ProcessFailed(f"there is no world for {role!r}; this node has {', '.join(found)}")
    return found[role]


def _claim(paths: RunPaths, world: World, generation: int) -> cgroups.Groups | None:
    """Zygotes that start at once do it one after another: processes may have to move, and must not be missed."""
    place = os.open(paths.trusted, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(place, fcntl.LOCK_EX)
    try:
        return cgroups.Groups.claim(paths.groups(world.role, generation))
    finally:
        fcntl.flock(place, fcntl.LOCK_UN)
        os.close(place)


def main() -> int:
    """Raises ProcessFailed with what the world lacks."""
    arguments = parse_arguments()
    die_with_parent(signal.SIGKILL, dumpable=True)  # else the files that make a user namespace are not ours to write
    ready_fd = int(os.environ.pop("DORMOUSE_READY_FD", "-1"))
    paths = RunPaths(arguments.run)
    config = read_node_config(arguments.run) if paths.node_json.exists() else NodeConfig()
    world = _world(config, arguments.role)
    groups = _claim(paths, world, config.start.generation) if config.sandbox.cgroups == "auto" else None
    level = replace(confinement.become_authority(), cgroup=groups is not None)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # an init hears only what it has a handler for
    if level.pid and (child := os.fork()):
        if ready_fd >= 0:
            os.close(ready_fd)
        linux.set_dumpable(False)
        _stand_by(child, groups)
    linux.die_with_parent_signal(signal.SIGKILL)
    linux.set_dumpable(False)
    os.environ.pop("DORMOUSE_PARENT", None)
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
    uid = config.sandbox.uid_base if config.sandbox.uid == "auto" else None
    place = str(paths.sandbox_root)

    def gather() -> view.View:
        return view.gather(
            arguments.run,
            str(config.state_directory),
            (*config.sandbox.read, *config.environments.local_paths),
            world.needed,
        )

    level = confinement.probe(level, gather(), place, uid)
    gc.disable()  # imports leave no garbage, and looking for it takes a tenth of their time
    warming = Warming.read(paths.warming(world.role, config.start.generation), world.role)
    entry = preload.import_world(world, warming)
    seen = gather()  # once more: what was imported lies somewhere, and may have changed sys.path
    gc.freeze()  # a collection in a child would touch, and so copy, every page that holds an object
    gc.collect()  # of no object: it empties the free lists of types, whose pages the first one of a child would copy
    server = ForkServer(level, seen, place, groups, config.sandbox, entry)
    Zygote(paths.zygote(arguments.epoch, world.role), server, ready_fd).run()
    if groups is not None:
        groups.remove()
    return 0


if __name__ == "__main__":
    try:
        exit_status = main()
    except ProcessFailed as error:
        print(f"dormouse: {error}", file=sys.stderr)
        exit_status = 1
    sys.stderr.flush()
    os._exit(exit_status)  # to take torch apart in order takes a third as long as its import
