"""The part of the router's policy on deploys and removals: load beside the old version, switch when it is kept, drain
the old. Pure: acts on a RouterState and does no I/O.
"""

from msgspec import structs

from dormouse.core.decisions.requests import bases, circles, failures, lives, queueing, splits
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.state import Instance, OpenDeploy, Removal, RouterState, ServedFunction
from dormouse.core.names import base_of
from dormouse.schemas import messages as m


def deploy_asked(p: RouterState, asked: e.DeployAsked) -> None:
    ask, spec = asked.ask, asked.spec
    if not p.catalogue_known:  # the version, and the tenants of the functions here
        p.settle(ask, failures.starting())
    elif (name := splits.changing(p, spec.name)) is not None:
        p.settle(ask, failures.busy_changing(name))
    elif (base := base_of(spec.name)) != spec.name and base not in p.functions:
        p.settle(ask, failures.unknown_function(base))
    elif p.one_tenant and (other := _other_tenant(p, spec)) is not None:
        p.settle(ask, failures.tenant_refused(spec.tenant, other))
    elif (failure := bases.deploy_refusal(p, spec)) is not None:
        p.settle(ask, failure)
    elif circle := circles.closed(p, spec):
        p.settle(ask, failures.calls_in_a_circle(circle))
    elif spec.llm is not None and p.models_exposed and _others_model(p, spec):
        p.settle(ask, failures.model_exposed(p.models_exposed, spec.llm.isolation))
    else:
        function = p.functions.get(spec.name)
        version = asked.version or (1 if function is None else function.spec.version + 1)
        p.changes[spec.name] = OpenDeploy(ask, structs.replace(spec, version=version), check=asked.check)
        p.wanted[spec.name] = None


def within_limits(p: RouterState, spec: m.FunctionSpec) -> m.FunctionSpec:
    """The spec as it is served, if it was deployed before the node had its limits. New deploys are refused instead."""
    most_ms, most_load_ms = int(1000 * p.longest_s), int(1000 * p.longest_load_s)
    if spec.timeout_ms <= most_ms and spec.load_timeout_ms <= most_load_ms:
        return spec
    limits = {"timeout_ms": min(spec.timeout_ms, most_ms), "load_timeout_ms": min(spec.load_timeout_ms, most_load_ms)}
    return structs.replace(spec, **limits)


def _other_tenant(p: RouterState, spec: m.FunctionSpec) -> str | None:
    """A tenant that has functions here and is not the one of ``spec``.

    A function that ``spec`` would replace counts too: the two would be loaded side by side for a while.
    """
    return next((tenant for tenant in p.tenants() if tenant != spec.tenant), None)


def _others_model(p: RouterState, spec: m.FunctionSpec) -> bool:
    """Whether another trust group has a language model here, served or on its way: a tenant, or a function."""
    served = [function.spec for function in p.functions.values()]
    coming = [change.spec for change in p.changes.values() if isinstance(change, OpenDeploy)]
    return any(_apart(each, spec) for each in served + coming)


def _apart(a: m.FunctionSpec, b: m.FunctionSpec) -> bool:
    """Whether these are language models that must not read each other's memory."""
    if a.llm is None or b.llm is None:
        return False
    return a.tenant != b.tenant or (a.name != b.name and "function" in (a.llm.isolation, b.llm.isolation))


def remove_asked(p: RouterState, ask: int, name: str) -> None:
    function, deploy = p.functions.get(name), p.deploy(name)
    if name in p.changes and (deploy is None or deploy.keeping):
        p.settle(ask, failures.busy_changing(name))
    elif function is None and deploy is None:
        p.settle(ask, queueing.absent(p, name))
    elif others := splits.besides(p, name):
        p.settle(ask, failures.busy_changing(others[0]))
    elif (failure := bases.removal_refusal(p, name)) is not None:
        p.settle(ask, failure)
    else:
        if deploy is not None:
            lives.end_deploy(p, deploy, failures.deploy_ended(name), "was removed while it was being deployed")
        if function is None:
            lives.settle_when_gone(p, ask, name)
            return
        p.changes[name] = Removal(ask)  # it is served until the catalogue has it no more
        p.tell(m.Removed(name=name))


def kept(p: RouterState, name: str, warning: str = "") -> None:
    match p.changes.pop(name, None):
        case OpenDeploy() as deploy:
            deploy.warning = "; ".join(filter(None, (deploy.warning, warning)))
            _deployed(p, name, deploy)
        case Removal(ask=ask):
            _removed(p, name)
            lives.settle_when_gone(p, ask, name)


def _deployed(p: RouterState, name: str, deploy: OpenDeploy) -> None:
    p.settle(deploy.ask, None, deploy.spec, deploy.warning, deploy.schema)
    before = p.functions.get(name)
    function = p.functions[name] = ServedFunction(deploy.spec, instance=deploy.instance, deaths=deploy.deaths)
    function.schema = deploy.schema
    if function.instance is None:
        p.wanted[name] = None  # it died while the controller was writing
    else:
        p.wanted.pop(name, None)
    splits.begun(p, name)
    p.out.append(e.NewVersion(deploy.spec))
    if before is not None:
        function.queue = before.queue
        if function.queue and function.spec.stateless:
            p.crowded[name] = None
        for instance in dismissed(p, before):
            lives.drain(p, instance, f"was replaced: version {deploy.spec.version} was deployed")
    queueing.feed(p, function)


def _removed(p: RouterState, name: str) -> None:
    function = p.functions[name]
    p.wanted.pop(name, None)
    for instance in dismissed(p, function):
        lives.drain(p, instance, "was removed with its function")
    splits.ended(p, name)
    del p.functions[name]
    for number in function.queue:
        queueing.fail(p, number, failures.unknown_function(name))
    p.out.append(e.Discard(function.spec))


def not_removed(p: RouterState, name: str, text: str) -> None:
    """The catalogue has it still, so it goes on."""
    change = p.changes.get(name)
    if isinstance(change, Removal):
        del p.changes[name]
        p.settle(change.ask, failures.not_removed(text))


def not_kept(p: RouterState, name: str, failure: m.Failure) -> None:
    """The controller does not keep the version that it was sent; the version served under this name goes on."""
    deploy = p.deploy(name)
    if deploy is None or not deploy.keeping:
        return
    deploy.keeping = False
    if deploy.instance is None:  # it died while the controller was deciding
        lives.deploy_failed(p, deploy, failure, blameless=False)
    elif (instance := queueing.live(p, deploy.instance)) is not None:
        lives.kill(p, instance, "was not kept", failure)


def dismissed(p: RouterState, function: ServedFunction) -> list[Instance]:
    """Its instances, which from now on have no function: to be drained."""
    found = [p.instances[name] for name in function.instances]
    function.instance, function.extras = None, {}
    return found
