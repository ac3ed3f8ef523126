"""What a node's supervisor may be at, one after the other."""

from itertools import product

import pytest

from dormouse.core.node.phase import Phase, entered

WAYS = {
    (Phase.STANDS_BY, Phase.RUNS),
    (Phase.RUNS, Phase.ANEW),
    (Phase.RUNS, Phase.GOES_OVER),
    (Phase.ANEW, Phase.RUNS),
    (Phase.GOES_OVER, Phase.ANEW),
    *((phase, Phase.ENDS) for phase in Phase),
}


@pytest.mark.parametrize(("before", "phase"), list(product(Phase, Phase)))
def test_which_may_follow_which(before: Phase, phase: Phase) -> None:
    if (before, phase) in WAYS or before is phase:
        assert entered(before, phase) is phase
    else:
        with pytest.raises(AssertionError):
            entered(before, phase)


def test_what_follows_for_processes() -> None:
    assert {phase for phase in Phase if phase.wants_ends} == {Phase.GOES_OVER, Phase.ENDS}
    assert {phase for phase in Phase if phase.starts_roles} == {Phase.STANDS_BY, Phase.RUNS}
