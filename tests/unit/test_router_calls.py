"""Functions that call functions, as the router decides it: who may call whom, when a call ends, and what is made up."""

from typing import Any

import pytest
from router_rig import Rig, fails_with, lease, loaded, one, said, spec

from dormouse.core.decisions.requests import calls
from dormouse.core.decisions.requests import events as e
from dormouse.schemas import messages as m


def asked(ticket: int, to: str = "g", number: int = 1, body: bytes = b"1") -> m.CallFunction:
    return m.CallFunction(number=number, request=ticket, function=to, body=body)


def arrived(rig: Rig, key: tuple[str, int], to: str = "g", request: int = 50) -> list[e.Action]:
    """The shell submits a call."""
    return rig.do(e.Arrived(request, to, call=key))


def calling(**settings: Any) -> tuple[Rig, int]:
    """Function f runs a request in i1, and may call g in i2; the ticket of that request."""
    rig = loaded(spec("f", calls=("g", "h"), **settings), spec("g"))
    return rig, rig.run(1)


def refused(actions: list[e.Action]) -> tuple[str, int]:
    refusal = one(actions, e.RefuseCall).failure
    assert not said(actions, e.BeginCall)
    return refusal.code, refusal.status


def answered(rig: Rig, instance: str, ticket: int) -> list[e.Action]:
    return rig.say(instance, m.Returned(request=ticket, body=b"1", nbytes=0))


def test_a_call_is_a_request_like_any_other() -> None:
    rig, ticket = calling()
    actions = rig.say("i1", asked(ticket))
    begin = one(actions, e.BeginCall)
    waits = one(actions, m.CallWaits)
    assert (waits.gpu, waits.epoch, waits.serial) == (0, 1, 1), "its lease: another may have the turn"
    assert (begin.instance, begin.number, begin.caller, begin.spec.name) == ("i1", 1, 1, "f")
    acquire = one(arrived(rig, ("i1", 1)), m.Acquire)
    assert acquire.instance == "i2"
    handed = one(rig.hear(m.Granted(request=acquire.request, lease=lease(2), wake_nbytes=0)), e.Handover)
    assert (handed.request, handed.instance) == (50, "i2")
    assert one(answered(rig, "i2", acquire.request), e.Answer).request == 50
    rig.do(e.CallOver("i1", 1))
    assert rig.policy.picture.calls == {}
    assert one(answered(rig, "i1", ticket), e.Answer).request == 1


def test_it_is_due_when_its_caller_is() -> None:
    rig, ticket = calling(deadline_ms=400)
    rig.now_s += 0.25
    rig.say("i1", asked(ticket))
    acquire = one(arrived(rig, ("i1", 1)), m.Acquire)
    assert (acquire.deadline_ms, acquire.beyond_ms) == (150, 850), "of its own 1000, by which its function is judged"
    rig, ticket = calling(deadline_ms=5000)
    rig.say("i1", asked(ticket))
    acquire = one(arrived(rig, ("i1", 1)), m.Acquire)
    assert (acquire.deadline_ms, acquire.beyond_ms) == (1000, 0), "of its caller's 5000"


def test_one_of_many_in_an_instance_is_due_then_too() -> None:
    rig = loaded(spec("f", calls=("g",), deadline_ms=400), spec("g", concurrency=4))
    rig.say("i1", asked(rig.run(1)))
    arrived(rig, ("i1", 1))
    assert one(rig.say("i2", m.NeedLease(version=1)), m.Acquire).deadline_ms == 400


@pytest.mark.parametrize(
    ("to", "refusal"),
    [
        ("h", ("unknown_function", 404)),  # it may be called, and is not there
        ("x", ("call_refused", 403)),
        ("f", ("call_circle", 409)),
        ("g@7", ("unknown_function", 404)),
        ("f@1", ("call_circle", 409)),
    ],
)
def test_who_may_not_be_called_is_refused_by_name(to: str, refusal: tuple[str, int]) -> None:
    rig, ticket = calling()
    assert refused(rig.say("i1", asked(ticket, to))) == refusal
    assert rig.policy.picture.calls == {}


def test_a_version_may_be_named() -> None:
    rig, ticket = calling()
    assert one(rig.say("i1", asked(ticket, "g@1")), e.BeginCall).call.function == "g@1"


def test_functions_of_another_tenant_are_not_there() -> None:
    rig = loaded(spec("f", calls=("g",)), spec("g", tenant="other"))
    assert refused(rig.say("i1", asked(rig.run(1)))) == ("unknown_function", 404)


@pytest.mark.parametrize("ticket", [0, -1, 2, 3, 99])
def test_a_request_that_is_made_up_calls_nobody(ticket: int) -> None:
    """Of no request, or of another instance's: 2 is one of i2, which may call too."""
    rig = loaded(spec("f", calls=("h",)), spec("g", calls=("h",)), spec("h"))
    own, others = rig.run(1), rig.run(2, "g")
    assert (own, others) == (1, 2)
    assert refused(rig.say("i1", asked(ticket, "h"))) == ("cancelled", 503)
    assert rig.state("i1").value == "busy", "an honest thread may have outlived its request"


def test_a_request_calls_no_more_when_it_is_over() -> None:
    rig, ticket = calling()
    answered(rig, "i1", ticket)
    assert refused(rig.say("i1", asked(ticket))) == ("cancelled", 503)
    again = rig.run(2)
    rig.do(e.RequesterLeft(2))
    assert refused(rig.say("i1", asked(again))) == ("cancelled", 503), "nobody waits for it"


@pytest.mark.parametrize("message", [asked(1), asked(1, number=2, body=b"x" * (m.MESSAGE_BODY_NBYTES + 1))])
def test_a_number_used_twice_and_a_body_too_large_end_the_instance(message: m.CallFunction) -> None:
    rig, ticket = calling()
    rig.say("i1", asked(ticket))
    assert one(rig.say("i1", message), e.Kill).instance == "i1"


def test_an_instance_has_so_many_open() -> None:
    rig, ticket = calling()
    for number in range(calls.MAX):
        one(rig.say("i1", asked(ticket, number=number)), e.BeginCall)
    assert refused(rig.say("i1", asked(ticket, number=calls.MAX))) == ("too_many_calls", 429)
    rig.do(e.CallOver("i1", 7))
    one(rig.say("i1", asked(ticket, number=calls.MAX)), e.BeginCall)


def test_a_chain_has_a_last_one() -> None:
    """Each is asked by the request before it, whatever its instance says."""
    names = [f"f{number}" for number in range(calls.DEPTH + 2)]
    rig = loaded(*(spec(name, calls=tuple(names[number + 1 :])) for number, name in enumerate(names)))
    ticket = rig.run(1, "f0")
    for depth in range(1, calls.DEPTH + 1):
        one(rig.say(f"i{depth}", asked(ticket, f"f{depth}")), e.BeginCall)
        acquire = one(arrived(rig, (f"i{depth}", 1), f"f{depth}", 50 + depth), m.Acquire)
        ticket = acquire.request
        rig.hear(m.Granted(request=ticket, lease=lease(ticket), wake_nbytes=0))
    last = calls.DEPTH
    assert refused(rig.say(f"i{last + 1}", asked(ticket, f"f{last + 1}"))) == ("call_too_deep", 409)


def test_who_may_call_back_is_not_called() -> None:
    rig = loaded(spec("f", calls=("g",)), spec("g", calls=("h",)), spec("h", calls=("x", "f")))
    refusal = one(rig.say("i1", asked(rig.run(1))), e.RefuseCall).failure
    assert refusal.code == "call_circle"
    assert "'f' calls 'g' calls 'h' calls 'f'" in refusal.text
    assert refused(rig.say("i3", asked(rig.run(2, "h"), "f"))) == ("call_circle", 409), "from wherever it begins"


def test_a_version_beside_may_call_back_too() -> None:
    served = [spec("f", calls=("g",)), spec("g"), m.FunctionSpec(**_fields("g@2"), calls=("f",))]
    rig = loaded(*served)
    assert refused(rig.say("i1", asked(rig.run(1)))) == ("call_circle", 409)


def _fields(name: str) -> dict[str, Any]:
    return {"name": name, "version": 2, "entry": "f.py", "snapshot": "s"}


def test_another_tenants_wishes_make_no_circle() -> None:
    rig = loaded(spec("f", calls=("g",)), spec("g", calls=("h",)), spec("h", calls=("f",), tenant="other"))
    one(rig.say("i1", asked(rig.run(1))), e.BeginCall)


# --- when it ends


@pytest.mark.parametrize("end", ["answer", "leave", "time", "death", "refusal"])
def test_a_call_ends_with_its_request(end: str) -> None:
    """It waits for a GPU, and is dropped."""
    rig, ticket = calling(timeout_ms=3000)
    rig.say("i1", asked(ticket))
    waits = one(arrived(rig, ("i1", 1)), m.Acquire).request
    match end:
        case "answer":
            actions = answered(rig, "i1", ticket)
        case "leave":
            actions = rig.do(e.RequesterLeft(1))
        case "refusal":
            actions = rig.say("i1", m.Raised(request=ticket, code="bad_json", text=""))
        case "time":
            actions = rig.after(3.1)
        case _:
            actions = rig.do(e.InstanceExited("i1", "exited"))
    assert 50 in [each.request for each in said(actions, e.Drop)]
    assert waits in [each.request for each in said(actions, m.Release)]
    rig.do(e.CallOver("i1", 1))


def test_one_that_is_not_submitted_yet_ends_when_it_is() -> None:
    rig, ticket = calling()
    rig.say("i1", asked(ticket))
    assert not said(answered(rig, "i1", ticket), e.Drop)
    actions = arrived(rig, ("i1", 1))
    assert one(actions, e.Drop).request == 50
    rig.do(e.CallOver("i1", 1))


def test_what_is_left_is_dropped_and_the_caller_goes_on() -> None:
    rig, ticket = calling()
    rig.say("i1", asked(ticket))
    arrived(rig, ("i1", 1))
    assert one(rig.say("i1", m.LeaveCall(number=1)), e.Drop).request == 50
    assert rig.say("i1", m.LeaveCall(number=1)) == rig.say("i1", m.LeaveCall(number=77)) == []
    rig.do(e.CallOver("i1", 1))
    one(rig.say("i1", asked(ticket, number=2)), e.BeginCall)


def test_calls_of_calls_end_too() -> None:
    rig = loaded(spec("f", calls=("g",)), spec("g", calls=("h",)), spec("h"))
    ticket = rig.run(1)
    rig.say("i1", asked(ticket))
    second = one(arrived(rig, ("i1", 1)), m.Acquire).request
    rig.hear(m.Granted(request=second, lease=lease(2), wake_nbytes=0))
    rig.say("i2", asked(second, "h"))
    arrived(rig, ("i2", 1), "h", 51)
    assert [each.request for each in said(rig.do(e.RequesterLeft(1)), e.Drop)] == [1, 50, 51]


def test_a_request_that_runs_again_calls_again() -> None:
    """What it had called before its GPU was lost, nobody waits for."""
    rig, ticket = calling(idempotent=True)
    rig.say("i1", asked(ticket))
    arrived(rig, ("i1", 1))
    rig.hear(m.LeaseLost(request=ticket))
    actions = rig.say("i1", m.Raised(request=ticket, code="executor_lost", text=""))
    assert [each.request for each in said(actions, e.Drop)] == [50]
    again = one(actions, m.Acquire).request
    rig.hear(m.Granted(request=again, lease=lease(3), wake_nbytes=0))
    assert refused(rig.say("i1", asked(ticket, number=2))) == ("cancelled", 503), "that is its old ticket"
    one(rig.say("i1", asked(again, number=3)), e.BeginCall)


def test_a_call_that_fails_is_no_failure_of_its_caller() -> None:
    rig, ticket = calling()
    rig.say("i1", asked(ticket))
    acquire = one(arrived(rig, ("i1", 1)), m.Acquire)
    refusal = m.Failure(code="gpus_full", status=507, text="")
    fails_with(rig.hear(m.Refused(request=acquire.request, failure=refusal)), 50, "gpus_full", 507)
    rig.do(e.CallOver("i1", 1))
    assert one(answered(rig, "i1", ticket), e.Answer).request == 1


def test_a_deploy_that_would_close_a_circle_is_refused() -> None:
    rig = loaded(spec("f", calls=("g",)), spec("g", calls=("h",)), spec("h"))
    for names, way in ((("f",), "'h' calls 'f' calls 'g' calls 'h'"), (("x", "g"), "'h' calls 'g' calls 'h'")):
        settled = one(rig.do(e.DeployAsked(1, spec("h", calls=names))), e.Settled)
        assert settled.failure.code == "call_circle"
        assert way in settled.failure.text
    assert not said(rig.do(e.DeployAsked(2, spec("h", calls=("x",)))), e.Settled), "nobody is called x yet"
