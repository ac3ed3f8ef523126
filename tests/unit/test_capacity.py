"""How many are enough: the search, scenarios of other sizes, and what `dormouse simulate` says of both."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.controller.simulator import main
from dormouse.controller.simulator.capacity import CapacitySearch
from dormouse.controller.simulator.resize import with_functions, with_gpus
from dormouse.controller.simulator.scenario import Scenario, parse_scenario
from dormouse.core.cli import main as cli
from dormouse.schemas.errors import ConfigError

# Each request runs for 0.1 s, and each function asks 5 times in a second: a GPU is enough for two of them.
TEXT = """
[gpus]
count = 2
memory = "1GB"
[arrivals]
process = "regular"
rate = 300
minutes = 0.1
[[models]]
name = "m"
size = "1MB"
run = "100ms"
deadline = "150ms"
functions = 6
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "s.toml"
    path.write_text(TEXT)
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    cli.cli.main(["simulate", *map(str, arguments)], standalone_mode=False)
    return capsys.readouterr().out


def read(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    return json.loads(shown(capsys, *arguments, "--json"))


def scenario(faults: list[dict[str, Any]] | None = None, **gpus: Any) -> Scenario:
    tree = {
        "faults": faults or [],
        "gpus": {"count": 4, "memory": "1GB", "switch": "12GB", **gpus},
        "arrivals": {"rate": 1},
        "models": [
            {"name": "a", "size": "1MB", "run": "1ms", "functions": 65},
            {"name": "b", "size": "1MB", "run": "1ms", "functions": 30},
            {"name": "c", "size": "1MB", "run": "1ms", "functions": 5},
        ],
    }
    return parse_scenario(tree, "s.toml")


# --- the search


def test_it_finds_where_it_changes_in_no_more_tries_than_it_says() -> None:
    for limit in range(1, 35):
        for start in range(1, 40):
            for change in range(1, limit + 2):
                search = CapacitySearch(start, limit)
                promised = search.at_most
                while search.at is not None:
                    assert 1 <= search.at <= limit
                    search.tell(search.at < change)
                    assert search.at_most <= promised
                assert (search.low, search.high) == (change - 1, change)
                assert search.tried <= promised
    search = CapacitySearch(9, 20, 5)
    while search.at is not None:
        assert search.at >= 5
        search.tell(False)
    assert (search.low, search.high) == (4, 5)
    assert CapacitySearch(4, 64).at_most == 4 + 1 + 5  # 4, 8, 16, 32, 64, then 33 to 63


@given(st.integers(1, 300), st.integers(1, 300), st.sets(st.integers(1, 300)))
def test_both_sides_of_what_it_finds_were_tried(start: int, limit: int, below: set[int]) -> None:
    """Also where it changes more than once."""
    search = CapacitySearch(start, limit)
    tried: dict[int, bool] = {}
    while (at := search.at) is not None:
        assert at not in tried
        tried[at] = at in below
        search.tell(tried[at])
    assert search.high == search.low + 1
    assert tried.get(search.low, True)
    assert not tried.get(search.high, False)
    assert search.low in tried or search.low == 0
    assert search.high in tried or search.high == limit + 1


# --- other sizes


def test_switches_go_on_as_they_began() -> None:
    assert with_gpus(scenario(), 7).topology.switches == (0, 0, 1, 1, 2, 2, 3)
    assert with_gpus(scenario(switches=[5, 5, 5, 7]), 10).topology.switches == (5, 5, 5, 7, 8, 8, 8, 10, 11, 11)
    assert with_gpus(scenario(switches=[0, 0, 1, 1]), 3).topology.switches == (0, 0, 1)


def test_links_between_gpus_grow_only_if_they_are_all_alike() -> None:
    grown = with_gpus(scenario(peer="2GB"), 6)
    assert (grown.gpus, len(grown.topology.peer_bps), grown.topology.peer(5, 0)) == (6, 6, 2e9)
    listed = scenario(peer=[["0", "1GB", 0, 0], ["1GB", 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert with_gpus(listed, 2).topology.peer_bps == ((0.0, 1e9), (1e9, 0.0))
    with pytest.raises(ConfigError, match=r"gpus\.peer is a list for 4 GPUs, and 5 are to be tried; write one bandw"):
        with_gpus(listed, 5)


def test_what_happens_to_gpus_stays_with_them() -> None:
    """GPU 1 of the first node and GPU 3 of the second; faults count GPUs through all nodes."""
    faults = [{"gpu": 1, "at": "2s"}, {"gpu": 7, "at": "3s"}]
    two = scenario(faults, nodes=2)
    assert [fault.gpu for fault in with_gpus(two, 5).faults] == [1, 8]
    assert [fault.gpu for fault in with_gpus(two, 3).faults] == [1]


@pytest.mark.parametrize(
    ("count", "shares"),
    [(100, (65, 30, 5)), (200, (130, 60, 10)), (10, (7, 3, 0)), (1, (1, 0, 0)), (7, (5, 2, 0)), (1001, (651, 300, 50))],
)
def test_models_keep_their_shares(count: int, shares: tuple[int, ...]) -> None:
    names = [model.name for model in with_functions(scenario(), count).models]
    assert tuple(names.count(name) for name in "abc") == shares


# --- the command


def test_the_number_of_gpus_that_is_enough(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = read(capsys, path, "--find-capacity")
    assert (found["find"], found["target"], found["limit"]) == ("gpus", 1.0, 64)
    (one,) = found["policies"]
    assert (one["policy"], one["capacity"]) == ("scenario", 3)
    assert [(tried["number"], tried["compliant"]) for tried in one["tried"]] == [
        (2, 0.666667), (3, 1.0), (4, 1.0),
    ]  # fmt: skip


def test_fewer_gpus_than_faults_name_are_not_tried(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU is enough for a request now and then, but would be spared the fault of GPU 1."""
    text = TEXT.replace("count = 2", "count = 4").replace("rate = 300", "rate = 20").replace("functions = 6", "")
    path.write_text(text.replace('"150ms"', '"1s"') + '[[faults]]\ngpu = 1\nat = "50s"\n')
    found = read(capsys, path, "--find-capacity")["policies"][0]
    assert ([tried["number"] for tried in found["tried"]], found["capacity"]) == ([2, 4], 2)
    said = shown(capsys, path, "--find-capacity")
    assert "100.0% of functions comply (100% were wanted); fewer were not tried: [[faults]] name GPU 1\n" in said
    with pytest.raises(ConfigError, match=r"--limit: 1 gpus, and \[\[faults\]\] name GPU 1; write at least 2"):
        shown(capsys, path, "--find-capacity", "--limit", "1")


def test_the_number_of_functions_that_gpus_are_enough_for(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = read(capsys, path, "--find-capacity", "functions", "--policy", "fifo,default")
    assert [(one["policy"], one["capacity"]) for one in found["policies"]] == [("fifo", 4), ("default", 4)]
    assert [tried["number"] for tried in found["policies"][0]["tried"]] == [3, 4, 5, 6]


def test_a_lower_target_needs_less(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot recover is given up for the others, so two GPUs are enough for some of six."""
    fewer = read(capsys, path, "--find-capacity", "--policy", "default", "--target", "0.5")["policies"][0]
    assert fewer["capacity"] == 2
    assert {tried["number"]: tried["compliant"] >= 0.5 for tried in fewer["tried"]} == {1: False, 2: True}


def test_other_numbers_of_functions(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = read(capsys, path, "--functions", "8, 2,4", "--policy", "fifo,edf")
    rows = [(one["functions"], each["policy"], each["compliant"]) for one in found["sweep"] for each in one["policies"]]
    assert rows == [
        (2, "fifo", 1.0), (2, "edf", 1.0), (4, "fifo", 1.0), (4, "edf", 1.0), (8, "fifo", 0.0), (8, "edf", 0.0),
    ]  # fmt: skip
    alone = path.with_name("alone.toml")
    alone.write_text(TEXT.replace("functions = 6", "functions = 4"))
    assert read(capsys, alone, "--policy", "fifo,edf")["policies"] == found["sweep"][1]["policies"]


def test_gpus_for_several_numbers_of_functions(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = read(capsys, path, "--functions", "2,4,8", "--find-capacity")
    assert [(one["functions"], one["policies"][0]["capacity"]) for one in found["sweep"]] == [(2, 1), (4, 2), (8, 4)]


def test_gpus_of_each_of_several_nodes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight functions on two nodes: four of each, so two GPUs of each; and no node is without functions."""
    path.write_text(TEXT.replace("count = 2", "count = 2\nnodes = 2").replace("functions = 6", "functions = 8"))
    assert read(capsys, path, "--find-capacity")["policies"][0]["capacity"] == 2
    assert "scenario: with 2 GPUs per node, 100.0% of functions comply" in shown(capsys, path, "--find-capacity")
    path.write_text(path.read_text().replace("count = 2", "count = 1").replace("rate = 300", "rate = 590"))
    (one,) = read(capsys, path, "--find-capacity", "functions")["policies"]
    assert (one["capacity"], one["tried"][0]["number"]) == (2, 2)


@pytest.mark.parametrize(
    "options",
    [
        ["--find-capacity", "--target", "0.5"],
        ["--find-capacity", "functions", "--target", "0.5"],
        ["--functions", "3,5"],
        ["--functions", "3,5", "--find-capacity", "--target", "0.5"],
    ],
    ids=["gpus", "functions", "sweep", "both"],
)
def test_equal_seeds_give_equal_bytes(path: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(TEXT.replace("regular", "poisson").replace("150ms", "1s"))
    arguments = [path, *options, "--policy", "scenario,torpor", "--json"]
    first = shown(capsys, *arguments)
    assert shown(capsys, *arguments) == first
    assert shown(capsys, *arguments, "--seed", 5) != first


def test_people_are_told_what_was_tried(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, *lines = shown(capsys, path, "--find-capacity").splitlines()
    assert header.split("\t")[:4] == ["policy", "gpus", "functions", "requests"]
    assert [line.split("\t")[1] for line in lines[:3]] == ["2", "3", "4"]
    assert lines[3:] == [
        "",
        "scenario: with 3 GPUs, 100.0% of functions comply (100% were wanted); with 2, 66.7% do",
        "Nothing is known of numbers that were not tried: compliance need not rise or fall with each step.",
    ]
    *_, words, _ = shown(capsys, path, "--find-capacity", "functions", "--limit", 3).splitlines()
    assert words == "scenario: of 3 functions, 100.0% comply (100% were wanted); more were not tried (--limit)"


@pytest.mark.parametrize(
    "options",
    [
        ["--functions", "3,5"],
        ["--functions", "3", "--find-capacity"],
        ["--functions", "3,5", "--seeds", "2"],
        ["--functions", "3", "--find-capacity", "--seeds", "2"],
    ],
)
def test_a_terminal_of_80_columns_holds_the_table(
    path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    head, columns, *lines = shown(capsys, path, "--policy", "torpor-random", *options).splitlines()
    assert head.endswith("seeds 0 to 1" if "--seeds" in options else "seed 0")
    assert "functions" in columns.split()
    assert lines[0].split()[0] == "torpor-random"
    assert "…" not in "".join([columns, *lines])


def test_progress_says_which_try_of_how_many(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dormouse.controller.simulator.progress.QUIET_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    main.main(str(path), policy="fifo,edf", find="gpus", limit=3)
    told = capsys.readouterr().err.replace("\r\x1b[K", "\n").splitlines()
    assert [line for line in told if line] == [
        "search 1 of 2, fifo, try 1 of at most 2: 2 GPUs: 0% of 186 requests",
        "search 1 of 2, fifo, try 2 of at most 2: 3 GPUs: 0% of 186 requests",
        "search 2 of 2, edf, try 1 of at most 2: 2 GPUs: 0% of 186 requests",
        "search 2 of 2, edf, try 2 of at most 2: 3 GPUs: 0% of 186 requests",
    ]


# --- bad input


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["dormouse", "simulate", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--functions", "3,x"], "--functions: 'x' is not a number from 1 to 100,000; write for"),
        (["--functions", "9" * 5000], f"--functions: '{'9' * 5000}' is not a number from 1 to 100,000; write"),
        (["--functions", "0"], "--functions: '0' is not a number from 1 to 100,000; write"),
        (["--functions", ",".join(map(str, range(1, 102)))], "--functions: 101 numbers; write at most 100"),
        (["--target", "0.9"], "--target is of --find-capacity; add that, or remove it"),
        (["--limit", "9"], "--limit is of --find-capacity; add that, or remove it"),
        (["--find-capacity", "--target", "98"], "--target: 98 is not a share of functions; write one as 0.98"),
        (["--find-capacity", "--target", "nan"], "--target: nan is not a share of functions; write one"),
        (["--find-capacity", "--limit", "0"], "--limit: 0 gpus; write a number from 1 to 1,024"),
        (["--find-capacity", "functions", "--limit", "100001"], "--limit: 100001 functions; write a number from"),
        (["--find-capacity=functions", "--functions", "3"], "--find-capacity functions tries numbers of functions"),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_make_no_sense(
    path: Path, options: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(monkeypatch, capsys, path, *options)
    assert told.startswith(f"dormouse: {path}: {text}")
    assert told.count("\n") == 1


def test_the_option_without_its_value_before_the_scenario(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(monkeypatch, capsys, "--find-capacity", path)
    assert "s.toml' is neither gpus nor functions; write one of them, or this option last" in told


def test_when_the_limit_does_not_suffice(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dormouse", "simulate", str(path), "--find-capacity", "--limit", "2", "--json"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["policies"][0]["capacity"] is None
    assert err == (
        f"dormouse: {path}: --find-capacity: 2 GPUs are not enough: 66.7% of functions comply, not 100%; "
        "raise --limit or lower --target\n"
    )


def test_what_no_number_of_gpus_changes(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = '[[models]]\nname = "slow"\nsize = "1MB"\nrun = "2s"\ndeadline = "1s"\nfunctions = 2\n'
    path.write_text(TEXT + other)
    assert refused(monkeypatch, capsys, path, "--find-capacity") == (
        f"dormouse: {path}: --find-capacity: slow runs for 2000ms, its deadline is 1000ms, and no number of GPUs "
        "changes that; write a longer deadline, or --target 0.75 at most\n"
    )
    assert read(capsys, path, "--find-capacity", "--target", "0.75")["policies"][0]["capacity"] is not None
    path.write_text(TEXT.replace('"1MB"', '"2GB"'))
    assert "no GPU holds more than gpus.memory, 1,000,000,000: use a smaller model or larger GPUs" in refused(
        monkeypatch, capsys, path, "--find-capacity"
    )
