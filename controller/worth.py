"""What keeping a model on a GPU is worth: pure. The executor makes of it the cost of evicting a segment (Tangram
§3.2.2, Eq. 2: worth times the seconds that bringing it back would take).
"""

from collections.abc import Iterable
from typing import Final

HALF_LIFE_S: Final = 60.0
"""Age of the last use at which a model is worth half: a minute is the resolution of the published traces of function
calls. A model of twice the bytes is thus kept as long as one that was used a minute later.
"""

OLDEST: Final = 64.0
"""Half-lives after which age alone says nothing more: products with worth stay far from a float's underflow."""

STEP: Final = 2.0**-20
"""Least relative difference of two worths: survives a product and a quotient in double precision, and a million
instances of one age still differ by no more than a factor of e.
"""


def by_recency(ages_s: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Worth of each instance, in (0, 1], from ``(instance, seconds since its last use)``, latest use first.

    Falls strictly in the order given, so that equal sizes are evicted least recently used first, also where the clock
    cannot tell two uses apart. Every function counts as equally sensitive. A stand-in for the probability of the next
    use: statistics of each function's arrivals, times its sensitivity to latency, are to take its place.
    """
    worth: dict[str, float] = {}
    highest = 1.0
    for instance, age_s in ages_s:
        worth[instance] = min(2.0 ** -min(max(age_s, 0.0) / HALF_LIFE_S, OLDEST), highest)
        highest = worth[instance] * (1.0 - STEP)
    return worth
