"""A runtime's state of its turn: whether it has it, until when, and its reports on it. Pure."""

from collections import deque

from dormouse.schemas import messages as m


class RuntimeTurn:
    """``held``: it may compute; ``lent``: in another's turn. ``stepped``, ``told_idle``: it has in this turn.
    ``wants``: it has asked for a turn, without one.
    """

    def __init__(self) -> None:
        self.held = self.lent = self.stepped = self.told_idle = self.wants = False
        self._ends = False
        self._brief_until_s = 0.0

    def begins(self, brief_ms: int, now_s: float, lent: bool = False) -> None:
        self.held, self.lent, self._brief_until_s = True, lent, now_s + brief_ms / 1000
        self.stepped = self.told_idle = self.wants = self._ends = False

    def ends(self) -> None:
        """It is over, but for its first step."""
        self._ends = True

    def over(self, ready: bool) -> bool:
        """Whether it is to be given back. ``ready``: there is something to compute."""
        return self._ends and (self.stepped or not ready)

    def over_by(self, heard: deque[m.ExecutorToRuntime]) -> bool:
        """Whether it is to be given back by the messages received in its step: it ends, and no other one begins after
        it. Takes that message out.
        """
        turns = [each for each in heard if isinstance(each, m.TurnEnds | m.TurnBegins)]
        if len(turns) == 1 and isinstance(turns[0], m.TurnEnds):
            heard.remove(turns[0])
            return True
        return self._ends and not turns

    def given_back(self, wants: bool) -> None:
        self.held = self._ends = False
        self.wants = wants

    def brief(self, now_s: float) -> bool:
        """Whether a step that begins now is to be."""
        return now_s < self._brief_until_s
