"""Last known state of GPUs, functions and their instances' models: pure. Decides nothing.

A GPU's resident bytes are those that its executor has reported, and the executor chooses evictions, by worth:
several instances may share bytes, so only it knows how many an eviction would free.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

from dormouse.core.decisions.scheduling.events import (
    ExecutorUp,
    FunctionKnown,
    InstanceKnown,
    ModelSized,
    StepsTimed,
    Woken,
)
from dormouse.core.decisions.scheduling.functions import EvictedFor, Function, LastEviction, LastWake
from dormouse.core.decisions.scheduling.state import Gpu, Model, Running, Waiting
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.core.quantities import sizes
from dormouse.schemas.messages import Done, Failure
from dormouse.schemas.policy import Policy

MAX_EARLY: Final = 1024


class EndedBatch(NamedTuple):
    """A batch whose lease is over. Its instance reports which of its requests were computed, mostly later than that."""

    waiting: Waiting
    over_s: float
    hindered_s: float
    copy_s: float
    hold_s: float


class Inventory:
    def __init__(self, policy: Policy) -> None:
        self._window = policy.window
        self._half_life_s = policy.half_life_ms / 1000
        self._early: OrderedDict[str, ModelSized] = OrderedDict()  # by instance that is not known (any more)
        self.gpus: dict[int, Gpu] = {}
        self.functions: dict[str, Function] = {}
        self.models: dict[str, Model] = {}  # by instance
        self.models_of: dict[str, dict[str, Model]] = {}  # the same by function, and then by instance
        self._ended: dict[int, EndedBatch] = {}  # by request: at most one of each instance
        self.least_nbytes = 0  # that any GPU can have of models

    # --- GPUs

    def executor_up(self, event: ExecutorUp, topology: Topology) -> Gpu:
        stats = event.stats
        capacity = stats.weights_nbytes + stats.kv_nbytes + stats.lost_nbytes + stats.free_nbytes
        gpu = self.gpus[event.gpu] = Gpu(event.gpu, event.epoch, stats, capacity)
        gpu.context_nbytes, gpu.beside_nbytes = event.context_nbytes, event.beside_nbytes
        self._gpus_changed(topology)
        return gpu

    def executor_down(self, number: int, topology: Topology) -> Gpu | None:
        """Its GPU as it was, None if it is not known."""
        gone = self.gpus.pop(number, None)
        if gone is None:
            return None
        for instance in gone.resident:
            if (model := self.models.get(instance)) is not None:
                model.resident.pop(number, None)
        self._gpus_changed(topology)
        return gone

    def _gpus_changed(self, topology: Topology) -> None:
        self.least_nbytes = min((gpu.capacity_nbytes for gpu in self.gpus.values()), default=0)
        self.know_neighbours(topology)

    def know_neighbours(self, topology: Topology) -> None:
        for number, others in topology.neighbours(self.gpus).items():
            self.gpus[number].neighbours = [self.gpus[other] for other in others]

    def running(self, gpu: int, epoch: int, serial: int) -> Running | None:
        """The lease that an executor reports on; None if it is over already."""
        known = self.gpus.get(gpu)
        return known.leases.get(serial) if known is not None and known.epoch == epoch else None

    def follow(
        self, gpu: Gpu, resident: Iterable[tuple[str, int]], own: str, now_s: float, why: EvictedFor = "wake"
    ) -> None:
        """Take over the resident bytes that an executor reports; ``own`` is the instance whose lease it reports on."""
        number = gpu.number
        for instance, nbytes in resident:
            model = self.models.get(instance)
            if model is None:
                continue  # lost meanwhile; the executor has been sent the order to forget it
            if (lost := gpu.resident.get(instance, 0) - nbytes) > 0 and instance != own:
                made_room = self.models[own].function.name if own in self.models else ""
                model.function.counts.evicted[why] += 1
                model.function.counts.last_eviction = LastEviction(number, now_s, lost, made_room)
            if nbytes:
                gpu.resident[instance] = model.resident[number] = nbytes
            else:
                gpu.resident.pop(instance, None)
                model.resident.pop(number, None)

    # --- functions

    def function(self, name: str) -> Function:
        function = self.functions.get(name)
        if function is None:
            function = self.functions[name] = Function(name, self._window, self._half_life_s)
        return function

    def function_known(self, event: FunctionKnown) -> None:
        function = self.function(event.function)
        function.deadline_s, function.percentile = event.deadline_s, event.percentile
        function.sensitivity, function.tpot_s, function.kept = event.sensitivity, event.tpot_s, True
        function.tenant, function.base, function.base_nbytes = event.tenant, event.base, event.base_nbytes
        function.context_nbytes, function.pinned = event.context_nbytes, event.pinned
        if event.times is not None and function.times is None:
            function.timed(event.times)
        if event.batch_times and function.batches is None:
            function.batches_took(event.batch_times)

    def function_gone(self, name: str) -> None:
        function = self.functions.get(name)
        if function is not None:
            function.kept = False
            self._forget_unused(function)

    def steps_timed(self, event: StepsTimed) -> list[Model]:
        """The models of these instances."""
        models = [model for instance in event.instances if (model := self.models.get(instance)) is not None]
        for model in models:
            model.function.timed(event.times)
        return models

    def _forget_unused(self, function: Function) -> None:
        if not function.instances and not function.kept:
            self.functions.pop(function.name, None)

    # --- models

    def model(self, instance: str, now_s: float) -> Model:
        """A model that becomes known counts as used."""
        model = self.models.get(instance)
        if model is None:
            model = self.models[instance] = Model(instance, self.function(""), now_s)
            self._joins(model)
            # one of this name may have been lost whose lease is not given back yet
            leases = (running for gpu in self.gpus.values() for running in gpu.leases.values())
            model.leased = any(running.instance == instance for running in leases)
        return model

    def instance_known(self, event: InstanceKnown, now_s: float) -> Model:
        instance, function = event.instance, event.function
        model = self.model(instance, now_s)
        model.runtime = event.runtime
        before = self._leaves(model)
        model.function = self.function(function)
        self._joins(model)
        if function and not model.function.kept:  # a deployed function states its tenant itself
            model.function.tenant = event.tenant
        self._forget_unused(before)
        if (early := self._early.pop(instance, None)) is not None:
            self.sized(early)
        return model

    def instance_lost(self, instance: str) -> Model | None:
        """Its model as it was, None if it is not known."""
        model = self.models.pop(instance, None)
        if model is None:
            return None
        for request in [each for each, ended in self._ended.items() if ended.waiting.model is model]:
            self.batch_answered(request, self._ended[request].waiting.size, 0)
        self._forget_unused(self._leaves(model))
        for number in model.resident:
            self.gpus[number].resident.pop(instance, None)
        return model

    def _joins(self, model: Model) -> None:
        model.function.instances += 1
        self.models_of.setdefault(model.function.name, {})[model.instance] = model

    def _leaves(self, model: Model) -> Function:
        function = model.function
        function.instances -= 1
        models = self.models_of[function.name]
        del models[model.instance]
        if not models:
            del self.models_of[function.name]
        return function

    def sized(self, event: ModelSized) -> None:
        """The store's message about an instance may come before the router's, and also after its last."""
        model = self.models.get(event.instance)
        if model is None:
            self._early[event.instance] = event
            if len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
            return
        model.version, model.nbytes = max(model.version, event.version), event.nbytes

    def too_large(self, model: Model) -> Failure | None:
        """Reason why no GPU could ever hold it, as far as its size and GPUs are known."""
        for gpu in self.gpus.values():
            if model.nbytes <= gpu.capacity_nbytes:
                return None
        if not self.gpus:
            return None
        has, largest = sizes(model.nbytes, max(gpu.capacity_nbytes for gpu in self.gpus.values()))
        text = (
            f"the model has {has} and the largest GPU {largest} for models; use a smaller model or "
            "a GPU with more memory ([gpu] memory for emulated ones; [gpu] activations is what others keep back)"
        )
        return Failure(code="model_too_large", status=507, text=text)

    # --- leases

    def woken(self, event: Woken, now_s: float) -> None:
        """All copies of a lease have come. That of a language model may last for long, and loses its turn meanwhile."""
        running = self.running(event.gpu, event.epoch, event.serial)
        if running is None:
            return
        running.wake_us, running.copying_nbytes = event.wake_us, 0
        model = running.model
        if model.runtime and model.nbytes:
            self.follow(self.gpus[event.gpu], [(model.instance, model.nbytes)], model.instance, now_s)

    def lease_over(self, gpu: Gpu, running: Running, done: Done, now_s: float, alone_s: float) -> None:
        """A lease has ended or, if it was revoked, been given back. Its model is one that is known. ``alone_s``: how
        long its copies take if no others share the link.
        """
        model = running.model
        model.version = max(model.version, done.version)
        model.peak_nbytes = max(model.peak_nbytes, done.peak_activation_nbytes)
        self.unused(gpu, running, now_s, (running.wake_us or 0) / 1e6 if done.copied_nbytes else 0.0, alone_s)
        if model.runtime:
            model.function.worked(done.gpu_us / 1e6, now_s - running.started_s)
        counts = model.function.counts
        counts.copied_nbytes += done.copied_nbytes
        counts.peer_nbytes += done.peer_nbytes
        counts.file_nbytes += done.file_nbytes
        counts.gpu_us += done.gpu_us
        counts.repaired += done.repaired
        counts.replayed += done.replayed
        if done.copied_nbytes:
            wake = LastWake(gpu.number, done.copied_nbytes, done.peer_nbytes, done.file_nbytes, running.wake_us)
            counts.woke(wake)

    def unused(self, gpu: Gpu, running: Running, now_s: float, copy_s: float = 0.0, alone_s: float = 0.0) -> None:
        """The same, as far as it holds for one that has given the GPU nothing too. It has no turn any more."""
        model, waiting = running.model, running.waiting
        model.used_s = now_s
        function = model.function
        hindered_s = running.started_s - waiting.arrived_s + max(0.0, copy_s - alone_s)
        if running.revoked_until_s is None:
            function.measured(running.used_s, copy_s, waiting.size)
        if running.revoked_until_s is None and waiting.batch is not None:
            self._ended[running.request] = EndedBatch(waiting, now_s, hindered_s, copy_s, running.used_s)
            if running.answered is not None:
                self.batch_answered(running.request, *running.answered)
        elif running.revoked_until_s is None:
            function.settled(waiting, now_s > waiting.own_deadline_s, now_s, hindered_s)
        elif waiting.failed or now_s > waiting.own_deadline_s:
            function.settled(waiting, True, now_s, hindered_s)
        counts = function.counts
        counts.leases += 1
        counts.gpus[gpu.number] = counts.gpus.get(gpu.number, 0) + 1

    def ended(self, request: int) -> Waiting | None:
        """A batch whose lease is over, if its instance has not reported its fate yet."""
        found = self._ended.get(request)
        return found.waiting if found is not None else None

    def batch_answered(self, request: int, taken: int, together: int) -> None:
        """Its instance has reported that, after its lease was over."""
        ended = self._ended.pop(request, None)
        if ended is None:
            return
        waiting, function = ended.waiting, ended.waiting.function
        if together and ended.copy_s <= 0.0:
            function.computed(together, ended.hold_s)
        if taken and function.batches is not None:
            function.counts.batches += 1
            function.counts.batches_failed += taken > 1 and not together
            function.counts.batch_requests += taken
            function.counts.batch_places += max(taken, function.batches.most)
        waiting.size = min(waiting.size, taken)
        function.settled(waiting, False, ended.over_s, ended.hindered_s)

    def check(self) -> None:
        """Asserts the invariants between any two events."""
        models = list(self.models.values())
        for number, gpu in self.gpus.items():
            for running in gpu.leases.values():
                assert running.revoked_until_s is not None or running.instance in self.models
            assert all(turn in gpu.leases.values() for turn in gpu.turns), "a turn without a seat"
            assert (gpu.running is None) == (not gpu.turns)
            assert all(instance in self.models for instance in gpu.resident), "a lost instance is resident"
            assert all(nbytes > 0 for nbytes in gpu.resident.values()), "an instance is resident with no bytes"
            assert all(self.models[name].resident.get(number) == nbytes for name, nbytes in gpu.resident.items())
        assert all(number in self.gpus for model in models for number in model.resident), "resident on no GPU"
        for name, function in self.functions.items():
            count = sum(model.function is function for model in models)
            assert function.instances == count, f"instances of {name!r} are miscounted"
            assert len(self.models_of.get(name, ())) == count, f"models of {name!r} are misfiled"
            assert count or function.kept, f"{name!r} is known and gone"
