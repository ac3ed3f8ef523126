"""Which GPU a request gets: a test for each rule of each placement."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.decisions.scheduling.functions import Function
from dormouse.core.decisions.scheduling.keeping import ExposedTime
from dormouse.core.decisions.scheduling.placement import PLACEMENT_CLASSES
from dormouse.core.decisions.scheduling.state import Gpu, Model, Running, Waiting
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.messages import Lease, PoolStats
from dormouse.schemas.policy import PLACEMENTS, Policy

MB = 1_000_000
HOST_BPS = 10_000.0 * MB
PAIRS = (0, 0, 1, 1)


def peers(*links: tuple[int, int, float]) -> tuple[tuple[float, ...], ...]:
    """Bandwidths between four GPUs, in both directions; 0 where none is named."""
    table = [[0.0] * 4 for _ in range(4)]
    for one, two, bps in links:
        table[one][two] = table[two][one] = bps
    return tuple(tuple(row) for row in table)


@dataclass
class Node:
    """Four GPUs as a scheduler knows them; two on each switch."""

    placement: str = "completion"
    peer_bps: tuple[tuple[float, ...], ...] = ()
    switch_bps: float = 12_000.0 * MB
    await_resident: bool = True
    seed: int = 0
    models: dict[str, Model] = field(default_factory=dict)
    gpus: dict[int, Gpu] = field(default_factory=dict)

    def __post_init__(self) -> None:
        topology = Topology(host_bps=HOST_BPS, switch_bps=self.switch_bps, switches=PAIRS, peer_bps=self.peer_bps)
        for number in range(4):
            self.gpus[number] = Gpu(number, 1, PoolStats(free_nbytes=1000 * MB), 10_000 * MB)
        for number, others in topology.neighbours(self.gpus).items():
            self.gpus[number].neighbours = [self.gpus[other] for other in others]
        keeping = ExposedTime(topology, self.models)
        rng = random.Random(self.seed)
        policy = Policy(placement=self.placement, await_resident=self.await_resident)
        self.chooser = PLACEMENT_CLASSES[self.placement](policy, topology, self.gpus, keeping, rng)

    def model(self, name: str, on: dict[int, int] | None = None, nbytes: int = 1000 * MB, run_s: float = 0.02) -> Model:
        """``on``: bytes by GPU."""
        function = Function(name, 100, 120.0)
        function.measured(run_s, 0.0)
        model = self.models[name] = Model(name, function, 0.0)
        model.nbytes = nbytes
        for gpu, there in (on or {}).items():
            model.resident[gpu] = self.gpus[gpu].resident[name] = there
        return model

    def run(self, gpu: int, model: Model, ends_s: float, copying_nbytes: int = 0, copies_until_s: float = 0.0) -> None:
        """Since 0 s."""
        lease = Lease(gpu=gpu, epoch=1, serial=gpu, secret=0)
        running = Running(Waiting(100 + gpu, model, 0.0, 9.0), lease, 0.0)
        self.gpus[gpu].leases[lease.serial] = running
        self.gpus[gpu].take_turn(running, 0.0)
        running.ends_s, running.copying_nbytes, running.copies_until_s = ends_s, copying_nbytes, copies_until_s
        model.leased = True

    def choose(self, model: Model, deadline_s: float = 1.0, now_s: float = 0.0, may_wait: bool = True) -> int | None:
        free = {number for number, gpu in self.gpus.items() if gpu.running is None}
        self.waiting = Waiting(1, model, now_s, deadline_s)
        return self.chooser.choose(self.waiting, free, now_s, may_wait)


# --- any


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_free_gpu_that_has_the_whole_model_is_taken(placement: str) -> None:
    for there in range(4):
        node = Node(placement, peer_bps=peers((0, 1, 2 * HOST_BPS)))
        node.run((there + 1) % 4, node.model("busy"), ends_s=0.001)
        whole = {there: 1000 * MB, (there + 1) % 4: 1000 * MB}
        assert node.choose(node.model("m", on=whole)) == there


@given(
    st.sampled_from(PLACEMENTS),
    st.sets(st.integers(0, 3), max_size=3),
    st.dictionaries(st.integers(0, 3), st.integers(1, 1000)),
    st.floats(0.0, 2.0),
    st.booleans(),
)
def test_the_choice_is_a_free_gpu_or_one_to_wait_for(
    placement: str, busy: set[int], on: dict[int, int], deadline_s: float, may_wait: bool
) -> None:
    node = Node(placement, peer_bps=peers((0, 2, 2 * HOST_BPS), (1, 3, 3 * HOST_BPS)))
    for number in busy:
        node.run(number, node.model(f"busy-{number}"), ends_s=0.05)
    model = node.model("m", on={gpu: there * MB for gpu, there in on.items()})
    choice = node.choose(model, deadline_s, 0.01, may_wait)
    held_for = node.waiting.held_for
    if choice is None:
        assert held_for in busy
        assert placement == "bound" or (placement == "completion" and may_wait)
        assert placement == "bound" or model.resident[held_for] == model.nbytes
    else:
        assert choice not in busy
        assert held_for is None


# --- estimates


@pytest.mark.parametrize(
    ("on", "seconds", "host_mb", "peer"),
    [
        ({}, 0.1, 1000, None),
        ({0: 500}, 0.05, 500, None),
        ({0: 1000}, 0.0, 0, None),
        ({1: 1000}, 0.05, 0, 1),
        ({2: 1000}, 0.1, 1000, None),  # no link
        ({1: 600}, 0.04, 400, 1),  # from both at once
        ({0: 500, 1: 600}, 0.04, 400, 1),  # first bytes are kept: the peer has 100 more
        ({0: 500, 1: 400}, 0.05, 500, None),
    ],
)
def test_copies_by_source(on: dict[int, int], seconds: float, host_mb: int, peer: int | None) -> None:
    """To GPU 0: 1000 MB take 0.1 s from the host, 0.05 s from GPU 1."""
    node = Node(peer_bps=peers((0, 1, 2 * HOST_BPS)))
    model = node.model("m", on={gpu: nbytes * MB for gpu, nbytes in on.items()})
    copy_s, host_nbytes, source = node.chooser.copy_s(model, 0, 0.0)
    assert copy_s == pytest.approx(seconds)
    assert (host_nbytes, source) == (host_mb * MB, peer)


def test_a_slow_peer_is_no_source() -> None:
    node = Node(peer_bps=peers((0, 1, 0.5 * HOST_BPS)))
    assert node.chooser.copy_s(node.model("m", on={1: 1000 * MB}), 0, 0.0)[1:] == (1000 * MB, None)


def test_a_copy_takes_longer_beside_a_neighbours() -> None:
    """At 0.05 s the neighbour has half of its 1200 MB left: both have 6000 MB/s for 0.1 s, then one has the link."""
    node = Node()
    node.run(1, node.model("b"), ends_s=9.0, copying_nbytes=1200 * MB, copies_until_s=0.1)
    assert node.chooser.copy_s(node.model("m"), 0, 0.05)[0] == pytest.approx(0.1 + 0.04)
    assert node.chooser.copy_s(node.model("n"), 2, 0.05)[0] == pytest.approx(0.1)
    assert node.chooser.copy_s(node.model("o"), 0, 0.1)[0] == pytest.approx(0.1)  # it has arrived by now


def test_a_neighbour_that_copies_without_a_turn_counts_too() -> None:
    for placement in ("completion", "torpor"):
        node = Node(placement)
        node.run(1, node.model("b"), ends_s=9.0, copying_nbytes=1200 * MB, copies_until_s=0.1)
        (running,) = node.gpus[1].leases.values()
        node.gpus[1].leave_turn(running, 0.04)
        assert node.chooser.copy_s(node.model("m"), 0, 0.05)[0] == pytest.approx(0.1 + 0.04)
        if placement == "torpor":
            assert node.choose(node.model("n")) == 1, "GPU 0 has a neighbour that loads"


# --- completion


def test_the_gpu_that_misses_least_is_taken() -> None:
    node = Node()
    assert node.choose(node.model("m", on={2: 400 * MB, 3: 500 * MB})) == 3


def test_of_equals_the_one_with_most_room_is_taken() -> None:
    node = Node()
    node.gpus[2].stats = PoolStats(free_nbytes=1001 * MB)
    assert node.choose(node.model("m")) == 2


def test_a_gpu_beside_one_that_copies_is_avoided() -> None:
    node = Node()
    node.gpus[0].stats = PoolStats(free_nbytes=5000 * MB)
    node.run(1, node.model("b"), ends_s=9.0, copying_nbytes=1000 * MB, copies_until_s=0.1)
    assert node.choose(node.model("m")) in (2, 3)


def test_a_gpu_with_a_fast_link_to_the_model_is_taken() -> None:
    node = Node(peer_bps=peers((1, 2, 2 * HOST_BPS)))
    node.gpus[0].stats = PoolStats(free_nbytes=5000 * MB)
    node.run(1, node.model("b"), ends_s=9.0)
    assert node.choose(node.model("m", on={1: 1000 * MB})) == 2


@pytest.mark.parametrize(
    ("ends_s", "deadline_s", "may_wait", "await_resident", "waits"),
    [
        (0.05, 1.0, True, True, True),  # 0.05 + 0.02 s against 0.1 s of copying and its weight
        (0.05, 1.0, False, True, False),
        (0.05, 1.0, True, False, False),
        (0.15, 1.0, True, True, True),  # later than with a copy, but by less than that is
        (0.25, 1.0, True, True, False),
        (5.0, 9.0, True, True, False),  # a copy is sooner
        (0.05, 0.07, True, True, False),  # it would end in time only just: a tenth of the deadline must be left
        (0.05, 0.08, True, True, True),
    ],
)
def test_waiting_for_the_gpu_that_has_the_model(
    ends_s: float, deadline_s: float, may_wait: bool, await_resident: bool, waits: bool
) -> None:
    node = Node(await_resident=await_resident)
    node.run(1, node.model("b"), ends_s=ends_s)
    number = node.choose(node.model("m", on={1: 1000 * MB}), deadline_s, 0.0, may_wait)
    assert (number is None) is waits
    assert node.waiting.held_for == (1 if waits else None)


def test_a_gpu_whose_lease_is_overdue_is_not_waited_for() -> None:
    """Nobody knows when it will end."""
    node = Node()
    busy = node.model("b")
    node.run(1, busy, ends_s=0.05)
    model = node.model("m", on={1: 1000 * MB})
    assert node.choose(model, now_s=0.05, deadline_s=9.0) is None
    assert node.choose(model, now_s=5.0, deadline_s=9.0) is not None


def test_a_part_of_the_model_is_not_waited_for() -> None:
    node = Node()
    node.run(1, node.model("b"), ends_s=0.001)
    assert node.choose(node.model("m", on={1: 999 * MB})) is not None


# --- the papers'


def test_torpor_copies_over_the_fastest_peer_link() -> None:
    node = Node("torpor", peer_bps=peers((0, 2, 2 * HOST_BPS), (1, 3, 4 * HOST_BPS), (0, 3, 3 * HOST_BPS)))
    for number in (0, 1):
        node.run(number, node.model(f"busy-{number}"), ends_s=9.0)
    assert node.choose(node.model("m", on={0: 1000 * MB, 1: 1000 * MB})) == 3
    assert node.choose(node.model("n", on={0: 1000 * MB})) == 3
    node.run(3, node.model("busy-3"), ends_s=9.0)
    assert node.choose(node.model("o", on={0: 1000 * MB, 1: 1000 * MB})) == 2


def test_torpor_avoids_neighbours_that_load_and_heavy_ones_most() -> None:
    node = Node("torpor")
    heavy, light = node.model("heavy", nbytes=1000 * MB), node.model("light", nbytes=100 * MB)
    model = node.model("m", on={0: MB})  # a part is not there in full
    assert node.choose(model) == 0
    node.run(1, heavy, ends_s=9.0, copying_nbytes=1000 * MB, copies_until_s=0.1)
    assert node.choose(model) == 2  # no neighbour of it loads
    node.run(3, light, ends_s=9.0, copying_nbytes=100 * MB, copies_until_s=0.01)
    assert node.choose(model) == 2  # a light one
    node.run(2, node.model("busy"), ends_s=9.0)
    assert node.choose(model) == 0  # any


def test_torpor_does_not_mind_neighbours_that_only_run() -> None:
    node = Node("torpor")
    node.run(1, node.model("b"), ends_s=9.0)
    assert node.choose(node.model("m")) == 0


def test_torpor_gives_gpus_in_turn_to_models_that_are_nowhere() -> None:
    node = Node("torpor")
    assert [node.choose(node.model(f"m{number}")) for number in range(5)] == [0, 1, 2, 3, 0]
    node.run(1, node.model("busy"), ends_s=9.0)
    assert node.choose(node.model("n")) == 2, "the next that is free"


def test_tangram_takes_the_gpu_with_most_to_reuse() -> None:
    node = Node("tangram", peer_bps=peers((0, 2, 9 * HOST_BPS)))
    node.run(0, node.model("b"), ends_s=0.001)
    assert node.choose(node.model("m", on={0: 1000 * MB, 1: 100 * MB, 3: 200 * MB})) == 3
    assert node.choose(node.model("n", on={0: 1000 * MB})) == 1  # the first of equals


def test_random_is_any_free_gpu_and_follows_its_seed() -> None:
    def chosen(seed: int) -> list[int | None]:
        node = Node("random", seed=seed)
        node.run(1, node.model("b"), ends_s=9.0)
        return [node.choose(node.model("m", on={1: 1000 * MB, 2: 999 * MB})) for _ in range(40)]

    assert set(chosen(1)) == {0, 2, 3}
    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)


def test_bound_counts_shared_bytes_once_while_a_lease_runs() -> None:
    """Three users of one base of 2,500 MB, by instance 9,000 MB, have 4,000 MB; 500 MB are coming for a fourth."""
    node = Node("bound")
    for gpu in node.gpus.values():
        gpu.stats = PoolStats(free_nbytes=0)
    node.gpus[0].stats = PoolStats(free_nbytes=6000 * MB)
    for user in "abc":
        node.model(user, on={0: 3000 * MB}, nbytes=3000 * MB)
    running = node.model("d", on={0: 2500 * MB}, nbytes=3000 * MB)
    node.run(0, running, ends_s=9.0)
    assert node.choose(node.model("e", nbytes=5500 * MB)) is None
    assert node.waiting.held_for == 0
    assert node.choose(node.model("f", nbytes=5501 * MB)) is None
    assert node.waiting.held_for is None
