"""Broken frames of real programs against a real executor: it lives, and a healthy neighbour's answers stay right.

The same, longer, is `python -m benchmarks.fuzz`.
"""

import warnings

import needs
import pytest

from benchmarks import fuzz

FRAMES = 20_000


@pytest.mark.timeout(600)
@needs.COMPILER
def test_d3_no_frame_does_more_than_end_its_instance() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the programs that are recorded are not ours to fail on
        result = fuzz.run(FRAMES, seed=1)
    assert result.deaths == []
    assert result.hung == []
    assert result.wrong == []
    assert result.escaped == {}, "caught only in the outermost frame: check it where it is read"
    assert result.frames >= FRAMES
    assert result.looks > FRAMES / 50
    assert result.past_gate >= FRAMES / 2
    assert fuzz.rare_kinds(result) == {}
    assert len(result.kinds) > 50
    assert result.outcomes["violation"] > FRAMES / 4
    assert result.outcomes["ended"] > FRAMES / 10
