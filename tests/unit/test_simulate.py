"""`dormouse simulate`: latencies that can be worked out by hand, equal seeds, reports, and what bad input is told."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import pytest

from dormouse.controller.simulator import main, progress
from dormouse.controller.simulator.arrivals import arrivals, read_trace
from dormouse.controller.simulator.baselines import SimulatedPolicy
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.report import report
from dormouse.controller.simulator.scenario import POLICIES, Scenario, load_scenario, parse_scenario
from dormouse.core.cli import main as cli
from dormouse.schemas.errors import ConfigError

NODE = Path(__file__).parents[2] / "examples" / "scenarios" / "node.toml"

LRU = {"eviction": "lru", "order": "fifo", "whole": True}


def tree(**changes: Any) -> dict[str, Any]:
    """Two functions whose models do not fit together: 0.6 GB each on a GPU of 1 GB, over 1 GB/s. ``changes`` are by
    ``table__key``; None removes.
    """
    made: dict[str, Any] = {
        "gpus": {"count": 1, "memory": "1GB", "link": "1GB"},
        "arrivals": {"process": "regular", "rate": 1, "minutes": 3, "warm": False},
        "models": [{"name": "m", "size": "600MB", "run": "100ms", "wake": "700ms", "functions": 2}],
    }
    for name, value in changes.items():
        table, _, key = name.partition("__")
        place = made if not key else made["models"][0] if table == "models" else made.setdefault(table, {})
        if value is None:
            del place[key or table]
        else:
            place[key or table] = value
    return made


def scenario(**changes: Any) -> Scenario:
    return parse_scenario(tree(**changes), "s.toml")


def latencies_ms(made: Scenario) -> list[float]:
    times_s, functions, warm = arrivals(made, made.seed)
    simulation = main.simulation_of(made, made.policy, made.seed)
    latency_s = simulation.run(times_s, functions, warm)[warm:]
    return [round(float(one) * 1000, 6) for one in latency_s]


# --- by hand


def test_whole_models_take_turns() -> None:
    """LRU forgets the other model as a whole: each request copies 0.6 GB in 0.6 s, and 0.1 s more."""
    assert latencies_ms(scenario(policy=LRU)) == [700.0] * 6


def test_only_what_is_missing_is_copied() -> None:
    """Only 0.2 GB have to go for the other: 0.2 s, and a third of the 0.1 s that a whole wake adds."""
    expected = [700.0, 700.0] + [233.333333] * 4
    assert latencies_ms(scenario(policy={"eviction": "cost", "order": "fifo"}, models__segment="200MB")) == expected


def test_resident_models_only_run_and_queue() -> None:
    """Both fit, and come at once: 3 functions at 20 per minute, 1 s apart; a run of 1.5 s makes a queue grow."""
    made = scenario(
        gpus__memory="2GB",
        models__run="1500ms",
        models__wake=None,
        models__functions=3,
        arrivals__rate=20,
        arrivals__minutes=0.1,
    )
    assert latencies_ms(made) == [1500.0, 2000.0, 2500.0, 3000.0, 3500.0, 4000.0]


def test_neighbours_share_their_switch() -> None:
    """Two copies at once over 1.5 GB/s: 0.75 GB/s each, so 0.8 s and the 0.1 s; alone each would have its link."""
    made = scenario(gpus__count=2, gpus__switch="1.5GB", arrivals__rate=1e-3, arrivals__minutes=1000)
    simulation = main.simulation_of(made, made.policy, 0)
    latency_s = simulation.run(np.zeros(2), np.arange(2))
    assert latency_s == pytest.approx([0.9, 0.9])
    apart = scenario(gpus__count=2, gpus__switch="1.5GB", gpus__switches=[0, 1])
    simulation = main.simulation_of(apart, apart.policy, 0)
    assert simulation.run(np.zeros(2), np.arange(2)) == pytest.approx([0.7, 0.7])


def test_a_narrow_switch_limits_a_single_copy() -> None:
    made = scenario(gpus__switch="500MB", models__wake="1.3s", policy=LRU)
    assert latencies_ms(made) == [1300.0] * 6
    assert made.wakes_s == pytest.approx([1.3, 1.3])


def test_a_peer_copy_takes_what_peer_wake_says() -> None:
    """The GPU that has the model is busy with another one's run, so the free one takes it over 6 GB/s: 0.1 s."""
    made = scenario(
        gpus__count=2,
        gpus__memory="10GB",
        gpus__peer=[["0", "6GB"], ["6GB", "0"]],
        models__run="150ms",
        models__peer_wake="160ms",
        models__functions=3,
        policy={"placement": "torpor", "order": "fifo"},
    )
    simulation = main.simulation_of(made, made.policy, 0)
    # 0 and 1 wake on GPU 0, 2 on GPU 1; then 1 keeps GPU 0 busy, and 0 comes again and goes to GPU 1
    latency_s = simulation.run(np.array([0.0, 5.0, 10.0, 20.0, 20.01]), np.array([0, 2, 1, 1, 0]))
    assert latency_s == pytest.approx([0.7, 0.7, 0.7, 0.15, 0.16])
    assert (simulation.wakes, simulation.host_nbytes) == (4, 1_800_000_000)


def test_warm_requests_are_not_counted() -> None:
    made = scenario(gpus__memory="2GB", arrivals__warm=True)
    times_s, functions, warm = arrivals(made, 0)
    assert warm == 2
    assert times_s[:4].tolist() == pytest.approx([0.0, 0.7, 1.4, 31.4])
    assert functions[:4].tolist() == [0, 1, 0, 1]
    assert latencies_ms(made) == [100.0] * 6
    one = main.simulate(made, "x", made.policy, 0)
    assert (one.requests, one.wakes_per_request, one.host_gbps) == (6, 0.0, 0.0)
    assert one.gpu_busy == pytest.approx(0.6 / 150.1, abs=1e-6)


# --- arrivals


def test_a_poisson_process_has_its_rate() -> None:
    times_s, functions, warm = arrivals(scenario(arrivals__process="poisson", arrivals__rate=1000), 3)
    assert warm == 0
    assert abs(len(times_s) - 6000) < 5 * 6000**0.5
    assert abs(int(functions.sum()) - len(times_s) / 2) < 5 * len(times_s) ** 0.5 / 2
    assert (np.diff(times_s) >= 0).all()
    assert 0 <= times_s[0] <= times_s[-1] < 180


def test_a_trace_has_its_counts(tmp_path: Path) -> None:
    text = "func,app,m0,m1,m2\na,x,3,0,1\nb,y,0,2,5\n"
    (tmp_path / "t.csv").write_text(text)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert read_trace(tmp_path / "s.toml", "t.csv").tolist() == [[3, 0, 1], [0, 2, 5]]
    assert read_trace(tmp_path / "s.toml", "t.csv.gz").tolist() == [[3, 0, 1], [0, 2, 5]]
    traced = tree(arrivals={"process": "trace", "trace": "t.csv", "minutes": 2, "warm": False}, models__functions=5)
    times_s, functions, _ = arrivals(parse_scenario(traced, str(tmp_path / "s.toml")), 0)
    first = sorted((int(f), int(t // 60)) for f, t in zip(functions, times_s, strict=True) if f < 2)
    assert first == [(0, 0), (0, 0), (0, 0), (1, 1), (1, 1)]
    drawn = {f: [int(t // 60) for g, t in zip(functions, times_s, strict=True) if g == f] for f in (2, 3, 4)}
    assert all(minutes in ([0, 0, 0], [1, 1]) for minutes in drawn.values())


def test_functions_have_models_in_turn() -> None:
    models = [{"name": name, "size": "1MB", "run": "1ms", "functions": n} for name, n in (("a", 3), ("b", 1), ("c", 2))]
    assert [model.name for model in scenario(models=models).models] == ["a", "b", "c", "a", "c", "a"]


# --- reports


def test_a_function_complies_at_its_percentile_exactly() -> None:
    """Of 50 requests one may be late at 98 %; an answer that never came is late too."""
    times_s, functions = np.arange(150.0), np.repeat([0, 1, 2], 50)
    latency_s = np.full(150, 0.1)
    latency_s[[0, 50]] = 1.0
    latency_s[51] = np.nan
    latency_s[100] = np.nan
    one = report("x", times_s, functions, latency_s, [0.5] * 4, [0.98] * 4, [75.0, 0.0], 3, 10**9, 2.0)
    assert one.functions == 3  # the fourth was never asked
    assert one.compliant == pytest.approx(2 / 3, abs=1e-6)
    assert one.late == pytest.approx(4 / 150, abs=1e-6)
    assert (one.p50_ms, one.p98_ms, one.wakes_per_request) == (100.0, 1000.0, 0.02)
    assert one.gpu_busy == pytest.approx(75 / 2 / 149.1, abs=1e-6)
    assert "wall_s" not in one.as_json()
    none = report("x", times_s, functions, np.full(150, np.nan), [0.5] * 3, [0.98] * 3, [0.0], 0, 0, 0.0)
    assert (none.p50_ms, none.p98_ms, none.compliant, none.as_row()["p50_ms"]) == (None, None, 0.0, "-")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    cli.cli.main(["simulate", *arguments], standalone_mode=False)
    return capsys.readouterr().out


def small(tmp_path: Path) -> str:
    """The example with a fortieth of its requests, and what the papers' baselines need."""
    path = tmp_path / "small.toml"
    path.write_text(NODE.read_text().replace("functions = 65", "functions = 8").replace("minutes = 5", "minutes = 1"))
    native = 'native = "2.4GB"\ncold_start = "8s"\nallocate = "20ms"'
    path.write_text(path.read_text().replace("functions = 8", f"functions = 8\n{native}"))
    return str(path)


def test_equal_seeds_give_equal_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small(tmp_path)
    names = ",".join(["scenario", *POLICIES])
    first = shown(capsys, path, "--policy", names, "--json")
    assert shown(capsys, path, "--policy", names, "--json") == first
    assert shown(capsys, path, "--policy", names, "--json", "--seed", "7") != first
    read = json.loads(first)
    assert read["seed"] == 1
    assert [one["policy"] for one in read["policies"]] == ["scenario", *POLICIES]
    assert {**read["policies"][0], "policy": ""} == {**read["policies"][1], "policy": ""}  # it has no [policy]


def test_a_table_has_a_line_for_each_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, *lines = shown(capsys, small(tmp_path), "--policy", "torpor, fifo").splitlines()
    assert header.split("\t") == [
        "policy", "functions", "requests", "compliant", "p50_ms", "p98_ms",
        "late", "wakes", "busy", "GB/s", "link", "sim/s",
    ]  # fmt: skip
    assert [line.split("\t")[:2] for line in lines] == [["torpor", "64"], ["fifo", "64"]]


def test_several_seeds_give_a_mean_and_its_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small(tmp_path)
    read = json.loads(shown(capsys, path, "--policy", "torpor", "--seeds", "3", "--json"))
    assert (read["seed"], read["seeds"], read["pools"]) == (1, 3, "ideal")
    (one,) = read["policies"]
    alone = []
    for seed in ("1", "2", "3"):
        alone += json.loads(shown(capsys, path, "--policy", "torpor", "--seed", seed, "--json"))["policies"]
    assert one.pop("each_seed") == alone
    assert len({each["requests"] for each in alone}) > 1, "seeds make a difference"
    for key in ("compliant", "late", "p98_ms", "gpu_busy"):
        assert one[key] == pytest.approx(sum(each[key] for each in alone) / 3, abs=1e-6)
    _, line = shown(capsys, path, "--policy", "torpor", "--seeds", "3").splitlines()
    late = sorted(each["late"] for each in alone)
    assert f"{one['late']:.2%} ({late[0]:.2%} to {late[-1]:.2%})" in line.split("\t")


def test_who_misses_is_told_by_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small(tmp_path)
    (one,) = json.loads(shown(capsys, path, "--policy", "torpor", "--json"))["policies"]
    assert [model["name"] for model in one["models"]] == [model.name for model in load_scenario(path).tree.models]
    assert sum(model["functions"] for model in one["models"]) == one["functions"]
    requests = [model["requests"] for model in one["models"]]
    assert sum(requests) == one["requests"]
    shares = zip(requests, one["models"], strict=True)
    assert sum(count * model["late"] for count, model in shares) / one["requests"] == pytest.approx(
        one["late"], abs=1e-5
    )
    _, _, empty, title, header, *lines = shown(capsys, path, "--policy", "torpor", "--by-model").splitlines()
    assert (empty, title) == ("", "torpor, by model")
    assert header.split("\t") == ["model", "functions", "compliant", "late", "p50_ms", "p98_ms"]
    assert [line.split("\t")[0] for line in lines] == [model["name"] for model in one["models"]]


def test_a_link_is_busy_while_it_carries_bytes() -> None:
    """Six requests copy 0.6 GB over 1 GB/s each, as the other model has to go; the last ends after 5.7 s."""
    made = scenario(policy=LRU)
    assert latencies_ms(made) == [700.0] * 6
    found = main.simulate(made, "x", made.policy, 0)
    times_s, _, warm = arrivals(made, 0)
    span_s = float(times_s[-1] - times_s[warm]) + 0.7
    assert found.links == {"host-gpu0": pytest.approx(len(times_s[warm:]) * 0.6 / span_s, abs=1e-5)}
    assert found.as_row()["link"] == f"{found.links['host-gpu0']:.1%}"


def test_exact_pools_copy_what_pieces_of_memory_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same requests are answered; what is evicted differs, as bytes must lie together."""
    path = tmp_path / "tight.toml"
    path.write_text(Path(small(tmp_path)).read_text().replace('memory = "25GB"', 'memory = "2.5GB"'))
    found = {}
    for pools in ("ideal", "exact"):
        read = json.loads(shown(capsys, str(path), "--pools", pools, "--json"))
        assert read["pools"] == pools
        (found[pools],) = read["policies"]
    assert found["ideal"]["requests"] == found["exact"]["requests"]
    assert found["ideal"]["host_gbps"] > 0.5, "nothing is evicted"
    assert found["ideal"] != found["exact"]
    with pytest.raises(click.UsageError, match="'best' is not one of 'ideal', 'exact'"):
        shown(capsys, str(path), "--pools", "best")
    with pytest.raises(click.UsageError, match="0 is not in the range 1<=x<=1000"):
        shown(capsys, str(path), "--seeds", "0")


def test_what_was_moved_is_there_for_other_gpus(tmp_path: Path) -> None:
    """Not to be found there, it would be copied from the host: a sixth more bytes in all."""
    path = tmp_path / "tight.toml"
    path.write_text(Path(small(tmp_path)).read_text().replace('memory = "25GB"', 'memory = "2.5GB"'))
    made = load_scenario(str(path))
    simulation = main.simulation_of(made, made.policy, 1, "exact")
    assert isinstance(simulation, Simulation)
    simulation.run(*arrivals(made, 1))
    residencies = [gpu.residency for gpu in simulation.gpus]
    assert sum(residency.moved_nbytes for residency in residencies) > 10**9, "nothing is moved"
    for residency in residencies:
        resident = list(residency.pool.segments())
        assert [segment for segment, _ in residency.pin(resident)] == resident


def test_a_terminal_of_80_columns_holds_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")  # no colours
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    head, columns, line = shown(capsys, small(tmp_path), "--policy", "torpor-random").splitlines()
    assert head.startswith("64 functions, ")
    assert columns.split() == ["policy", "compliant", "p50_ms", "p98_ms", "late", "wakes", "busy", "link", "sim/s"]
    assert line.startswith("torpor-random ")
    assert "…" not in line


def test_the_example_is_read() -> None:
    example = load_scenario(str(NODE))
    assert (len(example.models), example.policy, example.topology.switches) == (520, SimulatedPolicy(), (0, 0, 1, 1))
    assert example.wakes_s[7] == pytest.approx(0.144)


def test_long_runs_say_how_far_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    made = scenario(gpus__memory="2GB", models__run="1ms", arrivals__rate=3000)
    main.simulate(made, "x", made.policy, 0)
    assert capsys.readouterr().err == ""  # nobody looks
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    main.simulate(made, "x", made.policy, 0)
    told = [f"\r\x1b[Kx: {share} of 18,000 requests" for share in ("0%", "46%", "91%")]
    assert capsys.readouterr().err == "".join([*told, "\r\x1b[K"])


def test_progress_is_one_line_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    shown = progress.Progress()
    shown.show("search 1 of 6, infless-oracle, 560 functions, try 3 of at most 12: 32 GPUs", 1, 4000)
    told = capsys.readouterr().err.removeprefix(progress.CLEAR)
    assert told == "search 1 of 6, infless-oracle, 560 fu: 0% of 4,000 requests"


# --- bad input


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"gpus__count": 0}, "gpus.count is 0; write a number from 1 to 1024"),
        ({"gpus__count": "4"}, "gpus.count: expected `int`, got `str`; see docs/simulator.md"),
        ({"gpus__memory": "lots"}, "gpus.memory: 'lots' is not a size; write a number and one of B, KB"),
        ({"gpus__memory": None}, "gpus.memory is missing; write it"),
        ({"gpus__memory": "9" * 400 + "GB"}, f"gpus.memory: {'9' * 400}GB is more than any machine has; write less"),
        ({"gpus__link": 0}, "gpus.link is 0; write more than 0 bytes"),
        ({"gpus__speed": 1}, "gpus.speed is not a key; write one of count, memory, link, switch, switches, peer"),
        ({"gpus__switches": [0, 0]}, "gpus.switches is of 2; write one number for each of 1 GPUs"),
        ({"gpus__peer": [["0", "1GB"]]}, "gpus.peer is not square; write one bandwidth, or 1 lists of 1"),
        ({"gpus": None}, "gpus is missing; write it"),
        ({"models": []}, "models is an empty list; write at least one [[models]]"),
        (
            {"models__size": "2GB"},
            "models[0].size is 2,000,000,000 bytes (m); no GPU holds more than gpus.memory, 1,000,000,000: use a",
        ),
        ({"models__run": "fast"}, "models[0].run is 'fast'; write a number above 0 and one of us, ms, s, m, h"),
        ({"models__run": 0}, "models[0].run is 0; write a number above 0"),
        ({"models__deadline": "-1s"}, "models[0].deadline is '-1s'; write a number above 0"),
        ({"models__wake": "1ms"}, "models[0].wake is '1ms'; run and copy alone take 600ms: write at least that"),
        ({"models__percentile": 100}, "models[0].percentile is 100.0; write a number between 0 and 100"),
        ({"models__functions": 0}, "models[0].functions is 0; write at least 1, or remove the model"),
        ({"models__functions": 10**9}, "models.functions is 100001; write at most 100,000 in all"),
        ({"models__colour": "red"}, "models[0].colour is not a key; write one of name, size, run, host, wake"),
        ({"arrivals__rate": -1}, "arrivals.rate is -1.0; write requests per minute and function, above 0"),
        ({"arrivals__rate": float("nan")}, "arrivals.rate is nan; write requests per minute and function, above 0"),
        ({"arrivals__rate": None}, "arrivals.rate is missing; write requests per minute and function"),
        ({"arrivals__rate": 1e9}, "arrivals.rate makes 6,000,000,000 requests; at most 20,000,000 are simulated"),
        ({"arrivals__rate": 0.1}, "arrivals: no request comes; write a larger rate or more minutes"),
        ({"arrivals__minutes": 0}, "arrivals.minutes is 0.0; write a number above 0"),
        ({"arrivals__process": "poison"}, "arrivals.process is 'poison'; write one of poisson, regular, trace"),
        ({"arrivals__trace": "t.csv"}, "arrivals.trace is 't.csv'; write process = \"trace\", or remove it"),
        ({"arrivals": {"process": "trace"}}, "arrivals.trace is missing; write the path of a CSV file of counts"),
        (
            {"arrivals": {"process": "trace", "trace": "t", "rate": 1}},
            "arrivals.rate is 1.0; remove it: a trace has its own rates",
        ),
        ({"policy__order": "lifo"}, "[policy]: order is 'lifo'; write one of fifo, edf"),
        ({"policy__window": 0}, "[policy]: window is 0; write a number from 1 to 1099511627776"),
        ({"policy__half_life_ms": 10**400}, f"[policy]: half_life_ms is {10**400}; write a number from 1"),
        ({"policy__passed_over_ms": 10**400}, f"[policy]: passed_over_ms is {10**400}; write a number from 0"),
        ({"policy__colour": 1}, "policy.colour is not a key; write one of order, placement, eviction"),
        ({"seed": -1}, "seed is -1; write a whole number from 0 to 9223372036854775807"),
        ({"seed": 1 << 63}, "seed is 9223372036854775808; write a whole number from 0"),
        ({"models__run": "9" * 400 + "s"}, f"models[0].run is '{'9' * 400}s'; write a number above 0 and one of us"),
        ({"models__deadline": "300001h"}, "models[0].deadline is '300001h'; write a number above 0 and one of"),
        ({"arrivals": {"process": "trace", "trace": "a\0b"}}, "arrivals.trace: a\0b: cannot be read as CSV"),
    ],
)  # fmt: skip
def test_bad_scenarios_are_told_file_key_and_cure(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as told:
        arrivals(scenario(**changes), 0)
    assert str(told.value).startswith(f"s.toml: {text}")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "is not there; write a path as seen from the scenario's folder"),
        (b"", "no counts; write a header with columns m0, m1, ... and one line per function"),
        (b"func,m0\n", "no counts; write a header"),
        (b"func,minute\na,1\n", "no counts; write a header"),
        (b"func,m0,m1\na,1\n", "line 2 has 2 fields; write 3, as the header has"),
        (b"func,m0,m1\na,1,2\nb,1,x\n", "line 3: m1 is 'x'; write the number of requests in it"),
        (b"func,m0\na,-1\n", "line 2: m0 is '-1'; write the number"),
        (b"func,m0\na,1.5\n", "line 2: m0 is '1.5'; write the number"),
        (b'func,m0\n"a,1\n', "cannot be read as CSV"),
        (b"\xff\xfe", "cannot be read as CSV"),
    ],
)
def test_malformed_traces(tmp_path: Path, content: bytes | None, text: str) -> None:
    if content is not None:
        (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ConfigError) as told:
        read_trace(tmp_path / "s.toml", "t.csv")
    assert f"s.toml: arrivals.trace: {tmp_path}/t.csv: {text}" in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("content", [b"func,m0\na,1\n", gzip.compress(b"func,m0\na,1\n" * 99, mtime=0)[:-12], b""])
def test_damaged_compressed_traces(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.csv.gz").write_bytes(content)
    with pytest.raises(ConfigError, match=r"t\.csv\.gz: (cannot be read as CSV|no counts)"):
        read_trace(tmp_path / "s.toml", "t.csv.gz")


def test_a_trace_is_not_longer_than_it_is(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("func,m0\na,1\n")
    made = tree(arrivals={"process": "trace", "trace": "t.csv", "minutes": 2})
    with pytest.raises(ConfigError, match=r"arrivals\.minutes is 2; write a whole number of at most 1"):
        arrivals(parse_scenario(made, str(tmp_path / "s.toml")), 0)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file or directory; give the path of a scenario file"),
        (b"[gpus", "not TOML: "),
        (b"seed = " + b"9" * 5000, "not TOML: Exceeds the limit"),
        (b"a = " + b"[" * 5000, "not TOML: "),
        (b"\xff", "not UTF-8 text; write the scenario as TOML"),
        (
            b'[gpus]\ncount = 1\nmemory = 1\n[arrivals]\nrate = 1\n[[models]]\nname = "a\\nb"\nsize = 2\nrun = 1\n',
            "models[0].size is 2 bytes (a b); no GPU holds more than gpus.memory",
        ),
    ],
)
def test_unreadable_scenarios(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    text: str,
) -> None:
    path = tmp_path / "s.toml"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["dormouse", "simulate", str(path)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"dormouse: {path}: {text}")
    assert told.count("\n") == 1


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('[gpus]\ncount = 1\nmemory = 9\n[arrivals]\nrate = 9\n[[models]]\nname = "m"\nsize = 9\nrun = 9\n')
    command = [sys.executable, "-m", "dormouse.core.cli.main", "simulate", str(path)]
    for options in ([], ["--json"]):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run([*command, *options], stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.stderr == "dormouse: cannot print: No space left on device; make room, or print elsewhere\n"
        assert done.returncode == 1


def test_policies_are_what_they_are_named_after() -> None:
    def differ(name: str, other: str) -> dict[str, object]:
        one, two = (msgspec.structs.asdict(POLICIES[policy]) for policy in (name, other))
        return {key: value for key, value in one.items() if two.get(key, value) != value}

    assert differ("torpor", "default") == {
        "order": "rrc-latency", "placement": "torpor", "eviction": "torpor", "passed_over_ms": 0
    }  # fmt: skip
    assert differ("torpor-edf", "torpor") == {"order": "rrc-deadline"}
    assert differ("torpor-drop", "torpor") == {"drop_ms": 5000}
    assert differ("torpor-fifo", "torpor") == {"order": "fifo"}
    assert differ("torpor-random", "torpor") == {"placement": "random"}
    assert differ("torpor-lru", "torpor") == {"eviction": "lru"}
    assert differ("torpor-block", "torpor") == {"allocate": True}
    assert differ("simple-swap", "torpor") == {"order": "fifo", "placement": "random", "eviction": "lru"}
    for order in ("fifo", "edf", "feasible"):
        assert differ(order, "default") == {"order": order}


def test_a_function_of_which_a_request_was_dropped_is_asked_no_more() -> None:
    """Runs of 1.5 s come every 0.5 s: the queue grows until requests have waited for 2 s."""
    made = scenario(
        gpus__memory="2GB", models__run="1500ms", models__wake=None, models__functions=3, arrivals__rate=40,
        arrivals__minutes=0.2, policy={"order": "fifo", "drop_ms": 2000},
    )  # fmt: skip
    simulation = main.simulation_of(made, made.policy, 0)
    assert isinstance(simulation, Simulation)
    times_s, functions, warm = arrivals(made, 0)
    latency_s = simulation.run(times_s, functions, warm)[warm:]
    answered = ~np.isnan(latency_s)
    assert latency_s[answered].max() <= 2.0
    assert 0 < answered.sum() < len(answered)
    for function in range(3):
        mine = answered[functions[warm:] == function].tolist()
        assert mine == sorted(mine, reverse=True), "answered, and then no more"
    simulation.core.check()
    assert not simulation.core.waiting


def test_unknown_policies(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--policy: 'fastest' is unknown; write one of scenario, default, torpor"):
        main.choose(scenario(), "fifo,fastest")
