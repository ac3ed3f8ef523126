"""What keeping a model is worth: ranks as least recently used does, whatever the clock says, and is a good factor."""

from hypothesis import given
from hypothesis import strategies as st

from dormouse.controller.worth import HALF_LIFE_S, OLDEST, by_recency


def test_a_half_life() -> None:
    assert by_recency([("a", 0.0), ("b", HALF_LIFE_S), ("c", 3 * HALF_LIFE_S)]) == {"a": 1.0, "b": 0.5, "c": 0.125}


def test_nothing_is_worth_nothing() -> None:
    assert by_recency([]) == {}


@given(st.lists(st.floats(0, 1e9), max_size=300), st.floats(1, 1e13), st.floats(1e6, 1e12))
def test_equal_sizes_are_ranked_by_their_last_use(ages_s: list[float], nbytes: float, bandwidth: float) -> None:
    worth = by_recency((str(number), age_s) for number, age_s in enumerate(sorted(ages_s)))
    assert list(worth) == [str(number) for number in range(len(ages_s))]
    assert all(2.0 ** -(OLDEST + 1) < value <= 1.0 for value in worth.values())
    costs = [value * nbytes / bandwidth for value in worth.values()]
    assert costs == sorted(set(costs), reverse=True), "two models cost the same"
