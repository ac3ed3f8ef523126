"""A runtime whose sequences wait for others of their function: `[schedule] batching`. The executor is the test."""

from collections.abc import Iterator
from contextlib import contextmanager

from language_models import prompts
from played_runtime import NEW, Played

from dormouse.core.decisions.batches.gathering import Gathering
from dormouse.core.decisions.rules.batching import BatchRule
from dormouse.schemas import messages as m

HOUR_S = 3600.0


@contextmanager
def runtime(kind: str, size: int = 1, delay_s: float = 0.0) -> Iterator[Played]:
    """It has a turn, and nobody has asked for anything."""
    played = Played(BatchRule(kind, size, delay_s) if kind != "now" else None)
    try:
        played.executor.send(m.TurnBegins())
        played.thread.start()
        assert played.until(m.Stepped) == ["Stepped"]
        yield played
    finally:
        played.close()


def load(played: Played, running: int, waiting: int) -> m.EngineLoad:
    """The next that is told with so many sequences."""
    while (found := played.said(m.LoadChanged).load) and (found.running, found.waiting) != (running, waiting):
        pass
    return found


def answered(played: Played, *numbers: int) -> list[list[int]]:
    """Sequences of the first lease whose first tokens come in one step each, until all of these are whole."""
    together: list[list[int]] = []
    seen = {number for _, number in played.made}
    while any(len(played.made.get((1, number), [])) < NEW for number in numbers):
        played.until(m.Tokens)
        now = {number for _, number in played.made}
        if now - seen:
            together.append(sorted(now - seen))
        seen = now
    return together


def test_by_default_nobody_waits() -> None:
    with runtime("now") as played:
        played.submit(1, prompts(1, 40)[0])
        assert answered(played, 1) == [[1]]
        assert load(played, 0, 0).gathered == {}


def test_a_lone_sequence_waits_and_two_fill_a_batch() -> None:
    with runtime("fixed", 2, HOUR_S) as played:
        first, second = prompts(2, 40, 40)
        played.submit(1, first)
        assert load(played, 0, 1).gathered == {}
        played.submit(2, second)
        assert answered(played, 1, 2) == [[1, 2]]
        assert load(played, 0, 0).gathered == {"full": 2}


def test_each_lease_has_a_batch_of_its_own() -> None:
    with runtime("fixed", 2, HOUR_S) as played:
        played.join(2)
        first, second, third = prompts(3, 40, 40, 40)
        played.submit(1, first)
        played.submit(1, second, serial=2)
        load(played, 0, 2)
        played.submit(2, third)
        assert answered(played, 1, 2) == [[1, 2]]
        assert (2, 1) not in played.made


def test_one_that_has_waited_for_its_delay_begins_alone() -> None:
    """The executor says nothing meanwhile: the runtime looks by itself."""
    with runtime("fixed", 2, 0.01) as played:
        played.submit(1, prompts(1, 40)[0])
        assert answered(played, 1) == [[1]]
        assert load(played, 0, 0).gathered == {"expired": 1}


def test_one_that_its_client_leaves_counts_no_more() -> None:
    with runtime("fixed", 2, HOUR_S) as played:
        first, second, third = prompts(3, 40, 40, 40)
        played.submit(1, first)
        played.tell(m.Abort(number=1))
        load(played, 0, 0)
        played.submit(2, second)
        load(played, 0, 1)
        played.submit(3, third)
        assert answered(played, 2, 3) == [[2, 3]]


def test_one_that_goes_on_does_not_wait_again() -> None:
    """Its runtime was lost with tokens that it had made."""
    with runtime("fixed", 2, HOUR_S) as played:
        (tokens,) = prompts(1, 40)
        limit = len(tokens) + NEW
        played.tell(m.Submit(number=1, tokens=tokens, more=False, prompt=38, limit=limit, stops=[]))
        assert answered(played, 1) == [[1]]


def test_each_that_waits_is_told_at_once() -> None:
    """No step comes that would tell of it later."""
    with runtime("fixed", 3, HOUR_S) as played:
        first, second, third = prompts(3, 40, 40, 40)
        for number, tokens in ((1, first), (2, second)):
            played.submit(number, tokens)
            load(played, 0, number)
        played.submit(3, third)
        assert answered(played, 1, 2, 3) == [[1, 2, 3]]


def test_while_it_waits_no_turn_is_wanted() -> None:
    with runtime("fixed", 2, HOUR_S) as played:
        first, second = prompts(2, 40, 40)
        played.submit(1, first)
        load(played, 0, 1)
        played.executor.send(m.TurnEnds())
        assert played.said(m.TurnGivenBack) == m.TurnGivenBack(wants=False)
        played.submit(2, second)
        due = played.said(m.StepsWanted).due
        assert due is not None
        assert [each.tokens for each in due.prompts] == [80]


def test_eq_3_waits_as_long_as_the_deadline_allows() -> None:
    """Of a runtime that has never computed a prompt nobody knows what one takes, so the first waits for nothing. Then
    one waits until its lease's deadline is known, and another for that.
    """
    with runtime("fill-or-expire") as played:
        first, second, third = prompts(3, 40, 40, 40)
        played.submit(1, first)
        assert answered(played, 1) == [[1]]
        assert load(played, 0, 0).gathered == {"untimed": 1}
        played.submit(2, second)
        load(played, 0, 1)
        played.seat(1, joins=m.JoinRule(ttft_us=int(HOUR_S * 1e6)))
        played.submit(3, third)
        played.seat(1, joins=m.JoinRule(ttft_us=1))
        assert answered(played, 2, 3) == [[2, 3]]
        assert load(played, 0, 0).gathered == {"untimed": 1, "full": 2}


def test_leases_that_end_leave_nothing() -> None:
    gathering = Gathering(BatchRule("fixed", 2, HOUR_S))
    assert gathering.add(1, 7, 40, 0.0)
    assert gathering.add(2, 8, 40, 0.0)
    gathering.discard(1)
    gathering.dismiss(7)
    gathering.discard(1)
    assert gathering.waits
    assert gathering.take(HOUR_S, None) == [2]
    assert not gathering.waits
