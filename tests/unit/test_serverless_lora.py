"""The benchmarks of ServerlessLoRA: what they read, what they count, and that a run of them is whole."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from benchmarks import serverless_lora as arms
from benchmarks import serverless_lora_tables as tables
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


def test_what_is_kept_is_counted_once() -> None:
    """Two that overlap, and one that comes when nothing is kept any more."""
    times_s, over_s = np.array([0.0, 100.0, 1000.0]), np.array([5.0, 5.0, 5.0])
    assert tables._kept_s(times_s, over_s) == pytest.approx(100 + 5 + tables.KEPT_S + 5 + tables.KEPT_S)


def test_table_2_is_arithmetic() -> None:
    assert tables.table_2()["ratio"] == pytest.approx(73 / 32, rel=0.002)


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


def test_without_a_shared_backbone_memory_costs_more_and_time_does_not(data: Path) -> None:
    pairs = lengths(data)
    ours, apart, always = (
        tables.run(tables.SYSTEMS[name], "Normal", data, pairs, 99)
        for name in ("Dormouse", "NBS: no shared backbone", "vLLM-like")
    )
    assert apart.gb_hours > 1.3 * ours.gb_hours
    assert always.gb_hours > 3 * ours.gb_hours
    assert apart.ttft_ms == pytest.approx(ours.ttft_ms, rel=0.5)
