"""The router's policy on what is deployed, replaced, removed or attached, and on readiness: a script per rule."""

import pytest
from router_rig import Rig, fails_with, failure, lease, loaded, one, said, spec

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.lives import DEPLOY_RETRIES
from dormouse.core.decisions.requests.queueing import SILENT_S
from dormouse.core.decisions.requests.state import InstanceState
from dormouse.schemas import messages as m


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
    assert "the model has 1,001 bytes and a GPU of this node 1,000 bytes" in refused.text
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
    rig.load("i2")
    busy = one(rig.do(e.RemoveAsked(9, "f")), e.Settled).failure
    assert busy.code == "change_in_progress", "it is being written, which lasts no longer than a disk does"


def test_a_removal_ends_a_deploy_that_loads_and_what_is_served() -> None:
    rig = loaded()
    rig.do(e.DeployAsked(7, spec()))
    actions = rig.do(e.RemoveAsked(8, "f"))
    assert (one(actions, e.Settled).ask, one(actions, e.Settled).failure.code) == (7, "deploy_ended")
    assert (one(actions, e.Kill).instance, one(actions, m.Removed).name) == ("i2", "f")
    assert said(rig.hear(m.Kept(name="f")), e.Settled) == []
    assert said(rig.do(e.InstanceExited("i1", "exited")), e.Settled) == [], "the memory of i2 is not free yet"
    assert one(rig.do(e.InstanceExited("i2", "exited")), e.Settled) == e.Settled(8, None, None)


def test_a_removal_ends_a_deploy_of_what_is_not_served() -> None:
    rig = Rig(loads=1)
    for number, name in enumerate(("f", "g")):  # the second one waits for a place
        rig.do(e.DeployAsked(number, spec(name)))
    for number, name, kills in ((1, "g", []), (0, "f", ["i1"])):
        actions = rig.do(e.RemoveAsked(9, name))
        assert [each.instance for each in said(actions, e.Kill)] == kills
        for each in kills:
            actions += rig.do(e.InstanceExited(each, "was killed"))
        ended, removed = said(actions, e.Settled)
        assert (ended.ask, ended.failure.code, ended.failure.status) == (number, "deploy_ended", 409)
        assert (removed.ask, removed.failure) == (9, None)
        assert said(actions, m.Removed) == []
    assert rig.policy.picture.wanted == {}
    assert one(rig.do(e.RemoveAsked(10, "f")), e.Settled).failure.code == "unknown_function"


def test_a_restart_begins_the_load_of_a_deploy_anew_and_leaves_it_beside_what_is_served() -> None:
    rig = Rig()
    rig.do(e.DeployAsked(1, spec()))
    for number in range(1, DEPLOY_RETRIES + 1):
        actions = rig.do(e.RestartAsked(2, "f"))
        assert (one(actions, e.Settled).ask, one(actions, e.Kill).instance) == (2, f"i{number}")
        assert one(actions, e.Start).instance == f"i{number + 1}"
    settled = said(rig.do(e.RestartAsked(3, "f")), e.Settled)
    assert [(each.ask, each.failure and each.failure.code) for each in settled] == [(3, None), (1, "deploy_ended")]
    rig = loaded()
    rig.do(e.DeployAsked(1, spec()))
    actions = rig.do(e.RestartAsked(2, "f"))
    assert (one(actions, e.Settled).ask, one(actions, e.Start).instance) == (2, "i3"), "beside the deploy, which loads"
    assert said(actions, e.Kill) == []


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


def test_n8_a_version_that_does_not_load_is_told_beside_the_one_that_serves() -> None:
    rig = loaded(spec())
    rig.do(e.DeployAsked(7, spec()))
    rig.say("i2", m.Importing(confinement=""))
    rig.say("i2", m.LoadFailed(code="bad_source", text="line 3"))
    function = rig.policy.picture.functions["f"]
    assert (function.spec.version, function.not_deployed) == (1, "version 2 was not deployed: line 3")
