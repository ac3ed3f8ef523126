"""`torch.compile` on cuda:0: Dynamo's guards and graph breaks are PyTorch's own, and the results are those of eager."""

import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from torch import nn

CUDA: Final = "cuda"
_torch: Any = torch  # whose compile() has no types
BY_CPP = pytest.mark.parametrize("loopback", ["cpp"], indirect=True)
BY_PYTHON = pytest.mark.parametrize("loopback", ["python"], indirect=True)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
"""PyTorch's compiler meets its own."""


@pytest.fixture
def compiling(loopback: Any) -> Iterator[Any]:
    """C++ records."""
    assert loopback.by_cpp
    torch.compiler.reset()
    torch._dynamo.trace_rules.clear_lru_cache()
    torch._dynamo.utils.counters.clear()
    yield loopback
    torch.compiler.reset()


class Branching(nn.Module):
    """Says whether its Python runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.times = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).relu() * self.times
        found: torch.Tensor = y + 1 if torch.compiler.is_compiling() else y
        return found


def eager(model: Branching, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, model.linear.weight, model.linear.bias).relu() * model.times


@BY_CPP
def test_a_module_is_read_once_and_its_operations_are_called(compiling: Any) -> None:
    model = Branching().cuda().eval()
    compiled: Any = torch.compile(model)
    x = torch.randn(2, 3).cuda()
    for _ in range(4):
        assert torch.equal(compiled(x).cpu(), (eager(model, x) + 1).cpu())
    assert graphs() == 1
    assert list(compiled.state_dict()) == ["_orig_mod.linear.weight", "_orig_mod.linear.bias"]
    assert torch.equal(model(x).cpu(), eager(model, x).cpu())


@BY_CPP
def test_a_module_is_compiled_in_place(compiling: Any) -> None:
    model = Branching().cuda()
    model.compile(mode="max-autotune")
    x = torch.randn(2, 3).cuda()
    assert torch.equal(model(x).cpu(), (eager(model, x) + 1).cpu())


@BY_CPP
def test_what_was_read_is_guarded(compiling: Any) -> None:
    model = Branching().cuda()
    compiled = torch.compile(model)
    for rows, times in ((2, 2), (2, 5), (3, 5), (4, 5), (5, 5)):
        model.times = times
        x = torch.randn(rows, 3).cuda()
        assert torch.equal(compiled(x).cpu(), (eager(model, x) + 1).cpu())
    assert graphs() == 3, "one more for the other number, and one for all further sizes"


@BY_CPP
def test_a_graph_may_break_where_the_program_needs_a_value(compiling: Any) -> None:
    @torch.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y * 2 if y.sum().item() > 0 else y * 3

    for value in (1.0, -5.0, 1.0):
        x = torch.full((2,), value).cuda()
        assert function(x).tolist() == [(value + 1) * (2 if value > 0 else 3)] * 2


@BY_CPP
def test_one_graph_can_be_demanded(compiling: Any) -> None:
    @torch.compile(fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        function(torch.ones(2).cuda())


@BY_CPP
def test_what_is_written_and_drawn_is_as_in_eager(compiling: Any) -> None:
    def function(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        x[1:].add_(nn.functional.dropout(x[:-1], 0.5))
        torch.mul(x, 2, out=out)
        return x.t()

    results = []
    for called in (function, torch.compile(function)):
        torch.manual_seed(3)
        x, out = torch.arange(12.0).view(3, 4).cuda(), torch.empty(3, 4).cuda()
        view = called(x, out)
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        results.append([each.cpu() for each in (x, out, view)])
    assert graphs() == 1
    for ours, its in zip(*results, strict=True):
        assert torch.equal(ours, its)


@BY_CPP
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.ones(3, device="cuda"),
        lambda x: x.to("cuda").to(torch.float64),
        lambda x: torch.zeros_like(x).index_add_(0, torch.tensor([0, 2], device=x.device), x[:2]),
        lambda x: nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 3, 1)] * 3),
        lambda x: x.type(torch.float16).float().view(torch.int32).bool().float(),
        lambda x: torch.arange(3, device=x.device, dtype=x.dtype).masked_fill(x > 0, -1.0),
        lambda x: x.new_zeros(4)[1:].copy_(x).cpu(),
        lambda x: x.flatten().unsqueeze(0).expand(2, 3).contiguous().softmax(-1).sum(0),
        lambda x: torch.stack([x.cumsum(0), x.flip(0)]).amax(0).repeat(2)[:3],
    ],
)
def test_one_graph_holds_what_models_do(compiling: Any, function: Any) -> None:
    x = torch.tensor([3.0, -1.0, 2.0]).cuda()
    assert torch.equal(_torch.compile(function, fullgraph=True)(x).cpu(), function(x).cpu())


@BY_CPP
def test_autocast_is_in_the_graph(compiling: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
            return x @ x

    x = torch.randn(3, 3).cuda()
    found: Any = torch.compile(function, fullgraph=True)(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.cpu(), function(x).cpu())


@BY_CPP
def test_other_backends_are_called_as_they_are(compiling: Any) -> None:
    seen = []

    def own(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        seen.append([each.device for each in inputs])
        return graph.forward

    x = torch.ones(2).cuda()
    for backend in (own, "eager"):
        assert torch.compile(lambda x: x.sin() + 1, backend=backend)(x).cpu().equal(x.cpu().sin() + 1)
    assert seen == [[torch.device("cuda:0")]]


@BY_CPP
def test_mode_options_and_backends_that_there_are_not(compiling: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(RuntimeError, match="Unrecognized mode=fast"):
        torch.compile(function, mode="fast")
    with pytest.raises(RuntimeError, match="Unexpected optimization option faster"):
        torch.compile(function, options={"faster": True})
    with pytest.raises(torch._dynamo.exc.InvalidBackend, match="nosuch"):
        torch.compile(function, backend="nosuch")(torch.ones(1).cuda())


@BY_CPP
def test_what_cannot_be_compiled_is_called_and_the_log_says_why(
    compiling: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        raise ValueError("no kernels today")

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = torch.compile(function, backend=failing)
    with caplog.at_level(logging.WARNING, "torch._dynamo"):
        for _ in range(3):
            assert compiled(torch.ones(1).cuda()).item() == 2
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "no kernels today" in record.getMessage() + str(record.exc_info)


@BY_CPP
def test_threads_share_what_was_compiled(compiling: Any) -> None:
    model = Branching().cuda()
    compiled = torch.compile(model)
    inputs = [torch.full((2, 3), float(n)).cuda() for n in range(4)]
    results: list[Any] = [None] * 4
    compiled(inputs[0])

    def run(number: int) -> None:
        with torch.no_grad():
            for _ in range(5):
                results[number] = compiled(inputs[number]).cpu()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for x, result in zip(inputs, results, strict=True):
        assert torch.equal(result, (eager(model, x) + 1).cpu())
    assert graphs() == 1


@BY_PYTHON
def test_where_python_records_the_function_itself_is_called_and_a_warning_says_so(loopback: Any) -> None:
    with pytest.warns(UserWarning, match=r"torch\.compile: the function itself is called"):
        model = torch.compile(Branching())
    assert type(model) is Branching
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("default")

        @torch.compile(mode="max-autotune")
        def function(x: torch.Tensor) -> torch.Tensor:
            return x + 1

    assert len(raised) == 1
    assert raised[0].filename == __file__
    assert function(torch.ones(1).cuda()).item() == 2


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
