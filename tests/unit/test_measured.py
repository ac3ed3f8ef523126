"""What finished wakes say of links: which of them count, and when measurement is believed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.functions import Function
from dormouse.core.decisions.scheduling.measured import DECAY, MIN_NBYTES, MISSES, Measured
from dormouse.core.decisions.scheduling.state import Gpu, Model, Running, Waiting
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.messages import Done, Lease, PoolStats
from dormouse.schemas.policy import DEFAULT

MB = 1_000_000
BPS = 10_000.0 * MB
PEERS = ((0.0, 2 * BPS), (2 * BPS, 0.0))


class Node:
    """Four GPUs, two on each switch; the clock is said with each wake."""

    def __init__(self, topology: Topology | None = None) -> None:
        topology = topology or Topology(host_bps=BPS, switch_bps=1.2 * BPS, switches=(0, 0, 1, 1))
        self.links = Measured(topology)
        self.gpus = {number: Gpu(number, 1, PoolStats(), 1 << 40) for number in range(4)}
        for number, others in topology.neighbours(self.gpus).items():
            self.gpus[number].neighbours = [self.gpus[other] for other in others]

    def begin(self, gpu: int, at_s: float, copies_s: float = 1.0, peer: int | None = None, serial: int = 1) -> Running:
        model = Model("i", Function("f", 100, 120.0), 0.0)
        lease = Lease(gpu=gpu, epoch=1, serial=serial, secret=0)
        running = self.gpus[gpu].leases[serial] = Running(Waiting(1, model, at_s, 9.0), lease, at_s)
        running.copies_until_s, running.peer = at_s + copies_s, peer
        return running

    def end(
        self,
        gpu: int,
        wake_s: float | None,
        host: int = 0,
        peers: dict[int, int] | None = None,
        file: int = 0,
        serial: int = 1,
    ) -> None:
        running = self.gpus[gpu].leases[serial]
        running.wake_us = None if wake_s is None else round(wake_s * 1e6)
        given = peers or {}
        done = Done(
            serial=1,
            outcome="ended",
            gpu_us=0,
            copied_nbytes=host + sum(given.values()),
            peer_nbytes=sum(given.values()),
            file_nbytes=file,
            resident=[],
            peak_activation_nbytes=0,
            version=1,
            stats=PoolStats(),
            peers=list(given),
        )
        self.links.woke(self.gpus[gpu], running, done)
        del self.gpus[gpu].leases[serial]

    def woke(
        self,
        gpu: int,
        bps: float,
        host: int = 0,
        peers: dict[int, int] | None = None,
        file: int = 0,
        at_s: float = 0.0,
        counted_on: int | None = None,
    ) -> None:
        """At this bandwidth, alone."""
        self.begin(gpu, at_s, peer=counted_on)
        self.end(gpu, (host + sum((peers or {}).values())) / bps, host, peers, file)


def until_believed(node: Node, bps: float, gpus: tuple[int, ...] = (0, 2)) -> None:
    for turn in range(40):
        for gpu in gpus:
            node.woke(gpu, bps, host=1000 * MB, at_s=10.0 * turn)


# --- the host's link


def test_what_is_configured_stands_until_something_was_measured() -> None:
    links = Node().links
    assert [links.host(gpu) for gpu in range(4)] == [BPS] * 4
    assert (links.host_bps, links.switch_bps) == (BPS, 1.2 * BPS)


@given(st.lists(st.floats(0.9, 1.1), max_size=30), st.integers(MIN_NBYTES, 1000 * MB))
def test_measurement_near_it_changes_nothing(factors: list[float], nbytes: int) -> None:
    node = Node()
    for turn, factor in enumerate(factors):
        node.woke(turn % 4, factor * BPS, host=nbytes, at_s=10.0 * turn)
    assert [node.links.host(gpu) for gpu in range(4)] == [BPS] * 4


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 5.0])
def test_a_link_that_is_another_than_said_is_believed(factor: float) -> None:
    node = Node()
    until_believed(node, factor * BPS)
    assert node.links.host_bps == pytest.approx(factor * BPS, rel=0.01)
    assert node.links.host(1) == node.links.host_bps  # that has copied nothing yet


def test_one_disturbed_wake_is_forgotten() -> None:
    node = Node()
    until_believed(node, BPS)
    node.woke(0, 0.1 * BPS, host=100 * MB, at_s=1000.0)
    for turn in range(20):
        node.woke(0, BPS, host=1000 * MB, at_s=2000.0 + turn)
    assert node.links.host(0) == BPS


def test_large_wakes_count_more() -> None:
    """Lately 1000 MB at half of the bandwidth and 20 MB at a tenth: nearly half."""
    node = Node()
    for turn in range(40):
        node.woke(0, 0.5 * BPS, host=1000 * MB, at_s=10.0 * turn)
        node.woke(0, 0.1 * BPS, host=20 * MB, at_s=10.0 * turn + 5)
    assert 0.45 * BPS < node.links.host_bps < 0.5 * BPS


def test_a_gpu_with_a_slower_link_than_the_others_has_its_own() -> None:
    node = Node()
    for turn in range(40):
        for gpu in (0, 1, 2, 3):
            node.woke(gpu, BPS / 4 if gpu == 3 else BPS, host=1000 * MB, at_s=10.0 * (4 * turn + gpu))
    assert node.links.host(3) == pytest.approx(BPS / 4, rel=0.05)
    assert len({node.links.host(gpu) for gpu in (0, 1, 2)}) == 1
    assert node.links.host(0) > 2 * node.links.host(3)


def test_equal_gpus_stay_equal_in_noise() -> None:
    """Of equals the one with most room is taken: a difference that is only noise would decide instead."""
    node = Node(Topology(host_bps=BPS))
    for turn in range(100):
        node.woke(turn % 4, (0.5 + 0.01 * (turn * 7 % 11)) * BPS, host=300 * MB, at_s=10.0 * turn)
    assert len({node.links.host(gpu) for gpu in range(4)}) == 1
    assert node.links.host_bps != BPS


# --- what says nothing


@pytest.mark.parametrize(
    ("host", "file", "peers"),
    [
        (MIN_NBYTES - 1, 0, {}),  # too small
        (1000 * MB, 1, {}),  # a disk
        (500 * MB, 0, {1: 500 * MB}),  # two links
        (0, 0, {}),  # nothing
    ],
)
def test_wakes_that_say_nothing_of_the_hosts_link(host: int, file: int, peers: dict[int, int]) -> None:
    node = Node()
    for turn in range(20):
        node.woke(0, BPS / 4, host, peers, file, at_s=10.0 * turn)
    assert (node.links.host(0), node.links.peer(1, 0)) == (BPS, 0.0)


def test_a_wake_that_did_not_finish_says_nothing() -> None:
    node = Node()
    for _ in range(20):
        node.begin(0, 0.0)
        node.end(0, None, host=1000 * MB)
    assert node.links.host(0) == BPS


@pytest.mark.parametrize("first_ends", [True, False])
def test_wakes_that_shared_the_switch_say_nothing(first_ends: bool) -> None:
    """Both orders of the ends: one of the two finds the other still running, the other finds that it has ended."""
    node = Node()
    for turn in range(20):
        at_s = 10.0 * turn
        node.begin(0, at_s)
        node.begin(1, at_s + 0.1)
        for gpu in (0, 1) if first_ends else (1, 0):
            node.end(gpu, 0.4, host=1000 * MB)
    assert node.links.host_bps == BPS


@pytest.mark.parametrize("first_ends", [True, False])
def test_wakes_of_one_gpu_that_shared_its_link_say_nothing(first_ends: bool) -> None:
    node = Node()
    for turn in range(20):
        at_s = 10.0 * turn
        for serial in (1, 2):
            node.begin(0, at_s + 0.1 * serial, serial=serial)
        for serial in (1, 2) if first_ends else (2, 1):
            node.end(0, 0.4, host=1000 * MB, serial=serial)
    assert node.links.host_bps == BPS


def test_who_has_lost_its_turn_says_nothing() -> None:
    """It may have left its seat, and copied twice: the time is of the last."""
    node = Node()
    for turn in range(20):
        node.begin(0, 10.0 * turn).used_s = 0.2
        node.end(0, 0.1, host=2000 * MB)
    assert node.links.host_bps == BPS


def test_a_neighbour_that_only_runs_or_copied_before_does_not_share() -> None:
    node = Node()
    for turn in range(40):
        at_s = 10.0 * turn
        node.woke(1, BPS / 4, host=MIN_NBYTES - 1, at_s=at_s)  # too small to be a sample itself
        node.begin(1, at_s + 0.5, copies_s=0.0)
        node.woke(0, BPS / 4, host=1000 * MB, at_s=at_s + 1.0)
        node.end(1, 0.0)
    assert node.links.host(0) == pytest.approx(BPS / 4, rel=0.01)


def test_a_neighbour_that_copies_afterwards_does_not_share() -> None:
    """The first one's request still runs by then, so its wake is told later."""
    node = Node()
    for turn in range(40):
        at_s = 10.0 * turn
        node.begin(0, at_s)
        node.begin(1, at_s + 0.5)
        node.end(0, 0.4, host=1000 * MB)
        node.end(1, 0.1, host=MIN_NBYTES - 1)
    assert node.links.host(0) == pytest.approx(BPS / 4, rel=0.01)


def test_gpus_of_other_switches_do_not_share() -> None:
    node = Node()
    for turn in range(40):
        node.begin(2, 10.0 * turn)
        node.woke(0, BPS / 4, host=1000 * MB, at_s=10.0 * turn)
        node.end(2, 0.4, host=1000 * MB)
    assert node.links.host(0) == pytest.approx(BPS / 4, rel=0.01)


# --- between GPUs


def test_the_first_copy_makes_a_pair_known() -> None:
    node = Node()
    assert node.links.peer(1, 0) == 0.0
    node.woke(0, 3 * BPS, peers={1: 1000 * MB})
    assert node.links.peer(1, 0) == pytest.approx(3 * BPS, rel=1e-4)
    assert (node.links.peer(0, 1), node.links.peer(2, 0)) == (0.0, 0.0)
    assert node.links.host_bps == BPS


def test_a_small_first_copy_does_not() -> None:
    node = Node()
    node.woke(0, 3 * BPS, peers={1: MIN_NBYTES - 1})
    assert node.links.peer(1, 0) == 0.0


def test_two_sources_at_once_say_nothing() -> None:
    node = Node()
    node.woke(0, 3 * BPS, peers={1: 500 * MB, 2: 500 * MB})
    assert (node.links.peer(1, 0), node.links.peer(2, 0)) == (0.0, 0.0)


def test_a_pair_that_gives_nothing_is_not_counted_on_until_it_gives() -> None:
    node = Node(Topology(host_bps=BPS, peer_bps=PEERS))
    for turn in range(MISSES):
        assert node.links.peer(1, 0) == 2 * BPS
        node.woke(0, BPS, host=1000 * MB, at_s=10.0 * turn, counted_on=1)
    assert (node.links.peer(1, 0), node.links.peer(0, 1)) == (0.0, 2 * BPS)
    node.woke(0, BPS, peers={1: MB}, at_s=99.0)  # too small to measure, but it came
    assert node.links.peer(1, 0) == 2 * BPS


def test_misses_count_in_a_row() -> None:
    node = Node(Topology(host_bps=BPS, peer_bps=PEERS))
    for turn in range(3 * MISSES):
        node.woke(0, BPS, host=1000 * MB, at_s=10.0 * turn, counted_on=1)
        if turn % 2:
            node.woke(0, 2 * BPS, peers={1: 1000 * MB}, at_s=10.0 * turn + 5)
    assert node.links.peer(1, 0) == 2 * BPS


# --- topologies


def test_an_uplink_is_as_fast_as_a_link() -> None:
    topology = Topology(host_bps=BPS, switches=(0, 0), uplinks=True)
    node = Node(topology)
    assert node.links.switch_bps == BPS
    until_believed(node, BPS / 2)
    assert node.links.switch_bps == node.links.host_bps
    assert Measured(Topology(host_bps=BPS, switches=(0, 0))).switch_bps == 0.0
    assert Measured(Topology(host_bps=BPS, switches=(0, 0), switch_bps=7.0, uplinks=True)).switch_bps == 7.0


def test_another_topology_begins_anew() -> None:
    node = Node()
    until_believed(node, BPS / 4)
    node.links.known(Topology(host_bps=3 * BPS, peer_bps=PEERS))
    assert (node.links.host(0), node.links.peer(0, 1)) == (3 * BPS, 2 * BPS)


def test_the_estimate_is_the_decayed_ratio() -> None:
    """By hand: 64 MiB at the assumed bandwidth, then two wakes."""
    node = Node()
    node.woke(0, BPS / 10, host=1000 * MB)
    node.woke(0, BPS / 10, host=2000 * MB, at_s=10.0)
    nbytes = DECAY * (DECAY * (64 << 20) + 1000 * MB) + 2000 * MB
    seconds = DECAY * (DECAY * (64 << 20) / BPS + 1.0) + 2.0
    assert node.links.host(0) == pytest.approx(nbytes / seconds)


# --- in the simulator, whose links are known


def simulated(told: Topology | None, played: Topology, seconds: float = 60.0) -> Simulation:
    """Four GPUs that hold a third of sixteen models of 500 MB; the core is told other links than are played."""
    specs = [ModelSpec(name="m", nbytes=500 * MB, run_s=0.02) for _ in range(16)]
    run = Simulation(DEFAULT, played, 4, 1500 * MB, specs, [0.2] * 16, 0.98, seed=3)
    if told is not None:
        run.core.handle(ev.TopologyKnown(told), 0.0)
    rng = np.random.default_rng(3)
    run.run(np.sort(rng.uniform(0.0, seconds, 2000)), rng.integers(0, 16, 2000))
    return run


PLAYED = Topology(host_bps=BPS, switch_bps=1.2 * BPS, switches=(0, 0, 1, 1))
LINKED = Topology(host_bps=BPS, peer_bps=tuple(tuple(4 * BPS if a != b else 0.0 for b in range(4)) for a in range(4)))


def test_what_is_configured_and_true_stays_as_it_is() -> None:
    for topology in (PLAYED, LINKED):
        links = simulated(None, topology).core.bandwidths
        assert {links.host(gpu) for gpu in range(4)} == {BPS}
        assert {links.peer(0, gpu) for gpu in (1, 2, 3)} == {topology.peer(0, 1)}


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_what_is_wrong_becomes_what_is_played(factor: float) -> None:
    told = Topology(host_bps=factor * BPS, switch_bps=1.2 * BPS, switches=(0, 0, 1, 1))
    links = simulated(told, PLAYED).core.bandwidths
    assert [links.host(gpu) for gpu in range(4)] == pytest.approx([BPS] * 4, rel=0.02)


def test_peers_of_which_nothing_is_said_become_usable() -> None:
    run = simulated(Topology(host_bps=BPS), LINKED, seconds=15.0)
    links = run.core.bandwidths
    known = [links.peer(a, b) for a in range(4) for b in range(4) if links.peer(a, b)]
    assert known
    assert known == [pytest.approx(4 * BPS, rel=0.01)] * len(known)
    assert run.host_nbytes < simulated(None, Topology(host_bps=BPS), seconds=15.0).host_nbytes
