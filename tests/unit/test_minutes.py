"""What became of requests, minute by minute: counts of an hour, and no more, whenever they came."""

from hypothesis import given
from hypothesis import strategies as st

from dormouse.router.front.minutes import FAILED, IN_TIME, KEPT, KINDS, LATE, MINUTE_S, OTHER, Minutes, together


def test_each_is_counted_in_its_minute_and_by_its_kind() -> None:
    minutes = Minutes()
    for kind, at_s in ((IN_TIME, 0.0), (IN_TIME, 59.9), (LATE, 60.0), (FAILED, 61.0), (OTHER, 200.0)):
        minutes.add(kind, at_s)
    assert together([minutes], 200.0) == {"0": [2, 0, 0, 0], "1": [0, 1, 1, 0], "3": [0, 0, 0, 1]}


def test_what_is_older_than_an_hour_is_gone_whether_or_not_more_came() -> None:
    minutes = Minutes()
    minutes.add(IN_TIME, 10.0)
    assert together([minutes], KEPT * MINUTE_S - 0.1) == {"0": [1, 0, 0, 0]}
    assert together([minutes], KEPT * MINUTE_S) == {}
    minutes.add(LATE, KEPT * MINUTE_S)  # in the place of the first
    assert together([minutes], KEPT * MINUTE_S) == {"60": [0, 1, 0, 0]}


@given(st.lists(st.tuples(st.integers(0, 7200), st.integers(0, KINDS - 1)), max_size=60), st.integers(0, 4000))
def test_it_is_as_if_all_were_remembered(steps: list[tuple[int, int]], later_s: int) -> None:
    minutes, now_s, all_ = Minutes(), 0, list[tuple[int, int]]()
    for step_s, kind in steps:
        now_s += step_s
        minutes.add(kind, float(now_s))
        all_.append((now_s // 60, kind))
    newest = (now_s + later_s) // 60
    expected: dict[str, list[int]] = {}
    for minute, kind in all_:
        if newest - minute < KEPT:
            expected.setdefault(str(minute), [0] * KINDS)[kind] += 1
    assert together([minutes], float(now_s + later_s)) == expected


def test_several_are_told_together() -> None:
    one, other = Minutes(), Minutes()
    one.add(IN_TIME, 0.0)
    for kind in (IN_TIME, FAILED):
        other.add(kind, 30.0)
    other.add(LATE, 600.0)
    assert together((one, other), 600.0) == {"0": [2, 0, 1, 0], "10": [0, 1, 0, 0]}
    assert (together([one], 600.0), together((), 600.0)) == ({"0": [1, 0, 0, 0]}, {})
