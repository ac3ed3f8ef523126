"""Measured bandwidths of links: from finished wakes, beside those that are configured or assumed. Pure.

A wake's time is taken by the executor, from the beginning of the wake (its evictions and moves, the questions to its
sources) until the last byte is there. So this is the bandwidth of wakes, a little less than that of the link, and least
for small models: those are not counted. A wake counts if all its bytes came over one link that nothing else used: from
the host while no neighbour on the switch copied, or from one other GPU. Bytes read from a file had to wait for a disk.

A configured or assumed bandwidth counts as the first sample, and is used as it is while measurement differs by no more
than `TOLERANCE`: on emulated and simulated links it is the truth, and noise must not make equal GPUs unequal, because
of equals the one with most room is taken. For the same reason a GPU has the node's estimate unless its own differs by
more than `OWN_TOLERANCE`. A configured link that wakes never reach is corrected, as an assumed one is.

A pair of GPUs of which nothing is known has bandwidth 0, and placement does not count on it. All GPUs that have a model
are offered to its executor nevertheless, which tries them a few times (gpuserver/device/cuda/copies.py): the first copy
makes the pair known. A pair that was counted on and gave nothing `MISSES` times in a row is not counted on until it
gives.
"""

from typing import Final

from dormouse.core.decisions.scheduling.state import Gpu, Running
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.messages import Done

MIN_NBYTES: Final = 16 << 20
"""Smaller wakes measure the other costs of a wake: about a millisecond, as much as this takes on a link."""

DECAY: Final = 0.8
"""Weight of the earlier estimate, per sample: a changed link is believed after some ten."""

PRIOR_NBYTES: Final = 64 << 20
"""Weight of a configured or assumed bandwidth: less than one wake of a model worth evicting."""

TOLERANCE: Final = 0.15
"""Share by which measurement may differ from configuration before it is believed: about the other costs of a wake of
100 MB.
"""

OWN_TOLERANCE: Final = 0.3
"""Share by which a GPU's link may differ from the others' before it is treated as another: half as many lanes are."""

MISSES: Final = 4


class Rate:
    """Bytes over seconds of lately: large copies weigh more. ``bps`` is read by decisions, ``measured`` is the
    bandwidth of the samples.
    """

    __slots__ = ("_misses", "_nbytes", "_seconds", "_stated_bps", "bps", "measured")

    def __init__(self, stated_bps: float) -> None:
        self._stated_bps = self.bps = self.measured = stated_bps
        self._misses = 0  # in a row
        self._nbytes = float(PRIOR_NBYTES) if stated_bps > 0.0 else 0.0
        self._seconds = PRIOR_NBYTES / stated_bps if stated_bps > 0.0 else 0.0

    def sample(self, nbytes: int, seconds: float) -> None:
        self._nbytes = DECAY * self._nbytes + nbytes
        self._seconds = DECAY * self._seconds + seconds
        self.measured = self._nbytes / self._seconds
        self._decide()

    def missed(self) -> None:
        """It was counted on, and nothing came over it."""
        self._misses += 1
        self._decide()

    def gave(self) -> None:
        if self._misses:
            self._misses = 0
            self._decide()

    def _decide(self) -> None:
        if self._misses >= MISSES:
            self.bps = 0.0
        else:
            self.bps = self._stated_bps if near(self.measured, self._stated_bps, TOLERANCE) else self.measured


class Measured:
    """The links of one node. ``host_bps`` and ``switch_bps`` are of all GPUs; read on every decision, so plain values
    that only a sample changes.
    """

    def __init__(self, topology: Topology) -> None:
        self.known(topology)

    def known(self, topology: Topology) -> None:
        """The links are these; measurements are forgotten, as they may have been of others."""
        self.topology = topology
        self._node = Rate(topology.host_bps)
        self._gpus: dict[int, Rate] = {}
        self._own: dict[int, float] = {}  # host bandwidth of GPUs that differ from the others
        self._pairs: dict[tuple[int, int], Rate] = {}  # by source and target
        self._until_s: dict[int, float] = {}  # by GPU: when its last copy from the host ended
        self._settle()

    def _settle(self) -> None:
        self.host_bps = self._node.bps
        self._own = {
            number: rate.measured
            for number, rate in self._gpus.items()
            if not near(rate.measured, self.host_bps, OWN_TOLERANCE)
        }
        self.switch_bps = self.topology.switch_bps or (self.host_bps if self.topology.uplinks else 0.0)

    # --- for decisions

    def host(self, gpu: int) -> float:
        """From host memory to this GPU, when nothing else uses the switch."""
        return self._own.get(gpu, self.host_bps) if self._own else self.host_bps

    def peer(self, source: int, target: int) -> float:
        """From GPU to GPU; 0: not to be counted on."""
        rate = self._pairs.get((source, target)) if self._pairs else None
        return rate.bps if rate is not None else self.topology.peer(source, target)

    # --- from finished wakes

    def woke(self, gpu: Gpu, running: Running, done: Done) -> None:
        """A lease is over; ``wake_us`` is known if all copies of its wake have arrived."""
        if running.wake_us is None or not done.copied_nbytes:
            return
        number, seconds = gpu.number, running.wake_us / 1e6
        ended_s = running.started_s + seconds
        host_nbytes = done.copied_nbytes - done.peer_nbytes
        once = not running.used_s  # a lease that lost its turn may have copied twice, and ``wake_us`` is of the last
        tells = once and done.copied_nbytes >= MIN_NBYTES and not done.file_nbytes and seconds > 0.0
        alone = tells and not done.peer_nbytes and not self._shared(gpu, running, ended_s)
        if host_nbytes:
            self._until_s[number] = ended_s
        if running.peer is not None and not done.peer_nbytes:
            self._pair(running.peer, number).missed()
        for peer in done.peers:
            self._pair(peer, number).gave()
        if alone:
            self._node.sample(host_nbytes, seconds)
            self._gpus.setdefault(number, Rate(self._node.bps)).sample(host_nbytes, seconds)
            self._settle()
        elif tells and not host_nbytes and len(done.peers) == 1:
            self._pair(done.peers[0], number).sample(done.peer_nbytes, seconds)

    def _pair(self, source: int, target: int) -> Rate:
        rate = self._pairs.get((source, target))
        if rate is None:
            rate = self._pairs[source, target] = Rate(self.topology.peer(source, target))
        return rate

    def _shared(self, gpu: Gpu, woken: Running, ended_s: float) -> bool:
        """Whether another lease there or on a neighbour copied meanwhile, or was expected to."""
        began_s = woken.started_s
        close = gpu.neighbours
        if len(gpu.leases) > 1 or self._until_s.get(gpu.number, began_s) > began_s:
            close = [gpu, *close]
        for near_by in close:
            if self._until_s.get(near_by.number, began_s) > began_s:
                return True
            for running in near_by.leases.values():
                if running is woken or running.started_s >= ended_s or running.copies_until_s <= running.started_s:
                    continue
                if running.wake_us is None or running.started_s + running.wake_us / 1e6 > began_s:
                    return True
        return False


def near(one: float, other: float, share: float) -> bool:
    """Whether the larger is no more than so much larger than the smaller."""
    return max(one, other) <= (1.0 + share) * min(one, other)
