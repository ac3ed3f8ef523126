"""Runs the work on snapshots in threads, because it may wait long for a disk; finds snapshots that nobody needs any
more.

Work that takes longer for larger folders has threads of its own. Where there are several tenants, one has half of these
at most.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, ParamSpec, TypeVar

from dormouse.router.admin.snapshots import Snapshots
from dormouse.schemas.messages import FunctionSpec

THREADS: Final = 4
"""Folders that are copied at the same time; more would only share the disk. Small work has as many."""

P = ParamSpec("P")
T = TypeVar("T")


class Keeper:
    """See the module."""

    def __init__(self, snapshots: Snapshots, shared: bool = False) -> None:
        self.snapshots = snapshots
        self._part = THREADS // 2 if shared else THREADS
        self._copies = ThreadPoolExecutor(THREADS, "copies")
        self._turns: dict[str, asyncio.Semaphore] = {}  # by tenant
        self._threads = ThreadPoolExecutor(THREADS, "snapshots")
        self._discarded: list[FunctionSpec] = []  # whose snapshots an instance that ends may still read

    def keeping(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
        """Something small of the snapshots, in one of their threads."""
        return asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs))

    async def copying(self, tenant: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Something that is as long as a tenant's folder is large. It runs to its end, also for a departed caller."""
        turn = self._turns.setdefault(tenant, asyncio.Semaphore(self._part))
        loop = asyncio.get_running_loop()
        await turn.acquire()

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended too
                loop.call_soon_threadsafe(turn.release)

        begun = self._copies.submit(work, *args, **kwargs)
        begun.add_done_callback(ended)
        return await asyncio.wrap_future(begun)

    def discard(self, spec: FunctionSpec) -> None:
        """Not needed any more, once no instance has it; :meth:`remove_unused` is called later."""
        self._discarded.append(spec)

    def remove_unused(self, used: set[str]) -> None:
        """``used``: the snapshots that instances have."""
        unused = [spec for spec in self._discarded if spec.snapshot not in used]
        self._discarded = [spec for spec in self._discarded if spec.snapshot in used]
        if unused:
            trees = [self.snapshots.tree(spec.name, spec.snapshot) for spec in unused]
            self._threads.submit(self.snapshots.remove, trees)

    def count(self, known: Iterable[tuple[str, str, str]]) -> None:
        """Count what tenants have. ``known``: name, snapshot and tenant of each version."""
        self._threads.submit(self.snapshots.count, list(known))

    def remove_strays(self, known: Iterable[tuple[str, str]]) -> None:
        """Remove the snapshots of no function of the catalogue. ``known``: name and snapshot of each function in it."""
        self._threads.submit(self.snapshots.remove, self.snapshots.strays(known))
