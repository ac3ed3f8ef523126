"""Shares of the GPUs' time among tenants: pure. Weighted fair turns, as start-time fair queueing has them.

A tenant's *virtual time* is the seconds of turns that it has had, over its share. Of the waiting tenants, those whose
virtual time is within LEAD_S of the least are served in the policy's order; the others are over their share, and wait
as long as one of those waits, and no longer: time that no other tenant wants is theirs. Unwanted time is not owed: a
tenant that wants time again begins at most CREDIT_S before those who have had theirs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from dormouse.core.decisions.scheduling.state import Gpu, Running, Waiting

LEAD_S: Final = 0.2
"""Most seconds of a GPU at the mean share that a tenant may be ahead of the others before it is over its share. So long
deadlines decide among tenants, and a model that is there may serve several requests in a row.
"""

CREDIT_S: Final = 0.25
"""More than LEAD_S: a tenant that comes after a while is served before those at their limit."""

PRUNE: Final = 64
"""Tenants below which those without any state worth keeping are not looked for."""

EXPECT_S: Final = 1.0
"""Most seconds of a lease's expected time that count when its turn begins: the time of a language model's lease is not
predictable.
"""


class Shares:
    """``gpus`` are the scheduler's. As long as no share is known, it is not ``on``: there is but one tenant."""

    def __init__(self, gpus: Mapping[int, Gpu]) -> None:
        self._gpus = gpus
        self.on = False
        self._weights: dict[str, float] = {}  # their mean is 1
        self._unnamed = 1.0  # the weight of others
        self._virtual_s: dict[str, float] = {}
        self._prune_at = PRUNE
        self._floor_s = 0.0  # the least of tenants that want time; never less than it was
        self._expected_s: defaultdict[str, float] = defaultdict(float)  # the same of turns that go on
        self._waiting: Counter[str] = Counter()

    def known(self, shares: Iterable[tuple[str, float]]) -> None:
        """All of them, by tenant; others have a share of 1."""
        given = dict(shares)
        mean = sum(given.values()) / len(given) if given else 1.0
        self._weights = {tenant: share / mean for tenant, share in given.items()}
        self._unnamed = 1.0 / mean
        self.on = bool(given)

    def tenant(self, waiting: Waiting) -> str:
        return waiting.tenant if self.on else ""

    def share(self, tenant: str, others: Iterable[str]) -> float:
        """Its part of the time, if these want some, too."""
        weights = [self._weight(each) for each in {tenant, *others}]
        return self._weight(tenant) / sum(weights)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, self._unnamed)

    # --- tenants that want time

    def waits(self, waiting: Waiting, now_s: float) -> None:
        """One of its requests does from now on."""
        tenant = waiting.tenant
        if not self._waiting[tenant] and not any(turn.waiting.tenant == tenant for turn in self._turns()):
            self.count(now_s)
            self._raise_floor(set())
            self._virtual_s[tenant] = max(self._virtual_s.get(tenant, 0.0), self._floor_s - CREDIT_S)
        self._waiting[tenant] += 1

    def waits_no_more(self, waiting: Waiting) -> None:
        self._waiting[waiting.tenant] -= 1
        if self._waiting[waiting.tenant] <= 0:
            del self._waiting[waiting.tenant]

    def wants(self, tenant: str) -> bool:
        """Whether a request of it waits."""
        return tenant in self._waiting

    def recount(self, waiting: Iterable[Waiting]) -> None:
        """These wait, and no others."""
        self._waiting = Counter(each.tenant for each in waiting)

    # --- tenants that have had some

    def count(self, now_s: float) -> None:
        """Turns until now."""
        for gpu in self._gpus.values():
            for running in gpu.leases.values():
                self._counted(running, now_s)
        self._expected_s.clear()
        for running in self._turns():
            self.began(running, now_s)

    def began(self, running: Running, now_s: float) -> None:
        """It has a turn: its expected time counts as had, until more is known."""
        if running.turn_s is not None:
            left_s = min(EXPECT_S, running.ends_s - running.turn_s) - (now_s - running.turn_s)
            self._expected_s[running.waiting.tenant] += max(0.0, left_s) / self._weight(running.waiting.tenant)

    def _counted(self, running: Running, now_s: float) -> None:
        """Counts this lease's time until now."""
        had_s = running.held_s(now_s)
        if had_s != running.counted_s:
            tenant, more_s = running.waiting.tenant, had_s - running.counted_s
            running.counted_s = had_s
            self._virtual_s[tenant] = self._virtual_s.get(tenant, 0.0) + more_s / self._weight(tenant)

    def over(self, running: Running, now_s: float) -> None:
        """A lease is; it is not among its GPU's any more."""
        self._counted(running, now_s)
        self._raise_floor({running.waiting.tenant})
        if len(self._virtual_s) > self._prune_at:
            self._forget()

    def _turns(self) -> Iterable[Running]:
        return (running for gpu in self._gpus.values() for running in gpu.turns)

    def _raise_floor(self, also: set[str]) -> None:
        wanting = {turn.waiting.tenant for turn in self._turns()} | set(self._waiting) | also
        if wanting:
            self._floor_s = max(self._floor_s, min(self._virtual_s.get(tenant, 0.0) for tenant in wanting))

    def _forget(self) -> None:
        """Forgets tenants whose state is that of new ones."""
        wanting = {running.waiting.tenant for gpu in self._gpus.values() for running in gpu.leases.values()}
        wanting.update(self._waiting)
        for tenant in [name for name, at_s in self._virtual_s.items() if at_s <= self._floor_s - CREDIT_S]:
            if tenant not in wanting:
                del self._virtual_s[tenant]
        self._prune_at = max(PRUNE, 2 * len(self._virtual_s))

    # --- the next tenant

    def virtual_s(self, tenant: str) -> float:
        return self._virtual_s.get(tenant, 0.0) + self._expected_s[tenant]

    def ascending(self) -> list[tuple[float, str]]:
        """Tenants that wait, by virtual time: the one that has had least for its share first."""
        return sorted((self.virtual_s(tenant), tenant) for tenant in self._waiting)

    def is_over(self, tenant: str) -> bool:
        """Whether it waits for others to have their share; as of when turns were counted last."""
        return self.on and self.virtual_s(tenant) - self._least_s >= LEAD_S

    @property
    def _least_s(self) -> float:
        """Of those that wait."""
        return min((self.virtual_s(tenant) for tenant in self._waiting), default=0.0)

    # --- for people

    def over_by_s(self, now_s: float) -> dict[str, float]:
        """Tenants that wait and are over their share by now, and how many seconds of a GPU they are ahead of the tenant
        with the least. Changes nothing.
        """
        if not self.on:
            return {}
        virtual_s = {tenant: self._virtual_s.get(tenant, 0.0) for tenant in self._waiting}
        for turn in self._turns():
            if (tenant := turn.waiting.tenant) in virtual_s:
                virtual_s[tenant] += (turn.held_s(now_s) - turn.counted_s) / self._weight(tenant)
        least_s = min(virtual_s.values(), default=0.0)
        return {
            tenant: (at_s - least_s) * self._weight(tenant)
            for tenant, at_s in sorted(virtual_s.items())
            if at_s - least_s >= LEAD_S
        }
