"""Translation between the scheduler and executors: its actions as messages to them, and their reports of leases and
preloads as events. Pure.
"""

from typing import assert_never

from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.schemas import messages as m

ForExecutor = ev.PauseOn | ev.TurnOn | ev.OverOn | ev.RevokeOn | ev.RetireExecutor | ev.StopPreloadOn | ev.DrainOn


def order(action: ForExecutor) -> m.ControllerToExecutor:
    match action:
        case ev.PauseOn(serial=serial):
            return m.Pause(serial=serial)
        case ev.TurnOn(serial=serial):
            return m.Turn(serial=serial)
        case ev.OverOn(serials=serials):
            return m.Over(serials=list(serials))
        case ev.RevokeOn(serial=serial):
            return m.Revoke(serial=serial)
        case ev.RetireExecutor():
            return m.Retire()
        case ev.StopPreloadOn():
            return m.StopPreload()
        case ev.DrainOn(on=on):
            return m.DrainSeats(on=on)
        case _:
            assert_never(action)


def wake(action: ev.WakeOn, scheduler: Scheduler) -> m.Wake:
    """With what each model on that GPU is worth."""
    return m.Wake(
        lease=action.lease,
        instance=action.instance,
        version=action.version,
        worth=scheduler.worth(action.lease.gpu, action.instance),
        peers=list(action.peers),
        activation_nbytes=action.activation_nbytes,
        over=list(action.over),
        joins=_joins(scheduler, action.instance),
    )


def granted(action: ev.WakeOn, scheduler: Scheduler) -> m.Granted:
    """With where what this lease misses is, as far as the scheduler knows."""
    source: m.WokenFrom = "gpu"
    if action.wake_nbytes:
        running = scheduler.gpus[action.lease.gpu].leases[action.lease.serial]
        source = "host" if running.copying_nbytes else "peer"
    return m.Granted(
        request=action.request,
        lease=action.lease,
        wake_nbytes=action.wake_nbytes,
        source=source,
        requests=action.requests,
    )


def awoken(gpu: int, epoch: int, awake: m.Awake, scheduler: Scheduler) -> m.Awoken | None:
    """For the router; nothing if the lease is over."""
    known = scheduler.gpus.get(gpu)
    running = known.leases.get(awake.serial) if known is not None and known.epoch == epoch else None
    if running is None:
        return None
    return m.Awoken(request=running.request, wake_us=awake.wake_us, source=awake.source)


def _joins(scheduler: Scheduler, instance: str) -> m.JoinRule | None:
    model = scheduler.models.get(instance)
    if model is None or not model.runtime:
        return None
    in_turn = scheduler.policy.turn_order == "fifo"
    return m.JoinRule(ttft_us=round(model.function.deadline_s * 1e6), in_turn=in_turn)


def preload(action: ev.PreloadOn, worth: dict[str, float]) -> m.Preload:
    """``worth``: of each model on that GPU, and of what comes."""
    return m.Preload(instance=action.instance, version=action.version, worth=worth, peers=list(action.peers))


Said = m.Done | m.Pressed | m.Awake | m.Idle | m.Busy | m.WantsTurn | m.Preloaded | m.Unloaded


def event(gpu: int, epoch: int, message: Said) -> ev.Event:
    match message:
        case m.Done():
            return ev.LeaseOver(gpu, epoch, message)
        case m.Pressed(resident=resident, stats=stats, seated=seated):
            return ev.Evicted(gpu, epoch, tuple(resident), stats, seated)
        case m.Unloaded(resident=resident, stats=stats):
            return ev.Evicted(gpu, epoch, tuple(resident), stats)
        case m.Awake(serial=serial, wake_us=wake_us):
            return ev.Woken(gpu, epoch, serial, wake_us)
        case m.Idle(serial=serial, rests=rests):
            return ev.TurnIdle(gpu, epoch, serial, rests)
        case m.Busy(serial=serial):
            return ev.TurnBusy(gpu, epoch, serial)
        case m.WantsTurn(serial=serial, due=due):
            return ev.TurnWanted(gpu, epoch, serial, due)
        case m.Preloaded(instance=instance, outcome=outcome, copied_nbytes=nbytes, resident=resident, stats=stats):
            return ev.PreloadOver(gpu, epoch, instance, outcome, nbytes, tuple(resident), stats)
        case _:
            assert_never(message)
