"""What `dormouse status --json` says of GPUs, models and the store, from what executors and the store have told."""

import math
import sys
from dataclasses import dataclass, field

import orjson
import pytest

from dormouse.controller.news import News
from dormouse.controller.status import NO_STORE, fragmentation, status
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas import messages as m

STATS = m.PoolStats(
    weights_nbytes=500,
    lost_nbytes=20,
    activation_nbytes=80,
    free_nbytes=400,
    largest_nbytes=300,
    moved_nbytes=9,
    segments=3,
    kv_nbytes=40,
)
STORE = m.StoreStatus(
    host_nbytes=5, host_budget_nbytes=10, file_nbytes=7, file_budget_nbytes=-1, segments=4, slabs=2, trouble="disk full"
)


def done(wake: ev.WakeOn, copied: int, resident: list[tuple[str, int]], peer: int = 0, file: int = 0) -> m.Done:
    return m.Done(
        serial=wake.lease.serial,
        outcome="ended",
        gpu_us=10,
        copied_nbytes=copied,
        peer_nbytes=peer,
        file_nbytes=file,
        resident=resident,
        peak_activation_nbytes=60,
        version=1,
        stats=STATS,
    )


@dataclass
class World:
    """Two GPUs; functions a and b have an instance each and share 300 of their 500 bytes; a has been woken on GPU 1."""

    core: Scheduler = field(default_factory=lambda: Scheduler(seed=1, revoke_s=5.0, max_waiting=9))
    hellos: dict[int, m.Hello] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in (1, 0):
            info = m.DeviceInfo(name="Emulated", total_nbytes=1000, capability=(9, 0), multiprocessors=1)
            stats = m.PoolStats(free_nbytes=1000 - number, largest_nbytes=1000 - number)
            self.hellos[number] = m.Hello(info=info, pool="regions", reason="no driver", stats=stats)
            self.core.handle(ev.ExecutorUp(number, 4, stats, 7, 70), 0.0)
        self.core.handle(ev.ExecutorDown(0), 0.0)
        for instance in ("i-a", "i-b"):
            self.core.handle(ev.InstanceKnown(instance, instance[2:]), 0.0)
            self.core.handle(ev.ModelSized(instance, 1, 500), 0.0)
        (wake,) = self.core.handle(ev.Asked(1, "i-a", 9.0, 1), 1.0)
        assert isinstance(wake, ev.WakeOn)
        self.core.handle(ev.Woken(1, 4, wake.lease.serial, 1500), 1.0)
        told = done(wake, 500, [("i-a", 500), ("i-b", 300)], peer=100, file=150)
        self.core.handle(ev.LeaseOver(1, 4, told), 2.0)
        self.core.handle(ev.ExecutorUp(0, 5, self.hellos[0].stats), 2.0)
        self.report = m.StoreReport(
            query=1,
            instances=[self.place("i-a", "a", ["b"]), self.place("i-b", "b", ["a"]), self.place("i-x", "kept", ["a"])],
        )

    def place(self, instance: str, function: str, shared_with: list[str]) -> m.InstanceBytes:
        return m.InstanceBytes(
            instance=instance,
            function=function,
            nbytes=500,
            host_nbytes=200,
            file_nbytes=500,
            shared_nbytes=300,
            shared_with=shared_with,
        )


def test_runtimes_of_a_language_model() -> None:
    world, news = World(), News()
    load = m.EngineLoad(running=1, waiting=2, preempted=3, blocks=4, used=2, idle=1, block_nbytes=50, reused_nbytes=600)
    for number in (0, 1):
        news.came_up(number)
    news.heard(1, m.RuntimeLoad(instances=["i-a"], number=7, pid=99, load=load))
    news.heard(1, m.RuntimeLoad(instances=["i-b"], number=8, pid=98, load=load))
    news.heard(1, m.RuntimeLoad(instances=["i-b"], number=8, pid=0, load=None))
    told = status(world.core, world.hellos, ["a", "b"], STORE, world.report, 5.0, news)
    functions = told["functions"]
    assert [told["gpus"][number]["contexts_nbytes"] for number in (0, 1)] == [0, 7]
    assert functions["b"]["runtimes"] == []
    (told,) = functions["a"]["runtimes"]
    assert (told["gpu"], told["pid"], told["running"], told["waiting"], told["preempted"]) == (1, 99, 1, 2, 3)
    assert (told["kv_blocks"], told["kv_blocks_used"], told["kv_blocks_idle"], told["kv_nbytes"]) == (4, 2, 1, 200)
    assert (told["kv_share"], told["reused_nbytes"]) == (round(200 / 999, 4), 600)
    news.came_up(1)  # its executor has died, and its runtimes with it
    functions = status(world.core, world.hellos, ["a"], STORE, world.report, 5.0, news)["functions"]
    assert functions["a"]["runtimes"] == []


def test_a_gpu() -> None:
    world = World()
    (wake,) = world.core.handle(ev.Asked(2, "i-b", 9.0, 1), 3.0)
    assert isinstance(wake, ev.WakeOn)
    gpus = status(world.core, world.hellos, [], STORE, world.report, 5.0)["gpus"]
    assert list(gpus) == [0, 1]
    assert gpus[1] == {
        "epoch": 4,
        "name": "Emulated",
        "pool": "regions",
        "reason": "no driver",
        "total_nbytes": 1000,
        "capacity_nbytes": 999,
        "weights_nbytes": 500,
        "kv_nbytes": 40,
        "lost_nbytes": 20,
        "activation_nbytes": 80,
        "context_nbytes": 7,
        "contexts_nbytes": 0,
        "beside_nbytes": 70,
        "free_nbytes": 400,
        "largest_free_nbytes": 300,
        "fragmentation": 0.25,
        "moved_nbytes": 9,
        "segments": 3,
        "busy_with": "b",
        "turns": [{"function": "b", "idle": False}],
        "seats": ["b"],
        "resident": ["a", "b"],
        "host_bps": 10**10,
        "switch_with": [],
        "peer_bps": {},
        "state": "serves",
        "busy": {"seconds": 60, "share": 0.0, "functions": {}, "others": 0},
        "trouble": [],
        "last_preload": None,
    }
    assert (gpus[0]["busy_with"], gpus[0]["resident"], gpus[0]["free_nbytes"]) == (None, [], 1000)
    assert (gpus[0]["turns"], gpus[0]["seats"]) == ([], [])


def test_the_turns_and_seats_of_a_gpu() -> None:
    """Function a has lost its turn, and b has one that it does not use."""
    world = World()
    world.core.handle(ev.ExecutorDown(0), 3.0)
    (first,) = world.core.handle(ev.Asked(2, "i-a", 9.0, 1), 3.0)
    world.core.handle(ev.Asked(3, "i-b", 9.0, 1), 3.0)
    assert isinstance(first, ev.WakeOn)
    world.core.handle(ev.TurnIdle(1, 4, first.lease.serial), 3.1)
    world.core.handle(ev.TurnIdle(1, 4, first.lease.serial + 1), 3.2)
    gpu = status(world.core, world.hellos, [], STORE, None, 5.0)["gpus"][1]
    assert (gpu["busy_with"], gpu["turns"], gpu["seats"]) == ("b", [{"function": "b", "idle": True}], ["a", "b"])


def test_the_links_of_a_gpu() -> None:
    world = World()
    peers = ((0.0, 5e9), (0.0, 0.0))
    world.core.handle(ev.TopologyKnown(Topology(host_bps=3e9, switches=(4, 4), peer_bps=peers)), 4.0)
    gpus = status(world.core, world.hellos, [], STORE, None, 5.0)["gpus"]
    told = [(gpus[number]["host_bps"], gpus[number]["switch_with"], gpus[number]["peer_bps"]) for number in (0, 1)]
    assert told == [(3 * 10**9, [1], {}), (3 * 10**9, [0], {0: 5 * 10**9})]


def test_a_function_by_place() -> None:
    world = World()
    functions = status(world.core, world.hellos, ["a", "b", "new"], STORE, world.report, 5.0)["functions"]
    assert functions["a"] == {
        "nbytes": 500,
        "peak_activation_nbytes": 60,
        "resident_on": [1],
        "gpu_nbytes": {1: 500},
        "host_nbytes": 200,
        "file_nbytes": 500,
        "shared_nbytes": 300,
        "shared_with": ["b"],
        "leases": 1,
        "wakes": 1,
        "evictions": 0,
        "preloads": 0,
        "copied_nbytes": 500,
        "copied_peer_nbytes": 100,
        "copied_file_nbytes": 150,
        "gpu_us": 10,
        "repaired": 0,
        "replayed": 0,
        "gpus": {1: 1},
        "last_wake": {
            "gpu": 1,
            "copied_nbytes": 500,
            "host_nbytes": 250,
            "peer_nbytes": 100,
            "file_nbytes": 150,
            "wake_us": 1500,
        },
        "last_eviction": None,
        "runtimes": [],
        "pinned": False,
        "service": {
            "counted": 1,
            "in_time": 1.0,
            "deadline_ms": 1000.0,
            "percentile": 98.0,
            "complies": True,
            "rrc": -1.0,
            "rate_s": pytest.approx(math.log(2) / 120, rel=0.1),
            "run_ms": None,  # it has never been there already
            "wake_ms": pytest.approx(1000.0),
            "heavy": False,
        },
    }
    assert (functions["b"]["gpu_nbytes"], functions["b"]["last_wake"]) == ({1: 300}, None)  # never woken itself
    assert (functions["b"]["service"]["counted"], functions["b"]["service"]["in_time"]) == (0, None)
    assert functions["kept"]["service"] is None
    assert functions["new"].keys() == functions["a"].keys()
    assert (functions["kept"]["nbytes"], functions["kept"]["file_nbytes"]) == (500, 500)  # of no instance yet


def test_whose_request_evicted_it_and_by_what_rule() -> None:
    """Function b runs on GPU 1, and all of a but 100 bytes goes."""
    world = World()
    world.core.handle(ev.ExecutorDown(0), 2.5)
    (wake,) = world.core.handle(ev.Asked(2, "i-b", 9.0, 1), 3.0)
    assert isinstance(wake, ev.WakeOn)
    world.core.handle(ev.LeaseOver(1, 4, done(wake, 200, [("i-b", 500), ("i-a", 100)])), 3.5)
    told = status(world.core, world.hellos, ["a"], STORE, None, 5.0)["functions"]
    assert told["a"]["last_eviction"] == {
        "gpu": 1,
        "ago_s": 1.5,
        "nbytes": 400,
        "for": "b",
        "rule": "least exposed time x rate",
    }
    assert (told["a"]["evictions"], told["b"]["last_eviction"]) == (1, None)


def test_heavy_and_light_by_measurement() -> None:
    """Each model has 500 bytes, which no run but the shortest would not hide."""
    world = World()
    for name, run_s in (("a", 1e-9), ("b", 1.0)):
        world.core.functions[name].measured(run_s, 0.0)
    told = status(world.core, world.hellos, [], STORE, None, 5.0)["functions"]
    assert (told["a"]["service"]["heavy"], told["b"]["service"]["heavy"]) == (True, False)
    assert (told["b"]["service"]["run_ms"], told["b"]["service"]["wake_ms"]) == (1000.0, 1000.0)


def test_thousands_of_functions_on_many_gpus_are_no_burden() -> None:
    """Not by the clock: what is done for each function and request does not grow with the number of GPUs."""
    core = Scheduler(seed=1, revoke_s=5.0, max_waiting=9999)
    for number in range(64):
        core.handle(ev.ExecutorUp(number, 1, m.PoolStats(free_nbytes=1000)), 0.0)
    for number in range(5000):
        core.handle(ev.InstanceKnown(f"i{number}", f"f{number}"), 0.0)
        core.handle(ev.ModelSized(f"i{number}", 1, 500), 0.0)
    for number in range(4000):
        core.handle(ev.Asked(number, f"i{number}", 9.0, 1), 1.0)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        told = status(core, {}, [], NO_STORE, None, 2.0)
    finally:
        sys.setprofile(None)
    assert (len(told["functions"]), len(told["waits"]["oldest"])) == (5000, 20)
    assert calls < 50 * (5000 + 4000)


def test_two_versions_of_a_function_do_not_share_with_themselves() -> None:
    world = World()
    world.core.handle(ev.InstanceKnown("i-a2", "a"), 3.0)
    report = m.StoreReport(query=1, instances=[world.place("i-a", "a", ["a"]), world.place("i-a2", "a", ["i-a", "b"])])
    functions = status(world.core, world.hellos, [], STORE, report, 5.0)["functions"]
    assert functions["a"]["shared_with"] == ["b"]
    assert functions["a"]["host_nbytes"] == 200  # of one: they mostly have the same bytes


def test_a_store_that_does_not_answer() -> None:
    world = World()
    told = status(world.core, world.hellos, ["a"], STORE, None, 5.0)
    assert told["store"] == {
        "answered": False,
        "host_nbytes": 5,
        "host_budget_nbytes": 10,
        "file_nbytes": 7,
        "file_budget_nbytes": None,
        "segments": 4,
        "slabs": 2,
        "trouble": "disk full",
    }
    assert (told["functions"]["a"]["nbytes"], told["functions"]["a"]["host_nbytes"]) == (500, 0)


def test_before_anybody_has_said_anything() -> None:
    told = status(Scheduler(seed=1, revoke_s=5.0, max_waiting=9), {}, [], NO_STORE, None, 0.0)
    assert (told["gpus"], told["functions"], told["waiting"]) == ({}, {}, 0)


def test_it_is_json() -> None:
    world = World()
    told = orjson.loads(
        orjson.dumps(status(world.core, world.hellos, [], STORE, world.report, 5.0), option=orjson.OPT_NON_STR_KEYS)
    )
    assert told["functions"]["a"]["gpu_nbytes"] == {"1": 500}


def test_fragmentation() -> None:
    assert fragmentation(m.PoolStats()) == 0.0
    assert fragmentation(m.PoolStats(free_nbytes=100, largest_nbytes=100)) == 0.0
    assert fragmentation(m.PoolStats(free_nbytes=100, largest_nbytes=1)) == 0.99
    assert fragmentation(m.PoolStats(free_nbytes=100, largest_nbytes=150)) == 0.0  # reserved for activations meanwhile
