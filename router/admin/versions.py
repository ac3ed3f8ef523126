"""Folders and libraries of deployed versions on the disk: kept while a version is served or can be rolled back to, and
removed once no instance has them either. Builds and deploys under way hold their own.
"""

import time
from collections.abc import Callable, Iterable

from dormouse.core.decisions.requests.state import RouterState
from dormouse.core.names import base_of
from dormouse.router.admin.environments import Environments
from dormouse.router.admin.history import History
from dormouse.router.admin.keeper import Keeper
from dormouse.schemas.messages import FunctionSpec


class KeptVersions:
    """``in_use`` returns the snapshots that instances have."""

    def __init__(
        self,
        history: History,
        keeper: Keeper,
        environments: Environments,
        picture: RouterState,
        in_use: Callable[[], set[str]],
    ) -> None:
        self._history, self._keeper, self._environments = history, keeper, environments
        self._picture, self._in_use = picture, in_use

    def restore(self, functions: Iterable[FunctionSpec]) -> None:
        """These are what the catalogue has; all else on the disk is a stray."""
        self._history.restore(functions)
        self._remove_environments()
        self._keeper.remove_strays(self._history.snapshots())
        self._keeper.count(self._history.tenants())

    def tenant_of(self, name: str) -> str | None:
        """Of the version that is served; None if there is none."""
        versions = self._history.of(name)
        return versions[-1].spec.tenant if versions else None

    def deployed(self, spec: FunctionSpec) -> None:
        self._discard(self._history.deployed(spec, time.time()))

    def discarded(self, spec: FunctionSpec) -> None:
        """It was not deployed after all, is not served beside another any more, and may be again, or its function is
        removed: then with all its versions.
        """
        gone = [spec]
        if base_of(spec.name) != spec.name:
            self._history.left(spec)
        elif spec.name not in self._picture.functions:
            gone += self._history.removed(spec.name)
        self._discard(each for each in gone if not self._history.has(each))

    def _discard(self, specs: Iterable[FunctionSpec]) -> None:
        for spec in specs:
            self._keeper.discard(spec)
        self.remove_unused()

    def remove_unused(self) -> None:
        """An instance has gone, or a version."""
        self._keeper.remove_unused(self._in_use())
        self._remove_environments()

    def _remove_environments(self) -> None:
        specs = [each.spec for name in self._history.names() for each in self._history.of(name)]
        specs += [instance.spec for instance in self._picture.instances.values()]
        tenants: dict[str, set[str]] = {}
        for spec in specs:
            tenants.setdefault(spec.environment, set()).add(spec.tenant)
        self._environments.remove_unused(tenants)
