"""The build of an environment: a child of the second zygote runs pip (core/sandbox/builder.py), and is ended when it
exceeds its limits. Decides neither which environments are built, nor for which tenants.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from dormouse.core.config import NodeConfig, parse_nbytes
from dormouse.core.directories import remove_tree
from dormouse.core.paths import RunPaths
from dormouse.core.quantities import duration, size
from dormouse.router.admin import builtfiles
from dormouse.router.front.exchange import HttpError, refuse
from dormouse.router.instances.instances import Instances
from dormouse.router.instances.plain import PlainZygote
from dormouse.schemas import messages as m

REQUIREMENTS: Final = "requirements.txt"
BUILT: Final = "built"
"""The folder that the build may write."""

WAY_OUT: Final = "dormouse.core.sandbox.way_out"

MIN_FREE_NBYTES: Final = 1 << 20
"""On the disk: with less, a build could not even report its end."""

LOOK_S: Final = 1.0
"""Between two looks at its resources."""

VARIABLES: Final = ("PIP_CERT",)
"""Of the node, which pip needs to reach an index."""

_DEVICE: Final = m.DeviceInfo(name="", total_nbytes=0, capability=(0, 0), multiprocessors=0)
_NO_ARENA: Final = m.Arena(request_nbytes=0, response_nbytes=0, stream_nbytes=0)


class Node(Protocol):
    """The part of the router that this module uses."""

    config: NodeConfig
    paths: RunPaths
    instances: Instances

    @property
    def plain(self) -> PlainZygote: ...


class BuildUse(NamedTuple):
    """Resources of a build: bytes of its files, and bytes that the disk has lost since it began."""

    nbytes: int
    lost_nbytes: int
    free_nbytes: int
    spent_s: float


class BuildBounds(NamedTuple):
    """Limits of one build. ``sources``: code of packages runs in it."""

    size: str
    time_s: float
    sources: bool

    @property
    def size_nbytes(self) -> int:
        return parse_nbytes(self.size)

    def excess(self, used: BuildUse) -> HttpError | None:
        """Why it is to be ended; None: it goes on."""
        if used.free_nbytes < MIN_FREE_NBYTES:
            return disk_full()
        if used.nbytes > self.size_nbytes:
            return self.too_large()
        # Files that are open and have no name any more: without code in the build, nobody can make them.
        if self.sources and (unseen_nbytes := used.lost_nbytes - used.nbytes) > self.size_nbytes:
            text = (
                f"while it was built, the disk lost {size(unseen_nbytes)} that none of its files has, and a build "
                f"may have {self.size} ([environments] size): code of a package keeps files that it has removed; or "
                "something else writes much to the disk of [node] state: then deploy again"
            )
            return refuse(413, "environment_too_large", text)
        if used.spent_s >= self.time_s:
            longest = f"{duration(1000 * self.time_s)} ([environments] time_ms)"
            text = f"the build took longer than {longest}; require less, or allow more"
            return refuse(504, "build_timed_out", text)
        return None

    def too_large(self) -> HttpError:
        text = f"the environment has more than {self.size} ([environments] size); require less"
        return refuse(413, "environment_too_large", text)


class Builder:
    """Runs one build at a time. ``directory`` is on the disk that it fills."""

    def __init__(self, node: Node, directory: Path) -> None:
        self._node, self._directory = node, directory
        config = node.config.environments
        self.index, self.find_links, self._reached = config.index, list(config.find_links), config.reached
        self.variables = {each: os.environ[each] for each in VARIABLES if each in os.environ}
        self._size, self._time_s = config.size, config.time_ms / 1000
        self._numbers = count(1)
        self._ends: dict[str, asyncio.Future[str]] = {}  # by name: why it ended, "" if by itself
        self._thread = ThreadPoolExecutor(1, "measures")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def ended(self, name: str, how: str) -> None:
        """A build's process has."""
        if (future := self._ends.get(name)) is not None and not future.done():
            future.set_result(how)

    def free_nbytes(self) -> int:
        disk = os.statvfs(self._directory)
        return disk.f_bavail * disk.f_frsize

    def full(self) -> bool:
        return self.free_nbytes() < MIN_FREE_NBYTES

    def bounds(self, sources: bool) -> BuildBounds:
        return BuildBounds(self._size, self._time_s, sources)

    def begin(self, place: Path, requirements: str) -> None:
        """Its folder, which is new. Raises OSError."""
        (place / BUILT).mkdir(parents=True, mode=0o700)
        os.chown(place / BUILT, self._node.instances.builder_uid, -1)
        (place / REQUIREMENTS).write_text(requirements)

    async def run(self, place: Path, sources: bool, printed: Callable[[bytes], None]) -> None:
        """Have it built there, within its bounds. Raises HttpError, OSError."""
        loop = asyncio.get_running_loop()
        name = f"0-{next(self._numbers)}"  # of no instance: their numbers begin with the router's epoch
        directory = self._node.paths.instance(name)
        os.mkdir(directory, 0o700)
        os.chown(directory, self._node.instances.builder_uid, -1)
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_fd, False)

        def hear() -> None:
            with suppress(BlockingIOError):
                if data := os.read(read_fd, 64 << 10):
                    printed(data)
                else:
                    loop.remove_reader(read_fd)

        ended = self._ends[name] = loop.create_future()
        loop.add_reader(read_fd, hear)
        way_out: asyncio.subprocess.Process | None = None
        try:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with ours, theirs:
                    if self._reached:
                        way_out = await self._way_out(ours, write_fd)
                    self._node.plain.fork(self._fork(name, directory, place, sources), (write_fd, theirs.fileno()))
            finally:
                os.close(write_fd)
            failure = await self._watched(place, self.bounds(sources), ended)
            if failure is not None:
                self._node.plain.signal(name, 9)
                await ended
            hear()
            if failure is not None:
                raise failure
            if how := ended.result():
                raise refuse(500, "build_failed", f"what builds the environment {how}; deploy again")
        finally:
            del self._ends[name]
            if self._node.plain.has(name):  # the node ends, or this was cancelled
                self._node.plain.signal(name, 9)
            loop.remove_reader(read_fd)
            os.close(read_fd)
            remove_tree(directory)
            if way_out is not None:
                with suppress(ProcessLookupError):
                    way_out.kill()
                await way_out.wait()

    async def _way_out(self, channel: socket.socket, log_fd: int) -> asyncio.subprocess.Process:
        """Its refusals are printed like the build's own output."""
        command = (sys.executable, "-P", "-m", WAY_OUT, str(channel.fileno()), *self._reached)
        return await asyncio.create_subprocess_exec(
            *command, pass_fds=[channel.fileno()], stdin=asyncio.subprocess.DEVNULL, stdout=log_fd, stderr=log_fd
        )

    def _fork(self, name: str, directory: str, place: Path, sources: bool) -> m.Fork:
        order = m.BuildOrder(
            index=self.index,
            find_links=self.find_links,
            sources=sources,
            way_out=bool(self._reached),
            variables=self.variables,
        )
        return m.Fork(
            instance=name,
            function="",
            directory=directory,
            uid=self._node.instances.builder_uid,
            folder=str(place),
            entry=REQUIREMENTS,
            arena=_NO_ARENA,
            device=_DEVICE,
            gpus=0,
            limits=self._node.instances.limits | {"FSIZE": parse_nbytes(self._size)},
            environment=str(place / BUILT),
            build=order,
        )

    async def _watched(self, place: Path, bounds: BuildBounds, ended: "asyncio.Future[str]") -> HttpError | None:
        """Until it has ended, or is to be ended: why."""
        loop = asyncio.get_running_loop()
        begun_s, free_nbytes = loop.time(), self.free_nbytes()
        while True:
            left_s = begun_s + bounds.time_s - loop.time()
            await asyncio.wait((ended,), timeout=max(0.0, min(LOOK_S, left_s)))
            if ended.done():
                return None
            try:
                nbytes = await loop.run_in_executor(self._thread, builtfiles.nbytes, str(place))
            except HttpError as error:
                return error
            free = self.free_nbytes()
            failure = bounds.excess(BuildUse(nbytes, free_nbytes - free, free, loop.time() - begun_s))
            if failure is not None:
                return failure


def disk_full() -> HttpError:
    text = "the disk of [node] state has no room for the function's libraries; free space on it"
    return refuse(507, "disk_full", text)
