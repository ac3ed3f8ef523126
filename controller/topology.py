"""Which links lie between a GPU and the bytes it wakes from, how fast they are, and what they are doing: pure.

Bandwidths in bytes per second. Copies of GPUs on one switch share it (Torpor §5.3, Fig. 5); copies between two GPUs
have a link of their own.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

HOST_BPS: Final = 10e9
"""Until something was measured: about what pinned memory reaches over PCIe 3.0 x16."""


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """``switches`` has for each GPU the number of the switch that it shares; GPUs it does not list have one each.
    ``peer_bps[a][b]`` is the bandwidth from GPU a to GPU b, 0 where there is none.
    """

    host_bps: float = HOST_BPS
    switch_bps: float = 0.0  # 0: a switch is no narrower than its links together
    switches: tuple[int, ...] = ()
    peer_bps: tuple[tuple[float, ...], ...] = ()

    def switch(self, gpu: int) -> int:
        return self.switches[gpu] if gpu < len(self.switches) else -1 - gpu

    def peer(self, source: int, target: int) -> float:
        if source >= len(self.peer_bps) or target >= len(self.peer_bps[source]):
            return 0.0
        return self.peer_bps[source][target]

    def neighbours(self, gpu: int, gpus: Iterable[int]) -> list[int]:
        """GPUs that share this one's switch."""
        mine = self.switch(gpu)
        return [other for other in gpus if other != gpu and self.switch(other) == mine]


def shared_copy_s(nbytes: float, others: Sequence[float], link_bps: float, switch_bps: float) -> float:
    """Seconds that a copy takes beside others that have so many bytes left, if each has an equal part of the switch."""
    if switch_bps <= 0.0:
        return nbytes / link_bps
    seconds, left = 0.0, nbytes
    done = 0.0  # what each of the others has had meanwhile
    running = sorted(others)
    for index, other in enumerate(running):
        rate = min(link_bps, switch_bps / (len(running) - index + 1))
        part = min(left, other - done)
        if part > 0.0:
            seconds += part / rate
            left -= part
            done += part
        if left <= 0.0:
            return seconds
    return seconds + left / min(link_bps, switch_bps)
