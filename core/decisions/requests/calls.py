"""The part of the router's policy on functions that call functions: which calls are permitted, and when they end. Pure:
acts on a RouterState and does no I/O.

    OPEN --the shell submits it--> a request like any other --its fate--> over
     |
     +--LeaveCall, or the request that calls is over--> left: its request is dropped, or fails when it arrives

A call belongs to one request that its instance runs, and never outlives it. The router itself knows everything that
identifies a call: an instance says only which of its own requests calls, and which function. So no message of an
instance lets it call a function that its deployer did not name, or another tenant's function, or deeper.

Instances wait for one another while they call. That ends, because calls go one way (circles.py): a function is not
called by one that it may call itself, directly or not. GPUs need no such rule, as a waiting instance has no turn
(docs/design/lease.md).
"""

from typing import Final

from dormouse.core.decisions.requests import circles, failures, queueing, serving, splits
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.state import Instance, OpenCall, RouterState
from dormouse.core.names import base_of
from dormouse.schemas import messages as m

MAX: Final = 32
"""Most unanswered calls of one instance, over all of its requests. Half of the messages that may wait for an instance
that does not read (router/instances/instances.py).
"""

DEPTH: Final = 8
"""Most nested calls."""


def asked(p: RouterState, instance: Instance, call: m.CallFunction) -> bool:
    """Returns False if the call is not permitted."""
    key = instance.name, call.number
    if key in p.calls or len(call.body) > m.MESSAGE_BODY_NBYTES:
        return False
    ticket = p.tickets.get(call.request)
    runs = ticket is not None and serving.runs(p, instance, call.request)
    caller = p.requests.get(ticket.request or 0) if ticket is not None and runs else None
    if caller is None:
        refusal: m.Failure | None = failures.caller_over()
    elif instance.calls >= MAX:
        refusal = failures.too_many_calls(MAX)
    elif caller.depth >= DEPTH:
        refusal = failures.too_deep(DEPTH)
    else:
        refusal = _refusal(p, instance.spec, call.function)
    if refusal is not None or caller is None:
        p.out.append(e.RefuseCall(instance.name, call.number, refusal or failures.caller_over()))
        return True
    p.calls[key] = OpenCall(caller.number, caller.depth + 1, queueing.due_at_s(instance, caller))
    caller.calls[key] = None
    instance.calls += 1
    if ticket is not None and (lease := ticket.lease) is not None:  # that no other request shares
        p.tell(m.CallWaits(gpu=lease.gpu, epoch=lease.epoch, serial=lease.serial))
    p.out.append(e.BeginCall(instance.name, call.number, caller.number, instance.spec, call))
    return True


def _refusal(p: RouterState, spec: m.FunctionSpec, called: str) -> m.Failure | None:
    own = base_of(spec.name)
    if base_of(called) != own and base_of(called) not in spec.calls:
        return failures.not_to_be_called(own, called, spec.calls)
    if not circles.serves(p, splits.named(p, called), spec.tenant):
        return queueing.absent(p, called)
    way = circles.way(p, spec.tenant, base_of(called), own)
    return failures.calls_in_a_circle([own, *way]) if way else None


def arrived(p: RouterState, number: int, name: str, key: tuple[str, int]) -> None:
    """The call is a request now."""
    call = p.calls[key]
    call.request = number
    serving.arrived(p, number, name, depth=call.depth, due_s=call.due_s)
    if call.left:
        serving.left(p, number)


def leave(p: RouterState, key: tuple[str, int]) -> None:
    """Its answer is no longer wanted."""
    if (call := p.calls.get(key)) is not None and not call.left:
        call.left = True
        if call.request:
            serving.left(p, call.request)


def leave_orphans(p: RouterState) -> None:
    """Leaves the calls of requests that are over, or begin anew."""
    while p.orphans:
        leave(p, p.orphans.pop())


def over(p: RouterState, key: tuple[str, int]) -> None:
    """It is answered, by a result or by a failure."""
    call = p.calls.pop(key)
    if (instance := p.instances.get(key[0])) is not None:
        instance.calls -= 1
    if (caller := p.requests.get(call.caller)) is not None:
        caller.calls.pop(key, None)
