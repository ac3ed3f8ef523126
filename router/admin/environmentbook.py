"""The environments and builds of a node, their holders, and the tenants that have room for more: pure.

A build, and the environment that comes of it::

    state      it waits for                             what comes next
    WAITING    its tenant's turn                        BUILDING
    BUILDING   pip, and the takeover of its output      HELD, or nothing: why there is none
    HELD       the deploys that claim it                KEPT, or IDLE
    KEPT       the versions of functions that have it   HELD, or IDLE
    IDLE       nobody                                   HELD, or it goes

An environment counts, with all its bytes, for each tenant that has or claims it. So the room of a tenant does not
depend on that of others, but for the bound of all of them together.
"""

from collections.abc import Iterable, Mapping, Set
from enum import Enum, auto
from typing import Final

import msgspec

from dormouse.core.quantities import size, sizes
from dormouse.router.admin.turns import BuildTurns
from dormouse.router.front.exchange import HttpError, refuse

MAX_ASKED: Final = 64
"""Ways to ask for one environment that are remembered, the latest."""


class EnvironmentState(Enum):
    """See the module."""

    WAITING = auto()
    BUILDING = auto()
    HELD = auto()
    KEPT = auto()
    IDLE = auto()


class EnvironmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``lock``: all that is in it, with hashes. ``names``: of its modules. ``asked``: hashes of what led to it."""

    lock: list[str]
    names: list[str]
    python: str
    torch: str
    nbytes: int
    asked: list[str]


class Claim:
    """A deploy's. ``key``: of its environment; "" before that is there, and where the node's own has all."""

    def __init__(self, tenant: str) -> None:
        self.tenant, self.key = tenant, ""
        self.build: EnvironmentBuild | None = None  # what it waits for, or has waited for


class EnvironmentBuild:
    """One that waits or runs."""

    def __init__(self, asked: str) -> None:
        self.asked, self.state = asked, EnvironmentState.WAITING
        self.claims: set[Claim] = set()


class Environment:
    """One that is there."""

    def __init__(self, record: EnvironmentRecord) -> None:
        self.record = record
        self.claims: set[Claim] = set()
        self.tenants: Set[str] = frozenset()  # of the versions that have it

    @property
    def state(self) -> EnvironmentState:
        return (
            EnvironmentState.HELD if self.claims else EnvironmentState.KEPT if self.tenants else EnvironmentState.IDLE
        )

    def counts_for(self, tenant: str) -> bool:
        return tenant in self.tenants or any(claim.tenant == tenant for claim in self.claims)


class EnvironmentBook:
    """``most_nbytes``: of all together; ``tenant_nbytes``: of those of one tenant."""

    def __init__(self, most_nbytes: int, tenant_nbytes: int) -> None:
        self.environments: dict[str, Environment] = {}  # by key
        self.builds: dict[str, EnvironmentBuild] = {}  # by what is asked for
        self._most_nbytes, self._tenant_nbytes = most_nbytes, tenant_nbytes
        self._turns = BuildTurns()

    # --- deploys

    def claim(self, asked: str, tenant: str, versions: tuple[str, str]) -> Claim:
        """Of an environment that is there, made for these versions of Python and torch, or of a build, which may be
        new. Raises HttpError.
        """
        claim = Claim(tenant)
        for key, found in self.environments.items():
            if asked in found.record.asked and (found.record.python, found.record.torch) == versions:
                more_nbytes = 0 if found.counts_for(tenant) else found.record.nbytes
                if more_nbytes and (failure := self.tenant_full(tenant, more_nbytes)) is not None:
                    raise failure
                claim.key = key
                found.claims.add(claim)
                return claim
        if (failure := self.tenant_full(tenant, 1)) is not None:  # whatever comes of a build would be too much
            raise failure
        if (build := self.builds.get(asked)) is None:
            if not self._turns.has_room(tenant):
                raise refuse(429, "queue_full", "many environments are being built; deploy again later")
            self._turns.add(tenant, asked)
            build = self.builds[asked] = EnvironmentBuild(asked)
        build.claims.add(claim)
        claim.build = build
        return claim

    def release(self, claim: Claim) -> None:
        """Its deploy has ended, however."""
        if claim.build is not None:
            claim.build.claims.discard(claim)
        if (found := self.environments.get(claim.key)) is not None:
            found.claims.discard(claim)

    def tenant_full(self, tenant: str, more_nbytes: int = 0) -> HttpError | None:
        """Why this tenant cannot have what it has and claims, and so many bytes more, or what may become more."""
        nbytes = more_nbytes + _sum(each for each in self.environments.values() if each.counts_for(tenant))
        if nbytes <= self._tenant_nbytes:
            return None
        has, may_have = sizes(nbytes, self._tenant_nbytes)
        text = (
            f"the libraries of tenant {tenant!r} would have at least {has} with those of this deploy, and "
            f"may have {may_have} ([environments] tenant_store); remove functions, or require less"
        )
        return refuse(507, "environments_full", text)

    def store_full(self, more_nbytes: int) -> HttpError | None:
        """Why there can be no more, for whomever."""
        if _sum(self.environments.values()) + more_nbytes <= self._most_nbytes:
            return None
        text = (
            f"the libraries of all functions of this node may have {size(self._most_nbytes)} ([environments] store), "
            "and there is not enough room; remove functions, or have whoever runs the node raise it"
        )
        return refuse(507, "environments_full", text)

    # --- builds

    def next(self) -> EnvironmentBuild | None:
        """The one that runs from now on; None if one runs, or none waits."""
        while (asked := self._turns.next()) is not None:
            if (build := self.builds.get(asked)) is not None:
                build.state = EnvironmentState.BUILDING
                return build
            self._turns.ended()  # it was over before its turn came
        return None

    def built(self, build: EnvironmentBuild, key: str, record: EnvironmentRecord) -> EnvironmentRecord:
        """Its claims hold the environment from now on. Returns the record to keep."""
        if (found := self.environments.get(key)) is None:
            found = self.environments[key] = Environment(record)
        asked = [build.asked, *(each for each in found.record.asked if each != build.asked)]
        found.record = msgspec.structs.replace(record, asked=asked[:MAX_ASKED])
        for claim in build.claims:
            claim.key = key
        found.claims |= build.claims
        return found.record

    def ended(self, build: EnvironmentBuild) -> None:
        """It is over, whatever came of it."""
        del self.builds[build.asked]
        if build.state is EnvironmentState.BUILDING:
            self._turns.ended()

    # --- kept environments

    def known(self, key: str, record: EnvironmentRecord) -> None:
        """It was there when the router started."""
        self.environments[key] = Environment(record)

    def kept(self, tenants: Mapping[str, Set[str]]) -> None:
        """``tenants``, by key: of the versions of functions that have it, and of instances."""
        for key, found in self.environments.items():
            found.tenants = tenants.get(key, frozenset())

    def idle(self) -> list[str]:
        """Those that nobody has: they are not there any more."""
        keys = [key for key, found in self.environments.items() if found.state is EnvironmentState.IDLE]
        for key in keys:
            del self.environments[key]
        return keys


def _sum(environments: Iterable[Environment]) -> int:
    return sum(each.record.nbytes for each in environments)
