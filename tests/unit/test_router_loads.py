"""The router's policy on loads: their leases, their order, their time limits and what follows on a failure."""

import pytest
from router_rig import Rig, fails_with, failure, lease, loaded, one, said, spec

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.lives import BACKOFF_S, LONGEST_LOAD
from dormouse.schemas import messages as m


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


def test_n8_what_load_computes_is_not_counted() -> None:
    rig = Rig(spec())
    rig.say("i1", m.Importing(confinement=""))
    assert one(rig.say("i1", m.NeedLease(version=1)), m.Acquire).own
    rig = loaded(spec())
    assert not one(rig.arrive(1), m.Acquire).own
