"""What a tenant keeps on a GPU beyond its quota goes first, and nothing else is refused or lost for it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_leases import GRANULE, Played

from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.scenario import parse_scenario
from dormouse.core.config import NodeConfig
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.memory.holdings import OwnerGroup
from dormouse.core.decisions.memory.quotas import OVER, MemoryQuotas
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.core.nodefile import parse_config
from dormouse.core.tenants import gpu_nbytes
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import Policy

MB = 1_000_000


def quotas(**limits: int) -> MemoryQuotas:
    """Instances are called after their tenants."""
    return MemoryQuotas(limits, lambda instance: instance[0])


def group(*owners: str) -> OwnerGroup:
    return OwnerGroup.of("weights", owners)


def test_models_of_most_worth_fill_the_quota() -> None:
    worth = {"a1": 1.0, "b1": 2.0, "a2": 3.0, "a3": 4.0}
    held = {group("a1"): 5, group("b1"): 50, group("a2"): 5, group("a3"): 5}
    adjusted = quotas(a=10).adjusted(worth, held, {})
    assert list(adjusted.items()) == [("a1", OVER), ("b1", 2.0), ("a2", 3.0), ("a3", 4.0)]
    assert quotas(a=15).adjusted(worth, held, {}) is worth, "who is within it is left alone"
    assert quotas(c=1).adjusted(worth, held, {}) is worth


def test_a_small_one_fits_beside_what_does_not() -> None:
    worth = {"a1": 1.0, "a2": 2.0, "a3": 3.0}
    held = {group("a1"): 1, group("a2"): 9, group("a3"): 8}
    assert quotas(a=10).adjusted(worth, held, {}) == {"a1": 1.0, "a2": 2.0 * OVER, "a3": 3.0}


def test_what_several_share_counts_once() -> None:
    worth = {"a1": 1.0, "a2": 2.0, "a3": 3.0}
    held = {group("a1", "a2", "a3"): 90, group("a1"): 5, group("a2"): 5, group("a3"): 1}
    assert quotas(a=100).adjusted(worth, held, {}) == {"a1": OVER, "a2": 2.0, "a3": 3.0}
    assert quotas(a=101).adjusted(worth, held, {}) is worth


def test_what_comes_counts_before_what_is_there() -> None:
    worth = {"a1": 1.0, "b1": 2.0, "a2": 3.0}
    held = {group("a1"): 5, group("b1"): 5, group("a2"): 5, group("a3"): 4}
    assert quotas(a=9).adjusted(worth, held, {}, "a3") == {"a1": OVER, "b1": 2.0, "a2": 3.0}
    assert quotas(a=14).adjusted(worth, held, {}, "a3") is worth
    assert quotas(a=3).adjusted(worth, held, {}, "a3") == {"a1": OVER, "a2": 3.0 * OVER, "b1": 2.0}


def test_keys_and_values_count_first() -> None:
    worth = {"a1": 1.0}
    assert quotas(a=10).adjusted(worth, {group("a1"): 5}, {"a": 5}) is worth
    assert quotas(a=10).adjusted(worth, {group("a1"): 5}, {"a": 6}) == {"a1": OVER}
    assert quotas(a=0).adjusted(worth, {group("a1"): 5}, {"b": 5}) == {"a1": OVER}


@given(
    st.lists(st.tuples(st.sets(st.sampled_from(["a1", "a2", "b1", "b2"]), min_size=1), st.integers(1, 9)), max_size=8),
    st.integers(0, 30),
)
def test_what_is_left_alone_is_within_the_quota(made: list[tuple[set[str], int]], limit: int) -> None:
    worth = {"a1": 1.0, "b1": 2.0, "a2": 3.0, "b2": 4.0}
    held = {group(*owners): nbytes for owners, nbytes in made}
    adjusted = quotas(a=limit).adjusted(worth, held, {})
    assert list(adjusted.values()) == sorted(adjusted.values())
    kept = {name for name in ("a1", "a2") if adjusted[name] == worth[name]}
    assert sum(nbytes for owners, nbytes in held.items() if kept & set(owners.owners)) <= limit or kept == {"a1", "a2"}
    assert all(adjusted[name] == worth[name] for name in ("b1", "b2"))


# --- in an executor


@pytest.mark.parametrize(("quota", "gone"), [(0, "b"), (1, "a"), (None, "a")])
def test_an_executor_evicts_first_what_is_beyond_a_quota(quota: int | None, gone: str) -> None:
    """Two idle models, of which a's is worth less, and room is needed for a third."""
    limits = None if quota is None else {"t-b": quota * GRANULE}
    played = Played(granules=2, models="abc", tenants=True, quotas=limits)
    worth = {"a": 1.0, "b": 2.0, "c": 3.0}
    for name in "abc":
        played.do(e.SeatUnwanted(played.wake(name, worth=worth)))
    assert played.outcomes() == ["ended"] * 3, "nobody was refused"
    assert played.machine.residency.resident_nbytes(gone) == 0
    assert played.machine.residency.instances == sorted({"a", "b", "c"} - {gone})


# --- in the simulator


def wakes(quotas_: dict[str, int] | None) -> int:
    """A tenant that asks for many models in turn, and one that asks for one of its own now and then."""
    models = [ModelSpec(name="own", tenant="calm", nbytes=100 * MB, run_s=0.001)]
    models += [ModelSpec(name=f"m{i}", tenant="greedy", nbytes=100 * MB, run_s=0.001) for i in range(12)]
    made = Simulation(
        Policy(eviction="lru", preload=False),
        Topology(host_bps=1e10), 1, 1000 * MB, models, [1.0] * 13, 0.9, quotas=quotas_,
    )  # fmt: skip
    arrivals = [(0.05 * number, 1 + number % 12) for number in range(600)]
    arrivals += [(1.0 + 2.0 * number, 0) for number in range(14)]
    arrivals.sort()
    times_s, who = np.array([at for at, _ in arrivals]), np.array([function for _, function in arrivals])
    latency_s = made.run(times_s, who)
    return int((latency_s[who == 0] > 0.005).sum())


def test_a_greedy_tenant_takes_no_room_from_another_beyond_its_quota() -> None:
    assert wakes(None) >= 10, "else the test shows nothing"
    assert wakes({"greedy": 800 * MB}) <= 1


# --- what is written wrong


@pytest.mark.parametrize("size", ["a lot", "-1", "8388608TiB"])
def test_quotas_that_cannot_be(size: str) -> None:
    with pytest.raises(ConfigError, match=r"tenants.a.gpu_memory: "):
        parse_config({"tenants": {"a": {"gpu_memory": size}}})
    tree = {"gpus": {"count": 1, "memory": "1GB"}, "arrivals": {"rate": 1, "minutes": 1}, "models": [
        {"name": "m", "size": "1MB", "run": "1ms", "tenant": "a"}]}  # fmt: skip
    with pytest.raises(ConfigError, match=r"tenants.a.gpu_memory"):
        parse_scenario(tree | {"tenants": {"a": {"gpu_memory": size}}}, "scenario")


def test_quotas_of_a_node_file() -> None:
    config = parse_config({"tenants": {"a": {"gpu_memory": "1GiB"}}})
    assert gpu_nbytes(config.tenants) == {"a": 1 << 30}
    assert gpu_nbytes(NodeConfig().tenants) == {}
