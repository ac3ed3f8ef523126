"""What is known of a function (compliance, rate) and the orders of waiting requests that follow from it."""

from collections import deque
from math import fsum

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dormouse.core.decisions.scheduling import orders
from dormouse.core.decisions.scheduling.functions import Function
from dormouse.core.decisions.scheduling.orders import ORDER_CLASSES, UPDATE_S, Order, Rrc
from dormouse.core.decisions.scheduling.state import Model, Waiting
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.policy import ORDERS

LINKS = Topology(host_bps=100.0)


def function(
    in_time: int = 0, late: int = 0, *, percentile: float = 0.5, latency_s: float = 1.0, run_s: float = 0.0
) -> Function:
    """With a percentile of one half RRCs are whole numbers: late ones less those in time."""
    made = Function("f", window=1000, half_life_s=120.0)
    made.percentile = percentile
    made.best_s = run_s
    for number in range(in_time + late):
        made.ended(number < late, latency_s)
    return made


def request(number: int, of: Function, arrived_s: float = 0.0, deadline_s: float = 100.0) -> Waiting:
    return Waiting(number, Model(f"i{number}", of, 0.0), arrived_s, deadline_s)


def drained(order: Order, now_s: float = 0.0) -> list[tuple[int, bool]]:
    """Requests as they come out, each with whether it is known to be late."""
    out: list[tuple[int, bool]] = []
    while True:
        waiting, late = order.pop(now_s)
        if waiting is None:
            return out
        out.append((waiting.request, late))


def numbers(order: Order, now_s: float = 0.0) -> list[int]:
    return [number for number, _ in drained(order, now_s)]


# --- functions


@pytest.mark.parametrize(
    ("percentile", "in_time", "late", "rrc"),
    [
        (0.98, 0, 0, 0.0),
        (0.98, 98, 2, 0.0),
        (0.98, 0, 1, 49.0),
        (0.98, 100, 0, -100.0),
        (0.9, 5, 5, 40.0),
        (0.5, 1, 3, 2),
    ],
)
def test_required_request_count(percentile: float, in_time: int, late: int, rrc: float) -> None:
    assert function(in_time, late, percentile=percentile).rrc == pytest.approx(rrc, abs=1e-9)


@given(st.integers(0, 200), st.integers(0, 200), st.sampled_from([0.5, 0.9, 0.98, 0.999]))
def test_so_many_more_in_time_make_a_function_comply(in_time: int, late: int, percentile: float) -> None:
    """Torpor §5.2: (m + RRC) / (n + RRC) = p."""
    rrc = function(in_time, late, percentile=percentile).rrc
    assert in_time + rrc == pytest.approx(percentile * (in_time + late + rrc), rel=1e-6, abs=1e-6)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 10))
def test_compliance_is_counted_over_the_last_requests(outcomes: list[bool], window: int) -> None:
    counted, last = Function("f", window, 120.0), deque[bool](maxlen=window)
    for late in outcomes:
        counted.ended(late, 1.0)
        last.append(late)
        assert (counted.served, counted.late) == (len(last), sum(last))


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=20))
def test_mean_latency_is_the_mean_until_the_window_is_full(latencies_s: list[float]) -> None:
    mean = Function("f", 20, 120.0)
    for latency_s in latencies_s:
        mean.ended(False, latency_s)
    assert mean.latency_s == pytest.approx(sum(latencies_s) / len(latencies_s))


TIMES = st.lists(st.floats(0.0, 2000.0), max_size=8)


@given(TIMES, TIMES, st.floats(1.0, 500.0), st.floats(0.0, 5000.0))
def test_functions_order_by_rate_without_a_clock(
    mine: list[float], others: list[float], half_life_s: float, after_s: float
) -> None:
    """At any later time the rates have the order that the logarithms have."""
    one, two = Function("one", 1, half_life_s), Function("two", 1, half_life_s)
    for known, times in ((one, mine), (two, others)):
        for at_s in sorted(times):
            known.arrived(at_s)
    now_s = max([0.0, *mine, *others]) + after_s
    rates = one.rate(now_s), two.rate(now_s)
    assume(min(rates) > 1e-300 and abs(rates[0] - rates[1]) > 1e-9 * max(rates))
    assert (rates[0] < rates[1]) == (one.log_rate < two.log_rate)


def test_a_function_without_requests_comes_below_all_others() -> None:
    idle, used = Function("idle", 1, 1.0), Function("used", 1, 1.0)
    used.arrived(0.0)
    assert idle.rate(0.0) == 0.0
    assert idle.log_rate < used.log_rate


def test_a_steady_rate_is_found() -> None:
    steady = Function("f", 1, 60.0)
    for number in range(6000):
        steady.arrived(number / 10)
    assert steady.rate(600.0) == pytest.approx(10.0, rel=0.02)


# --- orders


def test_fifo_goes_by_arrival() -> None:
    order, of = ORDER_CLASSES["fifo"](LINKS), function()
    for number, arrived_s, deadline_s in ((1, 2.0, 3.0), (2, 0.0, 9.0), (3, 1.0, 5.0)):
        order.add(request(number, of, arrived_s, deadline_s), 2.0)
    assert numbers(order, 50.0) == [2, 3, 1]


def test_edf_goes_by_deadline_also_when_it_is_over() -> None:
    order, of = ORDER_CLASSES["edf"](LINKS), function()
    for number, arrived_s, deadline_s in ((1, 0.0, 9.0), (2, 0.0, 3.0), (3, 1.0, 5.0)):
        order.add(request(number, of, arrived_s, deadline_s), 1.0)
    assert numbers(order, 4.0) == [2, 3, 1]


@pytest.mark.parametrize("name", ["feasible", "effort"])
def test_requests_that_cannot_make_it_come_last_by_arrival(name: str) -> None:
    order, of = ORDER_CLASSES[name](LINKS), function(run_s=1.0)
    for number, arrived_s, deadline_s in ((1, 0.3, 4.5), (2, 0.0, 9.0), (3, 0.1, 4.9), (4, 0.2, 5.0), (5, 0.4, 6.0)):
        order.add(request(number, of, arrived_s, deadline_s), 0.5)
    assert drained(order, 4.0) == [(4, False), (5, False), (2, False), (3, True), (1, True)]


def test_a_request_that_is_late_when_it_is_added_comes_last() -> None:
    order, of = ORDER_CLASSES["feasible"](LINKS), function(run_s=1.0)
    order.add(request(1, of, 0.0, 4.9), 4.0)
    order.add(request(2, of, 3.0, 50.0), 4.0)
    assert drained(order, 4.0) == [(2, False), (1, True)]


@pytest.mark.parametrize("name", ["feasible", "effort"])
@pytest.mark.parametrize(("there", "late"), [(0, True), (150, True), (250, False), (300, False)])
def test_a_wake_that_takes_too_long_makes_a_request_late(name: str, there: int, late: bool) -> None:
    """A run of 0.5 s, and 300 bytes at 100 per second; 0.6 s are left."""
    order, of = ORDER_CLASSES[name](LINKS), function(run_s=0.5)
    waiting = request(1, of, 0.0, 4.6)
    waiting.model.nbytes = 300
    waiting.model.resident = {1: there} if there else {}
    order.add(waiting, 1.0)
    assert order.standing(waiting, 4.0)[0] == float(late)
    assert order.pop(4.0) == (waiting, late)


@pytest.mark.parametrize("name", ORDERS)
def test_a_request_that_no_longer_waits_is_skipped(name: str) -> None:
    order, of = ORDER_CLASSES[name](LINKS), function()
    waiting = [request(number, of, deadline_s=100.0 + number) for number in range(4)]
    for one in waiting[:3]:
        order.add(one, 0.0)
    order.add_late(waiting[3])
    waiting[0].live = waiting[3].live = False
    order.update(UPDATE_S, [of])
    assert numbers(order, 0.0) == [1, 2]


@given(
    st.sampled_from(ORDERS),
    st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 10.0), st.floats(0.0, 20.0), st.booleans()), max_size=20),
    st.floats(0.0, 30.0),
)
def test_whatever_is_added_comes_out_once(name: str, added: list[tuple[int, float, float, bool]], now_s: float) -> None:
    order = ORDER_CLASSES[name](LINKS)
    functions = [function(3, late, percentile=0.9, run_s=1.0) for late in range(4)]
    for number, (of, arrived_s, within_s, ranked) in enumerate(added):
        order.add(request(number, functions[of], arrived_s, arrived_s + within_s), arrived_s)
        if ranked:
            order.update(arrived_s, functions)
    assert sorted(numbers(order, now_s)) == list(range(len(added)))


def rank(order: Order, functions: list[Function], times: int = 1) -> list[int]:
    for _ in range(times):
        order.update(UPDATE_S, functions)
    return [known.group for known in functions]


def test_rrc_serves_all_by_need_while_nobody_is_given_up() -> None:
    """The share that is worth saving begins at all."""
    order = ORDER_CLASSES["rrc"](LINKS)
    functions = [function(5, 1), function(1, 5), function(1, 3), function()]
    for number, of in enumerate(functions):
        order.add(request(number, of), 0.0)
    assert rank(order, functions) == [0, 0, 0, 0]
    assert numbers(order) == [1, 2, 3, 0]  # RRCs of 4, 2, 0 (new), -4


@pytest.mark.parametrize("add_up", [sum, fsum], ids=["naive", "compensated"])
def test_rrc_gives_nobody_up_for_a_rounding(add_up: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Python 3.12 the built-in sum of floats compensates: it may be less than what adding one by one gives."""
    monkeypatch.setattr(orders, "sum", add_up, raising=False)
    for needs in ([0.1, 0.2, 0.3], [0.1] * 6, [1.1, 2.2, 3.3]):
        functions = [function(0, 1, latency_s=need) for need in needs]
        assert not any(rank(ORDER_CLASSES["rrc-latency"](LINKS), functions)), needs


def test_rrc_by_latency_counts_time_and_not_requests() -> None:
    functions = [function(1, 5, latency_s=0.1), function(1, 3, latency_s=1.0)]
    for name, expected in (("rrc", [0, 1]), ("rrc-latency", [1, 0])):
        order = ORDER_CLASSES[name](LINKS)
        for number, of in enumerate(functions):
            order.add(request(number, of), 0.0)
        rank(order, functions)
        assert numbers(order) == expected


def test_rrc_gives_up_the_most_needy_when_fewer_comply_and_takes_them_back() -> None:
    """The constants of Torpor's prototype: adjusted every 20 updates; a change of 4 % halves or doubles the share, less
    lets it grow by 1 %.
    """
    order = ORDER_CLASSES["rrc"](LINKS)
    needy, steady = [function(4, 6) for _ in range(4)], [function(6, 4) for _ in range(2)]
    falling = [function(6, 4) for _ in range(2)]
    functions = needy + falling + steady
    rank(order, functions, 20)  # one half complies
    for of in falling:
        for _ in range(4):
            of.ended(True, 1.0)  # RRC -2 to 2
    assert [of.rrc for of in functions] == [2.0] * 6 + [-2.0] * 2
    assert rank(order, functions, 20) == [0] * 8  # halved after this update
    assert rank(order, functions) == [0, 0, 0, 1, 1, 1, 0, 0]  # 6 of a need of 12
    # from here on nothing changes: 0.5 * 1.01**k of 12 reach the fourth function's 8 with k = 29
    assert rank(order, functions, 20 * 28) == [0, 0, 0, 1, 1, 1, 0, 0]
    assert rank(order, functions, 20) == [0, 0, 0, 0, 1, 1, 0, 0]
    for of in falling:
        for _ in range(4):
            of.ended(False, 1.0)
    assert rank(order, functions, 20) == [0] * 8  # doubled, so that all are worth saving again


def test_rrc_serves_those_it_gave_up_last_and_least_needy_first() -> None:
    order = Rrc(LINKS)
    functions = [function(0, 3), function(0, 2), function(0, 1), function(2, 0), function(1, 0)]
    rank(order, functions, 20)
    functions[4].ended(True, 1.0)
    functions[4].ended(True, 1.0)  # of two that comply one is left
    assert rank(order, functions, 20) == [0] * 5
    for number, of in enumerate(functions):
        order.add(request(number, of), 0.0)
    assert [of.rrc for of in functions] == [3.0, 2.0, 1.0, -2.0, 1.0]
    assert rank(order, functions) == [1, 1, 0, 0, 0]  # 1 + 1 of half of 7
    assert numbers(order) == [2, 4, 3, 1, 0]


def test_rrc_doubles_what_it_saves_while_nobody_complies() -> None:
    """A share of nothing has no relative change; it counts as a rise."""
    order = ORDER_CLASSES["rrc"](LINKS)
    functions = [function(4, 6) for _ in range(4)] + [function(6, 4)]
    rank(order, functions, 20)
    for _ in range(4):
        functions[4].ended(True, 1.0)
    rank(order, functions, 20)
    assert rank(order, functions) == [0, 0, 1, 1, 1]
    assert rank(order, functions, 20) == [0] * 5


def given_up(of: Function, now_s: float = 0.0) -> int:
    """Its group when a request of it comes."""
    ORDER_CLASSES["effort"](LINKS).add(request(1, of, now_s, now_s + 100.0), now_s)
    return of.group


def test_effort_gives_up_a_function_that_cannot_recover() -> None:
    """It needs twenty minutes at most at its rate; ones that are not asked for can never make up for what was late."""
    order = ORDER_CLASSES["effort"](LINKS)
    lost, well = function(0, 3, percentile=0.98), function(3, 0, percentile=0.98)
    order.add(request(1, lost, deadline_s=10.0), 0.0)
    order.add(request(2, well, deadline_s=90.0), 0.0)
    assert [lost.group, well.group] == [1, 0]
    assert drained(order) == [(2, False), (1, False)]  # it may still make it


def test_effort_does_not_give_up_for_two_late_ones() -> None:
    assert given_up(function(0, 2, percentile=0.98)) == 0
    assert given_up(function(0, 2, percentile=0.5)) == 0


def test_effort_saves_what_is_asked_for_often() -> None:
    """An RRC of 490 takes 49 s at ten requests in a second."""
    often = function(0, 10, percentile=0.98)
    for number in range(1200):
        often.arrived(1000.0 - (1200 - number) / 10)
    assert given_up(often, 1000.0) == 0
    assert given_up(function(0, 10, percentile=0.98), 1000.0) == 1


@pytest.mark.parametrize(("seconds", "group"), [(1100.0, 0), (1300.0, 1)])
def test_effort_gives_up_what_needs_more_than_twenty_minutes(seconds: float, group: int) -> None:
    """An RRC of 490 at the rate that makes so many seconds of it."""
    of = function(0, 10, percentile=0.98)
    count = 1000
    for number in range(count):
        of.arrived((number - count) * seconds / of.rrc)
    assert of.rate(0.0) == pytest.approx(of.rrc / seconds, rel=0.02)
    assert given_up(of, 0.0) == group


def test_effort_takes_a_function_back() -> None:
    of = function(0, 3, percentile=0.98)
    assert given_up(of) == 1
    for _ in range(150):
        of.ended(False, 1.0)
    assert of.rrc <= 0.0
    assert given_up(of) == 0


def test_requests_that_wait_no_more_do_not_pile_up() -> None:
    """No GPU is ever free, so that nothing is taken out: what came and went must not stay for ever."""
    for name in ORDERS:
        order = ORDER_CLASSES[name](LINKS)
        for number in range(10_000):
            waiting = request(number, function())
            (order.add_late if number % 2 else lambda w, order=order: order.add(w, 0.0))(waiting)
            waiting.live = False
        assert isinstance(order, orders.Heaped)
        assert len(order._heap) + len(order._late) <= 2 * orders.PRUNE


def test_rrc_by_deadline_has_the_groups_of_rrc_and_deadlines_within() -> None:
    """Of two that are to be saved, the one with the nearer deadline is first, however large its need."""
    order = ORDER_CLASSES["rrc-deadline"](LINKS)
    function = Function("a", 1000, 120.0)
    near, far = (Waiting(number, Model("a", function, 0.0), 0.0, 5.0 - number) for number in (2, 1))
    given = Function("b", 1000, 120.0)
    given.group = 1
    last = Waiting(3, Model("b", given, 0.0), 0.0, 1.0)
    for waiting in (last, far, near):
        order.add(waiting, 0.0)
    assert [order.pop(0.0)[0] for _ in range(3)] == [near, far, last]


def test_who_wants_a_turn_again_is_as_one_that_comes_then() -> None:
    """What it wanted before is forgotten, wherever that is in the order, and also among the late ones."""
    again, other = request(1, function(), 0.0, 10.0), request(2, function(), 4.0, 12.0)
    for name in ("edf", "feasible", "effort"):
        order = ORDER_CLASSES[name](LINKS)
        again.arrived_s, again.deadline_s = 0.0, 10.0
        order.add(again, 0.0)
        order.add(other, 4.0)
        again.arrived_s, again.deadline_s = 5.0, 15.0
        order.add(again, 5.0)
        assert numbers(order, 5.0) == [2, 1]
        again.arrived_s = 0.0
        order.add_late(again)
        order.add_late(other)
        again.arrived_s = 5.0
        order.add_late(again)
        assert numbers(order, 5.0) == [2, 1]
