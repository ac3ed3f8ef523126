"""Status queries that wait for the store: each is answered once, in time, and not too many wait."""

from hypothesis import given
from hypothesis import strategies as st

from dormouse.controller.queries import MAX_WAITING, WAIT_S, Queries


def test_answered_by_the_store() -> None:
    queries = Queries()
    number = queries.asked(7, 10.0)
    assert number is not None
    assert queries.next_deadline_s == 10.0 + WAIT_S
    assert queries.overdue(10.0 + WAIT_S / 2) == []
    assert queries.reported(number) == 7
    assert queries.reported(number) is None
    assert queries.next_deadline_s is None


def test_a_silent_store() -> None:
    queries = Queries()
    first, second = queries.asked(7, 10.0), queries.asked(8, 10.5)
    assert queries.overdue(10.0 + WAIT_S) == [7]
    assert queries.next_deadline_s == 10.5 + WAIT_S
    assert first is not None
    assert second is not None
    assert queries.reported(first) is None  # too late
    assert queries.reported(second) == 8


def test_no_more_than_so_many_wait() -> None:
    queries = Queries()
    numbers = [queries.asked(query, 0.0) for query in range(MAX_WAITING)]
    assert None not in numbers
    assert queries.asked(999, 0.0) is None
    assert queries.reported(numbers[0] or 0) == 0
    assert queries.asked(999, 0.0) is not None


STEP = st.one_of(
    st.just(("ask", 0)), st.tuples(st.just("report"), st.integers(0, 90)), st.tuples(st.just("wait"), st.integers(0, 7))
)


@given(st.lists(STEP, max_size=120))
def test_every_query_is_answered_once(steps: list[tuple[str, int]]) -> None:
    queries, now_s, asked, answered = Queries(), 0.0, 0, list[int]()
    for step, value in steps:
        match step:
            case "ask":
                asked += 1
                if queries.asked(asked, now_s) is None:
                    answered.append(asked)
            case "report":
                if (query := queries.reported(value)) is not None:
                    answered.append(query)
            case _:
                now_s += value / 5
                answered += queries.overdue(now_s)
                assert queries.next_deadline_s is None or queries.next_deadline_s > now_s
    answered += queries.overdue(now_s + WAIT_S)
    assert sorted(answered) == list(range(1, asked + 1))
