"""The settings of numerics that this process has changed (`torch.backends.cuda.matmul.allow_tf32` and others): they
affect a request's results, so they are sent to executors.
"""

from collections.abc import Iterator
from typing import Any, Final

from dormouse.schemas import stream as wire
from dormouse.schemas.numerics import SETTINGS, Setting


class InstanceNumerics:
    """The last value of each setting, in the order of setting, because one setting may change others. ``changes``
    counts them.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._values: dict[str, tuple[int, list[Any]]] = {}  # by name: the number of the change, values

    def set(self, setting: Setting, values: list[Any]) -> None:
        """Note a call of the setting's setter. Values that no command can carry are left out: torch has taken them."""
        if setting.takes(values):
            self._values.pop(setting.name, None)
            self.changes += 1
            self._values[setting.name] = self.changes, values

    def notice(self, torch_c: Any) -> None:
        """Take in settings from before this began to watch."""
        for setting in SETTINGS:
            if (values := setting.current(torch_c)) is not None and values != setting.default:
                self.set(setting, values)

    def since(self, known: int) -> Iterator[tuple[int, str, list[Any]]]:
        """The commands for an executor that knows the first ``known`` changes."""
        for name, (change, values) in self._values.items():
            if change > known:
                yield wire.SET, name, values


NUMERICS: Final = InstanceNumerics()
"""Of this process, as torch has them."""
