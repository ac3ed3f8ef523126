"""The router's policy on requests and their leases: a script per rule."""

from typing import Any, get_args

import pytest
from router_rig import Rig, fails_with, failure, lease, loaded, one, said, spec

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import timers as t
from dormouse.core.decisions.requests.policy import RequestPolicy
from dormouse.core.decisions.requests.queueing import SILENT_S
from dormouse.core.decisions.requests.serving import ABANDONED_S
from dormouse.core.decisions.requests.state import InstanceState, RouterState
from dormouse.schemas import messages as m


def test_a_request_from_arrival_to_answer() -> None:
    rig = loaded()
    acquire = one(rig.arrive(), m.Acquire)
    assert (acquire.instance, acquire.deadline_ms, acquire.version) == ("i1", 1000, 1)
    rig.now_s += 0.5
    handover = one(rig.hear(m.Granted(request=acquire.request, lease=lease(), wake_nbytes=3)), e.Handover)
    assert (handover.request, handover.instance, handover.ticket) == (1, "i1", acquire.request)
    rig.now_s += 0.25
    actions = rig.say("i1", m.Returned(request=acquire.request, body=b"2", nbytes=0))
    answer = one(actions, e.Answer)
    assert answer.timing == e.Timing(queue_s=0, wait_s=0.5, run_s=0.25, wake_nbytes=3, began=True, version=1, gpu=0)
    assert one(actions, m.Answered) == m.Answered(request=acquire.request, used=True)
    assert rig.policy.picture.tickets == {}
    assert rig.after(3600) == []


def test_one_request_at_a_time_in_order() -> None:
    rig = loaded()
    ticket = rig.run(1)
    assert rig.arrive(2) == rig.arrive(3) == []
    rig.now_s += 0.4
    actions = rig.say("i1", m.Returned(request=ticket, body=b"", nbytes=0))
    assert isinstance(actions[0], e.Answer)  # its bytes are copied before the instance gets the next one
    assert one(actions, m.Acquire).deadline_ms == 600
    assert rig.policy.picture.requests.keys() == {2, 3}


@pytest.mark.parametrize("used", [False, True])
def test_the_controller_hears_whether_a_lease_was_used(used: bool) -> None:
    rig = loaded()
    ticket = rig.run(1)
    answer = m.Returned(request=ticket, body=b"", nbytes=0, used=used)
    assert one(rig.say("i1", answer), m.Answered) == m.Answered(request=ticket, used=used)
    ticket = rig.run(2)
    raised = m.Raised(request=ticket, code="function_raised", text="", used=used)
    assert one(rig.say("i1", raised), m.Answered) == m.Answered(request=ticket, used=used)
    assert rig.policy.picture.tickets == {}
    assert rig.after(3600) == []


def test_unknown_function() -> None:
    fails_with(loaded().arrive(1, "g"), 1, "unknown_function", 404)


def test_queue_limits() -> None:
    rig = Rig(spec(max_queue=1), spec("g"), max_queue=2)
    assert rig.arrive(1) == []
    fails_with(rig.arrive(2), 2, "queue_full", 429)
    assert rig.arrive(3, "g") == []
    fails_with(rig.arrive(4, "g"), 4, "queue_full", 429)


def test_waiting_too_long_does_not_cost_the_instance() -> None:
    rig = loaded(spec(timeout_ms=1000))
    ticket = one(rig.arrive(1), m.Acquire).request
    rig.now_s += 0.5
    rig.arrive(2)
    actions = rig.after(0.5)
    fails_with(actions, 1, "timed_out", 504)
    assert one(actions, m.Release).request == ticket
    assert said(actions, e.Kill) == []
    assert one(actions, m.Acquire).instance == "i1"  # for the second


def test_running_too_long_does() -> None:
    rig = loaded(spec(timeout_ms=1000))
    ticket = rig.run()
    actions = rig.after(1.0)
    fails_with(actions, 1, "timed_out", 504)
    assert one(actions, m.Release).request == ticket
    assert one(actions, e.Kill).instance == "i1"
    assert one(actions, e.Start).instance == "i2"  # at once
    actions = rig.do(e.InstanceExited("i1", "was killed by SIGKILL"))
    assert one(actions, m.InstanceGone).instance == "i1"
    assert one(actions, e.Clean).instance == "i1"


def test_a_client_leaves_the_queue() -> None:
    rig = loaded()
    rig.run(1)
    rig.arrive(2)
    rig.after(2.5)
    assert rig.do(e.RequesterLeft(2)) == [e.Drop(2, e.Timing(queue_s=2.5))]


def test_a_client_leaves_while_waiting_for_a_lease() -> None:
    rig = loaded()
    ticket = one(rig.arrive(), m.Acquire).request
    actions = rig.do(e.RequesterLeft(1))
    assert one(actions, m.Release).request == ticket
    assert rig.state("i1") is InstanceState.IDLE
    assert rig.hear(m.Granted(request=ticket, lease=lease(), wake_nbytes=0)) == []  # crossed: never given to anybody


def test_one_tenant_at_a_time() -> None:
    rig = loaded()
    for name in ("g", "f"):  # another function, and one that would be loaded beside the version that it replaces
        refused = one(rig.do(e.DeployAsked(1, spec(name, tenant="other"))), e.Settled)
        assert refused.failure is not None
        assert (refused.failure.code, refused.failure.status) == ("tenant_refused", 403)
    rig.do(e.RemoveAsked(2, "f"))
    rig.hear(m.Kept(name="f"))
    assert said(rig.do(e.DeployAsked(3, spec("g", tenant="other"))), e.Settled) == []


def test_many_tenants_where_the_node_allows() -> None:
    policy = RequestPolicy(RouterState(2, 100, "i", one_tenant=False))
    for event in (
        e.FromController(m.Catalogue(functions=[spec()])),
        e.DeployAsked(1, spec("g", tenant="other")),
    ):
        assert said(policy.handle(event, 0.0), e.Settled) == []


def test_d17_a_request_that_nobody_waits_for_may_finish() -> None:
    rig = loaded()
    ticket = rig.run()
    rig.after(2.5)
    assert rig.do(e.RequesterLeft(1)) == [e.Drop(1, e.Timing(run_s=2.5, began=True, version=1, gpu=0))]
    assert rig.after(10 * SILENT_S) == []
    assert said(rig.say("i1", m.Returned(request=ticket, body=b"1", nbytes=0)), e.Answer) == []
    assert rig.state("i1") is InstanceState.IDLE


@pytest.mark.parametrize("before", [False, True])
def test_d17_it_stops_at_once_for_one_that_waits_for_its_instance(before: bool) -> None:
    rig = loaded()
    ticket = rig.run(1)
    told = rig.arrive(2) if before else []
    told += rig.do(e.RequesterLeft(1))
    if not before:
        assert said(told, e.Interrupt) == []
        told = rig.arrive(2)
    assert said(told, e.Interrupt) == [e.Interrupt("i1", ticket)]
    assert said(rig.arrive(3), e.Interrupt) == []  # once is enough
    actions = rig.say("i1", m.Raised(request=ticket, code="cancelled", text=""))
    assert one(actions, m.Release).request == ticket  # interrupted anywhere, it cannot say so to the executor
    assert one(actions, m.Acquire).instance == "i1"
    assert said(rig.after(SILENT_S), e.Kill) == []


def test_d17_an_instance_that_ignores_that_is_replaced() -> None:
    rig = loaded()
    ticket = rig.run(1)
    rig.do(e.RequesterLeft(1))
    rig.arrive(2)
    actions = rig.after(SILENT_S)
    assert one(actions, e.Kill).instance == "i1"
    assert one(actions, m.Release).request == ticket
    assert one(actions, e.Start).instance == "i2"


def test_d17_it_stops_soon_for_another_functions_request_that_waits_for_a_gpu() -> None:
    rig = loaded(spec(), spec("g"))
    ticket = rig.run(1)
    rig.do(e.RequesterLeft(1))
    assert said(rig.after(5 * ABANDONED_S), e.Interrupt) == []
    assert one(rig.arrive(2, "g"), m.Acquire).instance == "i2"
    told = rig.after(ABANDONED_S) + rig.after(ABANDONED_S)
    assert said(told, e.Interrupt) == [e.Interrupt("i1", ticket)]


def test_d17_its_time_limit_holds_still() -> None:
    rig = loaded(spec(timeout_ms=60_000))
    rig.run(1)
    rig.do(e.RequesterLeft(1))
    assert one(rig.after(60.0), e.Kill).instance == "i1"


def test_d17_a_load_goes_on_when_all_that_waited_for_it_have_left() -> None:
    rig = Rig(spec())
    assert rig.arrive(1) == rig.arrive(2) == []
    rig.say("i1", m.Importing(confinement=""))
    assert [one(rig.do(e.RequesterLeft(number)), e.Drop).request for number in (1, 2)] == [1, 2]
    rig.say("i1", m.Loaded(version=1, nbytes=0))
    assert rig.state("i1") is InstanceState.IDLE


def test_what_an_instance_raises() -> None:
    rig = loaded()
    ticket = rig.run()
    fails_with(rig.say("i1", m.Raised(request=ticket, code="out_of_memory", text="")), 1, "out_of_memory", 507)
    ticket = rig.run(2)
    fails_with(rig.say("i1", m.Raised(request=ticket, code="root", text="")), 2, "function_raised", 500)
    ticket = rig.run(3)
    fails_with(rig.say("i1", m.Raised(request=ticket, code="wake_failed", text="")), 3, "wake_failed", 503)
    assert rig.state("i1") is InstanceState.IDLE


def test_refused_by_the_controller() -> None:
    rig = loaded()
    ticket = one(rig.arrive(), m.Acquire).request
    fails_with(rig.hear(m.Refused(request=ticket, failure=failure())), 1, "model_too_large", 400)
    assert rig.state("i1") is InstanceState.IDLE


def test_refused_for_a_violation() -> None:
    rig = loaded()
    ticket = rig.run()
    actions = rig.hear(m.Refused(request=ticket, failure=failure("violation", 502)))
    fails_with(actions, 1, "violation", 502)
    assert one(actions, e.Kill).instance == "i1"


@pytest.mark.parametrize("kind", get_args(t.Timer), ids=lambda kind: kind.__name__)
def test_a_timer_whose_subject_is_gone_does_nothing(kind: type[Any]) -> None:
    rig = loaded()
    rig.policy.picture.timers.clear()
    of_nobody: dict[str, Any] = {"request": 9, "ticket": 9, "instance": "i9"}
    rig.policy.picture.at(rig.now_s, kind(**{name: of_nobody[name] for name in kind.__dataclass_fields__}))
    assert rig.do(e.Tick()) == []
    assert rig.policy.next_deadline_s() is None


def test_a_lease_lost_before_the_request_was_handed_over() -> None:
    rig = loaded()
    ticket = one(rig.arrive(), m.Acquire).request
    again = one(rig.hear(m.LeaseLost(request=ticket)), m.Acquire).request
    assert again != ticket


def test_a_lease_lost_in_execution() -> None:
    rig = loaded()
    ticket = rig.run()
    assert one(rig.hear(m.LeaseLost(request=ticket)), m.LeaseRefused).code == "executor_lost"
    actions = rig.say("i1", m.Raised(request=ticket, code="executor_lost", text=""))
    fails_with(actions, 1, "executor_lost", 503)
    assert one(actions, e.Fail).failure.retryable
    assert rig.state("i1") is InstanceState.IDLE
    later = [*actions, *rig.after(3600)]
    assert said(later, m.Release) == said(later, m.Answered) == []  # nobody has that lease any more


def test_a_lease_lost_after_the_last_result() -> None:
    rig = loaded()
    ticket = rig.run()
    rig.hear(m.LeaseLost(request=ticket))
    assert one(rig.say("i1", m.Returned(request=ticket, body=b"1", nbytes=0)), e.Answer).request == 1


def test_a_lease_lost_and_silence() -> None:
    rig = loaded()
    ticket = rig.run()
    rig.hear(m.LeaseLost(request=ticket))
    actions = rig.after(SILENT_S)
    fails_with(actions, 1, "executor_lost", 503)
    assert one(actions, e.Kill).instance == "i1"


def test_an_idempotent_function_runs_once_more() -> None:
    rig = loaded(spec(idempotent=True))
    ticket = rig.run()
    rig.hear(m.LeaseLost(request=ticket))
    again = one(rig.say("i1", m.Raised(request=ticket, code="executor_lost", text="")), m.Acquire).request
    rig.hear(m.Granted(request=again, lease=lease(2), wake_nbytes=0))
    rig.hear(m.LeaseLost(request=again))
    actions = rig.say("i1", m.Raised(request=again, code="executor_lost", text=""))
    fails_with(actions, 1, "executor_lost", 503)


def test_a_body_that_is_not_json_is_its_clients_mistake() -> None:
    """Answered, and nothing else: no miss, no lost instance, no second run, and the lease comes back."""
    rig = loaded(spec(idempotent=True))
    for lost in (False, True):
        ticket = rig.run(1)
        if lost:
            rig.hear(m.LeaseLost(request=ticket))
        actions = rig.say("i1", m.Raised(request=ticket, code="bad_json", text="no JSON"))
        fails_with(actions, 1, "bad_json", 400)
        assert said(actions, m.Missed) == said(actions, e.Kill) == said(actions, m.Release) == []
        assert rig.state("i1") is InstanceState.IDLE
        assert [told.request for told in said(actions, m.Answered)] == ([] if lost else [ticket])
        assert rig.policy.picture.tickets == {}


def test_n8_a_failed_request_is_told_as_a_miss() -> None:
    rig = loaded(spec(max_queue=1, timeout_ms=1000))
    ticket = rig.run(1)
    rig.arrive(2)
    assert one(rig.arrive(3), m.Missed) == m.Missed(function="f", request=0)  # the queue is full
    raised = rig.say("i1", m.Raised(request=ticket, code="function_raised", text=""))
    assert one(raised, m.Missed) == m.Missed(function="f", request=ticket)
    waits = one(raised, m.Acquire).request
    actions = rig.after(1.0)
    assert said(actions, m.Missed) == [m.Missed(function="f", request=waits)]
    order = [type(message) for message in said(actions, m.Message) if isinstance(message, m.Missed | m.Release)]
    assert order == [m.Missed, m.Release], "the controller forgets what is released"
    assert said(rig.arrive(4, "nobody"), m.Missed) == []
