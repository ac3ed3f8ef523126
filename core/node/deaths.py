"""Decides the consequence of a process's death for its node: it is started again alone, all are started anew, or the
node ends. Pure: no I/O, no clock.

Knows which roles are down and why; the supervisor acts on it.
"""

from collections.abc import Collection
from dataclasses import dataclass

from dormouse.core.node.restarts import RESTARTS, WINDOW_S, Restarts
from dormouse.core.node.roles import ALONE, ON_DEMAND, kind
from dormouse.core.sandbox.world import ZYGOTE


@dataclass(frozen=True)
class StartAlone:
    """Nothing of the others refers to what it held."""

    pause_s: float


@dataclass(frozen=True)
class StartAll:
    """The others refer to what it held."""


@dataclass(frozen=True)
class EndNode:
    """The node cannot go on."""

    text: str


class Deaths:
    """``roles`` from the start; ``worlds``: all that are zygotes, also those that are asked for later."""

    def __init__(self, roles: Collection[str], worlds: Collection[str]) -> None:
        self.down: dict[str, str] = {}  # why roles could not start, until they are ready
        self.ended: dict[str, tuple[int, float]] = {}  # how often roles have died that were ready, and when at last
        self.left: dict[str, tuple[int, float]] = {}  # likewise, of those that ended in order, as they were told to
        self.was_ready = False  # the node
        self._worlds = worlds
        self._gpus = [role for role in roles if kind(role) == "gpu"]
        self._restarts = Restarts(roles)

    def add(self, role: str) -> None:
        """One more role, that was asked for."""
        self._restarts.add(role)

    def forget(self, role: str) -> None:
        """Nobody wants it for now: that it does not start is nobody's trouble."""
        self.down.pop(role, None)

    def ready(self, role: str) -> None:
        self.down.pop(role, None)
        self._restarts.ready(role)

    def died(
        self,
        role: str,
        why: str,
        *,
        ready: bool,
        blamed: bool,
        all_start: bool,
        now_s: float,
        in_order: bool = False,
    ) -> StartAlone | StartAll | EndNode:
        """One that was ``ready``, or could not be started. ``blamed``: of a command, for which its role is not to
        blame. ``all_start``: they are being started anew already. ``in_order``: an executor that was told to make room
        for one with another pool has, and that is no death.
        """
        on_purpose = in_order and ready and kind(role) == "gpu"
        if ready and not all_start:
            kept = self.left if on_purpose else self.ended
            times, _ = kept.get(role, (0, 0.0))
            kept[role] = times + 1, now_s
        if on_purpose and not all_start:
            return StartAlone(0.0)
        if not ready and not blamed:
            self._restarts.failed(role)
            self.down[role] = why
        if not self.was_ready and not blamed and not self._can_start_without(role):
            failed = self.down | {role: why}
            return EndNode("; ".join(f"{each} did not start: {failed[each]}" for each in sorted(failed)))
        if all_start:
            return StartAll()
        if kind(role) in ALONE:
            return StartAlone(0.0 if blamed else self._restarts.died(role, now_s))
        if self._restarts.too_many(role, now_s):
            return EndNode(f"{role} died {RESTARTS + 1} times within {WINDOW_S:g} s: {why}")
        self._restarts.died(role, now_s)
        return StartAll()

    def _can_start_without(self, role: str) -> bool:
        """A broken GPU, or one that others have filled, keeps no other from work; nor does a world, but for one, or
        what was asked for later.
        """
        if role in ON_DEMAND:
            return True
        if role in self._worlds:
            return role != ZYGOTE
        return role in self._gpus and any(gpu not in self.down for gpu in self._gpus)
