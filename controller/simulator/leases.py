"""A simulated lease, and the sums over all of them: plain data."""

from collections.abc import Callable, Sequence

from dormouse.controller import events as ev
from dormouse.controller.simulator.devices import Memory, ModelSpec
from dormouse.controller.simulator.links import Copy


class Lease:
    """``parts`` are what was missing: segments, what of each was there and what it has; ``copied`` bytes of them are
    copied, ``peer`` from the GPU whose ``source`` memory has ``pinned`` segments for it. ``open`` are copies that have
    not arrived, ``from_peer`` the one from there; ``changed`` is what is left of segments that made room.
    """

    __slots__ = (
        "began_s",
        "changed",
        "copied",
        "extra_s",
        "from_peer",
        "lost",
        "need",
        "open",
        "parts",
        "peer",
        "pinned",
        "runs_until_s",
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
        self.need = 0
        self.parts: Sequence[tuple[str, int, int]] = ()
        self.copied = 0
        self.peer = 0
        self.extra_s = 0.0
        self.open: list[Copy] = []
        self.from_peer: Copy | None = None
        self.source: Memory | None = None
        self.pinned: Sequence[str] = ()
        self.changed: Sequence[tuple[str, int]] = ()
        self.lost = False


class Tally:
    """What leases took: of all but the first ``warm`` requests; of leases that a GPU has lost only ``busy_s``, seconds
    by GPU. ``on_busy`` is told GPU, begin and end of each.
    """

    def __init__(self, gpus: int) -> None:
        self.warm = 0
        self.busy_s = [0.0] * gpus
        self.wakes = 0
        self.host_nbytes = 0
        self.on_busy: Callable[[int, float, float], None] | None = None

    def leased(self, lease: Lease, now_s: float, ended: bool) -> None:
        wake = lease.wake
        if wake.request < self.warm:
            return
        gpu = wake.lease.gpu
        self.busy_s[gpu] += now_s - lease.started_s
        if self.on_busy is not None:
            self.on_busy(gpu, lease.started_s, now_s)
        if ended:
            self.wakes += lease.copied > 0
            self.host_nbytes += lease.copied - lease.peer
