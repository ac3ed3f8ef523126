"""Recordings of turns that are lost and had again, of leases without a command, and of a simulation with turns."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pytest

from dormouse.controller.recording import Recorder, Recording, RecordingHeader
from dormouse.controller.replay import replay
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.messages import Done, PoolStats
from dormouse.schemas.policy import Policy

UNBOUNDED: Final = 1 << 40


def unexpected(why: str) -> None:
    raise AssertionError(why)


def record_turns(path: Path, turns: int) -> Counter[type[ev.Event | ev.Action]]:
    """A node whose requests lose their turns and want them back, give the GPU nothing at all, are given up, and lose a
    GPU; returns how often what was said.
    """
    policy, rng, mb = Policy(turns=turns), random.Random(turns), 1 << 20
    made = RecordingHeader.new(seed=7, revoke_s=0.05, max_waiting=100, policy=policy, topology=Topology())
    recorder, core = Recorder(path, UNBOUNDED, made, unexpected), made.scheduler()
    said: Counter[type[ev.Event | ev.Action]] = Counter()
    leases: dict[int, ev.WakeOn] = {}  # by request
    now_s = 0.0

    def tell(event: ev.Event) -> None:
        actions = core.handle(event, now_s)
        core.check()
        recorder.record(now_s, event, actions)
        said.update(map(type, [event, *actions]))
        for action in actions:
            if isinstance(action, ev.WakeOn):
                leases[action.request] = action
            elif isinstance(action, ev.FinishLease | ev.LoseLease):
                leases.pop(action.request, None)

    def over(wake: ev.WakeOn) -> ev.LeaseOver:
        stats = PoolStats(free_nbytes=900 * mb, largest_nbytes=900 * mb)
        done = Done(
            serial=wake.lease.serial,
            outcome="ended",
            gpu_us=10,
            copied_nbytes=wake.wake_nbytes,
            peer_nbytes=0,
            file_nbytes=0,
            resident=[(wake.instance, 100 * mb)],
            peak_activation_nbytes=0,
            version=1,
            stats=stats,
        )
        return ev.LeaseOver(wake.lease.gpu, wake.lease.epoch, done)

    for gpu in (0, 1):
        tell(ev.ExecutorUp(gpu, 1, PoolStats(free_nbytes=1000 * mb, largest_nbytes=1000 * mb)))
    for name in "abcdefgh":
        tell(ev.InstanceKnown(name, name))
        tell(ev.ModelSized(name, 1, 100 * mb))
    for request in range(1, 2000):
        now_s += rng.expovariate(100.0)
        tell(ev.Asked(request, rng.choice("abcdefgh"), now_s + 0.5, 1))
        for wake in rng.sample(list(leases.values()), min(3, len(leases))):
            now_s += 0.001
            lease = wake.lease
            where = lease.gpu, lease.epoch, lease.serial
            match rng.randrange(8):
                case 0 | 1:
                    tell(ev.TurnIdle(*where))
                case 2:
                    tell(ev.TurnBusy(*where))
                case 3:
                    tell(ev.TurnWanted(*where))
                case 4:
                    tell(ev.Answered(wake.request, used=False))
                case 5 | 6:
                    tell(ev.Answered(wake.request, used=True))
                    tell(over(wake))
                case _:
                    tell(ev.Released(wake.request))
                    leases.pop(wake.request, None)
                    tell(over(wake))
        if request % 500 == 0:
            tell(ev.ExecutorUp(1, 1 + request, PoolStats(free_nbytes=1000 * mb, largest_nbytes=1000 * mb)))
        tell(ev.Tick())
    recorder.close()
    return said


@pytest.mark.parametrize("turns", [1, 2])
def test_a_replay_of_turns_is_identical(tmp_path: Path, turns: int) -> None:
    path = tmp_path / "record"
    said = record_turns(path, turns)
    for kind in (ev.TurnIdle, ev.TurnBusy, ev.TurnWanted, ev.Answered, ev.PauseOn, ev.TurnOn, ev.OverOn, ev.LoseLease):
        assert said[kind], f"{kind.__name__} was not tried"
    assert any(
        isinstance(action, ev.WakeOn) and action.over
        for entry in Recording(str(path)).events()
        for action in entry.actions
    )
    found = replay(Recording(str(path)))
    assert found.difference is None
    made = Recording(str(path)).header
    assert made.policy.turns == turns
    entries = list(Recording(str(path)).events())
    recorder = Recorder(path, UNBOUNDED, msgspec.structs.replace(made, policy=Policy(turns=3 - turns)), unexpected)
    for entry in entries:
        recorder.record(entry.now_s, entry.event, entry.actions)
    recorder.close()
    assert replay(Recording(str(path))).difference is not None, "the policy's turns are a part of it"


def test_a_replay_of_a_simulation_with_turns_is_identical(tmp_path: Path) -> None:
    """The simulation's core is told what it was, by a second one that is recorded."""
    path, policy = tmp_path / "record", Policy(turns=2)
    models = [ModelSpec(name="m", nbytes=400_000_000, run_s=0.02, host_s=0.05 * (k % 2)) for k in range(6)]
    simulation = Simulation(policy, Topology(), 2, 1_000_000_000, models, [0.15] * 6, 0.9, seed=5)
    made = RecordingHeader.new(seed=5, revoke_s=1.0, max_waiting=1 << 30, policy=policy, topology=Topology())
    recorder, core = Recorder(path, UNBOUNDED, made, unexpected), made.scheduler()
    handle: Callable[[ev.Event, float], list[ev.Action]] = core.handle
    kinds: Counter[type[ev.Event]] = Counter()

    def handled(event: ev.Event, now_s: float) -> list[ev.Action]:
        actions = handle(event, now_s)
        kinds[type(event)] += 1
        recorder.record(now_s, event, actions)
        return actions

    core.handle = handled  # type: ignore[method-assign]
    for gpu in simulation.core.gpus.values():
        handled(ev.ExecutorUp(gpu.number, 1, gpu.stats), 0.0)
    for instance, model in simulation.core.models.items():
        handled(ev.InstanceKnown(instance, instance), 0.0)
        handled(ev.ModelSized(instance, 1, model.nbytes), 0.0)
    simulation.core = core
    rng = np.random.default_rng(3)
    assert np.isfinite(simulation.run(np.sort(rng.uniform(0.0, 5.0, 300)), rng.integers(0, 6, 300))).all()
    recorder.close()
    assert all(kinds[kind] for kind in (ev.TurnIdle, ev.TurnBusy, ev.TurnWanted))
    found = replay(Recording(str(path)))
    assert (found.difference, found.events) == (None, kinds.total())
