"""What is given up while links are too slow for all, and that the others are in time then."""

from typing import Any

import numpy as np
import pytest

from dormouse.controller.simulator.arrivals import arrivals
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.main import simulate, simulation_of
from dormouse.controller.simulator.scenario import POLICIES, parse_scenario
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.functions import Function
from dormouse.core.decisions.scheduling.rationing import MIN_SHARE, SETTLE_S, Rationing
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.decisions.scheduling.state import Gpu, Model, Running, Waiting
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.messages import Lease, PoolStats
from dormouse.schemas.policy import Policy

GB, MB = 10**9, 10**6


class Node:
    """One GPU of 10 GB behind 4 GB/s, and functions that are asked once a second."""

    def __init__(self, gpus: int = 1, **nbytes: int) -> None:
        self.gpus = {number: Gpu(number, 1, PoolStats(), 10 * GB) for number in range(gpus)}
        self.functions: dict[str, Function] = {}
        self.models: dict[str, Model] = {}
        for name, size in nbytes.items():
            function = self.functions[name] = Function(name, 1000, 120.0)
            function.deadline_s = 0.2
            function.measured(0.02, 0.0)
            model = self.models[name] = Model(name, function, 0.0)
            model.nbytes = size
        self.rationing = Rationing(Topology(host_bps=4.0 * GB), self.gpus, self.functions, self.models)
        self.now_s = 0.0

    def look(
        self, late: str = "", seconds: float = 2.0, *, busy: float = 0.9, link: float = 0.0, hindered: bool = True
    ) -> bool:
        """Everybody is asked, these are late, because of others or not; and then they are looked at. Meanwhile such
        parts of the GPUs' time and of their links are used.
        """
        self.now_s += seconds
        parts = len(self.gpus) * seconds / len(self.functions)
        for name, function in self.functions.items():
            for _ in range(10):
                function.arrived(self.now_s)
                function.ended(name in late.split(), 0.1, hindered and name in late.split())
            self.rationing.ended(self.models[name], busy * parts, int(link * parts * 4 * GB))
        return self.rationing.update(self.now_s)

    @property
    def given_up(self) -> list[str]:
        return [name for name, function in self.functions.items() if function.given_up]


SIZES = {"a": 100 * MB, "b": 100 * MB, "big": 3 * GB, "bigger": 4 * GB, "large": 4500 * MB, "biggest": 5 * GB}


def test_who_needs_most_of_the_link_is_given_up_first_and_only_so_many() -> None:
    node = Node(**SIZES)
    assert not node.look()
    assert node.look("a b big")
    assert node.given_up == ["biggest"], "without it a third of the link seconds is gone"
    assert not node.look("a b big", SETTLE_S / 2), "copies on their way still make others late"
    assert node.look("a b big", SETTLE_S)
    assert node.given_up == ["large", "biggest"]
    assert not node.look("a b big", SETTLE_S), "what is left fits into memory: no link is to blame"


def test_a_few_late_ones_are_no_reason() -> None:
    node = Node(**SIZES)
    node.look()
    for _ in range(3):
        node.functions["a"].ended(True, 0.1, hindered=True)
    assert not node.look()
    assert not node.given_up


def test_who_is_late_by_itself_is_no_reason() -> None:
    node = Node(**SIZES)
    for _ in range(9):
        assert not node.look("a b big", SETTLE_S, hindered=False)
    assert any(node.look("a b big", SETTLE_S) for _ in range(9))


def test_nobody_is_given_up_while_gpus_and_links_have_little_to_do() -> None:
    node = Node(**SIZES)
    for _ in range(40):
        assert not node.look("a b big", SETTLE_S, busy=0.5, link=0.5)
    assert any(node.look("a b big", SETTLE_S, busy=0.5, link=0.9) for _ in range(40))
    other = Node(**SIZES)
    assert any(other.look("a b big", SETTLE_S, busy=0.9, link=0.1) for _ in range(40))


def test_a_link_is_as_wide_as_the_switch_that_gpus_share() -> None:
    """Two GPUs behind 4 GB/s have no more than one."""
    for switch_bps, given_up in ((4.0 * GB, True), (0.0, False)):
        node = Node(gpus=2, **SIZES)
        topology = Topology(host_bps=4.0 * GB, switch_bps=switch_bps, switches=(0, 0))
        node.rationing = Rationing(topology, node.gpus, node.functions, node.models)
        for gpu in node.gpus.values():
            gpu.capacity_nbytes = 5 * GB
        if switch_bps:
            node.gpus[0].neighbours, node.gpus[1].neighbours = [node.gpus[1]], [node.gpus[0]]
        looks = [node.look("a b big", SETTLE_S, busy=0.3, link=0.45) for _ in range(40)]
        assert any(looks) == given_up


def test_what_a_percentile_allows_is_no_reason() -> None:
    """A tenth of all may be late, and a sixth is."""
    node = Node(**SIZES)
    for function in node.functions.values():
        function.percentile = 0.9
    for _ in range(9):
        assert not node.look("a", SETTLE_S)
    for function in node.functions.values():
        function.percentile = 0.95
    assert node.look("a", SETTLE_S)


def test_no_more_is_sacrificed_than_was_late() -> None:
    """Each is a sixth of the requests: one that is late allows one to be given up, and no second."""
    node = Node(**SIZES)
    for _ in range(40):
        node.look("a", SETTLE_S)
    assert node.given_up == ["biggest"]
    for _ in range(40):
        node.look("a b", SETTLE_S)
    assert node.given_up == ["large", "biggest"]


def test_who_cannot_wait_says_what_is_long() -> None:
    """They can wait for 180 ms: half of that carries 360 MB."""
    node = Node(**SIZES)
    assert not node.rationing.concerns(node.models["biggest"]), "nothing is known yet"
    node.look()
    assert [name for name, model in node.models.items() if node.rationing.concerns(model)] == [
        "big", "bigger", "large", "biggest"
    ]  # fmt: skip
    assert not node.rationing.long(0.09)
    assert node.rationing.long(0.091)


def test_the_given_up_get_more_while_all_are_in_time_and_are_then_taken_back() -> None:
    node = Node(**SIZES)
    node.look()
    node.look("a b big")
    rationing = node.rationing
    rationing.woke(0.5, node.now_s)
    assert rationing.next_s == pytest.approx(node.now_s + 0.5 / MIN_SHARE)
    looks = 0
    while node.given_up:
        node.look()
        looks += 1
        assert looks < 1000
    rationing.woke(0.5, node.now_s)
    assert rationing.next_s < node.now_s + 0.5 / MIN_SHARE / 9
    assert looks > 20, "not before they were seen to do no harm"
    assert any(node.look("a b big") for _ in range(9)), "and are given up again"
    rationing.woke(0.5, node.now_s)
    assert rationing.next_s == pytest.approx(node.now_s + 0.5 / MIN_SHARE)


def test_who_is_given_up_is_taken_back_when_its_copy_is_long_no_more() -> None:
    """The impatient leave, and nobody else minds a second."""
    node = Node(**SIZES)
    node.look()
    node.look("a b big")
    assert node.given_up
    for function in node.functions.values():
        function.deadline_s = 60.0
    for _ in range(1000):
        node.look()
    assert not node.given_up


def test_idle_gpus_take_all_back() -> None:
    """Once the rush is over, nobody waits for thousands of requests in time."""
    node = Node(**SIZES)
    while len(node.given_up) < 2:
        node.look("a b big", SETTLE_S)
    for _ in range(60):  # they fade
        node.look(busy=0.05)
    assert not node.given_up


def test_a_policy_that_gives_nobody_up_takes_all_back() -> None:
    core = Scheduler(seed=1, revoke_s=1.0, max_waiting=9)
    core.handle(ev.InstanceKnown("i", "f"), 0.0)
    core.handle(ev.ModelSized("i", 1, GB), 0.0)
    core.handle(ev.PolicyChosen(Policy(order="feasible")), 0.0)
    before = core.models["i"].rank
    core.functions["f"].given_up = True
    core.handle(ev.PolicyChosen(Policy(order="effort", eviction="tangram")), 0.0)
    assert core.functions["f"].given_up
    core.handle(ev.PolicyChosen(Policy(order="feasible")), 0.0)
    assert not core.functions["f"].given_up
    assert core.models["i"].rank == before


def test_late_requests_of_the_given_up_count_for_nobody() -> None:
    node = Node(**SIZES)
    node.look()
    node.look("a b big")
    given = node.given_up
    for _ in range(5):
        node.look("biggest", SETTLE_S)
    assert node.given_up == given


def test_one_gpu_is_left_to_those_who_cannot_wait() -> None:
    node = Node(gpus=3, **SIZES)
    node.look()
    for number, (name, until_s) in enumerate((("big", 9.0), ("bigger", 8.0))):
        assert node.rationing.crowded(2.0) is None
        waiting = Waiting(number, node.models[name], 2.0, 3.0)
        running = Running(waiting, Lease(gpu=number, epoch=1, serial=1, secret=0), 2.0)
        running.copies_until_s, running.copying_nbytes = until_s, GB
        node.gpus[number].take_turn(running, 2.0)
    assert node.rationing.crowded(2.0) == 1, "the one that ends first"
    assert node.rationing.crowded(8.5) is None


# --- a whole run

SMALL = (("s1", 60, 25), ("s2", 80, 28), ("s3", 100, 9), ("s4", 240, 17))
LARGE = (("l1", 1300, 43), ("l2", 1600, 55), ("l3", 2000, 65), ("l4", 2400, 80))


def made(functions: int, minutes: float, policy: str) -> tuple[Simulation, Any, Any, int, list[bool], Any]:
    """Two GPUs of 10 GB behind one switch of 4 GB/s; a quarter of the models has 1.3 to 2.4 GB."""
    models: list[dict[str, Any]] = []
    for rows, count, deadline in ((SMALL, functions - functions // 4, "200ms"), (LARGE, functions // 4, "1s")):
        for name, size, run in rows:
            wake = max(run, size / 4)
            number = count // len(rows)
            models.append(
                {"name": name, "size": size * MB, "run": f"{run}ms", "wake": f"{wake}ms", "deadline": deadline,
                 "functions": number}
            )  # fmt: skip
    tree = {
        "gpus": {"count": 2, "memory": 10 * GB, "link": 4 * GB, "switch": 4 * GB},
        "models": models,
        "arrivals": {"process": "poisson", "rate": 10.0, "minutes": max(minutes, 0.1)},
    }
    scenario = parse_scenario(tree, "test")
    times_s, who, warm = arrivals(scenario, 0)
    simulation = simulation_of(scenario, POLICIES[policy], 0)
    assert isinstance(simulation, Simulation)
    small = [model.nbytes < GB for model in scenario.models]
    return simulation, times_s, who, warm, small, np.asarray(scenario.deadlines_s)


def test_who_wants_more_than_there_is_takes_nothing_from_others() -> None:
    """64 functions whose deadline is a wake alone, on GPUs that have time: `feasible` is as good as can be."""
    tree = {
        "gpus": {"count": 2, "memory": 800 * MB, "link": 700 * MB},
        "models": [
            {"name": f"m{size}", "size": size * MB, "run": "27ms", "wake": f"{size / 0.7 + 20}ms",
             "deadline": f"{(size / 0.7 + 20) * tight}ms", "functions": 8}
            for tight in (1.0, 2.5) for size in (59, 50, 35, 19)
        ],
        "arrivals": {"process": "poisson", "rate": 20.0, "minutes": 3.0},
    }  # fmt: skip
    scenario = parse_scenario(tree, "test")
    found = {policy: simulate(scenario, policy, POLICIES[policy], 0) for policy in ("default", "feasible")}
    assert found["feasible"].late > 0.05
    assert 0.5 < found["feasible"].gpu_busy < 0.7
    assert found["default"].late <= found["feasible"].late + 0.02
    assert found["default"].p98_ms is not None
    assert found["default"].p98_ms < 1000.0


def test_small_models_are_in_time_where_the_link_does_not_suffice_for_large_ones() -> None:
    """80 functions, of which the 20 large ones would need 6 GB/s: `feasible` makes everybody late."""
    late = {}
    for policy in ("default", "feasible"):
        simulation, times_s, who, warm, small, deadlines_s = made(80, 4.0, policy)
        latency_s = simulation.run(times_s, who, warm)
        assert not np.isnan(latency_s).any(), "a request without an answer"
        counted = np.arange(len(times_s)) >= warm
        mine = counted & np.asarray(small)[who] & (times_s > times_s[warm] + 20.0)
        late[policy] = float((latency_s > deadlines_s[who])[mine].mean())
    assert late["default"] < 0.02
    assert late["feasible"] > 0.3
