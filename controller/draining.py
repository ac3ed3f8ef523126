"""GPUs that somebody has drained, kept where the next controller and the supervisor find them, and the queries that
wait until one is released. The scheduler decides what is done for them (scheduling/leaving.py).
"""

from collections.abc import Callable
from typing import Final

import orjson

from dormouse.controller import service
from dormouse.controller.status import state
from dormouse.core.config import NodeConfig
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.startup import keep_drained_gpus, read_drained_gpus
from dormouse.schemas import messages as m

MAX: Final = 64
"""Queries that wait at once; beyond that, the oldest is answered with its progress."""


class DrainedGpus:
    """``perform`` passes an event to the scheduler, ``say`` a message to the router."""

    def __init__(
        self,
        config: NodeConfig,
        scheduler: Scheduler,
        perform: Callable[[ev.Event], None],
        say: Callable[[m.ControllerToRouter], None],
    ) -> None:
        self._run, self._count = config.run_directory, config.gpu_count
        self._scheduler, self._perform, self._say = scheduler, perform, say
        self._waiting: list[tuple[int, int]] = []  # (query, GPU), oldest first

    def restore(self) -> list[int]:
        """Restore the GPUs drained before this process began, of those that there are; returns the others."""
        drained = tuple(number for number in read_drained_gpus(self._run) if number < self._count)
        if drained:
            self._perform(ev.DrainChosen(drained))
        return [number for number in range(self._count) if number not in drained]

    def told(self) -> m.GpusDrained:
        drained = sorted(self._scheduler.drained)
        return m.GpusDrained(gpus=drained, left=self._count - len(drained))

    def asked(self, asked: m.AskDrainGpu) -> None:
        number, before = asked.gpu, self._scheduler.drained
        if not 0 <= number < self._count:
            last = f"0 to {self._count - 1}" if self._count > 1 else "0 alone"
            text = f"there is no GPU {number}: this node has {last}; `dormouse status` shows them"
            self._answer(asked.query, number, m.Failure(code="unknown_gpu", status=404, text=text))
            return
        wanted = before - {number} if asked.undo else before | {number}
        if wanted != before and not asked.waits:
            try:
                keep_drained_gpus(self._run, wanted)
            except OSError as error:
                self._answer(asked.query, number, service.not_kept(str(error), "nothing was changed"))
                return
            self._perform(ev.DrainChosen(tuple(sorted(wanted))))
            self._say(self.told())
        self._waiting.append((asked.query, number))
        if not asked.waits:
            self._answer(asked.query, number)
        self.look()
        while len(self._waiting) > MAX:
            self._answer(*self._waiting[0])

    def look(self) -> None:
        """The scheduler has received an event: a GPU may be released."""
        for query, number in [each for each in self._waiting if state(self._scheduler, each[1]) != "drains"]:
            self._answer(query, number)

    def _answer(self, query: int, number: int, failure: m.Failure | None = None) -> None:
        self._waiting = [each for each in self._waiting if each[0] != query]
        gpu = self._scheduler.gpus.get(number)
        said = {
            "gpu": number,
            "state": state(self._scheduler, number),
            "leases": len(gpu.leases) if gpu is not None else 0,
        }
        self._say(m.Status(query=query, json=orjson.dumps(said), failure=failure))
