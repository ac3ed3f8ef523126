"""Tenants' secrets: the callers that may list, set and remove them, and the values that an instance receives.
core/secretfile.py keeps them.

A secret belongs to a whole tenant, so a key that is for some functions alone may neither set nor use any: it could have
every one printed.
"""

import asyncio
import fcntl
import os
import time
from collections import Counter
from typing import Any, Final

import orjson

from dormouse.core.decisions.requests.state import OpenDeploy, RouterState
from dormouse.core.secretfile import SecretFile, unknown
from dormouse.router.access.access import Caller
from dormouse.router.admin.filechanges import FileChanges, told
from dormouse.router.front.exchange import refuse
from dormouse.schemas import admin as a
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import FunctionSpec

_F_SEAL_FUTURE_WRITE: Final = 0x10  # not in Python 3.11's fcntl
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
"""Nothing has it mapped, so it can never be written again. F_SEAL_WRITE does the same, but waits up to 150 ms for what
the kernel itself may have a page for, and then fails with EBUSY.
"""


class Vault:
    """``picture`` has the functions that there are."""

    def __init__(self, file: SecretFile, picture: RouterState, changes: FileChanges) -> None:
        self._file, self._picture, self._changes = file, picture, changes
        self._leaving: Counter[tuple[str, str]] = Counter()  # removals under way, by tenant and name

    def counts(self) -> dict[str, int]:
        """How many there are, by tenant; of an unreadable file none, and a query for one is told why."""
        try:
            return Counter(each.tenant for each in self._file.all())
        except ConfigError:
            return {}

    async def call(self, caller: Caller, act: a.Secrets | a.SetSecret | a.RemoveSecret) -> Any:
        """Raises HttpError."""
        tenant = self._tenant(caller, act.tenant, act)
        match act:
            case a.Secrets():
                with told("secrets"):
                    found = [each for each in self._file.all() if tenant in ("", each.tenant)]
                rows = [each.shown() | {"functions": self._users(each.tenant, each.name)} for each in found]
                return {"secrets": sorted(rows, key=lambda row: (row["tenant"], row["name"]))}
            case a.SetSecret(name=name, value=value):
                await self._changes.make("secrets", self._file.set, tenant, name, value, caller.name, time.time())
                return {"set": name, "tenant": tenant, "functions": self._users(tenant, name)}
            case a.RemoveSecret(name=name):
                if users := self._users(tenant, name):
                    text = f"{name!r} is used by {', '.join(users[:5])}; deploy these without it, or remove them"
                    raise refuse(409, "secret_used", text)
                await asyncio.shield(self._remove(tenant, name))  # a departed caller has asked for it all the same
                return {"removed": name, "tenant": tenant}

    async def _remove(self, tenant: str, name: str) -> None:
        """Raises HttpError. No function that is deployed meanwhile is given it."""
        self._leaving[tenant, name] += 1
        try:
            removed = await self._changes.make("secrets", self._file.remove, tenant, name)
        finally:
            self._leaving[tenant, name] -= 1
            self._leaving += Counter()  # those that are 0 go
        if not removed:
            text = f"tenant {tenant!r} has no secret {name!r}; `dormouse secret ls` says which there are"
            raise refuse(404, "unknown_secret", text)

    def may_use(self, caller: Caller, spec: FunctionSpec) -> None:
        """Whether the caller may deploy a function with these secrets, which are all there. Raises HttpError."""
        if not spec.secrets:
            return
        self._whole(caller)
        self.has(spec)

    def has(self, spec: FunctionSpec) -> None:
        """Raises HttpError if one of them is missing."""
        with told("secrets"):
            names = self._file.names(spec.tenant) if spec.secrets else set()
        for name in spec.secrets:
            if name not in names or (spec.tenant, name) in self._leaving:
                raise refuse(400, "unknown_secret", unknown(name, spec.tenant))

    def values(self, spec: FunctionSpec) -> dict[str, str]:
        """The secrets of an instance. Raises ConfigError."""
        for name in spec.secrets:
            if (spec.tenant, name) in self._leaving:
                raise ConfigError(unknown(name, spec.tenant))
        return self._file.values(spec.tenant, spec.secrets)

    def _tenant(self, caller: Caller, tenant: str, act: a.Act) -> str:
        """The tenant whose secrets are meant; "" for all. Raises HttpError."""
        self._whole(caller)
        if caller.tenant is None:
            return tenant or ("" if isinstance(act, a.Secrets) else a.Settings().tenant)
        if tenant not in ("", caller.tenant):
            raise refuse(403, "forbidden", f"this key is for tenant {caller.tenant!r} only; leave the tenant out")
        return caller.tenant

    def _whole(self, caller: Caller) -> None:
        if caller.functions != ("*",):
            names = " or ".join(caller.functions)
            text = f"this key is for functions called {names}; secrets are of a whole tenant: use a key for all of it"
            raise refuse(403, "forbidden", text)

    def _users(self, tenant: str, name: str) -> list[str]:
        """Also those that are being deployed."""
        specs = [function.spec for function in self._picture.functions.values()]
        specs += [change.spec for change in self._picture.changes.values() if isinstance(change, OpenDeploy)]
        return sorted({spec.name for spec in specs if spec.tenant == tenant and name in spec.secrets})


def variables_file(spec: FunctionSpec, secrets: dict[str, str]) -> int:
    """A sealed file in memory of all variables of an instance, which its zygote hands on unread; -1 if there are none.
    Raises OSError.
    """
    if not spec.env and not secrets:
        return -1
    fd = os.memfd_create("dormouse-variables", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(orjson.dumps(dict(spec.env) | secrets))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd
