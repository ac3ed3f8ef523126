"""The metrics process: hears counts from the router, and writes them down. Decides nothing, keeps nothing."""

import gzip
from typing import Final

from dormouse.core.actor import Actor, run_actor
from dormouse.core.links.link import Link
from dormouse.router.metrics.exposition import written
from dormouse.schemas import messages as m

LEVEL: Final = 1
"""Of compression: the text is nearly all names, of which any level makes a tenth."""


class Metrics(Actor):
    """See the module."""

    async def start(self) -> None:
        self._router: Link[m.RouterToMetrics, m.MetricsToRouter] = Link(
            self.paths.link("metrics", "router", self.epoch),
            bind=True,
            incoming=m.RouterToMetrics,
            on_message=self._write,
        )

    def _write(self, scrape: m.Scrape) -> None:
        text = written(scrape, m.unpacked(scrape.measures) if scrape.measures else None)
        if scrape.gzip:
            text = gzip.compress(text, LEVEL, mtime=0)
        self._router.send(m.Exposition(query=scrape.query, text=text))

    async def stop(self) -> None:
        self._router.close()


if __name__ == "__main__":
    run_actor(Metrics)
