"""Graphs that `torch.compile` has captured, compiled as one operator: the same results, and nothing that an operation
of its own could not do."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import needs
import pytest
import torch
from interpreter_talk import F4, Talk, values
from torch import nn

from dormouse.core.nodefile import load_config
from dormouse.gpuserver.commands import graph_builds
from dormouse.gpuserver.commands.definitions import ProtocolViolation
from dormouse.gpuserver.commands.graph_builds import GraphBuilds
from dormouse.gpuserver.commands.graphs import Graph, GraphOperator, Unfit
from dormouse.schemas import stream as wire

CPU = torch.device("cpu")
BY_CPP = pytest.mark.parametrize("loopback", ["cpp"], indirect=True)
F2 = ["float32", [2], [1], 0, 0]
I4 = ["int64", [4], [1], 0, 0]
ROWS = ["float32", [9, 4], [4, 1], 0, 0]
FOUND = ["float32", [4, 4], [4, 1], 0, 0]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
"""PyTorch's compiler meets its own."""


def t(number: int) -> list[int]:
    return [wire.TENSOR, number]


def packed(*nodes: Any, inputs: Any = (F4, F4), outputs: Any = (2,)) -> bytes:
    found: bytes = msgpack.packb([list(inputs), list(nodes), list(outputs)])
    return found


ADD = ["aten::add.Tensor", [t(0), t(1)], [], "float32", [F4]]
LOOK_UP = ["aten::embedding", [t(0), t(1)], [], "float32", [FOUND]]


@pytest.fixture
def builds() -> Iterator[GraphBuilds]:
    made = GraphBuilds(CPU)
    graph_builds.enable(made)
    yield made
    graph_builds.enable(None)


@pytest.fixture
def compiling(loopback: Any, builds: GraphBuilds, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A world whose executors compile."""
    loopback.close()
    torch.compiler.reset()
    torch._dynamo.trace_rules.clear_lru_cache()
    monkeypatch.setattr("torch.hub.tqdm.monitor_interval", 0)  # else the first progress bar starts a thread
    world = type(loopback)(compiles=True)
    world.begin_lease()
    yield world
    world.close()
    torch.compiler.reset()


def wait_for(builds: GraphBuilds, digest: str) -> str:
    """Its outcome."""
    deadline = time.monotonic() + 300
    while (outcome := builds.outcome(digest)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return outcome


def the_one(builds: GraphBuilds) -> GraphOperator:
    """The operator of the only graph, once it is built."""
    (digest,) = builds._known
    assert wait_for(builds, digest) == ""
    found = builds.operator(digest)
    assert isinstance(found, GraphOperator)
    return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.linear, self.norm = nn.Embedding(9, 6), nn.Linear(6, 4), nn.LayerNorm(4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.act(self.norm(self.linear(self.words(ids)))) * scale
        first, second = hidden.split(2, dim=-1)
        return first + second, hidden.mean(0)


# --- through the shim


@needs.COMPILER
@BY_CPP
def test_a_captured_graph_becomes_one_operator(compiling: Any, builds: GraphBuilds) -> None:
    there = Model().eval()
    here = torch.compile(Model().eval().cuda())
    kept = torch.arange(9.0).cuda()

    def check(ids: list[int], start: int = 0) -> None:
        tensor, scale = torch.tensor(ids), torch.arange(9.0)[start : start + 4]
        found = here(tensor.cuda(), kept[start : start + 4])
        for ours, its in zip(found, there(tensor, scale), strict=True):
            assert torch.allclose(ours.cpu(), its, atol=1e-5)

    check([1, 2, 3])
    check([1, 2, 3])
    operator = the_one(builds)
    run: Any = operator._compiled
    calls = []

    def noted(inputs: list[torch.Tensor]) -> Any:
        calls.append(len(inputs))
        return run(inputs)

    operator._compiled = noted
    check([3, 2, 1])  # whose reply says that it is built
    check([8, 0, 4])
    check([8, 0, 4], start=4)
    assert len(calls) >= 2, "it was called as one"
    before = len(calls)
    check([8, 0, 4], start=3)  # which does not lie where kernels may read several bytes at once
    assert len(calls) == before or not operator.failed
    with pytest.raises(IndexError, match="out of range"):
        here(torch.tensor([9, 0, 1]).cuda(), kept[:4])[0].cpu()
    assert "index" in operator.failed
    check([0, 0, 0])


@BY_CPP
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.add_(1), "lies in the memory"),
        (lambda x: (x.add_(1), None)[0] * 2, "it writes an input"),
        (lambda x: x.view(2, 2), "lies in the memory"),
        (lambda x: (y := x + 1, y.view(2, 2)), "lies in the memory"),
        (lambda x: x + torch.ones(4).to(x.device), "on the cpu"),
        (lambda x: x.to("cpu") + 1, "on the cpu"),
    ],
)
def test_what_cannot_be_one_is_called_one_by_one_and_the_log_says_why(
    compiling: Any, builds: GraphBuilds, capsys: pytest.CaptureFixture[str], function: Any, why: str
) -> None:
    compiled: Any = torch.compile(function)
    for _ in range(2):
        ours, its = compiled(torch.ones(4).cuda()), function(torch.ones(4))
        for one, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (ours, its)), strict=True):
            assert torch.equal(one.cpu(), other)
    said = capsys.readouterr().err
    assert said.count("torch.compile: a graph's operations are called one by one") == 1
    assert why in said
    assert not builds._known


@BY_CPP
def test_sizes_that_vary_are_called_one_by_one(compiling: Any, capsys: pytest.CaptureFixture[str]) -> None:
    compiled = torch.compile(lambda x: x * 2)
    for size in (3, 4, 5, 6):
        assert compiled(torch.ones(size).cuda()).tolist() == [2.0] * size
    assert "is a size that varies" in capsys.readouterr().err


@BY_CPP
def test_what_is_random_is_drawn_as_in_eager(compiling: Any, builds: GraphBuilds) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5) + 1

    compiled, found = torch.compile(function), []
    for called in (function, compiled, compiled):
        torch.manual_seed(5)
        found.append(called(torch.ones(64).cuda()).cpu())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert [each.outcome for each in builds._known.values()] == ["aten::native_dropout draws random numbers"]


@needs.COMPILER
@BY_CPP
def test_a_build_that_takes_too_long_is_ended(
    compiling: Any,
    builds: GraphBuilds,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(graph_builds, "BUILD_S", 0.5)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started: list[Any] = []
    popen = subprocess.Popen

    def noted(*args: Any, **kwargs: Any) -> Any:
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    compiled = torch.compile(lambda x: x * 31 + 7)
    for _ in range(3):
        assert compiled(torch.ones(4).cuda()).tolist() == [38.0] * 4
        (digest,) = builds._known
        assert wait_for(builds, digest) == "to compile it took more than 0.5 s"
    assert started[0].returncode == -9
    assert "took more than 0.5 s" in capsys.readouterr().err


# --- what an executor takes


def test_a_graph_is_called_operation_by_operation() -> None:
    graph = Graph(packed(ADD, ["aten::split.Tensor", [t(2), 2], [], "float32", [F2, F2]], outputs=[3, 4]), CPU)
    found, bad = graph.call([torch.ones(4), torch.arange(4.0)])
    assert [each.tolist() for each in found] == [[1, 2], [3, 4]]
    assert bad is None


@pytest.mark.parametrize("named", [["float32", [5], [1], 0, 0], ["int32", [4], [1], 0, 0]])
def test_values_are_what_the_instance_has_named(named: list[Any]) -> None:
    """Else operations behind them would have been checked with sizes that they do not get."""
    graph = Graph(packed([*ADD[:4], [named]]), CPU)
    with pytest.raises(RuntimeError, match="has not returned what was captured"):
        graph.call([torch.ones(4), torch.ones(4)])


def test_what_nothing_looks_at_may_be_something_else() -> None:
    """As what a normalization saves, which kernels of CUDA return with a length and those of CPUs without."""
    channels = ["float32", [3], [1], 0, 0]
    images = ["float32", [2, 3], [3, 1], 0, 0]
    norm = ["aten::_native_batch_norm_legit_no_training", [t(0), None, None, t(1), t(1), 0.1, 1e-5], [], "float32"]
    results = [images, channels, channels]
    graph = Graph(packed([*norm, results], inputs=(images, channels), outputs=[2]), CPU)
    given = [torch.arange(6.0).view(2, 3), torch.ones(3)]
    (found,), _ = graph.call(given)
    assert torch.equal(found, torch.nn.functional.batch_norm(given[0], given[1], given[1]))
    graph = Graph(packed([*norm, results], inputs=(images, channels), outputs=[2, 3]), CPU)
    with pytest.raises(RuntimeError, match="has not returned what was captured"):
        graph.call(given)


def test_on_cuda_a_wrong_index_is_seen_and_leads_nowhere() -> None:
    graph = Graph(packed(LOOK_UP, inputs=(ROWS, I4)), torch.device("cuda"))
    rows = torch.arange(36.0).view(9, 4)
    for ids, wrong in (([1, 8, 0, 0], False), ([1, 9, 0, -1], True)):
        (found,), bad = graph.call([rows, torch.tensor(ids)])
        assert bad is not None
        assert bool(bad) is wrong
        assert found.tolist() == rows[[each if 0 <= each < 9 else 0 for each in ids]].tolist()


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (["aten::nosuch", [t(0)], [], "float32", [F4]], "not an operation that a function may run"),
        (["aten::add_.Tensor", [t(0), t(1)], [], "float32", [F4]], "not compiled with others"),
        (["aten::add.out", [t(0), t(1)], ["out", t(1)], "float32", [F4]], "not compiled with others"),
        (["aten::as_strided", [t(0), [wire.LIST, [99]], [wire.LIST, [1]]], [], "float32", [F4]], "with others"),
        (["aten::from_file", ["/etc/passwd"], [], "float32", [F4]], "not an operation"),
        (["aten::rand_like", [t(0)], [], "float32", [F4]], "draws random numbers"),
        (["aten::normal.Tensor_Tensor", [t(0), t(1)], [], "float32", [F4]], "draws random numbers"),
        (["aten::histc", [t(0)], [], "float32", [F4]], "is emulated"),
        (["aten::add.Tensor", [t(0), t(1)], [], "float64", [F4]], "default dtype"),
        (["torchvision::nms@0000000000000000", [t(0)], [], "float32", [F4]], "nms"),
        (["dormouse::graph_" + "0" * 32, [t(0)], [], "float32", [F4]], "not an operation"),
    ],
)
def test_what_is_unfit_is_refused_by_name(node: Any, why: str) -> None:
    with pytest.raises(Unfit, match=why):
        Graph(packed(node), CPU)


@pytest.mark.parametrize(
    "definition",
    [
        b"",
        b"\xc1",
        msgpack.packb(1),
        msgpack.packb([[], [], []]),
        msgpack.packb([[F4], {}, [0]]),
        packed(ADD, outputs=[0]),
        packed(ADD, outputs=[3]),
        packed(ADD, outputs=["x"]),
        packed(ADD[:4]),
        packed([*ADD[:4], None]),
        packed([*ADD[:4], [["float33", [4], [1], 0, 0]]]),
        packed([*ADD[:4], [["float32", [-4], [1], 0, 0]]]),
        packed(["aten::add.Tensor", [t(0), t(2)], [], "float32", [F4]]),
        packed(["aten::add.Tensor", [t(0), [wire.SCALAR]], [], "float32", [F4]]),
        packed(["aten::add.Tensor", [t(0), [wire.HOST, "float32", [1]]], [], "float32", [F4]]),
        packed(["aten::add.Tensor", [t(0), [99]], [], "float32", [F4]]),
        packed(*[ADD] * (wire.MAX_GRAPH_NODES + 1)),
    ],
)
def test_malformed_graphs_end_the_instance(builds: GraphBuilds, definition: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        Talk()([wire.GRAPH, wire.graph_digest(definition), definition])
    assert not builds._known


def test_graphs_have_their_own_digest_and_are_bounded(builds: GraphBuilds) -> None:
    bad = [ADD[0], [t(0), 1.5], [], "float64", [F4]]  # unfit, so that none is built
    with pytest.raises(ProtocolViolation, match="another digest"):
        Talk()([wire.GRAPH, "0" * 32, packed(bad)])
    with pytest.raises(ProtocolViolation, match="too many"):
        Talk()([wire.GRAPH, "0" * 32, bytes(wire.MAX_GRAPH_NBYTES + 1)])
    talk = Talk()
    for number in range(wire.MAX_GRAPHS + 1):
        definition = packed([ADD[0], [t(0), number], [], "float64", [F4]])
        command = [wire.GRAPH, wire.graph_digest(definition), definition]
        if number < wire.MAX_GRAPHS:
            assert len(talk(command)) == 1, "who asks hears of it with a later frame"
            assert talk([])[0] == [wire.BUILT, wire.graph_digest(definition), "the default dtype is not float32"]
    with pytest.raises(ProtocolViolation, match="more than 64 graphs"):
        talk(command)


def test_a_node_that_compiles_nothing_says_so() -> None:
    talk, definition = Talk(), packed(ADD)
    talk([wire.GRAPH, wire.graph_digest(definition), definition])
    (outcome, _) = talk([])
    assert outcome == [wire.BUILT, wire.graph_digest(definition), graph_builds.OFF]


@pytest.fixture
def known(builds: GraphBuilds) -> tuple[Talk, str]:
    """Who may call an operator that adds two tensors; it is called operation by operation."""
    definition = packed(ADD)
    digest = wire.graph_digest(definition)
    graph = Graph(definition, CPU)
    build = graph_builds._Build(digest, definition)
    build.operator = GraphOperator(digest, graph, lambda inputs: graph.call(inputs)[0])
    build.outcome = ""
    builds._known[digest] = build
    return Talk(), f"dormouse::graph_{digest}@{wire.digest(wire.GRAPH_SCHEMA.format(digest))}"


def key(name: str, *args: Any, kwargs: Any = ()) -> list[Any]:
    return [name, list(args), list(kwargs), [[[wire.FRESH, 0, 0]], [], True], "float32"]


def test_an_instance_calls_it_as_an_operator(known: tuple[Talk, str]) -> None:
    talk, name = known
    talk.put(1, [1.0, 2.0, 3.0, 4.0])
    talk.put(2, [5.0, 6.0, 7.0, 8.0])
    talk([0, 1, 2, 3], [0, F4], [0, key(name, [wire.LIST, [t(0), t(0)]])])
    assert values(talk.get(3)) == [6, 8, 10, 12]


@pytest.mark.parametrize(
    ("args", "operands", "why"),
    [
        ([[wire.LIST, [t(0)]]], [1], "takes a list of 2 tensors"),
        ([t(0), t(0)], [1, 1], "takes a list of 2 tensors"),
        ([], [], "takes a list of 2 tensors"),
        ([[wire.LIST, [t(0), 3]]], [1], "takes a list of 2 tensors"),
        ([[wire.LIST, [t(0), [wire.LIST, [t(0)]]]]], [1, 1], "takes tensors"),
        ([[wire.LIST, [t(0), t(1)]]], [1, 1], "another type, size or strides"),
        ([[wire.LIST, [t(0), t(2)]]], [1, 1], "another type, size or strides"),
        ([[wire.LIST, [t(0), t(3)]]], [1, 1], "another type, size or strides"),
    ],
)
def test_what_does_not_fit_it_is_refused(known: tuple[Talk, str], args: Any, operands: list[int], why: str) -> None:
    talk, name = known
    talk.put(1, [1.0, 2.0, 3.0, 4.0])
    others = [["float32", [2], [2], 0, 0], ["int32", [4], [1], 0, 0], ["float32", [4], [0], 0, 0]]
    talk([0, *operands, 3], [0, F4, 1, others[0], 2, others[1], 3, others[2]], [0, key(name, *args)])
    assert why in talk.get(3)[3]


def test_an_input_that_is_not_aligned_is_copied(known: tuple[Talk, str], builds: GraphBuilds) -> None:
    talk, name = known
    operator = builds.operator(next(iter(builds._known)))
    assert isinstance(operator, GraphOperator)
    addresses: list[int] = []
    real = operator._compiled

    def noted(inputs: list[torch.Tensor]) -> Any:
        addresses.extend(each.data_ptr() % 16 for each in inputs)
        return real(inputs)

    operator._compiled = noted
    talk.put(1, [0.0, 1.0, 2.0, 3.0, 4.0])
    talk([0, 1, 1, 3], [0, F4, 1, ["float32", [4], [1], 1, 0]], [0, key(name, [wire.LIST, [t(0), t(1)]])])
    assert values(talk.get(3)) == [1, 3, 5, 7]
    assert addresses == [0, 0]


def test_results_never_lie_in_operands(builds: GraphBuilds) -> None:
    graph = Graph(packed(ADD, ["aten::alias", [t(2)], [], "float32", [F4]], outputs=[2, 3]), CPU)
    operator = GraphOperator("0" * 32, graph, lambda inputs: [inputs[0], inputs[0]])
    operand = torch.ones(4)
    found = operator.call([operand, operand])
    assert len({each.data_ptr() for each in (operand, *found)}) == 3


@needs.COMPILER
def test_what_cannot_be_compiled_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    builds = GraphBuilds(CPU)
    wrong = packed(["aten::mm", [t(0), t(1)], [], "float32", [F4]])  # of vectors
    builds.want(wire.graph_digest(wrong), wrong)
    assert "it cannot be compiled" in wait_for(builds, wire.graph_digest(wrong))
    assert not list((tmp_path / "dormouse" / "graphs").glob("graph-*"))


@needs.COMPILER
def test_a_node_file_turns_it_on(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text("[gpu]\ncompile = true\n")
    assert graph_builds.of_config(load_config(path), CPU) is not None
    path.write_text("")
    assert graph_builds.of_config(load_config(path), CPU) is None
