"""The router's policy on functions of whose commands executors die: a script per rule (test_router_in_any_order.py
has all of them at random).
"""

from router_rig import Rig, fails_with, lease, loaded, one, said, spec

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.quarantine import BLAME_WINDOW_S
from dormouse.schemas import messages as m

SEGV = "a command of it ended the GPU's process by SIGSEGV"


def quarantined() -> Rig:
    rig = loaded(spec(), spec("g"))
    rig.do(e.Blamed("i1", SEGV))
    rig.now_s += 60
    rig.do(e.Blamed("i1", SEGV))
    return rig


def test_d4_a_function_blamed_twice_in_ten_minutes_is_quarantined() -> None:
    rig = loaded(spec(), spec("g"))
    rig.run(1)
    rig.arrive(2)
    (note,) = rig.do(e.Blamed("i1", SEGV))
    assert isinstance(note, e.LogNote), "once is the machine's fault, perhaps"
    assert SEGV in note.text
    rig.now_s += BLAME_WINDOW_S - 1
    rig.policy.picture.timers.clear()
    actions = rig.do(e.Blamed("i1", SEGV))
    assert one(actions, m.Quarantined).name == "f"
    assert one(actions, e.Kill).instance == "i1"
    failed = {fail.request: fail.failure for fail in said(actions, e.Fail)}
    assert {number: (each.code, each.status) for number, each in failed.items()} == {
        1: ("quarantined", 503),
        2: ("quarantined", 503),
    }
    assert "SIGSEGV" in failed[2].text
    assert "dormouse restart f" in failed[2].text
    assert said(actions, e.Start) == []
    rig.do(e.InstanceExited("i1", "was killed by SIGKILL"))
    fails_with(rig.arrive(3), 3, "quarantined", 503)
    assert rig.after(3600) == [], "it is not started by itself"
    assert rig.policy.missing() == [], "the node is ready without it"
    rig.run(4, "g")  # others go on


def test_d4_two_deaths_far_apart_are_two_accidents() -> None:
    rig = loaded()
    rig.do(e.Blamed("i1", SEGV))
    rig.now_s += BLAME_WINDOW_S
    assert said(rig.do(e.Blamed("i1", SEGV)), m.Quarantined) == []
    assert said(rig.do(e.Blamed("i1", SEGV)), m.Quarantined) != []


def test_d4_an_instance_that_is_gone_is_still_known() -> None:
    """Its request ran out of time and it was killed; the executor, which could not give the lease back, died later."""
    rig = loaded(spec(timeout_ms=1000))
    for instance in ("i1", "i2"):
        rig.run()
        rig.after(1.0)
        rig.do(e.InstanceExited(instance, "was killed by SIGKILL"))
        actions = rig.do(e.Blamed(instance, "lease not given back"))
        if instance == "i1":
            rig.load("i2")
    assert one(actions, m.Quarantined).name == "f"


def test_d4_a_version_is_not_blamed_for_the_one_before() -> None:
    rig = loaded()
    rig.run()
    rig.do(e.DeployAsked(7, spec()))
    rig.load("i2")
    rig.hear(m.Kept(name="f"))
    for _ in range(3):
        assert rig.do(e.Blamed("i1", SEGV)) == []


def test_d4_deploy_and_restart_lift_it() -> None:
    rig = quarantined()
    actions = rig.do(e.RestartAsked(7, "f"))
    assert one(actions, m.Lifted).name == "f"
    assert one(actions, e.Settled).failure is None
    assert one(actions, e.Start).spec.name == "f"
    rig.load("i3")
    rig.run(5)
    assert said(rig.do(e.Blamed("i3", SEGV)), m.Quarantined) == [], "it begins anew"

    rig = quarantined()
    rig.do(e.DeployAsked(7, spec()))
    rig.load("i3")
    rig.hear(m.Kept(name="f"))
    rig.run(5)


def test_a_restart_replaces_instances_and_keeps_requests() -> None:
    rig = loaded()
    ticket = rig.run(1)
    assert rig.arrive(2) == []
    actions = rig.do(e.RestartAsked(7, "f"))
    assert said(actions, m.Lifted) == []
    assert one(actions, e.Start).instance == "i2"
    assert one(rig.say("i1", m.Returned(request=ticket, body=b"", nbytes=0)), e.Answer).request == 1
    assert one(rig.load("i2"), m.Acquire).instance == "i2"
    assert one(rig.do(e.RestartAsked(8, "nobody")), e.Settled).failure.status == 404
    rig.do(e.RemoveAsked(9, "f"))
    assert one(rig.do(e.RestartAsked(10, "f")), e.Settled).failure.code == "change_in_progress"


def test_d4_a_deploy_whose_load_ends_executors_fails_and_the_old_version_goes_on() -> None:
    rig = loaded()
    rig.do(e.DeployAsked(7, spec()))
    for instance in ("i2", "i3"):
        rig.say(instance, m.Importing(confinement=""))
        ticket = one(rig.say(instance, m.NeedLease(version=0)), m.Acquire).request
        rig.hear(m.Granted(request=ticket, lease=lease(), wake_nbytes=0))
        rig.hear(m.LeaseLost(request=ticket))
        rig.say(instance, m.LoadFailed(code="executor_lost", text=""))
        actions = rig.do(e.Blamed(instance, SEGV))
        rig.do(e.InstanceExited(instance, "exited"))
    settled = one(actions, e.Settled)
    assert (settled.failure.code, settled.failure.status) == ("load_failed", 422)
    assert "SIGSEGV" in settled.failure.text
    assert said(rig.after(3600), e.Start) == []
    rig.run(1)


def test_d4_a_quarantine_of_the_catalogue_holds_from_the_start() -> None:
    rig = Rig(known=False)
    actions = rig.hear(m.Catalogue(functions=[spec(), spec("g")], held={"f": "it ended a GPU's process"}))
    assert [start.spec.name for start in said(actions, e.Start)] == ["g"]
    assert said(actions, m.Quarantined) == []
    fails_with(rig.arrive(1), 1, "quarantined", 503)
    rig.load("i1")
    assert rig.policy.missing() == []
    rig.do(e.ForkingChanged(False))
    rig.do(e.ZygoteLost())
    assert [start.spec.name for start in said(rig.do(e.ForkingChanged(True)), e.Start)] == ["g"]


def test_d4_a_function_may_be_removed_from_quarantine() -> None:
    rig = quarantined()
    rig.do(e.RemoveAsked(7, "f"))
    rig.hear(m.Kept(name="f"))
    assert one(rig.do(e.InstanceExited("i1", "was killed")), e.Settled).failure is None
    fails_with(rig.arrive(1), 1, "unknown_function", 404)


def test_d4_a_second_chance_is_none_in_quarantine() -> None:
    """An idempotent request whose executor died is run again, but not by a function that was quarantined for it."""
    rig = loaded(spec(idempotent=True))
    ticket = rig.run(1)
    rig.do(e.Blamed("i1", SEGV))
    rig.hear(m.LeaseLost(request=ticket))
    fails_with(rig.do(e.Blamed("i1", SEGV)), 1, "quarantined", 503)


def test_sessions_are_nobodys() -> None:
    rig = Rig()
    rig.do(e.SessionOpened("s1", "run:x"))
    assert rig.do(e.Blamed("s1", SEGV)) == rig.do(e.Blamed("never was", SEGV)) == []
