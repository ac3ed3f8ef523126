"""How bytes that move inside the pool are cut, and what a link's rate is: pure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.decisions.memory.transfer import Kind

pytest.importorskip("cuda.bindings.driver", reason="needs cuda.bindings.driver: make setup")
from dormouse.gpuserver.device.cuda.copies import ASSUMED_NBYTES_S, LinkRates  # needs the bindings
from dormouse.gpuserver.device.cuda.steps import moved

ROOM = 400
SCRATCH_NBYTES = 16
spans = st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))


@given(spans)
def test_a_move_is_a_memmove_of_copies_that_do_not_overlap(span: tuple[int, int, int]) -> None:
    source, target, nbytes = span
    memory = bytearray(index % 251 for index in range(ROOM + SCRATCH_NBYTES))
    wanted = bytearray(memory)
    wanted[target : target + nbytes] = memory[source : source + nbytes]
    copies = list(moved(source, target, nbytes, ROOM, SCRATCH_NBYTES))
    for to, at, length in copies:
        assert abs(to - at) >= length > 0
        memory[to : to + length] = memory[at : at + length]
    assert memory[:ROOM] == wanted[:ROOM]
    assert len(copies) <= 2 * -(-nbytes // SCRATCH_NBYTES)


def test_rates_follow_the_link() -> None:
    rates = LinkRates()
    assert rates.get(Kind.SLAB) == ASSUMED_NBYTES_S[Kind.SLAB]
    rates.note(Kind.SLAB, 1000, 1.0)  # too small to say anything
    rates.note(Kind.SLAB, 1 << 30, 0.0)
    assert rates.get(Kind.SLAB) == ASSUMED_NBYTES_S[Kind.SLAB]
    rates.note(Kind.SLAB, 10**9, 1.0)
    assert rates.get(Kind.SLAB) == 1e9  # nothing of the assumption stays
    rates.note(Kind.SLAB, 10**9, 0.5)
    assert rates.get(Kind.SLAB) == 1.25e9
    assert rates.get(Kind.PEER) == ASSUMED_NBYTES_S[Kind.PEER]
