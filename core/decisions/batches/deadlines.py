"""Deadlines of the first tokens of a runtime's sequences: pure. The controller sends the wanted times, by lease.

The time that a sequence waited before its runtime received it is reported by its instance, and cannot be checked here.
It counts up to the function's own wanted time: so a false report moves a deadline no further than a shorter wanted time
would.
"""

from dormouse.core.decisions.batches.batch import Sequence
from dormouse.core.decisions.rules.joins import IN_TURN, latest_s
from dormouse.schemas.messages import JoinRule, StepTimes


class Deadlines:
    """See the module."""

    def __init__(self) -> None:
        self._rules: dict[int, JoinRule] = {}  # by lease

    def told(self, lease: int, rule: JoinRule) -> None:
        self._rules[lease] = rule

    def forget(self, lease: int) -> None:
        self._rules.pop(lease, None)

    def before_s(self, sequence: Sequence) -> float:
        """Time that the sequence had waited when it was received."""
        rule = self._rules.get(sequence.owner)
        return 0.0 if rule is None else min(max(0.0, sequence.waited_s), rule.ttft_us / 1e6)

    def latest_s(self, sequence: Sequence, times: StepTimes | None) -> float:
        """Latest time at which it has to begin. ``times``: durations of steps here, as far as they are known."""
        rule = self._rules.get(sequence.owner)
        if rule is None or rule.in_turn:
            return IN_TURN
        deadline_s = sequence.heard_s - self.before_s(sequence) + rule.ttft_us / 1e6
        return latest_s(deadline_s, len(sequence.tokens), times)
