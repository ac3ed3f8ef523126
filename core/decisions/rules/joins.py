"""Order in which waiting sequences join a runtime's batch, where not all can at once: pure. Runtimes decide by it
(core/decisions/batches/batch.py), and so do those of the simulator.

    margin = deadline - (now + T) = latest - now

T is what its own prompt takes. Its wait is in the deadline, and wakes and turns of others are the same for all of a
batch. So margins keep their order while time goes on: each sequence has a time at which it has to begin at latest.

1. Preempted sequences go on first.
2. Then come those that can still be in time, the least margin first (ServerlessLoRA's Eq. 5).
3. Those that are late already are late for good, and come last: in turn among functions, whoever sends most. But after
   `PASSES` others it is their turn, so that nothing waits for ever.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Final, Generic, Protocol, TypeVar

from dormouse.core.decisions.rules.step_times import first_token_s
from dormouse.schemas.messages import StepTimes

IN_TURN: Final = float("-inf")
"""The latest beginning of what has no deadline: it is the turn of its function that counts."""

PASSES: Final = 8
"""Sequences in time that begin one after the other while late ones wait: those get a ninth."""


def latest_s(deadline_s: float, tokens: int, times: StepTimes | None) -> float:
    """When a prompt of so many tokens has to begin at latest, by what its runtime's steps take, if that is known."""
    return deadline_s if times is None else deadline_s - first_token_s(times, tokens, 0)


class Joining(Protocol):
    """``owner``: whose it is, of those that begin in turn."""

    owner: int


S = TypeVar("S", bound=Joining)

_Place = tuple[float, int]
"""Latest beginning, and order of arrival."""


def _able(_: Joining) -> bool:
    return True


class JoinQueue(Generic[S]):
    """See the module. ``count`` of them wait."""

    def __init__(self) -> None:
        self._again: deque[S] = deque()  # preempted, the next one first
        self._lines: dict[int, list[_Place]] = {}  # by owner, ascending
        self._at: dict[_Place, S] = {}
        self._places: dict[S, tuple[int, _Place]] = {}  # with whose line it is in
        self.count = 0
        self._came = 0  # ever
        self._passed = 0  # late ones, by so many

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[S]:
        return chain(self._again, self._places)

    def add(self, sequence: S, latest_s: float = IN_TURN) -> None:
        self._came += 1
        self.count += 1
        self._put(sequence, (latest_s, self._came))

    def move(self, sequence: S, latest_s: float) -> None:
        """It has to begin at another time, as is known now."""
        if (known := self._places.get(sequence)) is not None:
            self._drop(sequence)
            self._put(sequence, (latest_s, known[1][1]))

    def again(self, sequence: S) -> None:
        """It was preempted."""
        self.count += 1
        self._again.appendleft(sequence)

    def remove(self, sequence: S) -> None:
        if sequence in self._places:
            self._drop(sequence)
        else:
            self._again.remove(sequence)
        self.count -= 1

    def begins(self, sequence: S, now_s: float) -> None:
        """It is not one of them any more."""
        if (known := self._places.get(sequence)) is not None:
            in_time = known[1][0] >= now_s
            self._passed = self._passed + 1 if in_time and self._some_late(now_s) else 0
        self.remove(sequence)

    def next(self, now_s: float, running: Mapping[int, int], able: Callable[[S], bool] = _able) -> S | None:
        """``running``: how many each owner has that have begun. Those that are not ``able`` are as if not there."""
        for sequence in self._again:
            if able(sequence):
                return sequence
        in_time: _Place | None = None
        late: tuple[int, float, int] | None = None
        for owner, line in self._lines.items():
            first = bisect_left(line, (now_s, 0))
            if (place := self._first(line, first, len(line), able)) is not None and (
                in_time is None or place < in_time
            ):
                in_time = place
            if (place := self._first(line, 0, first, able)) is not None:
                turn = running.get(owner, 0), *place
                late = turn if late is None else min(late, turn)
        if late is not None and (in_time is None or self._passed >= PASSES):
            return self._at[late[1:]]
        return None if in_time is None else self._at[in_time]

    def _first(self, line: list[_Place], start: int, end: int, able: Callable[[S], bool]) -> _Place | None:
        for index in range(start, end):
            if able(self._at[line[index]]):
                return line[index]
        return None

    def _some_late(self, now_s: float) -> bool:
        return any(line[0][0] < now_s for line in self._lines.values())

    def _put(self, sequence: S, place: _Place) -> None:
        owner = sequence.owner
        insort(self._lines.setdefault(owner, []), place)
        self._at[place], self._places[sequence] = sequence, (owner, place)

    def _drop(self, sequence: S) -> None:
        owner, place = self._places.pop(sequence)
        del self._at[place]
        line = self._lines[owner]
        del line[bisect_left(line, place)]
        if not line:
            del self._lines[owner]
