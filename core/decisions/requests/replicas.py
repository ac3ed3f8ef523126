"""The part of the router's policy on several instances of one function: when one is added, when an extra one ends, and
their end when the function turns out to have state. Pure: acts on a RouterState and does no I/O.

A function that is deployed as stateless gets one more instance when all of this holds:

* Every instance that it has holds a lease. One that is idle or loads will take a request soon; one that waits for a GPU
  shows that instances are not lacking. With ``concurrency``, one that is full and wants no GPU is as good: its
  requests wait for other things.
* The last request of its queue is expected to be late: (queued / instances / at once + 1) x the recent time of a
  request is more than the deadline. At once are a batch, or ``concurrency``. Instances with batches have up to two of
  them beside that queue.
* A GPU is free, and no request or ``load()`` of this node waits for one, nor will an extra instance that loads. The
  seat of a language model that has no request takes none.
* ``max_instances``, ``limits.extra_instances`` (of which a tenant has its part) and ``limits.loads`` (places.py) allow
  it, and no extra has failed a moment ago.

A language model is stateless by nature; each of its instances brings a runtime, which has a GPU of its own if there is
one (decisions/scheduling/granting.py). It has many requests at once and no queue to speak of, so other things call for
one more:

* Some request has no token after half of ``ttft_ms``, or recent answers took longer for each further token than
  ``tpot_ms``; and an instance has more than one request: these wait for each other.
* Every instance has begun an answer since it has its lease. One that has not yet wakes, or waits for a GPU, and another
  would be no sooner.

When the new one has loaded, it gets its share of the requests that have no token yet, and of new ones (queueing.py).

An extra ends when it has had nothing to do for ``limits.extra_idle_ms``. It is the one that had least to do: the
instance that is first in Function.instances gets requests first.

State of a function in Python is invisible. A change of its model is seen, because executors report it: from then on its
instances would answer differently, so all but the first end, and no more are started until it is deployed anew.
"""

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import lives, queueing
from dormouse.core.decisions.requests import timers as t
from dormouse.core.decisions.requests.places import LoadPlaces
from dormouse.core.decisions.requests.state import Instance, InstanceState, RouterState, ServedFunction
from dormouse.core.decisions.rules.replicas import BEGUN, has_room, mean, most_instances, queue_is_late, wait_for_others
from dormouse.schemas import messages as m


def measured(p: RouterState, function: ServedFunction, run_s: float, tokens: m.TokenCounts | None) -> None:
    """A request was answered so long after its lease began; by a language model, with so many tokens."""
    function.run_s = mean(function.run_s, run_s)
    if tokens is not None and tokens.tpot_us > 0:
        function.tpot_ms = mean(function.tpot_ms, tokens.tpot_us / 1000)
        if function.spec.stateless:
            p.crowded[function.spec.name] = None


def limit(p: RouterState, function: ServedFunction) -> int:
    """Most instances that it may have now: never more than could run at once."""
    if not function.spec.stateless or function.writes:
        return 1
    return most_instances(function.spec.max_instances, p.gpus)


def add(p: RouterState) -> None:
    """Starts the extra instances that the module's rules call for."""
    for name in list(p.crowded):
        function = p.functions.get(name)
        if function is None or not function.spec.stateless or not (function.queue or _tokens_late(p, function)):
            del p.crowded[name]
        elif p.forking and _called_for(p, function) and _room(p, function.spec):
            instance = lives.start(p, function.spec, replaces=False)
            function.extras[instance.name] = None
            function.tpot_ms = None  # of fewer instances
            p.at(p.now_s + p.extra_idle_s, t.ExtraIdles(instance.name))


def _called_for(p: RouterState, function: ServedFunction) -> bool:
    names = function.instances
    if not 0 < len(names) < limit(p, function) or p.now_s < function.extra_retry_s:
        return False
    if function.spec.llm is not None:
        instances = [p.instances[name] for name in names]
        return _tokens_late(p, function) and all(each.begun_own == (each.own or 0) for each in instances)
    at_once, deadline_s = max(function.spec.batch, function.spec.concurrency), function.spec.deadline_ms / 1000
    if not queue_is_late(len(function.queue), len(names), at_once, function.run_s, deadline_s):
        return False
    return all(_busy(p, p.instances[name]) for name in names)


def _busy(p: RouterState, instance: Instance) -> bool:
    """Whether it has a lease where needed, and yet takes no more requests."""
    if instance.spec.concurrency > 1 and instance.own is None:
        return len(instance.open) >= instance.spec.concurrency
    ticket = p.tickets.get(instance.own or 0 if instance.open else instance.ticket or 0)
    return ticket is not None and ticket.lease is not None


def _tokens_late(p: RouterState, function: ServedFunction) -> bool:
    """Whether requests of a language model wait too long for their first token, or for others, beside others."""
    if (llm := function.spec.llm) is None:
        return False
    late = function.tpot_ms is not None and function.tpot_ms > llm.tpot_ms
    for name in function.instances:
        tickets = p.instances[name].open
        waiting = [p.requests[number] for each in tickets if (number := p.tickets[each].request) is not None]
        if wait_for_others([BEGUN if each.begun else queueing.due_s(each, llm) for each in waiting], late, p.now_s):
            return True
    return False


def late(p: RouterState, number: int) -> None:
    """The request of this ticket was to have its first token by now, if it is to have it in time."""
    instance = p.instances.get(p.tickets[number].instance) if number in p.tickets else None
    if instance is not None and instance.spec.stateless and number in instance.open:
        p.crowded[instance.spec.name] = None


def _room(p: RouterState, spec: m.FunctionSpec) -> bool:
    """Whether the node has room for one more extra of this tenant, and a GPU that no one else wants."""
    extras = [p.instances[name] for function in p.functions.values() for name in function.extras]
    idle = {each.own for each in p.instances.values() if each.own is not None and not each.open}
    own = sum(each.spec.tenant == spec.tenant for each in extras)
    places = LoadPlaces(p)  # missing instances load first
    if own >= p.part(p.extra_instances) or not all(places.free(spec, replaces) for replaces in (False, True)):
        return False
    return has_room(
        extras=len(extras),
        most=p.extra_instances,
        loading=0,
        loads=1,
        coming=sum(instance.state.loads for instance in extras),
        wanted=sum(not ticket.done for number, ticket in p.tickets.items() if number not in idle),
        gpus=p.gpus,
    )


def idled(p: RouterState, name: str) -> None:
    """Look at an extra again: it has had nothing to do for long enough, or may have by another time."""
    instance = queueing.live(p, name)
    if not isinstance(instance, Instance):
        return
    function = p.functions.get(instance.spec.name)
    if function is None or name not in function.extras:
        return  # it has become the first, or is being replaced
    idle = instance.state is InstanceState.IDLE and not instance.open
    idle_until_s = (instance.idle_s if idle else p.now_s) + p.extra_idle_s
    if idle_until_s > p.now_s:
        p.at(idle_until_s, t.ExtraIdles(name))
        return
    del function.extras[name]
    queueing.end(p, instance, "was idle, and others are there")


def wrote(p: RouterState, name: str) -> None:
    """A request has changed this instance's model."""
    instance = queueing.live(p, name)
    if not isinstance(instance, Instance) or not instance.spec.stateless:
        return
    function = p.serving(instance)
    if function is None:
        return
    function.writes += 1
    if function.writes > 1:
        return
    text = (
        "a request has changed tensors that load() had made, but the function was deployed as stateless: it has one "
        "instance from now on; deploy it without --stateless, or change copies"
    )
    p.out.append(e.LogNote(function.spec.name, text))
    extras, function.extras = function.extras, {}
    for extra in [p.instances[name] for name in extras]:
        lives.drain(p, extra, "was one of several, and its function is to have one")
