"""The router's policy on instances that die, talk garbage, wear out, or have a damaged model: a script per rule."""

import pytest
from router_rig import Rig, damaged, fails_with, loaded, one, said, spec

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.lives import BACKOFF_S, WORN, WORN_WINDOW_S
from dormouse.schemas import messages as m


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


def test_who_says_first_that_its_model_is_damaged_gets_no_other_request() -> None:
    """Its executor and the store both find it; whichever of the two is heard first."""
    rig = loaded()
    ticket = rig.run(1)
    rig.arrive(2)
    actions = rig.say("i1", m.Raised(request=ticket, code="model_damaged", text="segment 7"))
    fails_with(actions, 1, "model_damaged", 503)
    assert (said(actions, m.Acquire), one(actions, e.Kill).instance) == ([], "i1")
    assert rig.hear(m.EndInstance(instance="i1", failure=damaged())) == []
    assert one(rig.after(BACKOFF_S[0]), e.Start).instance == "i2"
    assert one(rig.load("i2"), m.Acquire).instance == "i2"


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
