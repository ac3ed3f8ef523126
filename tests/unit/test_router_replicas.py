"""Several instances of one function: when the router adds one and ends one, and that no request or function suffers."""

from typing import Any

import pytest
from router_rig import EXTRA_IDLE_MS, Rig, fails_with, failure, lease, one, said, spec

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.lives import BACKOFF_S
from dormouse.core.decisions.requests.queueing import SILENT_S
from dormouse.core.decisions.requests.state import InstanceState
from dormouse.schemas import messages as m

RUN_S = 0.4


def busy(gpus: int = 2, stateless: bool = True, **settings: Any) -> Rig:
    """Function f (and g, idle): a request has taken 0.4 s of the deadline's 1 s; the first instance runs another."""
    rig = Rig(spec(stateless=stateless, **settings), spec("g"), gpus=gpus)
    rig.load("i1")
    rig.load("i2")
    ticket = rig.run(1)
    rig.now_s += RUN_S
    finish(rig, "i1", ticket)
    rig.run(2)
    return rig


def finish(rig: Rig, instance: str, ticket: int, wrote: bool = False) -> list[e.Action]:
    actions = rig.say(instance, m.Returned(request=ticket, body=b"1", nbytes=0))
    return actions + (rig.hear(m.Wrote(instance=instance)) if wrote else [])


def grant(rig: Rig, acquire: Any) -> list[e.Action]:
    return rig.hear(m.Granted(request=acquire.request, lease=lease(acquire.request), wake_nbytes=0))


def names(rig: Rig) -> list[str]:
    return rig.policy.picture.functions["f"].instances


def two(**settings: Any) -> tuple[Rig, Any]:
    """Both instances of f run: requests 2 and 3; 4 is queued. Returns the Acquire of 3."""
    rig = busy(**settings)
    rig.arrive(3)
    rig.arrive(4)
    acquire = one(rig.load("i3"), m.Acquire)
    grant(rig, acquire)
    assert names(rig) == ["i1", "i3"]
    return rig, acquire


def test_one_is_added_when_the_last_request_would_be_late() -> None:
    rig = busy()
    assert rig.arrive(3) == []  # (1 / 1 + 1) * 0.4 s is in time
    assert one(rig.arrive(4), e.Start).instance == "i3"
    assert said(rig.arrive(5), e.Start) == []  # while it loads
    assert one(rig.load("i3"), m.Acquire).instance == "i3"
    assert [rig.policy.picture.requests[number].phase.value for number in (2, 3, 4)] == ["running", "waiting", "queued"]


@pytest.mark.parametrize(
    ("settings", "gpus"), [({"stateless": False}, 2), ({"max_instances": 1}, 2), ({}, 1), ({"deadline_ms": 60_000}, 2)]
)
def test_none_is_added(settings: dict[str, Any], gpus: int) -> None:
    rig = busy(gpus, **settings)
    for number in range(3, 20):
        assert rig.arrive(number) == []


def test_none_is_added_before_a_request_has_shown_how_long_it_takes() -> None:
    rig = Rig(spec(stateless=True), gpus=2)
    rig.load("i1")
    rig.run(1)
    for number in range(2, 50):
        assert rig.arrive(number) == []


def test_never_more_than_may_be() -> None:
    rig, _ = two(gpus=4, max_instances=2)
    for number in range(5, 30):
        assert said(rig.arrive(number), e.Start) == []


def test_the_node_bounds_them_all() -> None:
    rig = Rig(spec(stateless=True), gpus=2, extra_instances=0)
    rig.load("i1")
    rig.now_s += RUN_S
    finish(rig, "i1", rig.run(1))
    rig.policy.picture.functions["f"].run_s = RUN_S
    rig.run(2)
    for number in range(3, 20):
        assert rig.arrive(number) == []


def test_not_while_its_own_instance_waits_for_a_gpu() -> None:
    rig = busy()
    rig.arrive(3)
    ticket = rig.policy.picture.instances["i1"].ticket
    acquire = one(finish(rig, "i1", ticket or 0), m.Acquire)
    for number in range(4, 20):
        assert rig.arrive(number) == []  # all GPUs are others': another instance would wait beside it
    assert one(grant(rig, acquire), e.Start).instance == "i3"


def test_not_while_somebody_else_has_or_wants_the_other_gpu() -> None:
    rig = busy()
    acquire = one(rig.arrive(3, "g"), m.Acquire)
    for number in range(4, 10):
        assert rig.arrive(number) == []
    assert said(grant(rig, acquire), e.Start) == []
    assert one(finish(rig, "i2", acquire.request), e.Start).instance == "i3"  # now it is free


def test_what_is_missing_loads_first() -> None:
    rig = Rig(spec(stateless=True, deadline_ms=1), spec("g"), gpus=2, loads=1)
    rig.load("i1")  # i2, of g, begins to load
    ticket = rig.run(1)
    rig.now_s += RUN_S
    rig.arrive(2)
    rig.arrive(3)
    grant(rig, one(finish(rig, "i1", ticket), m.Acquire))
    assert names(rig) == ["i1"]
    assert one(rig.load("i2"), e.Start).instance == "i3"


def test_requests_start_in_order_of_arrival() -> None:
    """The instance that asked for the later request gets its lease first: it runs the earlier one."""
    rig, third = two()
    second = rig.policy.picture.instances["i1"].ticket or 0
    rig.arrive(5)
    fourth = one(finish(rig, "i1", second), m.Acquire)
    fifth = one(finish(rig, "i3", third.request), m.Acquire)
    handover = one(grant(rig, fifth), e.Handover)
    assert (handover.request, handover.instance, handover.ticket) == (4, "i3", fifth.request)
    assert one(grant(rig, fourth), e.Handover).request == 5
    assert one(finish(rig, "i3", fifth.request), e.Answer).request == 4


def test_a_request_that_lost_its_instance_goes_first_again() -> None:
    rig, third = two(idempotent=True)
    rig.arrive(5)
    fourth = one(finish(rig, "i1", rig.policy.picture.instances["i1"].ticket or 0), m.Acquire)
    rig.hear(m.LeaseLost(request=third.request))
    rig.say("i3", m.Raised(request=third.request, code="executor_lost", text=""))
    assert one(grant(rig, fourth), e.Handover).request == 3


def test_an_extra_ends_when_it_has_had_nothing_to_do() -> None:
    rig, third = two()
    finish(rig, "i1", rig.policy.picture.instances["i1"].ticket or 0)
    rig.do(e.RequesterLeft(4))
    finish(rig, "i3", third.request)
    rig.now_s += 1.0
    assert said(rig.after(EXTRA_IDLE_MS / 1000 - 1.1), m.Exit) == []
    ending = rig.after(0.2)
    assert [action.instance for action in ending if isinstance(action, e.Send)] == ["i3"]
    assert names(rig) == ["i1"]
    rig.do(e.InstanceExited("i3", "exited with status 0"))
    assert said(rig.after(3600), e.Start) == []
    assert rig.run(5)  # the first stays


def test_an_extra_that_is_used_stays() -> None:
    rig, third = two()
    ticket = third.request
    for number in range(5, 12):
        rig.now_s += EXTRA_IDLE_MS / 1000 * 0.7
        rig.do(e.Tick())
        rig.arrive(number)
        acquire = one(finish(rig, "i3", ticket), m.Acquire)
        grant(rig, acquire)
        ticket = acquire.request
    assert names(rig) == ["i1", "i3"]


def test_the_first_gets_requests_first() -> None:
    rig, third = two()
    rig.do(e.RequesterLeft(4))
    finish(rig, "i3", third.request)
    finish(rig, "i1", rig.policy.picture.instances["i1"].ticket or 0)
    assert one(rig.arrive(5), m.Acquire).instance == "i1"
    assert one(rig.arrive(6), m.Acquire).instance == "i3"


def test_an_extra_that_does_not_load_fails_nothing() -> None:
    rig = busy()
    rig.arrive(3)
    rig.arrive(4)
    actions = rig.say("i3", m.LoadFailed(code="x", text="no memory"))
    assert said(actions, e.Fail) == said(actions, e.Start) == []
    assert rig.policy.picture.functions["f"].failure is None
    rig.do(e.InstanceExited("i3", "was killed"))
    assert rig.arrive(5) == []  # not at once again
    rig.now_s += BACKOFF_S[0]
    assert one(rig.arrive(6), e.Start).instance == "i4"
    rig.say("i4", m.LoadFailed(code="x", text="no memory"))
    rig.now_s += BACKOFF_S[0]
    assert said(rig.arrive(7), e.Start) == []  # the pause has doubled
    assert one(finish(rig, "i1", rig.policy.picture.instances["i1"].ticket or 0), m.Acquire).instance == "i1"


def test_an_extra_takes_the_place_of_the_first() -> None:
    rig, third = two()
    actions = rig.do(e.InstanceExited("i1", "was killed by SIGSEGV"))
    fails_with(actions, 2, "sandbox_died", 502)
    assert names(rig) == ["i3"]
    assert rig.policy.missing() == []
    assert one(finish(rig, "i3", third.request), m.Acquire).instance == "i3"
    assert said(rig.after(EXTRA_IDLE_MS / 1000), m.Exit) == []  # it is no extra any more


def test_an_extra_that_loads_takes_the_place_of_the_first() -> None:
    rig = busy()
    rig.arrive(3)
    rig.arrive(4)
    assert said(rig.do(e.InstanceExited("i1", "exited")), e.Start) == []
    assert names(rig) == ["i3"]
    assert one(rig.load("i3"), m.Acquire).instance == "i3"


def test_the_death_of_an_extra_fails_its_request_alone() -> None:
    rig, third = two()
    actions = rig.hear(m.Refused(request=third.request, failure=failure("violation", 502)))
    fails_with(actions, 3, "violation", 502)
    assert one(actions, e.Kill).instance == "i3"
    assert names(rig)[0] == "i1"
    assert rig.state("i1") is InstanceState.BUSY


def test_a_request_that_waits_moves_to_a_sibling_that_is_idle() -> None:
    rig, third = two()
    rig.do(e.RequesterLeft(4))
    finish(rig, "i1", rig.policy.picture.instances["i1"].ticket or 0)
    finish(rig, "i3", third.request)
    waiting = one(rig.arrive(5), m.Acquire)
    actions = rig.do(e.InstanceExited(waiting.instance, "exited"))
    assert one(actions, m.Release).request == waiting.request
    assert one(actions, m.Acquire).instance == "i3"


def test_a_zygote_takes_all_along() -> None:
    rig, third = two()
    finish(rig, "i3", third.request)
    rig.do(e.RequesterLeft(4))
    finish(rig, "i1", rig.policy.picture.instances["i1"].ticket or 0)
    waiting = one(rig.arrive(5), m.Acquire)
    rig.do(e.ForkingChanged(False, gpus=2))
    actions = rig.do(e.ZygoteLost())
    assert one(actions, m.Release).request == waiting.request
    assert said(actions, m.Acquire) == []  # the other one is idle, and as dead
    assert said(actions, e.Fail) == []
    started = rig.do(e.ForkingChanged(True, gpus=2))
    assert [start.spec.name for start in said(started, e.Start)] == ["f", "g"]


def test_a_new_version_replaces_them_all() -> None:
    rig, third = two()
    second = rig.policy.picture.instances["i1"].ticket or 0
    rig.do(e.DeployAsked(7, spec(stateless=True)))
    rig.load("i4")
    actions = rig.hear(m.Kept(name="f"))
    assert one(actions, m.Acquire).instance == "i4"
    assert names(rig) == ["i4"]
    assert one(finish(rig, "i3", third.request), m.Exit)
    ended = finish(rig, "i1", second)
    assert one(ended, e.Answer).request == 2
    assert one(ended, m.Exit)


def test_requests_that_wait_go_back_in_order() -> None:
    rig, third = two()
    rig.arrive(5)
    finish(rig, "i1", rig.policy.picture.instances["i1"].ticket or 0)
    finish(rig, "i3", third.request)
    rig.do(e.DeployAsked(7, spec(stateless=True)))
    rig.load("i4")
    rig.do(e.InstanceExited("i4", "exited"))  # before it is kept
    assert len(said(rig.hear(m.Kept(name="f")), m.Release)) == 2
    assert list(rig.policy.picture.functions["f"].queue) == [4, 5]


def test_a_new_version_ends_one_that_loads() -> None:
    rig = busy()
    rig.arrive(3)
    rig.do(e.DeployAsked(7, spec(stateless=True)))
    rig.arrive(4)  # the node loads one of each at the same time
    rig.load("i3")
    assert one(rig.hear(m.Kept(name="f")), e.Kill).instance == "i4"
    assert names(rig) == ["i3"]


def test_removal_drains_them_all() -> None:
    rig, third = two()
    rig.do(e.RemoveAsked(7, "f"))
    fails_with(rig.hear(m.Kept(name="f")), 4, "unknown_function", 404)
    assert one(finish(rig, "i3", third.request), e.Answer).request == 3
    rig.after(SILENT_S)


def test_a_stateless_function_that_changes_its_model_has_one_instance() -> None:
    rig, third = two()
    actions = finish(rig, "i3", third.request, wrote=True)
    assert "stateless" in one(actions, e.LogNote).text
    assert names(rig) == ["i1"]
    assert one(actions, m.Release)  # request 4, which had begun to wait for i3's next lease
    assert rig.policy.picture.functions["f"].writes == 1
    ended = finish(rig, "i1", rig.policy.picture.instances["i1"].ticket or 0, wrote=True)
    assert said(ended, e.LogNote) == []  # said once
    assert rig.policy.picture.functions["f"].writes == 2
    grant(rig, one(ended, m.Acquire))
    for number in range(5, 20):
        assert said(rig.arrive(number), e.Start) == []
    rig.do(e.DeployAsked(7, spec(stateless=True)))
    rig.load("i4")
    rig.hear(m.Kept(name="f"))
    assert rig.policy.picture.functions["f"].writes == 0


def test_one_of_batches_is_added_for_the_queue_behind_its_batches() -> None:
    """It gets that queue; the first one keeps what it has."""
    rig = Rig(spec(stateless=True, batch=2), gpus=2)
    rig.load("i1")
    rig.policy.picture.functions["f"].run_s = RUN_S
    for number in range(1, 5):
        assert one(rig.arrive(number), e.Handover).instance == "i1"
    acquire = one(rig.say("i1", m.NeedLease(version=1)), m.Acquire)
    for number in range(5, 9):
        assert said(rig.arrive(number), e.Start) == [], "its instance waits for a GPU"
    assert one(grant(rig, acquire), e.Start).instance == "i2"
    actions = rig.load("i2")
    assert [(each.request, each.instance) for each in said(actions, e.Handover)] == [(n, "i2") for n in range(5, 9)]
    assert said(actions, m.Abandon) == []


def full(**settings: Any) -> Rig:
    """Function f with two requests at once, which it has; one takes 0.4 s of the deadline's 1 s."""
    rig = Rig(spec(stateless=True, concurrency=2, **settings), gpus=2)
    rig.load("i1")
    rig.policy.picture.functions["f"].run_s = RUN_S
    for number in (1, 2):
        assert one(rig.arrive(number), e.Handover).instance == "i1"
    return rig


def test_one_with_many_at_once_is_added_when_all_that_there_are_is_full() -> None:
    """(3 / 1 / 2 + 1) * 0.4 s is in time, and with a fourth one it is not. What runs already stays where it is."""
    rig = full()
    for number in (3, 4, 5):
        assert rig.arrive(number) == []
    assert one(rig.arrive(6), e.Start).instance == "i2"
    actions = rig.load("i2")
    assert [(each.request, each.instance) for each in said(actions, e.Handover)] == [(3, "i2"), (4, "i2")]
    assert said(actions, m.Abandon) == []


def test_one_with_many_at_once_is_not_added_while_it_waits_for_a_gpu() -> None:
    rig = full(deadline_ms=1)
    acquire = one(rig.say("i1", m.NeedLease(version=1)), m.Acquire)
    assert rig.arrive(3) == []
    assert one(grant(rig, acquire), e.Start).instance == "i2"


def test_one_with_many_at_once_that_writes_its_model_ends_when_it_has_answered() -> None:
    rig = full(deadline_ms=1)
    assert one(rig.arrive(3), e.Start).instance == "i2"
    third = one(rig.load("i2"), e.Handover)
    assert third.instance == "i2"
    assert said(rig.hear(m.Wrote(instance="i2")), m.Exit) == []
    assert names(rig) == ["i1"]
    actions = rig.say("i2", m.Returned(request=third.ticket, body=b"1", nbytes=0))
    assert one(actions, e.Answer).request == 3
    assert one(actions, m.Exit)
