"""A tenant sees its own functions; of others' it is told nothing, by no word."""

from typing import Any

import pytest
from router_rig import Rig, spec

from dormouse.core.decisions.requests import events as e
from dormouse.router.access import tenancy
from dormouse.router.access.access import EVERYTHING, Caller
from dormouse.router.admin import overview
from dormouse.schemas import messages as m


def caller(tenant: str | None = "a", functions: tuple[str, ...] = ("*",)) -> Caller:
    return Caller("key 1", None, "1.2.3.4:5", EVERYTHING, tenant, functions)


@pytest.fixture
def rig() -> Rig:
    rig = Rig(spec("mine", tenant="a"), spec("yours", tenant="b"))
    rig.policy.picture.one_tenant = False
    return rig


def test_what_is_anothers_is_not_there(rig: Rig) -> None:
    p = rig.policy.picture
    assert [tenancy.sees(caller(), p, name) for name in ("mine", "yours", "nobodys")] == [True, False, False]
    assert [tenancy.sees(caller(None), p, name) for name in ("mine", "yours", "nobodys")] == [True, True, False]
    assert not tenancy.sees(caller(functions=("other-*",)), p, "mine")


def test_a_first_version_on_its_way_is_its_tenants(rig: Rig) -> None:
    rig.do(e.DeployAsked(9, spec("new", tenant="a")))
    p = rig.policy.picture
    assert tenancy.sees(caller("a"), p, "new")
    assert not tenancy.sees(caller("b"), p, "new")
    refusal = tenancy.deploy_refusal(caller("b"), p, spec("new", tenant="b"))
    assert refusal is not None
    assert (refusal.status, refusal.code) == (409, "name_taken")


@pytest.mark.parametrize(
    ("who", "wanted", "code"),
    [
        (caller("a"), spec("mine", tenant="a"), None),
        (caller("a"), spec("new", tenant="a"), None),
        (caller("a"), spec("new", tenant="b"), "forbidden"),
        (caller("a"), spec("yours", tenant="a"), "name_taken"),
        (caller("a", ("chat-*",)), spec("chat-1", tenant="a"), None),
        (caller("a", ("chat-*",)), spec("mine", tenant="a"), "forbidden"),
        (caller(None), spec("yours", tenant="b"), None),
        (caller(None), spec("yours", tenant="a"), None),
    ],
)
def test_what_a_key_may_deploy(rig: Rig, who: Caller, wanted: m.FunctionSpec, code: str | None) -> None:
    refusal = tenancy.deploy_refusal(who, rig.policy.picture, wanted)
    assert (refusal.code if refusal is not None else None) == code
    if refusal is not None and who.tenant == wanted.tenant == "a":
        assert "'b'" not in refusal.text


def test_d1_a_tenant_has_so_many_functions_and_no_more(rig: Rig) -> None:
    """With those on their way; a new version of one is none more."""
    p = rig.policy.picture
    rig.do(e.DeployAsked(9, spec("new", tenant="a")))
    assert tenancy.deploy_refusal(caller(), p, spec("third", tenant="a"), 3) is None
    assert tenancy.deploy_refusal(caller(), p, spec("mine", tenant="a"), 2) is None
    assert tenancy.deploy_refusal(caller("b"), p, spec("third", tenant="b"), 2) is None
    refusal = tenancy.deploy_refusal(caller(), p, spec("third", tenant="a"), 2)
    assert refusal is not None
    assert (refusal.status, refusal.code) == (507, "functions_full")
    assert "tenant 'a' has 2 functions" in refusal.text
    p.one_tenant = True
    assert tenancy.deploy_refusal(caller("b"), p, spec("third", tenant="b"), 2).code == "tenant_refused"  # type: ignore[union-attr]


def test_a_node_of_another_tenant_does_not_say_whose_it_is(rig: Rig) -> None:
    p = rig.policy.picture
    p.one_tenant = True
    refusal = tenancy.deploy_refusal(caller("c"), p, spec("new", tenant="c"))
    assert refusal is not None
    assert (refusal.status, refusal.code) == (403, "tenant_refused")
    assert "'a'" not in refusal.text
    assert "'b'" not in refusal.text


STATUS: dict[str, Any] = {
    "node": {"name": "n", "missing": [], "run": "/run/x", "peers": {"router": 1}},
    "loads": [{"function": "mine", "tenant": "a"}, {"function": "yours", "tenant": "b"}],
    "functions": {
        "mine": {"tenant": "a", "queued": 2, "shared_with": ["other", "yours"], "last_eviction": {"for": "yours"}},
        "other": {"tenant": "a", "queued": 1, "shared_with": [], "last_eviction": None},
        "yours": {"tenant": "b", "queued": 4},
    },
    "sessions": [{"session": "3-1", "program": "yours.py"}],
    "gpus": {"0": {"resident": ["mine", "yours"]}},
    "store": {"host_nbytes": 5},
    "waiting": 7,
    "waits": {"oldest": [{"function": "mine", "reason": "yours has the only GPU"}], "others": {"late": 3}},
    "tenants": {"a": {"functions": 2, "share": 1.0}, "b": {"functions": 1, "share": 2.0}},
}


def test_a_status_is_the_tenants_own() -> None:
    assert tenancy.part_of(caller(None), STATUS) is STATUS
    shown = tenancy.part_of(caller("a"), STATUS)
    assert "yours" not in str(shown)
    assert list(shown["functions"]) == ["mine", "other"]
    assert shown["functions"]["mine"]["shared_with"] == ["other"]
    assert shown["waiting"] == 3
    assert list(shown["tenants"]) == ["a"]
    assert set(shown) == set(STATUS), "what prints a whole one prints this"
    assert list(tenancy.part_of(caller("a", ("oth*",)), STATUS)["functions"]) == ["other"]


def test_who_shares_is_bounded() -> None:
    """Of 150 functions with one backbone each shares with 149."""
    names = [f"f-{number:03}" for number in range(150)]
    rows = {name: {"tenant": "a", "shared_with": [each for each in names if each != name]} for name in names}
    told = overview.bounded(tenancy.part_of(caller(), STATUS | {"functions": rows}))["functions"]
    assert {(len(row["shared_with"]), row["shared_count"]) for row in told.values()} == {(20, 149)}
    assert told["f-001"]["shared_with"] == [names[0], *names[2:21]]
    assert overview.bounded(STATUS)["functions"]["yours"]["shared_count"] == 0


def test_a_tenant_without_a_quota_does_not_pin(rig: Rig) -> None:
    p = rig.policy.picture
    deployer = Caller("key 1", None, "1.2.3.4:5", frozenset({"deploy"}), "a")
    refusal = tenancy.pin_refusal(deployer, p, "mine", {"b"})
    assert refusal is not None
    assert (refusal.status, refusal.code) == (403, "scope_missing")
    assert tenancy.pin_refusal(deployer, p, "mine", {"a"}) is None, "a pin does not beat a quota"
    assert tenancy.pin_refusal(caller("a"), p, "mine", {}) is None, "with admin"
    p.one_tenant = True
    assert tenancy.pin_refusal(deployer, p, "mine", {}) is None, "there are no others"
