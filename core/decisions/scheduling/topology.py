"""Links between a GPU and the bytes it wakes from, their bandwidths, and the copies on them: pure.

Bandwidths in bytes per second. Copies of GPUs on one switch share it (Torpor §5.3, Fig. 5); copies between two GPUs
have a link of their own.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from dormouse.schemas.messages import GpuPlace

HOST_BPS: Final = 10e9
"""Until something was measured: about the rate of pinned memory over PCIe 3.0 x16."""

NVLINK_BPS: Final = 50e9
"""Until something was measured: a third of NVLink 2's six links (Torpor's V100), a ninth of NVLink 4's eighteen. It
matters only that it is more than any PCIe link to the host.
"""


class Bandwidths(Protocol):
    """Bandwidths for estimates: a topology, or the measurements of one (measured.py)."""

    @property
    def host_bps(self) -> float:
        """From host memory to any GPU."""

    @property
    def switch_bps(self) -> float:
        """Of all GPUs on a switch together; 0: no less than their links."""

    def host(self, gpu: int) -> float:
        """From host memory to this GPU."""

    def peer(self, source: int, target: int) -> float:
        """From GPU to GPU; 0: none."""


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """``switches`` has for each GPU the number of the switch that it shares; GPUs it does not list have one each.
    ``peer_bps[a][b]`` is the bandwidth from GPU a to GPU b, 0 where there is none. With ``uplinks``, a switch whose
    bandwidth is not given has that of one GPU's link.
    """

    host_bps: float = HOST_BPS
    switch_bps: float = 0.0  # 0: a switch is no narrower than its links together
    switches: tuple[int, ...] = ()
    peer_bps: tuple[tuple[float, ...], ...] = ()
    uplinks: bool = False

    def host(self, gpu: int) -> float:
        return self.host_bps

    def switch(self, gpu: int) -> int:
        return self.switches[gpu] if gpu < len(self.switches) else -1 - gpu

    def peer(self, source: int, target: int) -> float:
        if source >= len(self.peer_bps) or target >= len(self.peer_bps[source]):
            return 0.0
        return self.peer_bps[source][target]

    def neighbours(self, gpus: Collection[int]) -> dict[int, list[int]]:
        """For each of these GPUs, those of them that share its switch."""
        on: dict[int, list[int]] = {}  # by switch
        for gpu in gpus:
            on.setdefault(self.switch(gpu), []).append(gpu)
        return {gpu: [other for other in on[self.switch(gpu)] if other != gpu] for gpu in gpus}


def discovered(configured: Topology, places: Mapping[int, GpuPlace], keep_switches: bool, keep_peers: bool) -> Topology:
    """The configured topology, completed by executors' findings about their GPUs (by number): GPUs on one PCIe switch
    share its port to the host, which is as wide as one of theirs; NVLink connects pairs. Other pairs are unknown until
    something was measured.
    """
    numbers = {place.uuid: number for number, place in sorted(places.items())}
    count = max(places, default=-1) + 1

    def of(uuids: Iterable[str]) -> set[int]:
        return {numbers[uuid] for uuid in uuids if uuid in numbers}

    changes: dict[str, object] = {}
    groups = {number: of(place.switch_with) | {number} for number, place in places.items()}
    if not keep_switches and any(len(group) > 1 for group in groups.values()):
        changes["switches"] = tuple(min(groups.get(number, {number})) for number in range(count))
        changes["uplinks"] = True
    linked = {number: of(place.nvlink_with) for number, place in places.items()}
    if not keep_peers and any(linked.values()):
        changes["peer_bps"] = tuple(
            tuple(NVLINK_BPS if target in linked.get(source, ()) else 0.0 for target in range(count))
            for source in range(count)
        )
    return msgspec.structs.replace(configured, **changes)


def shared_copy_s(nbytes: float, others: Sequence[float], link_bps: float, switch_bps: float) -> float:
    """Seconds that a copy takes beside others that have so many bytes left, if each has an equal part of the switch."""
    if switch_bps <= 0.0:
        return nbytes / link_bps
    if not others:
        return nbytes / min(link_bps, switch_bps)
    seconds, left = 0.0, nbytes
    done = 0.0  # bytes that each of the others has had meanwhile
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
