"""Tensors on cuda:0 of a loopback node: values, views, in-place writes, identity, and what a program sees of them."""

import copy
import importlib
import io
import pickle
from typing import Any

import pytest
import torch

from dormouse.client_shim.commands import metas
from dormouse.client_shim.torch_face import remote_tensor

CUDA = "cuda"


def _both(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    host = torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(0, 9, shape, dtype=dtype)
    return host, host.to(CUDA)


def test_says_that_it_is_on_cuda(loopback: Any) -> None:
    x = torch.ones(2, 3).to(CUDA)
    assert x.is_cuda
    assert x.device == torch.device("cuda", 0)
    assert x.get_device() == 0
    assert x.type() == "torch.cuda.FloatTensor"
    assert isinstance(x, torch.Tensor)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.int8],
)
def test_values_come_back(loopback: Any, dtype: torch.dtype) -> None:
    host, remote = _both((4, 5), dtype)
    assert torch.equal(remote.cpu(), host)
    assert torch.equal(remote.t().cpu(), host.t())
    assert torch.equal(remote[1:3, ::2].cpu(), host[1:3, ::2])
    assert remote.tolist() == host.tolist()


def test_large_tensors_pass_through_a_small_arena(loopback: Any) -> None:
    host = torch.arange(5_000_000, dtype=torch.float32).reshape(1000, 5000)
    remote = host.to(CUDA)
    loopback.stream.commit()
    loopback.begin_lease()
    assert torch.equal(remote.cpu(), host)
    assert torch.equal(remote.t().cpu(), host.t())
    assert torch.equal(remote[:, ::2].cpu(), host[:, ::2])
    uploaded = host.to(CUDA)
    assert torch.equal((uploaded + 1).cpu(), host + 1)


def test_views_share_their_storage(loopback: Any) -> None:
    host, remote = _both((4, 6))
    for x in (host, remote):
        view = x[1:3].t()
        view.mul_(2)
        x.view(-1)[5] = 100
        x[:, 0] = torch.tensor([9.0, 8.0, 7.0, 6.0])
        x.diagonal().fill_(0)
        x.narrow(0, 3, 1).add_(x[0])
    assert torch.equal(remote.cpu(), host)


def test_views_send_no_command(loopback: Any) -> None:
    _, remote = _both((4, 6))
    (remote + 1).sum()
    before = loopback.stream.commands_recorded
    remote.view(2, 12).t()[3:].unsqueeze(0).expand(5, -1, -1).permute(2, 0, 1).select(0, 1)
    remote.chunk(2)
    remote.unbind(1)
    assert loopback.stream.commands_recorded == before


def test_writes_into_what_was_only_allocated(loopback: Any) -> None:
    x = torch.empty(4, 3, device=CUDA)
    x[1:3].fill_(2)
    x[0] = 1
    x[3].copy_(torch.tensor([5.0, 6.0, 7.0]))
    assert x.tolist() == [[1.0] * 3, [2.0] * 3, [2.0] * 3, [5.0, 6.0, 7.0]]


def test_in_place_shapes_and_out_arguments(loopback: Any) -> None:
    host, remote = _both((3, 4))
    for x in (host, remote):
        x.t_()
        x.unsqueeze_(0)
    assert remote.shape == host.shape == (1, 4, 3)
    assert torch.equal(remote.cpu(), host)
    out = torch.empty(0, device=CUDA)
    torch.add(remote, 1, out=out)
    assert out.shape == (1, 4, 3)
    assert torch.equal(out.cpu(), host + 1)
    remote.resize_(2, 3)
    assert remote.cpu().shape == (2, 3)


def test_scalars_do_not_make_new_signatures(loopback: Any) -> None:
    _, x = _both((3,))
    x * 0.5
    misses = loopback.stream.shape_misses
    total = [(x * (0.1 * k)).cpu() for k in range(5)]
    assert loopback.stream.shape_misses == misses
    assert not torch.equal(total[1], total[2])


def test_shapes_that_never_repeat_are_forgotten(loopback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_tensor, "MAX_PLANS", 8)
    kept = torch.arange(4.0).to("cuda")
    for size in range(1000, 1100):
        assert (torch.ones(size, device="cuda") + 1).sum().item() == 2 * size
    assert metas.count() < 100
    same = kept.detach()  # of a geometry that was forgotten, and made anew
    assert torch.equal((kept + same).cpu(), torch.arange(0.0, 8.0, 2.0))
    assert kept.is_set_to(kept.view(4))


def test_scalars_of_different_types_promote_differently(loopback: Any) -> None:
    host, remote = _both((3,), torch.int64)
    for value in (2, 2.0, True, 2 + 1j):
        assert (remote * value).dtype == (host * value).dtype
        assert torch.equal((remote * value).cpu(), host * value)
    assert torch.arange(3, device=CUDA).dtype == torch.int64
    assert torch.arange(3.0, device=CUDA).dtype == torch.float32


def test_default_dtype_is_part_of_what_is_predicted(loopback: Any) -> None:
    _, x = _both((3,), torch.int64)
    assert (x / 2).cpu().dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (x / 2).cpu().dtype == torch.float64
        assert torch.zeros(2, device=CUDA).cpu().dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (x / 2).cpu().dtype == torch.float32


def test_zero_dimensional_cpu_tensors_join_and_others_do_not(loopback: Any) -> None:
    host, remote = _both((3,))
    assert torch.equal((remote * torch.tensor(2.5)).cpu(), host * 2.5)
    with pytest.raises(RuntimeError, match="same device"):
        remote + host


def test_indexing_with_masks_and_tensors(loopback: Any) -> None:
    host, remote = _both((5, 4))
    mask = host > 0
    assert torch.equal(remote[mask.to(CUDA)].cpu(), host[mask])
    assert torch.equal(remote[torch.tensor([2, 0])].cpu(), host[[2, 0]])
    for x, m in ((host, mask), (remote, mask.to(CUDA))):
        x[m] = 0
        x[torch.tensor([1]), 2] = 7
    assert torch.equal(remote.cpu(), host)
    assert torch.equal(remote.nonzero().cpu(), host.nonzero())
    assert torch.equal(torch.unique(remote).cpu(), torch.unique(host))


def test_complex_views_keep_their_conjugate_bit(loopback: Any) -> None:
    host = torch.randn(3, 4, dtype=torch.complex64)
    remote = host.to(CUDA)
    assert remote.conj().is_conj()
    assert torch.equal(remote.conj().cpu(), host.conj())
    assert torch.equal((remote.conj().t() @ remote).cpu(), host.conj().t() @ host)
    assert torch.equal(remote.conj().imag.cpu(), host.conj().imag)
    for x in (host, remote):
        x.conj().mul_(2j)
    assert torch.equal(remote.cpu(), host)


def test_looks_like_a_tensor_when_printed(loopback: Any) -> None:
    x = torch.tensor([1.0, 2.0]).to(CUDA)
    assert repr(x) == "tensor([1., 2.], device='cuda:0')"
    assert f"{x.sum():.1f}" == "3.0"
    assert repr(torch.nn.Parameter(x)).startswith("Parameter containing:\ntensor(")


def test_numpy_is_refused_as_on_a_gpu(loopback: Any) -> None:
    with pytest.raises(TypeError, match=r"Tensor\.cpu"):
        torch.ones(2, device=CUDA).numpy()
    with pytest.raises(TypeError, match=r"Tensor\.cpu"):
        __import__("numpy").asarray(torch.ones(2, device=CUDA))


def test_copies_and_pickles_carry_the_values(loopback: Any) -> None:
    host, remote = _both((2, 3))
    twin = copy.deepcopy(remote)
    remote.zero_()
    assert torch.equal(twin.cpu(), host)
    buffer = io.BytesIO()
    torch.save({"x": twin}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)["x"]
    assert loaded.is_cuda
    assert torch.equal(loaded.cpu(), host)
    assert torch.equal(pickle.loads(pickle.dumps(twin)).cpu(), host)


def test_addresses_tell_storages_apart(loopback: Any) -> None:
    a, b = torch.ones(4, device=CUDA), torch.ones(4, device=CUDA)
    assert a.data_ptr() != b.data_ptr()
    assert a[1:].data_ptr() == a.data_ptr() + 4
    assert a.untyped_storage() == a[2:].untyped_storage()
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
    assert a.untyped_storage().nbytes() == 16


def test_modules_move_and_tied_weights_stay_tied(loopback: Any) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(7, 4)
            self.head = torch.nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.embedding(ids)) * self.scale
            return logits

    model = Tied()
    ids = torch.tensor([[1, 2, 6]])
    expected = model(ids)
    parameter = model.head.weight
    model.to(CUDA)
    assert model.head.weight is model.embedding.weight is parameter
    assert isinstance(model.head.weight, torch.nn.Parameter)
    assert len(list(model.parameters())) == 1
    assert loopback.node.acquired == 0, "moving a model must not need a GPU"
    torch.testing.assert_close(model(ids.to(CUDA)).cpu(), expected)
    torch.testing.assert_close(model.cpu()(ids), expected)
    assert type(model.head.weight) is torch.nn.Parameter


def test_data_can_be_exchanged(loopback: Any) -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.data = torch.eye(2).to(CUDA)
    assert layer.weight.is_cuda
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert layer.weight.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    layer.weight.data = layer.weight.data * 3
    assert layer.weight[0, 0].item() == 3
    layer.weight.data = torch.zeros(2, 2)
    assert not layer.weight.is_cuda


def test_state_dicts_load_in_place(loopback: Any) -> None:
    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).to(CUDA)
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight.cpu(), source.weight)
    with torch.device("meta"):
        empty = torch.nn.Linear(3, 2)
    empty.load_state_dict(target.state_dict(), assign=True)
    assert empty.weight.is_cuda


def test_modules_move_though_views_of_their_weights_are_held(loopback: Any) -> None:
    """The views stay as they were, as in PyTorch. Where Python records, that is refused."""
    with torch.enable_grad():
        module = torch.nn.Embedding(4, 2)
        expected, before = module.weight.tolist(), module.weight[1]
        if not loopback.by_cpp:
            with pytest.raises(RuntimeError, match=r"Couldn't swap Embedding\.weight"):
                module.cuda()
            return
        assert module.cuda().weight.is_cuda
        assert before.tolist() == expected[1]
        view = module.weight[2]
        assert module.cuda().weight.is_cuda
        assert module.double().weight.dtype == torch.float64
        assert (view.is_cuda, view.dtype, view.tolist()) == (True, torch.float32, expected[2])
        assert module.cpu().weight.tolist() == expected


def test_modules_are_born_on_cuda(loopback: Any) -> None:
    with torch.device(CUDA):
        layer = torch.nn.Linear(3, 2)
        assert torch.zeros(2).is_cuda
    assert layer.weight.is_cuda
    assert layer.weight.cpu().abs().max() <= 3**-0.5


def test_autocast_casts(loopback: Any) -> None:
    _, x = _both((2, 3))
    weight = torch.randn(4, 3).to(CUDA)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.nn.functional.linear(x, weight).dtype == torch.bfloat16
        assert torch.softmax(x.bfloat16(), -1).dtype == torch.float32


def test_gradients_are_refused_by_name(loopback: Any) -> None:
    with torch.enable_grad():
        x = torch.ones(2, device=CUDA, requires_grad=True)
        y = (torch.nn.functional.linear(x, x) * 2).sum()
        assert y.item() == 4
        for attempt in (y.backward, lambda: torch.autograd.backward([y]), lambda: torch.autograd.grad(y, x)):
            with pytest.raises(RuntimeError, match="inference only"):
                attempt()


def test_inference_mode_and_no_grad_mix(loopback: Any) -> None:
    _, x = _both((4, 4))
    with torch.inference_mode():
        y = torch.nn.functional.softmax(x[1:], -1)
        z = y.view(-1)[2:6]
    z = z.reshape(2, 2) + x[:2, :2]
    z.mul_(2)
    assert z.cpu().shape == (2, 2)


def test_composites_are_kept_whole(loopback: Any) -> None:
    q = torch.randn(1, 2, 5, 4).to(CUDA)
    x, w = torch.randn(2, 3, 8).to(CUDA), torch.randn(6, 3, 3).to(CUDA)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            before = loopback.stream.commands_recorded
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
            torch.nn.functional.conv1d(x, w)
            torch.nn.functional.layer_norm(x, (8,))
            torch.einsum("bij,bkj->bik", x, x)
            torch.nn.functional.dropout(x, 0.5, training=False)
            assert loopback.stream.commands_recorded == before + 4


def test_custom_operators_are_refused_or_run_in_terms_of_others(loopback: Any) -> None:
    @torch.library.custom_op("dormouse_tests::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert double(torch.ones(2, device=CUDA)).tolist() == [2.0, 2.0]
    make: Any = torch.library.Library
    library = make("dormouse_tests", "FRAGMENT")
    library.define("compiled(Tensor x) -> Tensor")
    library.impl("compiled", lambda x: x, "CPU")
    with pytest.raises(NotImplementedError, match=r'custom operator.*\[gpu\] operators = \["dormouse_tests"\]'):
        torch.ops.dormouse_tests.compiled(torch.ones(2, device=CUDA))


def test_sparse_layouts_are_refused(loopback: Any) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=r"(?i)sparse"):
        torch.zeros(2, 2, device=CUDA, layout=torch.sparse_coo)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"(?i)sparse"):
        torch.eye(2, device=CUDA).to_sparse().cpu()


_Mode: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode


class _NoCpuKernels(_Mode):  # type: ignore[misc]
    """Fails if an operation computes on the CPU in the client's thread."""

    ALLOWED = ("aten::empty", "aten::set_", "aten::_to_copy", "aten::copy_", "aten::view", "aten::detach")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [
            value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)
        ]
        plain = [value for value in tensors if value.device.type == "cpu" and value.numel()]
        if plain and not func._schema.name.startswith(self.ALLOWED):
            raise AssertionError(f"{func} computed on the CPU in the instance")
        return func(*args, **(kwargs or {}))


def test_nothing_computes_on_the_cpu_of_the_instance(loopback: Any) -> None:
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().to(CUDA)
    x = torch.randn(2, 3, 8).to(CUDA)
    with _NoCpuKernels():
        y = model(x)
        (y[0] @ y[1].t()).softmax(-1)
        y.sum()
        torch.arange(4, device=CUDA) * 2
        with pytest.raises(AssertionError, match="computed on the CPU"):
            torch.ones(2) + 1


@pytest.mark.parametrize("to", ["channels_last", "contiguous_format"])
def test_convolutions_and_pooling_keep_the_layout_of_the_kernel(loopback: Any, to: str) -> None:
    """Which layout a result has depends on the device's kernel: it is asked for once, and not repaired ever after."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 8, 1),
        torch.nn.AvgPool2d(2),
        torch.nn.ConvTranspose2d(8, 4, 2, stride=2),
        torch.nn.AdaptiveAvgPool2d(1),
    ).eval()
    layers.to(memory_format=getattr(torch, to))  # type: ignore[call-overload]
    image = torch.randn(2, 3, 16, 16).to(memory_format=getattr(torch, to))
    with torch.inference_mode():
        expected = [image]
        for layer in layers:
            expected.append(layer(expected[-1]))
        model = copy.deepcopy(layers).to(CUDA)
        for attempt in range(3):
            asked = loopback.stream.questions
            seen = [image.to(CUDA)]
            for layer in model:
                seen.append(layer(seen[-1]))
            for mine, theirs in zip(seen, expected, strict=True):
                assert torch.equal(mine.cpu(), theirs)
                assert mine.stride() == theirs.stride()
            if attempt or to == "contiguous_format":
                assert loopback.stream.questions == asked
            else:
                assert loopback.stream.questions > asked
    interpreters = [executor.interpreter for executor in loopback.node.executors]
    assert sum(interpreter.operations_run for interpreter in interpreters) > 8
    assert sum(interpreter.repaired_strides for interpreter in interpreters) == 0
