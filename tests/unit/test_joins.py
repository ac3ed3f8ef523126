"""Which sequence that waits joins a batch next: by its margin, and in turn what is late or has no deadline."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.decisions.rules.joins import IN_TURN, PASSES, JoinQueue, latest_s
from dormouse.schemas.messages import StepTimes


@dataclass(eq=False)
class Waits:
    name: str
    owner: int = 1
    able: bool = True


class Batch:
    """A queue whose sequences all begin, one after the other, and end at once unless they ``stay``."""

    def __init__(self, stay: bool = False) -> None:
        self.queue: JoinQueue[Waits] = JoinQueue()
        self.running: Counter[int] = Counter()
        self.stay = stay

    def add(self, name: str, latest_s: float, owner: int = 1, able: bool = True) -> Waits:
        self.queue.add(found := Waits(name, owner, able), latest_s)
        return found

    def begin(self, now_s: float) -> str:
        found = self.queue.next(now_s, self.running, lambda each: each.able)
        if found is None:
            return ""
        self.queue.begins(found, now_s)
        self.running[found.owner] += self.stay
        return found.name

    def order(self, now_s: float) -> str:
        return "".join(iter(lambda: self.begin(now_s), ""))


def test_the_latest_beginning_leaves_time_for_the_prompt() -> None:
    times = StepTimes(step_us=20_000.0, prompt_token_us=1_000.0, sequence_us=0.0)
    assert latest_s(5.0, 280, times) == pytest.approx(5.0 - 2 * 0.02 - 0.28)
    assert latest_s(5.0, 280, None) == 5.0


def test_the_least_margin_is_first_whoever_came_first() -> None:
    batch = Batch()
    for name, latest, owner in (("a", 3.0, 1), ("b", 1.0, 2), ("c", 2.0, 1)):
        batch.add(name, latest, owner)
    assert batch.order(0.5) == "bca"


def test_what_is_late_comes_last_and_in_turn_among_functions() -> None:
    """``c`` of another function has the second place of those, however many the first has."""
    batch = Batch(stay=True)
    for name, latest, owner in (("a", 1.0, 1), ("b", 1.1, 1), ("c", 1.9, 2), ("d", 5.0, 3)):
        batch.add(name, latest, owner)
    assert batch.order(2.0) == "dacb"


def test_without_deadlines_functions_begin_in_turn_and_the_oldest_of_each_first() -> None:
    batch = Batch(stay=True)
    for name, owner in (("a", 1), ("b", 1), ("c", 1), ("d", 2), ("e", 2)):
        batch.add(name, IN_TURN, owner)
    assert batch.order(2.0) == "adbec"


def test_what_is_late_does_not_wait_for_ever() -> None:
    batch = Batch()
    batch.add("l", 1.0)
    for number in range(20):
        batch.add(f"{number}", 50.0 + number, owner=2)
    names = [batch.begin(2.0) for _ in range(PASSES + 2)]
    assert names == [*(f"{number}" for number in range(PASSES)), "l", f"{PASSES}"]


def test_what_was_preempted_goes_on_first() -> None:
    batch = Batch()
    batch.add("a", 0.1)
    preempted = batch.add("b", 9.0)
    other = batch.add("c", 9.0)
    batch.queue.remove(preempted)
    batch.queue.remove(other)
    batch.queue.again(other)
    batch.queue.again(preempted)
    assert batch.order(0.0) == "bca"


def test_those_that_are_not_able_hold_up_nobody() -> None:
    batch = Batch()
    first = batch.add("a", 1.0, able=False)
    batch.add("b", 2.0)
    batch.queue.again(Waits("p", able=False))
    assert batch.order(0.0) == "b"
    first.able = True
    assert batch.order(0.0) == "a"
    assert len(batch.queue) == 1


def test_a_deadline_that_is_known_later_counts() -> None:
    batch = Batch()
    batch.add("a", 1.0)
    moved = batch.add("b", IN_TURN)
    batch.queue.move(moved, 0.5)
    batch.queue.move(Waits("none"), 0.5)
    assert batch.order(0.0) == "ba"


DEADLINES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3)), max_size=40)


@given(DEADLINES)
def test_all_begin_once_and_none_in_time_is_passed_by_a_later_one(asked: list[tuple[int, int]]) -> None:
    batch = Batch()
    latest = {}
    for number, (at, owner) in enumerate(asked):
        batch.add(name := f"{number},", float(at), owner)
        latest[name] = at
    begun = [batch.begin(15.0) for _ in asked]
    assert sorted(begun) == sorted(latest)
    assert not list(batch.queue)
    in_time = [latest[name] for name in begun if latest[name] >= 15]
    assert in_time == sorted(in_time)
