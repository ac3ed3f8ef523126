"""Whom functions may call in the end, by what their deploys say: pure. Calls go one way, or each of two functions could
wait for the other, with all of its instances.
"""

from collections.abc import Iterator

from dormouse.core.decisions.requests import splits
from dormouse.core.decisions.requests.state import RouterState
from dormouse.core.names import base_of
from dormouse.schemas import messages as m


def serves(p: RouterState, name: str, tenant: str) -> bool:
    """Whether a function of this tenant is served under that name: those of others are not there."""
    function = p.functions.get(name)
    return function is not None and function.spec.tenant == tenant


def way(p: RouterState, tenant: str, start: str, goal: str) -> list[str]:
    """From one function to another, both included, over what each may call; none if there is none."""
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
    """The circle that would be there with this one; none if there would be none."""
    own = base_of(spec.name)
    ways = (way(p, spec.tenant, name, own) for name in spec.calls)
    return next(([own, *found] for found in ways if found), [])


def _called(p: RouterState, tenant: str, name: str) -> Iterator[str]:
    """By any of its versions that are served."""
    for each in (name, *splits.besides(p, name)):
        if serves(p, each, tenant):
            yield from p.functions[each].spec.calls
