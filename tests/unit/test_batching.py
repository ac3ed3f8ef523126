"""How long streams wait for others of their function: ServerlessLoRA's Eq. 3 as it stands, and fixed delays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.decisions.rules.batching import (
    EXPIRED,
    FULL,
    UNTIMED,
    BatchRequests,
    BatchRule,
    BatchTimes,
    GatheringBatch,
    RequestBatches,
)


def prompts_s(tokens: int) -> float:
    """Steps of 256 tokens: 20 ms each, and 1 ms for each token."""
    return -(-tokens // 256) * 0.02 + tokens * 0.001


def literal(ttft_s: float = 1.0) -> GatheringBatch[str]:
    return GatheringBatch(BatchRule("fill-or-expire"), ttft_s)


def fixed(size: int = 2, delay_s: float = 0.5) -> GatheringBatch[str]:
    return GatheringBatch(BatchRule("fixed", size, delay_s), 1.0)


def test_work_conserving_is_no_rule() -> None:
    assert BatchRule.of("now", 1, 0) is None
    assert BatchRule.of("fill-or-expire", 1, 0) == BatchRule("fill-or-expire")
    assert BatchRule.of("fixed", 10, 500) == BatchRule("fixed", 10, 0.5)


def test_a_lone_stream_waits_until_only_its_prompt_is_left_of_its_time() -> None:
    batch = literal()
    batch.add("a", 100, 5.0)
    assert batch.due_s(prompts_s) == pytest.approx(5.88)
    assert batch.take(5.87, prompts_s) == ([], "")
    assert batch.take(5.89, prompts_s) == (["a"], EXPIRED)
    assert batch.due_s(prompts_s) == float("inf")


def test_a_batch_is_full_when_its_prompts_take_all_the_time_that_its_first_has() -> None:
    batch = literal()
    for number in range(10):
        batch.add(f"{number}", 100, 5.0)
        if number == 7:
            assert batch.due_s(prompts_s) == pytest.approx(5.12)  # 800 tokens take 0.88 s, in four steps
        assert batch.take(5.0, prompts_s) == (([f"{each}" for each in range(10)], FULL) if number == 9 else ([], ""))


def test_one_that_leaves_is_waited_for_no_more() -> None:
    batch = literal()
    batch.add("a", 100, 5.0)
    batch.add("b", 700, 5.1)
    assert batch.due_s(prompts_s) == pytest.approx(5.12)
    batch.discard("b")
    batch.discard("b")
    assert batch.due_s(prompts_s) == pytest.approx(5.88)
    batch.discard("a")
    assert batch.due_s(prompts_s) == float("inf")


def test_nothing_waits_while_nobody_knows_what_prompts_take() -> None:
    batch = literal()
    batch.add("a", 100, 5.0)
    assert batch.take(5.0, None) == (["a"], UNTIMED)


def test_a_fixed_batch_waits_for_its_size_or_its_delay() -> None:
    """It needs no times."""
    batch = fixed()
    batch.add("a", 100, 5.0)
    assert batch.due_s(None) == 5.5
    assert batch.take(5.4, None) == ([], "")
    batch.add("b", 9_000, 5.4)
    assert batch.take(5.4, None) == (["a", "b"], FULL)
    batch.add("c", 100, 6.0)
    assert batch.take(6.5, None) == (["c"], EXPIRED)


# --- requests of functions


def batches(longest_s: float = 0.05, deadline_s: float = 1.0, gap_s: float = 0.001, **times: float) -> RequestBatches:
    """``times``: what batches of so many have taken, as b1, b4; arrivals come in this time from one another."""
    rule = RequestBatches(8, longest_s, deadline_s)
    for name, seconds in times.items():
        rule.times.took(int(name[1:]), seconds)
    came(rule, *(number * gap_s for number in range(1, 20)))
    return rule


def came(rule: RequestBatches, *at_s: float, last_s: float | None = None) -> None:
    """To one instance."""
    for each in at_s:
        last_s = rule.came(each, last_s)


def test_times_of_batches_are_learned() -> None:
    times = BatchTimes()
    assert times.of(1) is None
    times.took(2, 0.2)
    assert (times.of(1), times.of(2), times.of(4)) == (0.2, 0.2, 0.4), "nothing is known to be gained by others"
    times.took(6, 0.4)
    assert times.of(4) == pytest.approx(0.3)
    for seconds in (0.7, 0.8):
        times.took(2, seconds)
    times.took(2, 0.1)
    assert times.of(2) == 0.2, "two that wait for copies say nothing"
    for seconds in (0.7, 0.8):
        times.took(2, seconds)
    assert times.of(2) == 0.7


def test_a_cold_batch_lets_nobody_wait() -> None:
    """Nothing is gained by batches here."""
    rule = batches(b1=0.02, b2=0.04)
    for seconds in (1.0, 0.02, 1.0):  # the middle one of an even number of them, too
        rule.times.took(1, seconds)
        assert rule.wait_s(1, 0.0) == 0.0


def test_a_pause_is_one_gap_however_long_it_was() -> None:
    for pause_s in (0.1, 3600.0):
        rule = batches(b1=0.02, b2=0.025)
        assert rule.wait_s(1, 0.0) == 0.05
        came(rule, 1.0 + pause_s, last_s=1.0)
        assert rule.wait_s(1, 0.0) == 0.05, "15 ms are saved by four of five, and 11 ms are waited"
        came(rule, 2.0 + 2 * pause_s, last_s=1.0 + pause_s)
        assert rule.wait_s(1, 0.0) == 0.0, "by three of five, and 19 ms"


def test_gaps_beyond_the_wait_save_nothing() -> None:
    """One that comes in 60 ms would save 100 ms, but nobody may wait for so long."""
    assert batches(b1=0.1, b8=0.1, gap_s=0.06).wait_s(1, 0.0) == 0.0
    assert batches(b1=0.1, b8=0.1, gap_s=0.04).wait_s(1, 0.0) == 0.05


def test_who_is_heard_of_late_has_come_before() -> None:
    rule = batches(b1=0.03, b8=0.03)
    last_s = 0.02
    for number in range(1, 20):
        last_s = rule.came(0.02, rule.came(0.02 + number * 0.04, last_s))
    assert rule.wait_s(1, 0.0) == 0.05


def test_who_comes_to_another_instance_is_not_waited_for() -> None:
    """To each of two in turn, 20 ms from one another: the next one saves 30 ms, and comes to this one in 40."""
    rule = batches(b1=0.03, b8=0.03)
    last_s: list[float | None] = [None, None]
    for number in range(40):
        last_s[number % 2] = rule.came(number * 0.02, last_s[number % 2])
    assert rule.wait_s(1, 0.0) == 0.0
    came(rule, *(1.0 + number * 0.02 for number in range(20)))
    assert rule.wait_s(1, 0.0) == 0.05, "of one"


def test_of_what_waits_the_earliest_is_known() -> None:
    requests = BatchRequests([(2, 9.0), (3, 8.0)])
    assert (requests.earliest_s, requests.in_order()) == (8.0, [9.0, 8.0])
    requests.change([(1, 7.0), (4, 7.5)], [99])
    assert (requests.earliest_s, requests.in_order()) == (7.0, [7.0, 9.0, 8.0, 7.5])
    requests.change([], [1, 2])
    assert (requests.earliest_s, requests.in_order()) == (7.5, [8.0, 7.5])
    requests.change([(5, 7.0)], [5])
    assert (requests.earliest_s, len(requests)) == (7.5, 2)
    requests.change([], [3, 4])
    assert not requests


def test_nobody_waits_without_a_time_to_wait_or_before_times_are_known() -> None:
    assert batches(longest_s=0.0, b1=0.1, b8=0.1).wait_s(1, 0.0) == 0.0
    assert batches().wait_s(1, 0.0) == 0.0


def test_one_more_is_waited_for_while_it_comes_sooner_than_it_saves() -> None:
    assert batches(b1=0.1, b8=0.1).wait_s(3, 0.02) == pytest.approx(0.03)
    assert batches(0.5, b1=0.1, b8=0.1, gap_s=0.2).wait_s(3, 0.02) == 0.0, "it would come too late"
    assert batches(b1=0.1, b8=0.8).wait_s(3, 0.02) == 0.0, "it would save nothing"


def test_a_full_batch_and_one_that_would_be_late_begin() -> None:
    assert batches(b1=0.1, b8=0.1).wait_s(8, 0.0) == 0.0
    assert batches(b1=0.1, b8=0.1).wait_s(3, 0.05) == 0.0
    assert batches(deadline_s=0.13, b1=0.1, b8=0.1).wait_s(3, 0.01) == pytest.approx(0.02)
    assert batches(deadline_s=0.1, b1=0.1, b8=0.1).wait_s(3, 0.01) == 0.0


def test_as_many_begin_as_leave_most_of_them_in_time() -> None:
    rule = batches(b1=0.1, b8=0.8)  # nothing is gained by batches
    assert rule.size([1.0] * 4) == 4
    assert rule.size([0.1, 1.0, 1.0]) == 1, "the first would be late with others"
    assert rule.size([0.25, 0.25, 0.25, 1.0]) == 2, "one of the first three is late, and the last is in time"
    assert rule.size([-1.0, -1.0, 1.0]) == 3, "who is late already is no reason"
    assert rule.size([9.0] * 20) == 8
    assert batches().size([0.1] * 20) == 8, "nobody knows what they take"
    assert rule.size([]) == 0


TIMES = st.floats(-1.0, 3.0, width=16)


@given(st.lists(TIMES, max_size=12), st.dictionaries(st.integers(1, 8), st.floats(0.0, 2.0, width=16), min_size=1))
def test_the_size_is_what_trying_all_sizes_finds(left_s: list[float], known: dict[int, float]) -> None:
    rule = batches(**{f"b{count}": seconds for count, seconds in known.items()})
    some = left_s[:8]

    def in_time(count: int) -> int:
        took_s = rule.times.of(count) or 0.0
        rest_s = took_s + (rule.times.of(len(some) - count) or 0.0)
        return sum(left >= took_s for left in some[:count]) + sum(left >= rest_s for left in some[count:])

    assert rule.size(left_s) == max(range(1, len(some) + 1), key=lambda count: (in_time(count), count), default=0)
