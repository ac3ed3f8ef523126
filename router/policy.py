"""Decides everything the router does: queues, instances, deploys and every request's one fate. Pure: no I/O, no clock.

    request   QUEUED --Acquire--> WAITING --Granted--> RUNNING --Returned/Raised--> answered
    instance  STARTING --Importing--> LOADING --Loaded--> IDLE <--request--> BUSY      DEAD from anywhere
    deploy    load beside the old version --Loaded--> Deployed --Kept--> switch, drain the old

It does not decide which GPU a request gets, nor the order among functions: that is the controller's. An instance has one request at a
time. ``check()`` says what always holds.
"""

import heapq
from collections.abc import Iterator
from itertools import count
from typing import Final, assert_never

from msgspec import structs

from dormouse.router import events as e
from dormouse.router import failures
from dormouse.router.state import Change, Function, Instance, Phase, Request, State, Ticket
from dormouse.schemas import messages as m

SILENT_S: Final = 2.0
"""An instance that was told to give a request up, or to leave, has this long; torch operations that hold it longer are rare."""

BACKOFF_S: Final = (0.5, 30.0)
"""First and longest pause between two attempts to load a function that failed; it doubles in between."""

DEPLOY_RETRIES: Final = 3
"""Attempts to load a new version when an executor dies under it, which is not the version's fault."""

SESSION_DEADLINE_MS: Final = 1000


class Policy:
    """See the module. ``handle`` is the only way in, its actions the only way out."""

    def __init__(self, loads: int, max_queue: int, lease_ms: int, prefix: str) -> None:
        self.functions: dict[str, Function] = {}
        self.instances: dict[str, Instance] = {}
        self.requests: dict[int, Request] = {}
        self.changes: dict[str, Change] = {}  # by function
        self.tickets: dict[int, Ticket] = {}
        self.catalogue_known = False
        self.forking = False
        self._loads = loads
        self._max_queue = max_queue
        self._lease_s = lease_ms / 1000
        self._names: Iterator[str] = (f"{prefix}{number}" for number in count(1))
        self._ticket_numbers = count(1)
        self._timer_numbers = count()
        self._timers: list[tuple[float, int, str, object]] = []  # heap; entries whose subject is gone are ignored when due
        self._wanted: dict[str, None] = {}  # functions and changes without an instance, oldest first
        self._now_s = 0.0
        self._out: list[e.Action] = []

    # ------------------------------------------------------------------------------------------------------------- the face

    def handle(self, event: e.Event, now_s: float) -> list[e.Action]:
        """Everything that is to be done because of ``event``, in order."""
        self._now_s = now_s
        match event:
            case e.Arrived():
                self._arrived(event)
            case e.Left(request=request):
                self._left(request)
            case e.FromInstance(instance=name, message=message):
                if (instance := self._live(name)) is not None:
                    self._from_instance(instance, message)
            case e.FromController(message=message):
                self._from_controller(message)
            case e.DeployAsked(ask=ask, spec=spec):
                self._deploy_asked(ask, spec)
            case e.RemoveAsked(ask=ask, name=name):
                self._remove_asked(ask, name)
            case e.Garbage(instance=name, text=text):
                if (instance := self._live(name)) is not None:
                    self._kill(instance, f"broke the protocol ({text})")
            case e.Exited(instance=name, text=text):
                self._exited(name, text)
            case e.ForkingChanged(possible=possible):
                self.forking = possible
            case e.ZygoteLost():
                for instance in [i for i in self.instances.values() if i.spec is not None]:
                    self._exited(instance.name, "died with its zygote", blameless=True)
            case e.SessionOpened(instance=name, name=label):
                self.instances[name] = Instance(name, None, State.IDLE)
                self._tell(m.InstanceUp(instance=name, function=label, tenant="default", loaded=False))
            case e.SessionClosed(instance=name):
                self._exited(name, "ended")
            case e.Tick():
                self._tick()
            case _:
                assert_never(event)
        self._start_wanted()
        out, self._out = self._out, []
        return out

    def next_deadline_s(self) -> float | None:
        """When to come back with a Tick."""
        return self._timers[0][0] if self._timers else None

    def new_name(self) -> str:
        """Name for an instance; short, because it is part of socket paths."""
        return next(self._names)

    def missing(self) -> list[str]:
        """What the node waits for before it is ready; a function that cannot be loaded is not waited for."""
        if not self.catalogue_known:
            return ["the catalogue"]
        names = [f"function {name}" for name, f in self.functions.items() if f.failure is None and not self._ready_instance(f)]
        return names if self.forking else ["the sandbox's interpreter, the store or the first GPU", *names]

    def _ready_instance(self, function: Function) -> bool:
        instance = self.instances.get(function.instance or "")
        return instance is not None and instance.state in (State.IDLE, State.BUSY)

    # ------------------------------------------------------------------------------------------------------------- requests

    def _arrived(self, event: e.Arrived) -> None:
        self.requests[event.request] = Request(event.request, event.function, self._now_s)
        function = self.functions.get(event.function)
        if function is None:
            self._fail(event.request, failures.unknown_function(event.function))
        elif function.failure is not None and function.instance is None:
            self._fail(event.request, failures.not_loaded(event.function, function.failure))
        elif len(function.queue) >= function.spec.max_queue:
            self._fail(event.request, failures.queue_full(f"function {event.function!r}", function.spec.max_queue))
        elif len(self.requests) > self._max_queue:
            self._fail(event.request, failures.queue_full("this node", self._max_queue))
        else:
            function.queue.append(event.request)
            self._at(self._now_s + function.spec.timeout_ms / 1000, "wait", event.request)
            self._feed(function)

    def _feed(self, function: Function) -> None:
        """Let the first request of the queue wish for a lease, if the instance is free."""
        instance = self.instances.get(function.instance or "")
        if instance is None or instance.state is not State.IDLE or not function.queue:
            return
        request = self.requests[function.queue.popleft()]
        left_ms = function.spec.deadline_ms - int((self._now_s - request.arrived_s) * 1000)
        request.phase, request.acquired_s = Phase.WAITING, self._now_s
        request.ticket = self._acquire(instance, request.number, left_ms, instance.version)
        instance.state, instance.ticket = State.BUSY, request.ticket

    def _acquire(self, instance: Instance, request: int | None, deadline_ms: int, version: int | None) -> int:
        number = next(self._ticket_numbers)
        self.tickets[number] = Ticket(instance.name, request)
        self._tell(m.Acquire(request=number, instance=instance.name, deadline_ms=deadline_ms, version=version))
        return number

    def _release(self, number: int) -> None:
        """The lease is not wanted any more."""
        if self.tickets.pop(number, None) is not None:
            self._tell(m.Release(request=number))

    def _given_back(self, number: int) -> None:
        """The instance says that it is through with its lease; if the executor does not confirm that, it is revoked."""
        ticket = self.tickets.get(number)
        if ticket is None:
            return
        ticket.request = None
        if ticket.done:
            del self.tickets[number]
        else:
            self._at(self._now_s + self._lease_s, "lease", number)

    def _fail(self, number: int, failure: m.Failure) -> None:
        request = self.requests.pop(number)
        self._out.append(e.Fail(number, failure, request.timing(self._now_s)))

    def _requeue(self, request: Request) -> None:
        """Back to the head of its queue; its ticket must be settled already."""
        request.phase, request.ticket, request.lost = Phase.QUEUED, 0, False
        self.functions[request.function].queue.appendleft(request.number)

    def _left(self, number: int) -> None:
        request = self.requests.pop(number, None)
        if request is None:
            return
        self._out.append(e.Drop(number))
        if request.phase is Phase.QUEUED:
            self.functions[request.function].queue.remove(number)
            return
        instance = self.instances[self.tickets[request.ticket].instance]
        if request.phase is Phase.WAITING:
            self._release(request.ticket)
            self._idle(instance)
        else:
            self.tickets[request.ticket].request = None
            self._out.append(e.Interrupt(instance.name))
            self._at(self._now_s + SILENT_S, "silent", (instance.name, request.ticket))

    # ---------------------------------------------------------------------------------------------------- what the controller says

    def _from_controller(self, message: m.ControllerToRouter) -> None:
        match message:
            case m.Catalogue(functions=specs):
                self.catalogue_known = True
                for spec in specs:
                    self.functions[spec.name] = Function(spec)
                    self._wanted[spec.name] = None
            case m.Kept(name=name):
                self._kept(name)
            case m.Granted(request=number, lease=lease, wake_nbytes=nbytes):
                self._granted(number, lease, nbytes)
            case m.Refused(request=number, failure=failure):
                self._refused(number, failure)
            case m.LeaseLost(request=number):
                self._lease_lost(number)
            case m.LeaseDone(request=number):
                if (ticket := self.tickets.get(number)) is not None:
                    ticket.done = True
                    instance = self.instances[ticket.instance]
                    if number not in (instance.ticket, instance.own):
                        del self.tickets[number]
            case m.Status() | m.Device():
                pass  # the shell's
            case _:
                assert_never(message)

    def _granted(self, number: int, lease: m.Lease, wake_nbytes: int) -> None:
        ticket = self.tickets.get(number)
        if ticket is None:
            return  # crossed with our Release, which ends it
        ticket.lease = lease
        if ticket.request is None:
            self._send(ticket.instance, m.LeaseGranted(lease=lease))
            return
        request = self.requests[ticket.request]
        request.phase, request.granted_s, request.wake_nbytes = Phase.RUNNING, self._now_s, wake_nbytes
        self._out.append(e.Handover(request.number, ticket.instance, number, lease))
        timeout_ms = self.functions[request.function].spec.timeout_ms
        self._at(self._now_s + timeout_ms / 1000, "run", number)

    def _refused(self, number: int, failure: m.Failure) -> None:
        ticket = self.tickets.pop(number, None)
        if ticket is None:
            return
        instance = self.instances[ticket.instance]
        if failure.code == "violation" or ticket.lease is not None:
            if ticket.request is not None:
                self._fail(ticket.request, failure)
            self._kill(instance, f"lost its lease ({failure.text})")
        elif instance.own == number:
            instance.own = None
            self._send(instance.name, m.LeaseRefused(code=failure.code, text=failure.text))
        elif ticket.request is not None:
            self._fail(ticket.request, failure)
            self._idle(instance)

    def _lease_lost(self, number: int) -> None:
        ticket = self.tickets.pop(number, None)
        if ticket is None:
            return
        instance = self.instances[ticket.instance]
        refusal = m.LeaseRefused(code="executor_lost", text=failures.executor_lost().text)
        if instance.own == number:
            instance.own = None
            self._send(instance.name, refusal)
        elif instance.ticket == number:
            request = None if ticket.request is None else self.requests[ticket.request]
            if request is not None and request.phase is Phase.WAITING:
                self._requeue(request)
                self._idle(instance)
                return
            # The instance decides what the client gets: it may have all its results already.
            self.tickets[number] = Ticket(instance.name, ticket.request, ticket.lease, done=True)
            if request is not None:
                request.lost = True
            self._send(instance.name, refusal)
            self._at(self._now_s + SILENT_S, "silent", (instance.name, number))

    # ----------------------------------------------------------------------------------------------------- what an instance says

    def _from_instance(self, instance: Instance, message: m.InstanceToRouter) -> None:
        match message:
            case m.Importing() if instance.state is State.STARTING:
                instance.state = State.LOADING
            case m.NeedLease(version=version) if instance.own is None:
                self._need_lease(instance, version)
            case m.LeaseEnded(version=version):
                instance.version = version
                if instance.own is not None:
                    number, instance.own = instance.own, None
                    self._given_back(number)
            case m.Loaded(version=version) if instance.state is State.LOADING:
                self._loaded(instance, version)
            case m.LoadFailed(code=code, text=text) if instance.state in (State.STARTING, State.LOADING):
                self._kill(instance, "could not load", failures.load_failed(text), blameless=code == "executor_lost")
            case m.Returned(request=number, body=body, nbytes=nbytes) if self._runs(instance, number):
                self._returned(instance, number, body, nbytes)
            case m.Raised(request=number, code=code, text=text) if self._runs(instance, number):
                self._raised(instance, number, code, text)
            case _:
                self._kill(instance, f"broke the protocol ({type(message).__name__} while {instance.state.value})")

    def _runs(self, instance: Instance, number: int) -> bool:
        ticket = self.tickets.get(number)
        return ticket is not None and instance.ticket == number and ticket.lease is not None

    def _need_lease(self, instance: Instance, version: int) -> None:
        if instance.spec is not None and instance.state is not State.LOADING:
            text = "this function has the GPU during load() and handle() only; do not compute in threads that outlive them"
            self._send(instance.name, m.LeaseRefused(code="no_lease", text=text))
            return
        deadline_ms = SESSION_DEADLINE_MS if instance.spec is None else instance.spec.load_timeout_ms
        instance.own = self._acquire(instance, None, deadline_ms, version)

    def _returned(self, instance: Instance, number: int, body: bytes | None, nbytes: int) -> None:
        name = self.tickets[number].request
        if name is not None:
            request = self.requests.pop(name)
            if (function := self.functions.get(request.function)) is not None:
                function.failures = 0
            self._out.append(e.Answer(name, instance.name, body, nbytes, request.timing(self._now_s)))
        self._given_back(number)
        self._idle(instance)

    def _raised(self, instance: Instance, number: int, code: str, text: str) -> None:
        name = self.tickets[number].request
        if name is not None:
            request = self.requests[name]
            if request.lost or code == "executor_lost":
                self._lose(request)
            else:
                self._fail(name, failures.raised(code, text))
        self._given_back(number)
        self._idle(instance)

    def _lose(self, request: Request) -> None:
        """The request's executor died while it ran: once more if that is harmless."""
        function = self.functions.get(request.function)
        if function is not None and function.spec.idempotent and not request.rerun:
            self.tickets[request.ticket].request = None
            request.rerun = True
            self._requeue(request)
        else:
            self._fail(request.number, failures.executor_lost())

    def _idle(self, instance: Instance) -> None:
        """The instance has no request any more."""
        instance.state, instance.ticket = State.IDLE, None
        if instance.draining:
            self._end(instance)
        elif instance.spec is not None and (function := self.functions.get(instance.spec.name)) is not None:
            self._feed(function)

    # ------------------------------------------------------------------------------------------------------ instances' lives

    def _live(self, name: str) -> Instance | None:
        instance = self.instances.get(name)
        return None if instance is None or instance.state is State.DEAD else instance

    def _start_wanted(self) -> None:
        """Start instances that are missing; functions with waiting requests first, then deploys, whose user waits too."""
        if not self.forking or not self._wanted:
            return
        room = self._loads - sum(i.state in (State.STARTING, State.LOADING) for i in self.instances.values())
        due = [owner for name in self._wanted for owner in self._without_instance(name)]
        due = [owner for owner in due if isinstance(owner, Change) or owner.retry_s <= self._now_s]
        due.sort(key=lambda owner: 1 if isinstance(owner, Change) else 0 if owner.queue else 2)
        for owner in due[: max(0, room)]:
            assert owner.spec is not None
            instance = Instance(self.new_name(), owner.spec, State.STARTING)
            owner.instance = instance.name
            self.instances[instance.name] = instance
            self._out.append(e.Start(instance.name, owner.spec))
            self._tell(
                m.InstanceUp(instance=instance.name, function=owner.spec.name, tenant=owner.spec.tenant, loaded=False)
            )
            self._at(self._now_s + owner.spec.load_timeout_ms / 1000, "load", instance.name)
            if not self._without_instance(owner.spec.name):
                del self._wanted[owner.spec.name]

    def _without_instance(self, name: str) -> list[Function | Change]:
        """What wants an instance under this name: the served version, the one that is being deployed, or both."""
        function, change = self.functions.get(name), self.changes.get(name)
        owners: list[Function | Change] = []
        if function is not None and function.instance is None:
            owners.append(function)
        if change is not None and change.spec is not None and not change.keeping and change.instance is None:
            owners.append(change)
        return owners

    def _loaded(self, instance: Instance, version: int) -> None:
        assert instance.spec is not None
        if instance.own is not None:  # it forgot to give its lease back
            number, instance.own = instance.own, None
            self._release(number)
        instance.version, instance.state = version, State.IDLE
        self._tell(m.InstanceUp(instance=instance.name, function=instance.spec.name, tenant=instance.spec.tenant, loaded=True))
        change = self.changes.get(instance.spec.name)
        if change is not None and change.instance == instance.name:
            assert change.spec is not None
            change.keeping = True
            self._tell(m.Deployed(spec=change.spec))
        elif (function := self.functions.get(instance.spec.name)) is not None and function.instance == instance.name:
            function.failure = None
            self._feed(function)

    def _kill(self, instance: Instance, how: str, failure: m.Failure | None = None, blameless: bool = False) -> None:
        """End an instance now; ``how`` completes "the instance ...", ``failure`` is what its load or its request fails with."""
        if instance.state is State.DEAD:
            return
        self._vacate(instance, how, failure, blameless)
        self._out.append(e.Kill(instance.name))

    def _end(self, instance: Instance) -> None:
        """Let an idle instance leave by itself."""
        instance.state = State.DEAD
        self._send(instance.name, m.Exit())
        self._at(self._now_s + SILENT_S, "exit", instance.name)

    def _exited(self, name: str, how: str, blameless: bool = False) -> None:
        instance = self.instances.get(name)
        if instance is None:
            return
        if instance.state is not State.DEAD:
            self._vacate(instance, how, None, blameless)
        for number in [number for number, ticket in self.tickets.items() if ticket.instance == name]:
            self._release(number)
        del self.instances[name]
        self._tell(m.InstanceGone(instance=name))
        self._out.append(e.Clean(name))

    def _vacate(self, instance: Instance, how: str, failure: m.Failure | None, blameless: bool) -> None:
        """The instance is lost: settle what it had, and see to its replacement."""
        was, instance.state = instance.state, State.DEAD
        innocent = blameless
        number, instance.ticket = instance.ticket, None
        if number is not None and (ticket := self.tickets.get(number)) is not None and ticket.request is not None:
            request = self.requests[ticket.request]
            if request.phase is Phase.WAITING:
                self._requeue(request)
            elif request.lost:
                self._lose(request)
            else:
                self._fail(request.number, failure or failures.sandbox_died(how))
            innocent = innocent or request.phase is Phase.RUNNING  # its request may have been the reason
        for own in (number, instance.own):
            if own is not None:
                self._release(own)
        instance.own = None
        if instance.spec is None or instance.draining:
            return
        name = instance.spec.name
        change, function = self.changes.get(name), self.functions.get(name)
        if failure is None or was is State.BUSY:
            failure = failures.load_failed(f"the instance {how} while loading; see `dormouse logs {name}`")
        if change is not None and change.instance == instance.name:
            change.instance = None
            if not change.keeping:
                self._deploy_failed(name, change, failure, blameless)
        elif function is not None and function.instance == instance.name:
            function.instance = None
            self._wanted[name] = None
            if not innocent:
                self._back_off(function, failure, was in (State.STARTING, State.LOADING))

    def _back_off(self, function: Function, failure: m.Failure, loading: bool) -> None:
        first_s, longest_s = BACKOFF_S
        function.retry_s = self._now_s + min(longest_s, first_s * 2 ** min(function.failures, 16))
        function.failures += 1
        self._at(function.retry_s, "retry", function.spec.name)
        if loading:
            function.failure = failure
            while function.queue:
                self._fail(function.queue.popleft(), failures.not_loaded(function.spec.name, failure))

    # ------------------------------------------------------------------------------------------------------------- changes

    def _deploy_asked(self, ask: int, spec: m.FunctionSpec) -> None:
        if spec.name in self.changes:
            self._out.append(e.Settled(ask, None, failures.busy_changing(spec.name)))
            return
        function = self.functions.get(spec.name)
        version = 1 if function is None else function.spec.version + 1
        self.changes[spec.name] = Change(ask, structs.replace(spec, version=version))
        self._wanted[spec.name] = None

    def _deploy_failed(self, name: str, change: Change, failure: m.Failure, blameless: bool) -> None:
        assert change.spec is not None
        if blameless and change.retries < DEPLOY_RETRIES:
            change.retries += 1
            self._wanted[name] = None
            return
        del self.changes[name]
        if not self._without_instance(name):
            self._wanted.pop(name, None)
        self._out.append(e.Settled(change.ask, None, failure))
        self._out.append(e.Discard(name, change.spec.version))

    def _remove_asked(self, ask: int, name: str) -> None:
        function = self.functions.get(name)
        if name in self.changes:
            self._out.append(e.Settled(ask, None, failures.busy_changing(name)))
        elif function is None:
            self._out.append(e.Settled(ask, None, failures.unknown_function(name)))
        else:
            self.changes[name] = Change(ask, None)
            self._wanted.pop(name, None)
            if (instance := self._live(function.instance or "")) is not None:
                self._drain(instance)
            del self.functions[name]
            for number in function.queue:
                self._fail(number, failures.unknown_function(name))
            self._tell(m.Removed(name=name))
            self._out.append(e.Discard(name, function.spec.version))

    def _kept(self, name: str) -> None:
        change = self.changes.pop(name, None)
        if change is None:
            return
        self._out.append(e.Settled(change.ask, change.spec, None))
        if change.spec is None:
            return
        function = self.functions.get(name)
        if function is None:
            function = self.functions[name] = Function(change.spec)
        else:
            self._out.append(e.Discard(name, function.spec.version))
            if (old := self._live(function.instance or "")) is not None:
                self._drain(old)
        function.spec, function.instance = change.spec, change.instance
        function.failure, function.failures, function.retry_s = None, 0, 0.0
        if function.instance is None:
            self._wanted[name] = None  # it died while the controller was writing
        else:
            self._wanted.pop(name, None)
        self._feed(function)

    def _drain(self, instance: Instance) -> None:
        """No more requests for this one; what it runs it may finish."""
        instance.draining = True
        ticket = self.tickets.get(instance.ticket or 0)
        request = None if ticket is None or ticket.request is None else self.requests[ticket.request]
        if instance.state is State.IDLE:
            self._end(instance)
        elif instance.state is not State.BUSY:
            self._kill(instance, "was replaced")
        elif request is not None and request.phase is Phase.WAITING:
            self._release(request.ticket)
            self._requeue(request)
            self._idle(instance)

    # ---------------------------------------------------------------------------------------------------------------- time

    def _at(self, when_s: float, kind: str, subject: object) -> None:
        heapq.heappush(self._timers, (when_s, next(self._timer_numbers), kind, subject))

    def _tick(self) -> None:
        while self._timers and self._timers[0][0] <= self._now_s:
            _, _, kind, subject = heapq.heappop(self._timers)
            match kind, subject:
                case "wait", int(number):
                    self._waited(number)
                case "run", int(number):
                    self._ran_out(number)
                case "lease", int(number):
                    self._release(number)
                case "load", str(name):
                    instance = self.instances.get(name)
                    if instance is not None and instance.state in (State.STARTING, State.LOADING):
                        assert instance.spec is not None
                        failure = failures.load_timed_out(instance.spec.load_timeout_ms)
                        self._kill(instance, "was killed by its time limit", failure)
                case "silent", (str(name), int(number)):
                    instance = self.instances.get(name)
                    if instance is not None and instance.ticket == number:
                        self._kill(instance, "did not stop when it was told to")
                case "exit", str(name):
                    if name in self.instances:
                        self._out.append(e.Kill(name))
                case _:
                    pass  # "retry": handle() looks for wanted instances after every event

    def _waited(self, number: int) -> None:
        request = self.requests.get(number)
        if request is None or request.phase is Phase.RUNNING:
            return
        failure = failures.waited_too_long(self.functions[request.function].spec.timeout_ms)
        if request.phase is Phase.QUEUED:
            self.functions[request.function].queue.remove(number)
            self._fail(number, failure)
        else:
            instance = self.instances[self.tickets[request.ticket].instance]
            self._release(request.ticket)
            self._fail(number, failure)
            self._idle(instance)

    def _ran_out(self, number: int) -> None:
        ticket = self.tickets.get(number)
        if ticket is None or ticket.request is None:
            return
        instance = self.instances[ticket.instance]
        assert instance.spec is not None
        self._kill(instance, "was killed by its time limit", failures.ran_too_long(instance.spec.timeout_ms))

    # --------------------------------------------------------------------------------------------------------------- small

    def _tell(self, message: m.RouterToController) -> None:
        self._out.append(e.Tell(message))

    def _send(self, instance: str, message: m.RouterToInstance) -> None:
        self._out.append(e.Send(instance, message))

    def check(self) -> None:
        """Assert what holds between any two events."""
        queued = [number for function in self.functions.values() for number in function.queue]
        assert len(queued) == len(set(queued))
        for number, request in self.requests.items():
            if request.phase is Phase.QUEUED:
                assert number in queued, request
            else:
                ticket = self.tickets[request.ticket]
                assert ticket.request == number and self.instances[ticket.instance].ticket == request.ticket, request
                assert (ticket.lease is not None) == (request.phase is Phase.RUNNING), request
        assert set(queued) <= self.requests.keys()
        for instance in self.instances.values():
            assert (instance.ticket is not None) == (instance.state is State.BUSY), instance
            assert instance.own is None or instance.own in self.tickets, instance
            assert instance.state is not State.DEAD or instance.own is None, instance
        for name, function in self.functions.items():
            assert function.instance is None or self._live(function.instance) is not None, function
            if function.instance is None:
                assert name in self._wanted, function
            elif self.instances[function.instance].state is State.IDLE:
                assert not function.queue, f"{name} is idle and has requests"
        loading = sum(i.state in (State.STARTING, State.LOADING) for i in self.instances.values())
        assert loading <= self._loads
