"""What steps of language models take: from runtimes' news to the scheduler, and to the catalogue now and then."""

from typing import Any, Final

from dormouse.controller.catalogue import CatalogueFile, NotWritten
from dormouse.controller.scheduling import events as ev
from dormouse.controller.scheduling.scheduler import Scheduler
from dormouse.core.step_times import news
from dormouse.schemas import messages as m

KEEP_S: Final = 60.0
"""Between two writes: they take some milliseconds, and a node that dies has only to learn again."""


class LearnedTimes:
    """``scheduler`` is read only."""

    def __init__(self, scheduler: Scheduler, log: Any) -> None:
        self._scheduler, self._log = scheduler, log
        self._unkept: dict[str, m.StepTimes] = {}  # by function
        self._kept_s = float("-inf")

    def heard(self, told: m.RuntimeLoad | m.Trouble) -> ev.StepsTimed | None:
        """If it is news to some of the functions."""
        if isinstance(told, m.Trouble):
            return None
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
        if not self._unkept or (now_s < self._kept_s + KEEP_S and not last):
            return
        self._kept_s, unkept = now_s, self._unkept
        self._unkept = {}
        try:
            catalogue.keep_step_times(unkept)
        except NotWritten as error:
            self._log.warning("step_times_not_written", error=str(error))
