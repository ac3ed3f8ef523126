"""Links as the core estimates them and as the simulator shares them out: the two must agree."""

from heapq import heappop, heappush

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dormouse.controller.simulator.links import Links, SimulatedCopy, SimulatedLink
from dormouse.core.decisions.scheduling.topology import Topology, shared_copy_s

BPS = st.floats(1.0, 100.0)
NBYTES = st.floats(0.1, 1000.0)


class Clock:
    """Plays what `Links` announces; ``ends_s`` has when each copy arrived, by its token."""

    def __init__(self) -> None:
        self.links = Links(self._due)
        self.ends_s: dict[object, float] = {}
        self._heap: list[tuple[float, int, SimulatedCopy, int]] = []
        self._number = 0

    def _due(self, at_s: float, copy: SimulatedCopy, version: int) -> None:
        self._number += 1
        heappush(self._heap, (at_s, self._number, copy, version))

    def play(self, until_s: float = float("inf")) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            now_s, _, copy, version = heappop(self._heap)
            if version == copy.version:
                self.links.end(copy, now_s)
                self.ends_s[copy.token] = now_s


def played(nbytes: list[float], link_bps: float, switch_bps: float) -> dict[object, float]:
    """When copies that begin together arrive, each over its own link and all over one switch."""
    clock, switch = Clock(), SimulatedLink(switch_bps)
    for token, size in enumerate(nbytes):
        clock.links.begin(SimulatedCopy(size, (SimulatedLink(link_bps), switch), token), 0.0)
    clock.play()
    return clock.ends_s


@pytest.mark.parametrize(
    ("others", "switch_bps", "seconds"),
    [
        ([], 12.0, 10.0),  # alone: the link
        ([], 0.0, 10.0),  # no switch is known
        ([50.0], 0.0, 10.0),
        ([1000.0], 12.0, 100.0 / 6.0),  # the other outlasts it: half of the switch all the time
        ([30.0], 12.0, 5.0 + 7.0),  # 30 at 6, then 70 at the link's 10
        ([30.0], 20.0, 10.0),  # the switch holds two links
        ([30.0, 30.0], 12.0, 7.5 + 7.0),  # 30 at 4, then 70 at 10
        ([10.0, 30.0], 12.0, 2.5 + 20.0 / 6.0 + 7.0),  # 10 at 4, 20 at 6, 70 at 10
        ([30.0, 10.0], 12.0, 2.5 + 20.0 / 6.0 + 7.0),
        ([0.0], 12.0, 10.0),  # the other has just arrived
    ],
)
def test_a_copy_beside_others(others: list[float], switch_bps: float, seconds: float) -> None:
    assert shared_copy_s(100.0, others, 10.0, switch_bps) == pytest.approx(seconds)


def test_a_copy_over_a_switch_that_is_narrower_than_its_link() -> None:
    assert shared_copy_s(100.0, [50.0], 10.0, 5.0) == pytest.approx(20.0 + 10.0)
    assert played([100.0], 10.0, 5.0)[0] == pytest.approx(20.0)
    assert shared_copy_s(100.0, [], 10.0, 5.0) == pytest.approx(20.0)


@given(NBYTES, st.lists(NBYTES, max_size=6), BPS, BPS)
def test_the_estimate_is_what_the_simulator_plays(
    nbytes: float, others: list[float], link_bps: float, switch_bps: float
) -> None:
    ends_s = played([nbytes, *others], link_bps, switch_bps)
    assert len(ends_s) == 1 + len(others)
    assert ends_s[0] == pytest.approx(shared_copy_s(nbytes, others, link_bps, switch_bps), rel=1e-6)


@given(NBYTES, st.lists(NBYTES, max_size=5), NBYTES, BPS, BPS)
def test_another_copy_never_makes_one_faster(
    nbytes: float, others: list[float], more: float, link_bps: float, switch_bps: float
) -> None:
    before_s = shared_copy_s(nbytes, others, link_bps, switch_bps)
    assert shared_copy_s(nbytes, [*others, more], link_bps, switch_bps) >= before_s * (1 - 1e-9)


@given(st.lists(NBYTES, min_size=1, max_size=6), BPS, BPS)
def test_a_switch_is_never_faster_than_it_is(nbytes: list[float], link_bps: float, switch_bps: float) -> None:
    last_s = max(played(nbytes, link_bps, switch_bps).values())
    assert last_s >= sum(nbytes) / switch_bps * (1 - 1e-9)
    assert last_s >= max(nbytes) / link_bps * (1 - 1e-9)


@given(st.lists(st.tuples(st.floats(0.0, 20.0), NBYTES), min_size=1, max_size=6), BPS)
def test_a_shared_link_is_never_idle(copies: list[tuple[float, float]], bps: float) -> None:
    """Copies that begin at any time: the link is busy until the last has arrived, but for the gaps between them."""
    clock, link, busy_until_s = Clock(), SimulatedLink(bps), 0.0
    for token, (at_s, size) in enumerate(sorted(copies)):
        clock.play(at_s)
        clock.links.begin(SimulatedCopy(size, (link,), token), at_s)
        busy_until_s = max(busy_until_s, at_s) + size / bps
    clock.play()
    assert max(clock.ends_s.values()) == pytest.approx(busy_until_s, rel=1e-6)


def test_a_copy_that_is_given_up_leaves_its_share_to_the_other() -> None:
    clock, switch = Clock(), SimulatedLink(12.0)
    first, second = (SimulatedCopy(100.0, (SimulatedLink(10.0), switch), token) for token in range(2))
    clock.links.begin(first, 0.0)
    clock.links.begin(second, 0.0)
    clock.links.end(first, 5.0)
    clock.play()
    assert clock.ends_s == {1: pytest.approx(5.0 + 7.0)}


def test_gpus_on_one_switch_are_neighbours() -> None:
    topology = Topology(switches=(0, 0, 1, 1))
    assert topology.neighbours(range(4)) == {0: [1], 1: [0], 2: [3], 3: [2]}
    assert topology.neighbours([0, 2, 3]) == {0: [], 2: [3], 3: [2]}


@given(st.integers(0, 8), st.integers(0, 8))
def test_gpus_that_no_switch_lists_have_one_each(first: int, second: int) -> None:
    assume(first != second)
    assert Topology(switches=(0, 0)).switch(2 + first) != Topology(switches=(0, 0)).switch(2 + second)
    assert Topology(switches=(0, 0)).switch(2 + first) != 0


def test_gpus_without_a_link_between_them() -> None:
    topology = Topology(peer_bps=((0.0, 5.0), (4.0, 0.0)))
    assert (topology.peer(0, 1), topology.peer(1, 0), topology.peer(0, 2), topology.peer(2, 0)) == (5.0, 4.0, 0.0, 0.0)
