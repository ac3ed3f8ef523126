"""What tenants may ask of their functions: requests and tokens per second; and what is said to those who wait."""

import math

import pytest
from router_rig import Rig, spec

from dormouse.controller.overshares import TELL_S, OverShares
from dormouse.core.config import TenantSection
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.scheduling.shares import Shares
from dormouse.core.nodefile import parse_config
from dormouse.core.rate import Bucket
from dormouse.router.access.limits import TOKENS_S, TenantLimits
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError


def test_a_bucket_that_owes() -> None:
    bucket = Bucket.full(rate_s=2.0, burst=4.0, now_s=0.0)
    bucket.charge(0.0, 10.0)
    assert bucket.wait_s(0.0, 0.0) == 3.0
    assert bucket.take(0.0) == 3.5
    assert bucket.wait_s(3.0, 0.0) == 0.0
    assert bucket.take(3.5) == 0.0


def test_requests_per_second() -> None:
    limits = TenantLimits({"slow": TenantSection(requests_s=2.0), "seldom": TenantSection(requests_s=0.1)})
    assert [limits.enter("slow", 10.0) for _ in range(2)] == [None, None]
    refusal = limits.enter("slow", 10.0)
    assert refusal is not None
    assert (refusal.status, refusal.code, refusal.headers) == (429, "rate_limited", ((b"retry-after", b"1"),))
    assert "tenant 'slow' may send 2 requests a second ([tenants.slow] requests_s)" in refusal.text
    assert limits.enter("slow", 10.5) is None
    assert limits.enter("seldom", 10.0) is None, "less than one a second, and one at once"
    later = limits.enter("seldom", 11.0)
    assert later is not None
    assert later.headers == ((b"retry-after", b"9"),)
    assert all(limits.enter("free", 10.0) is None for _ in range(1000)), "who is not named has no limit"


def test_tokens_per_second() -> None:
    limits = TenantLimits({"lab": TenantSection(tokens_s=100.0), "shop": TenantSection(requests_s=5.0)})
    assert limits.enter("lab", 0.0) is None
    limits.used([("lab", round(100 * TOKENS_S)), ("shop", 10**9), ("nobody", 1)], 0.0)
    assert limits.enter("lab", 0.0) is None, "what it had saved"
    limits.used([("lab", 250)], 0.0)
    refusal = limits.enter("lab", 0.0)
    assert refusal is not None
    assert (refusal.status, refusal.headers) == (429, ((b"retry-after", b"3"),))
    assert "tenant 'lab' has used 250 tokens more than its 100 a second ([tenants.lab] tokens_s)" in refusal.text
    assert limits.enter("lab", 2.6) is None
    assert limits.enter("shop", 0.0) is None


def test_a_tenant_at_its_rate_is_not_refused() -> None:
    """Tokens are told in batches, some seconds late."""
    limits = TenantLimits({"lab": TenantSection(tokens_s=100.0)})
    for second in range(0, 600, 2):
        assert limits.enter("lab", float(second)) is None
        limits.used([("lab", 200)], second + 2.0)


@pytest.mark.parametrize("key", ["requests_s", "tokens_s"])
@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf])
def test_rates_that_cannot_be(key: str, rate: float) -> None:
    with pytest.raises(ConfigError, match=rf"tenants.a.{key} is {rate:g}; write how many per second"):
        parse_config({"tenants": {"a": {key: rate}}})


def test_host_memory_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"tenants\.a\.host: 'much' is not a size"):
        parse_config({"tenants": {"a": {"host": "much"}}})


# --- what is said


def told(actions: list[e.Action]) -> str:
    return next(action.failure.text for action in actions if isinstance(action, e.Fail))


def test_who_waits_for_others_shares_is_told_so() -> None:
    rig = Rig(spec(max_queue=1, tenant="flood", timeout_ms=5000), spec("g", tenant="calm", max_queue=1))
    rig.hear(m.OverShare(tenants=["flood"]))
    rig.arrive(1)
    why = "because tenant 'flood' is over its share of the GPUs' time and others wait"
    assert why in told(rig.arrive(2))
    rig.arrive(3, "g")
    assert "share" not in told(rig.arrive(4, "g"))
    assert why in told(rig.after(5.1))
    rig.hear(m.OverShare(tenants=[]))
    rig.arrive(5)
    assert "share" not in told(rig.arrive(6))


def flooded(shares: dict[str, float]) -> tuple[Rig, list[str]]:
    """A node with room for 40 requests after 60 of one tenant, and what those of them were told that were refused."""
    floods = [spec(f"f{number}", tenant="flood", max_queue=100) for number in range(3)]
    rig = Rig(*floods, spec("g", tenant="calm"), max_queue=40)
    rig.policy.picture.shares = shares
    answers = [rig.arrive(number, f"f{number % 3}") for number in range(60)]
    return rig, [told(answer) for answer in answers if any(isinstance(action, e.Fail) for action in answer)]


def test_a_flood_leaves_others_their_part_of_the_nodes_queue() -> None:
    """Half of it is anybody's; here a quarter is its own."""
    rig, refused = flooded({"calm": 3.0})
    assert len(refused) == 60 - 20
    assert "10 requests are waiting for tenant 'flood' already" in refused[0]
    for number in range(100, 120):
        assert not any(isinstance(action, e.Fail) for action in rig.arrive(number, "g"))


def test_without_shares_a_flood_takes_all_of_it() -> None:
    rig, refused = flooded({})
    assert len(refused) == 60 - 40
    assert "waiting for this node" in told(rig.arrive(100, "g"))


class SomeShares(Shares):
    def __init__(self) -> None:
        super().__init__({})
        self.over_now: list[str] = []

    def over_by_s(self, now_s: float) -> dict[str, float]:
        return dict.fromkeys(self.over_now, 1.0)


def test_it_is_told_when_it_changes_and_not_too_often() -> None:
    said: list[m.OverShare] = []
    shares, over = SomeShares(), OverShares(said.append)
    shares.over_now = ["a"]
    over.look(shares, 0.0)
    assert said == [], "nobody has a share"
    shares.known([("a", 1.0)])
    over.look(shares, 1.0)
    over.look(shares, 2.0)
    shares.over_now = []
    over.look(shares, 1.0 + TELL_S / 2)
    over.look(shares, 1.0 + TELL_S)
    assert said == [m.OverShare(tenants=["a"]), m.OverShare(tenants=[])]
