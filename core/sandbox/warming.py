"""Progress of a zygote's imports, in a file of the run directory: the one in progress, and those that are left out.

The file outlives a zygote that an import ends, so that the next one knows which to leave out; the supervisor reads it
to see whether a new start can be better, and for `dormouse up`. The choice of libraries is not made here.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import orjson

from dormouse.core.sandbox.world import ZYGOTE

LONGEST_S: Final = 20.0
"""An import that takes longer than this, time in which it waits for a processor left out, hangs: the slowest of
transformers' takes 3 s on two busy cores."""

STUCK_S: Final = 40.0
"""The same for one that keeps the interpreter's lock: nobody can look then, so whatever the time went to."""

START_ANEW: Final = 75
"""Exit status of a zygote in which an import has failed: modules that it left half made would show in every function.
"""


@dataclass
class Warming:
    """``left_out`` says why, by library; ``role`` is the zygote's."""

    path: Path
    role: str = ZYGOTE
    left_out: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, role: str = ZYGOTE) -> "Warming":
        """The file as the last zygote left it: an import that was in progress has ended that zygote."""
        try:
            found = orjson.loads(path.read_bytes())
        except FileNotFoundError:
            return cls(path, role)
        warming = cls(path, role, found["left_out"])
        if name := found["importing"]:
            hung = time.monotonic() - found["since_s"] >= LONGEST_S
            how = f"its import took longer than {LONGEST_S:g} s" if hung else "its import ended the interpreter"
            warming.left_out[name] = f"{how}; see {role}.err in the node's logs"
        return warming

    def begin(self, name: str) -> None:
        self._write(name)

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out[name] = reason
        self._write("")

    def end(self) -> None:
        self._write("")

    def _write(self, importing: str) -> None:
        data = {"importing": importing, "since_s": time.monotonic(), "left_out": self.left_out}
        temporary = self.path.with_name(f"{self.path.name}.new")
        temporary.write_bytes(orjson.dumps(data))
        temporary.rename(self.path)
