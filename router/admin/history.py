"""Earlier versions of functions, to which they can be rolled back: which there are, and their file beside their
snapshots, ``STATE/functions/NAME/.versions``. Decides which are kept, and nothing about deploys.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from dormouse.core.paths import VERSIONS
from dormouse.schemas.messages import FunctionSpec


class Version(msgspec.Struct, frozen=True):
    """One that is served, or was. ``at`` is when it was deployed, of the Unix clock."""

    at: float
    spec: FunctionSpec


class History:
    """Of all functions: the served version, and at most ``most`` earlier ones. ``tree(name, snapshot)`` is where files
    are; ``log`` is the process's.
    """

    def __init__(self, most: int, tree: Callable[[str, str], Path], log: Any) -> None:
        self._most, self._tree, self._log = most, tree, log
        self._versions: dict[str, list[Version]] = {}  # by function, oldest first; the last one is served

    def restore(self, functions: Iterable[FunctionSpec]) -> None:
        """What is served, as the catalogue has it, and what of earlier versions is still there."""
        for spec in functions:
            found = [each for each in self._read(spec.name) if each.spec.snapshot != spec.snapshot]
            own = [each.at for each in self._read(spec.name) if each.spec == spec]
            earlier = [each for each in found if self._tree(spec.name, each.spec.snapshot).is_dir()]
            keeps = earlier[max(0, len(earlier) - self._most) :] if self._most else []
            self._versions[spec.name] = [*keeps, Version(own[-1] if own else 0.0, spec)]

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
        """Oldest first; the last one is served."""
        return self._versions.get(name, [])

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
        """It is served from now on. Returns what is not kept any more."""
        before = [each for each in self.of(spec.name) if each.spec.snapshot != spec.snapshot]
        gone = before[: max(0, len(before) - self._most)]
        self._versions[spec.name] = [*before[len(gone) :], Version(now_s, spec)]
        try:
            half = self._file(spec.name).with_name(VERSIONS + ".new")
            half.write_bytes(msgspec.json.encode(self._versions[spec.name]))
            half.replace(self._file(spec.name))
        except OSError as error:  # a full disk: it is served, and its earlier versions are known until the next start
            self._log.warning("versions_not_kept", function=spec.name, reason=str(error))
            with suppress(OSError):
                half.unlink(missing_ok=True)
        return [each.spec for each in gone]

    def removed(self, name: str) -> list[FunctionSpec]:
        """The function is gone. Returns what is not kept any more."""
        return [each.spec for each in self._versions.pop(name, [])]
