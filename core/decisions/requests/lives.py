"""The part of the router's policy on instances' lives: start, loaded, killed, gone, replaced, and the back-off between
attempts. Pure: acts on a RouterState and does no I/O.
"""

from typing import Final, assert_never

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import failures, queueing
from dormouse.core.decisions.requests import timers as t
from dormouse.core.decisions.requests.places import HELD_S, LoadPlaces
from dormouse.core.decisions.requests.runtimes import runtime_of
from dormouse.core.decisions.requests.state import (
    SESSION_TENANT,
    Holder,
    Instance,
    InstanceState,
    OpenDeploy,
    Phase,
    Removal,
    RouterState,
    ServedFunction,
    Session,
)
from dormouse.core.quantities import duration
from dormouse.schemas import messages as m

BACKOFF_S: Final = (0.5, 30.0)
"""First and longest pause between two attempts to load a function that failed; it doubles in between."""

WORN: Final = 8
WORN_WINDOW_S: Final = 60.0
"""So many of a function's instances may requests end within a minute, and each is replaced at once; more only after
pauses, because a fork and a load() for each request would take the machine from everybody else."""

LONGEST_LOAD: Final = 12
"""Time limits that a load may last while it progresses: an hour by default. The node allows none more than
``limits.load_timeout_ms``."""

GONE: Final = 256
"""Gone instances that are remembered: an executor's death by one's commands may be reported later."""

DEPLOY_RETRIES: Final = 3
"""Attempts to load a new version when an executor dies under it, which is not the version's fault."""


def start_wanted(p: RouterState) -> None:
    """Start missing instances; functions with waiting requests first, then deploys, whose user waits too."""
    if not p.forking or not p.wanted:
        return
    due = [owner for name in p.wanted for owner in without_instance(p, name)]
    due = [owner for owner in due if isinstance(owner, OpenDeploy) or owner.retry_s <= p.now_s]
    due.sort(key=lambda owner: 1 if isinstance(owner, OpenDeploy) else 0 if owner.queue else 2)
    places = LoadPlaces(p)
    for owner in due:
        replaces = isinstance(owner, ServedFunction)
        if not places.free(owner.spec, replaces):
            continue
        instance = start(p, owner.spec, replaces, owner.check if isinstance(owner, OpenDeploy) else "")
        places.take(instance)
        owner.instance = instance.name
        if not without_instance(p, owner.spec.name):
            del p.wanted[owner.spec.name]


def start(p: RouterState, spec: m.FunctionSpec, replaces: bool, check: str = "") -> Instance:
    name = p.new_name()
    instance = p.instances[name] = Instance(name, spec, replaces=replaces, started_s=p.now_s, progress_s=p.now_s)
    p.out.append(e.Start(name, spec, check))
    p.tell(_up(spec, name, loaded=False))
    p.at(p.now_s + spec.load_timeout_ms / 1000, t.LoadEnds(name))
    p.at(p.now_s + HELD_S, t.RetryDue())
    return instance


def _up(spec: m.FunctionSpec, name: str, loaded: bool) -> m.InstanceUp:
    runtime = runtime_of(spec, name)
    return m.InstanceUp(instance=name, function=spec.name, tenant=spec.tenant, loaded=loaded, runtime=runtime)


def session_opened(p: RouterState, name: str, label: str) -> None:
    p.sessions[name] = Session(name)
    p.tell(m.InstanceUp(instance=name, function=label, tenant=SESSION_TENANT, loaded=False))


def without_instance(p: RouterState, name: str) -> list[ServedFunction | OpenDeploy]:
    """The owners that want an instance under this name: the served version, the version that is being deployed, or
    both.
    """
    function, deploy = p.functions.get(name), p.deploy(name)
    owners: list[ServedFunction | OpenDeploy] = []
    if function is not None and function.instance is None and not function.quarantine:
        owners.append(function)
    if deploy is not None and not deploy.keeping and deploy.instance is None:
        owners.append(deploy)
    return owners


MAX_WARNING: Final = 1000
"""Characters of an instance's warning to its deployer: it ends up in a terminal."""


def loaded(p: RouterState, instance: Instance, version: int, warning: str = "", schema: bytes = b"") -> None:
    queueing.disown(p, instance)  # it may have forgotten to
    instance.version, instance.state, instance.idle_s = version, InstanceState.IDLE, p.now_s
    p.tell(_up(instance.spec, instance.name, loaded=True))
    deploy = p.deploy(instance.spec.name)
    if deploy is not None and deploy.instance == instance.name:
        deploy.keeping = True
        deploy.warning = "".join(filter(str.isprintable, warning[:MAX_WARNING]))
        deploy.schema = schema[: m.SCHEMA_NBYTES]
        p.tell(m.Deployed(spec=deploy.spec))
    elif (function := p.serving(instance)) is not None:
        function.failure, function.schema = None, schema[: m.SCHEMA_NBYTES]
        if instance.name in function.extras:
            function.extra_failures = 0
        queueing.share_out(p, function)


def drain(p: RouterState, instance: Instance, why: str) -> None:
    """Send no more requests to this instance, which has no function any more. It may finish its current request.
    ``why`` completes "the instance ...".
    """
    instance.draining = why
    ticket = p.tickets.get(instance.ticket or 0)
    request = None if ticket is None or ticket.request is None else p.requests[ticket.request]
    if instance.open:
        return
    if instance.state is InstanceState.IDLE:
        queueing.end(p, instance, why)
    elif instance.state is not InstanceState.BUSY:
        kill(p, instance, why)
    elif request is not None and request.phase is Phase.WAITING:
        queueing.release(p, request.ticket)
        queueing.requeue(p, request)
        queueing.idle(p, instance)


def replace(p: RouterState, instance: Instance, why: str) -> None:
    """Another instance takes its place at once; it finishes its current requests."""
    function = p.serving(instance)
    if function is None:
        return
    wear(p, instance)
    if instance.name in function.extras:
        del function.extras[instance.name]
    else:
        succeed(p, function)
    drain(p, instance, why)


def kill(p: RouterState, holder: Holder, how: str, failure: m.Failure | None = None, blameless: bool = False) -> None:
    """End it now; ``how`` completes "the instance ...", ``failure`` is that of its load or its request."""
    if holder.state is InstanceState.DEAD:
        return
    _lost(p, holder, how, failure, blameless)
    holder.ending = how
    p.out.append(e.Kill(holder.name, how))


def exited(p: RouterState, name: str, how: str, failure: m.Failure | None = None, blameless: bool = False) -> None:
    holder = p.instances.get(name) or p.sessions.get(name)
    if holder is None:
        return
    if holder.state is not InstanceState.DEAD:
        _lost(p, holder, how, failure, blameless)
    for number in [number for number, ticket in p.tickets.items() if ticket.instance == name]:
        queueing.release(p, number)
    match holder:
        case Session():
            del p.sessions[name]
        case Instance(spec=spec):
            del p.instances[name]
            _left(p, holder)
            p.gone[name] = spec
            if len(p.gone) > GONE:
                del p.gone[next(iter(p.gone))]
        case _:
            assert_never(holder)
    p.tell(m.InstanceGone(instance=name))
    p.out.append(e.Clean(name, holder.ending or how))


def settle_when_gone(p: RouterState, ask: int, function: str) -> None:
    """Answer the removal once those of its instances that are told to end have ended: then their memory is free.
    Instances with unfinished requests are not waited for.
    """
    ending = {each.name for each in p.instances.values() if each.spec.name == function and each.ending}
    if ending:
        p.changes[function] = Removal(ask, ending)
    else:
        p.settle(ask, None)


def _left(p: RouterState, instance: Instance) -> None:
    """The name is free once the last one that was waited for has ended."""
    name = instance.spec.name
    change = p.changes.get(name)
    if isinstance(change, Removal) and instance.name in change.ending:
        change.ending.discard(instance.name)
        if not change.ending:
            del p.changes[name]
            p.settle(change.ask, None)


def _lost(p: RouterState, holder: Holder, how: str, failure: m.Failure | None, blameless: bool) -> None:
    match holder:
        case Session():
            holder.state = InstanceState.DEAD
            queueing.disown(p, holder)
        case Instance():
            _vacate(p, holder, how, failure, blameless)
        case _:
            assert_never(holder)


def _vacate(p: RouterState, instance: Instance, how: str, failure: m.Failure | None, blameless: bool) -> None:
    """The instance is lost: settle its requests and leases, and see to its replacement."""
    was, instance.state = instance.state, InstanceState.DEAD
    # A request that ran may have been the reason; a fault of a request is no reason to hold the function back. But a
    # damaged model is no request's fault: on a bad disk it would be loaded for each of them.
    served = was is InstanceState.BUSY or bool(instance.open)
    innocent = blameless or (served and (failure is None or failure.code != "model_damaged"))
    number, instance.ticket = instance.ticket, None
    if number is not None and (ticket := p.tickets.get(number)) is not None and ticket.request is not None:
        request = p.requests[ticket.request]
        if request.phase is Phase.WAITING:
            queueing.requeue(p, request)
            innocent = blameless
        elif request.lost:
            queueing.lose(p, request)
        else:
            wear(p, instance)
            queueing.fail(p, request.number, failure or failures.sandbox_died(how))
    if number is not None:
        queueing.release(p, number)
    _lose_open(p, instance, how, failure)
    queueing.disown(p, instance)
    if instance.draining:
        return
    name = instance.spec.name
    deploy, function = p.deploy(name), p.functions.get(name)
    if failure is None or served:  # of a request, not of the load that is to come
        failure = failures.load_failed(f"the instance {how} while loading; see `dormouse logs {name}`")
    if deploy is not None and deploy.instance == instance.name:
        deploy.instance = None
        if not deploy.keeping:
            deploy_failed(p, deploy, failure, blameless)
    elif function is not None and instance.name in function.extras:
        del function.extras[instance.name]
        if not innocent:
            function.extra_retry_s = p.now_s + pause_s(function.extra_failures)
            function.extra_failures += 1
    elif function is not None and function.instance == instance.name:
        succeed(p, function)
        if not innocent:
            back_off(p, function, failure, was.loads)


def _lose_open(p: RouterState, instance: Instance, how: str, failure: m.Failure | None) -> None:
    """Of a language model's requests, those without any output yet begin anew, if need be in another instance; so do
    those of an idempotent function.
    """
    again = instance.spec.llm is not None or instance.spec.idempotent
    if instance.open and instance.spec.llm is None:
        wear(p, instance)
    tickets, instance.open = list(instance.open), {}
    lost = [p.tickets.pop(number) for number in tickets]
    for ticket in lost:
        if ticket.request is None:
            continue
        request = p.requests[ticket.request]
        if not again or request.streams or request.rerun or request.function not in p.functions:
            queueing.fail(p, request.number, failure or failures.sandbox_died(how))
        else:
            request.rerun = True
            queueing.requeue(p, request)


def succeed(p: RouterState, function: ServedFunction) -> None:
    """The first instance is gone: an extra takes its place, the oldest that has loaded if any has."""
    serving = [name for name in function.extras if p.instances[name].state.serves]
    function.instance = next(iter(serving or function.extras), None)
    if function.instance is None:
        p.wanted[function.spec.name] = None
    else:
        del function.extras[function.instance]


def all_forked_gone(p: RouterState) -> None:
    """All functions lose their instances before any function is looked at: no instance takes over from another.

    A request that ran fails like one that comes too early, because no function's code is to blame.
    """
    for name, function in p.functions.items():
        function.instance, function.extras = None, {}
        if not function.quarantine:
            p.wanted[name] = None
    for instance in list(p.instances.values()):
        exited(p, instance.name, "died with its zygote", failures.sandboxes_restart(), blameless=True)


def wear(p: RouterState, instance: Instance) -> None:
    """A request is about to cost its function this instance."""
    function = p.serving(instance)
    if function is None:
        return
    function.worn = [worn_s for worn_s in function.worn if p.now_s - worn_s < WORN_WINDOW_S] + [p.now_s]
    if len(function.worn) <= WORN:
        return
    wait_s, name = pause_s(len(function.worn) - WORN - 1), function.spec.name
    function.retry_s = max(function.retry_s, p.now_s + wait_s)
    function.extra_retry_s = max(function.extra_retry_s, p.now_s + wait_s)
    p.at(function.retry_s, t.RetryDue())
    starts = f"the next one starts in {duration(1000 * wait_s)}"
    text = f"requests ended {len(function.worn)} of its instances within a minute; {starts}"
    p.out.append(e.LogNote(name, text))


def pause_s(failures_: int) -> float:
    first_s, longest_s = BACKOFF_S
    return float(min(longest_s, first_s * 2 ** min(failures_, 16)))


def back_off(p: RouterState, function: ServedFunction, failure: m.Failure, loading: bool) -> None:
    function.retry_s = p.now_s + pause_s(function.failures)
    function.failures += 1
    p.at(function.retry_s, t.RetryDue())
    if loading:
        function.failure = failure
        while function.queue:
            queueing.fail(p, function.queue.popleft(), failures.not_loaded(function.spec.name, failure))


def deploy_failed(p: RouterState, deploy: OpenDeploy, failure: m.Failure, blameless: bool) -> None:
    name = deploy.spec.name
    if blameless and deploy.retries < DEPLOY_RETRIES:
        deploy.retries += 1
        p.wanted[name] = None
        return
    del p.changes[name]
    if (function := p.functions.get(name)) is not None:
        function.not_deployed = f"version {deploy.spec.version} was not deployed: {failure.text}"
    if not without_instance(p, name):
        p.wanted.pop(name, None)
    p.settle(deploy.ask, failure)
    p.out.append(e.Discard(deploy.spec))


def end_deploy(p: RouterState, deploy: OpenDeploy, failure: m.Failure, how: str, again: bool = False) -> None:
    """Its load ends; ``again``: for this time. Not for a deploy that has loaded."""
    if deploy.instance is not None and (instance := queueing.live(p, deploy.instance)) is not None:
        kill(p, instance, how, failure, blameless=again)
    elif not again:
        deploy_failed(p, deploy, failure, blameless=False)


def progressed(p: RouterState, name: str) -> None:
    """It has printed something, or has brought something to the node."""
    if (instance := p.instances.get(name)) is not None:
        instance.progress_s = p.now_s


def longest_load_s(p: RouterState, spec: m.FunctionSpec) -> float:
    """For a load that progresses all the time."""
    return min(LONGEST_LOAD * spec.load_timeout_ms / 1000, p.longest_load_s)


def load_ran_out(p: RouterState, name: str) -> None:
    """Its time limit is from one sign of progress to the next; but none loads for ever."""
    instance = p.instances.get(name)
    if instance is None or not instance.state.loads:
        return
    limit_s = instance.spec.load_timeout_ms / 1000
    longest_s = longest_load_s(p, instance.spec)
    due_s = min(instance.progress_s + limit_s, instance.started_s + longest_s)
    if due_s > p.now_s:
        p.at(due_s, t.LoadEnds(name))
        return
    quiet = instance.progress_s + limit_s <= p.now_s
    failure = failures.load_timed_out(instance.spec.load_timeout_ms, None if quiet else int(1000 * longest_s))
    kill(p, instance, "was killed by its time limit", failure)
