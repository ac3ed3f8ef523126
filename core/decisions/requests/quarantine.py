"""The part of the router's policy on functions whose commands kill executors: blame, quarantine, and its end. Pure:
acts on a RouterState and does no I/O.

    served --blamed twice in BLAME_WINDOW_S--> quarantined --deploy, or restart--> served

Blame is decided before (core/evidence.py). A version that is only being deployed fails its deploy instead.
"""

from typing import Final

from dormouse.core.decisions.requests import changes, failures, lives, queueing
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.state import OpenDeploy, RouterState, ServedFunction
from dormouse.schemas import messages as m

BLAMES: Final = 2
BLAME_WINDOW_S: Final = 600.0
"""One death may be the machine's; two of the same function's commands within ten minutes are hardly that."""


def blamed(p: RouterState, name: str, text: str) -> None:
    """An executor has died of the commands of instance ``name``, which may be gone by now; ``text`` describes the
    death.
    """
    spec = p.instances[name].spec if name in p.instances else p.gone.get(name)
    if spec is None:
        return  # a session, which its own user watches
    owner = _owner(p, spec)
    if owner is None:
        return  # of a version that is not served any more
    owner.deaths = [death_s for death_s in owner.deaths if p.now_s - death_s < BLAME_WINDOW_S] + [p.now_s]
    p.out.append(e.LogNote(spec.name, f"a GPU's process died: {text} ({len(owner.deaths)} of {BLAMES})"))
    if isinstance(owner, ServedFunction):
        judge(p, owner, text)
    elif len(owner.deaths) >= BLAMES and not owner.keeping:
        failure = failures.deploy_quarantined(text)
        lives.end_deploy(p, owner, failure, "ended the GPU's process")


def _owner(p: RouterState, spec: m.FunctionSpec) -> ServedFunction | OpenDeploy | None:
    deploy, function = p.deploy(spec.name), p.functions.get(spec.name)
    if deploy is not None and deploy.spec.version == spec.version:
        return deploy
    return function if function is not None and function.spec.version == spec.version else None


def judge(p: RouterState, function: ServedFunction, text: str) -> None:
    """Quarantine it if it has been blamed too often."""
    if len(function.deaths) >= BLAMES and not function.quarantine:
        name = function.spec.name
        why = f"it ended a GPU's process {BLAMES} times within {BLAME_WINDOW_S / 60:g} minutes; the last time, {text}"
        p.tell(m.Quarantined(name=name, text=why))
        p.out.append(e.LogNote(name, f"quarantined: {why}"))
        hold(p, function, why)


def hold(p: RouterState, function: ServedFunction, why: str) -> None:
    """Nothing of this function runs from now on."""
    name = function.spec.name
    failure = failures.quarantined(name, why)
    function.quarantine, function.failure = why, failure
    for instance in changes.dismissed(p, function):
        lives.kill(p, instance, "was quarantined", failure)
    queueing.feed(p, function)
    if not lives.without_instance(p, name):
        p.wanted.pop(name, None)


def restart_asked(p: RouterState, ask: int, name: str) -> None:
    """New instances, and another chance for a function in quarantine. A deploy goes on beside it; a version not served
    yet begins its load anew.
    """
    function, deploy = p.functions.get(name), p.deploy(name)
    if function is None and deploy is not None and not deploy.keeping:
        p.settle(ask, None, deploy.spec)
        lives.end_deploy(p, deploy, failures.load_restarted(name), "was restarted", again=True)
        return
    if name in p.changes and (function is None or deploy is None):
        p.settle(ask, failures.busy_changing(name))
        return
    if function is None:
        p.settle(ask, queueing.absent(p, name))
        return
    if function.quarantine:
        p.tell(m.Lifted(name=name))
        p.out.append(e.LogNote(name, "no longer quarantined"))
    function.quarantine, function.failure, function.deaths, function.worn = "", None, [], []
    function.failures = function.extra_failures = 0
    function.retry_s = function.extra_retry_s = 0.0
    p.wanted[name] = None
    for instance in changes.dismissed(p, function):
        lives.drain(p, instance, "was replaced: the function was restarted")
    p.settle(ask, None, function.spec)
