"""torch's global settings of numerics in an executor: those of the instance that computes, otherwise the defaults."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from dormouse.gpuserver.commands.definitions import ProtocolViolation, brief
from dormouse.gpuserver.commands.storages import CommandFailed, StorageFailure
from dormouse.schemas.numerics import SETTINGS, Setting

_C: Any = torch._C


@dataclass(frozen=True)
class _TorchSetting:
    """A setting of this torch, with its setter as it was at the start."""

    setting: Setting
    default: list[Any]
    setter: Callable[..., None]

    def set(self, values: list[Any]) -> None:
        self.setting.call(self.setter, values)


class ExecutorNumerics:
    """The settings of this process, as torch has them; there is one object for all instances."""

    def __init__(self) -> None:
        self._known = {
            setting.name: _TorchSetting(setting, default, getattr(_C, setting.setter))
            for setting in SETTINGS
            if (default := setting.current(_C)) is not None
        }
        self._changed = False

    def check(self, name: Any, values: Any) -> None:
        """Raises ProtocolViolation for an unknown setting, or for values that it does not take."""
        known = self._known.get(name) if isinstance(name, str) else None
        if known is None or not known.setting.takes(values):
            raise ProtocolViolation(f"{brief(name)} is no setting of numerics that takes {brief(values)}")

    def apply(self, settings: Mapping[str, list[Any]]) -> None:
        """In their order, after :meth:`check`. Raises CommandFailed for a value that torch refuses nevertheless."""
        self._changed = self._changed or bool(settings)
        for name, values in settings.items():
            try:
                self._known[name].set(values)
            except (RuntimeError, TypeError, ValueError) as error:
                raise CommandFailed(StorageFailure("RuntimeError", f"setting {name}: {error}")) from error

    def restore(self) -> None:
        """Nobody computes any more."""
        if self._changed:
            for known in self._known.values():
                known.set(known.default)
            self._changed = False


NUMERICS: Final = ExecutorNumerics()
