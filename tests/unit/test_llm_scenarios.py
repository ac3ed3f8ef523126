"""Scenarios with language models: what they may say, what is refused, and what comes out."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dormouse.controller.simulator.main import main, simulate
from dormouse.controller.simulator.report import mean
from dormouse.controller.simulator.scenario import POLICIES, load_scenario, parse_scenario
from dormouse.controller.simulator.streams.model import Lengths
from dormouse.schemas.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "scenarios" / "llm.toml"

LLM: dict[str, Any] = {
    "kv": "100KB", "step": "20ms", "per_sequence": "1ms", "per_context": "1us", "per_prompt": "0.5ms",
    "prompt": 100, "output": {"mean": 40, "variation": 0.7, "most": 300}, "ttft": "500ms", "tpot": "60ms",
}  # fmt: skip

TREE: dict[str, Any] = {
    "gpus": {"count": 1, "memory": "2GB", "link": "1GB"},
    "arrivals": {"process": "poisson", "rate": 20, "minutes": 2},
    "models": [
        {"name": "chat", "size": "300MB", "percentile": 90.0, "llm": LLM},
        {"name": "m", "size": "400MB", "run": "50ms", "functions": 3},
    ],
}


def tree(**changes: Any) -> dict[str, Any]:
    """With keys of the language model changed; None: removed."""
    changed = copy.deepcopy(TREE)
    llm = changed["models"][0]["llm"] | changes
    changed["models"][0]["llm"] = {key: value for key, value in llm.items() if value is not None}
    return changed


def test_the_example_says_ttft_and_tpot(capsys: pytest.CaptureFixture[str]) -> None:
    main(str(EXAMPLE), json_=True)
    first = capsys.readouterr().out
    main(str(EXAMPLE), json_=True)
    assert capsys.readouterr().out == first
    (policy,) = json.loads(first)["policies"]
    assert [each["name"] for each in policy["streams"]] == ["llama8B", "llama3B"]
    for each in policy["streams"]:
        assert each["streams"] > 50
        assert 0 < each["ttft_p50_ms"] < each["ttft_p99_ms"]
        assert 0 < each["tpot_p50_ms"] < each["tpot_p99_ms"]
    main(str(EXAMPLE), seed=2, json_=True)
    assert capsys.readouterr().out != first


def test_the_table_has_language_models(capsys: pytest.CaptureFixture[str]) -> None:
    main(str(EXAMPLE))
    assert "scenario, language models\nmodel\tstreams\tcompliant\tttft_p50_ms" in capsys.readouterr().out


def test_a_scenario_without_them_says_nothing_of_streams() -> None:
    without = copy.deepcopy(TREE)
    del without["models"][0]
    report = simulate(parse_scenario(without, "x"), "default", POLICIES["default"], 1)
    assert "streams" not in report.as_json()


def test_alone_it_is_as_the_formula_says() -> None:
    one = tree(output=41)
    one["models"] = one["models"][:1]
    one["arrivals"] = {"process": "regular", "rate": 5, "minutes": 2}
    report = simulate(parse_scenario(one, "x"), "default", POLICIES["default"], 1)
    (streams,) = report.streams
    assert streams.ttft_p50_ms == streams.ttft_p99_ms == pytest.approx(20 + 50)
    decode_ms = sum(20 + 1 + 0.001 * context for context in range(101, 141)) / 40
    assert streams.tpot_p50_ms == pytest.approx(decode_ms, abs=1e-3)
    assert (streams.met, streams.compliant, report.late) == (1.0, 1.0, 0.0)
    assert report.p50_ms == streams.ttft_p50_ms


@pytest.mark.parametrize(("key", "value"), [("ttft", "50ms"), ("tpot", "10ms")])
def test_each_wanted_time_counts(key: str, value: str) -> None:
    report = simulate(parse_scenario(tree(**{key: value}), "x"), "default", POLICIES["default"], 1)
    (streams,) = report.streams
    assert getattr(streams, f"{key}_met") == streams.met == streams.compliant == 0.0
    chat, other = report.models
    assert (chat.late, chat.compliant) == (1.0, 0.0)
    assert (other.late, other.compliant) == (0.0, 1.0)


def test_lengths_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("id,prompt,output\na,10,3\nb,500,7\n")
    scenario = parse_scenario(tree(prompt=None, output=None, lengths="lengths.csv"), str(tmp_path / "s.toml"))
    (spec,) = {spec.llm for spec in scenario.models if spec.llm is not None}
    prompts, outputs = spec.draw(np.random.default_rng(0), 100)
    assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) == {(10, 3), (500, 7)}


def test_lengths_have_the_mean_that_is_written() -> None:
    drawn = Lengths(mean=200.0, variation=1.0, most=100_000).draw(np.random.default_rng(0), 100_000)
    assert drawn.mean() == pytest.approx(200, rel=0.02)
    assert drawn.std() / drawn.mean() == pytest.approx(1.0, rel=0.05)
    assert drawn.min() >= 1
    assert Lengths(mean=200.0, variation=1.0, most=300).draw(np.random.default_rng(0), 1000).max() == 300


def test_every_policy_sees_the_same_lengths_and_seeds_differ() -> None:
    scenario = parse_scenario(tree(), "x")
    reports = [simulate(scenario, name, POLICIES[name], 1) for name in ("default", "fifo", "sllm", "torpor")]
    rates = [report.streams[0].tokens_per_s for report in reports]
    assert min(rates) > 0.95 * max(rates)
    seeds = [simulate(scenario, "default", POLICIES["default"], seed) for seed in (1, 2)]
    both = mean(seeds).streams[0]
    assert both.ttft_p50_ms == pytest.approx(sum(each.streams[0].ttft_p50_ms or 0 for each in seeds) / 2, abs=1e-5)


def test_a_cluster_has_the_streams_of_all_nodes() -> None:
    cluster = tree()
    cluster["gpus"]["nodes"] = 2
    cluster["models"][0]["functions"] = 4
    report = simulate(parse_scenario(cluster, "x"), "default", POLICIES["default"], 1)
    assert report.streams[0].streams == report.models[0].requests > 100
    assert report.streams[0].failed == 0


@pytest.mark.parametrize("name", ["native", "torpor-drop"])
def test_policies_that_know_no_streams_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="chat is a language model, and the policy has"):
        simulate(parse_scenario(tree(), "x"), name, POLICIES[name], 1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv": None}, r"models\[0\].llm.kv is missing; write it"),
        ({"step": None}, r"models\[0\].llm.step is missing; write it"),
        ({"step_tokens": 0}, r"models\[0\].llm.step_tokens is 0; write the tokens of prompts"),
        ({"layers": 30}, r"models\[0\].llm.layers is not a key; write one of kv, step, ttft"),
        ({"step": "0ms"}, r"llm.step is '0ms'; write what any step takes"),
        ({"per_prompt": "-1ms"}, r"llm.per_prompt is '-1ms'; write a number above 0"),
        ({"free_tokens": -1}, r"llm.free_tokens is -1; write how many tokens of prompts take no time"),
        ({"ttft": "0s"}, r"llm.ttft is '0s'; write a number above 0"),
        ({"tpot": "soon"}, r"llm.tpot is 'soon'; write a number above 0"),
        ({"prompt": 0}, r"llm.prompt is 0; write tokens, as 200"),
        ({"prompt": None}, r"llm.prompt is missing; write tokens, as 200"),
        ({"prompt": 10**7}, r"llm.prompt is 10000000; write tokens"),
        ({"output": {"mean": 10, "variation": -1, "most": 20}}, r"llm.output.variation is -1.0; write the standard"),
        ({"output": {"mean": 0.2, "most": 20}}, r"llm.output.mean is 0.2; write tokens"),
        ({"output": {"mean": 30, "most": 20}}, r"llm.output.most is 20; write the mean or more"),
        ({"output": {"mean": 30}}, r"llm.output.most is missing; write it"),
        ({"output": {"mean": 30, "max": 20}}, r"llm.output.max is not a key; write one of mean, most, variation"),
        ({"context": 350}, r"llm.context is 350; the longest prompt and output together are 400 tokens"),
        ({"context": 10**9}, r"llm.context is 1000000000; write 1 to 1,000,000"),
        ({"kv": "10MB"}, r"llm.kv is '10MB'; the model and one sequence of 400 tokens need 4,300,000,000 bytes"),
        ({"lengths": "gone.csv"}, r"llm.prompt is given beside lengths; write one of them"),
        ({"prompt": None, "output": None, "lengths": "gone.csv"}, r"llm.lengths: .*gone.csv: is not there; write"),
        ({"idle": "0s"}, r"llm.idle is '0s'; write a number above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_scenario(tree(**changes), "s.toml")


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("a,b\n1,2\n", "no lengths; write a header with the columns prompt and output"),
        ("prompt,output\n", "no lengths"),
        ("prompt,output\n1\n", "line 2 has 1 fields; write 2"),
        ("prompt,output\n1,2\n1,0\n", "line 3: lengths are 1, 0; write tokens, at least 1 of each"),
        ("prompt,output\n1,x\n", "line 2: lengths are 1, x; write tokens"),
        ("prompt,output\n9999,2\n", "the longest prompt and output together are 10,001 tokens"),
        ('prompt,output\n"1,2\n', "cannot be read as CSV"),
    ],
)
def test_a_file_of_lengths_that_makes_no_sense_is_refused(lines: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text(lines)
    with pytest.raises(ConfigError, match=text):
        parse_scenario(tree(prompt=None, output=None, lengths="l.csv"), str(tmp_path / "s.toml"))


def test_a_file_of_lengths_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="write UTF-8 text"):
        parse_scenario(tree(prompt=None, output=None, lengths="l.csv"), str(tmp_path / "s.toml"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run", "10ms"), ("host", "10ms"), ("wake", "10s"), ("peer_wake", "10s"), ("deadline", "2s"),
        ("activation", "1MB"), ("idempotent", True), ("native", "1GB"), ("native_run", "1s"), ("cold_start", "1s"),
        ("allocate", "1s"), ("instances", 2),
    ],
)  # fmt: skip
def test_keys_of_other_models_are_refused(key: str, value: object) -> None:
    changed = tree()
    changed["models"][0][key] = value
    with pytest.raises(ConfigError, match=rf"models\[0\].{key} is .*; remove it: chat has \[models.llm\], and "):
        parse_scenario(changed, "s.toml")


def test_a_model_that_is_none_needs_its_run() -> None:
    changed = tree()
    del changed["models"][1]["run"]
    with pytest.raises(ConfigError, match=r"models\[1\].run is missing; write it"):
        parse_scenario(changed, "s.toml")


def test_the_example_is_the_one_that_the_page_names() -> None:
    assert load_scenario(str(EXAMPLE)).models[0].llm is not None


def test_exact_pools_know_kv() -> None:
    """Memory is short: weights, functions and KV have no room beside each other."""
    short = tree(kv="1MB")
    short["gpus"]["memory"] = "900MB"
    scenario = parse_scenario(short, "x")
    report = simulate(scenario, "default", POLICIES["default"], 1, pools="exact")
    (streams,) = report.streams
    assert streams.failed == 0
    assert report.wakes_per_request > 0
