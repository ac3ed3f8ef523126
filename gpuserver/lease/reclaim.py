"""Room from idle KV: which runtime is asked for it, and whether before weights are evicted. Pure, on `MachineState`.

Under pressure the cheapest bytes go first, weights or KV, under one cost (`WakeEvictionCost`): worth of the model times
the time to bring a byte back. Weights are copied again. KV is computed again, if its prompt is asked again: the runtime
says how long that is expected to take (`IdleKv`), and how likely it is halves with every HALF_S without a step. The
cheapest runtime is asked for what is lacking; whoever needs it waits for the answer, and looks again.

A seat is left only when no runtime has idle KV any more. One that does not answer is ended (executor/runtimes.py).
"""

from collections.abc import Mapping
from typing import Final

from dormouse.gpuserver.lease import effects as o
from dormouse.gpuserver.lease.state import NO_IDLE_KV, HeldLease, LeaseState, MachineState
from dormouse.schemas import messages as m

HALF_S: Final = 60.0

_SEATED: Final = (LeaseState.RUNNING, LeaseState.YIELDING, LeaseState.PAUSED)


def possible(state: MachineState) -> bool:
    """Whether anybody has idle KV: a glance, for those who mostly need none."""
    return any(lease.kv_idle.nbytes or lease.kv_asked for lease in state.leases.values())


def cheaper(state: MachineState, asking: HeldLease, needed_nbytes: int) -> bool:
    """Whether others' idle KV is to make room for so many bytes, because it costs less than the weights that would:
    then the lease has to wait.
    """
    if not (held := _idle(state, asking.instance)) and not _asked(state):
        return False
    short_nbytes = needed_nbytes + state.activations - state.residency.pool.free_nbytes
    if short_nbytes <= 0:
        return False
    if _asked(state):
        return True
    worth = asking.wake.worth
    lease = min(held, key=lambda each: _cost_per_byte(state, each, worth))
    weights = state.residency.cheapest_per_byte(worth, asking.link_nbytes_s)
    if weights is not None and weights < _cost_per_byte(state, lease, worth):
        return False
    _ask(state, lease, short_nbytes)
    return True


def any_left(state: MachineState, nbytes: int, worth: Mapping[str, float], instance: str = "") -> bool:
    """Whether idle KV is to make room, whatever it is worth: else a seat would have to be left."""
    if _asked(state):
        return True
    if not (held := _idle(state, instance)):
        return False
    _ask(state, min(held, key=lambda each: _cost_per_byte(state, each, worth)), nbytes)
    return True


def told(lease: HeldLease, idle: m.IdleKv | None) -> None:
    """By its runtime. What crosses with a question is older than the answer."""
    if idle is not None and not lease.kv_asked:
        lease.kv_idle = idle if idle.nbytes > 0 and idle.recompute_us >= 0 else NO_IDLE_KV


def returned(state: MachineState, lease: HeldLease, message: m.KvReturned) -> None:
    """It has given some back. One that was asked and has nothing is not asked again before its next step."""
    own = set(message.extents).intersection(state.residency.claimed(lease.instance))
    state.drop(own)
    asked, lease.kv_asked = lease.kv_asked, False
    told(lease, message.idle)
    if asked:
        if not own:
            lease.kv_idle = NO_IDLE_KV
        state.room()


def forget(lease: HeldLease) -> None:
    """Its seat is another one now."""
    lease.kv_idle, lease.kv_asked = NO_IDLE_KV, False


def _idle(state: MachineState, instance: str) -> list[HeldLease]:
    return [
        lease
        for lease in state.leases.values()
        if lease.kv_idle.nbytes and lease.state in _SEATED and lease.instance != instance
    ]


def _asked(state: MachineState) -> bool:
    return any(lease.kv_asked and lease.state in _SEATED for lease in state.leases.values())


def _cost_per_byte(state: MachineState, lease: HeldLease, worth: Mapping[str, float]) -> float:
    """Expected seconds, as those of weights."""
    idle = lease.kv_idle
    likely: float = 2.0 ** (-max(0.0, state.now_s - lease.since_s) / HALF_S)
    return worth.get(lease.instance, 0.0) * likely * idle.recompute_us / 1e6 / idle.nbytes


def _ask(state: MachineState, lease: HeldLease, nbytes: int) -> None:
    lease.kv_asked, wanted = True, max(1, min(nbytes, lease.kv_idle.nbytes))
    state.emit(o.ToRuntimeOf(lease.serial, lease.instance, m.KvReclaim(nbytes=wanted)))
