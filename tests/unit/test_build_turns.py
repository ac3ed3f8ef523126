"""Builds of environments: tenants take turns."""

from dormouse.router.admin.turns import ALL, EACH, BuildTurns


def _order(turns: BuildTurns) -> list[str]:
    found = []
    while (build := turns.next()) is not None:
        found.append(build)
        assert turns.next() is None, "one runs"
        turns.ended()
    return found


def test_one_that_has_many_delays_another_by_one() -> None:
    turns = BuildTurns()
    for number in range(3):
        turns.add("busy", f"busy {number}")
    assert turns.next() == "busy 0"
    turns.add("other", "other 0")
    turns.add("other", "other 1")
    turns.add("third", "third 0")
    turns.ended()
    assert _order(turns) == ["busy 1", "other 0", "third 0", "busy 2", "other 1"]


def test_one_that_comes_anew_is_behind_those_that_wait() -> None:
    turns = BuildTurns()
    turns.add("busy", "1")
    assert turns.next() == "1"
    turns.add("other", "2")
    turns.add("busy", "3")
    turns.ended()
    assert _order(turns) == ["2", "3"]


def test_each_has_room_for_some_and_so_have_all() -> None:
    turns = BuildTurns()
    turns.add("busy", "runs")
    assert turns.next() == "runs"
    for number in range(EACH - 1):
        assert turns.has_room("busy")
        turns.add("busy", str(number))
    assert not turns.has_room("busy")
    for number in range(ALL - (EACH - 1)):
        assert turns.has_room("other")
        turns.add(f"tenant {number}", "x")
    assert not turns.has_room("other")
    assert len(_order_after_end(turns)) == ALL
    assert turns.has_room("busy")


def _order_after_end(turns: BuildTurns) -> list[str]:
    turns.ended()
    return _order(turns)
