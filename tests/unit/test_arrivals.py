"""When which function is asked: rates of single models, a trace's minutes, and how long it takes to draw them."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dormouse.controller.simulator.arrivals import arrivals
from dormouse.controller.simulator.scenario import Scenario, parse_scenario
from dormouse.schemas.errors import ConfigError

MODEL = {"size": "1MB", "run": "10ms"}


def scenario(models: list[dict[str, Any]], path: str = "s.toml", **settings: Any) -> Scenario:
    made = [{"name": f"m{i}", **MODEL, **model} for i, model in enumerate(models)]
    tree = {"gpus": {"count": 1, "memory": "1GB"}, "models": made, "arrivals": {"warm": False, **settings}}
    return parse_scenario(tree, path)


def traced(tmp_path: Path, counts: npt.NDArray[np.int64], functions: int, **settings: Any) -> Scenario:
    header = ",".join(f"m{i}" for i in range(counts.shape[1]))
    lines = [",".join(map(str, row)) for row in counts.tolist()]
    (tmp_path / "t.csv").write_text("\n".join([header, *lines]))
    where = str(tmp_path / "s.toml")
    return scenario([{"functions": functions}], where, process="trace", trace="t.csv", **settings)


def test_a_model_has_its_own_rate() -> None:
    made = scenario([{"functions": 2}, {"rate": 30}], process="regular", rate=12, minutes=1)
    assert made.rates == [12, 30, 12]
    times_s, functions, _ = arrivals(made, 0)
    assert np.bincount(functions).tolist() == [12, 30, 12]
    assert np.diff(times_s[functions == 1]) == pytest.approx(np.full(29, 2.0))
    assert np.diff(times_s[functions == 2]) == pytest.approx(np.full(11, 5.0))
    assert (np.diff(times_s) >= 0).all()
    assert len(arrivals(scenario([{"rate": 2.3}], process="regular"), 0)[0]) == 23


def test_poisson_requests_are_shared_out_by_rate() -> None:
    times_s, functions, _ = arrivals(scenario([{"rate": 3000}, {"rate": 1000}, {}], rate=10, minutes=5), 1)
    counts = np.bincount(functions, minlength=3)
    assert (abs(counts - [15000, 5000, 50]) < 5 * np.sqrt([15000, 5000, 50])).all()
    assert (np.diff(times_s) >= 0).all()
    assert 0.9 < variation(times_s) < 1.1


def variation(times_s: npt.NDArray[np.float64]) -> float:
    """Coefficient of variation of the gaps; 1 for a Poisson process."""
    gaps = np.diff(times_s)
    return float(gaps.std() / gaps.mean())


def test_gaps_hardly_differ_and_minutes_have_their_counts(tmp_path: Path) -> None:
    """At 600 a minute the mean gap is 100 ms, so the variation that of a Poisson distribution of 100: 0.1."""
    counts = np.array([[150, 0, 50], [450, 0, 150]])
    times_s, functions, _ = arrivals(traced(tmp_path, counts, 2, within="gaps"), 2)
    assert len(times_s) == 800
    first = times_s[:600]
    assert 0.08 < variation(first) < 0.12
    assert times_s * 1000 == pytest.approx(np.rint(times_s * 1000), abs=1e-6)
    assert first[-1] == pytest.approx(60.0, abs=5 * 600**0.5 * 0.01)
    assert times_s[600] - first[-1] > 59.0  # the empty minute
    share = np.bincount(functions[:600]) / 600
    assert share == pytest.approx([0.25, 0.75], abs=0.1)
    assert np.bincount(functions[:600]).tolist() != [150, 450]  # drawn, not dealt


def test_a_function_without_requests_in_a_minute_is_not_drawn(tmp_path: Path) -> None:
    counts = np.array([[0, 0], [500, 0], [0, 500], [0, 0]])
    _, functions, _ = arrivals(traced(tmp_path, counts, 4, within="gaps"), 0)
    assert functions.tolist() == [1] * 500 + [2] * 500


def test_within_a_minute_random_has_the_counts_and_poisson_their_mean(tmp_path: Path) -> None:
    counts = np.full((100, 4), 25)
    exact = arrivals(traced(tmp_path, counts, 100), 3)
    drawn = arrivals(traced(tmp_path, counts, 100, within="poisson"), 3)
    for times_s, functions, _ in (exact, drawn):
        assert abs(len(times_s) - 10_000) <= 500
        assert 0.95 < variation(times_s) < 1.05
        assert (np.bincount(functions, minlength=100) > 0).all()
    assert (np.bincount(exact[1]) == 100).all()
    dispersion = np.bincount(drawn[1]).var() / 100
    assert 0.6 < dispersion < 1.5


@pytest.mark.parametrize("within", ["random", "poisson", "gaps"])
def test_a_scaled_trace(tmp_path: Path, within: str) -> None:
    counts = np.full((50, 4), 10)
    for scale in (0.25, 1.0, 7.3):
        times_s, _, _ = arrivals(traced(tmp_path, counts, 50, within=within, scale=scale), 4)
        expected = 2000 * scale
        assert abs(len(times_s) - expected) <= 5 * expected**0.5
        assert times_s[-1] == pytest.approx(240.0, abs=15.0)


def test_many_functions_are_drawn_at_once(tmp_path: Path) -> None:
    """5,000 functions in 30 minutes, 1.8 million requests: one by one they would not be done in a test's time limit."""
    for process in ("poisson", "regular"):
        made = scenario([{"functions": 4999}, {"rate": 24}], process=process, rate=12, minutes=30)
        _, functions, _ = arrivals(made, 0)
        assert len(functions) > 1_700_000
    for within in ("random", "gaps"):
        _, functions, _ = arrivals(traced(tmp_path, np.full((203, 30), 12), 5000, within=within), 0)
        assert len(functions) == 1_800_000


@pytest.mark.parametrize(
    ("model", "settings", "text"),
    [
        ({"rate": 0}, {"rate": 1}, "models[0].rate is 0.0; write requests per minute and function, above 0"),
        ({"rate": float("inf")}, {}, "models[0].rate is inf; write requests per minute and function, above 0"),
        ({"rate": 1e9}, {}, "arrivals.rate makes 10,000,000,000 requests; at most 20,000,000 are simulated"),
        (
            {"rate": 5},
            {"process": "trace", "trace": "t"},
            "models[0].rate is 5.0; remove it: a trace has its own rates",
        ),
        ({"rate": 5}, {"within": "gaps"}, "arrivals.within is 'gaps'; write process = \"trace\", or remove it"),
        ({"rate": 5}, {"scale": 2}, 'arrivals.scale is 2.0; write process = "trace", or remove it'),
        ({}, {"within": "minute"}, "arrivals.within is 'minute'; write one of random, poisson, gaps"),
        ({}, {"process": "trace", "trace": "t", "scale": 0}, "arrivals.scale is 0.0; write a number above 0"),
        ({}, {}, "arrivals.rate is missing; write requests per minute and function"),
    ],
    ids=str,
)
def test_bad_input(model: dict[str, Any], settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as told:
        arrivals(scenario([model], **settings), 0)
    assert str(told.value).startswith(f"s.toml: {text}")


def test_a_scaled_trace_is_not_endless(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"arrivals\.trace makes 1,000,000,000 requests; at most 20,000,000"):
        arrivals(traced(tmp_path, np.full((1, 1), 1000), 1, scale=1e6), 0)
    with pytest.raises(ConfigError, match="no request comes"):
        arrivals(traced(tmp_path, np.full((1, 1), 1), 1, scale=1e-9, within="gaps"), 0)
