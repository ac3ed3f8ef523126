"""A simulated lease, and the sums over all of them: plain data."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.links import SimulatedCopy
from dormouse.core.decisions.memory.residency import Residency
from dormouse.core.decisions.scheduling import events as ev

if TYPE_CHECKING:
    from dormouse.controller.simulator.streams.runtime import SimulatedRuntime


class SimulatedSeat:
    """The state of a lease where leases take turns (turns.py). It computes for ``half_s`` of GPU time, and
    once more after the host, if it has to go there. ``here``: it has begun, and its memory is its own; not while it
    waits for room, nor when others needed it.
    """

    __slots__ = ("computing", "half_s", "here", "idle", "paused_s", "rested")

    def __init__(self, half_s: float) -> None:
        self.half_s = half_s
        self.here = False
        self.computing: SimulatedCopy | None = None
        self.rested = False  # it has been on the host, or is there
        self.idle = False  # the core was notified that it gives the GPU nothing
        self.paused_s: float | None = None  # since when it has no turn


class SimulatedLease:
    """``missing`` are segments of its model that a wake brings; ``copied`` bytes of them are copied, ``peer`` from the
    GPU whose ``source`` has ``pinned`` segments for it. ``open`` are copies that have not arrived, ``from_peer``
    the one from there. ``seat``: where leases take turns. ``runtime``: of a language model; ``closed``: it is over.
    """

    __slots__ = (
        "began_s",
        "closed",
        "copied",
        "extra_s",
        "from_peer",
        "lost",
        "missing",
        "moved_s",
        "open",
        "peer",
        "pinned",
        "runs_until_s",
        "runtime",
        "seat",
        "source",
        "spec",
        "started_s",
        "wake",
    )

    def __init__(self, wake: ev.WakeOn, spec: ModelSpec, started_s: float) -> None:
        self.wake = wake
        self.spec = spec
        self.started_s = started_s
        self.began_s = started_s  # its memory was there
        self.runs_until_s = 0.0
        self.missing: Sequence[tuple[int, int, int]] = ()  # (segment, offset, nbytes)
        self.copied = 0
        self.peer = 0
        self.extra_s = 0.0
        self.moved_s = 0.0  # for moves of others in the GPU's memory
        self.open: list[SimulatedCopy] = []
        self.from_peer: SimulatedCopy | None = None
        self.source: Residency | None = None
        self.pinned: Sequence[int] = ()
        self.lost = self.closed = False
        self.seat: SimulatedSeat | None = None
        self.runtime: SimulatedRuntime | None = None


def seat_of(lease: SimulatedLease) -> SimulatedSeat:
    assert lease.seat is not None
    return lease.seat


class Tally:
    """Sums over leases: of all but the first ``warm`` requests; of leases that a GPU has lost only ``busy_s``, seconds
    by GPU. ``on_busy`` receives GPU, begin and end of each.
    """

    def __init__(self, gpus: int) -> None:
        self.warm = 0
        self.busy_s = [0.0] * gpus
        self.wakes = 0
        self.host_nbytes = 0
        self.on_busy: Callable[[int, float, float], None] | None = None

    def leased(self, lease: SimulatedLease, now_s: float, ended: bool) -> None:
        wake = lease.wake
        if wake.request < self.warm:
            return
        self.busy_s[wake.lease.gpu] += now_s - lease.started_s
        if self.on_busy is not None:
            self.on_busy(wake.lease.gpu, lease.started_s, now_s)
        if ended and lease.copied:
            self.copied(lease)

    def busy(self, gpu: int, began_s: float, ended_s: float) -> None:
        self.busy_s[gpu] += ended_s - began_s
        if self.on_busy is not None:
            self.on_busy(gpu, began_s, ended_s)

    def copied(self, lease: SimulatedLease) -> None:
        self.wakes += lease.copied > 0
        self.host_nbytes += lease.copied - lease.peer
