"""A function's last requests: which of them are remembered, and what is said of them."""

from dormouse.core.decisions.requests.events import Timing
from dormouse.router.front.recent import LAST, LastRequests, Past


def _past(number: int, outcome: str = "ok", source: str = "gpu", late: bool = False) -> Past:
    timing = Timing(queue_s=0.001, wait_s=0.002, run_s=number / 1000, source=source, copy_s=0.0005)  # type: ignore[arg-type]
    return Past(1000.0 + number, f"r{number}", "t", outcome, timing, late)


def test_those_that_are_looked_for_outlive_many_good_ones() -> None:
    last = LastRequests()
    last.add(_past(1, "function_raised"))
    last.add(_past(2, late=True))
    last.add(_past(3, source="disk"))
    last.add(_past(4, "cancelled", source=""))
    last.add(_past(5, "timed_out", source="host", late=True))
    for number in range(6, 6 + LAST):
        last.add(_past(number))
    assert [past.id for past in last.of("failed")] == ["r1", "r5"]
    assert [past.id for past in last.of("slow")] == ["r2", "r5"]
    assert [past.id for past in last.of("cold")] == ["r3", "r5"]
    assert [past.id for past in last.of("")] == [f"r{number}" for number in range(6, 6 + LAST)]
    for number in range(2 * LAST):
        last.add(_past(number, "function_raised"))
    assert len(last.of("failed")) == LAST
    assert LastRequests().of("cold") == []


def test_those_since_a_time_are_the_newest_first() -> None:
    last = LastRequests()
    for number in range(5):
        last.add(_past(number, "function_raised" if number == 3 else "ok"))
    assert [past.id for past in last.since(1002.0)] == ["r4", "r3", "r2"]
    assert LastRequests().since(0.0) == []


def test_what_is_said_of_one() -> None:
    assert _past(7, source="host", late=True).told("f", True) == {
        "function": "f",
        "at": 1007.0,
        "id": "r7",
        "trace": "t",
        "by": None,
        "outcome": "ok",
        "error": None,
        "ms": 10.0,
        "queue_ms": 1.0,
        "wait_ms": 2.0,
        "run_ms": 7.0,
        "copy_ms": 0.5,
        "model": "host",
        "late": True,
    }


def test_why_one_failed_is_said_to_who_may_read_it() -> None:
    past = _past(1, "function_raised")._replace(why="KeyError: 'x'")
    assert (past.told("f", True)["error"], past.told("f", False)["error"]) == ("KeyError: 'x'", None)


def test_what_was_turned_away_is_among_them_and_pushes_nothing_out() -> None:
    last = LastRequests()
    last.add(_past(1, "function_raised"))
    last.add(_past(2))
    for number in range(3, 3 + 2 * LAST):
        last.add(_past(number, "rate_limited")._replace(turned=True))
    turned = [f"r{number}" for number in range(3 + LAST, 3 + 2 * LAST)]
    assert [past.id for past in last.of("failed")] == ["r1", *turned]
    assert [past.id for past in last.of("")] == ["r1", "r2", *turned]
    assert last.of("slow") == []
