"""Shares of the GPUs' time: who has had more than its share waits for others, and for nobody else."""

import math
import re
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.controller.recording import Recorder, Recording, RecordingHeader
from dormouse.controller.replay import replay
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.scenario import parse_scenario
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.reasons import Reasons
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.decisions.scheduling.shares import CREDIT_S, LEAD_S, PRUNE
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.core.nodefile import parse_config
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import Done, PoolStats
from dormouse.schemas.policy import ORDERS, Policy

MB = 1_000_000
ROOM = PoolStats(free_nbytes=1000 * MB, largest_nbytes=1000 * MB)


class Node:
    """One GPU, or more, on which every lease takes as long as it is told."""

    def __init__(self, shares: dict[str, float], gpus: int = 1, order: str = "effort") -> None:
        self.core = Scheduler(seed=1, revoke_s=5.0, max_waiting=10_000, policy=Policy(order=order))
        self.now_s = 0.0
        self.had_s: defaultdict[str, float] = defaultdict(float)  # by tenant
        self.began: list[str] = []  # tenants, in the order of their leases
        self._leases: list[tuple[float, ev.WakeOn]] = []
        self._requests = 0
        for gpu in range(gpus):
            self.tell(ev.ExecutorUp(gpu, 1, ROOM))
        if shares:
            self.tell(ev.SharesKnown(tuple(shares.items())))

    def deploy(self, *tenants: str) -> None:
        """Each has a function of its own name."""
        for tenant in tenants:
            self.tell(ev.InstanceKnown(tenant, tenant, tenant))
            self.tell(ev.FunctionKnown(tenant, 1.0, 0.9, 1.0, tenant))
            self.tell(ev.ModelSized(tenant, 1, MB))

    def tell(self, event: ev.Event) -> None:
        for action in self.core.handle(event, self.now_s):
            if isinstance(action, ev.WakeOn):
                self._leases.append((self.now_s, action))
                self.began.append(action.instance)
        self.core.check()

    def ask(self, tenant: str, within_s: float = 1.0) -> None:
        self._requests += 1
        self.tell(ev.Asked(self._requests, tenant, self.now_s + within_s, 1))

    def end(self, seconds: float = 0.05) -> str:
        """The oldest lease ends after so long."""
        began_s, wake = self._leases.pop(0)
        self.now_s = max(self.now_s, began_s + seconds)
        self.had_s[wake.instance] += self.now_s - began_s
        done = Done(
            serial=wake.lease.serial,
            outcome="ended",
            gpu_us=1,
            copied_nbytes=0,
            peer_nbytes=0,
            file_nbytes=0,
            resident=[(wake.instance, MB)],
            peak_activation_nbytes=0,
            version=1,
            stats=ROOM,
        )
        self.tell(ev.LeaseOver(wake.lease.gpu, 1, done))
        return wake.instance

    @property
    def busy(self) -> bool:
        return bool(self._leases)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("shares", "part"), [({"a": 1.0, "b": 1.0}, 0.5), ({"a": 3.0, "b": 1.0}, 0.75)])
def test_two_who_always_want_time_have_their_shares(order: str, shares: dict[str, float], part: float) -> None:
    node = Node(shares, order=order)
    node.deploy("a", "b")
    for _ in range(400):
        node.ask("a")
        node.ask("b")
    for _ in range(400):
        node.end()
    assert node.had_s["a"] / sum(node.had_s.values()) == pytest.approx(part, abs=0.02)


def test_shares_are_of_time_and_not_of_requests() -> None:
    node = Node({"a": 1.0, "b": 1.0})
    node.deploy("a", "b")
    for _ in range(600):
        node.ask("a")
        node.ask("b")
    for _ in range(400):
        node.end(0.3 if node.began[-1] == "a" else 0.02)
    assert node.had_s["a"] == pytest.approx(node.had_s["b"], abs=2 * (LEAD_S + 0.3))


def test_what_nobody_else_wants_is_anybodys() -> None:
    """A tenant far over its share has all of the time, and pays nothing for that afterwards."""
    node = Node({"a": 1.0, "b": 9.0})
    node.deploy("a", "b")
    for _ in range(100):
        node.ask("a")
    for _ in range(90):
        assert node.end(1.0) == "a"
    for _ in range(100):
        node.ask("b")
    before_s = dict(node.had_s)
    for _ in range(60):
        node.end(0.1)
        node.ask("a")
    a_s, b_s = (node.had_s[each] - before_s.get(each, 0.0) for each in "ab")
    assert b_s / (a_s + b_s) == pytest.approx(0.9, abs=0.05), "it does not pay for the time that was nobody's"


def test_who_comes_seldom_is_served_before_who_floods() -> None:
    node = Node({"flood": 1.0, "seldom": 1.0})
    node.deploy("flood", "seldom")
    for _ in range(1000):
        node.ask("flood", within_s=0.1)
    for _ in range(20):
        for _ in range(10):
            node.end()
        node.ask("seldom", within_s=60.0)  # its deadline alone would have it wait
        node.end()
        assert node.began[-1] == "seldom"
    assert CREDIT_S > LEAD_S


def test_the_policys_order_decides_among_those_who_have_had_about_the_same() -> None:
    node = Node({"a": 1.0, "b": 1.0})
    node.deploy("a", "b", "c")
    node.ask("c")
    for within_s, tenant in ((5.0, "a"), (4.0, "b"), (3.0, "a")):
        node.ask(tenant, within_s)
    while node.busy:
        node.end(0.01)
    assert node.began[:2] == ["c", "a"], "the first deadline of all"


def test_overdue_requests_of_a_flood_overtake_nobody() -> None:
    """Of those who have waited for too long, those come first whose tenant has not had its share."""
    node = Node({"flood": 1.0, "other": 1.0})
    node.deploy("flood", "other")
    node.tell(ev.InstanceKnown("more", "more", "flood"))
    node.tell(ev.FunctionKnown("more", 1.0, 0.9, 1.0, "flood"))
    node.ask("flood")
    node.ask("more")
    node.ask("other")
    node.now_s += 40.0
    queue = node.core._queue
    queue.shares.count(node.now_s)
    oldest = queue.overdue(node.now_s)
    assert oldest is not None
    assert oldest.tenant == "other"
    node.end(40.0)
    assert node.began == ["flood", "other"]


def test_without_shares_nothing_has_changed() -> None:
    one, other = Node({}), Node({})
    one.deploy("a", "b")
    other.deploy("a")
    other.tell(ev.InstanceKnown("b", "b", "a"))
    other.tell(ev.FunctionKnown("b", 1.0, 0.9, 1.0, "a"))
    other.tell(ev.ModelSized("b", 1, MB))
    for node in (one, other):
        for number in range(40):
            node.ask("ab"[number % 3 == 0], within_s=0.5 + number % 7)
        while node.busy:
            node.end()
    assert one.began == other.began


def test_who_waits_for_others_shares_is_told_so() -> None:
    node = Node({"a": 3.0, "b": 1.0})
    node.deploy("a", "b")
    for _ in range(20):
        node.ask("b")
    for _ in range(2):
        node.end(0.5)
    for _ in range(20):
        node.ask("a")
    while node.end(0.1) != "a" or node.began[-1] != "a":
        pass
    told = Reasons(node.core, node.now_s).told()
    kinds = {each["function"]: (each["kind"], each["reason"]) for each in told["oldest"] if each["kind"] != "instance"}
    kind, text = kinds["b"]
    assert kind == "share"
    assert "tenant b is" in text
    assert "25%" in text
    assert "others' requests come first" in text


def test_a_turn_that_lasts_counts_while_it_does() -> None:
    """Of a language model, whose lease lasts for hours."""
    node = Node({"a": 1.0, "b": 1.0}, gpus=2)
    node.deploy("a", "b")
    node.ask("a")
    node.now_s = 10.0
    node.ask("b")
    shares = node.core.shares
    node.tell(ev.Tick())
    shares.count(node.now_s)
    assert shares.virtual_s("a") >= 10.0
    assert shares.virtual_s("b") >= 10.0 - CREDIT_S, "nobody is owed time that it did not want"


def test_tenants_that_come_and_go_are_forgotten() -> None:
    node = Node({"a": 1.0})
    for number in range(4 * PRUNE):
        name = f"t{number}"
        node.deploy(name)
        node.ask(name)
        node.end(1.0)
        node.tell(ev.FunctionGone(name))
        node.tell(ev.InstanceLost(name))
    assert len(node.core.shares._virtual_s) <= 2 * PRUNE
    assert not node.core.shares._waiting


STEP = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from("abc")),
    st.tuples(st.just("end"), st.floats(0.0, 2.0)),
    st.tuples(st.just("wait"), st.floats(0.0, 5.0)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=80), st.integers(1, 3))
def test_nobody_waits_while_a_gpu_is_free(steps: list[tuple[str, object]], gpus: int) -> None:
    """`Scheduler.check` says so after every event; and all are served in the end."""
    node = Node({"a": 1.0, "b": 5.0}, gpus)
    node.deploy("a", "b", "c")
    asked = 0
    for what, value in steps:
        if what == "ask":
            node.ask(str(value))
            asked += 1
        elif what == "wait":
            node.now_s += float(str(value))
        elif node.busy:
            node.end(float(str(value)))
    while node.busy:
        node.end(0.01)
    assert len(node.began) == asked
    assert not node.core.waiting


def test_shares_are_recorded_and_replayed(tmp_path: Path) -> None:
    header = RecordingHeader.new(seed=1, revoke_s=5.0, max_waiting=100, policy=Policy(), topology=Topology())
    recorder = Recorder(tmp_path / "events", 1 << 30, header, lambda why: pytest.fail(why))
    node = Node({})
    node.core = header.scheduler()
    handle = node.core.handle

    def recorded(event: ev.Event, now_s: float) -> list[ev.Action]:
        actions = handle(event, now_s)
        recorder.record(now_s, event, actions)
        return actions

    with patch.object(node.core, "handle", recorded):
        node.tell(ev.ExecutorUp(0, 1, ROOM))
        node.tell(ev.SharesKnown((("a", 3.0), ("b", 1.0))))
        node.deploy("a", "b")
        for _ in range(30):
            node.ask("a")
            node.ask("b")
        while node.busy:
            node.end(0.1)
    recorder.close()
    assert node.began[:20].count("a") > 11, "else the shares do nothing here"
    found = replay(Recording(str(tmp_path / "events")))
    assert found.difference is None
    assert found.actions > 60


# --- simulated


def flooded(shares: tuple[tuple[str, float], ...], floods: bool) -> tuple[float, float]:
    """The worst, once all has begun, and the mean latency of a tenant that wants a tenth of a GPU, beside one that
    wants twice of it.
    """
    models = [ModelSpec(name=name, tenant=name, nbytes=100 * MB, run_s=0.02) for name in ("calm", "flood")]
    made = Simulation(Policy(), Topology(host_bps=1e10), 1, 1000 * MB, models, [0.3, 0.3], 0.9, shares=shares)
    calm = [(0.2 * number, 0) for number in range(300)]
    flood = [(0.01 * number, 1) for number in range(6000)] if floods else []
    arrivals = sorted(calm + flood)
    latency_s = made.run(np.array([at_s for at_s, _ in arrivals]), np.array([who for _, who in arrivals]))
    own_s = [each for each, (_, who) in zip(latency_s.tolist(), arrivals, strict=True) if who == 0]
    return max(own_s[5:]), sum(own_s) / len(own_s)


def test_a_flood_does_not_slow_another_tenant_beyond_its_share() -> None:
    """It waits for what has a turn when it comes, and for no more: the flood's queue is none of its business."""
    alone_s, _ = flooded((), floods=False)
    worst_s, mean_s = flooded((("calm", 1.0), ("flood", 1.0)), floods=True)
    run_s = 0.02
    assert worst_s <= alone_s + 2 * run_s
    assert mean_s <= 2 * run_s
    _, without_s = flooded((), floods=True)
    assert without_s > 2 * mean_s, "else the test shows nothing"


# --- what is written wrong

MODELS = {"gpus": {"count": 1, "memory": "1GB"}, "arrivals": {"rate": 1, "minutes": 1}, "models": [
    {"name": "m", "size": "1MB", "run": "1ms", "tenant": "a"}]}  # fmt: skip


@pytest.mark.parametrize(
    ("tenants", "says"),
    [
        ({"nobody": {"share": 1}}, "tenants.nobody is unknown; no model has this tenant, only a"),
        ({"a": {"share": 0}}, "tenants.a.share is 0.0; write a number above 0"),
        ({"a": {"share": math.nan}}, "tenants.a.share is nan"),
        ({"a": {"shares": 1}}, "tenants.*.shares is not a key; write one of share"),
    ],
)
def test_a_scenario_with_tenants_that_cannot_be(tenants: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse_scenario(MODELS | {"tenants": tenants}, "scenario")


@pytest.mark.parametrize(
    ("tenants", "says"),
    [
        ({"a": {"share": 0}}, "tenants.a.share is 0; write a number above 0"),
        ({"a": {"share": -2.5}}, "tenants.a.share is -2.5; write a number above 0"),
        ({"a": {"share": math.nan}}, "tenants.a.share is nan; write a number above 0"),
        ({"a": {"share": math.inf}}, "tenants.a.share is inf; write a number above 0"),
        ({"a": {"share": "half"}}, "Expected `float | null`, got `str`"),
        ({"a": {"part": 1}}, "unknown field `part`.*write some of share"),
        ({"a b": {"share": 1}}, "tenants.'a b' cannot be a tenant's name; use 1 to 63 letters"),
        ({"a": {"share": 1}, "b": {}}, 'the node serves one tenant; write \\[node\\] tenants = "many"'),
    ],
)
def test_a_node_file_with_tenants_that_cannot_be(tenants: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config({"tenants": tenants})


def test_the_line_of_a_tenants_slip_is_named() -> None:
    text = '[node]\ntenants = "many"\n[tenants.a]\nshare = 1\n[tenants.b]\nshare = -1\n'
    tree = {"node": {"tenants": "many"}, "tenants": {"a": {"share": 1}, "b": {"share": -1}}}
    with pytest.raises(ConfigError, match=r"^node.toml:6: tenants.b.share"):
        parse_config(tree, "node.toml", text)
