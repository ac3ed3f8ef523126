"""The router's policy: a script per rule, then everything at random, with the invariants after each event."""

from collections import Counter
from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from router_rig import Rig, fails_with, failure, lease, loaded, one, said, spec

from dormouse.router.decisions import events as e
from dormouse.router.decisions import timers as t
from dormouse.router.decisions.lives import BACKOFF_S, DEPLOY_RETRIES, LONGEST_LOAD, WORN, WORN_WINDOW_S
from dormouse.router.decisions.policy import RequestPolicy
from dormouse.router.decisions.queueing import SILENT_S
from dormouse.router.decisions.serving import ABANDONED_S
from dormouse.router.decisions.state import InstanceState, Phase, RouterState
from dormouse.schemas import messages as m

# --- requests


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
    assert answer.timing == e.Timing(queue_s=0, wait_s=0.5, run_s=0.25, wake_nbytes=3, began=True)
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
    assert rig.do(e.RequesterLeft(2)) == [e.Drop(2)]


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
    assert rig.do(e.RequesterLeft(1)) == [e.Drop(1)]
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
    assert rig.do(e.RequesterLeft(1)) == [e.Drop(1)]
    assert rig.do(e.RequesterLeft(2)) == [e.Drop(2)]
    rig.say("i1", m.Loaded(version=1, nbytes=0))
    assert rig.state("i1") is InstanceState.IDLE


def test_what_an_instance_raises() -> None:
    rig = loaded()
    ticket = rig.run()
    fails_with(rig.say("i1", m.Raised(request=ticket, code="out_of_memory", text="")), 1, "out_of_memory", 507)
    ticket = rig.run(2)
    fails_with(rig.say("i1", m.Raised(request=ticket, code="root", text="")), 2, "function_raised", 500)
    for number, code in ((3, "model_damaged"), (4, "wake_failed")):
        ticket = rig.run(number)
        fails_with(rig.say("i1", m.Raised(request=ticket, code=code, text="")), number, code, 503)
    assert rig.state("i1") is InstanceState.IDLE


def test_death_in_the_middle_of_a_request() -> None:
    rig = loaded()
    ticket = rig.run(1)
    rig.arrive(2)
    actions = rig.do(e.InstanceExited("i1", "was killed by SIGSEGV"))
    fails_with(actions, 1, "sandbox_died", 502)
    assert "SIGSEGV" in one(actions, e.Fail).failure.text
    assert one(actions, m.Release).request == ticket
    assert one(actions, e.Start).instance == "i2"
    assert one(rig.load("i2"), m.Acquire).instance == "i2"  # the second goes on


def test_death_before_the_request_was_handed_over_costs_nothing() -> None:
    rig = loaded()
    ticket = one(rig.arrive(), m.Acquire).request
    actions = rig.do(e.InstanceExited("i1", "exited"))
    assert one(actions, m.Release).request == ticket
    assert said(actions, e.Fail) == []
    assert one(rig.after(BACKOFF_S[0]), e.Start).instance == "i2"
    assert one(rig.load("i2"), m.Acquire).instance == "i2"


def test_garbage_from_an_instance() -> None:
    rig = loaded()
    rig.run()
    actions = rig.do(e.Garbage("i1", "not msgpack"))
    fails_with(actions, 1, "sandbox_died", 502)
    assert one(actions, e.Kill).instance == "i1"
    assert rig.do(e.Garbage("i1", "again")) == []


def test_messages_out_of_turn_are_garbage() -> None:
    for message in (
        m.Importing(confinement=""),
        m.Loaded(version=1, nbytes=0),
        m.LoadFailed(code="x", text=""),
        m.Returned(request=1, body=b"", nbytes=0),
        m.Raised(request=1, code="", text=""),
    ):
        rig = loaded()
        assert one(rig.say("i1", message), e.Kill).instance == "i1"


@pytest.mark.parametrize("good", [True, False])
def test_n1_an_instance_that_keeps_what_can_never_be_used_answers_and_is_replaced(good: bool) -> None:
    rig = loaded()
    ticket = rig.run(1)
    assert rig.arrive(2) == []
    assert one(rig.say("i1", m.Spoiled(text="")), e.Start).instance == "i2"
    answer = m.Returned(request=ticket, body=b"1", nbytes=0)
    actions = rig.say("i1", answer if good else m.Raised(request=ticket, code="function_raised", text="x"))
    assert one(actions, e.Answer if good else e.Fail).request == 1
    assert isinstance(one(actions, e.Send).message, m.Exit)
    rig.say("i1", m.Spoiled(text=""))
    assert one(rig.load("i2"), m.Acquire).instance == "i2", "the next request is the new one's"
    assert one(loaded().say("i1", m.Spoiled(text="")), e.Kill).instance == "i1", "out of turn"


def test_an_answer_to_a_request_that_was_not_handed_over() -> None:
    rig = loaded()
    ticket = one(rig.arrive(), m.Acquire).request
    actions = rig.say("i1", m.Returned(request=ticket, body=b"1", nbytes=0))
    assert one(actions, e.Kill).instance == "i1"
    assert said(actions, e.Answer) == []


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


def test_a_violation_that_the_controller_tells() -> None:
    rig = loaded()
    rig.run()
    actions = rig.hear(m.InstanceViolated(instance="i1", text="unknown op"))
    fails_with(actions, 1, "violation", 502)
    assert one(actions, e.Kill).instance == "i1"
    assert one(actions, e.Start).instance == "i2"


@pytest.mark.parametrize("how", ["dies", "spoils", "limit"])
def test_d4_a_function_whose_requests_end_its_instances_is_started_less_and_less_often(how: str) -> None:
    rig = loaded()

    def spend(number: int) -> list[e.Action]:
        ticket, name = rig.run(number), f"i{number}"
        if how == "dies":
            return rig.do(e.InstanceExited(name, "was killed by SIGKILL"))
        if how == "limit":
            return rig.say(name, m.Raised(request=ticket, code="limit_exceeded", text="no"))
        actions = rig.say(name, m.Spoiled(text="no"))
        return actions + rig.say(name, m.Returned(request=ticket, body=b"1", nbytes=1))

    for number in range(1, WORN + 1):
        assert one(spend(number), e.Start).instance == f"i{number + 1}"  # at once
        rig.load(f"i{number + 1}")
    pause_s, longest_s = BACKOFF_S
    for number in range(WORN + 1, WORN + 5):
        actions = spend(number)
        assert said(actions, e.Start) == []
        assert f"ended {number} of its instances" in one(actions, e.LogNote).text
        assert said(rig.after(pause_s * 0.9), e.Start) == []
        assert one(rig.after(pause_s * 0.1 + 0.001), e.Start).instance == f"i{number + 1}"
        rig.load(f"i{number + 1}")
        pause_s = min(longest_s, pause_s * 2)
    rig.now_s += WORN_WINDOW_S
    assert one(spend(WORN + 5), e.Start).instance == f"i{WORN + 6}"  # at once again


def test_d4_a_zygotes_death_is_no_wear() -> None:
    rig = loaded()
    for number in range(1, 3 * WORN):
        rig.run(number)
        rig.do(e.ForkingChanged(False))
        rig.do(e.ZygoteLost())
        assert one(rig.do(e.ForkingChanged(True, gpus=1)), e.Start).instance == f"i{number + 1}"
        rig.load(f"i{number + 1}")


def damaged() -> m.Failure:
    return m.Failure(code="model_damaged", status=503, text="segment 7", retryable=True)


def test_a_damaged_model_is_loaded_again() -> None:
    rig = loaded()
    actions = rig.hear(m.EndInstance(instance="i1", failure=damaged()))
    assert one(actions, e.Kill).instance == "i1"
    assert "segment 7" in one(actions, e.Kill).why
    rig.do(e.InstanceExited("i1", "was killed"))
    assert one(rig.after(BACKOFF_S[0]), e.Start).instance == "i2"
    rig.load("i2")
    rig.run(1)


def test_a_damaged_model_fails_the_request_that_runs_and_no_other() -> None:
    rig = loaded()
    ticket = rig.run(1)
    rig.arrive(2)
    actions = rig.hear(m.EndInstance(instance="i1", failure=damaged()))
    fails_with(actions, 1, "model_damaged", 503)
    assert one(actions, e.Fail).failure.retryable
    assert one(actions, m.Release).request == ticket
    assert one(rig.after(BACKOFF_S[0]), e.Start).instance == "i2"
    assert one(rig.load("i2"), m.Acquire).instance == "i2"  # the second goes on


def test_a_model_that_is_found_damaged_by_each_request_backs_off_until_one_is_answered() -> None:
    rig = loaded()
    pause_s, longest_s = BACKOFF_S
    for number in range(1, 10):
        rig.run(number)
        actions = rig.hear(m.EndInstance(instance=f"i{number}", failure=damaged()))
        fails_with(actions, number, "model_damaged", 503)
        assert said(actions, e.Start) == []
        rig.do(e.InstanceExited(f"i{number}", "was killed"))
        assert said(rig.after(pause_s * 0.9), e.Start) == []
        assert one(rig.after(pause_s * 0.1 + 0.001), e.Start).instance == f"i{number + 1}"
        rig.load(f"i{number + 1}")
        pause_s = min(longest_s, pause_s * 2)
    ticket = rig.run(10)
    rig.say("i10", m.Returned(request=ticket, body=b"1", nbytes=1))
    rig.run(11)
    rig.hear(m.EndInstance(instance="i10", failure=damaged()))
    assert one(rig.after(BACKOFF_S[0] + 0.001), e.Start).instance == "i11"


def test_a_damaged_model_does_not_cost_the_request_that_waits() -> None:
    rig = loaded()
    ticket = one(rig.arrive(1), m.Acquire).request
    actions = rig.hear(m.EndInstance(instance="i1", failure=damaged()))
    assert said(actions, e.Fail) == []
    assert one(actions, m.Release).request == ticket
    rig.after(BACKOFF_S[0])
    assert one(rig.load("i2"), m.Acquire).instance == "i2"


def test_a_model_that_is_damaged_while_it_loads() -> None:
    rig = Rig(spec())
    rig.arrive(1)
    rig.say("i1", m.Importing(confinement=""))
    fails_with(rig.hear(m.EndInstance(instance="i1", failure=damaged())), 1, "model_damaged", 503)
    assert rig.hear(m.EndInstance(instance="i1", failure=damaged())) == []  # said again of one that is dead
    assert rig.hear(m.EndInstance(instance="i9", failure=damaged())) == []


def test_a_damaged_session_ends() -> None:
    rig = Rig()
    rig.do(e.SessionOpened("s1", "run:x"))
    assert "segment 7" in one(rig.hear(m.EndInstance(instance="s1", failure=damaged())), e.Kill).why


@pytest.mark.parametrize("kind", get_args(t.Timer), ids=lambda kind: kind.__name__)
def test_a_timer_whose_subject_is_gone_does_nothing(kind: type[Any]) -> None:
    rig = loaded()
    rig.policy.picture.timers.clear()
    of_nobody: dict[str, Any] = {"request": 9, "ticket": 9, "instance": "i9"}
    rig.policy.picture.at(rig.now_s, kind(**{name: of_nobody[name] for name in kind.__dataclass_fields__}))
    assert rig.do(e.Tick()) == []
    assert rig.policy.next_deadline_s() is None


# --- lost leases


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


# --- loads


def test_load_takes_a_lease_and_gives_it_back() -> None:
    rig = Rig(spec())
    rig.say("i1", m.Importing(confinement=""))
    acquire = one(rig.say("i1", m.NeedLease(version=4)), m.Acquire)
    assert acquire.version == 4
    assert one(rig.hear(m.Granted(request=acquire.request, lease=lease(), wake_nbytes=0)), m.LeaseGranted)
    ended = rig.say("i1", m.LeaseEnded(serial=1, version=5))
    assert one(ended, m.Answered) == m.Answered(request=acquire.request, used=True)
    assert one(rig.say("i1", m.Loaded(version=5, nbytes=1)), m.InstanceUp).loaded


def test_a_load_whose_lease_is_refused_or_lost() -> None:
    for message in (m.Refused(request=1, failure=failure()), m.LeaseLost(request=1)):
        rig = Rig(spec())
        rig.say("i1", m.Importing(confinement=""))
        assert one(rig.say("i1", m.NeedLease(version=1)), m.Acquire).request == 1
        assert one(rig.hear(message), m.LeaseRefused)
        assert one(rig.say("i1", m.NeedLease(version=1)), m.Acquire).request == 2


def test_no_lease_outside_load_and_handle() -> None:
    assert one(loaded().say("i1", m.NeedLease(version=1)), m.LeaseRefused).code == "no_lease"


def test_only_so_many_load_at_a_time_and_the_wanted_first() -> None:
    rig = Rig(*(spec(name) for name in "abcd"), loads=1)
    assert one(rig.last, e.Start).spec.name == "a"
    rig.arrive(1, "c")
    assert one(rig.load("i1"), e.Start).spec.name == "c"
    assert one(rig.load("i2"), e.Start).spec.name == "b"


def test_a_function_that_cannot_be_loaded_backs_off() -> None:
    rig = Rig(spec())
    rig.arrive(1)
    actions = rig.say("i1", m.LoadFailed(code="x", text="KeyError"))
    fails_with(actions, 1, "load_failed", 503)
    assert "KeyError" in one(actions, e.Fail).failure.text
    assert said(actions, e.Start) == []
    fails_with(rig.arrive(2), 2, "load_failed", 503)
    pause_s, longest_s = BACKOFF_S
    for number in range(2, 20):
        assert said(rig.after(pause_s * 0.9), e.Start) == []
        assert one(rig.after(pause_s * 0.1 + 0.001), e.Start).instance == f"i{number}"
        rig.say(f"i{number}", m.LoadFailed(code="x", text="KeyError"))
        pause_s = min(longest_s, pause_s * 2)
    assert rig.policy.missing() == []  # it is not waited for
    rig.after(longest_s)
    rig.load("i20")
    rig.run(3)


def test_a_load_has_a_time_limit() -> None:
    rig = Rig(spec(load_timeout_ms=2000))
    rig.say("i1", m.Importing(confinement=""))
    ticket = one(rig.say("i1", m.NeedLease(version=1)), m.Acquire).request
    actions = rig.after(2.0)
    assert one(actions, e.Kill).instance == "i1"
    assert one(actions, m.Release).request == ticket


@pytest.mark.parametrize("printed", [True, False])
def test_the_time_limit_of_a_load_is_from_one_sign_of_progress_to_the_next(printed: bool) -> None:
    rig = Rig(spec(load_timeout_ms=2000))
    rig.say("i1", m.Importing(confinement=""))
    for _ in range(LONGEST_LOAD):
        assert said(rig.after(1.9), e.Kill) == []
        if printed:
            rig.do(e.Printed("i1"))
        else:
            rig.say("i1", m.LoadProgress())
    assert said(rig.after(1.1), e.Kill) == []
    failed = said(rig.after(0.1), e.Kill)
    assert [each.instance for each in failed] == ["i1"], "none loads for ever"


def test_one_that_has_stopped_printing_has_its_time_limit_from_then_on() -> None:
    rig = Rig(spec(load_timeout_ms=2000))
    rig.say("i1", m.Importing(confinement=""))
    rig.after(1.5)
    rig.do(e.Printed("i1"))
    assert said(rig.after(1.9), e.Kill) == []
    assert one(rig.after(0.1), e.Kill).instance == "i1"


def test_d11_what_waits_in_vain_for_a_zygote_is_told_to_come_back() -> None:
    rig = loaded(spec(timeout_ms=1000))
    rig.do(e.ForkingChanged(False))
    rig.do(e.ZygoteLost())
    assert said(rig.arrive(), e.Fail) == []
    actions = rig.after(1.0)
    fails_with(actions, 1, "starting", 503)
    assert one(actions, e.Fail).failure.retryable


def test_d11_a_zygote_takes_its_instances_along() -> None:
    rig = loaded()
    rig.run()
    rig.do(e.ForkingChanged(False))
    actions = rig.do(e.ZygoteLost())
    fails_with(actions, 1, "starting", 503)
    assert one(actions, e.Fail).failure.retryable
    assert said(actions, e.Start) == []
    assert one(rig.do(e.ForkingChanged(True)), e.Start).instance == "i2"


# --- deploys


def test_a_first_deploy() -> None:
    rig = Rig()
    assert one(rig.do(e.DeployAsked(7, spec(tenant="t"))), e.Start).spec.version == 1
    assert one(rig.load(), m.Deployed).spec.tenant == "t"
    fails_with(rig.arrive(), 1, "unknown_function", 404)  # not before it is kept
    settled = one(rig.hear(m.Kept(name="f")), e.Settled)
    assert (settled.ask, settled.spec.version, settled.failure) == (7, 1, None)
    rig.run(2)


def test_a_model_larger_than_the_gpu_is_refused_at_deploy_with_the_numbers() -> None:
    rig = loaded()
    rig.do(e.ForkingChanged(True, gpu_nbytes=1000))
    rig.do(e.DeployAsked(7, spec()))
    rig.say("i2", m.Importing(confinement=""))
    actions = rig.say("i2", m.Loaded(version=1, nbytes=1001))
    assert said(actions, m.Deployed) == []  # never kept
    refused = one(actions, e.Settled).failure
    assert (refused.code, refused.status) == ("model_too_large", 507)
    assert "1,001" in refused.text
    assert "1,000" in refused.text
    assert one(actions, e.Discard).spec.version == 2
    assert one(actions, e.Kill).instance == "i2"
    rig.run(1)  # the old version serves on
    rig.do(e.DeployAsked(8, spec()))
    rig.say("i3", m.Importing(confinement=""))
    assert one(rig.say("i3", m.Loaded(version=1, nbytes=1000)), m.Deployed)


def test_a_version_that_the_controller_does_not_keep() -> None:
    """It knows what of a GPU is for models, which is less than the GPU where activations have memory of their own."""
    rig = loaded()
    rig.do(e.DeployAsked(7, spec()))
    rig.load("i2")
    refusal = m.EndInstance(instance="i2", failure=failure("model_too_large", 507), unkept="f")
    actions = rig.hear(refusal)
    settled = one(actions, e.Settled)
    assert (settled.ask, settled.failure.code, settled.failure.status) == (7, "model_too_large", 507)
    assert one(actions, e.Kill).instance == "i2"
    assert one(actions, e.Discard).spec.version == 2
    assert rig.hear(refusal) == []
    rig.do(e.InstanceExited("i2", "was killed"))
    rig.run(1)  # the old version serves on
    rig.do(e.DeployAsked(8, spec()))  # and another change of the name can begin


def test_a_version_that_dies_before_the_controller_does_not_keep_it() -> None:
    rig = Rig()
    rig.do(e.DeployAsked(7, spec()))
    rig.load()
    assert said(rig.do(e.InstanceExited("i1", "exited")), e.Settled) == []
    actions = rig.hear(m.EndInstance(instance="i1", failure=failure("model_too_large", 507), unkept="f"))
    assert one(actions, e.Settled).failure.code == "model_too_large"
    assert said(actions, e.Start) == []
    fails_with(rig.arrive(), 1, "unknown_function", 404)


def test_a_failed_redeploy_leaves_the_old_version_alone() -> None:
    rig = loaded()
    rig.run()
    assert one(rig.do(e.DeployAsked(7, spec())), e.Start).spec.version == 2
    rig.say("i2", m.Importing(confinement=""))
    actions = rig.say("i2", m.LoadFailed(code="x", text="SyntaxError: line 3"))
    settled = one(actions, e.Settled)
    assert (settled.failure.code, settled.failure.text) == ("load_failed", "SyntaxError: line 3")
    assert one(actions, e.Discard).spec.version == 2
    assert one(actions, e.Kill).instance == "i2"
    assert rig.state("i1") is InstanceState.BUSY
    rig.do(e.InstanceExited("i2", "was killed"))
    assert rig.after(100) != []


def test_a_redeploy_switches_and_drains() -> None:
    rig = loaded()
    ticket = rig.run(1)
    rig.arrive(2)
    rig.do(e.DeployAsked(7, spec()))
    rig.load("i2")
    actions = rig.hear(m.Kept(name="f"))
    assert one(actions, m.Acquire).instance == "i2"  # the second request goes on with the new version
    assert one(actions, e.NewVersion).spec.version == 2
    assert not any(isinstance(action, e.Discard) for action in actions), "the first is kept for a while"
    actions = rig.say("i1", m.Returned(request=ticket, body=b"", nbytes=0))
    assert one(actions, e.Answer).request == 1  # the first is finished by the old one
    assert one(actions, m.Exit)
    assert one(rig.after(SILENT_S), e.Kill).instance == "i1"  # if it does not leave by itself
    rig.do(e.InstanceExited("i1", "was killed"))


def test_a_redeploy_takes_waiting_requests_along() -> None:
    rig = loaded()
    ticket = one(rig.arrive(), m.Acquire).request
    rig.do(e.DeployAsked(7, spec()))
    rig.load("i2")
    actions = rig.hear(m.Kept(name="f"))
    assert one(actions, m.Release).request == ticket
    assert one(actions, m.Acquire).instance == "i2"
    assert one(actions, m.Exit)


def test_one_change_of_a_name_at_a_time() -> None:
    rig = loaded()
    rig.do(e.DeployAsked(7, spec()))
    assert one(rig.do(e.DeployAsked(8, spec())), e.Settled).failure.code == "change_in_progress"
    assert one(rig.do(e.RemoveAsked(9, "f")), e.Settled).failure.code == "change_in_progress"


def test_a_deploy_is_not_failed_by_an_executor() -> None:
    rig = Rig()
    rig.do(e.DeployAsked(7, spec()))
    for number in range(1, DEPLOY_RETRIES + 1):
        actions = rig.say(f"i{number}", m.LoadFailed(code="executor_lost", text=""))
        assert one(actions, e.Start).instance == f"i{number + 1}"
    actions = rig.say(f"i{DEPLOY_RETRIES + 1}", m.LoadFailed(code="executor_lost", text=""))
    assert one(actions, e.Settled).failure is not None


def test_a_new_version_that_dies_before_it_is_kept() -> None:
    rig = Rig()
    rig.do(e.DeployAsked(7, spec()))
    rig.load()
    assert said(rig.do(e.InstanceExited("i1", "exited")), e.Settled) == []
    actions = rig.hear(m.Kept(name="f"))
    assert one(actions, e.Settled).failure is None
    assert one(actions, e.Start).instance == "i2"


def test_removal() -> None:
    rig = loaded()
    ticket = rig.run(1)
    rig.arrive(2)
    actions = rig.do(e.RemoveAsked(7, "f"))
    assert actions == [e.Tell(m.Removed(name="f"))]
    actions = rig.hear(m.Kept(name="f"))
    fails_with(actions, 2, "unknown_function", 404)
    assert one(actions, e.Settled).failure is None
    assert one(actions, e.Discard).spec.name == "f"
    actions = rig.say("i1", m.Returned(request=ticket, body=b"", nbytes=0))
    assert one(actions, e.Answer).request == 1
    assert one(actions, m.Exit)
    assert one(rig.do(e.RemoveAsked(8, "f")), e.Settled).failure.status == 404


def test_d14_a_removal_that_is_not_durable_is_none() -> None:
    rig = loaded()
    ticket = rig.run(1)
    rig.do(e.RemoveAsked(7, "f"))
    settled = one(rig.hear(m.NotRemoved(name="f", text="free space, then remove it again")), e.Settled)
    assert (settled.ask, settled.failure.code, settled.failure.status) == (7, "not_removed", 507)
    assert "free space" in settled.failure.text
    assert one(rig.say("i1", m.Returned(request=ticket, body=b"", nbytes=0)), e.Answer).request == 1
    rig.run(2)  # by the same instance
    assert one(rig.do(e.RemoveAsked(8, "f")), m.Removed).name == "f"


def test_sessions() -> None:
    rig = Rig()
    up = one(rig.do(e.SessionOpened("s1", "run:x")), m.InstanceUp)
    assert not up.loaded
    ticket = one(rig.say("s1", m.NeedLease(version=0)), m.Acquire).request
    assert one(rig.hear(m.Granted(request=ticket, lease=lease(), wake_nbytes=0)), m.LeaseGranted)
    assert one(rig.say("s1", m.LeaseEnded(serial=1, version=2)), m.Answered).request == ticket
    second = one(rig.say("s1", m.NeedLease(version=2)), m.Acquire).request
    actions = rig.do(e.InstanceExited("s1", "ended"))
    assert {message.request for message in said(actions, m.Release)} == {second}
    assert one(actions, m.InstanceGone).instance == "s1"
    assert one(actions, e.Clean).instance == "s1"


@pytest.mark.parametrize(
    "message",
    [
        m.Importing(confinement=""),
        m.Loaded(version=1, nbytes=5),
        m.Spoiled(text=""),
        m.Returned(request=1, body=b"1", nbytes=1),
        m.Raised(request=1, code="", text=""),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_session_that_speaks_as_an_instance_ends(message: m.InstanceToRouter) -> None:
    rig = loaded()
    rig.do(e.SessionOpened("s1", "run:x"))
    assert "broke the protocol" in one(rig.say("s1", message), e.Kill).why
    assert one(rig.do(e.InstanceExited("s1", "ended")), e.Clean).instance == "s1"
    assert rig.state("i1") is InstanceState.IDLE


def test_before_the_catalogue_nothing_is_said_of_functions() -> None:
    """After a restart the router listens a moment before the controller has told it what is deployed."""
    rig = Rig(known=False)
    early = one(rig.arrive(1), e.Fail).failure
    assert (early.code, early.status, early.retryable) == ("starting", 503, True)
    changes: list[e.Event] = [e.DeployAsked(2, spec()), e.RemoveAsked(3, "f")]
    for ask, event in enumerate(changes, 2):
        settled = one(rig.do(event), e.Settled)
        assert (settled.ask, settled.failure.code) == (ask, "starting")
    started = rig.hear(m.Catalogue(functions=[spec()]))
    assert one(started, e.Start).spec.version == 1
    assert one(rig.arrive(4, "g"), e.Fail).failure.code == "unknown_function"


def test_readiness() -> None:
    rig = Rig(known=False)
    assert rig.policy.missing() == ["the catalogue"]
    rig = Rig(spec())
    assert rig.policy.missing() == ["function f"]
    rig.load()
    assert rig.policy.missing() == []
    rig.do(e.ForkingChanged(False))
    assert rig.policy.missing() != []


# --- many requests at once in one instance


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
    assert acquire.batch == m.BatchAsk(left_ms=[600], most=2, wait_ms=7)
    assert not acquire.own
    waits = one(rig.arrive(2), m.BatchWaits)
    assert (waits.request, waits.left_ms) == (acquire.request, [600, 1000])
    assert one(rig.arrive(3), m.BatchWaits).left_ms == [600, 1000], "a batch has two at most"
    assert one(rig.do(e.RequesterLeft(1)), m.BatchWaits).left_ms == [1000, 1000]
    lease = m.Lease(gpu=0, epoch=1, serial=1, secret=1)
    granted = rig.hear(m.Granted(request=acquire.request, lease=lease, wake_nbytes=0, requests=2))
    assert one(granted, m.LeaseGranted).requests == 2
    assert said(rig.arrive(4), m.BatchWaits) == [], "it is decided"
    answered = one(rig.say("i1", m.LeaseEnded(serial=1, version=1, taken=2, together=1)), m.Answered)
    assert answered == m.Answered(request=acquire.request, used=True, taken=2, together=1)
    rig.say("i1", m.Raised(request=first.ticket, code="cancelled", text=""))
    missed = one(rig.say("i1", m.Raised(request=first.ticket + 2, code="function_raised", text="x")), m.Missed)
    assert missed.request == acquire.request, "the controller knows it by its batch's lease"


def test_the_controller_is_told_who_ran_out_of_time_before_a_batch() -> None:
    rig = loaded(spec(batch=4, deadline_ms=1000, timeout_ms=1000))
    rig.arrive(1)
    acquire = one(rig.say("i1", m.NeedLease(version=1)), m.Acquire)
    rig.after(0.5)
    rig.arrive(2)
    waits = one(rig.after(0.5), m.BatchWaits)
    assert (waits.request, waits.left_ms) == (acquire.request, [500])


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


# --- all of it at random

NAMES = ("f", "g", "s", "c")
GPUS = 3


class RouterMachine(RuleBasedStateMachine):
    """Clients, a controller, a zygote and instances that do all that their protocols allow, and some that they do not.

    Every request meets exactly one fate; those of a function start in order of arrival; every lease wish is released,
    answered or lost; a dead instance is cleaned once. Function s is stateless and has a queue at once. Function c has
    two requests at once in its instance.
    """

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.policy = RequestPolicy(RouterState(2, 9, "i", extra_instances=2, extra_idle_s=3.0))
        self.now_s = 0.0
        self.fates: Counter[int] = Counter()
        self.arrived = 0
        self.asks = 0
        self.settled: Counter[int] = Counter()
        self.wishes: dict[int, str] = {}  # by ticket: "wished" | "granted"
        self.alive: set[str] = set()  # processes
        self.doomed: set[str] = set()  # killed, not reported yet
        self.run_by: dict[str, int] = {}  # by instance: ticket of the Run it has got
        self.open_by: dict[str, list[int]] = {}  # likewise, of those that have many
        self.kept: list[tuple[str, str]] = []  # (function, instance that was deployed or "" for a removal)
        self.do(e.ForkingChanged(True, gpus=GPUS))
        specs = [
            spec("f", timeout_ms=3000, max_queue=3),
            spec("g", idempotent=True),
            spec("s", stateless=True, deadline_ms=1, idempotent=True),
            spec("c", concurrency=2, timeout_ms=3000),
        ]
        self.do(e.FromController(m.Catalogue(functions=specs)))
        for name in ("i1", "i2", "i3"):  # else most runs would end before a request has begun
            self.do(e.FromInstance(name, m.Importing(confinement="")))
            self.do(e.FromInstance(name, m.Loaded(version=1, nbytes=0)))
        self.do(e.FromInstance("i4", m.Importing(confinement="")))
        self.do(e.FromInstance("i4", m.Loaded(version=1, nbytes=0)))
        self.burst("s", 1)
        self.answers()

    def do(self, event: e.Event) -> None:
        for action in self.policy.handle(event, self.now_s):
            match action:
                case e.Answer(request=request) | e.Fail(request=request) | e.Drop(request=request):
                    self.fates[request] += 1
                case e.Handover(request=request, instance=instance, ticket=ticket, lease=None):
                    self.starts_in_order(request)
                    opened = self.open_by.setdefault(instance, [])
                    opened.append(ticket)
                    assert len(opened) <= 2
                case e.Handover(request=request, instance=instance, ticket=ticket):
                    assert instance not in self.run_by
                    self.starts_in_order(request)
                    assert self.wishes[ticket] == "granted"
                    self.run_by[instance] = ticket
                case e.Start(instance=instance):
                    assert instance not in self.alive
                    self.alive.add(instance)
                case e.Kill(instance=instance):
                    self.doomed.add(instance)
                case e.Send(instance=instance, message=m.Exit()):
                    self.doomed.add(instance)
                case e.Clean(instance=instance):
                    assert instance not in self.alive
                case e.Tell(message=m.Acquire(request=ticket, instance=instance)):
                    assert instance in self.alive
                    assert ticket not in self.wishes
                    self.wishes[ticket] = "wished"
                case e.Tell(message=m.Release(request=ticket) | m.Answered(request=ticket)):
                    del self.wishes[ticket]
                case e.Tell(message=m.Deployed(spec=spec_)):
                    deploy = self.policy.picture.deploy(spec_.name)
                    assert deploy is not None
                    self.kept.append((spec_.name, deploy.instance or ""))
                case e.Tell(message=m.Removed(name=name)):
                    self.kept.append((name, ""))
                case e.Settled(ask=ask):
                    self.settled[ask] += 1
                case _:
                    pass

    def starts_in_order(self, number: int) -> None:
        requests = self.policy.picture.requests
        name = requests[number].function
        waiting = [r.number for r in requests.values() if r.function == name and r.phase is not Phase.RUNNING]
        assert min(waiting, default=number) >= number

    def die(self, name: str) -> None:
        self.alive.discard(name)
        self.doomed.discard(name)
        self.run_by.pop(name, None)
        self.open_by.pop(name, None)

    def state_of(self, name: str) -> InstanceState:
        return self.policy.picture.instances[name].state

    @rule(target=requests, name=st.sampled_from((*NAMES, "nobody")))
    def arrive(self, name: str) -> int:
        self.arrived += 1
        self.do(e.Arrived(self.arrived, name))
        return self.arrived

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 4))
    def burst(self, name: str, count: int) -> None:
        """As many requests at once, and GPUs and new instances for all who wish for them."""
        for _ in range(count):
            self.arrive(name)
        for ticket in sorted((ticket for ticket, state in self.wishes.items() if state == "wished"), reverse=True):
            self.grant(ticket)
        for instance in sorted(self.alive):
            if self.state_of(instance) is InstanceState.STARTING:
                self.do(e.FromInstance(instance, m.Importing(confinement="")))
            if self.state_of(instance) is InstanceState.LOADING:
                self.do(e.FromInstance(instance, m.Loaded(version=1, nbytes=0)))

    @rule()
    def answers(self) -> None:
        """Every request that runs is answered, and its lease is done."""
        self.now_s += 0.01
        for instance, ticket in sorted(self.run_by.items()):
            if self.run_by.pop(instance, None) is None:
                continue  # it died of what happened to another
            self.do(e.FromInstance(instance, m.Returned(request=ticket, body=b"1", nbytes=0)))
            assert ticket not in self.wishes

    @rule(data=st.data(), raises=st.booleans())
    def answers_of_many(self, data: st.DataObject, raises: bool) -> None:
        names = sorted(name for name in self.alive if self.open_by.get(name))
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        ticket = self.open_by[name].pop(data.draw(st.integers(0, len(self.open_by[name]) - 1)))
        answer: m.InstanceToRouter = m.Returned(request=ticket, body=b"1", nbytes=0)
        if raises:
            codes = ("function_raised", "cancelled", "executor_lost", "invalid_request", "limit_exceeded")
            answer = m.Raised(request=ticket, code=data.draw(st.sampled_from(codes)), text="")
        self.do(e.FromInstance(name, answer))

    @rule(request=consumes(requests))
    def leave(self, request: int) -> None:
        self.do(e.RequesterLeft(request))

    @rule(
        data=st.data(),
        what=st.sampled_from(("grant", "grant", "grant", "refuse", "lose", "wrote", "violation")),
    )
    def control(self, data: st.DataObject, what: str) -> None:
        wanted = {"grant": "wished", "refuse": "wished", "violation": "granted"}.get(what, "granted")
        tickets = sorted(ticket for ticket, state in self.wishes.items() if state == wanted)
        if not tickets:
            return
        ticket = data.draw(st.sampled_from(tickets))
        if what == "grant":
            self.grant(ticket)
            return
        if what == "wrote":
            self.do(e.FromController(m.Wrote(instance=self.policy.picture.tickets[ticket].instance)))
            return
        del self.wishes[ticket]
        told: dict[str, m.ControllerToRouter] = {
            "refuse": m.Refused(request=ticket, failure=failure()),
            "violation": m.Refused(request=ticket, failure=failure("violation", 502)),
            "lose": m.LeaseLost(request=ticket),
        }
        self.do(e.FromController(told[what]))

    def grant(self, ticket: int) -> None:
        self.wishes[ticket] = "granted"
        self.do(e.FromController(m.Granted(request=ticket, lease=lease(ticket), wake_nbytes=0)))

    @rule(data=st.data(), what=st.sampled_from(("progress", "progress", "progress", "lease", "fail", "garbage", "odd")))
    def instance(self, data: st.DataObject, what: str) -> None:
        if not self.alive:
            return
        name = data.draw(st.sampled_from(sorted(self.alive)))
        known = self.policy.picture.instances[name]
        message: m.InstanceToRouter | None = None
        match what, known.state:
            case "progress", InstanceState.STARTING:
                message = m.Importing(confinement="")
            case "progress", InstanceState.LOADING:
                message = m.Loaded(version=1, nbytes=0)
            case "progress" | "fail", InstanceState.BUSY if name in self.run_by:
                ticket = self.run_by.pop(name)
                codes = ("function_raised", "cancelled", "executor_lost")
                if data.draw(st.booleans()):
                    self.do(e.FromInstance(name, m.Spoiled(text="")))
                if what == "progress":
                    message = m.Returned(request=ticket, body=b"1", nbytes=0)
                else:
                    message = m.Raised(request=ticket, code=data.draw(st.sampled_from(codes)), text="")
            case "lease", _:
                message = m.LeaseEnded(serial=1, version=1) if known.own is not None else m.NeedLease(version=1)
            case "fail", _:
                code = data.draw(st.sampled_from(("load_failed", "executor_lost")))
                message = m.LoadFailed(code=code, text="")
            case "garbage", _:
                self.do(e.Garbage(name, "x"))
                return
            case "odd", _:
                message = m.Returned(request=data.draw(st.integers(0, 50)), body=b"", nbytes=0)
                if self.run_by.get(name) == message.request:
                    del self.run_by[name]
                if message.request in self.open_by.get(name, ()):
                    self.open_by[name].remove(message.request)
            case _:
                return
        self.do(e.FromInstance(name, message))

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(["nobody", *sorted(self.alive)]))
        self.do(e.FromController(m.EndInstance(instance=name, failure=damaged())))

    @rule(data=st.data())
    def blame(self, data: st.DataObject) -> None:
        picture = self.policy.picture
        name = data.draw(st.sampled_from(["nobody", *sorted(picture.instances), *sorted(picture.gone)]))
        self.do(e.Blamed(name, "x"))

    @rule(name=st.sampled_from((*NAMES, "h")))
    def restart(self, name: str) -> None:
        self.asks += 1
        self.do(e.RestartAsked(self.asks, name))

    @rule(data=st.data(), violent=st.booleans())
    def exit(self, data: st.DataObject, violent: bool) -> None:
        names = self.alive if violent else self.doomed & self.alive
        if names:
            name = data.draw(st.sampled_from(sorted(names)))
            self.die(name)
            self.do(e.InstanceExited(name, "exited"))

    @rule()
    def zygote_dies(self) -> None:
        self.do(e.ForkingChanged(False))
        for name in list(self.alive):
            self.die(name)
        self.do(e.ZygoteLost())
        self.do(e.ForkingChanged(True, gpus=GPUS))

    @rule(name=st.sampled_from((*NAMES, "h")), remove=st.booleans())
    def change(self, name: str, remove: bool) -> None:
        self.asks += 1
        asked = spec(
            name,
            idempotent=True,
            stateless=name == "s",
            deadline_ms=1 if name == "s" else 1000,
            concurrency=2 if name == "c" else 1,
        )
        self.do(e.RemoveAsked(self.asks, name) if remove else e.DeployAsked(self.asks, asked))

    @rule(too_large=st.booleans())
    def keep(self, too_large: bool) -> None:
        if self.kept:
            self.answer_kept(too_large)

    def answer_kept(self, too_large: bool = False) -> None:
        name, instance = self.kept.pop(0)
        if too_large and instance:
            self.do(e.FromController(m.EndInstance(instance=instance, failure=failure(), unkept=name)))
        elif too_large:
            self.do(e.FromController(m.NotRemoved(name=name, text="full")))
        else:
            self.do(e.FromController(m.Kept(name=name)))

    @rule(seconds=st.sampled_from((0.01, 0.6, 2.5, 6.0, 70.0)))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.do(e.Tick())

    @invariant()
    def holds(self) -> None:
        self.policy.check()
        assert not self.fates or max(self.fates.values()) == 1
        assert not self.settled or max(self.settled.values()) == 1
        assert set(self.fates) | set(self.policy.picture.requests) == set(range(1, self.arrived + 1))
        assert set(self.policy.picture.instances) == self.alive
        when_s = self.policy.next_deadline_s()
        assert when_s is None or when_s > self.now_s or self.policy.picture.timers

    def teardown(self) -> None:
        """Whatever has happened, time alone brings every request to its end."""
        for _ in range(20):
            while self.kept:
                self.answer_kept()
            for name in sorted(self.doomed & self.alive):
                self.die(name)
                self.do(e.InstanceExited(name, "exited"))
            self.now_s += 60
            self.do(e.Tick())
        assert self.fates.keys() == set(range(1, self.arrived + 1))
        assert set(self.fates.values()) <= {1}


RouterMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None, derandomize=True)
TestRouterMachine = pytest.mark.timeout(900)(RouterMachine.TestCase)


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


def test_n8_what_load_computes_is_not_counted() -> None:
    rig = Rig(spec())
    rig.say("i1", m.Importing(confinement=""))
    assert one(rig.say("i1", m.NeedLease(version=1)), m.Acquire).own
    rig = loaded(spec())
    assert not one(rig.arrive(1), m.Acquire).own


def test_n8_a_version_that_does_not_load_is_told_beside_the_one_that_serves() -> None:
    rig = loaded(spec())
    rig.do(e.DeployAsked(7, spec()))
    rig.say("i2", m.Importing(confinement=""))
    rig.say("i2", m.LoadFailed(code="bad_source", text="line 3"))
    function = rig.policy.picture.functions["f"]
    assert (function.spec.version, function.not_deployed) == (1, "version 2 was not deployed: line 3")
