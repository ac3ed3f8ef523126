"""The metrics process: receives counts from the router, reads the resources that instances take, and formats both.
Decides nothing, and keeps the instances' processor time only.
"""

import gzip
from typing import Final

from dormouse.core import procfs
from dormouse.core.actor import Actor, run_actor
from dormouse.core.links.link import Link
from dormouse.router.metrics.exposition import MachineShare, written
from dormouse.schemas import messages as m

LEVEL: Final = 1
"""Of compression: the text is nearly all names, of which any level makes a tenth."""

MAX: Final = 10_000
"""Functions whose time is known, those that were sent last."""


class Spent:
    """Resources that functions take, summed over their instances, which come and go: usage between the last text and an
    instance's end is not in it.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, dict[int, float]]] = {}  # by function: its time, and that of each pid

    def taken(self, functions: list[m.FunctionCounted]) -> dict[str, MachineShare]:
        """By function."""
        found = procfs.footprints(pid for each in functions for pid in each.pids)
        taken = {}
        for each in functions:
            cpu_s, before = self._known.pop(each.name, (0.0, {}))
            usages = {pid: found[pid] for pid in each.pids if pid in found}
            cpu_s += sum(max(0.0, usage.cpu_s - before.get(pid, 0.0)) for pid, usage in usages.items())
            self._known[each.name] = cpu_s, {pid: usage.cpu_s for pid, usage in usages.items()}
            taken[each.name] = MachineShare(sum(usage.memory_nbytes for usage in usages.values()), cpu_s)
        for name in [*self._known][: max(0, len(self._known) - MAX)]:
            del self._known[name]
        return taken


class Metrics(Actor):
    """See the module."""

    async def start(self) -> None:
        self._spent = Spent()
        self._router: Link[m.RouterToMetrics, m.MetricsToRouter] = Link(
            self.paths.link("metrics", "router", self.epoch),
            bind=True,
            incoming=m.RouterToMetrics,
            on_message=self._write,
        )

    def _write(self, scrape: m.Scrape) -> None:
        text = written(
            scrape, m.unpacked(scrape.measures) if scrape.measures else None, self._spent.taken(scrape.functions)
        )
        if scrape.gzip:
            text = gzip.compress(text, LEVEL, mtime=0)
        self._router.send(m.Exposition(query=scrape.query, text=text))

    async def stop(self) -> None:
        self._router.close()


if __name__ == "__main__":
    run_actor(Metrics)
