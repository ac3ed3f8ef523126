"""Whose the time of each GPU was lately."""

from dormouse.controller.busyshares import MAX, WINDOW_S, BusyShares
from dormouse.controller.usage import NodeUsage
from dormouse.core.log import get_logger
from dormouse.schemas import messages as m


def test_shares_are_of_the_window_and_of_one_gpu() -> None:
    shares = BusyShares()
    for now_s, gpu, function, gpu_us in (
        (0.5, 0, "old", 30_000_000),
        (61.0, 0, "f", 6_000_000),
        (61.9, 0, "g", 12_000_000),
        (61.9, 1, "g", 600_000),
        (62.0, 0, "f", 3_000_000),
        (62.0, 0, "idle", 0),
    ):
        shares.add(gpu, function, gpu_us, now_s)
    told = shares.told(0, 62.0)
    assert told == {"seconds": WINDOW_S, "share": 0.35, "functions": {"g": 0.2, "f": 0.15}, "others": 0}
    assert shares.told(1, 62.0)["functions"] == {"g": 0.01}
    assert shares.told(2, 62.0) == {"seconds": WINDOW_S, "share": 0.0, "functions": {}, "others": 0}
    assert shares.told(0, 122.0)["functions"] == {"f": 0.05}, "though nothing was told since"
    assert shares.told(0, 123.0)["functions"] == {}


def test_of_many_those_with_most_are_told() -> None:
    shares = BusyShares()
    for number in range(MAX + 5):
        shares.add(0, f"f{number}", 1000 * (1 + number), 1.0)
    told = shares.told(0, 1.0)
    assert (len(told["functions"]), next(iter(told["functions"])), told["others"]) == (MAX, f"f{MAX + 4}", 5)


def test_no_more_slots_are_kept_than_the_window_has() -> None:
    shares = BusyShares()
    for now_s in range(10 * WINDOW_S):
        shares.add(0, "f", 1, float(now_s))
    assert len(shares._slots[0]) == WINDOW_S + 1


def test_what_executors_meter_is_their_instances_functions() -> None:
    """Of programs of `dormouse run`, and of what nobody knows any more, too."""
    usage = NodeUsage(get_logger(), frozenset(), lambda told: None)
    usage.heard(m.InstanceUp(instance="i1", function="f", tenant="a", loaded=True))
    usage.heard(m.InstanceUp(instance="i2", function="", tenant="default", loaded=True))
    uses = [m.InstanceUse(instance=name, gpu_us=600_000, seat_ms=0, prompt=0, made=0) for name in ("i1", "i2", "i9")]
    usage.metered(1, m.Metered(held=[], uses=uses), 5.0)
    assert usage.busy.told(1, 5.0)["functions"] == {"(dormouse run)": 0.01, "(nobody's)": 0.01, "f": 0.01}
    assert usage.busy.told(0, 5.0)["functions"] == {}
