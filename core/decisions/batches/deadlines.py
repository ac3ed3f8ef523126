"""By when first tokens of a runtime's sequences are wanted: pure. Wishes are of leases, as the controller tells them.

How long a sequence has waited before its runtime heard of it, its instance says, and nobody here can know. It is
believed as far as its function's own wish: that moves a deadline no further than a shorter wish would.
"""

from dormouse.core.decisions.batches.batch import Sequence
from dormouse.core.joins import IN_TURN, latest_s
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
        """How long it had waited when it was heard of."""
        rule = self._rules.get(sequence.owner)
        return 0.0 if rule is None else min(max(0.0, sequence.waited_s), rule.ttft_us / 1e6)

    def latest_s(self, sequence: Sequence, times: StepTimes | None) -> float:
        """When it has to begin at latest. ``times``: what steps take here, as far as is known."""
        rule = self._rules.get(sequence.owner)
        if rule is None or rule.in_turn:
            return IN_TURN
        deadline_s = sequence.heard_s - self.before_s(sequence) + rule.ttft_us / 1e6
        return latest_s(deadline_s, len(sequence.tokens), times)
