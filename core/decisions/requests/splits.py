"""Two versions of a function side by side: the choice of a request's version, and the meaning of shares. Pure.

Version 4 of `mood` that is served beside the one that has the name is a function `mood@4`: it has a queue, instances,
a model, alarms and numbers of its own, and its life is that of any function. Only this module knows that it is more.
"""

from collections.abc import Mapping
from typing import NamedTuple

from dormouse.core.decisions.requests.state import RouterState, ServedFunction, Split
from dormouse.core.names import base_of, beside
from dormouse.schemas.errors import ConfigError

WHOLE = 100
"""Shares are per cent."""


def named(p: RouterState, name: str) -> str:
    """The function that a name means: `mood@3` is `mood`, as long as this is its version 3."""
    function = p.functions.get(base_of(name))
    if name in p.functions or function is None or name != beside(base_of(name), function.spec.version):
        return name
    return base_of(name)


def picked(p: RouterState, name: str) -> str:
    """The function that answers the next request to this name: the version that the name states, if it does. Of any
    hundred other requests in a row, the version beside has exactly its share, evenly spread; none while it is in
    quarantine, or cannot be loaded.
    """
    if base_of(name) != name:
        return named(p, name)
    split = p.splits.get(name)
    if split is None or not _answers(p.functions[split.name]):
        return name
    split.due += split.share
    if split.due < WHOLE:
        return name
    split.due -= WHOLE
    return split.name


def _answers(function: ServedFunction) -> bool:
    return not function.quarantine and (function.failure is None or function.instance is not None)


def shares(p: RouterState, name: str) -> dict[int, int]:
    """The share of each version of a function, by version, that of its name first."""
    split, function = p.splits.get(name), p.functions.get(name)
    if function is None:
        return {}
    beside = {} if split is None else {p.functions[split.name].spec.version: split.share}
    return {function.spec.version: WHOLE - sum(beside.values())} | beside


def besides(p: RouterState, name: str) -> list[str]:
    """All versions of a function that are served beside it, or on their way there."""
    return sorted(each for each in {*p.functions, *p.changes} if each != name and base_of(each) == name)


def changing(p: RouterState, name: str) -> str | None:
    """The version of its function that is being changed: of all versions together, one change at a time."""
    return next((each for each in p.changes if base_of(each) == base_of(name)), None)


# --- changes


def restore(p: RouterState, traffic: Mapping[str, int]) -> None:
    """Takes over the catalogue's shares."""
    names = sorted((name for name in p.functions if base_of(name) != name), key=lambda name: traffic.get(name, 0))
    p.splits = {base_of(name): Split(name, traffic.get(name, 0)) for name in names}


def begun(p: RouterState, name: str) -> None:
    """This is served from now on; beside another version, it has no share yet."""
    if base_of(name) != name:
        p.splits[base_of(name)] = Split(name)


def shared(p: RouterState, name: str, share: int) -> None:
    if (split := p.splits.get(base_of(name))) is not None and split.name == name:
        split.share, split.due = share, 0


def ended(p: RouterState, name: str) -> None:
    if (split := p.splits.get(base_of(name))) is not None and split.name == name:
        del p.splits[base_of(name)]


class WantedShares(NamedTuple):
    """``main`` has the function's name; ``beside`` is served, too, if there is any, and has so many per cent."""

    main: int
    beside: int | None
    share: int


def wanted(current: int, asked: Mapping[int, int]) -> WantedShares:
    """Shares that `3=90 4=10` asks for, where ``current`` has the name: the rest of the whole is its. A version with
    the whole has the name from then on. Raises ConfigError.
    """
    if not asked:
        raise ConfigError("no version is named; write a version and its share in per cent, such as 4=10")
    said = dict(asked)
    if wrong := [share for share in said.values() if not 0 <= share <= WHOLE]:
        raise ConfigError(f"a share is {wrong[0]}; write per cent, a whole number from 0 to {WHOLE}")
    rest = WHOLE - sum(said.values())
    if current not in said and rest > 0:
        said[current], rest = rest, 0
    if rest:
        shown = " + ".join(str(share) for share in asked.values())
        raise ConfigError(f"the shares are {shown} = {sum(asked.values())} per cent; write shares that make {WHOLE}")
    if len(said) > 2:
        raise ConfigError("at most two versions share a function's requests; leave one out")
    main = next((version for version, share in said.items() if share == WHOLE), current)
    if main not in said:
        raise ConfigError(f"version {current} is what the name stands for: give it a share, or another version all")
    other = next((version for version in said if version != main), None)
    return WantedShares(main, other, 0 if other is None else said[other])
