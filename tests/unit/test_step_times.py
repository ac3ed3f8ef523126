"""What steps take is found from steps, and a first token predicted from it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.controller.simulator.streams.batch import STEP_TOKENS as SIMULATED
from dormouse.core.decisions.batches.batch import STEP_TOKENS as REAL
from dormouse.core.decisions.rules.step_times import NEWS, StepTimer, first_token_s, news, step_s
from dormouse.schemas.messages import StepTimes

TIMES = StepTimes(step_us=18_000.0, prompt_token_us=300.0, sequence_us=700.0)


def test_simulated_runtimes_have_the_budget_of_real_ones_and_so_have_those_that_do_not_say_it() -> None:
    """Catalogues have times that were kept before runtimes said it."""
    assert TIMES.step_tokens == REAL == SIMULATED
    old = msgspec.msgpack.encode([18_000.0, 300.0, 700.0])
    assert msgspec.msgpack.decode(old, type=StepTimes) == TIMES


def test_a_first_token_takes_fewer_steps_where_a_step_takes_more() -> None:
    """As those of GPUs do."""
    times = msgspec.structs.replace(TIMES, step_tokens=1024)
    assert first_token_s(times, 1024, 3) == pytest.approx((18_000 + 3 * 700 + 1024 * 300) / 1e6)
    assert first_token_s(times, 1025, 0) == pytest.approx((2 * 18_000 + 1025 * 300) / 1e6)
    assert step_s(times, 4096, 0) == pytest.approx((18_000 + 1024 * 300) / 1e6)
    assert news(times, TIMES)


def test_a_first_token_takes_the_steps_of_its_prompt() -> None:
    """600 tokens are three steps, in which three others get a token each."""
    assert first_token_s(TIMES, 600, 3) == pytest.approx((3 * (18_000 + 3 * 700) + 600 * 300) / 1e6)
    assert first_token_s(TIMES, 66, 0) == pytest.approx((18_000 + 66 * 300) / 1e6)
    assert step_s(TIMES, 600, 3) == pytest.approx((18_000 + 256 * 300 + 3 * 700) / 1e6)
    assert step_s(TIMES, 0, 1) == pytest.approx(18_700 / 1e6)


def took_us(tokens: int, sequences: int) -> float:
    return 18_000 + 300 * tokens + 700 * sequences


def test_nothing_is_known_before_a_prompt() -> None:
    timer = StepTimer(256)
    timer.learn(0, 4, 20_000)
    assert timer.times is None


def test_steps_of_all_kinds_give_all_coefficients() -> None:
    timer = StepTimer(256)
    for tokens, sequences in ((66, 0), (0, 1), (200, 3), (0, 8), (256, 8), (31, 2)):
        timer.learn(tokens, sequences, took_us(tokens, sequences))
    times = timer.times
    assert times is not None
    for name in StepTimes.__struct_fields__:
        assert getattr(times, name) == pytest.approx(getattr(TIMES, name), rel=1e-4)


def test_equal_prompts_alone_are_predicted_though_their_parts_are_not_known() -> None:
    timer = StepTimer(256)
    for _ in range(20):
        timer.learn(66, 0, took_us(66, 0))
    assert timer.times is not None
    assert step_s(timer.times, 66, 0) == pytest.approx(took_us(66, 0) / 1e6, rel=1e-6)


def test_what_was_long_ago_counts_no_more() -> None:
    timer = StepTimer(256)
    for round_ in range(400):
        factor = 3.0 if round_ < 100 else 1.0
        for tokens, sequences in ((66, 0), (0, 1), (200, 3)):
            timer.learn(tokens, sequences, factor * took_us(tokens, sequences))
    assert timer.times is not None
    assert step_s(timer.times, 66, 0) == pytest.approx(took_us(66, 0) / 1e6, rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 128), st.integers(1, 10**8)), min_size=1, max_size=30))
def test_no_coefficient_is_ever_below_0(steps: list[tuple[int, int, int]]) -> None:
    timer = StepTimer(256)
    for step in steps:
        timer.learn(*step)
    if (times := timer.times) is not None:
        assert min(times.step_us, times.prompt_token_us, times.sequence_us) >= 0.0


def test_a_step_without_a_time_says_nothing() -> None:
    timer = StepTimer(256)
    timer.learn(10, 0, 0.0)
    assert timer.times is None


def test_small_changes_are_no_news() -> None:
    assert news(TIMES, None)
    assert not news(TIMES, TIMES)
    for factor, expected in ((1 + NEWS / 2, False), (1 + 2 * NEWS, True), (1 - 2 * NEWS, True)):
        changed = StepTimes(step_us=18_000.0, prompt_token_us=300.0 * factor, sequence_us=700.0)
        alone = StepTimes(step_us=18_000.0 * factor, prompt_token_us=300.0 * factor, sequence_us=700.0 * factor)
        assert news(alone, TIMES) is expected
        assert news(changed, TIMES) is expected


@given(
    st.lists(st.tuples(st.integers(0, 256), st.integers(1, 16)), max_size=5),
    st.integers(1, 16),
    st.lists(st.floats(1e3, 1e5), max_size=30),
)
def test_steps_without_prompts_are_learned_at_once_as_one_by_one(
    before: list[tuple[int, int]], sequences: int, took: list[float]
) -> None:
    one_by_one, at_once = StepTimer(256), StepTimer(256)
    for timer in (one_by_one, at_once):
        for tokens, count in before:
            timer.learn(tokens, count, took_us(tokens, count))
    for each in took:
        one_by_one.learn(0, sequences, each)
    at_once.learn_tokens(sequences, took)
    assert at_once._sums == one_by_one._sums
    assert at_once.times == one_by_one.times
