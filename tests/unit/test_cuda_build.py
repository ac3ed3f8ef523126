"""Functions under a CUDA build of torch: nothing of CUDA is touched in their process.

`make test-cuda-build` runs this with such a torch; with another there is nothing to see. The driver here ends whoever
calls it, so that a call cannot go by unseen.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_cuda.build import NoCompiler, compiler

from benchmarks.nodes.testnode import running_node

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch for CUDA: make test-cuda-build"),
]

DRIVER = """
#include <stdlib.h>
#include <unistd.h>
#define DEADLY(name) int name(void) { write(2, "called: " #name "\\n", sizeof "called: " #name "\\n" - 1); abort(); }
DEADLY(cuInit) DEADLY(cuDriverGetVersion) DEADLY(cuGetProcAddress) DEADLY(cuGetProcAddress_v2) DEADLY(cuGetExportTable)
DEADLY(cuDeviceGetCount) DEADLY(cuDeviceGet) DEADLY(cuCtxGetCurrent) DEADLY(cuGetErrorString) DEADLY(cuGetErrorName)
DEADLY(cuDevicePrimaryCtxGetState) DEADLY(cuDevicePrimaryCtxRetain) DEADLY(cuPointerGetAttribute) DEADLY(cuMemHostAlloc)
"""

FUNCTION = """
import torch

def load():
    torch.manual_seed(0)
    modules = [torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.LSTM(8, 8, batch_first=True)]
    return torch.nn.ModuleList(modules).to("cuda")

def handle(modules, request):
    linear, norm, lstm = modules
    with torch.inference_mode():
        x = torch.tensor(request, device="cuda").reshape(1, -1, 8)
        first = x[0].clone()
        seen = norm(linear(x)) + torch.zeros(8, device="cuda") + torch.tril_indices(8, 8, device="cuda")[0, :8]
        result, _ = lstm(seen)
        again = torch.empty(8, device="cuda").copy_(result[0, -1].cpu())
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    return {"answer": (again + first.sum()).tolist(), "initialized": torch.cuda._initialized}
"""


@pytest.fixture(scope="module")
def deadly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("driver")
    (directory / "driver.c").write_text(DRIVER)
    try:
        command = [
            compiler(),
            "-shared",
            "-fPIC",
            "-w",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            str(directory / "libcuda.so.1"),
        ]
    except NoCompiler as error:
        pytest.skip(str(error))
    library = str(directory / "libcuda.so.1")
    subprocess.run([*command, "-o", library, str(directory / "driver.c")], check=True)
    return directory


def test_the_driver_of_this_test_ends_whoever_calls_it(deadly: Path) -> None:
    environment = os.environ | {"LD_LIBRARY_PATH": str(deadly)}
    done = subprocess.run(
        [sys.executable, "-c", "import torch; torch.cuda.init()"], env=environment, capture_output=True, text=True
    )
    assert done.returncode < 0
    assert "called: cu" in done.stderr


def test_a_functions_process_calls_no_driver(deadly: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world: dict[str, object] = {}
    exec(FUNCTION.replace('"cuda"', '"cpu"').replace("    assert torch.cuda", "    #"), world)
    request = [float(number) for number in range(32)]
    torch.set_num_threads(1)
    expected = world["handle"](world["load"](), request)  # type: ignore[operator]
    monkeypatch.setenv("LD_LIBRARY_PATH", str(deadly))
    with running_node('[gpu]\ndevice = "host"\ncount = 1\nmemory = "64MiB"\n') as node:
        node.deployed("f", FUNCTION)
        for _ in range(3):
            assert node.result("f", request) == expected
        assert node.log_of("f").count(" starts, ") == 1  # it was the same instance all the time
        assert "called: cu" not in node.logs()
    assert expected["initialized"] is False
