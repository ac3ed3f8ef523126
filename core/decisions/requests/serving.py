"""The part of the router's policy on the life of a request: arrives, is granted, refused, loses its GPU, is answered,
runs out of time. Pure: acts on a RouterState and does no I/O.
"""

import math
from typing import Final, assert_never

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import failures, lives, queueing, replicas
from dormouse.core.decisions.requests import timers as t
from dormouse.core.decisions.requests.queueing import SILENT_S
from dormouse.core.decisions.requests.state import (
    Holder,
    Instance,
    InstanceState,
    Phase,
    Request,
    RouterState,
    Session,
    Ticket,
)
from dormouse.schemas import messages as m

SESSION_DEADLINE_MS: Final = 1000
"""Sessions have no deadline of their own; a person waits."""

ABANDONED_S: Final = 0.5
"""Interval of checks whether a request without a client keeps a GPU from another function's, which must have waited as
long; a waiting request of its own function stops it at once.
"""


def arrived(
    p: RouterState, number: int, name: str, route: str = "", *, depth: int = 0, due_s: float = math.inf
) -> None:
    """``depth`` and ``due_s``: of a call (calls.py)."""
    p.requests[number] = Request(number, name, p.now_s, route, depth=depth, due_s=due_s)
    function = p.functions.get(name)
    if function is None:
        queueing.fail(p, number, queueing.absent(p, name))
    elif route and (function.spec.embedding if route == "embeddings" else function.spec.llm) is None:
        queueing.fail(p, number, failures.wrong_route(function.spec))
    elif function.quarantine:
        queueing.fail(p, number, failures.quarantined(name, function.quarantine))
    elif function.failure is not None and function.instance is None:
        queueing.fail(p, number, failures.not_loaded(name, function.failure))
    elif len(function.queue) >= function.spec.max_queue:
        full = failures.queue_full(f"function {name!r}", function.spec.max_queue, _over(p, function.spec))
        queueing.fail(p, number, full)
    elif (limit := _part_that_is_full(p, function.spec.tenant)) is not None:
        full = failures.queue_full(f"tenant {function.spec.tenant!r}", limit, _over(p, function.spec))
        queueing.fail(p, number, full)
    elif len(p.requests) > p.max_queue:
        queueing.fail(p, number, failures.queue_full("this node", p.max_queue, _over(p, function.spec)))
    else:
        function.queue.append(number)
        if function.spec.stateless:
            p.crowded[name] = None
        p.at(p.now_s + function.spec.timeout_ms / 1000, t.WaitEnds(number))
        queueing.feed(p, function)


def left(p: RouterState, number: int) -> None:
    request = p.requests.pop(number, None)
    if request is None:
        return
    queueing.over(p, request)
    p.out.append(e.Drop(number, request.timing(p.now_s)))
    if request.phase is not Phase.RUNNING:
        _withdraw(p, request)
        return
    ticket = p.tickets[request.ticket]
    ticket.request = None
    if request.ticket in p.instances[ticket.instance].open:
        p.send(ticket.instance, m.Abandon(request=request.ticket))
        queueing.batch_changed(p, p.instances[ticket.instance], left=request.ticket)
        return
    function = p.functions.get(request.function)
    if request.streams or (function is not None and function.queue):
        queueing.stop(p, p.instances[ticket.instance])
    else:
        p.at(p.now_s + ABANDONED_S, t.AbandonedGoesOn(ticket.instance, request.ticket))


def _withdraw(p: RouterState, request: Request) -> None:
    """It no longer waits, neither in its queue nor for a lease; its fate is decided."""
    if request.phase is Phase.QUEUED:
        p.functions[request.function].queue.remove(request.number)
    else:
        instance = p.instances[p.tickets[request.ticket].instance]
        queueing.release(p, request.ticket)
        queueing.idle(p, instance)


def abandoned(p: RouterState, instance: Instance, number: int) -> None:
    """A request without a client runs on: does it keep a GPU from others?"""
    longest_s = max((p.now_s - r.acquired_s for r in p.requests.values() if r.phase is Phase.WAITING), default=0.0)
    if longest_s >= ABANDONED_S:
        queueing.stop(p, instance)
    else:
        p.at(p.now_s + ABANDONED_S, t.AbandonedGoesOn(instance.name, number))


def granted(
    p: RouterState, number: int, lease: m.Lease, wake_nbytes: int, source: m.WokenFrom, requests: int = 0
) -> None:
    ticket = p.tickets.get(number)
    if ticket is None:
        return  # crossed with our Release, which ends it
    ticket.lease, ticket.source = lease, source
    if ticket.request is None:
        if requests:
            instance = p.instances[ticket.instance]
            waiting = [each for each in instance.open if p.tickets[each].request is not None]
            instance.batch_own, instance.batch = number, frozenset(waiting[:requests])
        p.send(ticket.instance, m.LeaseGranted(lease=lease, requests=requests))
        return
    request = queueing.first_for(p, p.requests[ticket.request])
    request.phase, request.granted_s, request.wake_nbytes = Phase.RUNNING, p.now_s, wake_nbytes
    request.source, request.version = source, p.instances[ticket.instance].spec.version
    request.gpu = lease.gpu
    p.out.append(e.Handover(request.number, ticket.instance, number, lease))
    timeout_ms = p.functions[request.function].spec.timeout_ms
    p.at(p.now_s + timeout_ms / 1000, t.RunEnds(number))


def awoken(p: RouterState, number: int, wake_s: float, source: m.WokenFrom) -> None:
    """All missing bytes of a lease have come, from ``source``; its request may be over."""
    ticket = p.tickets.get(number)
    if ticket is None:
        return
    ticket.source = source
    request = None if ticket.request is None else p.requests[ticket.request]
    if request is not None and request.phase is Phase.RUNNING:
        request.source, request.copy_s = source, wake_s


def refused(p: RouterState, number: int, failure: m.Failure) -> None:
    ticket = p.tickets.pop(number, None)
    if ticket is None:
        return
    holder = p.holder(ticket.instance)
    if failure.code == "violation" or ticket.lease is not None:
        if ticket.request is not None:
            queueing.fail(p, ticket.request, failure)
        lives.kill(p, holder, f"lost its lease ({failure.text})")
    elif holder.own == number:
        holder.own = None
        p.send(holder.name, m.LeaseRefused(code=failure.code, text=failure.text))
    elif ticket.request is not None:
        queueing.fail(p, ticket.request, failure)
        queueing.idle(p, p.instances[ticket.instance])


def lease_lost(p: RouterState, number: int) -> None:
    ticket = p.tickets.pop(number, None)
    if ticket is None:
        return
    instance = p.holder(ticket.instance)
    refusal = m.LeaseRefused(code="executor_lost", text=failures.executor_lost().text)
    if instance.own == number:
        instance.own = None
        p.send(instance.name, refusal)
        queueing.unleased(p, instance)
    elif isinstance(instance, Instance) and instance.ticket == number:
        request = None if ticket.request is None else p.requests[ticket.request]
        if request is not None and request.phase is Phase.WAITING:
            queueing.requeue(p, request)
            queueing.idle(p, instance)
            return
        # The instance decides the client's answer: it may have all its results already.
        p.tickets[number] = Ticket(instance.name, ticket.request, ticket.lease, done=True)
        if request is not None:
            request.lost = True
        p.send(instance.name, refusal)
        p.at(p.now_s + SILENT_S, t.StopEnds(instance.name, number))


def runs(p: RouterState, instance: Instance, number: int) -> bool:
    ticket = p.tickets.get(number)
    if ticket is None:
        return False
    return number in instance.open or (instance.ticket == number and ticket.lease is not None)


def need_lease(p: RouterState, holder: Holder, version: int) -> None:
    match holder:
        case Session():
            deadline_ms = SESSION_DEADLINE_MS
        case Instance(state=InstanceState.LOADING, spec=spec):
            deadline_ms = spec.load_timeout_ms
        case Instance(state=InstanceState.IDLE, spec=m.FunctionSpec(llm=m.LlmSettings(ttft_ms=ttft_ms))):
            deadline_ms = ttft_ms
        case Instance(state=InstanceState.IDLE, open=tickets, spec=spec) if tickets:
            open_ = [(each, p.requests[number]) for each in tickets if (number := p.tickets[each].request) is not None]
            waiting = [(each, queueing.left_ms(p, holder, request)) for each, request in open_]
            due_ms = (queueing.due_ms(p, holder, request) for _, request in open_)
            deadline_ms = min(due_ms, default=spec.deadline_ms)
            if spec.batch:
                batch = m.BatchAsk(requests=waiting, most=spec.batch, wait_ms=spec.batch_wait_ms)
                holder.own = queueing.acquire(p, holder, None, deadline_ms, version, batch)
                return
        case Instance():
            text = (
                "this function has the GPU during load() and handle() only; do not compute in threads that outlive them"
            )
            p.send(holder.name, m.LeaseRefused(code="no_lease", text=text))
            return
        case _:
            assert_never(holder)
    holder.own = queueing.acquire(p, holder, None, deadline_ms, version)


def parts(p: RouterState, instance: Instance, came: list[m.AnswerPart]) -> bool:
    """The next parts of answers. Returns False if one is not permitted."""
    passed: list[tuple[int, bytes]] = []
    right = all(_part(p, instance, part, passed) for part in came)
    if passed:
        p.out.append(e.Pass(passed))
    return right


def _part(p: RouterState, instance: Instance, part: m.AnswerPart, passed: list[tuple[int, bytes]]) -> bool:
    """Returns False if it is not permitted: the first states its kind, and none is sent unasked."""
    if not runs(p, instance, part.request):
        return False
    name = p.tickets[part.request].request
    if name is None:
        if part.request not in instance.open:  # a language model's instance has been notified already
            queueing.stop(p, instance)  # it has no client any more
        return True
    request = p.requests[name]
    if request.streams == (part.kind is not None) or len(part.body) > m.CHUNK_NBYTES:
        return False
    if part.kind is not None:
        p.out.append(e.BeginStream(name, part.kind, request.timing(p.now_s), part.head))
    request.streams = True
    if part.body:
        request.moved_s = p.now_s
    request.untaken_nbytes += len(part.body)
    passed.append((name, part.body))
    return request.untaken_nbytes <= m.STREAM_WINDOW_NBYTES


def begun(p: RouterState, instance: Instance, first: m.AnswerBegun) -> bool:
    """A language model has made the first token of an answer. Returns False if it has no such request."""
    number = first.request
    ticket = p.tickets.get(number)
    if ticket is None or number not in instance.open:
        return False
    seat = p.tickets.get(instance.own or 0)
    cold = instance.begun_own != instance.own or first.wake_us > 0
    instance.begun_own = instance.own
    if ticket.request is not None:
        request = p.requests[ticket.request]
        request.first = first
        request.source = "" if seat is None else seat.source if cold else "gpu"
        request.gpu = -1 if seat is None or seat.lease is None else seat.lease.gpu
    return True


def taken(p: RouterState, number: int, nbytes: int) -> None:
    request = p.requests.get(number)
    if request is None:
        return
    request.untaken_nbytes -= nbytes
    request.moved_s = p.now_s
    p.send(p.tickets[request.ticket].instance, m.PartsTaken(request=request.ticket, nbytes=nbytes))


def returned(p: RouterState, instance: Instance, number: int, answer: m.Returned) -> None:
    name = p.tickets[number].request
    if name is not None:
        request = p.requests.pop(name)
        queueing.over(p, request)
        queueing.met(p, request, instance)
        if (function := p.functions.get(request.function)) is not None:
            function.failures = 0
            replicas.measured(p, function, p.now_s - request.granted_s, answer.tokens)
        timing = request.timing(p.now_s)
        told = answer.body, answer.nbytes, timing, answer.tokens, answer.kind, answer.head
        p.out.append(e.Answer(name, instance.name, *told))
    queueing.given_back(p, number, answer.used)
    queueing.through(p, instance, number)


def raised(p: RouterState, instance: Instance, number: int, answer: m.Raised) -> None:
    code = answer.code
    name = p.tickets[number].request
    if name is not None:
        request = p.requests[name]
        if instance.spec.llm is not None:
            queueing.fail(p, name, failures.of_language_model(code, answer.text, answer.param))
        elif code in failures.CLIENTS:  # an answer like any other
            del p.requests[name]
            queueing.over(p, request)
            queueing.met(p, request, instance)
            if code == failures.REFUSED and answer.head is not None:
                failure = failures.refused(answer.text, answer.head)
            else:
                failure = failures.raised(instance.spec.name, code, answer.text, answer.param)
            p.out.append(e.Fail(name, failure, request.timing(p.now_s)))
        elif request.lost or (code == "executor_lost" and number not in instance.open):
            queueing.lose(p, request)
        else:
            queueing.fail(p, name, failures.raised(instance.spec.name, code, answer.text))
    if code == "cancelled" and number not in instance.open:
        queueing.release(p, number)  # interrupted anywhere, it cannot end its lease itself
    else:
        queueing.given_back(p, number, answer.used)
    if code == "limit_exceeded":  # a full sandbox would fail the next request too
        instance.open.pop(number, None)
        lives.wear(p, instance)
        lives.kill(p, instance, "met a limit of its sandbox", blameless=True)
    elif code == "model_damaged":  # the next request would fail by it too, before the store's message is here
        instance.open.pop(number, None)
        failure = failures.raised(instance.spec.name, code, answer.text)
        lives.kill(p, instance, "has lost its stored model", failure)
    else:
        queueing.through(p, instance, number)


def _part_that_is_full(p: RouterState, tenant: str) -> int | None:
    """Where tenants have shares, a tenant may have its part of the node's queue, once half of that is taken; returns
    that part, if it has so many. So a tenant that floods the node keeps no other out.
    """
    if not p.shares or 2 * len(p.requests) <= p.max_queue:
        return None
    tenants = {function.spec.tenant for function in p.functions.values()}
    part = p.shares.get(tenant, 1.0) / sum(p.shares.get(each, 1.0) for each in tenants)
    queued = sum(len(function.queue) for function in p.functions.values() if function.spec.tenant == tenant)
    limit = max(1, int(part * p.max_queue))
    return limit if queued >= limit else None


def _over(p: RouterState, spec: m.FunctionSpec) -> str:
    """Its tenant, if that is over its share of the GPUs' time."""
    return spec.tenant if spec.tenant in p.over_share else ""


def waited(p: RouterState, number: int) -> None:
    request = p.requests.get(number)
    if request is None or request.phase is Phase.RUNNING:
        return
    spec = p.functions[request.function].spec
    timeout_ms = spec.timeout_ms
    if p.all_drained:
        late = failures.all_drained(timeout_ms)
    elif p.forking:
        late = failures.waited_too_long(timeout_ms, _over(p, spec))
    else:
        late = failures.no_sandbox_yet(timeout_ms)
    queueing.fail(p, number, late)
    _withdraw(p, request)


def ran_out(p: RouterState, number: int) -> None:
    ticket = p.tickets.get(number)
    instance = None if ticket is None else p.instances.get(ticket.instance)
    if instance is None or (instance.ticket != number and number not in instance.open):
        return  # answered; its client does not matter
    assert ticket is not None
    request = None if ticket.request is None else p.requests[ticket.request]
    if request is not None and request.streams:  # from one part to the next; that its client reads, the front door sees
        behind = request.untaken_nbytes >= m.TAKEN_NBYTES  # fewer bytes may have been taken
        due_s = (p.now_s if behind else request.moved_s) + instance.spec.timeout_ms / 1000
        if due_s > p.now_s:
            p.at(due_s, t.RunEnds(number))
            return
    if number in instance.open:  # others of its requests are well
        timeout_ms, function = instance.spec.timeout_ms, instance.spec.llm is None
        if request is not None:
            late = failures.gave_up(timeout_ms) if function else failures.no_token(timeout_ms)
            queueing.fail(p, request.number, late)
            ticket.request = None
            p.send(instance.name, m.Abandon(request=number))
            queueing.batch_changed(p, instance, left=number)
        if function:  # code that never waits cannot be notified
            p.at(p.now_s + SILENT_S, t.StopEnds(instance.name, number))
        return
    lives.kill(p, instance, "was killed by its time limit", failures.ran_too_long(instance.spec.timeout_ms))
