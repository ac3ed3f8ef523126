"""The papers' figures: every scenario is one, every figure can be made, and what is remembered is right."""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import papers
from benchmarks.papers import FIGURES, IMPORTANCE
from benchmarks.papers_cache import Remembered
from benchmarks.papers_figures import COMPLIANT, Point, Results, Setting, of_80, saturation
from benchmarks.papers_parameters import MODELS, fine_tunes, heavy_and_light, node, trace, workers
from benchmarks.papers_plots import draw
from benchmarks.papers_runs import ORIGIN, Run, fingerprint, simulated
from benchmarks.papers_tables import tables, write
from dormouse.controller.simulator.scenario import POLICIES, parse_scenario
from dormouse.schemas.policy import DEFAULT

FUNCTIONS = 203


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A trace like Torpor's, whose functions are asked once in three minutes."""
    folder = tmp_path_factory.mktemp("papers")
    lines = ["func," + ",".join(f"m{minute}" for minute in range(30))]
    for function in range(FUNCTIONS):
        lines.append(f"{function}," + ",".join(str(int((minute + function) % 3 == 0)) for minute in range(30)))
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return Setting(trace=str(path), folder=folder, seeds=1, quick=True)


def test_every_figure_is_made_once() -> None:
    assert sorted(FIGURES) == sorted(IMPORTANCE)


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_every_scenario_is_one_that_a_user_could_write(name: str, setting: Setting) -> None:
    points = FIGURES[name].points(dataclasses.replace(setting, quick=False))
    trees = {json.dumps(point.run.tree, sort_keys=True): point.run.tree for point in points}
    for tree in trees.values():
        parse_scenario(tree, ORIGIN)
    assert points


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_every_figure_can_be_made(name: str, setting: Setting, tmp_path: Path) -> None:
    figure = FIGURES[name]
    points = figure.points(setting)
    results = Results(points, {point.run.key: simulated(point.run) for point in (points[0], points[-1])})
    assert figure.metrics[0].name in tables(figure, results)
    if name in ("9", "11"):  # bars, and lines: a drawing takes longer than all else
        assert draw(figure, results, tmp_path / "figure.png")
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_equal_runs_have_equal_results(setting: Setting) -> None:
    def made(run: Run) -> dict[str, Any]:
        result = simulated(run)
        del result["cpu_s"]
        return result

    traced = Run(tree=node(40, trace(setting.trace, "gaps", 2)), policy=DEFAULT, seed=3)
    local = Run(tree=workers(2, 24 * 10**9, 1, 0.2, 3), policy=DEFAULT, seed=3, locality=(1.0, 0.44))
    for run in (traced, local):
        assert made(run) == made(run)
        assert made(run) != made(dataclasses.replace(run, seed=4))


def test_each_gpu_has_the_tail_of_what_it_ran(setting: Setting) -> None:
    """Bound functions of one model: the first GPU's are asked so often that they queue, the second's are not."""
    tree = node(2, {"process": "poisson", "rate": 600, "minutes": 2}, count=2)
    tree["models"] = [{**tree["models"][0], "functions": 1, "rate": 1200}, {**tree["models"][0], "functions": 1}]
    result = simulated(Run(tree=tree, policy=POLICIES["nonswap"], seed=1))
    first, second = result["gpu_p98_ms"]
    assert first > second
    assert first == pytest.approx(result["max_ms"], rel=0.5)


def test_the_first_token_comes_before_the_end(setting: Setting) -> None:
    run = Run(tree=workers(1, 24 * 10**9, 1, 0.01, 200), policy=DEFAULT, seed=1, locality=(1.0, 0.44))
    whole = simulated(run)
    first = simulated(dataclasses.replace(run, decodes_s={"yi9B": 1.0, "opt1.3B": 1.0}))
    assert whole["first_p99_ms"] == whole["p99_ms"] == first["p99_ms"]
    assert first["first_p99_ms"] < whole["p99_ms"]


def test_parameters_are_the_papers() -> None:
    """What is easily mistyped: sums and shares that the papers give."""
    assert sum(model.nbytes for model in MODELS) == pytest.approx(2.11e9, rel=0.01)
    models = heavy_and_light({})["models"]
    heavy, light = (model["functions"] * model["size"] for model in models)
    assert heavy / (heavy + light) == pytest.approx(0.6, abs=0.01)
    assert len({model["name"] for model in workers(1, 45 * 10**9, 64, 1, 1)["models"]}) == 8
    assert sum(model["functions"] for model in fine_tunes(560, {})["models"]) == 560


def test_a_wake_over_a_slower_link_adds_what_it_adds_over_the_measured_one(setting: Setting) -> None:
    arrivals = trace(setting.trace, "gaps", 1)
    extras = {
        link: [model.extra_s for model in parse_scenario(node(8, arrivals, link=link), ORIGIN).models]
        for link in (0.75, 1.0, 1.25)
    }
    assert extras[0.75] == pytest.approx(extras[1.0], abs=1e-5)
    assert extras[1.25] == pytest.approx(extras[1.0], abs=1e-5)


# --- what is remembered


def test_a_run_is_known_by_what_it_depends_on(setting: Setting, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.csv"
    copy.write_bytes(Path(setting.trace).read_bytes())
    run = Run(tree=node(8, trace(setting.trace, "gaps", 1)), policy=DEFAULT, seed=0)
    assert dataclasses.replace(run, tree=node(8, trace(str(copy), "gaps", 1))).key == run.key
    others = [
        dataclasses.replace(run, seed=1),
        dataclasses.replace(run, tree=node(9, trace(setting.trace, "gaps", 1))),
        dataclasses.replace(run, policy=POLICIES["nonswap"]),
        dataclasses.replace(run, decodes_s={"a": 1.0}),
    ]
    assert len({other.key for other in others} | {run.key}) == 5


def test_code_is_known_by_what_it_does() -> None:
    code = 'def f():\n    """One."""\n    return 1  # one\n'
    assert fingerprint(code) == fingerprint('"""Module."""\ndef f():\n\n    return 1\n')
    assert fingerprint(code) != fingerprint(code.replace("return 1", "return 2"))


def test_a_line_that_was_cut_off_is_made_again(setting: Setting, tmp_path: Path) -> None:
    runs = [Run(tree=node(8, trace(setting.trace, "gaps", 1)), policy=DEFAULT, seed=seed) for seed in (0, 1)]
    known = Remembered(tmp_path / "new" / "runs.jsonl")
    for run in runs:
        known.add(run, {"compliant": run.seed})
    path = tmp_path / "new" / "runs.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    again = Remembered(path)
    assert runs[0] in again
    assert runs[1] not in again
    again.add(runs[1], {"compliant": 5})
    assert Remembered(path)[runs[1]] == {"compliant": 5}


# --- what is read off


def results_of(shares: dict[int, list[float]]) -> Results:
    """A line of runs with such shares of compliant functions, one for each seed."""
    points, known = [], {}
    for x, values in shares.items():
        for seed, value in enumerate(values):
            run = Run(tree={"arrivals": {}, "x": x}, policy=DEFAULT, seed=seed)
            points.append(Point(arm="a", kind="gaps", x=x, run=run))
            known[run.key] = {"compliant": value}
    return Results(points, known)


def test_saturation_lies_between_two_numbers() -> None:
    results = results_of({100: [1.0, 1.0], 200: [0.9, 0.9], 300: [0.8, 0.6], 400: [0.1, 0.1]})
    assert results.mean("gaps", "a", 300, COMPLIANT) == pytest.approx(0.7)
    assert saturation(results, "gaps", "a") == pytest.approx(250.0)
    assert of_80("a")(results, "gaps") == "250"
    assert of_80("a")(results_of({100: [0.9], 200: [0.85]}), "gaps") == "over 200"
    assert of_80("a")(results_of({100: [0.7], 200: [0.6]}), "gaps") == "below 100"
    assert math.isnan(saturation(results_of({100: [0.7]}), "gaps", "a"))


def test_only_what_is_between_the_marks_is_written_anew(tmp_path: Path) -> None:
    document = tmp_path / "papers.md"
    document.write_text("a\n<!-- figure 11 -->\nold\n<!-- end -->\nb\n<!-- figure 10 -->\nold\n<!-- end -->\n")
    assert write(document, {"11": "new", "9": "nowhere"}) == ["9"]
    assert document.read_text() == (
        "a\n<!-- figure 11 -->\nnew\n<!-- end -->\nb\n<!-- figure 10 -->\nold\n<!-- end -->\n"
    )


def test_the_document_has_a_place_for_every_figure() -> None:
    text = (papers.ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    assert [name for name in FIGURES if f"<!-- figure {name} -->\n" not in text] == []


def test_a_trace_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    args: argparse.Namespace = papers.parser().parse_args(["--trace", str(tmp_path / "none.csv")])
    with pytest.raises(SystemExit, match=r"none.csv: the trace is not there; give its path with --trace") as raised:
        papers.main(args)
    assert "\n" not in str(raised.value)
