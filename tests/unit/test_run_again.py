"""When `dormouse run --restart` runs a program again."""

from itertools import accumulate, repeat

from dormouse.core.cli.runagain import LONGEST_WAIT_S, STEADY_S, next_wait_s


def test_only_without_its_node_is_a_program_run_again() -> None:
    assert [status for status in range(-64, 256) if next_wait_s(status, 0.0, 0.0) is not None] == [4, 75]


def test_waits_grow_to_the_longest_and_begin_anew_after_a_time_that_went_well() -> None:
    waits = list(accumulate(repeat(75, 7), lambda last_s, status: next_wait_s(status, 1.0, last_s) or 0.0, initial=0.0))
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, LONGEST_WAIT_S]
    assert next_wait_s(75, STEADY_S, 30.0) == 1.0
