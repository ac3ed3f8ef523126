"""What actions of the scheduler are to executors, and what came of preloads to the scheduler: pure."""

from typing import assert_never

from dormouse.controller.scheduling import events as ev
from dormouse.schemas import messages as m

ForExecutor = ev.PauseOn | ev.TurnOn | ev.OverOn | ev.RevokeOn | ev.RetireExecutor | ev.StopPreloadOn


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
        case _:
            assert_never(action)


def wake(action: ev.WakeOn, worth: dict[str, float]) -> m.Wake:
    """``worth``: of each model on that GPU."""
    return m.Wake(
        lease=action.lease,
        instance=action.instance,
        version=action.version,
        worth=worth,
        peers=list(action.peers),
        activation_nbytes=action.activation_nbytes,
        over=list(action.over),
    )


def preload(action: ev.PreloadOn, worth: dict[str, float]) -> m.Preload:
    """``worth``: as for a wake, and of what comes."""
    return m.Preload(instance=action.instance, version=action.version, worth=worth, peers=list(action.peers))


def preloaded(gpu: int, epoch: int, said: m.Preloaded) -> ev.PreloadOver:
    return ev.PreloadOver(gpu, epoch, said.instance, said.outcome, said.copied_nbytes, tuple(said.resident), said.stats)
