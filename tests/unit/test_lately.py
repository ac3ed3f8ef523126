"""How a function does lately: what is over, and what was mended, is no alarm."""

from typing import Any

from dormouse.core.problems import ENOUGH, FEW, failing, late
from dormouse.router.front.lately import MAX, ROW_S, WINDOW_S, Lately


def row(lately: Lately, key: object = 1, now_s: float = 0.0) -> dict[str, Any]:
    return {"recent": lately.told(key, now_s), "percentile": 98.0}


def test_lateness_is_over_with_its_window() -> None:
    lately = Lately()
    for k in range(ENOUGH):
        assert late(row(lately)) is None, "too few to say"
        lately.add(1, 0.1 * k, late=k > 0, failed=False)
    last_s = 0.1 * (ENOUGH - 1)
    assert late(row(lately, now_s=last_s)) == {"seconds": 60.0, "counted": 20, "in_time": 0.05, "failed": 0}
    assert late(row(lately, now_s=WINDOW_S)) is not None
    assert late(row(lately, now_s=WINDOW_S + 0.05)) is None, "19 are left of it"
    assert lately.told(1, last_s + WINDOW_S + 1) == {
        "counted": 20,
        "in_time": 0.05,
        "window": {"seconds": 60.0, "counted": 0, "in_time": None, "failed": 0},
        "failed_in_a_row": 0,
    }


def test_as_many_in_time_as_wanted_are_not_late() -> None:
    lately = Lately()
    for k in range(100):
        lately.add(1, 0.0, late=k < 2, failed=False)
    assert late(row(lately)) is None, "98 of 100"
    lately.add(1, 0.0, late=True, failed=False)
    assert late(row(lately)) is not None


def test_all_that_fail_are_an_alarm_though_they_are_few_until_one_is_answered() -> None:
    lately = Lately()
    for k in range(FEW):
        assert failing(row(lately, now_s=100.0 * k)) == ""
        lately.add(1, 100.0 * k, late=True, failed=True)
    last_s = 100.0 * (FEW - 1)
    assert failing(row(lately, now_s=last_s + ROW_S)) == "its last 5 requests failed"
    assert failing(row(lately, now_s=last_s + ROW_S + 1)) == "", "nobody has asked since"
    lately.add(1, last_s + 1, late=False, failed=False)
    assert failing(row(lately, now_s=last_s + 1)) == ""


def test_half_of_a_minute_that_fail_are_an_alarm() -> None:
    lately = Lately()
    for k in range(10):
        lately.add(1, 1.0, late=k % 2 == 0, failed=k % 2 == 0)
    assert failing(row(lately, now_s=1.0)) == "5 of 10 requests failed within 60 s"
    lately.add(1, 1.0, late=False, failed=False)
    assert failing(row(lately, now_s=1.0)) == "", "5 of 11"


def test_another_version_begins_anew() -> None:
    lately = Lately()
    for _ in range(60):
        lately.add("version 1", 0.0, late=True, failed=True)
    assert failing(row(lately, "version 1"))
    new = row(lately, "version 2")
    assert (failing(new), late(new), new["recent"]["counted"], new["recent"]["in_time"]) == ("", None, 0, None)
    lately.add("version 2", 1.0, late=False, failed=False)
    assert (lately.told("version 2", 1.0)["counted"], lately.told("version 2", 1.0)["in_time"]) == (1, 1.0)


def test_what_is_kept_is_bounded_and_counted() -> None:
    lately = Lately()
    for k in range(MAX + 24):
        lately.add(1, 0.0, late=k < 25, failed=False)
    told = lately.told(1, 0.0)
    assert (told["counted"], told["in_time"]) == (MAX, round(1 - 1 / MAX, 4))
