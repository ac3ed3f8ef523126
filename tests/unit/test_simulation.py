"""The core against simulated devices: what must hold in every run, and slowdowns that Torpor has measured."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.messages import Done, PoolStats
from dormouse.schemas.policy import DEFAULT, EVICTIONS, ORDERS, PLACEMENTS, Policy

MB = 1_000_000
INFINITY = float("inf")
CAPACITY = 1000 * MB


@dataclass
class Scenario:
    policy: Policy
    topology: Topology
    gpus: int
    models: list[ModelSpec]
    deadlines_s: list[float]
    arrivals: list[tuple[float, int]]  # by time; which function

    def simulation(self) -> Simulation:
        return Simulation(self.policy, self.topology, self.gpus, CAPACITY, self.models, self.deadlines_s, 0.9, seed=3)

    def run(self, made: Simulation) -> list[float]:
        times_s = np.array([at_s for at_s, _ in self.arrivals], dtype=np.float64)
        functions = np.array([function for _, function in self.arrivals], dtype=np.int64)
        latencies: list[float] = made.run(times_s, functions).tolist()
        return latencies


@dataclass
class Watch:
    """Stands between a simulation and its core, and judges every event and action."""

    made: Simulation
    bound_s: float
    log: list[tuple[float, ev.Event, tuple[ev.Action, ...]]] = field(default_factory=list)
    asked: dict[int, tuple[float, str]] = field(default_factory=dict)  # by request that waits: since when, instance
    leases: dict[int, ev.WakeOn] = field(default_factory=dict)  # by GPU
    fates: dict[int, type[ev.Action]] = field(default_factory=dict)  # by request

    def run(self, scenario: Scenario) -> list[float]:
        handle = self.made.core.handle

        def watched(event: ev.Event, now_s: float) -> list[ev.Action]:
            self.before(event, now_s)
            actions = handle(event, now_s)
            self.log.append((now_s, event, tuple(actions)))
            for action in actions:
                self.after(action, now_s)
            self.made.core.check()
            self.memories()
            return actions

        with patch.object(self.made.core, "handle", watched):
            latencies = scenario.run(self.made)
        self.memories()
        return latencies

    def before(self, event: ev.Event, now_s: float) -> None:
        match event:
            case ev.Asked(request=request, instance=instance):
                self.asked[request] = (now_s, instance)
            case ev.LeaseOver(gpu=gpu, done=done):
                wake = self.leases.pop(gpu)
                assert wake.lease.serial == done.serial
                there = self.made.gpus[gpu].residency.resident_nbytes(wake.instance)
                assert there == self.made.core.models[wake.instance].nbytes, "a leased model was evicted"
                assert done.copied_nbytes == wake.wake_nbytes, "the core was wrong about what is resident"
            case _:
                pass

    def after(self, action: ev.Action, now_s: float) -> None:
        match action:
            case ev.WakeOn(request=request, lease=lease, instance=instance):
                assert lease.gpu not in self.leases, "a GPU runs two leases"
                leased = {wake.instance for wake in self.leases.values()}
                assert instance not in leased, "an instance has two leases"
                asked_s, _ = self.asked.pop(request)
                for other, (since_s, its) in self.asked.items():
                    overtaken = (since_s, other) < (asked_s, request) and its not in leased and its != instance
                    if overtaken and now_s - since_s >= self.bound_s:
                        assert self.rationed(other, its), f"{request} overtook {other}"
                self.leases[lease.gpu] = action
            case ev.RefuseAsk(request=request) | ev.FinishLease(request=request) | ev.LoseLease(request=request):
                assert request not in self.fates, "a request met two fates"
                self.fates[request] = type(action)
                self.asked.pop(request, None)
            case _:
                raise AssertionError(f"{action} in a run in which nothing fails")

    def rationed(self, request: int, instance: str) -> bool:
        """Whether it waits for its share, as long wakes of functions that are given up do (rationing.py)."""
        core = self.made.core
        return core.waiting[request].rationed or core.models[instance].function.given_up

    def memories(self) -> None:
        """Books that add up; of idle GPUs the core knows them to the byte."""
        for number, gpu in enumerate(self.made.gpus):
            residency, known = gpu.residency, self.made.core.gpus[number]
            residency.check()
            if known.running is None:
                assert residency.pool.used_nbytes == sum(map(residency.resident_nbytes, residency.instances))
                assert known.resident == {name: residency.resident_nbytes(name) for name in residency.instances}
                assert known.stats.free_nbytes == residency.pool.free_nbytes


POLICIES = st.builds(
    Policy,
    order=st.sampled_from(ORDERS),
    placement=st.sampled_from(PLACEMENTS),
    eviction=st.sampled_from(EVICTIONS),
    passed_over_ms=st.sampled_from([0, 1, 100, 500]),
    passed_over_share=st.sampled_from([0.2, 1.0]),
    await_resident=st.booleans(),
    window=st.sampled_from([1, 10, 1000]),
    half_life_ms=st.sampled_from([100, 120_000]),
)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Up to four GPUs of 1 GB; a model copies for up to 0.1 s, and some fit none."""
    gpus = draw(st.integers(1, 4))
    links = st.sampled_from([0.0, 5_000.0 * MB, 40_000.0 * MB])
    topology = Topology(
        host_bps=10_000.0 * MB,
        switch_bps=draw(st.sampled_from([0.0, 12_000.0 * MB])),
        switches=draw(st.sampled_from([(), (0, 0, 1, 1), (0, 0, 0, 0)])),
        peer_bps=tuple(tuple(0.0 if a == b else draw(links) for b in range(gpus)) for a in range(gpus)),
    )
    spec = st.builds(
        ModelSpec,
        name=st.just("m"),
        nbytes=st.sampled_from([1, 100, 300, 500, 999, 1000, 1001]).map(lambda n: n * MB),
        run_s=st.sampled_from([0.001, 0.02, 0.1]),
        extra_s=st.sampled_from([0.0, 0.01]),
        peer_extra_s=st.sampled_from([0.0, 0.005]),
        segment_nbytes=st.sampled_from([0, 70 * MB, 400 * MB]),
    )
    models = draw(st.lists(spec, min_size=1, max_size=6))
    deadlines_s = [draw(st.sampled_from([0.01, 0.1, 0.3, 5.0])) for _ in models]
    # drawn by seed: hypothesis alone prefers few arrivals, too few for requests to queue
    chance = random.Random(draw(st.integers(0, 1 << 32)))
    mean_gap_s = draw(st.sampled_from([0.001, 0.01, 0.05, 1.0]))
    arrivals: list[tuple[float, int]] = []
    now_s = 0.0
    for _ in range(draw(st.sampled_from([1, 10, 60]))):
        now_s += chance.choice((0.0, chance.expovariate(1.0 / mean_gap_s)))
        arrivals.append((now_s, chance.randrange(len(models))))
    return Scenario(draw(POLICIES), topology, gpus, models, deadlines_s, arrivals)


@settings(max_examples=120, deadline=None)
@given(scenarios())
def test_what_holds_in_every_run(scenario: Scenario) -> None:
    """Every request meets exactly one fate, the longest waiting one in its turn; no GPU or instance has two leases;
    nothing leased is evicted; the core's books are the devices'.
    """
    policy = scenario.policy
    bounded = policy.passed_over_ms and policy.passed_over_share == 1.0 and policy.placement != "bound"
    bound_s = policy.passed_over_ms / 1000 if bounded else INFINITY
    watch = Watch(scenario.simulation(), bound_s)
    latencies = watch.run(scenario)
    assert set(watch.fates) == set(range(len(scenario.arrivals)))
    assert not watch.asked
    assert not watch.leases
    for request, (_, function) in enumerate(scenario.arrivals):
        spec = scenario.models[function]
        if spec.nbytes > CAPACITY:
            assert watch.fates[request] is ev.RefuseAsk
            assert np.isnan(latencies[request])
        elif policy.placement != "bound" or watch.fates[request] is not ev.RefuseAsk:
            assert watch.fates[request] is ev.FinishLease
            assert latencies[request] >= spec.run_s * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(scenarios())
def test_equal_scenarios_give_equal_logs(scenario: Scenario) -> None:
    first, second = (Watch(scenario.simulation(), float("inf")) for _ in range(2))
    latencies = first.run(scenario), second.run(scenario)
    assert first.log == second.log
    assert np.array_equal(*latencies, equal_nan=True)


@settings(max_examples=30, deadline=None)
@given(scenarios())
def test_the_log_fed_to_another_core_gives_the_same_actions(scenario: Scenario) -> None:
    watch = Watch(scenario.simulation(), float("inf"))
    watch.run(scenario)
    other = scenario.simulation().core  # has been told of GPUs and models, as the first had
    for now_s, event, actions in watch.log:
        assert tuple(other.handle(event, now_s)) == actions


# --- one request at a time, by hand

ONE = Topology(host_bps=10_000.0 * MB, switch_bps=12_000.0 * MB, switches=(0, 0))
MODEL = ModelSpec(name="m", nbytes=500 * MB, run_s=0.02, extra_s=0.01)


def latencies(topology: Topology, gpus: int, models: list[ModelSpec], arrivals: list[tuple[float, int]]) -> list[float]:
    scenario = Scenario(Policy(order="fifo"), topology, gpus, models, [9.0] * len(models), arrivals)
    return scenario.run(scenario.simulation())


def test_a_wake_takes_its_copy_and_what_that_adds_and_then_the_model_is_there() -> None:
    assert latencies(ONE, 1, [MODEL], [(0.0, 0), (1.0, 0)]) == pytest.approx([0.06, 0.02])


def test_what_is_left_of_a_model_need_not_be_copied() -> None:
    """Models of 500, 500 and 400 MB on 1000 MB: the third takes 400 MB of the first, whose other 100 stay."""
    parts = msgspec.structs.replace(MODEL, segment_nbytes=100 * MB)
    models = [parts, parts, ModelSpec(name="n", nbytes=400 * MB, run_s=0.02)]
    times = [(0.0, 0), (1.0, 1), (2.0, 1), (3.0, 2), (4.0, 0)]
    assert latencies(ONE, 1, models, times)[4] == pytest.approx(0.04 + 0.01 * 0.8)


def test_two_copies_share_a_switch() -> None:
    """Each has 6000 MB/s of it."""
    assert latencies(ONE, 2, [MODEL, MODEL], [(0.0, 0), (0.0, 1)]) == pytest.approx([0.5 / 6 + 0.01] * 2)


def test_a_request_that_is_late_does_not_take_the_model_from_one_that_is_not() -> None:
    """Function 0's model is on GPU 0. When GPU 1 falls free, its newer request waits for GPU 0, which will be free in
    time; its older one is late already, and must not have the model woken on GPU 1 meanwhile: an instance has one
    lease.
    """
    models = [
        ModelSpec(name="m", nbytes=900 * MB, run_s=0.02),
        ModelSpec(name="b", nbytes=MB, run_s=0.20),
        ModelSpec(name="c", nbytes=MB, run_s=0.22),
    ]
    known = [(0.0, 0), (1.0, 0), (2.0, 1), (3.0, 1), (4.0, 2), (5.0, 2)]
    arrivals = [*known, (10.0, 1), (10.0, 2), (10.05, 0), (10.19, 0)]
    for order in ("feasible", "effort"):
        scenario = Scenario(Policy(order=order), Topology(), 2, models, [0.1, 9.0, 9.0], arrivals)
        assert scenario.run(scenario.simulation())[9] <= 0.1


@pytest.mark.parametrize("order", ORDERS)
def test_no_stream_of_others_starves_a_request(order: str) -> None:
    """One GPU, twice as many requests as it can serve, of a function that every order would rather serve than the one
    that has asked once and whose deadline has passed long ago; the bound is a second.
    """
    models = [ModelSpec(name="m", nbytes=MB, run_s=0.1), ModelSpec(name="one", nbytes=MB, run_s=0.1)]
    times = [(number * 0.05, 0) for number in range(100)]
    scenario = Scenario(Policy(order=order), Topology(), 1, models, [0.15, 0.01], sorted([*times, (1.01, 1)]))
    scenario.policy = Policy(order=order, passed_over_ms=1000, passed_over_share=1.0)
    watch = Watch(scenario.simulation(), 1.0)
    found = watch.run(scenario)[scenario.arrivals.index((1.01, 1))]
    # those before it that have waited as long go first: 21 arrived by then, each 0.1 s
    assert found <= 21 * 0.1 + 0.1 * 2


@pytest.mark.parametrize("order", ORDERS)
def test_overdue_requests_have_their_share_and_no_more(order: str) -> None:
    """The same, longer, with a tenth of the time for overdue requests: of each second that a GPU runs while somebody is
    overdue, a tenth goes to the oldest, and what is left to those that can be in time, if the order can tell.
    """
    models = [ModelSpec(name="m", nbytes=MB, run_s=0.1), ModelSpec(name="one", nbytes=MB, run_s=0.1)]
    times = [(number * 0.05, 0) for number in range(1000)]
    arrivals = sorted([*times, (1.01, 1)])
    for share in (0.1, 0.5):
        policy = Policy(order=order, passed_over_ms=1000, passed_over_share=share)
        scenario = Scenario(policy, Topology(), 1, models, [0.15, 0.01], arrivals)
        latencies = scenario.run(scenario.simulation())
        assert latencies[arrivals.index((1.01, 1))] <= 1.0 + 22 * 0.1 / share + 0.2
        late = [latency > 0.15 for latency, (_, function) in zip(latencies, arrivals, strict=True) if function == 0]
        if order in ("feasible", "effort"):  # half of all can be in time
            assert late.count(False) >= 0.9 * (1.0 - share) * 500


def over(core: Scheduler, gpu: int, serial: int, now_s: float, resident: dict[str, int] | None = None) -> None:
    done = Done(
        serial=serial,
        outcome="ended",
        gpu_us=0,
        copied_nbytes=sum((resident or {}).values()),
        peer_nbytes=0,
        file_nbytes=0,
        resident=list((resident or {}).items()),
        peak_activation_nbytes=0,
        version=1,
        stats=PoolStats(free_nbytes=CAPACITY, largest_nbytes=CAPACITY),
    )
    core.handle(ev.LeaseOver(gpu, 1, done), now_s)


def holding(held: int, policy: Policy = DEFAULT, run_s: float = 0.01) -> Scheduler:
    """GPU 0 has models of 10 MB and runs "long" until 0.15 s, as it is expected; GPU 1 is free, and has "there"; so
    many requests for GPU 0's models, from 0.1 s on.
    """
    core = Scheduler(seed=1, revoke_s=1.0, max_waiting=99, policy=policy, topology=Topology(host_bps=100.0 * MB))
    for gpu in range(2):
        core.handle(ev.ExecutorUp(gpu, 1, PoolStats(free_nbytes=CAPACITY, largest_nbytes=CAPACITY)), 0.0)
    names = [f"m{number}" for number in range(held)]
    for name in ["long", "there", *names]:
        core.handle(ev.FunctionKnown(name, 1.0, 0.98, 1.0), 0.0)
        core.handle(ev.InstanceKnown(name, name), 0.0)
        core.handle(ev.ModelSized(name, 1, 10 * MB), 0.0)
        core.functions[name].measured(0.15 if name == "long" else run_s, 0.0)
    for gpu, resident in ((0, ["long", *names]), (1, ["there"])):
        core.handle(
            ev.Evicted(gpu, 1, tuple((name, 10 * MB) for name in resident), PoolStats(free_nbytes=500 * MB)), 0.0
        )
    assert len(core.handle(ev.Asked(0, "long", 9.0, 1), 0.0)) == 1
    for number, name in enumerate(names):
        assert core.handle(ev.Asked(1 + number, name, 1.1, 1), 0.1) == []
    return core


def test_a_request_does_not_wait_for_a_gpu_that_is_gone() -> None:
    """Overdue, it came first, but its GPU was busy and the free one went to another; then its GPU is lost."""
    core = Scheduler(
        seed=1, revoke_s=1.0, max_waiting=9, policy=Policy(order="edf", placement="bound", passed_over_ms=1)
    )
    for gpu in range(2):
        core.handle(ev.ExecutorUp(gpu, 1, PoolStats(free_nbytes=CAPACITY, largest_nbytes=CAPACITY)), 0.0)
    for name, gpu, nbytes in (("long", 0, MB), ("large", 0, 900 * MB), ("a", 1, 200 * MB), ("b", 1, 200 * MB)):
        core.handle(ev.InstanceKnown(name, name), 0.0)
        core.handle(ev.ModelSized(name, 1, nbytes), 0.0)
        core.handle(ev.Evicted(gpu, 1, ((name, nbytes),), PoolStats(free_nbytes=50 * MB)), 0.0)
    assert core.handle(ev.Asked(0, "long", 9.0, 1), 0.0)
    assert core.handle(ev.Asked(1, "a", 9.0, 1), 0.0)
    assert core.handle(ev.Asked(2, "large", 9.0, 1), 0.0) == []
    assert core.handle(ev.Asked(3, "b", 1.0, 1), 0.0) == []
    over(core, 1, 2, 0.1)
    assert list(core.waiting) == [2]
    core.handle(ev.ExecutorDown(0), 0.2)
    done = Done(
        serial=3,
        outcome="ended",
        gpu_us=0,
        copied_nbytes=0,
        peer_nbytes=0,
        file_nbytes=0,
        resident=[],
        peak_activation_nbytes=0,
        version=1,
        stats=PoolStats(free_nbytes=50 * MB),
    )
    actions = core.handle(ev.LeaseOver(1, 1, done), 0.3)
    refused = [action for action in actions if isinstance(action, ev.RefuseAsk)]
    assert [(action.request, action.failure.code) for action in refused] == [(2, "gpus_full")]
    core.check()


def test_a_tick_is_not_asked_for_again_at_once() -> None:
    """More requests wait for one GPU than are considered when its lease is over, and the next takes longer than that
    was expected to.
    """
    core = holding(80, Policy(order="fifo", placement="bound", passed_over_ms=0), run_s=0.5)
    over(core, 0, 1, 0.11)
    now_s = 0.11
    for _ in range(5):
        due_s = core.next_deadline_s
        if due_s is None:
            break
        assert due_s > now_s
        now_s = due_s
        core.handle(ev.Tick(), now_s)
        core.check()


def test_a_request_that_waits_for_a_gpu_does_not_wait_for_ever() -> None:
    """The lease takes longer than was expected, and nothing else happens: the core asks to be told when it is time to
    use the GPU that is free.
    """
    core = holding(1)
    assert core.waiting[1].held_for == 0
    due_s = core.next_deadline_s
    assert due_s is not None
    assert due_s <= 1.1
    (wake,) = core.handle(ev.Tick(), due_s)
    assert isinstance(wake, ev.WakeOn)
    assert (wake.request, wake.lease.gpu) == (1, 1)


def test_many_that_wait_for_one_gpu_do_not_keep_another_idle() -> None:
    core = holding(20)
    core.check()
    (wake,) = core.handle(ev.Asked(99, "there", 2.0, 1), 0.11)
    assert isinstance(wake, ev.WakeOn)
    assert (wake.request, wake.lease.gpu) == (99, 1)


def test_a_request_that_is_given_up_in_its_lease_after_its_deadline_was_late() -> None:
    """As one that is given up while it waits: or functions whose runs are too long would seem to comply."""
    core = Scheduler(seed=1, revoke_s=1.0, max_waiting=9)
    core.handle(ev.ExecutorUp(0, 1, PoolStats(free_nbytes=9, largest_nbytes=9)), 0.0)
    core.handle(ev.InstanceKnown("a", "f"), 0.0)
    for request in (1, 2):
        core.handle(ev.Asked(request, "a", 1.0, 1), 0.0)
    for request in (1, 2):
        core.handle(ev.Released(request), 1.5)
    over(core, 0, 1, 1.6)
    assert core.functions["f"].late == 2


# --- against the paper

BERT = ModelSpec(name="Bert-qa", nbytes=1340 * MB, run_s=0.043, extra_s=0.144 - 1340 / 10_400)
RESNET = ModelSpec(name="ResNet-152", nbytes=241 * MB, run_s=0.017, extra_s=0.025 - 241 / 10_400)
DENSENET = ModelSpec(name="DenseNet-169", nbytes=57 * MB, run_s=0.025, extra_s=0.002)
"""Torpor Table 4: run alone, and woken over PCIe; what the wake adds beyond the longer of run and copy."""

PCIE = Topology(host_bps=10_400.0 * MB, switch_bps=12_000.0 * MB, switches=(0, 0))


def slowdown(model: ModelSpec, beside: ModelSpec, wake: Callable[[ModelSpec], float]) -> float:
    """Latency of one wake while others follow one another on the neighbour, over that alone; the mean over the point
    of their wakes at which it begins. Every request is another function's, so that each copies the whole model.
    """
    alone_s = wake(beside)
    count = 2 + int(3 * wake(model) / alone_s)
    found: list[float] = []
    for part in range(10):
        at_s = alone_s * (part + 0.5) / 10
        arrivals = [(0.0, 1), (at_s, 0), *((at_s, 2 + number) for number in range(count))]
        policy = Policy(order="fifo", placement="random")
        models = [model, *[beside] * (count + 1)]
        made = Simulation(policy, PCIE, 2, 1 << 40, models, [9.0] * len(models), 0.98)
        times_s = np.array([time_s for time_s, _ in arrivals])
        found.append(made.run(times_s, np.array([function for _, function in arrivals]))[1])
    return float(np.mean(found)) / wake(model)


@pytest.mark.parametrize(
    ("model", "beside", "measured"),
    [
        (DENSENET, RESNET, 1.0),
        (DENSENET, BERT, 1.0),
        (RESNET, DENSENET, 1.07),
        (RESNET, BERT, 1.48),
        (BERT, DENSENET, 1.11),
        (BERT, RESNET, 1.61),
    ],
    ids=lambda value: value.name if isinstance(value, ModelSpec) else "",
)
def test_slowdowns_of_torpors_table_3_come_out_of_shared_bandwidth(
    model: ModelSpec, beside: ModelSpec, measured: float
) -> None:
    def wake(spec: ModelSpec) -> float:
        return max(spec.run_s, spec.nbytes / PCIE.host_bps) + spec.extra_s

    assert slowdown(model, beside, wake) == pytest.approx(measured, rel=0.10)
