"""Asks router/access/ whether an act is permitted, and writes the line of the audit log with its outcome."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dormouse.core.audit import Audit
from dormouse.core.decisions.requests import failures, queueing
from dormouse.core.decisions.requests.state import RouterState
from dormouse.router.access import access, tenancy
from dormouse.router.access.access import Caller
from dormouse.router.front.exchange import HttpError, refused
from dormouse.router.front.requests import Requests
from dormouse.schemas import admin as a


@dataclass
class Audited:
    """Facts of an act that are known when its line is written."""

    name: str
    more: dict[str, Any] = field(default_factory=dict)


class Permits:
    """``log`` is the process's."""

    def __init__(self, requests: Requests, picture: RouterState, audit: Audit, log: Any) -> None:
        self._requests, self._picture, self._audit, self._log = requests, picture, audit, log

    def may(self, caller: Caller, act: a.Act) -> None:
        if (refusal := access.permit(caller, act)) is not None:
            raise refused(refusal)

    async def may_informed(self, caller: Caller, act: a.Act) -> None:
        """For acts whose answer the catalogue decides. Raises HttpError."""
        self.may(caller, act)
        if not await self._requests.knows_catalogue():  # what lies there may be a function's, or nobody's
            raise HttpError(failures.starting())

    async def may_on(self, caller: Caller, act: a.Act, name: str) -> None:
        """For acts on a function. Of what it may not know of, a caller is told what it would be told if there were no
        such thing. Raises HttpError.
        """
        await self.may_informed(caller, act)
        if not tenancy.sees(caller, self._picture, name):
            raise HttpError(queueing.absent(self._picture, name))

    @contextmanager
    def audited(self, caller: Caller, act: a.Act, name: str) -> Iterator[Audited]:
        """Writes the act's line when it has ended, however."""
        audited = Audited(name)
        outcome = "unknown"  # the node was stopped meanwhile
        try:
            yield audited
            outcome = "ok"
        except HttpError as error:
            outcome = error.failure.code
            raise
        finally:
            self.write(caller, access.act_of(act), audited.name, outcome, **audited.more)

    def write(self, caller: Caller, act: access.Act, name: str, outcome: str, **more: Any) -> None:
        """One line; ``outcome``: "ok", or the code of the refusal."""
        whose: dict[str, Any] = {"uid": caller.uid} if caller.uid is not None else {"tenant": caller.tenant}
        self._audit.write(caller.name, caller.origin, act.value, name, outcome, **whose, **more)
        if (trouble := self._audit.trouble) is not None:
            self._log.error("audit_log_lost_a_line", trouble=trouble)
