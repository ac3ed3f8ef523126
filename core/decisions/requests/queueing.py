"""The part of the router's policy on queues and tickets: the effects of requests, instances and wishes for leases on
one another. Pure: acts on a RouterState and does no I/O.
"""

from bisect import bisect_left
from math import inf
from typing import Final

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import failures
from dormouse.core.decisions.requests import timers as t
from dormouse.core.decisions.requests.state import (
    Holder,
    Instance,
    InstanceState,
    Phase,
    Request,
    RouterState,
    ServedFunction,
    Ticket,
    most_open,
)
from dormouse.core.decisions.rules.replicas import beyond_share, token_due_s
from dormouse.schemas import messages as m

SILENT_S: Final = 2.0
"""Time for an instance to give a request up, or to leave, when told to: few operations of torch hold it longer."""


def absent(p: RouterState, name: str) -> m.Failure:
    """The failure for an unknown function: before the catalogue is known, it may exist."""
    return failures.unknown_function(name) if p.catalogue_known else failures.starting()


def acquire(
    p: RouterState,
    instance: Holder,
    request: int | None,
    deadline_ms: int,
    version: int | None,
    batch: m.BatchAsk | None = None,
    beyond_ms: int = 0,
) -> int:
    number = next(p.ticket_numbers)
    p.tickets[number] = Ticket(instance.name, request)
    ask = m.Acquire(
        request=number,
        instance=instance.name,
        deadline_ms=deadline_ms,
        version=version,
        own=request is None and batch is None,
        batch=batch,
        beyond_ms=beyond_ms,
    )
    p.tell(ask)
    return number


def due_at_s(instance: Instance, request: Request) -> float:
    """Deadline of its answer there: not later than that of the request that calls it."""
    return min(request.arrived_s + instance.spec.deadline_ms / 1000, request.due_s)


def left_ms(p: RouterState, instance: Instance, request: Request) -> int:
    """Time until its deadline there."""
    return instance.spec.deadline_ms - int((p.now_s - request.arrived_s) * 1000)


def due_ms(p: RouterState, instance: Instance, request: Request) -> int:
    """The same, but at most the time of the request that calls it."""
    own_ms = left_ms(p, instance, request)
    return own_ms if request.due_s == inf else min(own_ms, int((request.due_s - p.now_s) * 1000))


def over(p: RouterState, request: Request) -> None:
    """It is answered, or begins anew: its own calls have no use any more."""
    p.orphans += request.calls
    request.calls = {}


def batch_changed(p: RouterState, instance: Instance, came: Request | None = None, left: int = 0) -> None:
    """A request has come, or that of a ticket left: the controller is notified while it decides on the next batch."""
    ticket = p.tickets.get(instance.own or 0)
    if not instance.spec.batch or ticket is None or instance.own is None or ticket.lease is not None:
        return
    new = [] if came is None else [(came.ticket, left_ms(p, instance, came))]
    p.tell(m.BatchWaits(request=instance.own, came=new, left=[left] if left else []))


def release(p: RouterState, number: int) -> None:
    """The lease is not wanted any more."""
    ticket = p.tickets.pop(number, None)
    if ticket is not None and not ticket.done:
        p.tell(m.Release(request=number))


def disown(p: RouterState, holder: Holder) -> None:
    """The holder has no lease of its own any more, and wants none."""
    number, holder.own = holder.own, None
    if number is not None:
        release(p, number)


def given_back(p: RouterState, number: int, used: bool, taken: int = 0, together: int = 0) -> None:
    """The instance reports that it is through with its lease; the controller ensures that."""
    ticket = p.tickets.pop(number, None)
    if ticket is not None and not ticket.done:
        p.tell(m.Answered(request=number, used=used, taken=taken, together=together))


def fail(p: RouterState, number: int, failure: m.Failure) -> None:
    """The request fails, and its function has missed a deadline. Before its ticket is released."""
    request = p.requests.pop(number)
    over(p, request)
    if request.function in p.functions:
        ticket = request.ticket if request.ticket in p.tickets else 0
        if ticket and (holder := p.instances.get(p.tickets[ticket].instance)) is not None and ticket in holder.open:
            ticket = ticket if holder.spec.llm is not None else holder.batch_own if ticket in holder.batch else 0
        p.tell(m.Missed(function=request.function, request=ticket))
    p.out.append(e.Fail(number, failure, request.timing(p.now_s)))


def met(p: RouterState, request: Request, instance: Instance) -> None:
    """It has its answer. The controller sees no end of its own, where it shares a lease."""
    if instance.spec.concurrency > 1 and request.ticket in instance.open:
        p.tell(m.Met(function=request.function, latency_ms=int((p.now_s - request.arrived_s) * 1000)))


def requeue(p: RouterState, request: Request) -> None:
    """Puts it back into its place in the queue, and on to an idle instance; its ticket must be settled already."""
    function = p.functions[request.function]
    put_back(p, function, request)
    feed(p, function)


def put_back(p: RouterState, function: ServedFunction, request: Request) -> None:
    """Into the queue, which is in order of arrival."""
    over(p, request)
    request.phase, request.ticket, request.lost, request.first = Phase.QUEUED, 0, False, None
    request.source, request.copy_s, request.gpu = "", None, -1
    function.queue.insert(bisect_left(function.queue, request.number), request.number)
    if function.spec.stateless:
        p.crowded[function.spec.name] = None


def feed(p: RouterState, function: ServedFunction) -> None:
    """Let the first requests of the queue ask for leases, one for each idle instance. The first instance comes first,
    so that needless extras stay idle. If requests remain, instances stop requests whose clients are gone. In quarantine
    all requests fail.
    """
    while function.quarantine and function.queue:
        fail(p, function.queue.popleft(), failures.quarantined(function.spec.name, function.quarantine))
    if most := most_open(function.spec):
        _fill(p, function, most)
        return
    for name in function.instances:
        if not function.queue:
            return
        instance = p.instances[name]
        if instance.state is not InstanceState.IDLE:
            continue
        request = p.requests[function.queue.popleft()]
        request.phase, request.acquired_s = Phase.WAITING, p.now_s
        wanted_ms = due_ms(p, instance, request)
        beyond_ms = left_ms(p, instance, request) - wanted_ms
        request.ticket = acquire(p, instance, request.number, wanted_ms, instance.version, beyond_ms=beyond_ms)
        instance.state, instance.ticket = InstanceState.BUSY, request.ticket
    for name in function.instances if function.queue else ():
        stop(p, p.instances[name])


def _fill(p: RouterState, function: ServedFunction, most: int) -> None:
    """An instance that has many requests at once asks for a lease when it wants one. A request goes to the instance
    with the fewest.
    """
    while function.queue:
        serving = [p.instances[name] for name in function.instances]
        ready = [each for each in serving if p.takes_more(each, most)]
        if not ready:
            return
        instance = min(ready, key=lambda each: len(each.open))
        request = p.requests[function.queue.popleft()]
        number = next(p.ticket_numbers)
        p.tickets[number] = Ticket(instance.name, request.number, done=True)
        instance.open[number] = None
        request.ticket, request.phase = number, Phase.RUNNING
        request.acquired_s = request.granted_s = request.moved_s = p.now_s
        request.version = instance.spec.version
        p.out.append(e.Handover(request.number, instance.name, number, None, request.route))
        batch_changed(p, instance, came=request)
        p.at(p.now_s + function.spec.timeout_ms / 1000, t.RunEnds(number))
        if (llm := function.spec.llm) is not None:
            p.at(due_s(request, llm), t.FirstTokenDue(number))


def unleased(p: RouterState, holder: Holder) -> None:
    """It has no lease of its own any more, which may have kept it from more requests."""
    if isinstance(holder, Instance) and (function := p.functions.get(holder.spec.name)) is not None:
        feed(p, function)


def due_s(request: Request, llm: m.LlmSettings) -> float:
    """Time by which it is to have its first token, or is expected to be late."""
    return token_due_s(request.arrived_s, llm.ttft_ms / 1000)


def share_out(p: RouterState, function: ServedFunction) -> None:
    """Another instance serves. Of a language model's open requests, it gets its share of those that have no token yet,
    the newest first; those of other functions stay where they are, for their code may run already.
    """
    if function.spec.llm is None:
        feed(p, function)
        return
    serving = [each for each in map(p.instances.__getitem__, function.instances) if each.state.serves]
    waiting = [
        [number for number in each.open if (found := _request(p, number)) and not found.begun] for each in serving
    ]
    moves = beyond_share([(len(each.open), own) for each, own in zip(serving, waiting, strict=True)])
    for instance, numbers in zip(serving, moves, strict=True):
        for number in numbers:
            request = _request(p, number)
            assert request is not None
            p.tickets[number].request = None
            p.send(instance.name, m.Abandon(request=number))
            put_back(p, function, request)
    feed(p, function)


def _request(p: RouterState, number: int) -> Request | None:
    """The request that waits for this ticket."""
    ticket = p.tickets[number]
    return None if ticket.request is None else p.requests[ticket.request]


def through(p: RouterState, instance: Instance, number: int) -> None:
    """The instance has answered, or failed, the request of this ticket."""
    if number not in instance.open:
        idle(p, instance)
        return
    del instance.open[number]
    instance.idle_s = p.now_s
    if instance.draining and not instance.open:
        end(p, instance, instance.draining)
    elif (function := p.functions.get(instance.spec.name)) is not None:
        feed(p, function)


def stop(p: RouterState, instance: Instance) -> None:
    """If the client of an instance's request is gone, tell the instance once to give it up; then it has SILENT_S."""
    number = instance.ticket
    ticket = None if number is None else p.tickets.get(number)
    if number is None or ticket is None or ticket.request is not None or ticket.stopping:
        return
    ticket.stopping = True
    p.out.append(e.Interrupt(instance.name, number))
    p.at(p.now_s + SILENT_S, t.StopEnds(instance.name, number))


def first_for(p: RouterState, request: Request) -> Request:
    """The request that takes the lease wished for ``request``: the first of its function that has none, so that
    requests start in order of arrival. Any instance of the function may answer it; the two change places.
    """
    function, ticket = p.functions[request.function], request.ticket
    tickets = [p.tickets.get(p.instances[name].ticket or 0) for name in function.instances]
    wishes = [other.request for other in tickets if other is not None and other.request is not None]
    waiting = [number for number in wishes if p.requests[number].phase is Phase.WAITING]
    if function.queue:
        waiting.append(function.queue[0])
    first = p.requests[min(waiting, default=request.number)]
    if first.number >= request.number:
        return request
    if first.phase is Phase.QUEUED:
        function.queue.popleft()
        first.phase, first.acquired_s = Phase.WAITING, request.acquired_s
        put_back(p, function, request)
    else:
        request.ticket = first.ticket
        p.tickets[request.ticket].request = request.number
    first.ticket = ticket
    p.tickets[ticket].request = first.number
    return first


def lose(p: RouterState, request: Request) -> None:
    """The request's executor died while it ran: once more if that is harmless."""
    function = p.functions.get(request.function)
    if function is not None and function.spec.idempotent and not request.rerun and not request.streams:
        p.tickets[request.ticket].request = None
        request.rerun = True
        requeue(p, request)
    else:
        fail(p, request.number, failures.executor_lost())


def idle(p: RouterState, instance: Instance) -> None:
    """The instance has no request any more."""
    instance.state, instance.ticket, instance.idle_s = InstanceState.IDLE, None, p.now_s
    if instance.draining:
        end(p, instance, instance.draining)
    elif (function := p.functions.get(instance.spec.name)) is not None:
        feed(p, function)


def end(p: RouterState, instance: Instance, why: str) -> None:
    """Let an idle instance leave by itself: no GPU is to be prepared or kept for it."""
    instance.state, instance.ending = InstanceState.DEAD, why
    disown(p, instance)
    p.send(instance.name, m.Exit())
    p.at(p.now_s + SILENT_S, t.ExitEnds(instance.name))


def live(p: RouterState, name: str) -> Holder | None:
    holder = p.instances.get(name) or p.sessions.get(name)
    return None if holder is None or holder.state is InstanceState.DEAD else holder
