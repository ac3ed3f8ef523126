"""Two versions of a function side by side: exact shares, what shares come to, and what may change meanwhile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_rig import Rig, lease, loaded, one, said, spec

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import splits
from dormouse.core.decisions.requests.splits import WantedShares
from dormouse.core.decisions.requests.state import Split
from dormouse.core.names import base_of
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError


def _split(share: int) -> Rig:
    """Version 1 has the name f, version 2 is beside it."""
    rig = loaded(spec("f"), spec("f@2"))
    rig.do(e.Shared("f@2", share))
    return rig


def _picked(rig: Rig, requests: int) -> str:
    """One letter a request: which version it is for, a for the one with the name."""
    names = [splits.picked(rig.policy.picture, "f") for _ in range(requests)]
    return "".join("b" if name == "f@2" else "a" for name in names)


@given(st.integers(0, 100), st.integers(0, 250))
def test_of_any_hundred_requests_the_version_beside_has_its_share(share: int, before: int) -> None:
    rig = _split(share)
    _picked(rig, before)
    assert _picked(rig, 100).count("b") == share


def test_shares_are_spread_evenly() -> None:
    assert _picked(_split(10), 20) == "aaaaaaaaabaaaaaaaaab"
    assert _picked(_split(50), 6) == "ababab"
    assert _picked(_split(75), 8) == "abbbabbb"
    assert _picked(_split(0), 4) == "aaaa"


def test_a_request_that_names_a_version_gets_it_and_takes_no_turn() -> None:
    p = (rig := _split(50)).policy.picture
    assert [splits.picked(p, "f@1"), splits.picked(p, "f@2"), splits.picked(p, "f@3")] == ["f", "f@2", "f@3"]
    assert _picked(rig, 4) == "abab"
    assert [splits.named(p, name) for name in ("f", "f@1", "f@2", "f@01", "g@1")] == ["f", "f", "f@2", "f@01", "g@1"]


def test_a_version_that_cannot_answer_has_no_part() -> None:
    rig = _split(50)
    rig.policy.picture.functions["f@2"].quarantine = "it ended executors"
    assert _picked(rig, 4) == "aaaa"
    rig = Rig(spec("f"), spec("f@2"), loads=3)
    rig.do(e.Shared("f@2", 50))
    rig.load("i1")
    rig.say("i2", m.Importing(confinement=""))
    assert _picked(rig, 4) == "abab", "it loads"
    rig.say("i2", m.LoadFailed(code="load_failed", text="no"))
    assert _picked(rig, 4) == "aaaa"


def test_shares_are_those_of_the_catalogue_after_a_restart() -> None:
    rig = Rig(known=False)
    rig.hear(m.Catalogue(functions=[spec("f"), spec("f@2"), spec("f@3"), spec("g")], traffic={"f@2": 30, "f@3": 0}))
    assert rig.policy.picture.splits == {"f": Split("f@2", 30)}
    assert _picked(rig, 10).count("b") == 3


@pytest.mark.parametrize(
    ("asked", "comes_to"),
    [
        ({4: 10}, WantedShares(3, 4, 10)),
        ({4: 10, 3: 90}, WantedShares(3, 4, 10)),
        ({4: 0}, WantedShares(3, 4, 0)),
        ({4: 100}, WantedShares(4, None, 0)),
        ({4: 100, 3: 0}, WantedShares(4, 3, 0)),
        ({3: 100}, WantedShares(3, None, 0)),
        ({3: 100, 4: 0}, WantedShares(3, 4, 0)),
    ],
)
def test_what_shares_come_to(asked: dict[int, int], comes_to: WantedShares) -> None:
    assert splits.wanted(3, asked) == comes_to


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, "no version is named"),
        ({3: 50}, "50 = 50 per cent; write shares that make 100"),
        ({3: 50, 4: 60}, "50 [+] 60 = 110"),
        ({4: 101}, "a share is 101"),
        ({4: 50, 5: 50}, "version 3 is what the name stands for"),
        ({3: 50, 4: 25, 5: 25}, "at most two versions"),
        ({4: 40, 5: 40}, "at most two versions"),
    ],
)
def test_shares_that_come_to_nothing(asked: dict[int, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        splits.wanted(3, asked)


def _kept(rig: Rig, name: str, instance: str, version: int) -> None:
    """A version is deployed all the way."""
    rig.do(e.DeployAsked(1, spec(name), version=version))
    rig.load(instance)
    rig.hear(m.Kept(name=name))


def test_a_version_beside_is_deployed_and_ends() -> None:
    rig = loaded()
    _kept(rig, "f@7", "i2", 7)
    p = rig.policy.picture
    assert (p.functions["f@7"].spec.version, splits.shares(p, "f")) == (7, {1: 100, 7: 0}), "no share yet"
    rig.do(e.Shared("f@7", 20))
    assert splits.shares(p, "f") == {1: 80, 7: 20}
    _kept(rig, "f", "i3", 9)
    assert splits.shares(p, "f") == {9: 80, 7: 20}, "a new deploy leaves the other its share"
    refused = one(rig.do(e.RemoveAsked(5, "f")), e.Settled)
    assert refused.failure.code == "change_in_progress", "first what is beside it"
    rig.do(e.RemoveAsked(6, "f@7"))
    rig.hear(m.Kept(name="f@7"))
    assert (splits.shares(p, "f"), p.splits) == ({9: 100}, {})
    assert splits.shares(p, "g") == {}


def test_one_change_at_a_time_of_a_function_and_its_versions() -> None:
    rig = loaded()
    assert one(rig.do(e.DeployAsked(1, spec("g@2"), version=2)), e.Settled).failure.code == "unknown_function"
    rig.do(e.DeployAsked(2, spec("f@2"), version=2))
    for name in ("f", "f@2", "f@3"):
        assert one(rig.do(e.DeployAsked(3, spec(name))), e.Settled).failure.code == "change_in_progress"
    assert said(rig.do(e.DeployAsked(4, spec("g"))), e.Settled) == [], "of others it does not matter"
    rig.say("i2", m.LoadFailed(code="load_failed", text="no"))
    assert rig.policy.picture.splits == {}
    assert [base_of(name) for name in splits.besides(rig.policy.picture, "f")] == []
    rig.do(e.DeployAsked(5, spec("f")))
    assert splits.besides(rig.policy.picture, "f") == []


def test_which_version_answers_is_that_of_the_instance() -> None:
    """A request that waits while a new version takes over is answered by that."""
    rig = loaded()
    first = rig.run(1)
    rig.arrive(2)
    _kept(rig, "f", "i2", 8)
    answer = one(rig.say("i1", m.Returned(request=first, body=b"1", nbytes=0)), e.Answer)
    assert answer.timing.version == 1
    ticket = next(number for number, each in rig.policy.picture.tickets.items() if each.request == 2)
    rig.hear(m.Granted(request=ticket, lease=lease(2), wake_nbytes=0))
    assert one(rig.say("i2", m.Returned(request=ticket, body=b"1", nbytes=0)), e.Answer).timing.version == 8
