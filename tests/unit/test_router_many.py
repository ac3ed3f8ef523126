"""The router's policy on many requests at once in one instance, and on batches: a script per rule."""

from typing import Any

import pytest
from router_rig import Rig, fails_with, lease, loaded, one, said, spec

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.queueing import SILENT_S
from dormouse.schemas import messages as m


def many(**settings_: Any) -> Rig:
    return loaded(spec(concurrency=2, **settings_))


def test_requests_are_handed_over_at_once_and_no_more_than_may_be() -> None:
    rig = many()
    first, second = (one(rig.arrive(number), e.Handover) for number in (1, 2))
    assert (first.lease, second.lease) == (None, None)
    assert said(rig.arrive(3), e.Handover) == []
    actions = rig.say("i1", m.Returned(request=first.ticket, body=b"1", nbytes=0))
    assert (one(actions, e.Answer).request, one(actions, e.Handover).request) == (1, 3)
    failed = rig.say("i1", m.Raised(request=second.ticket, code="function_raised", text="x"))
    fails_with(failed, 2, "function_raised", 500)
    assert said(failed, e.Kill) == []


def test_an_instance_of_many_asks_for_a_lease_with_the_deadline_of_its_oldest_request() -> None:
    rig = many(deadline_ms=1000)
    rig.arrive(1)
    rig.after(0.4)
    rig.arrive(2)
    assert one(rig.say("i1", m.NeedLease(version=1)), m.Acquire).deadline_ms == 600


def test_the_controller_is_told_what_waits_for_a_batch() -> None:
    rig = loaded(spec(batch=2, batch_wait_ms=7, deadline_ms=1000))
    first = one(rig.arrive(1), e.Handover)
    rig.after(0.4)
    acquire = one(rig.say("i1", m.NeedLease(version=1)), m.Acquire)
    ticket = first.ticket
    assert acquire.batch == m.BatchAsk(requests=[(ticket, 600)], most=2, wait_ms=7)
    assert not acquire.own
    own, second = acquire.request, rig.arrive(2)
    ticket2 = one(second, e.Handover).ticket
    assert one(second, m.BatchWaits) == m.BatchWaits(request=own, came=[(ticket2, 1000)])
    rig.after(0.1)
    third = rig.arrive(3)
    ticket3 = one(third, e.Handover).ticket
    assert one(third, m.BatchWaits) == m.BatchWaits(request=own, came=[(ticket3, 1000)]), "nothing is said again"
    assert one(rig.do(e.RequesterLeft(1)), m.BatchWaits) == m.BatchWaits(request=own, left=[ticket])
    lease = m.Lease(gpu=0, epoch=1, serial=1, secret=1)
    granted = rig.hear(m.Granted(request=acquire.request, lease=lease, wake_nbytes=0, requests=2))
    assert one(granted, m.LeaseGranted).requests == 2
    assert said(rig.arrive(4), m.BatchWaits) == [], "it is decided"
    answered = one(rig.say("i1", m.LeaseEnded(serial=1, version=1, taken=2, together=1)), m.Answered)
    assert answered == m.Answered(request=acquire.request, used=True, taken=2, together=1)
    rig.say("i1", m.Raised(request=first.ticket, code="cancelled", text=""))
    missed = one(rig.say("i1", m.Raised(request=ticket2, code="function_raised", text="x")), m.Missed)
    assert missed.request == acquire.request, "the controller knows it by its batch's lease"


def test_the_controller_is_told_who_ran_out_of_time_before_a_batch() -> None:
    rig = loaded(spec(batch=4, deadline_ms=1000, timeout_ms=1000))
    first = one(rig.arrive(1), e.Handover)
    acquire = one(rig.say("i1", m.NeedLease(version=1)), m.Acquire)
    rig.after(0.5)
    rig.arrive(2)
    waits = one(rig.after(0.5), m.BatchWaits)
    assert waits == m.BatchWaits(request=acquire.request, left=[first.ticket])


def test_the_failure_of_a_request_is_put_to_the_batch_that_had_it() -> None:
    rig = loaded(spec(batch=2, deadline_ms=1000, timeout_ms=1000))
    first = one(rig.arrive(1), e.Handover)
    acquire = one(rig.say("i1", m.NeedLease(version=1)), m.Acquire)
    rig.hear(m.Granted(request=acquire.request, lease=lease(), wake_nbytes=0, requests=1))
    rig.after(0.5)
    rig.arrive(2)
    missed = one(rig.after(0.5), m.Missed)
    assert missed.request == acquire.request
    rig.say("i1", m.LeaseEnded(serial=1, version=1, taken=1, together=0))
    rig.say("i1", m.Raised(request=first.ticket, code="cancelled", text=""))
    assert one(rig.after(0.5), m.Missed).request == 0, "it was in none"


def test_the_controller_hears_of_each_answer_under_a_shared_lease() -> None:
    rig = many()
    first, second = (one(rig.arrive(number), e.Handover) for number in (1, 2))
    rig.after(0.25)
    met = one(rig.say("i1", m.Returned(request=first.ticket, body=b"1", nbytes=0)), m.Met)
    assert (met.function, met.latency_ms) == ("f", 250)
    failed = rig.say("i1", m.Raised(request=second.ticket, code="function_raised", text="x"))
    assert said(failed, m.Met) == []
    assert one(failed, m.Missed).request == 0, "it has no lease of its own"
    third = one(rig.arrive(3), e.Handover)
    assert one(rig.say("i1", m.Raised(request=third.ticket, code="bad_json", text="x")), m.Met).latency_ms == 0
    alone = loaded()
    assert said(alone.say("i1", m.Returned(request=alone.run(1), body=b"1", nbytes=0)), m.Met) == []


def test_a_client_that_leaves_many_has_its_own_request_abandoned() -> None:
    rig = many()
    first, second = (one(rig.arrive(number), e.Handover) for number in (1, 2))
    assert one(rig.do(e.RequesterLeft(1)), m.Abandon).request == first.ticket
    rig.say("i1", m.Raised(request=first.ticket, code="cancelled", text=""))
    assert one(rig.say("i1", m.Returned(request=second.ticket, body=b"1", nbytes=0)), e.Answer).request == 2


def test_one_of_many_that_does_not_end_in_time_is_given_up_and_then_its_instance() -> None:
    rig = many(timeout_ms=1000)
    first = one(rig.arrive(1), e.Handover)
    rig.after(0.5)
    rig.arrive(2)
    actions = rig.after(0.5)
    fails_with(actions, 1, "timed_out", 504)
    assert one(actions, m.Abandon).request == first.ticket
    rig.after(0.5)
    assert one(rig.after(SILENT_S - 0.5), e.Kill).instance == "i1"


@pytest.mark.parametrize("idempotent", [False, True])
def test_many_that_were_in_an_instance_that_died_fail_unless_they_may_run_again(idempotent: bool) -> None:
    rig = many(idempotent=idempotent)
    rig.arrive(1)
    rig.arrive(2)
    actions = rig.do(e.InstanceExited("i1", "died"))
    lost = [(each.request, each.failure.code) for each in said(actions, e.Fail)]
    assert lost == ([] if idempotent else [(1, "sandbox_died"), (2, "sandbox_died")])
    again = rig.load("i2")
    assert [each.request for each in said(again, e.Handover)] == ([1, 2] if idempotent else [])
