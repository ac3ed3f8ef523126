"""Runs the scheduling core against simulated devices: the same `Scheduler`, another clock. Deterministic. Owns the run
loop, and how requests and the core come together; GPUs are executors.py's.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from heapq import heappop
from typing import Any, Final, ParamSpec

import msgspec.structs
import numpy as np
import numpy.typing as npt

from dormouse.controller.simulator.agenda import (
    BACK,
    BEGIN,
    COMPUTED,
    COPIED,
    DRAINED,
    DROPS,
    ENDED,
    LOST,
    OPENS,
    PRELOADED,
    RUNTIME,
    STEPPED,
    TICK,
    TOKEN_DUE,
    UNDRAINED,
    Agenda,
)
from dormouse.controller.simulator.baselines import SimulatedPolicy
from dormouse.controller.simulator.batches import BatchLines
from dormouse.controller.simulator.devices import Fault, ModelSpec, OutsideLease
from dormouse.controller.simulator.executors import Executors
from dormouse.controller.simulator.extras import Extras
from dormouse.controller.simulator.front import Front, RouterQueue, Starts
from dormouse.controller.simulator.gpu import POOLS, SimulatedGpu, known_models
from dormouse.controller.simulator.instances import SimulatedInstances, instance_names
from dormouse.controller.simulator.streams.adapters import group_spec, runtime_groups
from dormouse.controller.simulator.streams.serving import Serving, Streams
from dormouse.core.decisions.rules.batching import BatchRule
from dormouse.core.decisions.rules.replicas import most_instances
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.policy import Policy

P = ParamSpec("P")

INFINITY = float("inf")

WARM_DEADLINE_S: Final = 60.0
"""Of requests that are not counted: none of them is late, or the core would think that functions do not comply."""

REPORT_EVERY: Final = 8192
"""Arrivals between two calls of ``progress``."""


class Simulation:
    """One run. ``models[f]`` is function f's, ``deadlines_s[f]`` its deadline, ``percentile`` (in (0, 1)) that of all
    functions or one for each. ``busy_s``, ``wakes`` and ``host_nbytes`` count leases of all but the warm requests;
    of those that a GPU has lost only ``busy_s``. ``pools`` is one of `POOLS`. ``shares`` of
    the GPUs' time and ``quotas`` of each one's memory are of the models' tenants.
    """

    def __init__(
        self,
        policy: Policy,
        topology: Topology,
        gpus: int,
        gpu_nbytes: int,
        models: Sequence[ModelSpec],
        deadlines_s: Sequence[float],
        percentile: float | Sequence[float],
        seed: int = 0,
        faults: Sequence[Fault] = (),
        outside: OutsideLease | None = None,
        pools: str = "ideal",
        shares: tuple[tuple[str, float], ...] = (),
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        baseline = policy if isinstance(policy, SimulatedPolicy) else SimulatedPolicy()
        assert outside is None or not (faults or baseline.native), "these do not know a router's queue"
        groups = runtime_groups(models)
        host = {number: first for first, members in groups.items() for number in members}  # of those in a group
        llms = {
            number: (f"f{host.get(number, number)}", spec.llm)
            for number, spec in enumerate(models)
            if spec.llm is not None
        }
        assert not (llms and (baseline.native or baseline.drop_ms)), "these know requests only, no streams"
        assert not (baseline.drop_ms and (outside is not None or baseline.native)), "a front has its own queue"
        core = Scheduler(seed=seed, revoke_s=1.0, max_waiting=1 << 30, policy=policy, topology=topology)
        self._agenda = agenda = Agenda()
        self._models = models
        self._names = [f"f{i}" for i in range(len(models))]
        self._instances = SimulatedInstances()
        families = [
            (
                self._instances.of(name, spec.instances),
                group_spec(models, groups[number]) if number in groups else spec,
            )
            for number, (name, spec) in enumerate(zip(self._names, models, strict=True))
            if host.get(number, number) == number
        ]
        several = {  # functions whose instances come and go, by the first one's name
            family[0]: (instance_names(family[0], count), spec)
            for family, spec in families
            if (count := most_instances(spec.max_instances, gpus)) > 1
        }
        specs = {instance: spec for family, spec in families for instance in family}
        specs.update((name, spec) for names, spec in several.values() for name in names)
        known, make = known_models(families), partial(POOLS[pools], gpu_nbytes)
        self.gpus = [SimulatedGpu(number, make, known) for number in range(gpus)]
        self.executors = Executors(policy, topology, self.gpus, specs, agenda, core, self._tell, seed, quotas)
        self._extras = Extras(self.executors, known, agenda, self._tell) if several else None
        self._serving: Serving | None = None
        if llms:
            rule = BatchRule.of(policy.batching, policy.batch_size, policy.batch_delay_ms)
            models_of = {name: each for name, each in several.items() if each[1].llm is not None}
            self._serving = Serving(
                llms, self.executors.runtimes, agenda, self._tell, seed, rule, models_of, self._extras
            )
            self.executors.granted = self._serving.granted
            self.executors.runtimes.rotation.happens = self._happens
            self.executors.runtimes.rotates = not models_of  # any end of a stream may call for another instance
        self._front: Front | None = None
        if outside is not None:
            self._front = RouterQueue(outside, len(models), agenda, self._ask)
        elif baseline.native:
            colds_s = [spec.cold_start_s for spec in models]
            self._front = Starts(baseline.keep_alive, colds_s, agenda, self._ask, self._process_ends)
        self._lines: BatchLines | None = None
        if any(spec.batch for spec in models):
            assert self._front is None, "another front"
            assert not baseline.drop_ms, "single requests are dropped, no batches"
            names = [several[name][0] if name in several else [name] for name in self._names]
            self._front = self._lines = BatchLines(
                models, names, deadlines_s, agenda, self._ask, self._tell, self._due_s, self._extras
            )
        self._after_s = 0.0 if self._front is None else self._front.after_s
        # of requests nothing is to be remembered
        self._plain = self._front is None and not self._instances.several and self._serving is None
        self._wake = self.executors.wake
        self._deadlines_s = list(deadlines_s)
        self._lost: list[int] = []  # requests that a GPU was lost with just now
        self._again: set[int] = set()  # those that were asked once more
        self._drop_s = baseline.drop_ms / 1000
        self._dropped: set[int] = set()  # functions of which a request was dropped
        self._warm = 0
        self._tick_s = INFINITY  # when the next Tick comes
        for fault in faults:
            goes, comes = (DRAINED, UNDRAINED) if fault.drain else (LOST, BACK)
            agenda.put(fault.at_s, goes, fault.gpu)
            if fault.back_s is not None:
                agenda.put(fault.back_s, comes, fault.gpu)
        for gpu in range(gpus):
            self.executors.up(gpu)
        if shares:
            self._tell(ev.SharesKnown(shares))
        percentiles = [percentile] * len(models) if isinstance(percentile, float) else percentile
        for name, spec, deadline_s, share in zip(self._names, models, deadlines_s, percentiles, strict=True):
            tpot_s = 0.0 if spec.llm is None else spec.llm.tpot_s
            base, nbytes = (spec.base, spec.base_nbytes) if spec.base_nbytes else ("", 0)
            told = ev.FunctionKnown(name, deadline_s, share, 1.0, spec.tenant, base, tpot_s, base_nbytes=nbytes)
            if spec.llm is not None:
                told = msgspec.structs.replace(told, context_nbytes=spec.llm.context_nbytes)
            self._tell(told)
        for family, spec in families:
            for instance in family:
                runtime = "" if spec.llm is None else instance
                self._tell(ev.InstanceKnown(instance, family[0], spec.tenant, runtime))
                self._tell(ev.ModelSized(instance, 1, spec.nbytes))

    @property
    def core(self) -> Scheduler:
        """Another one, which knows the same, may take its place before a run."""
        return self.executors.core

    @core.setter
    def core(self, core: Scheduler) -> None:
        self.executors.core = core

    # --- what leases took

    @property
    def busy_s(self) -> list[float]:
        return self.executors.tally.busy_s

    @property
    def wakes(self) -> int:
        return self.executors.tally.wakes

    @property
    def host_nbytes(self) -> int:
        return self.executors.tally.host_nbytes

    @property
    def links_busy_s(self) -> dict[str, float]:
        """By link: how long it has carried any bytes, since the first request that counts."""
        return self.executors.wires.busy_s

    @property
    def on_busy(self) -> Callable[[int, float, float], None] | None:
        """Told GPU, begin and end of each lease."""
        return self.executors.tally.on_busy

    @on_busy.setter
    def on_busy(self, told: Callable[[int, float, float], None] | None) -> None:
        self.executors.tally.on_busy = told

    @property
    def streams(self) -> Streams | None:
        """The outcome of each request to a language model, after a run; None: there is no such model."""
        return None if self._serving is None else self._serving.streams

    # --- the run

    def run(
        self,
        times_s: npt.NDArray[np.float64],
        functions: npt.NDArray[np.int64],
        warm: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> npt.NDArray[np.float64]:
        """Latency of each request in seconds, nan if it was never answered. Times ascend; the first ``warm`` requests
        only warm up. ``progress`` receives now and then how many have arrived. The latency of a stream is that of its
        first token.
        """
        self._warm = self.executors.tally.warm = warm
        self.executors.links.first_s = float(times_s[warm]) if warm < len(times_s) else 0.0
        self.latency_s = np.full(len(times_s), np.nan)
        arrivals: list[float] = times_s.tolist()
        self._arrived, self._who = arrivals, functions.tolist()
        arrives: Callable[[int], None] = self._ask
        if self._front is not None:
            self._front.begin(self._who, times_s[warm:], functions[warm:])
            arrives = self._front.arrives
        if self._serving is not None:
            self._serving.begin(arrivals, functions, warm)
            arrives = partial(self._arrives, arrives)
        agenda, heap = self._agenda, self._agenda.heap
        copied, ended, happens = self.executors.copied, self.executors.ended, self._happens
        if self._extras is not None:
            arrives, ended, happens = self._looked(arrives), self._looked(ended), self._looked(happens)
        index, count = 0, len(arrivals)
        agenda.arrives_s = arrivals[0] if count else INFINITY
        while index < count or heap:
            if index < count and (not heap or arrivals[index] <= heap[0][0]):
                agenda.now_s = arrivals[index]
                agenda.arrives_s = arrivals[index + 1] if index + 1 < count else INFINITY
                arrives(index)
                index += 1
                if progress is not None and index % REPORT_EVERY == 0:
                    progress(index)
                continue
            agenda.now_s, _, kind, what, version = heappop(heap)
            if kind == ENDED:
                if not what.lost:
                    ended(what)
            elif kind == COPIED:
                if version == what.version:
                    copied(what)
            else:
                happens(kind, what, version)
        if self._serving is not None:
            streamed = self._serving.streams.output > 0
            self.latency_s[streamed] = self._serving.streams.first_s[streamed]
        return self.latency_s

    def _looked(self, does: Callable[P, None]) -> Callable[P, None]:
        """An action that may call for another instance."""
        extras = self._extras
        assert extras is not None

        def looked(*args: P.args, **named: P.kwargs) -> None:
            does(*args, **named)
            if extras.crowded:
                extras.look()

        return looked

    def _arrives(self, others: Callable[[int], None], request: int) -> None:
        assert self._serving is not None
        (self._serving.arrives if self._serving.serves(self._who[request]) else others)(request)

    def _happens(self, kind: int, what: Any, version: int) -> None:
        """All but what most runs have most of."""
        if STEPPED <= kind < OPENS:
            self.executors.runtimes.due(kind, what, version)
        elif COMPUTED <= kind < STEPPED:
            assert self.executors.turns is not None
            self.executors.turns.due(kind, what, version)
        elif kind == TICK:
            if self._agenda.now_s == self._tick_s:  # else an earlier one has taken its place
                self._tick_s = INFINITY
                self._tell(ev.Tick())
        elif kind == BEGIN:
            if not what.lost:
                self.executors.copy(what)
        elif kind == LOST:
            self._gpu_lost(what)
        elif kind == DROPS:
            self._drop(what)
        elif kind == BACK:
            self.executors.up(what)
        elif kind in (DRAINED, UNDRAINED):
            self._tell(ev.DrainChosen(tuple(sorted(self.core.drained ^ {what}))))
        elif kind == OPENS:
            assert self._serving is not None
            self._serving.opens(what)
        elif kind == PRELOADED:
            self._tell(what)
        elif kind == RUNTIME:
            self.executors.preloads.opened(*what)
        elif kind >= TOKEN_DUE:
            self._several(kind, what)
        elif self._front is not None:
            self._front.due(kind, what, version)

    def _several(self, kind: int, what: Any) -> None:
        """Of instances that come and go."""
        if kind == TOKEN_DUE:
            assert self._serving is not None
            self._serving.token_due(what)
        else:
            assert self._extras is not None
            self._extras.due(kind, what)

    # --- to and from the core

    def _ask(self, request: int) -> None:
        """For a lease."""
        function = self._who[request]
        if self._drop_s and request >= self._warm:
            if function in self._dropped:
                return
            self._agenda.put(self._agenda.now_s + self._drop_s, DROPS, request)
        name = self._names[function]
        if not self._plain:
            name = self._instances.take(name, request)
        self._tell(ev.Asked(request, name, self._due_s(request), 1))

    def _due_s(self, request: int) -> float:
        """When it is to be answered."""
        within_s = self._deadlines_s[self._who[request]] if request >= self._warm else WARM_DEADLINE_S
        return self._arrived[request] + within_s

    def _tell(self, event: ev.Event) -> None:
        core, now = self.executors.core, self._agenda.now_s
        for action in core.handle(event, now):
            if type(action) is ev.WakeOn:
                if action.requests and self._lines is not None:
                    self._lines.granted(action.request, action.requests)
                self._wake(action)
            elif type(action) is ev.FinishLease:
                request = action.request
                if self._serving is not None and self._serving.finished(request):
                    continue
                for each in (request,) if self._lines is None else self._lines.leave(request):
                    self.latency_s[each] = now - self._arrived[each] + self._after_s
                if not self._plain:
                    self._over(request, False)
            elif type(action) is ev.PauseOn:
                self.executors.pause(action)
            elif type(action) is ev.TurnOn:
                self.executors.resume(action)
            elif type(action) is ev.LoseLease:
                if self._serving is not None and self._serving.lost(action.request):
                    continue
                self._lost += (action.request,) if self._lines is None else self._lines.leave(action.request, True)
                self._instances.free(action.request)
            elif type(action) is ev.RefuseAsk:
                if self._serving is not None and self._serving.refused(action.request):
                    continue
                self._over(action.request, True)
            elif type(action) is ev.PreloadOn:
                self.executors.preloads.begin(action)
            elif type(action) is ev.StopPreloadOn:
                self.executors.preloads.stop(action.gpu)
            elif type(action) is ev.DismissExecutor:
                self._agenda.put(now, LOST, action.gpu)
            elif type(action) is ev.WantExecutor and action.gpu not in core.gpus:
                self._agenda.put(now, BACK, action.gpu)
        due_s = core.next_deadline_s
        if due_s is not None and due_s < self._tick_s:
            self._tick_s = due_s
            self._agenda.put(due_s, TICK, None)

    def _over(self, request: int, refused: bool) -> None:
        """It has met its fate."""
        self._instances.free(request)
        if self._front is not None:
            self._front.over(request, refused)

    def _drop(self, request: int) -> None:
        """It has waited for too long, if it still does."""
        if np.isnan(self.latency_s[request]):
            self._dropped.add(self._who[request])
            self._instances.free(request)
            self._tell(ev.Released(request))

    # --- losses

    def _gpu_lost(self, gpu: int) -> None:
        """Requests that execute there fail, or are sent once more."""
        instances = self.executors.lost(gpu)
        front = self._front
        if front is not None:
            known = set(self._names)  # without other instances than the first
            front.gpu_lost([self._names.index(instance) for instance in instances if instance in known])
        self._tell(ev.ExecutorDown(gpu))
        if self._serving is not None:
            self._serving.resume()
        lost, self._lost = self._lost, []
        for request in lost:
            if self._models[self._who[request]].idempotent and request not in self._again:
                self._again.add(request)
                (self._ask if front is None else front.again)(request)
            elif front is not None:
                front.over(request, False)

    def _process_ends(self, function: int) -> None:
        """Its GPU has its memory again."""
        self.executors.forget(self._names[function])
