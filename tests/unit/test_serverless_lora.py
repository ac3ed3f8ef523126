"""The benchmarks of ServerlessLoRA: what they read, what they count, and that a run of them is whole."""

import gzip
from pathlib import Path

import pytest

from benchmarks import serverless_lora as arms
from benchmarks import serverless_lora_sensitivity as sensitivity
from benchmarks import serverless_lora_tables as tables
from benchmarks.serverless_lora_figures import LIKE, ablations, breakdown, claims, means, table_1, workload
from benchmarks.serverless_lora_holding import Lease, held
from benchmarks.serverless_lora_plots import draw
from benchmarks.serverless_lora_published import OWN, TABLE_1, TABLE_3
from benchmarks.serverless_lora_scaling import full_batches, show_full, table_2
from benchmarks.serverless_lora_systems import ABLATIONS, SYSTEMS, Constants, parts, run_class, specs_of
from benchmarks.serverless_lora_workload import BACKBONES, CLASSES, GPU_NBYTES, Pairs, arrivals, lengths, models


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Eight functions of each class, asked in turn, every 100 s; one of them twice at once."""
    rows = [f"{kind},{n},f,4h_a,{100.0 * (n + 8 * turn)}" for kind in CLASSES for turn in (0, 1) for n in range(8)]
    rows.append("Normal,0,f,4h_a,0.0")
    texts = {
        "azure_func2019_3x8_4h_arrivals": "\n".join(["class,idx,func,window,t_s", *rows]),
        "gsm8k_lengths": "id,p_llama2,r_llama2\ntest-0,60,30\ntrain-0,1,1\ntest-1,80,50",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
    return tmp_path


def test_it_reads_lengths_of_the_test_set_and_arrivals_of_a_class(data: Path) -> None:
    assert lengths(data) == ((60, 30), (80, 50))
    asked = arrivals(data, "Normal", 2.0)
    assert asked.times_s.tolist() == [0.0, 0.0, *[50.0 * n for n in range(1, 16)]]
    assert sorted(set(asked.functions.tolist())) == list(range(8))
    assert len(arrivals(data, "Bursty", 1.0, most=3).times_s) == 3


def test_a_backbone_is_shared_by_its_four_functions() -> None:
    pairs: Pairs = ((60, 30),)
    specs = models(pairs)
    assert [spec.base for spec in specs] == ["Llama2-7B"] * 4 + ["Llama2-13B"] * 4
    assert BACKBONES[0].kv_nbytes == 524_288
    assert sum({spec.base: spec.base_nbytes for spec in specs}.values()) < GPU_NBYTES


PAIRS: Pairs = ((60, 30),)


def test_what_an_instance_holds_is_counted_once() -> None:
    """Two leases that overlap, of one instance; one of another over the same backbone, on another GPU; from 50 s on."""
    specs = specs_of(SYSTEMS["Dormouse"], PAIRS, Constants())
    adapter, base = specs[0].nbytes - specs[0].base_nbytes, specs[0].base_nbytes
    leases = [
        Lease(0, 3, 0.0, 100.0, 10.0, False),
        Lease(0, 3, 90.0, 200.0, 10.0, True),
        Lease(1, 4, 100.0, 150.0, 5.0, True),
    ]
    found = held(leases, specs, True, 50.0, 0.0)
    own = adapter + 473_000_000
    gb_s = found.active_gb_s["Llama2-7B"] + found.idle_gb_s["Llama2-7B"]
    assert gb_s == pytest.approx(((own + base) * 150 + (own + base) * 50) / 1e9)
    assert found.active_gb_s["Llama2-7B"] == pytest.approx(25 * (own + base) / 1e9)
    assert (found.began["Llama2-7B"], found.loaded["Llama2-7B"]) == (2, 2)
    longer = held(leases, specs, True, 50.0, 30.0)
    assert sum(longer.idle_gb_s.values()) == pytest.approx(sum(found.idle_gb_s.values()) + 2 * 30 * (own + base) / 1e9)
    assert held([], specs, True, 0.0, 0.0, 10.0).active_gb_s["Llama2-13B"] == pytest.approx(
        (4 * (specs[4].nbytes - specs[4].base_nbytes + 473_000_000) + specs[4].base_nbytes) / 1e9 * 10
    )


def test_functions_of_one_process_have_one_context() -> None:
    specs = specs_of(SYSTEMS["dLoRA-like"], PAIRS, Constants())
    adapter, base = specs[0].nbytes - specs[0].base_nbytes, specs[0].base_nbytes
    found = held([], specs, True, 0.0, 0.0, 10.0)
    assert found.active_gb_s["Llama2-7B"] == pytest.approx((base + 4 * adapter + 473_000_000) / 1e9 * 10)


def test_table_2_is_arithmetic() -> None:
    assert table_2()["ratio"] == pytest.approx(73 / 32, rel=0.002)


def test_published_numbers_agree_with_what_the_text_says_of_them() -> None:
    """89 % less cost is the 13B functions' beside InstaInfer, "Bursty"; and 3 are Table 1's relative numbers."""
    insta, own, vllm = TABLE_1["InstaInfer-like"], TABLE_1[OWN], TABLE_1["vLLM-like"]
    assert 1 - own.cost_usd[1][2] / insta.cost_usd[1][2] == pytest.approx(0.89, abs=0.005)

    def relative(row: object, size: int, kind: int) -> float:
        assert isinstance(row, type(own))
        times = vllm.e2e_ms[size][kind] * vllm.cost_usd[size][kind]
        return times / row.e2e_ms[size][kind] / row.cost_usd[size][kind]

    assert relative(own, 1, 2) == pytest.approx(7.32, abs=0.01)
    assert relative(TABLE_1["ServerlessLLM-like"], 1, 2) == pytest.approx(0.58, abs=0.01)
    assert relative(TABLE_1["dLoRA-like"], 0, 0) == pytest.approx(2.72, abs=0.01)
    assert TABLE_3[LIKE][1] - TABLE_3[LIKE][0] == 2401


def test_a_start_is_the_sum_of_what_its_system_has_not_ahead() -> None:
    constants = Constants()
    for name, backbone_s in (("ServerlessLLM-like", 1.0), ("InstaInfer-like", 3.6)):
        spec = specs_of(SYSTEMS[name], PAIRS, constants)[0]
        each, llm = parts(spec, SYSTEMS[name], constants), spec.llm
        assert llm is not None
        assert each.backbone_s == pytest.approx(backbone_s)
        assert llm.start_s == pytest.approx(3.7 + 0.3 + backbone_s + 0.37)
        assert llm.seat_s == each.kernels_s == pytest.approx(0.5 - llm.cost.stream_s(60, 1, 256))
    assert specs_of(ABLATIONS[LIKE], PAIRS, constants)[0].llm.start_s == 0.0  # type: ignore[union-attr]
    assert len(specs_of(SYSTEMS["ServerlessLLM-like"], PAIRS, constants)) == 32
    assert len(specs_of(SYSTEMS["Dormouse"], PAIRS, constants)) == 8


def test_each_arm_differs_in_what_it_is_named_for(data: Path) -> None:
    pairs = lengths(data)
    load = arms.LOADS[0]._replace(faster=1.0)
    ours, literal, fixed = (
        arms.run(arms.ARMS[name], "Normal", load, data, pairs)
        for name in (arms.OURS, "fill or expire, literally", "batches of 10, 500 ms")
    )
    assert ours.streams == 17
    assert ours.late == 0.0
    assert literal.ttft_p50 > 2400
    assert fixed.ttft_p50 == pytest.approx(ours.ttft_p50 + 500, abs=20)
    timed = arms.run(arms.ARMS[arms.OURS], "Normal", load, data, pairs, timed=True)
    assert timed.decision_p99_us is not None
    assert timed.ttft_p99 == ours.ttft_p99


def test_goals_compare_both_ways() -> None:
    one = {"ttft_p50": 100.0, "ttft_p99": 200.0, "late": 0.0}
    for theirs, met in (
        ({**one, "ttft_p99": 230.0}, True),
        ({**one, "ttft_p50": 90.0, "ttft_p99": 230.0}, False),
        ({**one, "ttft_p99": 210.0}, False),
        ({**one, "late": 0.2}, True),
    ):
        goal = arms._goal("arm", {"case": {arms.OURS: one, "arm": theirs}})
        assert goal.met is met


def test_systems_differ_in_what_they_are_named_for(data: Path) -> None:
    """Requests of each function are 800 s apart, so a platform that keeps instances for 300 s starts each anew."""
    pairs = lengths(data)
    known = SYSTEMS | ABLATIONS
    names = ("Dormouse", "vLLM-like", "ServerlessLLM-like", LIKE, "NBS: no shared backbone", "NPL: nothing pre-loaded")
    ours, always, llm, like, nbs, npl = (run_class(known[name], "Normal", data, pairs) for name in names)
    start_s = 3.7 + 0.3 + 1.0 + 0.37 + 0.5
    assert llm.by["Llama2-7B"].ttft_ms == pytest.approx(1e3 * start_s, abs=20)
    assert (llm.held.began["Llama2-7B"], llm.held.loaded["Llama2-7B"]) == (8, 8)
    assert npl.by["Llama2-7B"].ttft_ms < llm.by["Llama2-7B"].ttft_ms
    assert ours.by["all"].ttft_ms < 60 < nbs.by["all"].ttft_ms
    assert ours.cost_cny(1.0) < llm.cost_cny(1.0) < always.cost_cny(1.0)
    assert like.cost_cny(1.0) < nbs.cost_cny(1.0)
    assert llm.cost_cny(0.2) < llm.cost_cny(1.0)


def test_tables_and_figure_are_whole(data: Path, tmp_path: Path) -> None:
    pairs, constants = lengths(data), Constants()
    systems = {
        name: run_class(each, "Normal", data, pairs, 12, constants) for name, each in (SYSTEMS | ABLATIONS).items()
    }
    runs = {"Normal": systems}
    for text, rows in (
        (means(runs, "ttft_ms", "x"), 2),
        (means(runs, "late", "x"), 2),
        (breakdown(pairs, constants), 6),
        (workload(systems, pairs, constants), 4),
        (table_1(runs, 1.0), 12),
        (ablations(systems, 1.0), 9),
        (claims(runs, 1.0), 12),
        (show_full(full_batches(pairs, 8)), 4),
    ):
        lines = text.splitlines()
        assert len(lines) == 2 + rows
        assert len({line.count("|") for line in lines}) == 1
        assert " nan" not in text
    assert tables.as_json(systems["Dormouse"])["by"]["all"]["streams"] == 12
    draw(runs, tmp_path / "lora.png", 1.0)
    assert (tmp_path / "lora.png").read_bytes().startswith(b"\x89PNG")
    assert [goal.met for goal in tables.goals(runs, 1.0)][:2] == [True, True]


def test_the_document_has_a_place_for_each_table() -> None:
    text = (tables.ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    names = ("claims", "6", "7", "8", "9", "10", "11", "12", "sensitivity")
    assert [name for name in names if f"<!-- figure lora-{name} -->\n" not in text] == []


def test_one_constant_is_changed_at_a_time() -> None:
    base = Constants()
    for name in Constants._fields:
        for _, changed in sensitivity.changed(base, name):
            assert [each for each in Constants._fields if getattr(base, each) != getattr(changed, each)] == [name]
    text = sensitivity.show({"a": 10.0}, {"x": {"+20%": {"a": 11.0}, "-20%": {"a": 5.0}}, "y": {"+20%": {"a": 10.0}}})
    assert text.splitlines()[2] == "| a | 10 | x -20%: 5 | x +20%: 11 | y +20%: 10 |"
