"""Reports of runtimes, for the scheduler: the GPUs on which they have a process, and the times of their steps. The
times go to the catalogue too, now and then, as do those of batches of requests that the scheduler has learned.
"""

from collections.abc import Iterable
from typing import Any, Final

from dormouse.controller.catalogue import BatchTimesKnown, CatalogueFile, NotWritten
from dormouse.core.decisions.rules.step_times import NEWS, news
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.schemas import messages as m

KEEP_S: Final = 60.0
"""Between two writes: they take some milliseconds, and a node that dies has only to learn again."""


class RuntimeNews:
    """``scheduler`` is read only."""

    def __init__(self, scheduler: Scheduler, log: Any) -> None:
        self._scheduler, self._log = scheduler, log
        self._unkept: dict[str, m.StepTimes] = {}  # by function
        self._kept_s = self._looked_s = float("-inf")
        self._kept_batches: dict[str, dict[int, float]] = {}  # by function: the times that the catalogue has

    def heard(self, gpu: int, told: m.RuntimeLoad | m.Trouble, there: Iterable[m.RuntimeLoad]) -> list[ev.Event]:
        """Events for what is new in it. ``there`` are all of this GPU."""
        known = self._scheduler.gpus.get(gpu)
        if known is None or isinstance(told, m.Trouble):
            return []
        events: list[ev.Event] = []
        models = self._scheduler.models
        names = {models[each].runtime for load in there for each in load.instances if each in models} - {""}
        if (runtimes := tuple(sorted(names))) != known.runtimes:
            events.append(ev.RuntimesOn(gpu, known.epoch, runtimes))
        if (timed := self._timed(told)) is not None:
            events.append(timed)
        return events

    def _timed(self, told: m.RuntimeLoad) -> ev.StepsTimed | None:
        """If it is news to some of the functions."""
        times = None if told.load is None else told.load.times
        if times is None:
            return None
        models = [model for each in told.instances if (model := self._scheduler.models.get(each)) is not None]
        late = [model for model in models if news(times, model.function.times)]
        if not late:
            return None
        self._unkept |= {model.function.name: times for model in late}
        return ev.StepsTimed(tuple(model.instance for model in late), times)

    def keep(self, catalogue: CatalogueFile, now_s: float, last: bool = False) -> None:
        """If it is time to, or the ``last`` one."""
        if last or now_s >= self._looked_s + KEEP_S:
            self._looked_s = now_s
            self._keep_batches(catalogue)
        if not self._unkept or (now_s < self._kept_s + KEEP_S and not last):
            return
        self._kept_s, unkept = now_s, self._unkept
        self._unkept = {}
        try:
            catalogue.keep_step_times(unkept)
        except NotWritten as error:
            self._log.warning("step_times_not_written", error=str(error))

    def _keep_batches(self, catalogue: CatalogueFile) -> None:
        """Of functions where it is news."""
        functions = self._scheduler.functions
        known = {name: each.batches.times.known for name, each in functions.items() if each.batches is not None}
        self._kept_batches = {name: kept for name, kept in self._kept_batches.items() if name in known}
        late = {name: dict(times) for name, times in known.items() if _news(times, self._kept_batches.get(name, {}))}
        if not late:
            return
        try:
            catalogue.keep_batch_times({name: _sorted(times) for name, times in late.items()})
        except NotWritten as error:
            self._log.warning("batch_times_not_written", error=str(error))
        else:
            self._kept_batches |= late


def _news(times: dict[int, float], kept: dict[int, float]) -> bool:
    return any(abs(seconds - kept.get(count, 0.0)) > NEWS * seconds for count, seconds in times.items())


def _sorted(times: dict[int, float]) -> BatchTimesKnown:
    return tuple(sorted(times.items()))
