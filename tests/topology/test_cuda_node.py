"""A whole node whose executors drive CudaDevice, over the fake driver: models come and go, and a GPU is lost.

Kernels are the CPU's, in the fake's device memory, which does not hold a copy before somebody has waited for it: a wait
that is missing anywhere on the way from a request to its answer gives another answer than native PyTorch.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda.build import NoCompiler, build
from fake_nvml import build as fake_nvml

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core import gpus
from dormouse.core.cli import doctor
from dormouse.core.config import NodeConfig
from dormouse.core.nodefile import load_config

FUNCTION = """
import torch

def load():
    torch.manual_seed({seed})
    return torch.nn.Sequential(torch.nn.Linear(768, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 768)).to("cuda")

def handle(model, request):
    with torch.inference_mode():
        return model(torch.full((2, 768), float(request)).to("cuda")).sum(1).tolist()
"""
SEEDS = (1, 2, 3)


def native(seed: int, request: float) -> list[float]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(768, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 768))
    with torch.inference_mode():
        result: list[float] = model(torch.full((2, 768), request)).sum(1).tolist()
    return result


def config(pool: str) -> str:
    """One GPU with room for two of the three models, of 12 MiB each."""
    return (
        f'[gpu]\ndevice = "cuda"\ncount = 1\nmemory = "48MiB"\nactivations = "16MiB"\npool = "{pool}"\npoison = true\n'
    )


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda.bindings.driver: make setup")
    try:
        library = build(Path(tempfile.gettempdir()) / f"dormouse-fake-cuda-{os.getuid()}")
    except NoCompiler as error:
        pytest.skip(str(error))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))


def deploy(node: TestNode) -> None:
    for seed in SEEDS:
        node.deployed(f"f{seed}", FUNCTION.format(seed=seed))


@pytest.mark.parametrize("pool", ["regions", "pages"])
def test_models_come_and_go(pool: str) -> None:
    with running_node(config(pool)) as node:
        deploy(node)
        gpu = node.status()["gpus"]["0"]
        assert (gpu["name"], gpu["pool"]) == ("Fake GPU 0", pool)
        for turn in range(3):
            for seed in SEEDS:
                request = (turn + 1) / 4
                torch.testing.assert_close(
                    node.result(f"f{seed}", request), native(seed, request), rtol=1e-4, atol=1e-4
                )
        assert sum(node.status()["functions"][f"f{seed}"]["evictions"] for seed in SEEDS) > 0


def test_a_lost_gpu_is_replaced_and_no_answer_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", "copy:12:700:sticky")  # in each executor's process, the twelfth copy
    with running_node(config("pages")) as node:
        deploy(node)
        right = failed = 0
        for turn in range(60):
            seed = SEEDS[turn % 3]
            answer = node.invoke(f"f{seed}", 0.5)
            if answer.status == 200:
                torch.testing.assert_close(answer.body, native(seed, 0.5), rtol=1e-4, atol=1e-4)
                right += 1
            else:
                assert answer.status >= 500, answer
                failed += 1
            if node.status()["gpus"].get("0", {}).get("epoch", 0) > 2 and right > 10:
                break
        else:
            pytest.fail(f"{right} right answers, {failed} errors, and no GPU was lost twice")


def test_what_a_driver_refuses_and_a_node_can_do_without_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a code that says nothing, for ever: copies go through buffers, no process dies, and a person hears of it."""
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuMemHostRegister:0:999")
    with running_node(config("regions")) as node:
        deploy(node)
        pids = node.pids()
        for seed in SEEDS * 2:
            torch.testing.assert_close(node.result(f"f{seed}", 0.5), native(seed, 0.5), rtol=1e-4, atol=1e-4)
        node.wait(lambda: node.status()["gpus"]["0"]["trouble"], 60, "it to be told")
        [trouble] = node.status()["gpus"]["0"]["trouble"]
        assert "of host memory cannot be pinned, so copies are slower: cuMemHostRegister: " in trouble
        assert "(999)" in trouble
        found = [finding for finding in doctor.examine(load_config(node.file), True) if finding.name == "gpu 0"]
        assert [(finding.state, finding.found) for finding in found] == [("warn", trouble)]
        assert node.pids() == pids


def test_a_function_whose_commands_fail_on_the_gpu_is_quarantined(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a wrong index does: the kernel's assertion is seen when somebody waits, at the lease's end at the latest."""
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuStreamSynchronize:60:710:sticky")  # in each executor's process
    with running_node(config("regions")) as node:
        node.deployed("f1", FUNCTION.format(seed=1))
        codes = []
        for _ in range(200):
            answer = node.invoke("f1", 0.5)
            codes.append(answer.code)
            if answer.code == "quarantined":
                break
        assert codes[-1] == "quarantined", codes
        assert "a GPU's process died: the GPU failed in its commands (2 of 2)" in node.log_of("f1")
        node.deployed("f2", FUNCTION.format(seed=2))  # the node and its GPU go on
        torch.testing.assert_close(node.result("f2", 0.5), native(2, 0.5), rtol=1e-4, atol=1e-4)


TWIN = """
from pathlib import Path
import torch

def load():
    torch.manual_seed({seed})
    return torch.nn.Sequential(torch.nn.Linear(768, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 768)).to("cuda")

def handle(model, request):
    with torch.inference_mode():
        result = model(torch.full((2, 768), request["x"]).to("cuda")).sum(1).tolist()
    while request["until"] and not Path(request["until"]).exists():
        model[0].bias.sum().item()
    return result
"""


@pytest.mark.parametrize("pool", ["regions", "pages"])
def test_all_gpus_are_used_and_give_each_other_what_they_have(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one function computes on one GPU, another with the same weights is woken on the other one."""
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    nvml = fake_nvml.build(Path(tempfile.gettempdir()) / f"dormouse-fake-nvml-{os.getuid()}")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{os.environ['LD_LIBRARY_PATH']}:{nvml.parent}")
    monkeypatch.setenv("FAKE_NVML_UUIDS", " ".join(fake_nvml.fake_uuid(gpu) for gpu in (1, 0)))
    monkeypatch.setenv("FAKE_NVML_SWITCHES", "3 3")
    config = f'[gpu]\nmemory = "48MiB"\nactivations = "16MiB"\npool = "{pool}"\npoison = true\n'
    keeping = "[schedule]\nturn_ms = 60000\n[limits]\ncompute_ms = 600000\n"  # else the twin may have the other's turn
    with running_node(config + keeping) as node:
        gpus = node.status()["gpus"]
        assert {number: gpu["switch_with"] for number, gpu in gpus.items()} == {"0": [1], "1": [0]}
        assert {number: gpu["name"] for number, gpu in gpus.items()} == {"0": "Fake GPU 0", "1": "Fake GPU 1"}
        assert any(given_by_the_peer(node, seed) >= 12 << 20 for seed in SEEDS)  # the first may be before they have met


def given_by_the_peer(node: TestNode, seed: int) -> int:
    """Have a function's twin woken while it has its GPU; what came from there. Their answers are right."""
    slow, twin, go = f"slow{seed}", f"twin{seed}", node.shared / f"go{seed}"
    for name in (slow, twin):
        node.deployed(name, TWIN.format(seed=seed))

    def row(name: str) -> dict[str, Any]:
        found: dict[str, Any] = node.status()["functions"][name]
        return found

    with ThreadPoolExecutor(1) as pool:
        node.result(slow, {"x": 0.5, "until": None})
        # A lease has ended for the controller some time after the client has its answer.
        node.wait(lambda: row(twin)["resident_on"] != [], 60, "the twin's weights, which are the same")
        waiting = pool.submit(node.result, slow, {"x": 0.25, "until": str(go)})
        try:
            node.wait(lambda: slow in [gpu["busy_with"] for gpu in node.status()["gpus"].values()], 60, "a lease")
            answer = node.result(twin, {"x": 0.5, "until": None})
        finally:
            go.touch()
        torch.testing.assert_close(answer, native(seed, 0.5), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(waiting.result(), native(seed, 0.25), rtol=1e-4, atol=1e-4)
    node.wait(lambda: row(twin)["copied_nbytes"] >= 12 << 20, 60, "the twin's copies")
    return int(row(twin)["copied_peer_nbytes"])


THREE = '[gpu]\ndevice = "cuda"\npool = "pages"\nactivations = "16MiB"\n'
BROKEN = "GPU 0 cannot be used: cuDevicePrimaryCtxRetain: CUDA_ERROR_ECC_UNCORRECTABLE (214); its memory has errors"


def test_broken_and_filled_gpus_keep_no_other_from_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are named by `up`, `status` and `doctor`, and are used as soon as they can be."""
    machine = tmp_path / "machine"
    machine.write_text("0 error 214\n1 taken 268435456\n2 taken 100000000\n")
    monkeypatch.setenv("FAKE_CUDA_MACHINE", str(machine))
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "3")
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(256 << 20))
    before = {finding.name: finding for finding in doctor._gpus(gpus.find(load_config_of(tmp_path), opening=True), ())}
    assert before["gpu 0"].state == "warn"
    assert "CUDA_ERROR_ECC_UNCORRECTABLE (214)" in before["gpu 0"].found
    assert before["gpu 0"].advice == "the node goes on without it"
    assert before["gpu 1"].found == "256 MiB of 256 MiB are held by other processes"
    with running_node(THREE) as node:
        down = node.status()["node"]["down"]
        assert set(down) == {"gpu0", "gpu1"}
        assert down["gpu0"].startswith(BROKEN)
        assert down["gpu1"].startswith("no room for a pool: of 256 MiB of GPU 1 0 B are free")
        assert set(node.status()["gpus"]) == {"2"}
        node.wait(lambda: node.status()["gpus"]["2"]["trouble"], 60, "the shortage")
        (shortage,) = node.status()["gpus"]["2"]["trouble"]
        assert shortage.startswith("other processes hold 95.4 MiB of 256 MiB of GPU 2")
        node.deployed("f1", FUNCTION.format(seed=1))
        torch.testing.assert_close(node.result("f1", 0.5), native(1, 0.5), rtol=1e-4, atol=1e-4)
        after = {finding.name: finding for finding in doctor._troubles(load_config(node.file))}
        assert after["gpu0"].found == down["gpu0"]
        assert after["gpu 2"].found == shortage
        machine.write_text("")
        node.wait(lambda: len(node.status()["gpus"]) == 3, 90, "the GPUs that are well again")
        assert node.status()["node"]["down"] == {}
        torch.testing.assert_close(node.result("f1", 0.25), native(1, 0.25), rtol=1e-4, atol=1e-4)


def load_config_of(directory: Path) -> NodeConfig:
    file = directory / "node.toml"
    file.write_text(f'[node]\nrun = "{directory}/r"\nstate = "{directory}/s"\n{THREE}[sandbox]\nwarm = []\n')
    return load_config(file)


def test_a_node_without_a_gpu_that_works_names_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = tmp_path / "machine"
    machine.write_text("0 error 46\n1 error 214\n")
    monkeypatch.setenv("FAKE_CUDA_MACHINE", str(machine))
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    load_config_of(tmp_path)
    command = [sys.executable, "-m", "dormouse.core.cli.main", "up", str(tmp_path / "node.toml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done
    assert "gpu0 did not start: GPU 0 cannot be used: cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE (46)" in (
        done.stderr
    )
    assert f"gpu1 did not start: {BROKEN.replace('GPU 0', 'GPU 1')}" in done.stderr
    findings = doctor._gpus(gpus.find(load_config(tmp_path / "node.toml"), opening=True), ())
    assert [finding.state for finding in findings] == ["fail", "fail"]


HUNGRY = """
import torch

def load():
    return None

def handle(model, request):
    return torch.ones(request << 20, device="cuda").sum().item()
"""


def test_a_gpu_that_others_fill_later_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a function asked for fails as it would on a GPU of its own, and a person reads why."""
    machine = tmp_path / "machine"
    monkeypatch.setenv("FAKE_CUDA_MACHINE", str(machine))
    with running_node(config("pages")) as node:
        node.deployed("hungry", HUNGRY)
        assert node.result("hungry", 1) == 1 << 20
        assert "OutOfMemoryError" in str(node.invoke("hungry", 64).body)
        assert node.status()["gpus"]["0"]["trouble"] == []
        machine.write_text(f"0 taken {1 << 30}\n")
        refused = node.invoke("hungry", 64)
        assert "OutOfMemoryError" in str(refused.body), refused
        node.wait(lambda: node.status()["gpus"]["0"]["trouble"], 60, "the trouble")
        assert node.status()["gpus"]["0"]["trouble"] == [
            "0 B are left of the 16.0 MiB for activations: another process has taken the rest of this GPU's "
            "memory; end it, or set [gpu] memory lower"
        ]
        assert node.result("hungry", 1) == 1 << 20


def test_more_gpus_than_there_are_refuse_to_start(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(f'[node]\nrun = "{tmp_path}/r"\nstate = "{tmp_path}/s"\n[gpu]\ncount = 2\n[sandbox]\nwarm = []\n')
    command = [sys.executable, "-m", "dormouse.core.cli.main"]
    done = subprocess.run([*command, "up", str(file)], capture_output=True, text=True)
    assert done.returncode == 2, done
    assert "[gpu] count is 2, but there are 1 (Fake GPU 0)" in done.stderr
    told = subprocess.run([*command, "doctor", "--config", str(file)], capture_output=True, text=True)
    assert "[gpu] count is 2, but there are 1 (Fake GPU 0)" in told.stdout
