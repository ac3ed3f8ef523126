"""`make gpu` without a GPU: the benchmark runs over the fake driver, and the page is written from what comes out."""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from cuda_child import cuda_server, in_child
from device_suite import MIB
from fake_cuda.harness import Control

__all__ = ["cuda_server"]

ROOT = Path(__file__).parents[2]


@in_child(FAKE_CUDA_MODE="eager")
def test_everything_is_measured(control: Control) -> None:
    from benchmarks import gpu

    results = {
        "plain": gpu.plain_copies(8 * MIB, 1),
        "wake": {pool: gpu.wake(pool, 40 * MIB, 2) for pool in ("regions", "pages")},
        "granules": gpu.granules(2),
        "views": gpu.views(10),
    }
    assert [goal.goal for goal in gpu.goals(results)] == [">= 0.95"] * 2
    assert results["wake"]["pages"]["remap_ms"] > 0
    assert results["granules"]["2 MiB"]["create"] > 0
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


def test_the_page_is_written_below_its_last_heading(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, junit, out = tmp_path / "gpu.md", tmp_path / "junit.xml", tmp_path / "gpu.json"
    page.write_text((ROOT / "docs" / "gpu.md").read_text())
    monkeypatch.setattr(script, "PAGE", page)
    found = {"gpus": ["A GPU"], "driver": "13.0", "bindings": "13.5.0"}
    script.page(found, "2.11.0+cu130", junit, out)
    assert "Tests: they did not run." in page.read_text()
    junit.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure/></testcase></testsuite></testsuites>'
    )
    goal = {"name": "wake", "goal": ">= 0.95", "measured": 0.9712, "met": True}
    out.write_text(json.dumps({"goals": [goal], "results": {"wake": {"pages": {"gb_s": 51.234}}}}))
    script.page(found, "2.11.0+cu130", junit, out)
    text = page.read_text()
    assert text.startswith("# CUDA\n")
    assert text.count("## Results") == 1
    assert "A GPU, CUDA 13.0, cuda-bindings 13.5.0, torch 2.11.0+cu130" in text
    assert "Tests: 1 passed, 0 skipped, 1 failed `b`" in text
    assert "| wake | >= 0.95 | 0.971 | yes |" in text
    assert "| wake: pages: gb_s | 51.2 |" in text


def test_without_a_gpu_it_says_so_and_changes_nothing() -> None:
    from dormouse.gpuserver.cuda.probe import probe

    if probe().gpus:
        pytest.skip("there is one")
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
