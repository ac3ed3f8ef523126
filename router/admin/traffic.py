"""Two versions of a function side by side: serves the second one, gives it its share, and ends it.

core/decisions/requests/splits.py decides the effect of shares, and the version that a request is for.
"""

from collections.abc import Callable
from typing import Any

from msgspec import structs

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import failures, queueing, splits
from dormouse.core.decisions.requests.state import RouterState, ServedFunction
from dormouse.core.names import base_of, beside
from dormouse.router.access.access import Caller
from dormouse.router.admin import options
from dormouse.router.admin.asks import Asks
from dormouse.router.admin.history import History
from dormouse.router.front.exchange import HttpError, refuse
from dormouse.schemas import admin as a
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import FunctionSpec


class Sharing:
    """``may_deploy`` raises HttpError if the caller may not deploy that, or a secret of it is gone; ``forget`` is told
    of versions that are not served any more.
    """

    def __init__(
        self,
        picture: RouterState,
        asks: Asks,
        dispatch: Callable[[e.Event], None],
        history: History,
        may_deploy: Callable[[Caller, FunctionSpec], None],
        forget: Callable[[str], None],
    ) -> None:
        self._picture, self._asks, self._dispatch, self._history = picture, asks, dispatch, history
        self._may_deploy, self._forget = may_deploy, forget

    def next_version(self, name: str) -> int:
        """Of a new deploy: no two things of a function are called the same."""
        return 1 + max((each.spec.version for each in self._history.of(name)), default=0)

    def beside(self, spec: FunctionSpec, share: int) -> FunctionSpec:
        """``spec`` is deployed beside what has its name. Raises ConfigError."""
        served = self._picture.functions.get(spec.name)
        if not 0 <= share < splits.WHOLE:
            raise ConfigError(f"traffic is {share}; write per cent, from 0 to 99, or leave it out: the new one has all")
        if served is None:
            raise ConfigError(
                f"there is no version of {spec.name!r} yet that could share its requests: leave traffic out"
            )
        self._expect_alike(served.spec, spec)
        return structs.replace(spec, name=beside(spec.name, self.next_version(spec.name)))

    def expect_alone(self, spec: FunctionSpec) -> None:
        """``spec`` takes the place of what has its name: is it of the kind of a version beside? Raises ConfigError."""
        for name in splits.besides(self._picture, spec.name):
            if (function := self._picture.functions.get(name)) is not None:
                self._expect_alike(function.spec, spec)

    def _expect_alike(self, served: FunctionSpec, spec: FunctionSpec) -> None:
        kinds = [(each.tenant, options.kind_of(each), each.embedding is None) for each in (served, spec)]
        if kinds[0] != kinds[1]:
            raise ConfigError(
                f"version {served.version} of {base_of(spec.name)!r} is of another tenant or another kind (function, "
                "language model, embeddings, adapter), so the two cannot share requests"
            )

    async def set(self, caller: Caller, act: a.Traffic, audited: dict[str, Any]) -> dict[str, Any]:
        """Raises HttpError. A step that fails changes nothing."""
        name = act.name
        served = self.whole(name).spec
        try:
            wanted = splits.wanted(served.version, act.shares)
            specs = {version: self._kept(caller, served, version) for version in act.shares} | {served.version: served}
        except ConfigError as error:
            raise refuse(400, "bad_request", str(error)) from None
        audited["shares"] = {str(version): share for version, share in act.shares.items()}
        answer: dict[str, Any] = {}
        if served.version != wanted.main:
            answer |= await self._serve(structs.replace(specs[wanted.main], name=name), wanted.main)
        if wanted.beside is not None:
            other = beside(name, wanted.beside)
            if other not in self._picture.functions:
                answer |= await self._serve(structs.replace(specs[wanted.beside], name=other), wanted.beside)
            await self.share(other, wanted.share)
        else:
            await self.end(name)
        return {"name": name, "version": wanted.main, "traffic": self.told(name), **answer}

    async def _serve(self, spec: FunctionSpec, version: int) -> dict[str, str]:
        settled = await self._asks.change(lambda ask: e.DeployAsked(ask, spec, version=version))
        return {"warning": settled.warning} if settled.warning else {}

    async def share(self, name: str, share: int) -> None:
        """This version, which is served beside, gets so much, and others beside the function end. Raises HttpError."""
        answer = await self._asks.share(name, share)
        if answer is None:
            raise HttpError(failures.starting())
        if answer.failure is not None:
            raise HttpError(answer.failure)
        self._dispatch(e.Shared(name, share))
        await self.end(base_of(name), name)

    async def end(self, name: str, but: str = "") -> None:
        """All versions that are served beside this function, or on their way there. Raises HttpError."""
        for each in splits.besides(self._picture, name):
            if each != but:
                await self._asks.change(lambda ask, each=each: e.RemoveAsked(ask, each))  # type: ignore[misc]
                self._forget(each)

    def told(self, name: str) -> dict[str, int]:
        """The share of each version, for JSON."""
        return {str(version): share for version, share in splits.shares(self._picture, name).items()}

    def whole(self, name: str) -> ServedFunction:
        """The function of this name, which is no version's. Raises HttpError."""
        if base_of(name) != name:
            text = f"{name!r} is a version; this is of the function: {base_of(name)}"
            raise refuse(400, "bad_request", text)
        if (function := self._picture.functions.get(name)) is None:
            raise HttpError(queueing.absent(self._picture, name))
        return function

    def _kept(self, caller: Caller, served: FunctionSpec, version: int) -> FunctionSpec:
        """Raises ConfigError, HttpError."""
        name = served.name
        found = [each.spec for each in self._history.of(name) if each.spec.version == version]
        found = [each for each in found if caller.sees(name, each.tenant)]
        if not found:
            kept = ", ".join(str(each.spec.version) for each in self._history.of(name))
            text = f"no version {version} of {name!r} is kept; there are: {kept} (`dormouse history {name}`)"
            raise refuse(404, "unknown_version", text)
        if version != served.version:
            self._expect_alike(served, found[-1])
            other = beside(name, version)
            if other not in self._picture.functions:
                self._may_deploy(caller, structs.replace(found[-1], name=other))
        return found[-1]
