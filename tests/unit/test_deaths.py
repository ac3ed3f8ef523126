"""What the death of a process means for its node."""

from functools import partial

from dormouse.core.node.deaths import Deaths, EndNode, StartAll, StartAlone
from dormouse.core.node.restarts import BACKOFF_S, RESTARTS, WINDOW_S
from dormouse.core.sandbox.world import ZYGOTE

ROLES = ["store", "controller", "router", ZYGOTE, "zygote.other", "gpu0", "gpu1"]


def test_a_node_starts_without_what_others_do_not_need() -> None:
    deaths = Deaths(ROLES, {ZYGOTE, "zygote.other"})
    deaths.add("metrics")
    unready = partial(deaths.died, ready=False, blamed=False, all_start=False, now_s=0.0)
    for role in ("metrics", "zygote.other", "gpu0"):
        assert unready(role, "no") == StartAlone(BACKOFF_S[0])
    assert unready("gpu1", "full") == EndNode(
        "gpu0 did not start: no; gpu1 did not start: full; metrics did not start: no; zygote.other did not start: no"
    )
    deaths.ready("gpu0")
    assert unready("gpu1", "full") == StartAlone(2 * BACKOFF_S[0])
    assert isinstance(unready(ZYGOTE, "no torch"), EndNode)
    assert deaths.down == {"metrics": "no", "zygote.other": "no", "gpu1": "full", ZYGOTE: "no torch"}


def test_a_role_that_others_refer_to_takes_all_with_it_until_it_dies_too_often() -> None:
    deaths = Deaths(ROLES, {ZYGOTE, "zygote.other"})
    deaths.was_ready = True
    died = partial(deaths.died, "store", "status 1", ready=True, blamed=False)
    assert [died(all_start=False, now_s=float(k)) for k in range(RESTARTS)] == [StartAll()] * RESTARTS
    assert died(all_start=True, now_s=8.0) == StartAll(), "it was ended with the others"
    assert deaths.ended == {"store": (RESTARTS, RESTARTS - 1.0)}
    assert died(all_start=False, now_s=8.0) == EndNode(
        f"store died {RESTARTS + 1} times within {WINDOW_S:g} s: status 1"
    )
    assert deaths.down == {}


def test_an_executor_that_died_of_a_command_is_not_to_blame() -> None:
    deaths = Deaths(ROLES, {ZYGOTE})
    blamed = [deaths.died("gpu0", "killed", ready=True, blamed=True, all_start=False, now_s=0.0) for _ in range(3)]
    assert blamed == [StartAlone(0.0)] * 3, "nor is a node's start"
    assert deaths.died("gpu0", "killed", ready=False, blamed=True, all_start=False, now_s=0.0) == StartAlone(0.0)
    assert deaths.down == {}


def test_who_ends_in_order_for_another_pool_has_not_died() -> None:
    """It is replaced at once, however often, and is neither a death nor to blame."""
    deaths = Deaths(ROLES, {ZYGOTE})
    deaths.was_ready = True
    leaves = partial(deaths.died, "gpu0", "it ended with status 0", ready=True, blamed=False, in_order=True)
    assert [leaves(all_start=False, now_s=float(k)) for k in range(3)] == [StartAlone(0.0)] * 3
    assert (deaths.ended, deaths.left) == ({}, {"gpu0": (3, 2.0)})
    assert leaves(all_start=True, now_s=3.0) == StartAll(), "with the others"
    store = deaths.died("store", "", ready=True, blamed=False, all_start=False, now_s=4.0, in_order=True)
    assert (store, deaths.ended) == (StartAll(), {"store": (1, 4.0)}), "nobody tells a store to end alone"
