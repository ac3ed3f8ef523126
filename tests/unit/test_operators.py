"""Custom operators on cuda:0: which run on the executor, which in the instance, and what is said of the rest."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
import torch

from dormouse.core.nodefile import parse_config
from dormouse.gpuserver.commands import operators
from dormouse.schemas import stream as wire
from dormouse.schemas.errors import ConfigError

CUDA = "cuda"
ROOT = Path(__file__).parents[2]
VISION = ROOT / ".venv" / "vision"

PYTHON = """
import torch
library = torch.library.Library("dormouse_py", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CPU")
library.impl("twice", lambda x: torch.empty_like(x), "Meta")
library.define("wrong(Tensor x) -> Tensor")
library.impl("wrong", lambda x: x[:1] * 2, "CPU")
library.impl("wrong", lambda x: torch.empty_like(x), "Meta")
library.define("grow(Tensor(a!) x, int by) -> ()")
def grow(x, by): x.add_(by)
library.impl("grow", grow, "CPU")
library.define("liar(Tensor x) -> Tensor")
library.impl("liar", lambda x: x.add_(1) * 2, "CPU")
library.impl("liar", lambda x: torch.empty_like(x), "Meta")
library.define("alias(Tensor x) -> Tensor")
library.impl("alias", lambda x: x.view(-1), "CPU")
library.impl("alias", lambda x: torch.empty_like(x), "Meta")
library.define("raises(Tensor x) -> Tensor")
def fail(x): raise KeyError("by its own fault")
library.impl("raises", fail, "CPU")
library.impl("raises", fail, "Meta")
"""

CPP = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;
Tensor positive(const Tensor& x) {
  int64_t count = 0;
  const float* values = static_cast<const float*>(x.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) count += values[i] > 0;
  Tensor result = torch::stable::new_empty(x, {count});
  float* next = static_cast<float*>(result.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) if (values[i] > 0) *next++ = values[i];
  return result;
}
STABLE_TORCH_LIBRARY(dormouse_cpp, m) { m.def("positive(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(dormouse_cpp, CPU, m) { m.impl("positive", TORCH_BOX(&positive)); }
"""


@pytest.fixture(scope="module", autouse=True)
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a library in Python, which both ends import, and one that does not import."""
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "dormouse_py_ops.py").write_text(PYTHON)
    (folder / "dormouse_broken.py").write_text("raise OSError('libc10_cuda.so: cannot open')")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    operators.grant(())


@pytest.fixture
def ops(loopback: Any) -> Any:
    operators.grant(["dormouse_py:dormouse_py_ops"])
    __import__("dormouse_py_ops")
    loopback.begin_lease()
    return torch.ops.dormouse_py


def test_n7_an_operator_that_is_allowed_runs_on_the_executor(ops: Any, loopback: Any) -> None:
    x = torch.arange(3.0).to(CUDA)
    questions = loopback.stream.questions
    assert ops.twice(x).tolist() == [0.0, 2.0, 4.0]
    assert loopback.stream.questions == questions, "its own shape rule tells the size"
    ops.grow(x, 5)
    assert x.tolist() == [5.0, 6.0, 7.0], "what its schema says is written"
    with pytest.raises(RuntimeError, match=r"(?s)shape rule is wrong.*dormouse_py::wrong"):
        ops.wrong(x).tolist()
    with pytest.raises((KeyError, RuntimeError), match="by its own fault"):
        ops.raises(x)
    assert ops.twice(x).tolist() == [10.0, 12.0, 14.0]


def test_n7_an_operator_that_lies_about_what_it_writes(ops: Any) -> None:
    x, other = torch.ones(2, device=CUDA), torch.ones(2, device=CUDA)
    with pytest.raises(RuntimeError, match=r"(?s)Inplace update.*dormouse_py::liar on cuda:0"):
        ops.liar(x).tolist()
    with pytest.raises(RuntimeError, match="Inplace update"):
        x.tolist()  # what it was given is not to be believed any more
    with pytest.raises(RuntimeError, match="dormouse_py::alias"):
        ops.alias(other).tolist()
    assert other.tolist() == [1.0, 1.0]


def test_n7_an_operator_in_c_plus_plus(libraries: Path, loopback: Any) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: g++ or clang++")
    torch_folder = Path(torch.__file__).parent
    source, built = libraries / "positive.cpp", libraries / "positive.so"
    source.write_text(CPP)
    flags = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-I{torch_folder}/include", f"-L{torch_folder}/lib"]
    subprocess.run([compiler, *flags, source, "-o", built, "-ltorch_cpu", "-lc10"], check=True)
    (libraries / "dormouse_cpp.py").write_text(f"import torch\ntorch.ops.load_library({str(built)!r})\n")
    operators.grant(["dormouse_cpp"])
    __import__("dormouse_cpp")
    loopback.begin_lease()
    for values in ([1.0, -1.0, 2.0], [-1.0, -2.0, -3.0], [4.0, 5.0, 6.0]):
        questions = loopback.stream.questions
        assert torch.ops.dormouse_cpp.positive(torch.tensor(values).to(CUDA)).tolist() == [v for v in values if v > 0]
        assert loopback.stream.questions == questions + 1, "its size depends on data: it waits, like nonzero"


def test_n7_an_operator_in_python_runs_in_the_instance(loopback: Any) -> None:
    """With a shape rule or without, and also one that writes: what it does arrives as PyTorch's own operations."""
    custom_op: Any = torch.library.custom_op

    def times(x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by

    def set_to(x: torch.Tensor, value: float) -> None:
        x.fill_(value)

    scaled = custom_op("dormouse_local::scaled", times, mutates_args=())
    scaled.register_fake(lambda x, by: torch.empty_like(x))
    fill = custom_op("dormouse_local::fill", set_to, mutates_args=("x",))
    operators.grant(())
    x = torch.ones(2, device=CUDA)
    assert scaled(x, 3.0).tolist() == [3.0, 3.0]
    fill(x, 7.0)
    assert x.tolist() == [7.0, 7.0]


def test_n7_what_is_not_allowed_is_refused_with_the_line_to_add(ops: Any) -> None:
    operators.grant(())
    with pytest.raises(NotImplementedError, match=r'\[gpu\] operators = \["dormouse_py"\] in the node file'):
        ops.twice(torch.ones(3, 1, device=CUDA)).tolist()


def test_n7_a_library_that_is_missing_broken_or_another_version(ops: Any) -> None:
    name = "dormouse_py::twice"
    schema = "dormouse_py::twice(Tensor x) -> Tensor"
    assert str(torch.ops.dormouse_py.twice.default._schema) == schema
    found = operators.find(f"{name}@{wire.digest(schema)}")
    assert found is not None
    assert found.name == name
    for other in (name, f"{name}@", f"{name}@{wire.digest('another')}", f"dormouse_py::none@{wire.digest(schema)}"):
        assert operators.find(other) is None
    assert f"declares it otherwise, as {schema}" in operators.refusal(f"{name}@{wire.digest('another')}")
    assert "defines no such operator" in operators.refusal(f"dormouse_py::none@{wire.digest(schema)}")
    operators.grant(["dormouse_py:dormouse_broken", "nowhere"])
    assert operators.find(f"{name}@{wire.digest(schema)}") is None
    assert "cannot import dormouse_broken, which defines it (OSError: libc10_cuda.so" in operators.refusal(f"{name}@")
    assert "(ModuleNotFoundError: No module named 'nowhere')" in operators.refusal("nowhere::x@")


def test_n7_a_name_from_the_wire_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    operators.grant(("dormouse_py:dormouse_py_ops",))
    imported: list[str] = []
    monkeypatch.setattr("importlib.import_module", imported.append)
    for name in ("os::system@0", "antigravity::x@0", "dormouse_py_ops::x@0", "::@", "@", "torchvision::_C@0"):
        assert operators.find(name) is None
        assert operators.refusal(name)
    assert imported == []


def test_n7_the_node_file_names_libraries() -> None:
    config = parse_config({"gpu": {"operators": ["mylib", "ns:package.module"]}})
    assert config.gpu.operators == ("mylib", "ns:package.module")
    for bad in ("", "my-lib", "a:b:c", "../x", "ns:"):
        with pytest.raises(ConfigError, match=r"gpu\.operators has"):
            parse_config({"gpu": {"operators": [bad]}})


@pytest.mark.timeout(600)
@pytest.mark.skipif(not VISION.is_dir(), reason="needs torchvision, which make setup puts beside the environment")
@needs.COMPILER
def test_n7_torchvision(tmp_path: Path) -> None:
    """Its operators, and four detectors, as native."""
    checks = ["operators", "fasterrcnn", "maskrcnn", "retinanet", "ssd"]
    command = [sys.executable, str(ROOT / "tests" / "vision_suite.py"), str(VISION), *checks]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=570, check=False, cwd=ROOT / "tests")
    assert (outcome.returncode, outcome.stderr) == (0, ""), outcome.stderr
