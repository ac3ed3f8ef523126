"""The scheduling core after any sequence of events: every request meets exactly one fate."""

from collections import Counter, defaultdict
from itertools import count as count_from
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import GIB, over, pool

from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.schemas.policy import EVICTIONS, ORDERS, PLACEMENTS, Policy

INSTANCES = [f"f{n % 3}-{n}" for n in range(5)]

STEP = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(INSTANCES)),
    st.tuples(st.just("batch"), st.sampled_from(INSTANCES), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("changed"), st.integers(0, 30), st.integers(0, 2), st.integers(0, 4)),
    st.tuples(st.just("done"), st.integers(0, 9), st.integers(0, 3), st.booleans(), st.sampled_from(INSTANCES)),
    st.tuples(st.just("answered"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("idle"), st.integers(0, 9)),
    st.tuples(st.just("busy"), st.integers(0, 9)),
    st.tuples(st.just("wanted"), st.integers(0, 9)),
    st.tuples(st.just("release"), st.integers(0, 30)),
    st.tuples(st.just("lost"), st.sampled_from(INSTANCES)),
    st.tuples(st.just("size"), st.sampled_from(INSTANCES), st.integers(0, 5)),
    st.tuples(st.just("up"), st.integers(0, 2)),
    st.tuples(st.just("down"), st.integers(0, 2)),
    st.tuples(st.just("leaves"), st.integers(0, 2)),
    st.tuples(st.just("drained"), st.frozensets(st.integers(0, 2))),
    st.tuples(st.just("evicted"), st.integers(0, 2), st.sampled_from(INSTANCES), st.integers(0, 2)),
    st.tuples(st.just("tick"), st.integers(1, 10)),
    st.tuples(st.just("deployed"), st.sampled_from(INSTANCES)),
    st.tuples(st.just("removed"), st.sampled_from(INSTANCES)),
    st.tuples(
        st.just("policy"),
        st.sampled_from(ORDERS),
        st.sampled_from(PLACEMENTS),
        st.sampled_from(EVICTIONS),
        st.booleans(),
    ),
)


class Seats:
    """What executors are told, and may tell: leases by serial; those with a turn, without commands, and those whose
    commands wait.
    """

    def __init__(self, turns: int, keep_s: float) -> None:
        self.now_s, self._keep_s = 0.0, keep_s
        self._since_s: dict[int, float] = {}  # by serial: of its last turn
        self.leases: dict[int, ev.WakeOn] = {}
        self.turns: set[int] = set()
        self.idle: set[int] = set()
        self.wanting: set[int] = set()
        self.revoked: set[int] = set()  # which end without a turn too
        self.retired: set[int] = set()  # GPUs whose executors are to end
        self._most = turns

    def of(self, gpu: int) -> set[int]:
        return {serial for serial, wake in self.leases.items() if wake.lease.gpu == gpu}

    def pick(self, number: int, among: set[int]) -> ev.WakeOn | None:
        choices = sorted(among)
        return self.leases[choices[number % len(choices)]] if choices else None

    def begin(self, wake: ev.WakeOn) -> None:
        for serial in wake.over:
            self.end(serial)
        self.leases[wake.lease.serial] = wake
        self._take(wake.lease.gpu, wake.lease.serial)

    def _take(self, gpu: int, serial: int) -> None:
        self.turns.add(serial)
        self._since_s[serial] = self.now_s
        assert len(self.turns & self.of(gpu)) <= self._most, "more turns than there are"

    def told(self, action: ev.Action) -> None:
        match action:
            case ev.RetireExecutor(gpu=gpu) | ev.DismissExecutor(gpu=gpu):
                self.retired.add(gpu)
            case ev.WakeOn():
                self.begin(action)
            case ev.PauseOn(serial=serial):
                assert serial in self.turns
                long = self.now_s >= self._since_s[serial] + self._keep_s
                assert long or serial in self.idle, "a turn was taken from one who uses it"
                self.turns.discard(serial)
                self.idle.discard(serial)
            case ev.TurnOn(gpu=gpu, serial=serial):
                assert serial in self.wanting
                self.wanting.discard(serial)
                self._take(gpu, serial)
            case ev.RevokeOn(serial=serial):
                self.revoked.add(serial)
            case ev.OverOn(serials=serials):
                for serial in serials:
                    self.end(serial)
            case _:
                pass

    def end(self, serial: int) -> None:
        self.leases.pop(serial, None)
        for some in (self.turns, self.idle, self.wanting, self.revoked):
            some.discard(serial)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(STEP, max_size=60), st.sampled_from([1, 2]), st.sampled_from([3.0, inf]))
def test_every_request_meets_exactly_one_fate(steps: list[tuple[object, ...]], turns: int, keep_s: float) -> None:
    """Granted requests end by Done, by an answer without use, loss or release; refused ones end at once; nothing waits
    for a free turn, and nothing for ever. A wake names what its GPU holds, and no peer but those that hold some of it.
    """
    policy = Policy(turns=turns)
    core = Scheduler(seed=7, revoke_s=5.0, max_waiting=8, policy=policy, keep_s=keep_s)
    twin = Scheduler(seed=7, revoke_s=5.0, max_waiting=8, policy=policy, keep_s=keep_s)
    now_s, requests, epochs = 0.0, 0, Counter[int]()
    seats = Seats(turns, keep_s)
    fates: Counter[int] = Counter()
    open_requests: set[int] = set()
    asked_of: dict[int, str] = {}
    answered: set[int] = set()
    numbers = count_from(1)
    members = defaultdict[int, list[int]](list)  # of batches, by request

    def judge(wake: ev.WakeOn) -> None:
        gpu = core.gpus[wake.lease.gpu]
        worth = core.worth(wake.lease.gpu)
        assert set(worth) == set(gpu.resident)
        assert all(value > 0.0 for value in worth.values())
        have = [core.gpus[peer].resident[wake.instance] for peer in wake.peers]
        assert have == sorted(have, reverse=True)
        assert wake.lease.gpu not in wake.peers

    def send(event: ev.Event) -> None:
        actions = core.handle(event, now_s)
        assert actions == twin.handle(event, now_s), "equal events must give equal actions"
        core.check()
        for action in actions:
            seats.told(action)
            match action:
                case ev.WakeOn(request=request):
                    assert request in open_requests
                    judge(action)
                case ev.RefuseAsk(request=request) | ev.LoseLease(request=request) | ev.FinishLease(request=request):
                    fates[request] += 1
                    open_requests.discard(request)
                case ev.RevokeOn(serial=serial) if (request := seats.leases[serial].request) in answered:
                    fates[request] += request in open_requests  # it has its answer, and its lease was not given back
                    open_requests.discard(request)
                case _:
                    pass

    def turn(kind: type[ev.TurnIdle | ev.TurnBusy | ev.TurnWanted], wake: ev.WakeOn) -> None:
        send(kind(wake.lease.gpu, wake.lease.epoch, wake.lease.serial))

    def done(wake: ev.WakeOn, outcome: str, size: int, others: dict[str, int]) -> None:
        seats.end(wake.lease.serial)
        send(over(wake, outcome=outcome, resident=size * GIB, others=others, copied=size, free=size))

    def lost(gpu: int) -> None:
        seats.retired.discard(gpu)
        for serial in seats.of(gpu):
            seats.end(serial)

    def coming(request: int, count: int) -> tuple[tuple[int, float], ...]:
        found = [next(numbers) for _ in range(count)]
        members[request] += found
        return tuple((number, now_s + 1) for number in found)

    def asks(instance: str, batch: ev.BatchWanted | None) -> None:
        nonlocal requests
        requests += 1
        open_requests.add(requests)
        asked_of[requests] = instance
        send(ev.InstanceKnown(instance, instance.split("-")[0]))
        send(ev.Asked(requests, instance, now_s + 1, 0, True, batch))

    for step in steps:
        match step:
            case ("ask", str(instance)):
                asks(instance, None)
            case ("batch", str(instance), int(count), bool(waits)):
                asks(instance, ev.BatchWanted(coming(requests + 1, count), 4, 0.5 if waits else 0.0))
            case ("changed", int(request), int(count), int(left)) if request in open_requests:
                away, members[request] = members[request][:left], members[request][left:]
                send(ev.BatchChanged(request, coming(request, count), tuple(away)))
            case ("done", int(number), int(size), bool(ended), str(other)):
                if (wake := seats.pick(number, set(seats.leases))) is not None:
                    others = {} if other == wake.instance else {other: size * GIB // 2}
                    done(wake, "ended" if ended else "revoked", size, others)
            case ("answered", int(number), bool(used)):
                if (wake := seats.pick(number, set(seats.leases))) is not None:
                    answered.add(wake.request)
                    send(ev.Answered(wake.request, used))
            case ("idle", int(number)):
                if (wake := seats.pick(number, seats.turns - seats.idle)) is not None:
                    seats.idle.add(wake.lease.serial)
                    turn(ev.TurnIdle, wake)
            case ("busy", int(number)):
                if (wake := seats.pick(number, seats.turns & seats.idle)) is not None:
                    seats.idle.discard(wake.lease.serial)
                    turn(ev.TurnBusy, wake)
            case ("wanted", int(number)):
                if (wake := seats.pick(number, seats.leases.keys() - seats.turns - seats.wanting)) is not None:
                    seats.wanting.add(wake.lease.serial)
                    turn(ev.TurnWanted, wake)
            case ("release", int(request)) if request in open_requests:
                open_requests.discard(request)
                fates[request] += 1
                send(ev.Released(request))
            case ("lost", str(instance)):
                gone = {request for request in open_requests if asked_of[request] == instance}
                for request in gone:
                    fates[request] += 1
                open_requests -= gone
                send(ev.InstanceLost(instance))
            case ("size", str(instance), int(size)):
                send(ev.ModelSized(instance, 1, size * GIB))
            case ("up", int(gpu)):
                lost(gpu)
                epochs[gpu] += 1
                send(ev.ExecutorUp(gpu, epochs[gpu], pool(4 * GIB)))
            case ("down", int(gpu)):
                lost(gpu)
                send(ev.ExecutorDown(gpu))
            case ("leaves", int(gpu)):
                send(ev.ExecutorLeaves(gpu, epochs[gpu]))
            case ("drained", frozenset() as drained):
                send(ev.DrainChosen(tuple(sorted(drained))))
            case ("evicted", int(gpu), str(instance), int(size)):
                if all(seats.leases[serial].instance != instance for serial in seats.of(gpu)):
                    send(ev.Evicted(gpu, epochs[gpu], ((instance, size * GIB),), pool(8 * GIB)))
            case ("deployed", str(instance)):
                send(ev.FunctionKnown(instance.split("-")[0], 1.0, 0.98, 1.0))
            case ("removed", str(instance)):
                send(ev.FunctionGone(instance.split("-")[0]))
            case ("policy", str(order), str(placement), str(eviction), bool(awaits)):
                chosen = Policy(order=order, placement=placement, eviction=eviction, await_resident=awaits, turns=turns)
                send(ev.PolicyChosen(chosen))
            case ("tick", int(seconds)):
                now_s += seconds
                seats.now_s = now_s
                send(ev.Tick())
            case _:
                pass
    assert all(count == 1 for count in fates.values()), fates
    assert set(fates) | open_requests == set(range(1, requests + 1))
    send(ev.DrainChosen(()))
    if core.gpus:  # who has a turn uses it to the end: everybody else comes to theirs
        now_s += 60.0
        seats.now_s = now_s
        send(ev.Tick())
        while seats.leases or seats.retired:
            for gpu in sorted(seats.retired):
                lost(gpu)
                epochs[gpu] += 1
                send(ev.ExecutorUp(gpu, epochs[gpu], pool(4 * GIB)))
            if not seats.leases:
                continue
            for serial in sorted(seats.leases.keys() - seats.turns - seats.wanting):
                seats.wanting.add(serial)
                turn(ev.TurnWanted, seats.leases[serial])
            wake = seats.pick(0, seats.turns | seats.revoked)
            assert wake is not None, "nobody has a turn, and somebody has a seat"
            done(wake, "revoked" if wake.lease.serial in seats.revoked else "ended", 1, {})
        assert not core.waiting
        assert not open_requests
        assert all(count == 1 for count in fates.values()), fates
