"""Use of one GPU by each instance: its time, and bytes of its memory over time. Pure.

Bytes are counted by groups of instances that have the same segments, because they pay for them together. Each statement
reports what a group has held since the last one, and each member's use: the time that it had a seat; for KV, its
blocks. While a group's bytes are unused, they are counted by the shares of their last use.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from dormouse.core.decisions.memory.holdings import STATE_S, Holdings, OwnerGroup, split
from dormouse.core.decisions.memory.residency import Residency
from dormouse.schemas import messages as m

WEIGHTS: Final = "weights"
KV: Final = "kv"
ACTIVATIONS: Final = "activations"


@dataclass(slots=True)
class _Use:
    """Since the last statement."""

    seat_ms: int = 0
    gpu_us: int = 0
    prompt: int = 0
    made: int = 0


class LeaseMeter:
    """``at`` comes before each event, and ``sync`` after it. ``kv_users`` has the instances of a runtime by the owner
    of its KV.
    """

    def __init__(self, residency: Residency, kv_users: Callable[[str], list[str]]) -> None:
        self._residency, self._changes = residency, residency.changes
        self._kv_users = kv_users
        self._changes.counts = True
        self._held = Holdings()
        self._uses: defaultdict[str, _Use] = defaultdict(_Use)
        self._seats_ms: dict[str, int] = {}  # by instance that has one: until when it was counted
        self._parts: dict[OwnerGroup, dict[str, int]] = {}  # how much each has used it, at its last use
        self._blocks: dict[str, dict[str, int]] = {}  # of KV, by its owner: those of each instance, and
        self._blocks_ms: dict[str, dict[str, int]] = {}  # these over time
        self._blocks_since_ms: dict[str, int] = {}
        self._activations: dict[str, int] = {}
        self._due_s: float | None = None
        self._now_ms = 0

    # --- events

    def at(self, now_s: float) -> None:
        """Sets the time of the changes that follow."""
        self._now_ms = max(self._now_ms, int(now_s * 1000))

    def sync(self, now_s: float) -> None:
        """Counts the residency's changes, as of now."""
        self.at(now_s)
        now_ms = self._now_ms
        changes = self._changes
        if changes.segments or changes.seats:
            for segment in changes.segments:
                self._put(segment, now_ms)
            for name in changes.seats:
                self._sat(name, now_ms)
            changes.segments.clear()
            changes.seats.clear()
        if self._due_s is None and not (self._held.empty and not self._uses and not self._seats_ms):
            self._due_s = now_s + STATE_S

    def _put(self, segment: int, now_ms: int) -> None:
        pool = self._residency.pool
        if segment not in pool:
            self._held.drop(segment, now_ms)
            return
        owners = self._residency.holders(segment)
        kv = segment < 0 and any(owner not in self._residency.models.by_instance for owner in owners)
        self._held.put(segment, OwnerGroup.of(KV if kv else WEIGHTS, owners), pool.nbytes(segment), now_ms)

    def _sat(self, name: str, now_ms: int) -> None:
        since_ms = self._seats_ms.pop(name, None)
        if since_ms is not None:
            self._uses[name].seat_ms += now_ms - since_ms
        if self._residency.seated(name) and name in self._residency.models.by_instance:
            self._seats_ms[name] = now_ms

    def busy(self, instance: str, seconds: float) -> int:
        """The GPU has computed for it; returns microseconds."""
        busy_us = round(seconds * 1e6)
        self._uses[instance].gpu_us += busy_us
        return busy_us

    def stepped(self, kv: str, busy_us: int, shares: Mapping[str, m.StepShare]) -> dict[str, int]:
        """A runtime has computed a step, for these instances; its microseconds for each, by tokens. ``kv`` is the owner
        of its KV.
        """
        names = list(shares)
        parts = dict(zip(names, split(busy_us, [shares[name].tokens for name in names]), strict=True))
        for name, part_us in parts.items():
            use = self._uses[name]
            use.gpu_us += part_us
            use.prompt += shares[name].prompt
            use.made += shares[name].made
        self._count_blocks(kv)
        self._blocks[kv] = {name: share.kv_blocks for name, share in shares.items() if share.kv_blocks > 0}
        return parts

    def _count_blocks(self, kv: str) -> None:
        passed_ms = self._now_ms - self._blocks_since_ms.get(kv, self._now_ms)
        self._blocks_since_ms[kv] = self._now_ms
        over_ms = self._blocks_ms.setdefault(kv, {})
        for name, blocks in self._blocks.get(kv, {}).items():
            over_ms[name] = over_ms.get(name, 0) + blocks * max(1, passed_ms)

    def activations(self, instance: str, all_nbytes: int, others: Iterable[str]) -> None:
        """``all_nbytes`` are used beside the pool; the part that ``others``, which have leases too, do not have is its
        own.
        """
        known = {name: self._activations.get(name, 0) for name in others if name != instance}
        left = max(0, all_nbytes)
        now: dict[str, int] = {}
        for name, nbytes in known.items():
            now[name] = min(nbytes, left)
            left -= now[name]
        now[instance] = left
        for name in [*self._activations.keys() - now.keys(), *now]:
            self._held.put((ACTIVATIONS, name), OwnerGroup.of(ACTIVATIONS, (name,)), now.get(name, 0), self._now_ms)
        self._activations = {name: nbytes for name, nbytes in now.items() if nbytes}

    # --- resident bytes

    def nbytes(self, group: OwnerGroup) -> int:
        return self._held.nbytes(group)

    @property
    def kv_nbytes(self) -> int:
        """Of all runtimes, as of the last `sync`."""
        return self._held.of_kind(KV)

    def models(self) -> Iterator[tuple[OwnerGroup, int]]:
        """Bytes of models that are there, by their owners."""
        return ((group, self._held.nbytes(group)) for group in self._held.groups if group.kind == WEIGHTS)

    # --- statements

    @property
    def due_s(self) -> float | None:
        return self._due_s

    def statements(self, now_s: float) -> list[m.Metered]:
        """Returns statements, if they are due."""
        if self._due_s is None or now_s < self._due_s:
            return []
        return self.state(now_s)

    def state(self, now_s: float) -> list[m.Metered]:
        self.sync(now_s)
        now_ms = self._now_ms
        for name in list(self._seats_ms):
            self._sat(name, now_ms)
        for kv in list(self._blocks):
            self._count_blocks(kv)
        uses, self._uses = self._uses, defaultdict(_Use)
        held = [self._told(group, nbyte_ms, uses) for group, nbyte_ms in self._held.take(now_ms)]
        known = {*self._held.groups}
        self._parts = {group: parts for group, parts in self._parts.items() if group in known}
        owners = {group.owners[0] for group in known if group.kind == KV and group.owners}
        self._blocks = {kv: blocks for kv, blocks in self._blocks.items() if kv in owners}
        self._blocks_since_ms = {kv: since_ms for kv, since_ms in self._blocks_since_ms.items() if kv in owners}
        self._blocks_ms.clear()
        told = [
            m.InstanceUse(instance=name, seat_ms=use.seat_ms, gpu_us=use.gpu_us, prompt=use.prompt, made=use.made)
            for name, use in sorted(uses.items())
        ]
        self._due_s = None
        self.sync(now_s)
        count = max(len(held), len(told))
        return [
            m.Metered(held=held[i : i + m.ENTRIES], uses=told[i : i + m.ENTRIES]) for i in range(0, count, m.ENTRIES)
        ]

    def _told(self, group: OwnerGroup, nbyte_ms: int, uses: Mapping[str, _Use]) -> m.HeldBytes:
        kv = group.owners[0] if group.kind == KV else ""
        if kv:
            parts = self._blocks_ms.get(kv, {})
        else:
            parts = {name: uses[name].seat_ms for name in group.owners if name in uses and uses[name].seat_ms}
        parts = self._parts[group] = parts or self._parts.get(group, {})
        owners = ([*parts] or self._kv_users(kv)) if kv else list(group.owners)
        return m.HeldBytes(
            kind=group.kind, owners=owners, nbyte_ms=nbyte_ms, parts=[parts.get(name, 0) for name in owners]
        )
