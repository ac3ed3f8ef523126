"""Moves models on request, and answers the waiting queries. moves.py has the list of those; the scheduler brings a
model that is to come to a GPU.
"""

from collections.abc import Callable

from dormouse.controller import moves
from dormouse.controller.moves import ModelLeaves, ModelMoves
from dormouse.controller.peers import ControllerPeers
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.schemas import messages as m


class Moving:
    """``perform`` passes an event to the scheduler; ``now`` is the clock."""

    def __init__(
        self,
        scheduler: Scheduler,
        links: ControllerPeers,
        perform: Callable[[ev.Event], None],
        now: Callable[[], float],
    ) -> None:
        self._scheduler, self._links, self._perform, self._now = scheduler, links, perform, now
        self._moves = ModelMoves()

    def asked(self, asked: m.AskMove) -> None:
        name, query = asked.name, asked.query
        instances = self._scheduler.instances_of(name)
        if not instances:
            self._answer([query], moves.not_loaded(name))
            return
        if asked.to == "gpu":
            until_s = self._now() + moves.BRING_S
            self._moves.brings(query, name, until_s)
            self._perform(ev.BringAsked(name, until_s))
            return
        self._perform(ev.KeptAway(name, self._now() + moves.AWAY_S))
        gpus = {number for number in self._links.gpus if number in self._scheduler.gpus}
        self._moves.leaves(query, ModelLeaves(name, instances, set(gpus), asked.to == "disk"))
        for number in gpus:
            self._links.to_gpu(number, m.DropModel(query=query, instances=instances))
        if not gpus:
            self.left_gpu(query, -1, 0)

    def look(self) -> None:
        """The scheduler has received an event: a model may have come."""
        for name in self._moves.bringing(self._now()):
            if self._scheduler.is_on_gpu(name):
                self._answer(self._moves.brought(name), None)

    def removed(self, name: str) -> None:
        """The function is not deployed any more."""
        self._answer(self._moves.brought(name), moves.removed(name))

    def gpu_gone(self, gpu: int) -> None:
        """Its executor is dead, and all of its memory is released."""
        for query in self._moves.waits_for(gpu):
            self.left_gpu(query, gpu, 0)

    def preloaded(self, message: m.Preloaded) -> None:
        """It will not come, if there was no room or its bytes could not be had."""
        if message.outcome in ("refused", "failed"):
            name = self._scheduler.function_of(message.instance)
            self._answer(self._moves.brought(name), moves.no_room(name, message.outcome))

    def left_gpu(self, query: int, gpu: int, left_nbytes: int) -> None:
        leaving = self._moves.left_gpu(query, gpu, left_nbytes)
        if leaving is None:
            return
        if leaving.down and not leaving.left_nbytes and self._links.has_store:
            self._links.to_store(m.MoveDown(query=query, instances=leaving.instances))
        else:
            self._answer([query], moves.in_use(leaving.function, leaving.left_nbytes, "on a GPU"))

    def left_host(self, query: int, left_nbytes: int) -> None:
        if (leaving := self._moves.left_host(query)) is not None:
            self._answer([query], moves.in_use(leaving.function, left_nbytes, "in host memory"))

    def _answer(self, queries: list[int], failure: m.Failure | None) -> None:
        for query in queries:
            self._links.to_router(m.Status(query=query, json=b"{}", failure=failure))
