"""The router's policy on who may load: places of served functions, of new ones, and each tenant's part."""

from typing import Any

import pytest
from router_rig import Rig, loaded, one, said, spec

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.places import HELD_S
from dormouse.core.decisions.requests.state import InstanceState
from dormouse.router.admin import overview
from dormouse.schemas import messages as m

YEAR_MS = 365 * 86_400_000


def starts(actions: list[e.Action]) -> list[str]:
    return [each.spec.name for each in said(actions, e.Start)]


def many(*specs: m.FunctionSpec, **settings_: Any) -> Rig:
    return Rig(*specs, one_tenant=False, **settings_)


def test_deploys_that_do_not_end_keep_nothing_that_is_served_from_coming_back() -> None:
    rig = loaded(spec("served"))
    for number in range(3):
        rig.do(e.DeployAsked(number, spec(f"holds{number}", load_timeout_ms=YEAR_MS)))
    assert starts(rig.after(3 * HELD_S)) == [], "one tenant's loads do not outgrow its part"
    rig.do(e.InstanceExited("i1", "died"))
    assert starts(rig.after(1)) == ["served"]


def test_what_is_served_keeps_no_deploy_from_loading() -> None:
    rig = Rig(spec("a", load_timeout_ms=YEAR_MS), spec("b", load_timeout_ms=YEAR_MS))
    assert starts(rig.do(e.DeployAsked(1, spec("new")))) == ["new"]


@pytest.mark.parametrize("loads", [2, 3, 8])
def test_a_tenant_has_part_of_the_places_of_either_kind(loads: int) -> None:
    part = loads // 2
    served = [spec(f"a{number}", tenant="a", load_timeout_ms=YEAR_MS) for number in range(loads)]
    rig = many(*served, spec("b", tenant="b"), loads=loads)
    assert sorted(starts(rig.last)) == sorted([*(f"a{number}" for number in range(part)), "b"])
    deploys = [starts(rig.do(e.DeployAsked(number, spec(f"n{number}", tenant="a")))) for number in range(loads)]
    assert deploys == [[f"n{number}"] if number < part else [] for number in range(loads)]
    assert starts(rig.do(e.DeployAsked(99, spec("own", tenant="b")))) == ["own"]


def test_a_tenant_waits_behind_those_that_others_hold_for_so_long_and_no_longer() -> None:
    rig = many(loads=2)
    for number, tenant in enumerate("aabbc"):
        rig.do(e.DeployAsked(number, spec(f"{tenant}{number}", tenant=tenant, load_timeout_ms=YEAR_MS)))
    assert sorted(each.spec.name for each in rig.policy.picture.instances.values()) == ["a0", "b2"]
    assert starts(rig.after(HELD_S - 0.1)) == []
    assert starts(rig.after(0.1)) == ["c4"], "and a and b have no more than their parts"


def test_with_one_place_a_tenant_waits_for_no_longer() -> None:
    rig = many(spec("a", tenant="a"), spec("b", tenant="b"), loads=1)
    assert starts(rig.last) == ["a"]
    assert starts(rig.after(HELD_S)) == ["b"]


def test_a_tenant_has_part_of_the_extra_instances() -> None:
    specs = [spec(name, tenant=name[0], stateless=True, deadline_ms=1) for name in ("a1", "a2", "b1")]
    rig = many(*specs, loads=8, gpus=9, extra_instances=2)
    for number in (1, 2, 3):
        rig.load(f"i{number}")
    started = []
    for number, name in enumerate(("a1", "a2", "b1"), 1):
        rig.policy.picture.functions[name].run_s = 1.0
        rig.run(number, name)
        started += starts(rig.arrive(10 + number, name))
    assert started == ["a1", "b1"]


def test_no_load_lasts_longer_than_the_node_allows() -> None:
    rig = Rig(spec(load_timeout_ms=YEAR_MS))
    known = rig.policy.picture.functions["f"].spec
    assert known.load_timeout_ms == 3_600_000, "it was deployed before the node had this limit"
    rig.say("i1", m.Importing(confinement=""))
    for _ in range(59):
        rig.after(60)
        assert rig.say("i1", m.LoadProgress()) == []
    actions = rig.after(60)
    assert one(actions, e.Kill).instance == "i1"
    assert "limits.load_timeout_ms" in rig.policy.picture.functions["f"].failure.text  # type: ignore[union-attr]


def test_what_loads_and_what_waits_for_a_place_is_listed() -> None:
    rig = many(spec("served", tenant="a", load_timeout_ms=2000), loads=1)
    rig.after(1.5)
    rig.say("i1", m.LoadProgress())
    for number in (1, 2):
        rig.do(e.DeployAsked(number, spec(f"new{number}", tenant="b")))
    rig.now_s += 1.0
    rows = overview.loads(rig.policy.picture, rig.now_s)
    assert rows[0] == {
        "function": "served",
        "version": 1,
        "tenant": "a",
        "for": "served",
        "instance": "i1",
        "since_ms": 2500,
        "silent_ms": 1000,
        "load_timeout_ms": 2000,
        "ends_within_ms": 1000,
    }
    shown = [(row["function"], row["tenant"], row["for"], row["instance"], row["since_ms"]) for row in rows[1:]]
    assert shown == [("new1", "b", "deploy", "i2", 1000), ("new2", "b", "deploy", None, None)]


def test_what_runs_anything_is_busy_though_it_has_room_for_more() -> None:
    rig = loaded(spec(concurrency=4, stateless=True))
    (function,) = rig.policy.picture.functions.values()
    assert overview.state(rig.policy.picture, function) == "idle"
    rig.arrive()
    assert rig.state("i1") is InstanceState.IDLE
    rows = overview.functions(rig.policy.picture, {}, lambda name, tenant: {}, rig.now_s)
    assert [(row["state"], row["running"]) for row in rows] == [("busy", 1)]
