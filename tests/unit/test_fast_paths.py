"""What only chooses a faster way takes the ordinary one, with PyTorch's values; what PyTorch has for compilers runs as
without one. What cannot be had is refused by name, with a way on, and not in PyTorch's words about its insides."""

import copy
import importlib
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex

CUDA = "cuda"
flex_attention: Any = flex.flex_attention
mapped: Any = importlib.import_module("torch._higher_order_ops.map").map
MODES: list[Any] = [torch.no_grad, torch.inference_mode]
ROWS = torch.tensor([[False, False, True], [False, False, False]])


KERNELS = (
    *(SDPBackend.MATH, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION),
)


def _numbers(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def _encoder(on: str, padding: Tensor | None, mask: bool = False, norm: bool = False, **how: Any) -> Tensor:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **how)
    last = nn.LayerNorm(16) if norm else None
    if last is not None:
        nn.init.constant_(last.bias, 0.5)
    encoder = nn.TransformerEncoder(layer, 2, norm=last).eval().to(on)
    seen = nn.Transformer.generate_square_subsequent_mask(3).to(on) if mask else None
    kept = None if padding is None else padding.to(on)
    return encoder(_numbers(2, 3, 16).to(on), mask=seen, src_key_padding_mask=kept)  # type: ignore[no-any-return]


def _heads(on: str, **how: Any) -> list[Tensor]:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval().to(on)
    data = _numbers(2, 3, 16).to(on)
    return [each for each in attention(data, data, data, key_padding_mask=ROWS.to(on), **how) if each is not None]


def _attention(on: str, kernel: SDPBackend) -> Tensor:
    query, key, value = (_numbers(1, 2, 3, 8 * k).to(on)[..., :8] for k in (1, 2, 3))
    with sdpa_kernel(kernel if on == CUDA else SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value)


def _before(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _flex(on: str, scored: bool = False, masked: bool = False, **how: Any) -> Any:
    query, key, value = (_numbers(1, 2, 128, 16 * k).to(on)[..., :16] for k in (1, 2, 3))
    bias = _numbers(128).to(on)
    return flex_attention(
        query,
        key,
        value,
        score_mod=(lambda score, b, h, i, j: score + bias[j]) if scored else None,
        block_mask=flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device=on)
        if masked
        else None,
        **how,
    )


def _chosen(on: str, truth: bool) -> Tensor:
    kept = torch.full((2,), 3.0, device=on)
    data = torch.ones(2, device=on)
    return torch.cond((data.sum() > 0) == truth, lambda x: x + kept, lambda x: (x - 1) * kept, (data,))  # type: ignore[no-any-return]


def _compiled() -> Any:
    return torch.compile(flex_attention)


def _graphed() -> Any:
    graphed: Any = torch.cuda.make_graphed_callables
    return graphed(torch.square, (torch.ones(1),))


def _counted(on: str) -> list[Tensor]:
    start = (torch.tensor(0, device=on), torch.ones(2, device=on))
    loop: Any = while_loop
    return list(loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), start))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.register_buffer("bias", torch.ones(2))
        self.weight = nn.Parameter(torch.full((2,), 2.0))
        self.tied = self.linear.weight

    def forward(self, data: Tensor) -> Tensor:
        return self.linear(data) * self.weight + self.bias + self.tied.sum()  # type: ignore[no-any-return]


def _exported(on: str, saved: bool = False, half: bool = False) -> Tensor:
    program = torch.export.export(Model().eval(), (torch.ones(1, 3),))
    if saved:
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
    module = program.module().to(on)
    if half:
        module = module.half().float()
    return module(torch.ones(1, 3, device=on))  # type: ignore[no-any-return]


ORDINARY: dict[str, Callable[[str], Any]] = {
    "an encoder, padded": lambda on: _encoder(on, ROWS),
    "an encoder, padded in front": lambda on: _encoder(on, ROWS.flip(1)),
    "an encoder, padded, a norm last": lambda on: _encoder(on, ROWS, norm=True),
    "an encoder, padded, norms first": lambda on: _encoder(on, ROWS, norm_first=True),
    "an encoder, padded, with numbers": lambda on: _encoder(on, torch.zeros(2, 3).masked_fill(ROWS, float("-inf"))),
    "an encoder, padded and masked": lambda on: _encoder(on, ROWS, mask=True),
    "an encoder, masked": lambda on: _encoder(on, None, mask=True),
    "an encoder, gelu": lambda on: _encoder(on, ROWS, activation="gelu"),
    "heads": _heads,
    "heads without weights": lambda on: _heads(on, need_weights=False),
    **{f"attention, {kernel.name}": partial(_attention, kernel=kernel) for kernel in KERNELS},
    "flex_attention": _flex,
    "flex_attention of four": lambda on: flex_attention(*[torch.ones(1, 1, 4, 8, device=on)] * 3),
    "flex_attention, scored": lambda on: _flex(on, scored=True),
    "flex_attention, masked": lambda on: _flex(on, masked=True),
    "flex_attention, both": lambda on: _flex(on, scored=True, masked=True),
    "flex_attention, sums": lambda on: list(_flex(on, return_lse=True)),
    "flex_attention, compiled": lambda on: _compiled()(*[torch.ones(1, 1, 4, 8, device=on)] * 3),
    "cond": lambda on: _chosen(on, True),
    "cond, else": lambda on: _chosen(on, False),
    "while_loop": _counted,
    "scan": lambda on: list(scan(lambda c, x: (c + x, c * 1), torch.zeros(2, device=on), _numbers(3, 2).to(on))),
    "associative_scan": lambda on: associative_scan(torch.add, _numbers(4, 2).to(on), 0, combine_mode="generic"),
    "map": lambda on: mapped(lambda x, y: x + y, _numbers(3, 2).to(on), torch.ones(2, device=on)),
    "vmap": lambda on: torch.vmap(torch.mm, (0, None))(_numbers(3, 2, 2).to(on), torch.eye(2, device=on)),
    "jvp": lambda on: list(torch.func.jvp(torch.square, (_numbers(3).to(on),), (torch.ones(3, device=on),))),
    "functionalize": lambda on: torch.func.functionalize(lambda x: x.add_(1) * 2)(torch.ones(2, device=on)),
    "graphed callables": lambda on: _graphed()(_numbers(3).to(on)),
    "a preferred library": lambda on: [
        torch.linalg.inv(torch.eye(2, device=on)),
        torch.tensor(torch.backends.cuda.preferred_linalg_library() is not None),
    ],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ORDINARY)
def test_the_ordinary_way_gives_pytorchs_values(loopback: Any, mode: Any, name: str) -> None:
    with mode():
        expected = ORDINARY[name]("cpu")
        got = ORDINARY[name](CUDA)
        for one, other in zip(*(each if type(each) is list else [each] for each in (got, expected)), strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", [{}, {"saved": True}, {"half": True}])
def test_an_exported_module_moves(loopback: Any, how: dict[str, bool]) -> None:
    expected = _exported("cpu", half=how.get("half", False))
    torch.testing.assert_close(_exported(CUDA, **how).cpu(), expected)


def test_a_padded_encoder_leaves_gradients_their_way(loopback: Any) -> None:
    """PyTorch makes no nested tensors then, so what was padding is not 0."""
    with torch.enable_grad():
        torch.testing.assert_close(_encoder(CUDA, ROWS).detach().cpu(), _encoder("cpu", ROWS).detach())
        assert _encoder(CUDA, ROWS)[0, 2].detach().cpu().abs().sum() > 0
    assert _encoder(CUDA, ROWS)[0, 2].cpu().abs().sum() == 0


MADE: dict[str, Callable[[str], nn.Module]] = {
    "device": lambda on: nn.LazyLinear(2, device=on),
    "to": lambda on: nn.LazyLinear(2).to(on),
    "to and back": lambda on: nn.LazyLinear(2).to(on).cpu().to(on),
    "in a sequence": lambda on: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)).to(on),
    "a dtype": lambda on: nn.LazyLinear(2).to(on, torch.float64).float(),
    "a copy": lambda on: copy.deepcopy(nn.LazyLinear(2, device=on)),
    "convolution": lambda on: nn.LazyConv1d(2, 2).to(on),
    "batch norm": lambda on: nn.LazyBatchNorm1d(device=on),
    "batch norm, moved": lambda on: nn.LazyBatchNorm1d().to(on),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MADE)
def test_lazy_modules_are_where_they_were_put(loopback: Any, mode: Any, name: str) -> None:
    with mode():
        outputs = []
        for on in (CUDA, "cpu"):
            module = MADE[name](on)
            assert any(nn.parameter.is_lazy(each) for each in module.parameters())
            assert {each.device.type for each in module.parameters()} == {on}
            module(torch.ones(2, 3, device=on))
            for each in (*module.parameters(), *module.buffers()):
                assert not nn.parameter.is_lazy(each)
                assert each.device.type == on
                if each.is_floating_point():
                    each.data = torch.full_like(each, 0.5)
            assert all(type(each) is nn.Parameter or each.is_cuda for each in module.parameters())
            assert all(each.requires_grad for each in module.parameters())
            outputs.append((module(torch.ones(2, 3, device=on)).cpu(), list(module.state_dict())))
        torch.testing.assert_close(outputs[0][0], outputs[1][0])
        assert outputs[0][1] == outputs[1][1]


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_take_what_was_saved(loopback: Any) -> None:
    whole = nn.Linear(3, 2)
    for module in (nn.LazyLinear(2, device=CUDA), nn.LazyLinear(2).cuda()):
        assert module.weight.is_cuda
        module.load_state_dict(whole.state_dict())
        assert module.weight.is_cuda
        torch.testing.assert_close(module(torch.ones(1, 3, device=CUDA)).cpu(), whole(torch.ones(1, 3)))
    buffers = [name for name, _ in nn.LazyBatchNorm1d().named_buffers()]
    assert [name for name, _ in nn.LazyBatchNorm1d().cuda().named_buffers()] == buffers
    with torch.device(CUDA):
        made = nn.LazyLinear(2)
    assert made(torch.ones(1, 3, device=CUDA)).is_cuda
    on_cpu = nn.LazyLinear(2, dtype=torch.float64).to(torch.float32)
    assert on_cpu(torch.ones(1, 3)).dtype is torch.float32


def _jagged(**how: Any) -> Any:
    return torch.nested.nested_tensor([torch.arange(3.0), torch.arange(5.0)], **how)


QUANTIZATION: Any = torch.ao.quantization
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "jagged": (lambda: _jagged(device=CUDA, layout=torch.jagged), "nested tensors .*: pad them, and mask"),
    "nested": (lambda: _jagged(device=CUDA).to_padded_tensor(0.0), "nested tensors .*: pad them, and mask"),
    "nested, moved": (lambda: _jagged().to(CUDA), "nested tensors .*: pad them, and mask"),
    "a mask that is not looked at": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, device=CUDA), 1, mask_check=False
        ).eval()(torch.ones(2, 3, 16, device=CUDA), src_key_padding_mask=ROWS.to(CUDA)),
        "nested tensors .*: pass enable_nested_tensor=False",
    ),
    "a fused optimizer": (lambda: _step(fused=True), "fused optimizers .*: leave out fused=True"),
    "sparse": (lambda: torch.eye(2).to_sparse().to(CUDA), r"sparse.* tensors .*: call to_dense\(\)"),
    "compressed sparse": (
        lambda: torch.sparse.mm(torch.eye(2).to_sparse_csr().to(CUDA), torch.ones(2, 2, device=CUDA)),
        r"sparse.* tensors .*: call to_dense\(\)",
    ),
    "a tensor of a compiler": (lambda: _traced(), "FakeTensor on cuda .*[Cc]ompile the model on the CPU"),
    "a quantized module": (
        lambda: QUANTIZATION.quantize_dynamic(nn.Sequential(nn.Linear(4, 2)))(torch.ones(1, 4, device=CUDA)),
        "a quantized module stays on the CPU",
    ),
    "a process group": (lambda: torch.distributed.init_process_group("nccl"), "without DistributedDataParallel"),
    "a process group by default": (lambda: torch.distributed.init_process_group(), "has no network to others"),
    "memory's history": (lambda: torch.cuda.memory._record_memory_history(), "See torch.cuda.memory_summary"),
    "a graph": (lambda: torch.cuda.CUDAGraph(), "Run the code eagerly"),
    "an operator on functions": (
        lambda: torch.ops.higher_order.run_const_graph(torch.square, (torch.ones(1).cuda(),)),
        r"run_const_graph is not supported .*Python's own `if` and `for`",
    ),
}


BY_PYTHON = ("jagged", "a tensor of a compiler")
"""Refused where a tensor of cuda:0 is a subclass, which neither can hold."""


def _traced() -> None:
    fake_tensor: Any = importlib.import_module("torch._subclasses.fake_tensor")
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(2, device="cuda")
    torch.ones(2, device=CUDA) + fake


def _step(**how: Any) -> None:
    parameter = nn.Parameter(torch.ones(3, device=CUDA))
    parameter.grad = torch.ones(3, device=CUDA)
    torch.optim.Adam([parameter], **how).step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_names_a_way_on(loopback: Any, name: str) -> None:
    call, text = REFUSED[name]
    if loopback.by_cpp and name in BY_PYTHON:
        call()
        return
    with pytest.raises((NotImplementedError, RuntimeError), match=text):
        call()
    assert (torch.ones(2, device=CUDA) * 2).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("loopback", ["cpp"], indirect=True)
def test_jagged_tensors_of_pytorchs_own_tensors(loopback: Any) -> None:
    there, here = (_jagged(layout=torch.jagged, **how) for how in ({"device": CUDA}, {}))
    found, wanted = (there * 2).sin(), (here * 2).sin()
    assert found.is_cuda
    assert torch.equal(found.values().cpu(), wanted.values())
    with pytest.raises(NotImplementedError, match=r"nested tensors .*: pad them"):
        found.to_padded_tensor(-1.0)


def test_a_small_gpu_is_not_warmed_up(loopback: Any) -> None:
    """Transformers allocates what it thinks is free before it loads: of 1 GiB, less than nothing."""
    modeling_utils: Any = importlib.import_module("transformers.modeling_utils")

    recorded = loopback.stream.commands_recorded
    modeling_utils.caching_allocator_warmup(nn.Linear(2, 2), {"": CUDA}, None)
    assert loopback.stream.commands_recorded == recorded
