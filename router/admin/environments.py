"""Functions' own libraries: environments, each built once, by its content, and shared. Serves deploys and instances.

environmentbook.py has the list and the room of tenants, environmentbuild.py a build in its sandbox, environmentfiles.py
the output of builds and the environments on the disk. One is built at a time. One is removed when no version of a
function that is kept has it, and no deploy claims it.
"""

import asyncio
import errno
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from blake3 import blake3

from dormouse.core.config import parse_nbytes
from dormouse.core.decisions.requests import failures
from dormouse.core.directories import remove_tree
from dormouse.core.requirements import MAX_NBYTES, MAX_PROJECT_NBYTES, RequirementsRefused, checked, of_project
from dormouse.router.admin import environmentbuild
from dormouse.router.admin.environmentbook import EnvironmentBook, EnvironmentBuild, EnvironmentRecord
from dormouse.router.admin.environmentbuild import Builder, disk_full
from dormouse.router.admin.environmentfiles import TEXT_NBYTES, BuiltTree, EnvironmentFiles
from dormouse.router.front.exchange import HttpError, refuse

PARTS: Final = 4
"""Of what all environments may have on a node of many tenants, one of which a tenant may have."""

_PASSWORD: Final = re.compile(r"(\w+://)?[^/]*@")
"""How an address that has a name, and with it a password, begins."""

Printed = Callable[[bytes], None]


class Node(environmentbuild.Node, Protocol):
    """The part of the router that this module uses."""

    log: Any

    @property
    def torch(self) -> tuple[str, str]:
        """The versions of Python and of torch that functions have; "" before they are known."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class Environments:
    """See the module."""

    def __init__(self, node: Node, directory: Path) -> None:
        self._node, self._config = node, node.config.environments
        most_nbytes = parse_nbytes(self._config.store)
        parts = 1 if node.config.node.tenants == "one" else PARTS
        own = self._config.tenant_store
        self._book = EnvironmentBook(most_nbytes, parse_nbytes(own) if own else most_nbytes // parts)
        self._files = EnvironmentFiles(directory)
        self._builder = Builder(node, directory)
        self._done: dict[str, asyncio.Future[None]] = {}  # by what is asked for
        self._due: dict[str, asyncio.Event] = {}  # likewise: its turn has come
        self.builds: Counter[str] = Counter()  # that have ended, by "ok" or an error's code
        self._thread = ThreadPoolExecutor(1, "environments")
        self._removals = ThreadPoolExecutor(1, "removals")  # of as much as a build could write: its own time

    def open(self) -> None:
        """Read those on the disk. Removals may be of gigabytes: they wait for no request, and no request for them."""
        found, left = self._files.open()
        for key, record in found.items():
            self._book.known(key, record)
        for each in left:
            self._removals.submit(remove_tree, each)

    def close(self) -> None:
        self._builder.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._removals.shutdown(wait=False, cancel_futures=True)

    @property
    def count(self) -> int:
        return len(self._book.environments)

    @property
    def nbytes(self) -> int:
        return sum(each.record.nbytes for each in self._book.environments.values())

    # --- instances

    def site(self, key: str) -> str:
        return self._files.site(key)

    def of(self, key: str) -> EnvironmentRecord | None:
        """None if it is not there, or was made for another Python or torch."""
        if (found := self._book.environments.get(key)) is None:
            return None
        return found.record if (found.record.python, found.record.torch) == self._node.torch else None

    def ended(self, name: str, how: str) -> None:
        """A build's process has; ``how``: "" if by itself."""
        self._builder.ended(name, how)

    def remove_unused(self, tenants: Mapping[str, Set[str]]) -> None:
        """``tenants``, by key: of the versions of functions that are kept, and of instances."""
        self._book.kept(tenants)
        self._remove_idle()

    def _remove_idle(self) -> None:
        for key in self._book.idle():
            if (gone := self._files.set_aside(key)) is not None:
                self._removals.submit(remove_tree, gone)

    # --- deploys

    def requirements(self, said: str, tree: Path) -> str:
        """Of a deploy with these files: the given ones, or requirements.txt or pyproject.toml among them. "" for none.
        Reads files: not of the router's loop. Raises HttpError.
        """
        try:
            if not said:
                if (tree / "requirements.txt").is_file():
                    said = _read(tree / "requirements.txt", MAX_NBYTES)
                elif (tree / "pyproject.toml").is_file():
                    said = of_project(_read(tree / "pyproject.toml", MAX_PROJECT_NBYTES))
            if not said.strip():
                return ""
            if not self._node.torch[1]:
                raise HttpError(failures.starting())
            return checked(said, self._node.torch[1])
        except (UnicodeDecodeError, OSError) as error:
            raise refuse(400, "bad_requirements", f"the requirements cannot be read: {error}") from None
        except RequirementsRefused as refused:
            raise refuse(400, refused.code, str(refused)) from None

    @asynccontextmanager
    async def having(
        self, requirements: str, sources: bool, tenant: str, printed: Printed
    ) -> AsyncGenerator[str, None]:
        """An environment with these, built if need be, for as long as a deploy needs it: its key; "" if the node's own
        has them all. Raises HttpError.
        """
        if sources:
            self._may_build()
        # As tensors are shared: else a tenant could find out what others have. Code of packages has run in a build from
        # sources: its output is for its tenant alone.
        scope = tenant if sources or self._node.config.node.sharing != "node" else ""
        asked = _hash(requirements, *self._node.torch, scope, str(sources))
        claim = self._book.claim(asked, tenant, self._node.torch)
        try:
            if claim.build is not None:
                whose = f"{scope}/sources" if sources else scope
                await self._outcome(claim.build, requirements, sources, whose, printed)
                if claim.key and (failure := self._book.tenant_full(tenant)) is not None:
                    self._book.release(claim)
                    self._remove_idle()
                    raise failure
            yield claim.key
        finally:
            self._book.release(claim)

    async def _outcome(
        self, build: EnvironmentBuild, requirements: str, sources: bool, scope: str, printed: Printed
    ) -> None:
        """Wait for it; the first one has it built. Raises HttpError."""
        if (done := self._done.get(build.asked)) is None:
            done = self._done[build.asked] = asyncio.get_running_loop().create_future()
            self._due[build.asked] = asyncio.Event()
            self._node.spawn(self._build(build, requirements, sources, scope, printed, done))
        try:
            await asyncio.shield(done)
        except HttpError as error:
            raise HttpError(error.failure) from None  # several may wait for it: each has one of its own

    def _may_build(self) -> None:
        """Whether code of packages may run. Raises HttpError."""
        if not self._config.builds:
            text = "this node builds nothing from sources; whoever runs it can allow it: [environments] builds = true"
            raise refuse(403, "builds_refused", text)
        if any(map(_PASSWORD.match, (self._config.index, *self._config.find_links))):
            text = (
                "code of packages could read the password with which this node reaches its index: whoever runs it can "
                "name an index without one; or deploy without --allow-build"
            )
            raise refuse(403, "builds_refused", text)

    # --- builds

    async def _build(
        self,
        build: EnvironmentBuild,
        requirements: str,
        sources: bool,
        scope: str,
        printed: Printed,
        done: asyncio.Future[None],
    ) -> None:
        try:
            self._begin_next()
            await self._due[build.asked].wait()  # all of them are cancelled together, when the node ends
            await self._built(build, requirements, sources, scope, printed)
            self.builds["ok"] += 1
            done.set_result(None)
        except HttpError as error:
            self.builds[error.failure.code] += 1
            done.set_exception(error)
        except Exception as error:  # the outermost frame of what may be anybody's packages: it ends this build alone
            self._node.log.warning("environment_not_kept", reason=str(error), exc_info=True)
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            text = f"the node could not keep what was built: {error}"[:TEXT_NBYTES]
            failed = disk_full() if full else refuse(500, "build_failed", text)
            self.builds[failed.failure.code] += 1
            done.set_exception(failed)
        finally:
            del self._done[build.asked], self._due[build.asked]
            self._book.ended(build)
            if not done.cancel():  # if it was not set: the node ends
                done.exception()  # the caller may have departed
            self._begin_next()

    def _begin_next(self) -> None:
        if (build := self._book.next()) is not None:
            self._due[build.asked].set()

    async def _built(
        self, build: EnvironmentBuild, requirements: str, sources: bool, scope: str, printed: Printed
    ) -> None:
        """Build it; its claims hold it then. Raises HttpError, OSError."""
        self._remove_idle()
        if self._builder.full():
            raise disk_full()
        if (failure := self._book.store_full(1)) is not None:
            raise failure
        loop = asyncio.get_running_loop()
        place = self._files.place()
        try:
            self._builder.begin(place, requirements)
            await self._builder.run(place, sources, printed)
            bounds, full = self._builder.bounds(sources), self._builder.full()
            left = await loop.run_in_executor(self._thread, self._files.take_over, place, bounds, full)
            if left is not None:
                await self._keep(build, place, left, scope)
        finally:
            await asyncio.shield(loop.run_in_executor(self._removals, remove_tree, str(place)))

    async def _keep(self, build: EnvironmentBuild, place: Path, left: BuiltTree, scope: str) -> None:
        """Raises HttpError, OSError."""
        loop, (python, torch) = asyncio.get_running_loop(), self._node.torch
        key = _hash(*left.lock, python, torch, scope)[:24]
        record = EnvironmentRecord(
            lock=left.lock, names=left.names, python=python, torch=torch, nbytes=left.nbytes, asked=[build.asked]
        )
        if key in self._book.environments:  # it was asked for in other words
            record = self._book.built(build, key, record)
            await loop.run_in_executor(self._thread, self._files.remember, key, record)
            return
        if (failure := self._book.store_full(left.nbytes)) is not None:
            raise failure
        await loop.run_in_executor(self._thread, self._files.keep, place, key, record)
        self._book.built(build, key, record)


def _read(path: Path, most_nbytes: int) -> str:
    """Raises OSError, UnicodeDecodeError, RequirementsRefused."""
    with path.open("rb") as file:
        data = file.read(most_nbytes + 1)
    if len(data) > most_nbytes:
        raise RequirementsRefused("bad_requirements", f"{path.name} has more than {most_nbytes:,} bytes; write less")
    return data.decode()


def _hash(*parts: str) -> str:
    return str(blake3("\0".join(parts).encode()).hexdigest())
