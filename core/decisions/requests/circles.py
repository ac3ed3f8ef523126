"""Functions reachable by calls, as far as deploys permit them: pure. Calls go one way, or each of two functions could
wait for the other, with all of its instances.
"""

from collections.abc import Iterator

from dormouse.core.decisions.requests import splits
from dormouse.core.decisions.requests.state import RouterState
from dormouse.core.names import base_of
from dormouse.schemas import messages as m


def serves(p: RouterState, name: str, tenant: str) -> bool:
    """Whether a function of this tenant is served under that name: other tenants' functions do not count."""
    function = p.functions.get(name)
    return function is not None and function.spec.tenant == tenant


def way(p: RouterState, tenant: str, start: str, goal: str) -> list[str]:
    """A chain of permitted calls from one function to another, both included; empty if there is none."""
    ways, seen = [[start]], {start}
    for found in ways:  # which grows: the shortest comes first
        if found[-1] == goal:
            return found
        for name in _called(p, tenant, found[-1]):
            if name not in seen:
                seen.add(name)
                ways.append([*found, name])
    return []


def closed(p: RouterState, spec: m.FunctionSpec) -> list[str]:
    """The circle that this one would close; empty if none."""
    own = base_of(spec.name)
    ways = (way(p, spec.tenant, name, own) for name in spec.calls)
    return next(([own, *found] for found in ways if found), [])


def _called(p: RouterState, tenant: str, name: str) -> Iterator[str]:
    """Functions that any of its served versions may call."""
    for each in (name, *splits.besides(p, name)):
        if serves(p, each, tenant):
            yield from p.functions[each].spec.calls
