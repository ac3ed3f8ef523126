"""Invariants of leases, turns and waiting requests between any two events: asserted by tests. Pure."""

from collections.abc import Collection

from dormouse.core.decisions.scheduling.leases import GrantedLeases
from dormouse.core.decisions.scheduling.state import Gpu, Running, Waiting
from dormouse.core.decisions.scheduling.turns import FreeTurns


def _serial(running: Running) -> int:
    return running.lease.serial


def check_leases(gpus: Collection[Gpu], waits: Collection[Waiting], leases: GrantedLeases, turns: FreeTurns) -> None:
    leased = [running for gpu in gpus for running in gpu.leases.values()]
    assert {running.request: running for running in leased} == leases.by_request
    requests = [running.request for running in leased]
    assert len(set(requests)) == len(requests), "a request has two leases"
    instances = [running.instance for running in leased]
    assert len(set(instances)) == len(instances), "an instance has two leases"
    for waiting in waits:
        running = leases.by_request.get(waiting.request)
        assert waiting.resumes is running, "a request both waits and runs"
        assert running is None or running.turn_s is None, "it waits for the turn that it has"
    for gpu in gpus:
        assert [r for r in gpu.leases.values() if r.turn_s is not None] == sorted(gpu.turns, key=_serial)
        turns.check(gpu)
    if turns.free:
        idle = [w for w in waits if not w.blocked and w.held_for is None and not w.rationed]
        assert not idle, "a GPU is free while a request that could use it waits"
