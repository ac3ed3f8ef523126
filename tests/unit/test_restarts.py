"""When a role that has died is started again."""

from dormouse.core.node.restarts import BACKOFF_S, RESTARTS, WINDOW_S, Restarts


def test_the_first_death_costs_no_time_and_those_after_it_double() -> None:
    restarts = Restarts(["gpu0"])
    pauses = [restarts.died("gpu0", float(second)) for second in range(RESTARTS + 3)]
    assert pauses == [
        0.0,
        *(BACKOFF_S[0] * 2.0**k for k in range(RESTARTS)),
        *[BACKOFF_S[0] * 2.0 ** (RESTARTS - 1)] * 2,
    ]
    assert restarts.died("gpu0", 1000.0 + WINDOW_S) == 0.0


def test_one_that_never_gets_ready_waits_from_the_first_death_on_and_longest() -> None:
    restarts = Restarts(["zygote", "zygote.other"])
    pauses = []
    for number in range(RESTARTS + 4):
        restarts.failed("zygote.other")
        pauses.append(restarts.died("zygote.other", number * WINDOW_S * 2))
    assert pauses[:3] == [BACKOFF_S[0], 2 * BACKOFF_S[0], 4 * BACKOFF_S[0]]
    assert pauses[-2:] == [BACKOFF_S[1], BACKOFF_S[1]]
    assert restarts.died("zygote", 0.0) == 0.0, "the other's deaths are not its own"
    restarts.ready("zygote.other")
    assert restarts.died("zygote.other", 1e6) == 0.0


def test_a_role_that_all_depend_on_is_given_up_with_the_ninth_death_in_a_minute() -> None:
    restarts = Restarts(["store"])
    for second in range(RESTARTS):
        assert not restarts.too_many("store", float(second))
        restarts.died("store", float(second))
    assert restarts.too_many("store", 8.0)
    assert not restarts.too_many("store", WINDOW_S + 0.5)
