"""Pending moves of models that callers wait for: pure. Each is answered once, or, when the process that it waits for
dies, not at all: the caller has a time limit of its own.

The scheduler brings a model to a GPU. Down from there it goes in two steps: each GPU on which it is drops the parts
that nobody else has or uses, then, if it is to leave host memory too, the store does.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from dormouse.core.quantities import size
from dormouse.schemas.messages import Failure

BRING_S: Final = 50.0
"""Stock clients give up after 60 s."""

AWAY_S: Final = 600.0
"""So long nothing brings a model back that somebody had leave, but a request."""

MAX: Final = 64
"""Asked for at once; the oldest query is answered no more."""


@dataclass(slots=True)
class ModelLeaves:
    """``gpus``: those that have yet to report that they have dropped it."""

    function: str
    instances: list[str]
    gpus: set[int]
    down: bool
    left_nbytes: int = 0


class ModelMoves:
    """See the module. Queries are the router's."""

    def __init__(self) -> None:
        self._bringing: OrderedDict[int, tuple[str, float]] = OrderedDict()  # by query: function, and until when
        self._leaving: OrderedDict[int, ModelLeaves] = OrderedDict()  # by query

    def bringing(self, now_s: float) -> Collection[str]:
        """Functions whose model somebody waits for. Waits that have lasted too long are dropped."""
        for query in [query for query, (_, until_s) in self._bringing.items() if until_s <= now_s]:
            del self._bringing[query]
        return {name for name, _ in self._bringing.values()}

    def brings(self, query: int, function: str, until_s: float) -> None:
        self._bringing[query] = function, until_s
        if len(self._bringing) > MAX:
            self._bringing.popitem(last=False)

    def brought(self, function: str) -> list[int]:
        """It is there, or will not come: the queries to be answered."""
        queries = [query for query, (name, _) in self._bringing.items() if name == function]
        for query in queries:
            del self._bringing[query]
        return queries

    def leaves(self, query: int, leaving: ModelLeaves) -> None:
        self._leaving[query] = leaving
        if len(self._leaving) > MAX:
            self._leaving.popitem(last=False)

    def left_gpu(self, query: int, gpu: int, left_nbytes: int) -> ModelLeaves | None:
        """The move, once no GPU is waited for any more; it is over, unless the store is to go on."""
        leaving = self._leaving.get(query)
        if leaving is None:
            return None
        leaving.gpus.discard(gpu)
        leaving.left_nbytes += left_nbytes
        if leaving.gpus:
            return None
        if not leaving.down or leaving.left_nbytes:
            del self._leaving[query]
        return leaving

    def waits_for(self, gpu: int) -> list[int]:
        """Those who wait for this GPU to drop something."""
        return [query for query, leaving in self._leaving.items() if gpu in leaving.gpus]

    def left_host(self, query: int) -> ModelLeaves | None:
        return self._leaving.pop(query, None)


def in_use(name: str, left_nbytes: int, where: str) -> Failure | None:
    """Why it is not all gone, if it is not."""
    if not left_nbytes:
        return None
    text = (
        f"{size(left_nbytes)} of {name!r} stay {where}: they are in use, or other functions have them too; "
        "try again when it rests"
    )
    return Failure(code="in_use", status=409, text=text, retryable=True)


def not_loaded(name: str) -> Failure:
    text = f"{name!r} is not loaded: there is nothing yet that could be moved; GET /v2/models/{name}/ready says when"
    return Failure(code="starting", status=503, text=text, retryable=True)


def removed(name: str) -> Failure:
    return Failure(code="unknown_function", status=404, text=f"{name!r} was removed before its model came to a GPU")


def no_room(name: str, outcome: str) -> Failure:
    if outcome == "refused":
        text = f"there is no room for {name!r} on a GPU beside what is in use or pinned"
        return Failure(code="gpus_full", status=507, text=text)
    return Failure(code="wake_failed", status=503, text=f"{name!r} could not be brought to a GPU", retryable=True)
