"""Simulated memory: content that models share, what a request needs beside its model, and what other GPUs read."""

import random
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.controller.simulator.baselines import KEEP_ALIVES, SimulatedPolicy, as_baseline
from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.policy import EVICTIONS, PLACEMENTS, Policy

MB = 1_000_000
CAPACITY = 1000 * MB
GB = 1_000.0 * MB

LINK = Topology(host_bps=GB)
PEER = Topology(host_bps=GB, peer_bps=((0.0, 1.2 * GB), (1.2 * GB, 0.0)))


def model(
    nbytes: int,
    run_s: float = 0.1,
    shared: int = 0,
    activation: int = 0,
    idempotent: bool = False,
    host_s: float = 0.0,
    instances: int = 1,
) -> ModelSpec:
    return ModelSpec(
        name="m",
        nbytes=nbytes * MB,
        run_s=run_s,
        base="base",
        base_nbytes=shared * MB,
        activation_nbytes=activation * MB,
        idempotent=idempotent,
        host_s=host_s,
        instances=instances,
        native_nbytes=(nbytes + 150) * MB,
        cold_start_s=1.0,
        allocate_s=0.03,
        segment_nbytes=100 * MB,
    )


def made(
    models: list[ModelSpec],
    gpus: int = 1,
    topology: Topology = LINK,
    policy: Policy | None = None,
    faults: tuple[Fault, ...] = (),
) -> Simulation:
    policy = policy or Policy(order="fifo", placement="tangram", eviction="cost")
    return Simulation(policy, topology, gpus, CAPACITY, models, [9.0] * len(models), 0.9, 3, faults)


def latencies(simulation: Simulation, arrivals: list[tuple[float, int]]) -> list[float]:
    times_s = np.array([at_s for at_s, _ in arrivals])
    found: list[float] = simulation.run(times_s, np.array([function for _, function in arrivals])).tolist()
    return found


# --- by hand


def test_a_base_is_copied_once_and_is_there_once() -> None:
    """Two of 600 MB that share 300 fit on 1000 MB; the second copies 300."""
    simulation = made([model(600, shared=300), model(600, shared=300)])
    assert latencies(simulation, [(0.0, 0), (1.0, 1), (2.0, 0), (3.0, 1)]) == pytest.approx([0.6, 0.3, 0.1, 0.1])
    assert simulation.gpus[0].residency.pool.used_nbytes == 900 * MB
    assert simulation.core.gpus[0].resident == {"f0": 600 * MB, "f1": 600 * MB}


def test_the_core_hears_of_a_base_for_all_who_have_it() -> None:
    simulation = made([model(600, shared=300), model(500, shared=300), model(700)])
    latencies(simulation, [(0.0, 0)])
    assert simulation.core.gpus[0].resident == {"f0": 600 * MB, "f1": 300 * MB}
    simulation = made([model(600, shared=300), model(500, shared=300), model(1000)])
    latencies(simulation, [(0.0, 0), (1.0, 2)])
    assert simulation.core.gpus[0].resident == {"f2": 1000 * MB}


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_base_is_worth_what_all_its_users_would_lose(eviction: str) -> None:
    """Three that share 300 of 400 MB, then one of 500: 100 MB have to go, and are the own of the one not asked for
    longest; the base stays.
    """
    simulation = made([model(400, shared=300)] * 3 + [model(500)], policy=Policy(order="fifo", eviction=eviction))
    arrivals = [(0.0, 2), (10.0, 0), (20.0, 1), (30.0, 0), (40.0, 1), (50.0, 3)]
    assert latencies(simulation, arrivals)[-1] == pytest.approx(0.5)
    residency = simulation.gpus[0].residency
    assert residency.pool.used_nbytes == 1000 * MB
    resident = {"f0": 400 * MB, "f1": 400 * MB, "f2": 300 * MB, "f3": 500 * MB}
    assert {name: residency.resident_nbytes(name) for name in resident} == resident


def test_a_peer_gives_the_segments_that_it_has() -> None:
    """The base and the own of function 1 are on the two GPUs: the one it runs on gets 300 MB over 1.2 GB/s and, at the
    same time, 200 over 1 GB/s.
    """
    models = [model(600, run_s=1.0, shared=300), model(500, shared=300)]
    simulation = made(models, 2, PEER)
    found = latencies(simulation, [(0.0, 0), (10.0, 0), (10.1, 1)])
    assert found == pytest.approx([1.0, 1.0, 0.25])
    assert simulation.host_nbytes == 800 * MB


def test_a_peer_gives_nothing_that_it_is_still_copying_itself() -> None:
    """Of the base 100 MB are on GPU 0 when it begins to copy the rest, which its own model needs. Function 1 then wakes
    on GPU 1: 100 MB from there, at the same time 500 from the host.
    """
    models = [model(400, shared=300), model(600, shared=300), model(800)]
    simulation = made(models, 2, PEER)
    found = latencies(simulation, [(0.0, 0), (5.0, 2), (10.0, 0), (10.1, 1)])
    assert found == pytest.approx([0.4, 0.8, 0.2, 0.5])
    assert simulation.host_nbytes == (400 + 800 + 200 + 500) * MB


def test_activations_take_room_while_a_request_runs_and_then_are_gone() -> None:
    """700 MB and 300 for the request: the other model of 200 MB goes; the second has no need to make room again."""
    simulation = made([model(200), model(700, activation=300)])
    assert latencies(simulation, [(0.0, 0), (1.0, 1), (2.0, 1), (3.0, 0), (4.0, 1), (5.0, 0)]) == pytest.approx(
        [0.2, 0.7, 0.1, 0.2, 0.1, 0.2]
    )
    assert simulation.gpus[0].residency.pool.used_nbytes == 900 * MB
    assert simulation.core.gpus[0].stats.free_nbytes == 100 * MB
    assert simulation.core.models["f1"].peak_nbytes == 300 * MB


def test_what_another_gpu_reads_is_not_evicted_meanwhile() -> None:
    """GPU 1 copies 600 MB from GPU 0 from 10.1 to 10.6; who needs their room on GPU 0 at 10.3 begins at 10.6."""
    models = [model(600), model(100, run_s=0.2), model(900)]
    simulation = made(models, 2, PEER)
    found = latencies(simulation, [(0.0, 0), (5.0, 1), (10.0, 1), (10.1, 0), (10.3, 2)])
    assert found == pytest.approx([0.6, 0.2, 0.2, 0.5, 1.2])
    assert simulation.gpus[0].residency.seats.none


# --- what must hold in every run


@dataclass
class Watch:
    """Judges a simulation after every event of its core."""

    made: Simulation
    log: list[tuple[float, ev.Event, tuple[ev.Action, ...]]] = field(default_factory=list)
    fates: dict[int, list[type[ev.Action]]] = field(default_factory=dict)  # by request

    def run(self, arrivals: list[tuple[float, int]]) -> list[float]:
        handle = self.made.core.handle

        def watched(event: ev.Event, now_s: float) -> list[ev.Action]:
            if isinstance(event, ev.LeaseOver):
                self.leased(event)
            actions = handle(event, now_s)
            self.log.append((now_s, event, tuple(actions)))
            for action in actions:
                if isinstance(action, ev.FinishLease | ev.RefuseAsk | ev.LoseLease):
                    self.fates.setdefault(action.request, []).append(type(action))
            self.made.core.check()
            self.memories()
            return actions

        with patch.object(self.made.core, "handle", watched):
            return latencies(self.made, arrivals)

    def leased(self, event: ev.LeaseOver) -> None:
        running = self.made.core.gpus[event.gpu].leases[event.done.serial]
        residency = self.made.gpus[event.gpu].residency
        assert not residency.missing_nbytes(running.instance), "a leased model was evicted"

    def memories(self) -> None:
        for number, gpu in enumerate(self.made.gpus):
            residency, known = gpu.residency, self.made.core.gpus.get(number)
            residency.check()  # also that what is being read is there
            assert gpu.activation_nbytes <= residency.pool.free_nbytes
            if known is not None and not known.leases:
                assert known.resident == {name: residency.resident_nbytes(name) for name in residency.instances}
                assert known.stats.free_nbytes == residency.pool.free_nbytes


@dataclass
class Case:
    models: list[ModelSpec]
    gpus: int
    topology: Topology
    policy: Policy
    arrivals: list[tuple[float, int]]
    faults: tuple[Fault, ...]

    def simulation(self) -> Simulation:
        return made(self.models, self.gpus, self.topology, self.policy, self.faults)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Models that fit alone; arrivals by seed, so that there are enough of them to queue."""
    gpus = draw(st.integers(1, 3))
    peer = draw(st.sampled_from([0.0, 1.2 * GB, 5 * GB]))
    topology = Topology(
        host_bps=GB,
        switch_bps=draw(st.sampled_from([0.0, 1.5 * GB])),
        switches=(0, 0, 1),
        peer_bps=tuple(tuple(0.0 if a == b else peer for b in range(gpus)) for a in range(gpus)),
    )
    base = draw(st.sampled_from([0, 100, 300]))
    spec = st.builds(
        model,
        nbytes=st.sampled_from([300, 500, 800]),
        run_s=st.sampled_from([0.01, 0.2]),
        shared=st.sampled_from([0, base]),
        activation=st.sampled_from([0, 50, 200]),
        idempotent=st.booleans(),
        host_s=st.sampled_from([0.0, draw(st.sampled_from([0.0, 0.01, 0.3]))]),
        instances=st.sampled_from([1, draw(st.sampled_from([1, 1, 2]))]),
    )
    models = draw(st.lists(spec, min_size=1, max_size=6))
    native = draw(st.sampled_from([False, False, True]))
    policy = SimulatedPolicy(
        order=draw(st.sampled_from(["fifo", "effort"])),
        placement="bound" if native else draw(st.sampled_from(PLACEMENTS)),
        eviction=draw(st.sampled_from(EVICTIONS)),
        native=native,
        keep_alive=draw(st.sampled_from(KEEP_ALIVES)) if native else "",
        reuse=draw(st.booleans()),
        allocate=draw(st.booleans()),
        turns=draw(st.sampled_from([1, 1, 2, 3])),
        turn_ms=draw(st.sampled_from([1, 20, 100_000])),
    )
    models = as_baseline(models, policy, "")
    chance = random.Random(draw(st.integers(0, 1 << 32)))
    mean_gap_s = draw(st.sampled_from([0.01, 0.1, 1.0]))
    now_s = 0.0
    arrivals: list[tuple[float, int]] = []
    for _ in range(draw(st.sampled_from([1, 10, 60]))):
        now_s += chance.expovariate(1.0 / mean_gap_s)
        arrivals.append((now_s, chance.randrange(len(models))))
    faults: list[Fault] = []
    for gpu in range(gpus):
        at_s = 0.0
        for _ in range(draw(st.integers(0, 2))):
            at_s += chance.uniform(0.01, now_s)
            back_s = at_s + chance.uniform(0.01, now_s)
            faults.append(Fault(gpu=gpu, at_s=at_s, back_s=back_s))
            at_s = back_s
    if faults and chance.random() < 0.5:
        last = faults.pop()
        faults.append(Fault(gpu=last.gpu, at_s=last.at_s))
    return Case(models, gpus, topology, policy, arrivals, tuple(faults))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_what_holds_in_every_run(case: Case) -> None:
    """Memory is never more than there is, shared content counted once; what is leased or read stays; the core knows
    what idle GPUs have; every request meets one fate, or waits for ever for GPUs that are gone.
    """
    watch = Watch(case.simulation())
    found = watch.run(case.arrivals)
    waiting = set(watch.made.core.waiting)
    assert not waiting or not watch.made.core.gpus, "a request waits although there are GPUs"
    for request, (_, function) in enumerate(case.arrivals):
        fates = watch.fates.get(request, [])
        if request in waiting:
            assert fates in ([], [ev.LoseLease])
        elif ev.RefuseAsk in fates:
            assert case.policy.placement == "bound"
            assert fates in ([ev.RefuseAsk], [ev.LoseLease, ev.RefuseAsk])
        elif case.models[function].idempotent:
            assert fates in ([ev.FinishLease], [ev.LoseLease, ev.FinishLease], [ev.LoseLease] * 2)
        else:
            assert fates in ([ev.FinishLease], [ev.LoseLease])
        answered = bool(fates) and fates[-1] is ev.FinishLease
        assert answered == (not np.isnan(found[request]))
        if answered:
            assert found[request] >= (case.models[function].run_s + case.models[function].host_s) * (1 - 1e-9)
    assert all(gpu.residency.seats.none and not gpu.activation_nbytes for gpu in watch.made.gpus)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_equal_runs_are_equal(case: Case) -> None:
    first, second = Watch(case.simulation()), Watch(case.simulation())
    found = first.run(case.arrivals), second.run(case.arrivals)
    assert first.log == second.log
    assert np.array_equal(*found, equal_nan=True)
