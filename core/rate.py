"""How often something may be: token buckets. Pure; time is an argument."""

from dataclasses import dataclass


@dataclass(slots=True)
class Bucket:
    """Holds up to ``burst`` tokens and gains ``rate_s`` a second; each event takes one."""

    rate_s: float
    burst: float
    tokens: float
    seen_s: float

    @classmethod
    def full(cls, rate_s: float, burst: float, now_s: float) -> "Bucket":
        return cls(rate_s, burst, burst, now_s)

    def take(self, now_s: float) -> float:
        """0 if a token was taken, else how long until there is one."""
        self.tokens = min(self.burst, self.tokens + (now_s - self.seen_s) * self.rate_s)
        self.seen_s = now_s
        if self.tokens >= 1.0:
            self.tokens -= 1.0
            return 0.0
        return (1.0 - self.tokens) / self.rate_s
