"""The router's policy with everything at random, and the invariants after each event."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from router_rig import damaged, failure, lease, spec

from dormouse.core.decisions.requests import circles, lives
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.places import LoadPlaces
from dormouse.core.decisions.requests.policy import RequestPolicy
from dormouse.core.decisions.requests.state import InstanceState, Phase, RouterState, ServedFunction, most_open
from dormouse.schemas import messages as m

NAMES = ("f", "g", "s", "c", "b")
GPUS = 3


class RouterMachine(RuleBasedStateMachine):
    """Clients, a controller, a zygote and instances that do all that their protocols allow, and some that they do not.

    Every request meets exactly one fate; those of a function start in order of arrival; every lease wish is released,
    answered or lost; a dead instance is cleaned once. Function s is stateless and has a queue at once. Function c has
    two requests at once in each of its instances. Function b has batches of two; the controller knows who waits for
    one. Functions g, c and h are another tenant's. Whoever may load does. Functions f and g call others; a call never
    outlives its request.
    """

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.policy = RequestPolicy(RouterState(2, 9, "i", one_tenant=False, extra_instances=2, extra_idle_s=3.0))
        self.now_s = 0.0
        self.fates: Counter[int] = Counter()
        self.arrived = 0
        self.asks = 0
        self.settled: Counter[int] = Counter()
        self.wishes: dict[int, str] = {}  # by ticket: "wished" | "granted"
        self.alive: set[str] = set()  # processes
        self.doomed: set[str] = set()  # killed, not reported yet
        self.run_by: dict[str, int] = {}  # by instance: ticket of the Run it has got
        self.open_by: dict[str, list[int]] = {}  # likewise, of those that have many
        self.told: dict[int, set[int]] = {}  # by ticket of a batch's wish: those of the requests that wait for it
        self.kept: list[tuple[str, str]] = []  # (function, instance that was deployed or "" for a removal)
        self.calls: dict[tuple[str, int], e.BeginCall | int] = {}  # those that are begun; the request that one is
        self.numbers = 0  # of calls
        self.do(e.ForkingChanged(True, gpus=GPUS))
        specs = [
            spec("f", timeout_ms=3000, max_queue=3, calls=("s", "b", "c")),
            spec("g", idempotent=True, tenant="other", calls=("c",)),
            spec("s", stateless=True, deadline_ms=1, idempotent=True, calls=("b",)),
            spec("c", concurrency=2, stateless=True, deadline_ms=1, timeout_ms=3000, tenant="other"),
            spec("b", batch=2, timeout_ms=3000),
        ]
        self.do(e.FromController(m.Catalogue(functions=specs)))
        for name in ("i1", "i2", "i3"):  # else most runs would end before a request has begun
            self.do(e.FromInstance(name, m.Importing(confinement="")))
            self.do(e.FromInstance(name, m.Loaded(version=1, nbytes=0)))
        for name in ("i4", "i5"):
            self.do(e.FromInstance(name, m.Importing(confinement="")))
            self.do(e.FromInstance(name, m.Loaded(version=1, nbytes=0)))
        self.burst("s", 1)
        self.answers()

    def do(self, event: e.Event) -> None:
        match event:
            case e.FromInstance(message=m.Returned(request=ticket) | m.Raised(request=ticket)):
                for told in self.told.values():
                    told.discard(ticket)
            case _:
                pass
        for action in self.policy.handle(event, self.now_s):
            match action:
                case e.Answer(request=request) | e.Fail(request=request) | e.Drop(request=request):
                    self.fates[request] += 1
                case e.Handover(request=request, instance=instance, ticket=ticket, lease=None):
                    self.starts_in_order(request)
                    opened = self.open_by.setdefault(instance, [])
                    opened.append(ticket)
                    assert len(opened) <= most_open(self.policy.picture.instances[instance].spec)
                case e.Handover(request=request, instance=instance, ticket=ticket):
                    assert instance not in self.run_by
                    self.starts_in_order(request)
                    assert self.wishes[ticket] == "granted"
                    self.run_by[instance] = ticket
                case e.Start(instance=instance):
                    assert instance not in self.alive
                    self.alive.add(instance)
                case e.Kill(instance=instance):
                    self.doomed.add(instance)
                case e.Send(instance=instance, message=m.Exit()):
                    self.doomed.add(instance)
                case e.Clean(instance=instance):
                    assert instance not in self.alive
                case e.Tell(message=m.Acquire(request=ticket, instance=instance, batch=batch)):
                    assert instance in self.alive
                    assert ticket not in self.wishes
                    self.wishes[ticket] = "wished"
                    if batch is not None:
                        self.told[ticket] = {number for number, _ in batch.requests}
                case e.Tell(message=m.BatchWaits(request=ticket, came=came, left=left)):
                    assert self.wishes[ticket] == "wished"
                    assert self.told[ticket].isdisjoint(number for number, _ in came)
                    assert self.told[ticket].issuperset(left)
                    self.told[ticket] = self.told[ticket].union(number for number, _ in came).difference(left)
                case e.Tell(message=m.Release(request=ticket) | m.Answered(request=ticket)):
                    del self.wishes[ticket]
                case e.Tell(message=m.Deployed(spec=spec_)):
                    deploy = self.policy.picture.deploy(spec_.name)
                    assert deploy is not None
                    self.kept.append((spec_.name, deploy.instance or ""))
                case e.Tell(message=m.Removed(name=name)):
                    self.kept.append((name, ""))
                case e.BeginCall(instance=instance, number=number):
                    assert (instance, number) not in self.calls
                    self.calls[instance, number] = action
                case e.RefuseCall(instance=instance, number=number):
                    assert (instance, number) not in self.calls
                case e.Settled(ask=ask):
                    self.settled[ask] += 1
                case _:
                    pass

    def starts_in_order(self, number: int) -> None:
        requests = self.policy.picture.requests
        name = requests[number].function
        waiting = [r.number for r in requests.values() if r.function == name and r.phase is not Phase.RUNNING]
        assert min(waiting, default=number) >= number

    def die(self, name: str) -> None:
        self.alive.discard(name)
        self.doomed.discard(name)
        self.run_by.pop(name, None)
        self.open_by.pop(name, None)

    def state_of(self, name: str) -> InstanceState:
        return self.policy.picture.instances[name].state

    @rule(target=requests, name=st.sampled_from((*NAMES, "nobody")))
    def arrive(self, name: str) -> int:
        self.arrived += 1
        self.do(e.Arrived(self.arrived, name))
        return self.arrived

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 4))
    def burst(self, name: str, count: int) -> None:
        """As many requests at once, and GPUs and new instances for all who wish for them."""
        for _ in range(count):
            self.arrive(name)
        for ticket in sorted((ticket for ticket, state in self.wishes.items() if state == "wished"), reverse=True):
            self.grant(ticket)
        for instance in sorted(self.alive):
            if self.state_of(instance) is InstanceState.STARTING:
                self.do(e.FromInstance(instance, m.Importing(confinement="")))
            if self.state_of(instance) is InstanceState.LOADING:
                self.do(e.FromInstance(instance, m.Loaded(version=1, nbytes=0)))

    @rule()
    def answers(self) -> None:
        """Every request that runs is answered, and its lease is done."""
        self.now_s += 0.01
        for instance, ticket in sorted(self.run_by.items()):
            if self.run_by.pop(instance, None) is None:
                continue  # it died of what happened to another
            self.do(e.FromInstance(instance, m.Returned(request=ticket, body=b"1", nbytes=0)))
            assert ticket not in self.wishes

    @rule(data=st.data(), raises=st.booleans())
    def answers_of_many(self, data: st.DataObject, raises: bool) -> None:
        names = sorted(name for name in self.alive if self.open_by.get(name))
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        ticket = self.open_by[name].pop(data.draw(st.integers(0, len(self.open_by[name]) - 1)))
        answer: m.InstanceToRouter = m.Returned(request=ticket, body=b"1", nbytes=0)
        if raises:
            codes = (
                "function_raised",
                "cancelled",
                "executor_lost",
                "invalid_request",
                "limit_exceeded",
                "model_damaged",
            )
            answer = m.Raised(request=ticket, code=data.draw(st.sampled_from(codes)), text="")
        self.do(e.FromInstance(name, answer))

    @rule(data=st.data(), called=st.sampled_from((*NAMES, "nobody")), own=st.booleans())
    def call(self, data: st.DataObject, called: str, own: bool) -> None:
        """Of a request that runs there, or of one that the instance makes up."""
        running = [(name, ticket) for name, ticket in self.run_by.items()]
        running += [(name, ticket) for name, tickets in self.open_by.items() for ticket in tickets]
        if running:
            name, ticket = data.draw(st.sampled_from(sorted(running)))
            ticket = ticket if own else data.draw(st.integers(0, 50))
            self.numbers += 1
            asks = m.CallFunction(number=self.numbers, request=ticket, function=called, body=b"")
            self.do(e.FromInstance(name, asks))

    @rule(data=st.data())
    def call_arrives(self, data: st.DataObject) -> None:
        begun = sorted(key for key, call in self.calls.items() if isinstance(call, e.BeginCall))
        if not begun:
            return
        key = data.draw(st.sampled_from(begun))
        call = self.calls[key]
        assert isinstance(call, e.BeginCall)
        if circles.serves(self.policy.picture, call.call.function, call.spec.tenant):
            self.arrived += 1
            self.calls[key] = self.arrived
            self.do(e.Arrived(self.arrived, call.call.function, call=key))
        else:
            del self.calls[key]
            self.do(e.CallOver(*key))

    @rule()
    def calls_are_over(self) -> None:
        for key in [key for key, call in self.calls.items() if isinstance(call, int) and self.fates[call]]:
            del self.calls[key]
            self.do(e.CallOver(*key))

    @rule(data=st.data())
    def leave_call(self, data: st.DataObject) -> None:
        if known := sorted(key for key in self.calls if key[0] in self.alive):
            name, number = data.draw(st.sampled_from(known))
            self.do(e.FromInstance(name, m.LeaveCall(number=number)))

    @rule(request=consumes(requests))
    def leave(self, request: int) -> None:
        self.do(e.RequesterLeft(request))

    @rule(
        data=st.data(),
        what=st.sampled_from(("grant", "grant", "grant", "refuse", "lose", "wrote", "violation")),
    )
    def control(self, data: st.DataObject, what: str) -> None:
        wanted = {"grant": "wished", "refuse": "wished", "violation": "granted"}.get(what, "granted")
        tickets = sorted(ticket for ticket, state in self.wishes.items() if state == wanted)
        if not tickets:
            return
        ticket = data.draw(st.sampled_from(tickets))
        if what == "grant":
            self.grant(ticket)
            return
        if what == "wrote":
            self.do(e.FromController(m.Wrote(instance=self.policy.picture.tickets[ticket].instance)))
            return
        del self.wishes[ticket]
        told: dict[str, m.ControllerToRouter] = {
            "refuse": m.Refused(request=ticket, failure=failure()),
            "violation": m.Refused(request=ticket, failure=failure("violation", 502)),
            "lose": m.LeaseLost(request=ticket),
        }
        self.do(e.FromController(told[what]))

    def grant(self, ticket: int) -> None:
        self.wishes[ticket] = "granted"
        requests = min(2, len(self.told.get(ticket, ())))
        self.do(e.FromController(m.Granted(request=ticket, lease=lease(ticket), wake_nbytes=0, requests=requests)))

    @rule(data=st.data(), what=st.sampled_from(("progress", "progress", "progress", "lease", "fail", "garbage", "odd")))
    def instance(self, data: st.DataObject, what: str) -> None:
        if not self.alive:
            return
        name = data.draw(st.sampled_from(sorted(self.alive)))
        known = self.policy.picture.instances[name]
        message: m.InstanceToRouter | None = None
        match what, known.state:
            case "progress", InstanceState.STARTING:
                message = m.Importing(confinement="")
            case "progress", InstanceState.LOADING:
                message = m.Loaded(version=1, nbytes=0)
            case "progress" | "fail", InstanceState.BUSY if name in self.run_by:
                ticket = self.run_by.pop(name)
                codes = ("function_raised", "cancelled", "executor_lost")
                if data.draw(st.booleans()):
                    self.do(e.FromInstance(name, m.Spoiled(text="")))
                if what == "progress":
                    message = m.Returned(request=ticket, body=b"1", nbytes=0)
                else:
                    message = m.Raised(request=ticket, code=data.draw(st.sampled_from(codes)), text="")
            case "lease", _:
                message = m.LeaseEnded(serial=1, version=1) if known.own is not None else m.NeedLease(version=1)
            case "fail", _:
                code = data.draw(st.sampled_from(("load_failed", "executor_lost")))
                message = m.LoadFailed(code=code, text="")
            case "garbage", _:
                self.do(e.Garbage(name, "x"))
                return
            case "odd", _:
                message = m.Returned(request=data.draw(st.integers(0, 50)), body=b"", nbytes=0)
                if self.run_by.get(name) == message.request:
                    del self.run_by[name]
                if message.request in self.open_by.get(name, ()):
                    self.open_by[name].remove(message.request)
            case _:
                return
        self.do(e.FromInstance(name, message))

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(["nobody", *sorted(self.alive)]))
        self.do(e.FromController(m.EndInstance(instance=name, failure=damaged())))

    @rule(data=st.data())
    def blame(self, data: st.DataObject) -> None:
        picture = self.policy.picture
        name = data.draw(st.sampled_from(["nobody", *sorted(picture.instances), *sorted(picture.gone)]))
        self.do(e.Blamed(name, "x"))

    @rule(name=st.sampled_from((*NAMES, "h")))
    def restart(self, name: str) -> None:
        self.asks += 1
        self.do(e.RestartAsked(self.asks, name))

    @rule(data=st.data(), violent=st.booleans())
    def exit(self, data: st.DataObject, violent: bool) -> None:
        names = self.alive if violent else self.doomed & self.alive
        if names:
            name = data.draw(st.sampled_from(sorted(names)))
            self.die(name)
            self.do(e.InstanceExited(name, "exited"))

    @rule()
    def zygote_dies(self) -> None:
        self.do(e.ForkingChanged(False))
        for name in list(self.alive):
            self.die(name)
        self.do(e.ZygoteLost())
        self.do(e.ForkingChanged(True, gpus=GPUS))

    @rule(name=st.sampled_from((*NAMES, "h")), remove=st.booleans())
    def change(self, name: str, remove: bool) -> None:
        self.asks += 1
        asked = spec(
            name,
            idempotent=True,
            stateless=name in ("s", "c"),
            deadline_ms=1 if name in ("s", "c") else 1000,
            concurrency=2 if name == "c" else 1,
            batch=2 if name == "b" else 0,
            tenant="other" if name in ("g", "c", "h") else "default",
        )
        self.do(e.RemoveAsked(self.asks, name) if remove else e.DeployAsked(self.asks, asked))

    @rule(too_large=st.booleans())
    def keep(self, too_large: bool) -> None:
        if self.kept:
            self.answer_kept(too_large)

    def answer_kept(self, too_large: bool = False) -> None:
        name, instance = self.kept.pop(0)
        if too_large and instance:
            self.do(e.FromController(m.EndInstance(instance=instance, failure=failure(), unkept=name)))
        elif too_large:
            self.do(e.FromController(m.NotRemoved(name=name, text="full")))
        else:
            self.do(e.FromController(m.Kept(name=name)))

    @rule(seconds=st.sampled_from((0.01, 0.6, 2.5, 6.0, 70.0)))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.do(e.Tick())

    @invariant()
    def holds(self) -> None:
        self.policy.check()
        picture = self.policy.picture
        for instance in picture.instances.values():
            if instance.own in self.told and self.wishes.get(instance.own or 0) == "wished":
                waiting = {each for each in instance.open if picture.tickets[each].request is not None}
                assert waiting == self.told[instance.own], instance
        assert not self.fates or max(self.fates.values()) == 1
        assert not self.settled or max(self.settled.values()) == 1
        waiting = {change.ask for change in picture.changes.values()}
        assert self.settled.keys() | waiting == set(range(1, self.asks + 1)), "nobody is forgotten who asks"
        assert self.settled.keys().isdisjoint(waiting)
        assert set(self.fates) | set(self.policy.picture.requests) == set(range(1, self.arrived + 1))
        assert set(self.policy.picture.instances) == self.alive
        assert picture.calls.keys() == self.calls.keys()
        for name in picture.wanted if picture.forking else ():
            for owner in lives.without_instance(picture, name):
                served = isinstance(owner, ServedFunction)
                paused = isinstance(owner, ServedFunction) and owner.retry_s > self.now_s
                assert paused or not LoadPlaces(picture).free(owner.spec, served), f"{name} may load"
        when_s = self.policy.next_deadline_s()
        assert when_s is None or when_s > self.now_s or self.policy.picture.timers

    def teardown(self) -> None:
        """Whatever has happened, time alone brings every request to its end, and every change."""
        for _ in range(20):
            while self.kept:
                self.answer_kept()
            for name in sorted(self.doomed & self.alive):
                self.die(name)
                self.do(e.InstanceExited(name, "exited"))
            self.now_s += 60
            self.do(e.Tick())
        assert self.fates.keys() == set(range(1, self.arrived + 1))
        assert set(self.fates.values()) <= {1}
        assert self.settled.keys() == set(range(1, self.asks + 1))


RouterMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None, derandomize=True)
TestRouterMachine = pytest.mark.timeout(900)(RouterMachine.TestCase)
