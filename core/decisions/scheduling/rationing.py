"""Choice of functions to give up while links are too slow for all: pure. A wake whose copy takes longer than others can
wait keeps a GPU and a link from them, and cannot be interrupted. While GPUs or links are scarce and requests are late
because of others, the functions that need most link seconds are given up; their wakes then get a small share of the
GPUs' time.

A model's bytes are either in GPU memory or come over a link at each request. Memory is best filled by rate, highest
first; ``r*`` is the rate where it is full. Without a function of rate r and s bytes, links carry

    min(r, r*) s   bytes per second less:

its own, or those of the models that take its place in memory. The neediest is given up first, so that most functions
remain.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from dormouse.core.decisions.scheduling.functions import Function
from dormouse.core.decisions.scheduling.state import Gpu, Model
from dormouse.core.decisions.scheduling.topology import Bandwidths

MIN_SHARE: Final = 0.02
MAX_SHARE: Final = 0.5
"""Of the GPUs' time, for wakes of functions that are given up: each of them makes others late that meet it. It grows
while no request is late, and is halved when one is.
"""

GROWTH: Final = 1.0005
"""Of the share, per request in time: it doubles with 1,400 of them."""

LONG: Final = 0.5
"""A copy is long if it takes this share of the time that the least patient tenth of functions can wait."""

LATE: Final = 2.0
FEW: Final = 4.0
"""Late requests in parts of the number that the functions' percentiles allow, and their number, from which on something
must be given up. Only requests that others have made late count: the rest would be late without them, too.
"""

SCARCE: Final = 0.6
"""Part of the GPUs' time or of the links' bandwidth that is used, from which on it is scarce. Below, late requests want
more than there is, and giving others up would help none of them.
"""

IDLE: Final = 0.1
"""The same, up to which those that are given up may have twice as much with each look: they harm no others."""

SACRIFICE: Final = 0.08
"""Share of all requests that may be given up beyond the share that others had made late: they are late for certain."""

HARM: Final = 0.75
CALM: Final = 0.25
"""Late requests in parts of the allowed number, from which on those that are given up get less, and up to which more.
"""

ENOUGH: Final = 0.2
"""From this share on, some are taken back."""

STEP: Final = 0.7
STEP_BACK: Final = 1.05
"""Remaining share of the link seconds after some were given up, and after some were taken back."""

SETTLE_S: Final = 4.0
"""For so long after that nothing is concluded: copies on their way still make others late."""

DECAY: Final = 0.5
SLOW_DECAY: Final = 0.95
"""Weight of earlier observations, per look: of those that decide when, and of those that decide how much."""

MIN_ENDS: Final = 50.0
"""Fewer requests tell nothing of a share."""

PROBE_S: Final = 30.0
MAX_PROBE_S: Final = 1800.0
"""Time to be calm before one is taken back, and the most that this becomes by doubling when it did not do."""


@dataclass(slots=True)
class Recent:
    """Recent use by leases, and fates of requests."""

    ends: float = 0.0
    late: float = 0.0  # because of others
    leases: float = 0.0
    long: float = 0.0  # of models whose whole copy would be long
    busy_s: float = 0.0
    host_nbytes: float = 0.0
    elapsed_s: float = 0.0

    def fade(self, share: float) -> None:
        for name in self.__slots__:
            setattr(self, name, share * getattr(self, name))

    @property
    def late_share(self) -> float:
        return self.late / max(MIN_ENDS, self.ends)


class Rationing:
    """``gpus``, ``functions`` and ``models`` are the scheduler's. ``next_s``: when the next wake may begin that is
    rationed.
    """

    def __init__(
        self, topology: Bandwidths, gpus: dict[int, Gpu], functions: dict[str, Function], models: dict[str, Model]
    ) -> None:
        self._topology = topology
        self._gpus, self._functions, self._models = gpus, functions, models
        self._patience_s = float("inf")
        self._allowed = self._late = 0.0
        self._recent = Recent()
        self._worst = 0.0  # share of late requests since a function is given up
        self._looked_s = self._look_s = self._back_s = 0.0
        self._calm_s = PROBE_S
        self._share = MIN_SHARE
        self.next_s = 0.0

    # --- a request

    def concerns(self, model: Model) -> bool:
        """Whether a copy of all of it would be long."""
        return self.long(model.nbytes / self._topology.host_bps)

    def long(self, copy_s: float) -> bool:
        return copy_s > LONG * self._patience_s

    def crowded(self, now_s: float) -> int | None:
        """The GPU whose long wake ends first, if all others but one have such, too, and most requests have none:
        one must remain for requests that cannot wait.
        """
        if 2.0 * self._recent.long >= self._recent.leases:
            return None
        busy = [
            (running.copies_until_s, number)
            for number, gpu in self._gpus.items()
            for running in gpu.turns
            if running.copying_nbytes
            and running.copies_until_s > now_s
            and self.long(running.copies_until_s - running.started_s)
        ]
        return min(busy)[1] if 0 < len(self._gpus) - 1 <= len(busy) else None

    def woke(self, seconds: float, now_s: float) -> None:
        """One that is rationed was granted a lease, which is expected to take so long."""
        self.next_s = now_s + seconds / (self._share * len(self._gpus))

    def ended(self, model: Model, used_s: float, host_nbytes: int) -> None:
        """A lease has had a GPU for so long, and has copied so much from the host."""
        recent = self._recent
        recent.leases += 1.0
        recent.long += self.concerns(model)
        recent.busy_s += used_s
        recent.host_nbytes += host_nbytes

    # --- functions

    def update(self, now_s: float) -> bool:
        """Looks at requests ended since the last time; returns whether a function was given up or taken back."""
        shown = [function for function in self._functions.values() if function.ends]
        if not shown or not self._gpus:
            return False
        waits_s = sorted([function.deadline_s - function.best_s for function in shown])
        self._patience_s = max(0.0, waits_s[len(waits_s) // 10])
        ends = late = 0
        allowed = 0.0
        for function in shown:
            if not function.given_up:
                ends += function.ends
                late += function.hindered_ends
                allowed += (1.0 - function.percentile) * function.ends
            function.ends = function.hindered_ends = 0
        load = self._load(ends, late, now_s)
        if now_s < self._look_s:
            return False
        self._allowed = DECAY * self._allowed + allowed
        self._late = DECAY * self._late + late
        if self._late >= FEW and self._late > LATE * self._allowed:
            return load >= SCARCE and self._give_up(now_s)
        if self._late > HARM * self._allowed:
            self._share = max(MIN_SHARE, 0.5 * self._share)
        elif self._late <= CALM * self._allowed:
            self._share = min(MAX_SHARE, (GROWTH**ends if load > IDLE else 2.0) * self._share)
            return self._share >= ENOUGH and now_s >= self._back_s and self._take_back(now_s)
        return False

    def _load(self, ends: int, late: int, now_s: float) -> float:
        """Takes these into account; returns the used part of the GPUs' time or of the links, whichever is more."""
        recent, gpus = self._recent, self._gpus
        recent.ends += ends
        recent.late += late
        recent.elapsed_s += now_s - self._looked_s
        self._looked_s = now_s
        given_up = any(function.given_up for function in self._functions.values())
        self._worst = max(self._worst, recent.late_share) if given_up else recent.late_share
        load = 0.0
        if recent.elapsed_s > 0.0:
            used_bps = recent.host_nbytes / recent.elapsed_s
            load = max(recent.busy_s / recent.elapsed_s / len(gpus), used_bps / self._links_bps())
        recent.fade(SLOW_DECAY)
        return load

    def _links_bps(self) -> float:
        """Bandwidth of all GPUs together from the host."""
        host_bps, switch_bps = self._topology.host_bps, self._topology.switch_bps
        if not switch_bps:
            return host_bps * len(self._gpus)
        sizes = Counter(min([gpu.number, *(other.number for other in gpu.neighbours)]) for gpu in self._gpus.values())
        return sum(min(switch_bps, size * host_bps) for size in sizes.values())

    def _costs(self, now_s: float) -> list[tuple[float, Function]]:
        """Link seconds per second of functions whose whole copy is long, highest first."""
        sizes: dict[str, int] = {}
        for model in self._models.values():
            sizes[model.function.name] = max(sizes.get(model.function.name, 0), model.nbytes)
        functions = [(self._functions[name], nbytes) for name, nbytes in sizes.items() if name in self._functions]
        rates = sorted([(function.rate(now_s), nbytes, function.name) for function, nbytes in functions], reverse=True)
        left_nbytes = sum(gpu.capacity_nbytes for gpu in self._gpus.values())
        full = 0.0
        for rate, nbytes, name in rates:
            if self._functions[name].given_up:
                continue
            left_nbytes -= nbytes
            if left_nbytes < 0:
                full = rate
                break
        found = [
            (min(rate, full) * nbytes / self._topology.host_bps, self._functions[name])
            for rate, nbytes, name in rates
            if self.long(nbytes / self._topology.host_bps)
        ]
        return sorted(found, key=lambda each: -each[0])

    def _give_up(self, now_s: float) -> bool:
        """Those that need most of the links, until enough of these is left, or no more requests may be sacrificed."""
        rates = {name: function.rate(now_s) for name, function in self._functions.items()}
        given = sum(rate for name, rate in rates.items() if self._functions[name].given_up)
        may_give = (self._worst + SACRIFICE) * sum(rates.values())
        kept = [(cost, function) for cost, function in self._costs(now_s) if not function.given_up and cost > 0.0]
        left = sum(cost for cost, _ in kept)
        enough, some = STEP * left, False
        for cost, function in kept:
            given += rates[function.name]
            if left <= enough or given > may_give:
                break
            function.given_up = some = True
            left -= cost
        if not some:
            return False
        if now_s < self._back_s:  # soon after some were taken back
            self._calm_s = min(MAX_PROBE_S, 2.0 * self._calm_s)
        self._allowed = self._late = 0.0
        self._share = MIN_SHARE
        self._look_s, self._back_s = now_s + SETTLE_S, now_s + self._calm_s
        return True

    def _take_back(self, now_s: float) -> bool:
        given = [function for function in self._functions.values() if function.given_up]
        if not given:
            return False
        costs = self._costs(now_s)
        more = (STEP_BACK - 1.0) * sum(cost for cost, function in costs if not function.given_up)
        known = {function.name: cost for cost, function in costs}
        for function in sorted(given, key=lambda each: known.get(each.name, 0.0)):  # a copy may be long no more
            function.given_up = False
            more -= known.get(function.name, 0.0)
            if more <= 0.0:
                break
        self._back_s = now_s + self._calm_s
        return True

    def forget(self) -> None:
        """The policy gives no function up."""
        for function in self._functions.values():
            function.given_up = False
        self._patience_s, self._share, self.next_s = float("inf"), MIN_SHARE, 0.0
