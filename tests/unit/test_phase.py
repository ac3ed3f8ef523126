"""What a node's supervisor may be at, one after the other."""

from itertools import product

import pytest

from dormouse.core.node.phase import NodePhase, entered

WAYS = {
    (NodePhase.STANDS_BY, NodePhase.RUNS),
    (NodePhase.RUNS, NodePhase.ANEW),
    (NodePhase.RUNS, NodePhase.GOES_OVER),
    (NodePhase.ANEW, NodePhase.RUNS),
    (NodePhase.GOES_OVER, NodePhase.ANEW),
    *((phase, NodePhase.ENDS) for phase in NodePhase),
}


@pytest.mark.parametrize(("before", "phase"), list(product(NodePhase, NodePhase)))
def test_which_may_follow_which(before: NodePhase, phase: NodePhase) -> None:
    if (before, phase) in WAYS or before is phase:
        assert entered(before, phase) is phase
    else:
        with pytest.raises(AssertionError):
            entered(before, phase)


def test_what_follows_for_processes() -> None:
    assert {phase for phase in NodePhase if phase.wants_ends} == {NodePhase.GOES_OVER, NodePhase.ENDS}
    assert {phase for phase in NodePhase if phase.starts_roles} == {NodePhase.STANDS_BY, NodePhase.RUNS}
