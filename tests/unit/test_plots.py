"""Figures of `dormouse simulate --plot`: what is in them is checked by eye, that they are there and not empty here."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dormouse.controller.simulator import main
from dormouse.controller.simulator.plots import Figures
from dormouse.controller.simulator.watch import BINS, MAX_BINS, POINTS, Watch
from dormouse.schemas.errors import ConfigError

TEXT = """
[gpus]
count = 2
memory = "1GB"
[arrivals]
rate = 100
minutes = 0.5
[[models]]
name = "m"
size = "300MB"
run = "50ms"
deadline = "100ms"
functions = 4
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "s.toml").write_text(TEXT)
    return str(tmp_path / "s.toml")


def colours(path: Path) -> set[str]:
    """Of the picture, those that whole dots have."""
    from matplotlib.image import imread

    dots = np.rint(imread(path)[:, :, :3] * 255).astype(int).reshape(-1, 3)
    values, counts = np.unique(dots, axis=0, return_counts=True)
    return {"#{:02X}{:02X}{:02X}".format(*value) for value, count in zip(values, counts, strict=True) if count > 50}


BLUE, VERMILLION = "#0072B2", "#D55E00"


def test_a_comparison_has_latencies_and_load(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a" / "b"
    main.main(path, policy="default,fifo", plot=str(folder))
    assert sorted(one.name for one in folder.iterdir()) == ["latency.png", "load.png"]
    for one in folder.iterdir():
        assert {BLUE, VERMILLION, "#FFFFFF"} <= colours(one)
    assert capsys.readouterr().err == f"wrote {folder}/latency.png\nwrote {folder}/load.png\n"


def test_a_sweep_has_compliance(path: str, tmp_path: Path) -> None:
    main.main(path, functions="2,6", plot=str(tmp_path / "f"))
    assert sorted(one.name for one in (tmp_path / "f").iterdir()) == [
        "compliance.png", "latency-2.png", "latency-6.png", "load-2.png", "load-6.png",
    ]  # fmt: skip
    assert BLUE in colours(tmp_path / "f" / "compliance.png")


def test_a_search_has_compliance_with_its_target(path: str, tmp_path: Path) -> None:
    main.main(path, find="gpus", target=0.7, plot=str(tmp_path / "f"))
    assert sorted(one.name for one in (tmp_path / "f").iterdir()) == ["compliance.png", "latency.png", "load.png"]
    assert BLUE in colours(tmp_path / "f" / "compliance.png")
    main.main(path, find="gpus", target=0.7, functions="3,5", plot=str(tmp_path / "g"))
    assert {BLUE} <= colours(tmp_path / "g" / "capacity.png")
    assert (tmp_path / "g" / "compliance-5.png").exists()


def test_figures_where_the_search_finds_nothing(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 GPU is not enough"):
        main.main(path, find="gpus", limit=1, functions="8", plot=str(tmp_path / "f"))
    assert {one.name for one in (tmp_path / "f").iterdir()} == {
        "capacity.png", "compliance-8.png", "latency-8.png", "load-8.png",
    }  # fmt: skip


def test_the_same_seed_gives_the_same_files(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the user's own settings of matplotlib are; and figures change nothing in the numbers."""
    import matplotlib

    main.main(path, json_=True, functions="2,6", plot=str(tmp_path / "a"))
    with_figures = capsys.readouterr().out
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 20.0)
    main.main(path, json_=True, functions="2,6", plot=str(tmp_path / "b"))
    for one in (tmp_path / "a").iterdir():
        assert one.read_bytes() == (tmp_path / "b" / one.name).read_bytes()
    assert matplotlib.rcParams["font.size"] == 20.0
    capsys.readouterr()
    main.main(path, json_=True, functions="2,6")
    assert capsys.readouterr().out == with_figures


# --- what they show


def test_a_target_is_drawn(tmp_path: Path) -> None:
    figures = Figures(str(tmp_path))
    for name, target in (("a", None), ("b", 0.7), ("c", 0.8)):
        figures.compliance(name, "GPUs", {"fifo": [(1, 0.5, 0.1), (2, 1.0, 0.0)]}, target)
    assert len({one.read_bytes() for one in figures.written}) == 3


def test_busy_shares_of_intervals() -> None:
    watch = Watch()
    watch.begin(2, 10.0, 10.0 + BINS)  # intervals of 1 s
    watch.on_busy(0, 9.0, 10.25)  # a quarter of a second of it counts
    watch.on_busy(0, 11.5, 13.5)
    watch.on_busy(1, 129.0, 131.0)  # after the last request; 1 s is the end
    busy = watch.busy
    assert busy.shape == (2, BINS + 1)
    assert busy[0, :5].tolist() == [0.25, 0.5, 1.0, 0.5, 0.0]
    assert busy[1, -3:].tolist() == [0.0, 1.0, 1.0]
    assert busy.sum() == pytest.approx(0.25 + 2 + 2)


def test_a_last_bit_of_an_interval_is_left_out() -> None:
    watch = Watch()
    watch.begin(1, 0.0, float(BINS))
    watch.on_busy(0, BINS - 0.5, BINS + 0.25)
    assert watch.busy.shape == (1, BINS)
    watch.on_busy(0, BINS + 0.25, BINS + 0.75)
    assert watch.busy.shape == (1, BINS + 1)
    assert watch.busy[0, -2:].tolist() == [0.5, 1.0]


def test_a_run_that_goes_on_and_on_has_no_more_intervals() -> None:
    watch = Watch()
    watch.begin(1, 0.0, float(BINS))
    watch.on_busy(0, -9.0, 0.0)  # a warm request's: before the first
    for second in range(0, 10 * MAX_BINS, 2):
        watch.on_busy(0, float(second), second + 1.0)
    assert watch.busy.shape[1] <= MAX_BINS
    assert watch.bin_s == 16.0
    assert watch.busy[0, :-1] == pytest.approx(np.full(watch.busy.shape[1] - 1, 0.5))


def test_one_request_is_a_run_too() -> None:
    watch = Watch()
    watch.begin(1, 5.0, 5.0)
    watch.on_busy(0, 5.0, 5.125)
    watch.end(np.array([0.125]))
    assert (watch.busy.tolist(), watch.latency_ms.tolist(), watch.share.tolist()) == ([[1.0]], [125.0], [1.0])


def test_a_distribution_is_of_all_requests() -> None:
    watch = Watch()
    watch.end(np.array([0.3, np.nan, 0.1, 0.2]))
    assert watch.latency_ms == pytest.approx([100, 200, 300])
    assert watch.share.tolist() == [0.25, 0.5, 0.75]
    watch.end(np.arange(1, 100_001) / 1000)
    assert len(watch.share) == POINTS
    assert watch.share == pytest.approx(watch.latency_ms / 100_000)
    watch.end(np.full(3, np.nan))
    assert len(watch.share) == 0


def test_runs_without_an_answer_can_be_drawn(tmp_path: Path) -> None:
    watch = Watch()
    watch.begin(1, 0.0, 1.0)
    watch.end(np.full(3, np.nan))
    figures = Figures(str(tmp_path))
    figures.latency("latency", {"fifo": watch}, [0.08, 0.2, 0.3, 0.4], [0.98, 0.9])
    figures.load("load", {"fifo": watch})
    assert [one.stat().st_size > 5000 for one in figures.written] == [True, True]


# --- where they cannot be


def test_without_matplotlib(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    with pytest.raises(ConfigError) as told:
        main.main(path, plot=str(tmp_path / "f"))
    assert str(told.value) == "--plot: matplotlib is not installed; run pip install 'dormouse[plot]'"
    assert not (tmp_path / "f").exists()


def test_a_file_in_the_way(path: str) -> None:
    with pytest.raises(ConfigError, match=r"--plot: .*s\.toml is a file; give the path of a directory"):
        main.main(path, plot=path)
    with pytest.raises(ConfigError, match=r"--plot: .*: Not a directory; give a directory that can be written"):
        main.main(path, plot=path + "/f")
