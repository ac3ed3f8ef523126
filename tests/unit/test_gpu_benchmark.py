"""`make gpu` without a GPU: the benchmark runs over the fake driver, and the page is written from what comes out."""

import argparse
import importlib.machinery
import importlib.util
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import needs
import pytest
from cuda_child import cuda_server, in_child
from device_suite import MIB
from fake_cuda.harness import Control

from dormouse.core.version import package_version

__all__ = ["cuda_server"]

ROOT = Path(__file__).parents[2]


@in_child(FAKE_CUDA_MODE="eager")
def test_everything_is_measured(control: Control) -> None:
    from benchmarks import gpu

    results = {
        "plain": gpu.plain_copies(8 * MIB, 1),
        "wake": {pool: gpu.wake(pool, 40 * MIB, 2) for pool in ("regions", "pages")},
        "granules": gpu.granules(2),
        "pinning": gpu.pinning(8 * MIB),
        "views": gpu.views(10),
    }
    assert [goal.goal for goal in gpu.goals(results)] == [">= 0.95"] * 2
    assert results["wake"]["pages"]["remap_ms"] > 0
    assert results["granules"]["2 MiB"]["create"] > 0
    assert results["pinning"]["4 threads, 64 MiB"]["s_per_gib"] > 0
    words = ("streams", "allocations", "handles", "registrations")
    assert {word: control.live(word) for word in words} == dict.fromkeys(words, 0)


@pytest.fixture
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("gpu_script", str(ROOT / "scripts" / "gpu"))
    spec = importlib.util.spec_from_loader("gpu_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


FOUND = {
    "date": "2026-01-01",
    "gpus": ["A GPU"],
    "driver": "13.0",
    "bindings": "13.5.0",
    "torch": "2.13.0+cu130",
    "python": "3.12.1",
    "cores": 16,
    "memory_gib": {"MemTotal": 128},
}

SLEEPER = "import os, time; os.fork() or open({marker!r}, 'w').write(str(os.getpid())); time.sleep(60)"


def test_what_fails_or_does_not_end_keeps_nothing_from_running(script: Any, tmp_path: Path) -> None:
    marker = tmp_path / "child"
    good = "import json, sys; open(sys.argv[-1][6:], 'w').write(json.dumps({'goals': [], 'results': {'a|b': 1.25}}))"
    steps = [
        script.Step("fails", 100, ("-c", "print('the reason'); raise SystemExit(3)")),
        script.Step("hangs", 2, ("-c", SLEEPER.format(marker=str(marker))), benchmark=True),
        script.Step("works", 100, ("-c", good), benchmark=True),
        script.Step("late", 100, ("-c", "")),
    ]
    outcomes = [script.Outcome(step) for step in steps]
    for outcome in outcomes[:3]:
        script.run_step(outcome, tmp_path, outcome.step.limit_s, False)
        script.write_report(tmp_path, FOUND, outcomes)
    for limit_s in (10, 100):  # a machine that is busy may start nothing in two seconds
        if not marker.exists() or not marker.read_text():
            script.run_step(outcomes[1], tmp_path, limit_s, False)
    assert [outcome.state for outcome in outcomes] == ["failed", "did not end", "passed", "did not run"]
    assert outcomes[1].spent_s >= 2
    stat = Path(f"/proc/{marker.read_text()}/stat")  # what it had started has ended with it
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
    report = (tmp_path / "report.md").read_text()
    assert "1 x A GPU, CUDA 13.0, cuda-bindings 13.5.0, torch 2.13.0+cu130, Python 3.12.1, 16 cores" in report
    assert re.search(r"\| fails \| failed \| \d+ \| the reason \|", report)
    assert re.search(r"\| hangs \| did not end \| \d+ \|  \|", report)
    assert re.search(r"\| works \| passed \| \d+ \|  \|", report)
    assert "| late | did not run | 0 |  |" in report
    assert "| a|b | 1.25 |" in report
    assert script.line(outcomes[0]).endswith(": the reason")


def test_tests_that_failed_run_again_where_a_fault_shows_in_its_call(script: Any, tmp_path: Path) -> None:
    code = "import os, sys; sys.exit(os.environ.get('CUDA_LAUNCH_BLOCKING') != '1')"
    failing, always = (script.Step(name, 100, ("-c", text)) for name, text in (("a", code), ("b", "raise OSError")))
    outcomes = [script.Outcome(step) for step in (failing, always, script.Step("c", 100, ("-c", "")))]
    for outcome in outcomes:
        script.run_step(outcome, tmp_path, 100, False)
    more = script.again(outcomes)
    for outcome in more:
        script.run_step(outcome, tmp_path, 100, False)
    states = {each.step.name: each.state for each in (*outcomes, *more)}
    assert states == {"a": "failed", "b": "failed", "c": "passed", "a-blocking": "passed", "b-blocking": "failed"}
    assert script.again([*outcomes, *more]) == []  # once


MEETS = """
import pathlib, sys, time
here, other = (pathlib.Path(sys.argv[1]) / name for name in sys.argv[2:4])
here.touch()
end_s = time.monotonic() + 60
while not other.exists():
    assert time.monotonic() < end_s
    time.sleep(0.01)
"""
ALONE = "import pathlib, sys; assert len(list(pathlib.Path(sys.argv[1]).glob('met-*'))) == 2, 'beside tests'"


def test_tests_run_beside_each_other_and_benchmarks_after_them(script: Any, tmp_path: Path) -> None:
    one, other = ("-c", MEETS, str(tmp_path), "met-1", "met-2"), ("-c", MEETS, str(tmp_path), "met-2", "met-1")
    steps = [
        script.Step("wild", 100, ("-c", ALONE, str(tmp_path)), alone=True),
        script.Step("bench", 100, ("-c", ALONE, str(tmp_path)), benchmark=True),
        script.Step("one", 100, one),
        script.Step("other", 100, other),
    ]
    options = argparse.Namespace(minutes=1, jobs=2, out=tmp_path, rehearse=False)
    run = script.Run([script.Outcome(step) for step in steps], FOUND, options)
    run.carry_out(run.outcomes)
    assert [outcome.state for outcome in run.outcomes] == ["passed"] * 4


def test_one_file_has_all_that_there_was_also_of_a_run_that_is_ended(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, temporary, file = tmp_path / "out", tmp_path / "t", tmp_path / "gpu.tar.gz"
    (out / script.NODES / "dm1").mkdir(parents=True)
    (out / script.NODES / "dm1" / "gpu0.log").write_text("of a node that has ended\n")
    (temporary / "dm2" / "s" / "logs").mkdir(parents=True)
    (temporary / "dm2" / "s" / "logs" / "gpu0.err").write_text("of one that runs\n")
    monkeypatch.setattr(script.tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.setattr(script, "PACK_S", 0.01)
    with script.packing(out, file):
        end_s = time.monotonic() + 60
        while not file.exists():
            assert time.monotonic() < end_s
            time.sleep(0.01)
        (out / "late.log").write_text("the last words\n")
    with tarfile.open(file) as tar:
        files = {each.name for each in tar.getmembers() if each.isfile()}
    assert files == {"gpu/late.log", "gpu/nodes/dm1/gpu0.log", "gpu/alive/dm2/gpu0.err"}


def test_a_program_that_a_step_runs_under_has_to_be_there(script: Any, tmp_path: Path) -> None:
    step = script.Step("sanitizer", 100, ("-c", ""), under=("no-such-program", "--all"))
    assert step.lacking() == "no-such-program is not installed"
    assert step.command(tmp_path, False)[:3] == ["no-such-program", "--all", sys.executable]
    assert step.command(tmp_path, True)[0] == sys.executable
    assert script.Step("plain", 100, ()).lacking() == ""


def test_every_model_of_the_paper_is_a_step(script: Any) -> None:
    from benchmarks.gpu_models import MODELS

    assert tuple(MODELS) == script.TABLE_4


def test_the_page_is_written_below_its_last_heading(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "gpu.md"
    page.write_text((ROOT / "docs" / "gpu.md").read_text())
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "report.md").write_text("| wake | 51.2 |\n")
    for _ in range(2):
        assert script.record(tmp_path) == 0
        text = page.read_text()
        assert text.startswith("# CUDA\n")
        assert text.count("## Results") == 1
        assert text.endswith("## Results\n\n| wake | 51.2 |\n")


@needs.COMPILER
def test_it_is_rehearsed_over_the_fake_driver(tmp_path: Path) -> None:
    """Two steps; all of them take minutes: `scripts/gpu --rehearse`."""
    steps = ("--only=pinning", "--only=device")
    command = [sys.executable, str(ROOT / "scripts" / "gpu"), "--rehearse", f"--out={tmp_path}", *steps]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "report.md").read_text()
    assert "Fake GPU 0" in report
    assert all(f"| {name} | passed |" in report for name in ("device", "pinning"))
    assert "| models | did not run |" in report


def test_without_a_gpu_it_says_so_and_changes_nothing() -> None:
    from dormouse.gpuserver.device.cuda.probe import probe

    if probe().gpus:
        pytest.skip("needs a machine without a GPU")
    before = (ROOT / "docs" / "gpu.md").read_bytes()
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "gpu")], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("No GPU to run on: ")
    assert (ROOT / "docs" / "gpu.md").read_bytes() == before


def test_what_is_missing_is_listed_as_pip_takes_it(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.missing() == []
    monkeypatch.setattr(script, "installed", lambda name: name not in ("pyzmq", "cuda-bindings", "pytest-timeout"))
    assert [script.name(each) for each in script.missing()] == ["pyzmq", "cuda-bindings", "pytest-timeout"]
    assert script.missing()[0].startswith("pyzmq>=")


def test_a_bare_python_is_told_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", str(ROOT / "scripts" / "gpu")], capture_output=True, text=True)
    assert done.returncode == 1
    assert "-m pip install" in done.stderr
    for wanted in ("pyzmq>=", "msgspec>=", "blake3>=", "cuda-bindings>=", "torch>=", "pytest-timeout>="):
        assert wanted in done.stderr


def test_it_runs_this_checkout_where_dormouse_is_not_installed(script: ModuleType) -> None:
    code = "import dormouse.core.paths as p; print(p.__file__)"
    assert Path(script.run("-c", code).stdout.strip()).resolve() == ROOT / "core" / "paths.py"


def test_a_checkout_that_is_not_installed_has_its_version() -> None:
    """As on a machine with a GPU, to which it is only copied."""
    hidden = (
        "import importlib.metadata as md\n"
        "found = md.Distribution.from_name\n"
        "def none(name):\n"
        "    if name == 'dormouse':\n"
        "        raise md.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "md.Distribution.from_name = none\n"
        "import dormouse.core.cli.main, dormouse.router.main, dormouse.controller.main\n"
        "from dormouse.router.front.openinference import ALIVE\n"
        "print(ALIVE['/v2']['version'])\n"
    )
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, package_version()), done.stderr
