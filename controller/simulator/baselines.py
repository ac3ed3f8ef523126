"""Baselines of the papers, beyond the settings of the core: pure. Functions as processes of their own that are bound to
a GPU (Torpor's Native), the time for which an idle one is kept (INFless-KA), GPUs that keep no model but the last
(ServerlessLLM, as Tangram runs it), and memory that is allocated for each wake (Torpor-Block).

A function is bound by placement ``bound``, which is the core's. Processes start and end by themselves, as containers
do: the core is only told that a model is on a GPU no more.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from dormouse.controller.simulator.devices import ModelSpec
from dormouse.core.decisions.scheduling.placement import PLACEMENT_CLASSES
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import MAX, Policy, checked

KEEP_ALIVES: Final = ("", "history", "trace")

KEEP_S: Final = 600.0
"""How long an idle process is kept of which no idle time is known yet: what platforms without a history do (INFless
compares itself with it).
"""

PERCENTILE: Final = 0.99
"""Of idle times: what Torpor's published prototype keeps its INFless-KA functions by (scripts/router.py)."""

HISTORY: Final = 1000
"""Idle times that are remembered of a function."""

_EXAMPLES: Final = {
    "native": 'bytes of a process of its own, as native = "1.2GB"',
    "cold_start": 'how long a process takes to start, as cold_start = "4s"',
    "allocate": 'how long a wake allocates memory, as allocate = "20ms"',
}


class SimulatedPolicy(Policy, frozen=True, kw_only=True):
    """A node's settings, and what only the simulator can do.

    ``native``: functions are processes that hold their GPU memory while they live, and start as cold as their model
    says. ``keep_alive``: how long an idle one lives: for ever; by ``history``, the idle times that it has had; or by
    the whole ``trace``, which no platform knows. ``reuse``: models stay on a GPU when another one runs there.
    ``allocate``: a wake first allocates memory, for as long as its model says. ``whole``: models are evicted and copied
    as a whole, whatever segments they consist of. ``drop_ms``: a request that has no answer for so long is dropped, and
    so are all of its function from then on, as Torpor's published load generator does; 0: never. ``release``: a
    language model whose seat is left gives up its weights and its process there, as an instance does that a platform
    ends. ``preload_holds``: where a model is being brought ahead nobody computes until it is there.
    """

    native: bool = False
    keep_alive: str = ""
    reuse: bool = True
    allocate: bool = False
    whole: bool = False
    drop_ms: int = 0
    release: bool = False
    preload_holds: bool = False


def checked_baseline(policy: SimulatedPolicy, origin: str) -> SimulatedPolicy:
    """The same, or ConfigError naming the setting and its possible values."""
    checked(policy, origin)
    if not 0 <= policy.drop_ms <= MAX:
        raise ConfigError(f"{origin}: drop_ms is {policy.drop_ms}; write a number from 0 to {MAX}")
    if policy.preload_holds and not policy.preload:
        raise ConfigError(f"{origin}: preload_holds is true; write preload = true, or leave it out")
    if policy.keep_alive not in KEEP_ALIVES:
        raise ConfigError(f"{origin}: keep_alive is {policy.keep_alive!r}; write history or trace, or leave it out")
    if policy.keep_alive and not policy.native:
        raise ConfigError(f"{origin}: keep_alive is {policy.keep_alive!r}; write native = true: only processes leave")
    if policy.drop_ms and policy.native:
        raise ConfigError(f"{origin}: drop_ms is {policy.drop_ms}; leave it out: native processes drop nothing")
    if policy.native and not PLACEMENT_CLASSES[policy.placement].binds:
        raise ConfigError(f'{origin}: native is true; write placement = "bound": processes do not move')
    return policy


def as_baseline(models: Sequence[ModelSpec], policy: Policy, origin: str) -> list[ModelSpec]:
    """The models as they are under a policy. A bound function holds for good what it needs while it runs: all of its
    process if it is native (whose start contains the copies), else weights and activations, which its one wake copies
    both. Raises ConfigError if a model does not say what the policy needs.
    """
    found: dict[int, ModelSpec] = {}  # by identity: many functions have one spec
    for spec in models:
        if id(spec) not in found:
            found[id(spec)] = _as_baseline(spec, policy, origin)
    return [found[id(spec)] for spec in models]


def _as_baseline(spec: ModelSpec, policy: Policy, origin: str) -> ModelSpec:
    if isinstance(policy, SimulatedPolicy) and (policy.native or policy.drop_ms) and (spec.llm or spec.batch):
        key = "native" if policy.native else "drop_ms"
        what = "has batches" if spec.llm is None else "is a language model"
        raise ConfigError(
            f"{origin}: {spec.name} {what}, and the policy has {key}, which is for functions with single requests "
            "only; use another policy"
        )
    if PLACEMENT_CLASSES[policy.placement].binds:
        spec = msgspec.structs.replace(spec, nbytes=spec.nbytes + spec.activation_nbytes, activation_nbytes=0)
    if not isinstance(policy, SimulatedPolicy):
        return spec
    if policy.whole:
        spec = msgspec.structs.replace(spec, segment_nbytes=0)
    needs = (("native", policy.native, spec.native_nbytes), ("cold_start", policy.native, spec.cold_start_s))
    for key, wanted, value in (*needs, ("allocate", policy.allocate, spec.allocate_s)):
        if wanted and not value:
            raise ConfigError(
                f"{origin}: {spec.base or 'models'}.{key} is missing, and the policy needs it of {spec.name}; write "
                f"{_EXAMPLES[key]}"
            )
    if policy.native:
        return msgspec.structs.replace(
            spec,
            nbytes=spec.native_nbytes,
            run_s=spec.native_run_s or spec.run_s,
            base="",
            base_nbytes=0,
            instances=1,  # requests of one process run one after the other anyway
        )
    if not policy.reuse:
        return msgspec.structs.replace(spec, base="", base_nbytes=0)
    return spec


class IdleTimes:
    """The idle times of one function, the last `HISTORY` of them."""

    __slots__ = ("_last", "_ranked")

    def __init__(self) -> None:
        self._last: deque[float] = deque()
        self._ranked: list[float] = []

    def add(self, idle_s: float) -> None:
        self._last.append(idle_s)
        insort(self._ranked, idle_s)
        if len(self._last) > HISTORY:
            del self._ranked[bisect_left(self._ranked, self._last.popleft())]

    @property
    def window_s(self) -> float:
        """How long to stay from now on."""
        if not self._ranked:
            return KEEP_S
        return self._ranked[ceil(PERCENTILE * len(self._ranked)) - 1]


class Processes:
    """Functions that have a process, and until when. Times in seconds; functions by number."""

    def __init__(self, count: int, keep_alive: str) -> None:
        self.up = [False] * count
        self.starting: list[list[int] | None] = [None] * count  # requests that wait for the start
        self.life = [0] * count  # an expectation of an end that has another number is void
        self._by_history = keep_alive == "history"
        self._forever = not keep_alive
        self._open = [0] * count  # requests that are not answered
        self._idle_since_s: list[float | None] = [None] * count
        self._idle = [IdleTimes() for _ in range(count)] if self._by_history else []
        self._windows_s = [KEEP_S] * count

    def know(self, times_s: npt.NDArray[np.float64], functions: npt.NDArray[np.int64]) -> None:
        """The whole trace, for the windows that are not of history: the gaps between one request and the next."""
        if self._by_history or self._forever:
            return
        order = np.argsort(functions, kind="stable")
        ends = np.cumsum(np.bincount(functions, minlength=len(self.up)))
        for function, mine in enumerate(np.split(times_s[order], ends[:-1])):
            gaps = np.sort(np.diff(mine))
            if len(gaps):
                self._windows_s[function] = float(gaps[ceil(PERCENTILE * len(gaps)) - 1])

    def asked(self, function: int, now_s: float) -> None:
        since_s = self._idle_since_s[function]
        if self._by_history and since_s is not None and not self._open[function]:
            self._idle[function].add(now_s - since_s)
        self._open[function] += 1
        self.life[function] += 1

    def over(self, function: int, now_s: float) -> float | None:
        """A request has met its fate. When the process will leave, if it is idle now and is to leave at all."""
        self._open[function] -= 1
        if self._open[function]:
            return None
        self._idle_since_s[function] = now_s
        if self._forever:
            return None
        return now_s + (self._idle[function].window_s if self._by_history else self._windows_s[function])
