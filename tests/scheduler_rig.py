"""A scheduling core, models and executors for tests: what is asked of it and what comes of that, in a word."""

from collections.abc import Sequence
from math import inf

from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.schemas.messages import Done, PoolStats
from dormouse.schemas.policy import DEFAULT, Policy

GIB = 1 << 30


def pool(total_nbytes: int, used_nbytes: int = 0) -> PoolStats:
    free = total_nbytes - used_nbytes
    return PoolStats(weights_nbytes=used_nbytes, free_nbytes=free, largest_nbytes=free)


def scheduler(
    gpus: int = 2,
    total_nbytes: int = 4 * GIB,
    max_waiting: int = 100,
    policy: Policy = DEFAULT,
    models: Sequence[str] = (),
    keep_s: float = inf,
) -> Scheduler:
    """``models`` are instances with a model of 1 GiB each."""
    made = Scheduler(seed=1, revoke_s=5.0, max_waiting=max_waiting, policy=policy, keep_s=keep_s)
    for gpu in range(gpus):
        made.handle(ev.ExecutorUp(gpu, 1, pool(total_nbytes)), 0.0)
    for instance in models:
        add_model(made, instance, GIB)
    return made


def add_model(core: Scheduler, instance: str, nbytes: int) -> None:
    core.handle(ev.InstanceKnown(instance, instance.split("-")[0]), 0.0)
    core.handle(ev.ModelSized(instance, 1, nbytes), 0.0)


def ask(core: Scheduler, request: int, instance: str, now_s: float = 0.0) -> list[ev.Action]:
    return core.handle(ev.Asked(request, instance, now_s + 1.0, 1), now_s)


def over(
    wake: ev.WakeOn,
    *,
    outcome: str = "ended",
    resident: int = GIB,
    others: dict[str, int] | None = None,
    copied: int = 0,
    peer: int = 0,
    file: int = 0,
    peak: int = 0,
    free: int = 0,
) -> ev.LeaseOver:
    """The executor's Done: ``resident`` bytes of the lease's own instance, and what has changed of ``others``."""
    done = Done(
        serial=wake.lease.serial,
        outcome=outcome,
        gpu_us=10,
        copied_nbytes=copied,
        peer_nbytes=peer,
        file_nbytes=file,
        resident=[(wake.instance, resident), *(others or {}).items()],
        peak_activation_nbytes=peak,
        version=wake.version,
        stats=PoolStats(free_nbytes=free, largest_nbytes=free),
    )
    return ev.LeaseOver(wake.lease.gpu, wake.lease.epoch, done)


def only_wake(actions: list[ev.Action]) -> ev.WakeOn:
    (wake,) = [action for action in actions if isinstance(action, ev.WakeOn)]
    return wake


def turn(kind: type[ev.TurnIdle | ev.TurnBusy | ev.TurnWanted], wake: ev.WakeOn) -> ev.Event:
    return kind(wake.lease.gpu, wake.lease.epoch, wake.lease.serial)


def wake_of(core: Scheduler, instance: str) -> ev.WakeOn:
    (running,) = [running for running in core.gpus[0].leases.values() if running.instance == instance]
    return ev.WakeOn(running.request, running.lease, instance, 1, (), 0, 0)
