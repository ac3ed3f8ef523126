"""Decides everything the router does: queues, instances, deploys and every request's one fate. Pure: no I/O, no clock.

    request   QUEUED --Acquire--> WAITING --Granted--> RUNNING --Returned/Raised--> answered
    instance  STARTING --Importing--> LOADING --Loaded--> IDLE <--request--> BUSY      DEAD from anywhere
    deploy    load beside the old version --Loaded--> Deployed --Kept--> switch, drain the old

It does not decide which GPU a request gets, nor the order among functions: the controller does. An instance has one
request at a time. This module is the interface, and dispatches events; the rules are in serving.py (requests), calls.py
(functions that call others), changes.py (deploys), lives.py (instances), quarantine.py (functions that end executors),
replicas.py (several instances of one function), splits.py (two versions of one) and queueing.py (queues and tickets),
all on one RouterState (state.py).
"""

import heapq
from typing import assert_never

from dormouse.core.decisions.requests import (
    calls,
    changes,
    failures,
    lives,
    quarantine,
    queueing,
    replicas,
    serving,
    splits,
)
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import timers as t
from dormouse.core.decisions.requests.state import Holder, Instance, InstanceState, RouterState, ServedFunction
from dormouse.schemas import messages as m


class RequestPolicy:
    """See the module. ``handle`` is the only way in, its actions the only way out; ``picture`` is for reading."""

    def __init__(self, picture: RouterState) -> None:
        self.picture = picture

    def handle(self, event: e.Event, now_s: float) -> list[e.Action]:
        """Returns everything that is to be done because of ``event``, in order."""
        p = self.picture
        p.now_s = now_s
        match event:
            case e.Arrived(request=request, function=name, route=route, call=key):
                if key is None:
                    serving.arrived(p, request, name, route)
                else:
                    calls.arrived(p, request, name, key)
            case e.CallOver(instance=name, number=number):
                calls.over(p, (name, number))
            case e.RequesterLeft(request=request):
                serving.left(p, request)
            case e.FromInstance(instance=name, message=message):
                if (holder := queueing.live(p, name)) is not None:
                    self._from_holder(holder, message)
            case e.FromController(message=message):
                self._from_controller(message)
            case e.ChunkTaken(request=request, nbytes=nbytes):
                serving.taken(p, request, nbytes)
            case e.DeployAsked():
                changes.deploy_asked(p, event)
            case e.Shared(name=name, share=share):
                splits.shared(p, name, share)
            case e.RemoveAsked(ask=ask, name=name):
                changes.remove_asked(p, ask, name)
            case e.RestartAsked(ask=ask, name=name):
                quarantine.restart_asked(p, ask, name)
            case e.Blamed(instance=name, text=text):
                quarantine.blamed(p, name, text)
            case e.Garbage(instance=name, text=text):
                if (instance := queueing.live(p, name)) is not None:
                    lives.kill(p, instance, f"broke the protocol ({text})")
            case e.InstanceExited(instance=name, text=text, failure=failure):
                lives.exited(p, name, text, failure)
            case e.ForkingChanged():
                p.forking, p.gpu_nbytes, p.gpus = event.possible, event.gpu_nbytes, event.gpus
                p.models_exposed = event.models_exposed
            case e.ZygoteLost():
                lives.all_forked_gone(p)
            case e.SessionOpened(instance=name, name=label):
                lives.session_opened(p, name, label)
            case e.Printed(instance=name):
                lives.progressed(p, name)
            case e.Tick():
                self._tick()
            case _:
                assert_never(event)
        calls.leave_orphans(p)
        lives.start_wanted(p)
        replicas.add(p)
        out, p.out = p.out, []
        return out

    def next_deadline_s(self) -> float | None:
        """Time of the next Tick."""
        return self.picture.timers[0][0] if self.picture.timers else None

    def check(self) -> None:
        """Asserts the invariants between any two events."""
        self.picture.check()

    def missing(self) -> list[str]:
        """Functions that the node waits for before it is ready; a function that cannot be loaded is not among them."""
        p = self.picture
        if not p.catalogue_known:
            return ["the catalogue"]
        names = [f"function {name}" for name, f in p.functions.items() if f.failure is None and not self._serves(f)]
        return names if p.forking else ["the sandbox's interpreter, the store or the first GPU", *names]

    def _serves(self, function: ServedFunction) -> bool:
        return any(self.picture.instances[name].state.serves for name in function.instances)

    def _from_controller(self, message: m.ControllerToRouter) -> None:
        p = self.picture
        match message:
            case m.Catalogue(functions=specs, held=held, traffic=traffic):
                p.catalogue_known = True
                p.functions = {spec.name: ServedFunction(changes.within_limits(p, spec)) for spec in specs}
                p.wanted = dict.fromkeys(p.functions)
                splits.restore(p, traffic)
                for name, why in held.items():
                    quarantine.hold(p, p.functions[name], why)
            case m.Kept(name=name, warning=warning):
                changes.kept(p, name, warning)
                if name in p.functions:
                    quarantine.judge(p, p.functions[name], "while it was being deployed")
            case m.NotRemoved(name=name, text=text):
                changes.not_removed(p, name, text)
            case m.InstanceViolated(instance=name, text=text):
                if (instance := queueing.live(p, name)) is not None:
                    lives.kill(p, instance, f"broke the protocol ({text})", failures.violation(text))
            case m.EndInstance(instance=name, failure=failure, unkept=unkept):
                if unkept:
                    changes.not_kept(p, unkept, failure)
                if (instance := queueing.live(p, name)) is not None:
                    lives.kill(p, instance, f"was ended by the node ({failure.text})", failure)
            case m.Granted(request=number, lease=lease, wake_nbytes=nbytes, source=source, requests=requests):
                serving.granted(p, number, lease, nbytes, source, requests)
            case m.Awoken(request=number, wake_us=wake_us, source=source):
                serving.awoken(p, number, wake_us / 1e6, source)
            case m.Refused(request=number, failure=failure):
                serving.refused(p, number, failure)
            case m.LeaseLost(request=number):
                serving.lease_lost(p, number)
            case m.Wrote(instance=name):
                replicas.wrote(p, name)
            case m.OverShare(tenants=tenants):
                p.over_share = frozenset(tenants)
            case m.GpusDrained(gpus=gpus, left=left):
                p.drained, p.all_drained = frozenset(gpus), not left
                for function in p.functions.values():
                    queueing.feed(p, function)  # those that waited for the end of a seat on one that serves again
            case m.Status() | m.Device() | m.TokensUsed() | m.Measures():
                pass  # the shell's
            case _:
                assert_never(message)

    def _from_holder(self, holder: Holder, message: m.InstanceToRouter) -> None:
        p = self.picture
        match message:
            case m.NeedLease(version=version) if holder.own is None:
                serving.need_lease(p, holder, version)
            case m.LeaseEnded(version=version, taken=taken, together=together):
                holder.version = version
                if holder.own is not None:
                    number, holder.own = holder.own, None
                    queueing.given_back(p, number, True, taken, together)
                queueing.unleased(p, holder)
            case _ if not isinstance(holder, Instance) or not self._from_instance(holder, message):
                said = type(message).__name__
                lives.kill(p, holder, f"broke the protocol ({said} while {holder.state.value})")

    def _from_instance(self, instance: Instance, message: m.InstanceToRouter) -> bool:
        """Returns False if this message is not valid now."""
        p = self.picture
        match message:
            case m.Importing() if instance.state is InstanceState.STARTING:
                instance.state = InstanceState.LOADING
            case m.Loaded(nbytes=nbytes) if instance.state is InstanceState.LOADING and 0 < p.gpu_nbytes < nbytes:
                lives.kill(p, instance, "could not load", failures.model_too_large(nbytes, p.gpu_nbytes))
            case m.Loaded(version=version, warning=warning, schema=schema) if instance.state is InstanceState.LOADING:
                lives.loaded(p, instance, version, warning, schema)
            case m.LoadFailed(code=code, text=text) if instance.state.loads:
                failure = failures.check_failed(text) if code == "check_failed" else failures.load_failed(text)
                lives.kill(p, instance, "could not load", failure, blameless=code == "executor_lost")
            case m.Spoiled() if instance.state is InstanceState.BUSY or instance.open:
                lives.replace(p, instance, "was replaced: the last request spoiled what load() had made")
            case m.LoadProgress():
                lives.progressed(p, instance.name)
            case m.CallFunction():
                return calls.asked(p, instance, message)
            case m.LeaveCall(number=number):
                calls.leave(p, (instance.name, number))
            case m.AnswerBegun():
                return serving.begun(p, instance, message)
            case m.AnswerPart():
                return serving.parts(p, instance, [message])
            case m.AnswerParts(parts=parts):
                return len(parts) <= m.BATCH_PARTS and serving.parts(p, instance, parts)
            case m.Returned(request=number) if serving.runs(p, instance, number):
                serving.returned(p, instance, number, message)
            case m.Raised(request=number) if serving.runs(p, instance, number):
                serving.raised(p, instance, number, message)
            case _:
                return False
        return True

    def _tick(self) -> None:
        p = self.picture
        while p.timers and p.timers[0][0] <= p.now_s:
            self._due(heapq.heappop(p.timers)[-1])

    def _due(self, timer: t.Timer) -> None:
        p = self.picture
        match timer:
            case t.WaitEnds(request=number):
                serving.waited(p, number)
            case t.RunEnds(ticket=number):
                serving.ran_out(p, number)
            case t.LoadEnds(instance=name):
                lives.load_ran_out(p, name)
            case t.AbandonedGoesOn(instance=name, ticket=number):
                if (instance := p.instances.get(name)) is not None and instance.ticket == number:
                    serving.abandoned(p, instance, number)
            case t.StopEnds(instance=name, ticket=number):
                instance = p.instances.get(name)
                if instance is not None and (instance.ticket == number or number in instance.open):
                    lives.kill(p, instance, "did not stop when it was told to")
            case t.FirstTokenDue(ticket=number):
                replicas.late(p, number)
            case t.ExtraIdles(instance=name):
                replicas.idled(p, name)
            case t.ExitEnds(instance=name):
                if name in p.instances:
                    p.out.append(e.Kill(name))
            case t.RetryDue():
                pass  # handle() looks for wanted instances after every event
            case _:
                assert_never(timer)
