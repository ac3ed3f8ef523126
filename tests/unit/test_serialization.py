"""Files and copies of CUDA tensors: what `torch.save` writes is what a GPU machine writes, and comes back as it would
there."""

import copy
import io
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

CUDA = "cuda"

torch_: Any = torch
"""For what its stubs leave untyped."""


class Net(torch.nn.Module):
    """Tied weights, buffers of several kinds, a parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.turned = torch.nn.Parameter(torch.randn(3, 5).t(), requires_grad=False)
        self.short = torch.nn.Parameter(torch.randn(3).bfloat16())
        self.register_buffer("phases", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("count", torch.tensor(5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(ids.to(self.head.weight.device)))
        return logits


def _saved(value: Any, **kwargs: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer, **kwargs)
    buffer.seek(0)
    return buffer


def _as_saved_on_cuda(value: Any, monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    """What a GPU machine writes: the same bytes, tagged cuda:0."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:" + str(0))
        return _saved(value)


def _pickled_operations(file: io.BytesIO) -> list[tuple[str, Any]]:
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        return [(operation.name, argument) for operation, argument, _ in pickletools.genops(archive.read(name))]


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value.cpu(), other[name].cpu()), name
        assert (value.dtype, value.stride()) == (other[name].dtype, other[name].stride()), name


@pytest.mark.parametrize("whole", [lambda net: net.state_dict(), lambda net: dict(net.named_parameters())])
def test_a_file_is_what_a_gpu_machine_writes(
    loopback: Any, monkeypatch: pytest.MonkeyPatch, whole: Callable[[Net], Any]
) -> None:
    net = Net()
    native = _as_saved_on_cuda(whole(net), monkeypatch)
    ours = _saved(whole(net.to(CUDA)))
    expected = _pickled_operations(native)
    assert _pickled_operations(ours) == expected
    assert "cuda:0" in [argument for _, argument in expected]


def test_a_file_is_read_without_dormouse(loopback: Any) -> None:
    net = Net()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    file = _saved(net.to(CUDA).state_dict())
    loopback.close()
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")
    assert {type(value) for value in loaded.values()} == {torch.Tensor}
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("safe", [True, False], ids=["weights_only", "any"])
def test_state_dicts_come_back_to_cuda(loopback: Any, new: bool, safe: bool) -> None:
    net = Net().to(CUDA)
    file = _saved(net.state_dict(), _use_new_zipfile_serialization=new)
    loaded = torch.load(file, weights_only=safe)
    assert {value.device for value in loaded.values()} == {torch.device("cuda", 0)}
    _same(loaded, net.state_dict())
    loaded["embedding.weight"].zero_()
    assert loaded["head.weight"].abs().max() == 0
    assert net.head.weight.abs().max() > 0


LOCATIONS: dict[str, tuple[Any, str]] = {
    "none": (None, "cuda"),
    "cpu": ("cpu", "cpu"),
    "cuda": ("cuda", "cuda"),
    "cuda:0": ("cuda:0", "cuda"),
    "cpu device": (torch.device("cpu"), "cpu"),
    "cuda device": (torch.device("cuda"), "cuda"),
    "dict": ({"cuda:0": "cpu"}, "cpu"),
    "dict to cuda": ({"cpu": "cuda:0", "cuda:0": "cuda:0"}, "cuda"),
    "callable to cpu": (lambda storage, location: storage, "cpu"),
    "callable to cuda": (lambda storage, location: storage.cuda(), "cuda"),
    "callable that leaves it": (lambda storage, location: None, "cuda"),
}


@pytest.mark.parametrize("name", LOCATIONS)
@pytest.mark.parametrize("safe", [True, False], ids=["weights_only", "any"])
def test_map_location(loopback: Any, name: str, safe: bool) -> None:
    location, device = LOCATIONS[name]
    host = torch.randn(3, 4)
    for new in (True, False):
        file = _saved({"x": host.to(CUDA), "l": [host.to(CUDA)]}, _use_new_zipfile_serialization=new)
        loaded = torch.load(file, map_location=location, weights_only=safe)
        for value in (loaded["x"], loaded["l"][0]):
            assert value.device.type == device
            assert torch.equal(value.cpu(), host)
            assert device == "cuda" or type(value) is torch.Tensor


def test_loading_in_inference_mode(loopback: Any) -> None:
    net = Net().to(CUDA)
    file = _saved(net.state_dict())
    with torch.inference_mode():
        loaded = torch.load(file)
        _same(loaded, net.state_dict())
        net.load_state_dict(loaded)
        twin = copy.deepcopy(net)
        assert torch.equal(twin(torch.tensor([1])).cpu(), net(torch.tensor([1])).cpu())


def test_no_second_device(loopback: Any) -> None:
    with pytest.raises(RuntimeError, match=r"device_count\(\) is 1"):
        torch.load(_saved(torch.ones(2)), map_location="cuda:1")


def test_tensors_keep_sharing_a_storage(loopback: Any) -> None:
    y = torch.arange(8.0, device=CUDA)
    for new in (True, False):
        loaded = torch.load(_saved({"a": y, "b": y[2:5]}, _use_new_zipfile_serialization=new))
        loaded["a"].zero_()
        assert loaded["b"].tolist() == [0.0] * 3
        assert loaded["b"].storage_offset() == 2
    assert y[3].item() == 3


def test_a_storage_is_written_once(loopback: Any) -> None:
    y = torch.zeros(100_000, device=CUDA)
    assert len(_saved([y[i:] for i in range(20)]).getvalue()) < 500_000


def test_checkpoints_of_gpu_machines_land_on_cuda(
    loopback: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = Net().state_dict()
    file = _as_saved_on_cuda(state, monkeypatch)
    before = loopback.node.acquired
    loaded = torch.load(file)
    assert loopback.node.acquired == before, "loading a checkpoint must not need a GPU"
    assert all(value.is_cuda for value in loaded.values())
    _same(loaded, state)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(file.getvalue())
    _same(torch.load(path, mmap=True), state)
    _same(torch.load(path, mmap=True, map_location="cpu"), state)
    Net().to(CUDA).load_state_dict(torch.load(path, mmap=True))


def test_whole_modules(loopback: Any) -> None:
    net = Net().to(CUDA)
    for new in (True, False):
        loaded = torch.load(_saved(net, _use_new_zipfile_serialization=new), weights_only=False)
        assert isinstance(loaded.head.weight, torch.nn.Parameter)
        assert loaded.head.weight is loaded.embedding.weight
        assert not loaded.turned.requires_grad
        _same(loaded.state_dict(), net.state_dict())
    host = torch.load(_saved(net), weights_only=False, map_location="cpu")
    assert type(host.head.weight) is torch.nn.Parameter
    twin = pickle.loads(pickle.dumps(net))
    assert twin.head.weight is twin.embedding.weight
    _same(twin.state_dict(), net.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 4).t(),
        lambda: torch.randn(4, 6)[::2, 1:3],
        lambda: torch.randn(3, 1).expand(3, 4),
        lambda: torch.empty(0),
        lambda: torch.tensor(2.5),
        lambda: torch.randn(3).bfloat16(),
        lambda: torch.randn(3, dtype=torch.complex128),
        lambda: torch.randn(3, dtype=torch.complex64).conj(),
        lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
        lambda: torch.arange(4).to(torch.uint16),
        lambda: torch.randn(4).to(torch.float8_e4m3fn),
        lambda: torch.tensor([True, False]),
    ],
)
def test_every_kind_of_tensor(loopback: Any, make: Callable[[], torch.Tensor]) -> None:
    host = make()
    remote = host.to(CUDA)
    if host.is_conj():
        remote = host.conj().to(CUDA).conj()
    plain = host.resolve_conj().resolve_neg()
    restored = [torch.load(_saved(remote)), copy.deepcopy(remote)]
    if remote.dtype not in (torch.uint16, torch.float8_e4m3fn):  # which PyTorch itself cannot do with these
        restored += [
            torch.load(_saved(remote, _use_new_zipfile_serialization=False)),
            pickle.loads(pickle.dumps(remote)),
            copy.copy(remote),
        ]
    for value in restored:
        assert value.is_cuda
        assert (value.shape, value.stride(), value.dtype) == (remote.shape, remote.stride(), remote.dtype)
        assert value.is_conj() == remote.is_conj()
        assert value.cpu().tolist() == plain.tolist()
        assert value.clone().cpu().tolist() == plain.tolist()


def test_what_python_knows_of_a_tensor_is_kept(loopback: Any) -> None:
    x: Any = torch.ones(2, device=CUDA, requires_grad=True)
    x.tag = "tagged"
    parameter: Any = torch.nn.Parameter(torch.ones(2, device=CUDA))
    parameter.scale = 3
    for value in (x, parameter):
        copied = copy.deepcopy(value)
        for restored in (
            torch.load(_saved(value)),
            torch.load(_saved(value), map_location="cpu"),
            pickle.loads(pickle.dumps(value)),
            copied,
        ):
            assert restored.requires_grad
            assert isinstance(restored, torch.nn.Parameter) == (value is parameter)
            assert vars(restored).get("tag") == vars(value).get("tag")
            if restored is not copied or value is x:  # PyTorch copies no attributes of parameters
                assert vars(restored).get("scale") == vars(value).get("scale")


def test_a_shallow_copy_shares_its_storage(loopback: Any) -> None:
    x = torch.ones(2, device=CUDA)
    copy.copy(x).zero_()
    assert x.tolist() == [0.0, 0.0]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_are_copied_and_saved_with_their_tensors(loopback: Any) -> None:
    x = torch.arange(4.0, device=CUDA)
    both: list[Any] = [x, x.untyped_storage()]
    twin, storage = copy.deepcopy(both)
    storage.fill_(0)
    assert twin.tolist() == [0.0] * 4
    assert x[1].item() == 1
    x = x.to(torch.uint8)
    saved, storage = torch.load(_saved([x, x.untyped_storage()]), weights_only=False)
    assert saved.untyped_storage() == storage.untyped()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_the_typed_face_of_a_storage(loopback: Any) -> None:
    x = torch.arange(2.0, device=CUDA)
    storage = torch_.Tensor.storage(x)
    assert (storage.size(), len(storage), storage.nbytes()) == (2, 2, 8)
    assert storage.tolist() == [0.0, 1.0]
    assert (storage.dtype, storage.device, storage.is_cuda) == (torch.float32, torch.device("cuda", 0), True)
    assert storage.data_ptr() == x.data_ptr()
    assert storage[1] == 1
    storage[1] = 7
    assert x.tolist() == [0.0, 7.0]
    assert type(storage.cpu().untyped()) is torch.UntypedStorage
    assert storage.clone().tolist() == storage.cpu().tolist() == [0.0, 7.0]
    assert torch_.FloatStorage([1.0, 2.0]).cuda().tolist() == [1.0, 2.0]
    assert torch_.cuda.FloatStorage([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert storage.type() == "torch.cuda.FloatStorage"


def test_the_untyped_face_of_a_storage(loopback: Any) -> None:
    x = torch.tensor([1, 2], dtype=torch.uint8, device=CUDA)
    storage: Any = x.untyped_storage()
    assert isinstance(storage, torch_.UntypedStorage)
    assert torch_.is_storage(storage)
    assert (storage.size(), storage.tolist(), storage[1]) == (2, [1, 2], 2)
    assert storage.cpu().tolist() == [1, 2]
    assert torch_.UntypedStorage(2).copy_(storage).tolist() == [1, 2]
    assert torch_.UntypedStorage(2).copy_(storage).cuda().copy_(storage).tolist() == [1, 2]
    assert storage.to(device="cpu").tolist() == [1, 2]
    assert torch_.UntypedStorage([1, 2], device="cuda").is_cuda
    assert torch_.UntypedStorage(3).device.type == "cpu"
    assert storage.resize_(2) is storage
    fail: Any
    for fail in (lambda: storage.resize_(1), lambda: storage[1:]):
        with pytest.raises(NotImplementedError, match="Dormouse"):
            fail()
    with pytest.raises(RuntimeError, match="size does not match"):
        storage.copy_(torch_.UntypedStorage(3))
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch_.UntypedStorage(3, device="cuda:1")


def test_set_makes_a_view_of_the_same_storage(loopback: Any) -> None:
    x = torch.arange(4.0, device=CUDA)
    t: Any = torch.empty(0, device=CUDA)
    assert t.set_(x.untyped_storage(), 1, (3,)) is t
    assert (t.tolist(), t.storage_offset()) == ([1.0, 2.0, 3.0], 1)
    t.zero_()
    assert x.tolist() == [0.0] * 4
    assert t.set_(x.untyped_storage()).shape == (4,)
    assert t.set_(x.untyped_storage(), 0, (2, 2), (1, 2)).stride() == (1, 2)
    assert t.set_(source=x.view(2, 2).t()).shape == (2, 2)
    assert t.set_(x, 2, (2,)).data_ptr() == x[2:].data_ptr()
    assert t.is_set_to(x[2:])
    assert not t.is_set_to(x)
    assert t.set_().shape == (0,)
    with pytest.raises(RuntimeError, match="int64"):
        t.set_(torch.arange(3, device=CUDA))
    with pytest.raises(RuntimeError, match="on cpu"):
        t.set_(torch.ones(3))
    with pytest.raises(NotImplementedError, match="resize"):
        t.set_(x.untyped_storage(), 0, (50,))


def test_leaving_gives_storages_back(loopback: Any) -> None:
    loopback.close()
    with pytest.raises(RuntimeError):
        torch_.UntypedStorage(3, device="cuda")
    assert torch_.UntypedStorage(3).nbytes() == 3
    assert torch_.UntypedStorage([1, 2]).clone().tolist() == [1, 2]
