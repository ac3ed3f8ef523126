"""Functions' own libraries: environments in ``STATE/environments``, each built once, by its content, and shared.

::

    KEY/environment.json   what it is made of (EnvironmentRecord)
    KEY/site/              the libraries, as an instance sees them before the node's own
    .SOMETHING/            one that is being built, or whose build was cut short: gone at the next start

core/sandbox/builder.py builds, confined as an instance; here its result is looked over, because code of packages may
have run in it, and taken over. One is built at a time; tenants take turns (turns.py). An environment is removed when no
version of a function that is kept has it, and no deploy is about to.
"""

import asyncio
import errno
import os
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from blake3 import blake3

from dormouse.core.config import NodeConfig, parse_nbytes
from dormouse.core.directories import remove_tree
from dormouse.core.paths import RunPaths
from dormouse.core.requirements import MOST_NBYTES, MOST_PROJECT_NBYTES, RequirementsRefused, checked, of_project
from dormouse.router.admin import builtfiles
from dormouse.router.admin.turns import BuildTurns
from dormouse.router.decisions import failures
from dormouse.router.front.exchange import HttpError, refuse
from dormouse.router.instances.instances import Instances
from dormouse.router.instances.plain import PlainZygote
from dormouse.schemas import messages as m

SITE: Final = "site"
RECORD: Final = "environment.json"
RESULT: Final = "result.json"
RESULT_NBYTES: Final = 1 << 20
TEXT_NBYTES: Final = 4000
LEAST_FREE_NBYTES: Final = 1 << 20
"""On the disk: with less, a build could not even say how it ended."""

LOOK_S: Final = 1.0
"""How often the size of one that is being built is looked at."""

VARIABLES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "PIP_CERT")
"""Of the node, which pip needs to reach an index."""

_PASSWORD: Final = re.compile(r"(\w+://)?[^/]*@")
"""How an address that has a name, and with it a password, begins."""

_DEVICE: Final = m.DeviceInfo(name="", total_nbytes=0, capability=(0, 0), multiprocessors=0)
_NO_ARENA: Final = m.Arena(request_nbytes=0, response_nbytes=0, stream_nbytes=0)


class EnvironmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``lock``: all that is in it, with hashes. ``names``: of its modules. ``asked``: hashes of what led to it."""

    lock: list[str]
    names: list[str]
    python: str
    torch: str
    nbytes: int
    asked: list[str]


class BuildResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the builder says."""

    code: str
    text: str = ""
    lock: list[str] = []
    names: list[str] = []


class Node(Protocol):
    """What is asked of the router."""

    config: NodeConfig
    paths: RunPaths
    instances: Instances
    log: Any

    @property
    def plain(self) -> PlainZygote: ...

    @property
    def torch(self) -> tuple[str, str]:
        """The versions of Python and of torch that functions have; "" before they are known."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class Environments:
    """See the module."""

    def __init__(self, node: Node, directory: Path) -> None:
        self._node, self._directory = node, directory
        self._config = node.config.environments
        self._sources = (self._config.index, *self._config.find_links)
        self._variables = {each: os.environ[each] for each in VARIABLES if each in os.environ}
        self._known: dict[str, EnvironmentRecord] = {}  # by key
        self._held: dict[str, int] = {}  # by key: deploys that are about to have it
        self._fresh: set[str] = set()  # of which no deploy has heard yet
        self._building: dict[str, asyncio.Future[str]] = {}  # by what is asked for
        self._turns = BuildTurns()
        self._due: dict[str, asyncio.Event] = {}  # by what is asked for: its turn has come
        self._numbers = count(1)
        self._ends: dict[str, asyncio.Future[str]] = {}  # by build: why it ended
        self._thread = ThreadPoolExecutor(1, "environments")
        self._removals = ThreadPoolExecutor(1, "removals")  # of as much as a build could write: its own time

    def open(self) -> None:
        """What is there."""
        self._directory.mkdir(exist_ok=True, mode=0o700)
        for path in self._directory.iterdir():
            try:
                self._known[path.name] = msgspec.json.decode((path / RECORD).read_bytes(), type=EnvironmentRecord)
            except (OSError, msgspec.MsgspecError):  # a build that was cut short, or damaged
                remove_tree(str(path))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._removals.shutdown(wait=False, cancel_futures=True)

    def site(self, key: str) -> str:
        return str(self._directory / key / SITE)

    def of(self, key: str) -> EnvironmentRecord | None:
        """None if it is not there, or was made for another Python or torch."""
        found = self._known.get(key)
        return found if found is not None and (found.python, found.torch) == self._node.torch else None

    def requirements(self, said: str, tree: Path) -> str:
        """Of a deploy with these files: what was said, or requirements.txt or pyproject.toml among them. "" for none.
        Reads files: not of the router's loop. Raises HttpError.
        """
        try:
            if not said:
                if (tree / "requirements.txt").is_file():
                    said = _read(tree / "requirements.txt", MOST_NBYTES)
                elif (tree / "pyproject.toml").is_file():
                    said = of_project(_read(tree / "pyproject.toml", MOST_PROJECT_NBYTES))
            if not said.strip():
                return ""
            if not self._node.torch[1]:
                raise HttpError(failures.starting())
            return checked(said, self._node.torch[1])
        except (UnicodeDecodeError, OSError) as error:
            raise refuse(400, "bad_requirements", f"the requirements cannot be read: {error}") from None
        except RequirementsRefused as refused:
            raise refuse(400, refused.code, str(refused)) from None

    @contextmanager
    def held(self, key: str) -> Iterator[None]:
        """A deploy is about to have it."""
        self._held[key] = self._held.get(key, 0) + 1
        self._fresh.discard(key)
        try:
            yield
        finally:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]

    async def get(self, requirements: str, sources: bool, tenant: str, printed: Callable[[bytes], None]) -> str:
        """The key of an environment with these; "" if the node's own has them all. Raises HttpError."""
        if sources and not self._config.builds:
            text = "this node builds nothing from sources; whoever runs it can allow it: [environments] builds = true"
            raise refuse(403, "builds_refused", text)
        if sources and any(map(_PASSWORD.match, (*self._sources, *self._variables.values()))):
            text = (
                "code of packages could read the password with which this node reaches its index: whoever runs it can "
                "name an index, or a proxy, without one; or deploy without --allow-build"
            )
            raise refuse(403, "builds_refused", text)
        # As tensors are shared: else a tenant could find out what others have. Code of packages has run in a build from
        # sources: what comes out is for its tenant alone.
        scope = tenant if sources or self._node.config.node.sharing != "node" else ""
        asked = _hash(requirements, *self._node.torch, scope, str(sources))
        for key, found in self._known.items():
            if asked in found.asked and self.of(key) is not None:
                return key
        if (building := self._building.get(asked)) is None:
            if not self._turns.has_room(tenant):
                raise refuse(429, "queue_full", "many environments are being built; deploy again later")
            self._turns.add(tenant, asked)
            self._due[asked] = asyncio.Event()
            building = self._building[asked] = asyncio.get_running_loop().create_future()
            self._node.spawn(self._build(asked, requirements, sources, scope, printed, building))
        try:
            return await asyncio.shield(building)
        except HttpError as error:
            raise HttpError(error.failure) from None  # several may wait for it: an exception of its own for each

    async def _build(
        self,
        asked: str,
        requirements: str,
        sources: bool,
        scope: str,
        printed: Callable[[bytes], None],
        done: asyncio.Future[str],
    ) -> None:
        try:
            async with self._turn(asked):
                key = await self._built(asked, requirements, sources, scope, printed)
            self._fresh.add(key)
            done.set_result(key)
        except HttpError as error:
            done.set_exception(error)
            done.exception()  # who asked may have left
        except Exception as error:  # the outermost frame of what may be anybody's packages: it ends this build alone
            self._node.log.warning("environment_not_kept", reason=str(error), exc_info=True)
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            text = f"the node could not keep what was built: {error}"[:TEXT_NBYTES]
            done.set_exception(_disk_full() if full else refuse(500, "build_failed", text))
            done.exception()
        finally:
            del self._building[asked]
            done.cancel()  # if it was not set: the node ends

    @asynccontextmanager
    async def _turn(self, asked: str) -> AsyncGenerator[None, None]:
        """One is built at a time."""
        self._begin_next()
        await self._due[asked].wait()  # all of them are cancelled together, when the node ends
        try:
            yield
        finally:
            del self._due[asked]
            self._turns.ended()
            self._begin_next()

    def _begin_next(self) -> None:
        if (build := self._turns.next()) is not None:
            self._due[build].set()

    async def _built(
        self, asked: str, requirements: str, sources: bool, scope: str, printed: Callable[[bytes], None]
    ) -> str:
        """Raises HttpError, OSError."""
        if self._full():
            raise _disk_full()
        if sum(each.nbytes for each in self._known.values()) >= parse_nbytes(self._config.store):
            text = (
                f"environments have all of {self._config.store} ([environments] store); remove functions, or raise it"
            )
            raise refuse(507, "environments_full", text)
        place = self._directory / f".{next(self._numbers)}"
        remove_tree(str(place))
        uid = self._node.instances.builder_uid
        (place / "built").mkdir(parents=True, mode=0o700)
        os.chown(place / "built", uid, -1)
        (place / "requirements.txt").write_text(requirements)
        try:
            await self._run(place, uid, sources, printed)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._thread, self._take, place, asked, f"{scope}/sources" if sources else scope
            )
        finally:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._removals, remove_tree, str(place)))

    async def _run(self, place: Path, uid: int, sources: bool, printed: Callable[[bytes], None]) -> None:
        """Have it built, within its bounds. Raises HttpError."""
        loop = asyncio.get_running_loop()
        name = f"0-{next(self._numbers)}"  # of no instance: their numbers begin with the router's epoch
        directory = self._node.paths.instance(name)
        os.mkdir(directory, 0o700)
        os.chown(directory, uid, -1)
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        arena_fd = os.memfd_create("dormouse-no-arena", os.MFD_CLOEXEC)
        os.set_blocking(read_fd, False)

        def hear() -> None:
            with suppress(BlockingIOError):
                if data := os.read(read_fd, 64 << 10):
                    printed(data)
                else:
                    loop.remove_reader(read_fd)

        index, *find_links = self._sources
        order = m.BuildOrder(index=index, find_links=find_links, sources=sources, variables=self._variables)
        most_nbytes = parse_nbytes(self._config.size)
        fork = m.Fork(
            instance=name,
            function="",
            directory=directory,
            uid=uid,
            folder=str(place),
            entry="requirements.txt",
            arena=_NO_ARENA,
            device=_DEVICE,
            gpus=0,
            limits=self._node.instances.limits | {"FSIZE": most_nbytes},
            environment=str(place / "built"),
            network=True,
            build=order,
        )
        ended = self._ends[name] = loop.create_future()
        loop.add_reader(read_fd, hear)
        failure: HttpError | None = None
        end_s = loop.time() + self._config.time_ms / 1000
        try:
            self._node.plain.fork(fork, (write_fd, arena_fd))
            os.close(write_fd)
            write_fd = -1
            while not ended.done():
                await asyncio.wait((ended,), timeout=max(0.0, min(LOOK_S, end_s - loop.time())))
                if ended.done() or failure is not None:
                    continue
                try:
                    nbytes = await loop.run_in_executor(self._thread, builtfiles.nbytes, str(place))
                except HttpError as error:
                    nbytes, failure = 0, error
                if failure is not None:
                    pass
                elif self._full():  # also by files that have no name any more
                    failure = _disk_full()
                elif nbytes > most_nbytes:
                    failure = self._too_large()
                elif loop.time() >= end_s:
                    text = (
                        f"the build took longer than {self._config.time_ms / 1000:g} s ([environments] time_ms); "
                        "require less, or allow more"
                    )
                    failure = refuse(504, "build_timed_out", text)
                if failure is not None:
                    self._node.plain.signal(name, 9)
                    end_s = float("inf")
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
            for fd in (read_fd, write_fd, arena_fd):
                if fd >= 0:
                    os.close(fd)
            remove_tree(directory)

    def _full(self) -> bool:
        disk = os.statvfs(self._directory)
        return disk.f_bavail * disk.f_frsize < LEAST_FREE_NBYTES

    def _too_large(self) -> HttpError:
        text = f"the environment has more than {self._config.size} ([environments] size); require less"
        return refuse(413, "environment_too_large", text)

    def ended(self, name: str, how: str) -> None:
        """A build's process has; ``how``: "" if by itself."""
        if (future := self._ends.get(name)) is not None and not future.done():
            future.set_result(how)

    def _take(self, place: Path, asked: str, scope: str) -> str:
        """Take over what was built. Raises HttpError, OSError."""
        built = place / "built"
        try:
            fd = os.open(built / RESULT, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                result = msgspec.json.decode(file.read(RESULT_NBYTES), type=BuildResult)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            if self._full():
                raise _disk_full() from None
            raise refuse(500, "build_failed", "the build said nothing of its end; see the function's log") from None
        if result.code == "disk_full":
            raise _disk_full()
        if result.code == "environment_too_large":
            raise self._too_large()
        if result.code:
            raise refuse(422, result.code[:40], result.text[:TEXT_NBYTES])
        if not result.lock:
            return ""
        # Nothing of the build runs any more: a zygote says that an instance has ended when all its processes have.
        fd = os.open(built, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            builtfiles.take_folder(fd, 0o700)
            nbytes, files = builtfiles.own(SITE, fd)
        finally:
            os.close(fd)
        if nbytes > parse_nbytes(self._config.size):
            raise self._too_large()
        names = sorted({name.removesuffix(".py").partition(".")[0] for name in files})
        python, torch = self._node.torch
        key = _hash(*result.lock, python, torch, scope)[:24]
        before = self._known.get(key)
        record = EnvironmentRecord(
            lock=result.lock,
            names=[each for each in names if each.isidentifier()],
            python=python,
            torch=torch,
            nbytes=nbytes,
            asked=[asked, *(before.asked if before is not None else [])][:64],
        )
        target = self._directory / key
        if before is None:
            new = place / "new"
            new.mkdir(mode=0o755)
            os.rename(built / SITE, new / SITE)
            _write(new / RECORD, record)
            os.sync()
            remove_tree(str(target))
            os.rename(new, target)
        else:
            _write(target / RECORD, record)
        self._known[key] = record
        return key

    def remove_unused(self, used: set[str]) -> None:
        """``used``: by versions of functions that are kept, and by instances."""
        for key in self._known.keys() - used - self._held.keys() - self._fresh:
            del self._known[key]
            gone = self._directory / f".gone-{next(self._numbers)}"
            with suppress(OSError):
                os.rename(self._directory / key, gone)  # from now on it is not there, whenever it has been removed
                self._removals.submit(remove_tree, str(gone))


def _disk_full() -> HttpError:
    text = "the disk of [node] state has no room for the function's libraries; free space on it"
    return refuse(507, "disk_full", text)


def _read(path: Path, most_nbytes: int) -> str:
    """Raises OSError, UnicodeDecodeError, RequirementsRefused."""
    with path.open("rb") as file:
        data = file.read(most_nbytes + 1)
    if len(data) > most_nbytes:
        raise RequirementsRefused("bad_requirements", f"{path.name} has more than {most_nbytes:,} bytes; write less")
    return data.decode()


def _hash(*parts: str) -> str:
    return str(blake3("\0".join(parts).encode()).hexdigest())


def _write(path: Path, record: EnvironmentRecord) -> None:
    half = path.with_name(f"{path.name}.new")
    half.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    half.replace(path)
