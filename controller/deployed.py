"""Records deploys, removals, quarantines, pins and shares of requests in the catalogue, and reports whether they could
be written: an unwritten change is not made. The router owns the list of functions, and the scheduler receives it from
here.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from dormouse.controller import service
from dormouse.controller.catalogue import CatalogueFile, NotWritten
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.schemas import messages as m

LEFT_OUT: Final = "it was left out when the node was started (`dormouse up --without`)"


class DeployedFunctions:
    """``without``: functions that are not started. ``perform`` passes an event to the scheduler, ``say`` is to the
    router, and ``changed`` is called when other functions are deployed than before.
    """

    def __init__(
        self,
        catalogue: CatalogueFile,
        scheduler: Scheduler,
        without: Iterable[str],
        perform: Callable[[ev.Event], None],
        say: Callable[[m.ControllerToRouter], None],
        changed: Callable[[], None],
        log: Any,
    ) -> None:
        self._catalogue, self._scheduler = catalogue, scheduler
        self._perform, self._say, self._changed, self._log = perform, say, changed, log
        self._loaded: dict[str, str] = {}  # by function: the instance that loaded last
        self._left_out = set(without)

    def restore(self) -> None:
        """Restore the catalogue's content after a start."""
        catalogue = self._catalogue
        steps, batches, pins = catalogue.step_times(), catalogue.batch_times(), catalogue.pins()
        for spec in catalogue.functions():
            name = spec.name
            self._perform(service.service_level(spec, steps.get(name), name in pins, batches.get(name, ())))

    def all(self) -> m.Catalogue:
        held = self._catalogue.quarantined() | dict.fromkeys(self._left_out, LEFT_OUT)
        return m.Catalogue(functions=self._catalogue.functions(), held=held, traffic=self._catalogue.traffic())

    def loaded(self, function: str, instance: str) -> None:
        self._loaded[function] = instance

    def deploy(self, spec: m.FunctionSpec) -> None:
        """Said right after the InstanceUp of the instance that has loaded the new version."""
        instance = self._loaded.get(spec.name, "")
        if (failure := self._scheduler.too_large(instance)) is not None:
            self._say(m.EndInstance(instance=instance, failure=failure, unkept=spec.name))
            return
        try:
            self._catalogue.keep(spec)
        except NotWritten as error:
            self._not_written(spec.name, error)
            self._say(m.EndInstance(instance=instance, failure=service.not_kept(str(error)), unkept=spec.name))
            return
        self._left_out.discard(spec.name)
        self._perform(service.service_level(spec, pinned=spec.name in self._catalogue.pins()))
        self._changed()
        self._say(m.Kept(name=spec.name, warning=service.deadline_warning(self._scheduler, spec, instance)))

    def remove(self, name: str) -> bool:
        """Whether it is gone."""
        try:
            self._catalogue.remove(name)
        except NotWritten as error:
            self._not_written(name, error)
            self._say(m.NotRemoved(name=name, text=str(error)))
            return False
        self._perform(ev.FunctionGone(name))
        self._loaded.pop(name, None)
        self._left_out.discard(name)
        self._changed()
        self._say(m.Kept(name=name))
        return True

    def quarantine(self, message: m.Quarantined | m.Lifted) -> None:
        self._left_out.discard(message.name)
        try:
            self._catalogue.set_quarantine(message.name, message.text if isinstance(message, m.Quarantined) else None)
        except NotWritten as error:
            self._not_written(message.name, error)

    def pin(self, asked: m.AskPin) -> None:
        failure = None
        try:
            self._catalogue.pin(asked.name, asked.pinned)
        except NotWritten as error:
            failure = service.not_kept(str(error), "nothing was changed")
        else:
            spec = next((spec for spec in self._catalogue.functions() if spec.name == asked.name), None)
            if spec is not None:
                self._perform(service.service_level(spec, pinned=asked.pinned))
        self._say(m.Status(query=asked.query, json=b"{}", failure=failure))

    def share(self, asked: m.AskTraffic) -> None:
        failure = None
        try:
            self._catalogue.share(asked.name, asked.share)
        except NotWritten as error:
            failure = service.not_kept(str(error), "nothing was changed")
        self._say(m.Status(query=asked.query, json=b"{}", failure=failure))

    def _not_written(self, name: str, error: NotWritten) -> None:
        self._log.error("catalogue_not_written", function=name, error=str(error))
