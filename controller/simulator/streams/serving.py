"""Simulated instances of language models: each has many requests at once and one lease, which it asks for with the
first of them (client_shim/llm/serving.py). Records the outcomes of streams. Pure.

When a GPU is lost, its streams go on with the next lease, from where they were; those that lose a second one fail.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dormouse.controller.simulator.agenda import OPENS, TOKEN_DUE, Agenda
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.extras import Extras
from dormouse.controller.simulator.leases import SimulatedLease
from dormouse.controller.simulator.streams.model import MAX_OPEN, LlmSpec
from dormouse.controller.simulator.streams.replicas import SimulatedInstance, StreamReplicas
from dormouse.controller.simulator.streams.runtime import runtime_of
from dormouse.controller.simulator.streams.runtimes import RuntimeLeases
from dormouse.controller.simulator.streams.stream import Advanced, Stream
from dormouse.core.decisions.rules.batching import BatchRule, GatheringBatch
from dormouse.core.decisions.rules.replicas import BEGUN, token_due_s
from dormouse.core.decisions.scheduling import events as ev


class Streams:
    """Outcomes of requests, by their number. ``output``: tokens; 0: it was no request to a language model.
    ``first_s`` and ``over_s``: from its arrival to its first and its last token, nan where that never came.
    """

    def __init__(self, count: int) -> None:
        self.prompt = np.zeros(count, np.int64)
        self.output = np.zeros(count, np.int64)
        self.preempted = np.zeros(count, np.int64)
        self.first_s = np.full(count, np.nan)
        self.over_s = np.full(count, np.nan)

    def part(self, which: slice | npt.NDArray[np.int64]) -> "Streams":
        found = Streams(0)
        for name in ("prompt", "output", "preempted", "first_s", "over_s"):
            setattr(found, name, getattr(self, name)[which])
        return found

    def put(self, which: npt.NDArray[np.int64], some: "Streams") -> None:
        for name in ("prompt", "output", "preempted", "first_s", "over_s"):
            getattr(self, name)[which] = getattr(some, name)


def chosen(family: Sequence[SimulatedInstance], count: int) -> SimulatedInstance:
    """Of a function's instances, where so many requests go together: to one that is there and idle; to one whose batch
    has not begun and has room; to one that is to start for them; else to that with fewest requests.
    """
    for each in family:
        if each.lease is not None and not each.open:
            return each
    for each in family:
        begun = each.lease is not None and runtime_of(each.lease).batch.running
        if each.open and not begun and len(each.open) + count <= each.spec.sequences:
            return each
    return min(family, key=lambda each: len(each.open) + len(each.queue))


class Serving:
    """The instances of one node. ``models`` are by number of function; with ``batching``, requests wait for others.
    ``several``: of those that may have more instances than the first, by its name.
    """

    def __init__(
        self,
        models: Mapping[int, tuple[str, LlmSpec]],
        leases: RuntimeLeases,
        agenda: Agenda,
        tell: Callable[[ev.Event], None],
        seed: int,
        batching: BatchRule | None = None,
        several: Mapping[str, tuple[Sequence[str], ModelSpec]] | None = None,
        extras: Extras | None = None,
    ) -> None:
        self._batches: dict[int, GatheringBatch[int]] = {}  # by function
        if batching is not None:
            self._batches = {each: GatheringBatch(batching, spec.ttft_s) for each, (_, spec) in models.items()}
        self._by_name: dict[str, SimulatedInstance] = {}
        self._instances: dict[int, SimulatedInstance] = {}  # by function
        self._specs = {function: spec for function, (_, spec) in models.items()}
        self._families: dict[str, list[SimulatedInstance]] = {}
        for function, (name, spec) in models.items():
            instance = self._by_name.setdefault(name, SimulatedInstance(name, spec))
            self._instances[function] = instance
            instance.most += MAX_OPEN
            if spec.family:
                self._families.setdefault(spec.family, []).append(instance)
        self._leases, self._agenda, self._tell, self._seed = leases, agenda, tell, seed
        self._extras = extras
        for name, (names, each) in (several or {}).items():
            first = self._by_name[name]
            tpot_s = {number: spec.tpot_s for number, spec in self._specs.items() if self._instances[number] is first}
            first.replicas = StreamReplicas(names, each, first, tpot_s, self._due_s, self)
        if extras is not None:
            extras.resting = self._resting
        self._asks: dict[int, SimulatedInstance] = {}  # by the number of its request for a lease
        self._of: dict[int, SimulatedInstance] = {}  # by open request
        leases.advanced, leases.failed, leases.closes = self._advanced, self._failed, self._closes
        self.over: list[int] = []  # requests that a lease was lost with just now
        self.streams = Streams(0)

    def begin(self, arrivals: Sequence[float], functions: npt.NDArray[np.int64], warm: int) -> None:
        """All requests are known, those of others too. Lengths depend on the seed and the function alone."""
        self.streams = streams = Streams(len(functions))
        self._arrived, self._who, self._warm = arrivals, functions.tolist(), warm
        self._number = len(functions)  # leases are asked for under other numbers than requests have
        self._warm_number = -1
        for function, spec in self._specs.items():
            mine = np.flatnonzero(functions == function)
            rng = np.random.default_rng([self._seed, function])
            streams.prompt[mine], streams.output[mine] = spec.draw(rng, len(mine))

    def serves(self, function: int) -> bool:
        return function in self._instances

    # --- requests

    def arrives(self, request: int) -> None:
        spec = self._specs[self._who[request]]
        if spec.before_s:
            self._agenda.put(self._agenda.now_s + spec.before_s, OPENS, request)
        else:
            self.opens(request)

    def opens(self, what: int) -> None:
        """A request comes to its instance; or, if it is negative, a batch of a function has waited, perhaps."""
        function = -1 - what if what < 0 else self._who[what]
        batch = self._batches.get(function)
        if batch is None or 0 <= what < self._warm:
            self._opens(what)
            return
        now_s, prompts_s = self._agenda.now_s, self._specs[function].prompts_s
        if what >= 0:
            batch.add(what, int(self.streams.prompt[what]), now_s)
        self._opens(*batch.take(now_s, prompts_s)[0])
        if what >= 0 and (due_s := batch.due_s(prompts_s)) < float("inf"):
            self._agenda.put(due_s, OPENS, -1 - function)

    def _opens(self, *requests: int) -> None:
        """Of one function, at the same time."""
        if not requests:
            return
        instance = self._instances[self._who[requests[0]]]
        if instance.replicas is not None:
            instance = instance.replicas.fewest
        elif family := self._families.get(instance.spec.family):
            instance = chosen(family, len(requests))
        self._begin(instance, [each for request in requests if (each := self._put(instance, request)) is not None])

    def _put(self, instance: SimulatedInstance, request: int) -> Stream | None:
        """None: it waits until one that is open is over."""
        if len(instance.open) >= instance.most:
            instance.queue.append(request)
            return None
        who = self._who[request]
        first_s = self._arrived[request] + self._specs[who].ttft_s
        stream = Stream(request, int(self.streams.prompt[request]), int(self.streams.output[request]), first_s, who)
        instance.open[request] = stream
        self._of[request] = instance
        if instance.replicas is not None and (due_s := self._due_s(request)) < BEGUN:
            self._crowd(instance.replicas)
            self._agenda.put(max(self._agenda.now_s, due_s), TOKEN_DUE, request)
        return stream

    def _begin(self, instance: SimulatedInstance, streams: Sequence[Stream]) -> None:
        """They have come there together."""
        if not streams:
            return
        if instance.lease is not None:
            self._leases.submit(instance.lease, *streams)
        else:
            self._ask(instance)

    def _left(self, request: int) -> None:
        """It is answered, or has failed."""
        instance = self._of.pop(request)
        del instance.open[request]
        if instance.replicas is not None and not instance.open:
            self._idles(instance)
        if instance.queue:
            self._opens(instance.queue.popleft())

    def _advanced(self, made: Advanced) -> None:
        now_s, streams = self._agenda.now_s, self.streams
        for stream in made.first:
            request = stream.number
            streams.first_s[request] = now_s - self._arrived[request] + self._specs[self._who[request]].after_s
            self._of[request].begun = True
        for stream in made.over:
            request = stream.number
            streams.over_s[request] = now_s - self._arrived[request] + self._specs[self._who[request]].after_s
            streams.preempted[request] = stream.preempted
            if (replicas := self._of[request].replicas) is not None and streams.output[request] > 1:
                whole_s = float(streams.over_s[request] - streams.first_s[request])
                replicas.answered(stream.owner, whole_s / (int(streams.output[request]) - 1))
                self._crowd(replicas)
            self._left(request)

    def _failed(self, stream: Stream) -> None:
        self.streams.preempted[stream.number] = stream.preempted
        self._left(stream.number)

    # --- several instances of one model

    def _due_s(self, request: int) -> float:
        """When it is to have its first token, or is expected to be late."""
        if self.streams.first_s[request] >= 0.0:
            return BEGUN
        return token_due_s(self._arrived[request], self._specs[self._who[request]].ttft_s)

    def _crowd(self, replicas: StreamReplicas) -> None:
        if self._extras is not None:
            self._extras.crowded[replicas] = None

    def token_due(self, request: int) -> None:
        instance = self._of.get(request)
        if instance is not None and instance.replicas is not None:
            self._crowd(instance.replicas)

    def _idles(self, instance: SimulatedInstance) -> None:
        instance.idle_s = self._agenda.now_s
        if self._extras is not None:
            self._extras.idles(instance.name)

    def _resting(self) -> list[str]:
        return [each.name for each in self._by_name.values() if each.lease is not None and not each.open]

    def added(self, instance: SimulatedInstance) -> None:
        """It gets its share of the requests that have no token yet."""
        replicas = instance.replicas
        assert replicas is not None
        self._by_name[instance.name] = instance
        instance.idle_s = self._agenda.now_s
        moved = replicas.excess()
        for other, request in moved:
            left = other.open.pop(request)
            del self._of[request]
            if other.lease is not None:
                self._leases.take(other.lease, left)
        queue = instance.queue
        for request in sorted((each for _, each in moved), reverse=True):
            queue.appendleft(request)
        came: dict[str, list[Stream]] = {}
        while queue and len((fewest := replicas.fewest).open) < fewest.most:
            if (stream := self._put(fewest, queue.popleft())) is not None:
                came.setdefault(fewest.name, []).append(stream)
        for name, streams in came.items():
            self._begin(self._by_name[name], streams)

    def removed(self, instance: SimulatedInstance) -> None:
        if instance.lease is not None:
            self._leases.close(instance.lease)
        del self._by_name[instance.name]

    # --- leases

    def _ask(self, instance: SimulatedInstance) -> None:
        if instance.asked or not instance.open:
            return
        instance.asked = True
        if next(iter(instance.open)) < self._warm:
            number, self._warm_number = self._warm_number, self._warm_number - 1
        else:
            number, self._number = self._number, self._number + 1
        self._asks[number] = instance
        self._tell(ev.Asked(number, instance.name, self._agenda.now_s + instance.spec.ttft_s, 1, False))

    def granted(self, lease: SimulatedLease) -> None:
        instance = self._by_name[lease.wake.instance]
        instance.lease = lease
        for stream in instance.open.values():
            if stream.tokens > stream.prompt:  # it goes on, as one that comes now
                stream.first_s = self._agenda.now_s + self._specs[self._who[stream.number]].ttft_s
            self._leases.add(lease, stream)

    def _closes(self, lease: SimulatedLease) -> None:
        """It has had nothing to do for a while."""
        instance = self._by_name[lease.wake.instance]
        instance.lease, instance.asked, instance.begun = None, False, False
        if instance.replicas is not None and self._extras is not None:
            self._extras.idles(instance.name)

    def refused(self, number: int) -> bool:
        """No GPU can ever have its model: its requests fail. False: that was no request of an instance here."""
        instance = self._asks.pop(number, None)
        if instance is None:
            return False
        instance.queue.clear()
        for request in list(instance.open):
            self._left(request)
        instance.asked = False
        return True

    def finished(self, number: int) -> bool:
        """A lease is over. False: that was none of an instance here."""
        return self._asks.pop(number, None) is not None

    def lost(self, number: int) -> bool:
        """A lease is lost with its GPU. Call `resume` when the core knows. False: it was none of an instance here."""
        if number not in self._asks:
            return False
        self.over.append(number)
        return True

    def resume(self) -> None:
        lost, self.over = self.over, []
        for number in lost:
            instance = self._asks.pop(number)
            instance.lease, instance.asked, instance.begun = None, False, False
            for request, stream in list(instance.open.items()):
                stream.resumed += 1
                if stream.resumed > 1:
                    self._left(request)
            self._ask(instance)
