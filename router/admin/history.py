"""Earlier versions of functions, to which they can be rolled back, and their file beside their snapshots,
``STATE/functions/NAME/.versions``. Decides which versions are kept, and nothing about deploys.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from dormouse.core.names import base_of
from dormouse.core.paths import VERSIONS
from dormouse.schemas.messages import FunctionSpec


class Version(msgspec.Struct, frozen=True):
    """One that is served, or was. ``at`` is when it was deployed, of the Unix clock; ``named``: it has, or has had, the
    function's name, and not a part of its requests alone.
    """

    at: float
    spec: FunctionSpec
    named: bool = True


class History:
    """Of all functions: the served version, those that are served beside it, and at most ``most`` others.
    ``tree(name, snapshot)`` is where files are; ``log`` is the process's.
    """

    def __init__(self, most: int, tree: Callable[[str, str], Path], log: Any) -> None:
        self._most, self._tree, self._log = most, tree, log
        self._versions: dict[str, list[Version]] = {}  # by function, oldest first; the last one has its name
        self._beside: dict[str, set[str]] = {}  # by function: snapshots of those that are served beside it

    def restore(self, functions: Iterable[FunctionSpec]) -> None:
        """The served versions, as the catalogue has them, and the earlier ones that are still there."""
        served: dict[str, list[FunctionSpec]] = {}
        for spec in functions:
            served.setdefault(base_of(spec.name), []).append(spec)
        for name, specs in served.items():
            specs.sort(key=lambda spec: spec.name == name)
            known = self._read(name)
            held = {spec.snapshot for spec in specs}
            found = [each for each in known if each.spec.snapshot not in held]
            earlier = [each for each in found if self._tree(name, each.spec.snapshot).is_dir()]
            keeps = earlier[max(0, len(earlier) - self._most) :] if self._most else []
            self._versions[name] = [*keeps, *(_restored(known, name, spec) for spec in specs)]
            self._beside[name] = {spec.snapshot for spec in specs if spec.name != name}

    def _read(self, name: str) -> list[Version]:
        try:
            return msgspec.json.decode(self._file(name).read_bytes(), type=list[Version])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:  # of another version of Dormouse, or damaged
            self._log.warning("versions_not_read", function=name, reason=str(error))
            return []

    def _file(self, name: str) -> Path:
        return self._tree(name, VERSIONS)

    def of(self, name: str) -> list[Version]:
        """Oldest first; the last one has the name."""
        return self._versions.get(base_of(name), [])

    def names(self) -> list[str]:
        return list(self._versions)

    def has(self, spec: FunctionSpec) -> bool:
        """Whether its snapshot is needed."""
        return any(each.spec.snapshot == spec.snapshot for each in self.of(spec.name))

    def snapshots(self) -> list[tuple[str, str]]:
        """``(name, snapshot)`` of all."""
        return [(name, each.spec.snapshot) for name, versions in self._versions.items() for each in versions]

    def tenants(self) -> list[tuple[str, str, str]]:
        """``(name, snapshot, tenant)`` of all."""
        versions = [(name, each.spec) for name, versions in self._versions.items() for each in versions]
        return [(name, spec.snapshot, spec.tenant) for name, spec in versions]

    def deployed(self, spec: FunctionSpec, now_s: float) -> list[FunctionSpec]:
        """It is served from now on. Returns the versions that are not kept any more."""
        name, beside = base_of(spec.name), self._beside.setdefault(base_of(spec.name), set())
        rest = [each for each in self.of(name) if each.spec.snapshot != spec.snapshot]
        if name == spec.name:
            versions = [*rest, Version(now_s, spec)]
        else:
            beside.add(spec.snapshot)
            named = any(each.named for each in self.of(name) if each.spec.snapshot == spec.snapshot)
            versions = [*rest[:-1], Version(now_s, structs.replace(spec, name=name), named), *rest[-1:]]
        earlier = [each for each in versions[:-1] if each.spec.snapshot not in beside]
        gone = earlier[: max(0, len(earlier) - self._most)]
        versions = self._versions[name] = [each for each in versions if each not in gone]
        try:
            half = self._file(name).with_name(VERSIONS + ".new")
            half.write_bytes(msgspec.json.encode(versions))
            half.replace(self._file(name))
        except OSError as error:  # a full disk: it is served, and its earlier versions are known until the next start
            self._log.warning("versions_not_kept", function=name, reason=str(error))
            with suppress(OSError):
                half.unlink(missing_ok=True)
        return [each.spec for each in gone]

    def left(self, spec: FunctionSpec) -> None:
        """It is not served beside its function any more: one of the earlier versions."""
        self._beside.get(base_of(spec.name), set()).discard(spec.snapshot)

    def removed(self, name: str) -> list[FunctionSpec]:
        """The function is gone. Returns the versions that are not kept any more."""
        self._beside.pop(name, None)
        return [each.spec for each in self._versions.pop(name, [])]


def _restored(known: list[Version], name: str, spec: FunctionSpec) -> Version:
    """``known``: the content of the file."""
    own = structs.replace(spec, name=name)
    found = [each for each in known if each.spec == own]
    return found[-1] if found else Version(0.0, own, spec.name == name)
