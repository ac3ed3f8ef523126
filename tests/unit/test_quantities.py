"""Sizes and durations are told in a unit that makes them short, and no two that differ are told as the same."""

import pytest

from dormouse.core.quantities import duration, ended, size, sizes


@pytest.mark.parametrize(
    ("ms", "told"),
    [
        *((0, "0 ms"), (0.004, "0 ms"), (0.05, "0.05 ms"), (3.456, "3.46 ms"), (20.0, "20 ms"), (999, "999 ms")),
        *((1000, "1 s"), (1250, "1.25 s"), (90_000, "90 s"), (119_999, "120 s"), (300_000, "5 min")),
        *((5_400_000, "90 min"), (7_200_000, "2 h"), (86_400_000, "24 h"), (5 * 86_400_000, "5 d"), (-1500, "-1.5 s")),
        (365 * 86_400_000, "365 d"),
    ],
)
def test_durations(ms: float, told: str) -> None:
    assert duration(ms) == told


def test_sizes_that_are_compared_differ_if_they_do() -> None:
    assert sizes(3 << 30, 2 << 30) == ("3.0 GiB", "2.0 GiB")
    assert sizes((1 << 30) + 512, 1 << 30) == ("1,073,742,336 bytes", "1,073,741,824 bytes")
    assert sizes(5, 5) == ("5 B", "5 B")
    assert (size(-2048), size(None)) == ("-2.0 KiB", "-")


def test_ends_of_processes() -> None:
    assert ended(-9) == "was ended by SIGKILL"
    assert ended(-40) == "was ended by signal 40"
    assert ended(3) == "ended with status 3"
