"""Token buckets. Pure; time is an argument."""

from dataclasses import dataclass
from weakref import WeakValueDictionary


@dataclass(slots=True, weakref_slot=True)
class Bucket:
    """Holds up to ``burst`` tokens and gains ``rate_s`` a second; each event takes one. Costs that were not known
    beforehand are charged afterwards, and may make the tokens negative.
    """

    rate_s: float
    burst: float
    tokens: float
    seen_s: float

    @classmethod
    def full(cls, rate_s: float, burst: float, now_s: float) -> "Bucket":
        return cls(rate_s, burst, burst, now_s)

    def take(self, now_s: float) -> float:
        """0 if a token was taken, else how long until there is one."""
        wait_s = self.wait_s(now_s, 1.0)
        if wait_s == 0.0:
            self.tokens -= 1.0
        return wait_s

    def charge(self, now_s: float, amount: float) -> None:
        self._fill(now_s)
        self.tokens -= amount

    def wait_s(self, now_s: float, amount: float) -> float:
        """The time until so many are there."""
        self._fill(now_s)
        return 0.0 if self.tokens >= amount else (amount - self.tokens) / self.rate_s

    def _fill(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self.seen_s)  # a clock that was set back takes nothing away
        self.tokens = min(self.burst, self.tokens + passed_s * self.rate_s)
        self.seen_s = now_s


class SharedBuckets:
    """A bucket for all that have a name in common, as long as one of them has it."""

    def __init__(self, rate_s: float, burst: float) -> None:
        self._rate_s, self._burst = rate_s, burst
        self._buckets: WeakValueDictionary[str, Bucket] = WeakValueDictionary()

    def of(self, name: str, now_s: float) -> Bucket:
        if (bucket := self._buckets.get(name)) is None:
            self._buckets[name] = bucket = Bucket.full(self._rate_s, self._burst, now_s)
        return bucket
