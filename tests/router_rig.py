"""The router's policy and a clock, for tests: no process, no socket."""

from typing import Any

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.policy import RequestPolicy
from dormouse.core.decisions.requests.state import InstanceState, RouterState
from dormouse.schemas import messages as m

EXTRA_IDLE_MS = 10_000


def spec(name: str = "f", **settings_: Any) -> m.FunctionSpec:
    return m.FunctionSpec(name=name, version=1, entry="f.py", snapshot="s", **settings_)


def lease(serial: int = 1) -> m.Lease:
    return m.Lease(gpu=0, epoch=1, serial=serial, secret=9)


def failure(code: str = "model_too_large", status: int = 400) -> m.Failure:
    return m.Failure(code=code, status=status, text="no")


class Rig:
    """A policy and a clock; ``do`` returns the actions and checks the invariants."""

    def __init__(
        self,
        *specs: m.FunctionSpec,
        loads: int = 2,
        max_queue: int = 100,
        known: bool = True,
        gpus: int = 1,
        extra_instances: int = 16,
        one_tenant: bool = True,
    ) -> None:
        picture = RouterState(
            loads,
            max_queue,
            "i",
            one_tenant=one_tenant,
            extra_instances=extra_instances,
            extra_idle_s=EXTRA_IDLE_MS / 1000,
        )
        self.policy = RequestPolicy(picture)
        self.now_s = 100.0
        self.do(e.ForkingChanged(True, gpus=gpus))
        if known:
            self.last = self.hear(m.Catalogue(functions=list(specs)))

    def do(self, event: e.Event) -> list[e.Action]:
        actions = self.policy.handle(event, self.now_s)
        self.policy.check()
        return actions

    def hear(self, message: m.ControllerToRouter) -> list[e.Action]:
        return self.do(e.FromController(message))

    def say(self, instance: str, message: m.InstanceToRouter) -> list[e.Action]:
        return self.do(e.FromInstance(instance, message))

    def after(self, seconds: float) -> list[e.Action]:
        self.now_s += seconds
        return self.do(e.Tick())

    def load(self, instance: str = "i1", version: int = 1) -> list[e.Action]:
        self.say(instance, m.Importing(confinement=""))
        return self.say(instance, m.Loaded(version=version, nbytes=5))

    def arrive(self, request: int = 1, function: str = "f") -> list[e.Action]:
        return self.do(e.Arrived(request, function))

    def run(self, request: int = 1, function: str = "f") -> int:
        """A request all the way into its instance; returns the ticket."""
        ticket = one(self.arrive(request, function), m.Acquire).request
        self.hear(m.Granted(request=ticket, lease=lease(), wake_nbytes=0))
        return int(ticket)

    def state(self, name: str) -> InstanceState:
        return self.policy.picture.instances[name].state


def loaded(*specs: m.FunctionSpec) -> Rig:
    rig = Rig(*(specs or (spec(),)))
    for number in range(len(specs) or 1):
        rig.load(f"i{number + 1}")
    return rig


def said(actions: list[e.Action], kind: type[Any]) -> list[Any]:
    """Messages or actions of ``kind``."""
    found: list[Any] = []
    for action in actions:
        inner = getattr(action, "message", None)
        found += [thing for thing in (action, inner) if isinstance(thing, kind)]
    return found


def one(actions: list[e.Action], kind: type[Any]) -> Any:
    found = said(actions, kind)
    assert len(found) == 1, (kind.__name__, actions)
    return found[0]


def fails_with(actions: list[e.Action], request: int, code: str, status: int) -> None:
    fail = one(actions, e.Fail)
    assert (fail.request, fail.failure.code, fail.failure.status) == (request, code, status)


def damaged() -> m.Failure:
    return m.Failure(code="model_damaged", status=503, text="segment 7", retryable=True)
