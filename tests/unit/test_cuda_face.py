"""`torch.cuda` and its surroundings as a program in a sandbox sees them."""

import importlib
import io
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from dormouse.client_shim.stream import failures
from dormouse.client_shim.torch_face import cuda_face

CUDA = "cuda"

torch_: Any = torch
"""For what its stubs leave untyped."""


def test_one_device_from_the_snapshot(loopback: Any) -> None:
    cuda: Any = torch.cuda
    assert cuda.is_available()
    assert (cuda.device_count(), cuda.current_device(), cuda.is_initialized()) == (1, 0, True)
    assert cuda.get_device_name() == cuda.get_device_properties(0).name == "Dormouse virtual GPU"
    assert cuda.get_device_capability("cuda:0") == (8, 0)
    assert cuda.get_device_properties().total_memory == 8 << 30
    assert cuda.mem_get_info() == (8 << 30, 8 << 30)
    assert cuda.is_bf16_supported()
    assert cuda.memory_allocated() == 0
    assert loopback.node.acquired == 0, "no question needs a GPU"
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        cuda.get_device_name(1)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(1, device="cuda:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device="cuda:3")


def test_n8_memory_figures_are_this_functions(loopback: Any) -> None:
    cuda, mib = torch_.cuda, 1 << 20
    total = 8 << 30
    model = torch.ones(mib, dtype=torch.uint8).to(CUDA)
    assert (cuda.memory_allocated(), cuda.mem_get_info()) == (mib, (total - mib, total)), "what load() uploads counts"
    loopback.end_lease()
    assert cuda.memory_allocated("cuda:0") == mib, "and stays, also while no GPU is held"
    loopback.begin_lease()
    cuda.reset_peak_memory_stats()
    twice = model * 2
    chosen = twice[twice > 1]  # its size is asked for
    assert cuda.memory_allocated() == 3 * mib
    empty = torch.empty(mib, dtype=torch.uint8, device=CUDA)
    assert cuda.memory_allocated() == 3 * mib, "nothing was written to it"
    torch.add(model, model, out=empty)
    grown = torch.empty(0, dtype=torch.uint8, device=CUDA)
    torch.add(model, model, out=grown)
    assert cuda.memory_allocated() == cuda.memory_reserved() == 5 * mib
    del twice, chosen, empty, grown
    assert (cuda.memory_allocated(), cuda.max_memory_allocated(0)) == (mib, 5 * mib)
    cuda.reset_peak_memory_stats()
    assert cuda.max_memory_allocated() == cuda.max_memory_reserved() == mib
    view = model[: mib // 2]
    assert cuda.memory_stats()["allocated_bytes.all.current"] == mib, "a view takes nothing"
    assert cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"] == {"current": mib, "peak": mib}
    loopback.end_lease()
    del model, view
    assert (cuda.memory_allocated(), cuda.mem_get_info()[0]) == (0, total)
    cuda.empty_cache()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        cuda.memory_allocated(1)


def test_n8_memory_of_a_failed_and_of_a_lost_lease(loopback: Any) -> None:
    loopback.begin_lease()
    x = torch.ones(1000, dtype=torch.uint8, device=CUDA)
    loopback.stream.lose_lease()
    assert torch.cuda.memory_allocated() == 1000
    del x
    assert torch.cuda.memory_allocated() == 0
    loopback.begin_lease()
    assert torch.cuda.memory_allocated() == 0, "it is counted once, though the executor is told later"


@pytest.fixture
def room(loopback: Any) -> Any:
    """A device of 16 MiB, of which a program allows itself a 32nd."""
    cuda_face.connect(replace(cuda_face.UNCONNECTED, total_nbytes=1 << 24))
    loopback.begin_lease()
    torch.zeros(2000 * KIB, device=CUDA)  # more than what comes later
    torch.cuda.synchronize()
    torch_.cuda.reset_accumulated_memory_stats()
    torch_.cuda.set_per_process_memory_fraction(1 / 32)
    return loopback


KIB = 1 << 10
BEYOND: dict[str, Any] = {
    "computed": lambda some: some.expand(3, -1) + 1,
    "of an unknown size": lambda some: some[: 40 * KIB].nonzero(),
    "uploaded": lambda some: torch.ones(300 * KIB, dtype=torch.uint8).to(CUDA),
    "made of nothing": lambda some: torch.empty(300 * KIB, dtype=torch.uint8, device=CUDA),
    "grown": lambda some: torch.cat([some, some[:1]], out=torch.ones(1, dtype=torch.uint8, device=CUDA)),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", BEYOND)
def test_a_program_keeps_to_the_part_of_the_memory_that_it_allows_itself(room: Any, name: str) -> None:
    cuda = torch_.cuda
    assert cuda.get_per_process_memory_fraction() == 1 / 32
    some = torch.zeros(300 * KIB, dtype=torch.uint8, device=CUDA)
    some += 1
    for times in (1, 2):
        with pytest.raises(torch.OutOfMemoryError, match=r"allows 0\.50 MiB"):
            BEYOND[name](some)
        assert cuda.memory_stats()["num_ooms"] == times
        assert cuda.memory_allocated() in (300 * KIB, 300 * KIB + 1), "nothing is left of it"
    assert int(some.sum()) == 300 * KIB, "what is held goes on"
    del some
    kept = torch.zeros(500 * KIB, dtype=torch.uint8, device=CUDA)
    cuda.set_per_process_memory_fraction(1.0)
    assert BEYOND[name](kept) is not None
    cuda.reset_accumulated_memory_stats()
    assert cuda.memory_stats()["num_ooms"] == 0


def test_a_fraction_is_one(loopback: Any) -> None:
    for wrong, kind in ((1, TypeError), ("0.5", TypeError), (1.5, ValueError), (-0.1, ValueError)):
        with pytest.raises(kind, match=r"fraction"):
            torch_.cuda.set_per_process_memory_fraction(wrong)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch_.cuda.set_per_process_memory_fraction(0.5, 1)
    assert torch_.cuda.get_per_process_memory_fraction() == 1.0


def test_memory_that_an_executor_refuses_is_counted(loopback: Any) -> None:
    loopback.begin_lease()
    before = torch_.cuda.memory_stats()["num_ooms"]
    with pytest.raises(RuntimeError, match="memory"):
        (torch.ones(1, device=CUDA).expand(1 << 39) + 1).sum().item()
    told = failures.exception("OutOfMemoryError", "no room", None, None)
    assert (type(told), str(told)) == (torch.OutOfMemoryError, "no room")
    assert torch_.cuda.memory_stats()["num_ooms"] == before + 2
    with pytest.raises(KeyError, match=r"inactive_split_bytes\.all\.peak: a Dormouse function's memory_stats"):
        torch_.cuda.memory_stats()["inactive_split_bytes.all.peak"]


SYNCHRONIZING: dict[str, Any] = {
    "item": lambda x: x[0].item(),
    "cpu": lambda x: x.cpu(),
    "tolist": lambda x: x.tolist(),
    "print": lambda x: str(x),
    "if": lambda x: bool(x[0] > 0),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "an upload": lambda x: torch.ones(3).to(CUDA),
    "a copy": lambda x: torch.ones(3).copy_(x),
}
ASYNCHRONOUS: dict[str, Any] = {
    "computation": lambda x: (x * 2)[1:].softmax(0).sum(),
    "an upload": lambda x: torch.ones(3).to(CUDA, non_blocking=True),
    "a download": lambda x: x.to("cpu", non_blocking=True),
    "a factory": lambda x: torch.zeros(3, device=CUDA),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("name", SYNCHRONIZING)
def test_what_waits_is_told_if_a_program_wants_to_know(loopback: Any, name: str) -> None:
    x = torch.ones(3, device=CUDA)
    call = SYNCHRONIZING[name]
    call(x)
    try:
        torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
            call(x)
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            call(x)
        for other in ASYNCHRONOUS.values():
            other(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    call(x)


ELSEWHERE: dict[str, Any] = {
    "synchronize": lambda device: torch.cuda.synchronize(device),
    "current_stream": lambda device: torch.cuda.current_stream(device),
    "default_stream": lambda device: torch.cuda.default_stream(device),
    "Stream": lambda device: torch_.cuda.Stream(device),
    "get_rng_state": lambda device: torch.cuda.get_rng_state(device),
    "set_rng_state": lambda device: torch.cuda.set_rng_state(torch.cuda.get_rng_state(), device),
    "peer": lambda device: torch.cuda.can_device_access_peer(0, device),
    "device": lambda device: torch.cuda.device(device),
    "to": lambda device: torch.ones(1, device=CUDA).to(device),
    "cuda": lambda device: torch.ones(1, device=CUDA).cuda(device),
    "zeros_like": lambda device: torch.zeros_like(torch.ones(1, device=CUDA), device=torch.device("cuda", 1)),
    "accelerator": lambda device: torch.accelerator.synchronize(device),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_there_is_no_other_device(loopback: Any, name: str) -> None:
    for device in (1, "cuda:1", torch.device("cuda", 1)):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            ELSEWHERE[name](device)


def test_a_stream_is_a_stream_and_a_device_is_one_of_cuda(loopback: Any) -> None:
    cuda = torch_.cuda
    for call in (cuda.set_stream, cuda.stream):
        with pytest.raises(TypeError, match=r"torch\.cuda\.Stream, and no int"):
            call(3)
    for call in (cuda.set_device, cuda.get_device_name, cuda.synchronize, cuda.memory_allocated):
        with pytest.raises(ValueError, match="Expected a cuda device, but got: cpu"):
            call("cpu")
    assert (cuda.device_of(torch.ones(1)).idx, cuda.device_of(torch.ones(1, device=CUDA)).idx) == (-1, 0)
    states = [cuda.get_rng_state()]
    cuda.set_rng_state_all(states)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        cuda.set_rng_state_all(states * 2)
    assert cuda.Stream.priority_range() == (0, 0)
    assert cuda.graphs.is_current_stream_capturing() is False


def test_what_a_capability_decides(loopback: Any) -> None:
    """And what it does not is not made up."""
    cuda = torch_.cuda
    seen = []
    for capability in ((7, 5), (8, 0), (9, 0), (13, 0)):
        cuda_face.connect(replace(cuda_face.UNCONNECTED, capability=capability))
        told = cuda.get_device_properties()
        multi = [
            getattr(told, f"{name}_per_multi{'_' * (name[0] == 'm')}processor", 0)
            for name in ("max_threads", "shared_memory")
        ]
        seen.append((cuda.is_bf16_supported(False), cuda.is_bf16_supported(), cuda.is_tf32_supported(), *multi))
    assert seen == [
        (False, True, False, 1024, 65536),
        (True, True, True, 2048, 167936),
        (True, True, True, 2048, 233472),
        (True, True, True, 0, 0),
    ]
    for name in ("L2_cache_size", "uuid", "pci_bus_id"):
        with pytest.raises(AttributeError, match=f"{name} of a GPU is not known in a Dormouse function"):
            getattr(cuda.get_device_properties(), name)


def test_backends_of_cuda(loopback: Any) -> None:
    backend: Any = torch.backends.cuda
    assert backend.is_built()
    backend.cufft_plan_cache.max_size = 10
    assert backend.cufft_plan_cache[0].max_size == 10
    backend.cufft_plan_cache.clear()
    for call in (lambda: backend.cufft_plan_cache.size, backend.cublas_workspace_size):
        with pytest.raises(RuntimeError, match="a Dormouse function: its process"):
            call()


def test_n8_there_is_a_version_of_cuda(loopback: Any) -> None:
    assert torch.version.cuda is not None
    major, minor = map(int, torch.version.cuda.split("."))
    assert (major, minor) == (13, 0)


def test_streams_and_events(loopback: Any) -> None:
    cuda: Any = torch.cuda
    side = cuda.Stream()
    x = torch.ones(3).to(CUDA)
    with cuda.stream(side):
        y = x + 1
    torch.cuda.current_stream().wait_stream(side)
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    (y * 2).sum()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0
    assert end.query()
    y.record_stream(side)
    with torch.cuda.device(0):
        assert y.tolist() == [2.0] * 3


def test_what_cannot_work_says_why(loopback: Any) -> None:
    cpp_extension: Any = importlib.import_module("torch.utils.cpp_extension")

    with pytest.raises(RuntimeError, match="CUDA graphs cannot be captured"):
        torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="C\\+\\+ or CUDA extension"):
        cpp_extension.load_inline("x", "")
    with pytest.raises(RuntimeError, match="only dense CPU tensors"):
        torch.ones(2, device=CUDA).pin_memory()


def test_weights_load_straight_to_cuda(loopback: Any, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="needs safetensors: make setup")
    from safetensors.torch import load_file, save_file

    weights = {"a": torch.randn(3, 4), "b": torch.arange(5)}
    buffer = io.BytesIO()
    shared = torch.ones(2)
    torch.save({"state": weights, "one": shared, "two": shared}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, map_location="cuda")
    assert loaded["state"]["a"].is_cuda
    assert loaded["one"] is loaded["two"]
    assert loaded["one"].is_cuda
    path = tmp_path / "weights.safetensors"
    save_file(weights, path)
    for read in (load_file(path, device="cuda"), load_file(path, device="cuda:0")):
        assert read["a"].is_cuda
    assert loopback.node.acquired == 0
    for read in (load_file(path, device="cuda"), load_file(path, device="cuda:0")):
        assert torch.equal(read["a"].cpu(), weights["a"])
    with safetensors.safe_open(path, "pt", device="cuda") as file:
        assert file.get_tensor("b").is_cuda
        assert torch.equal(file.get_slice("a")[1:, :2].cpu(), weights["a"][1:, :2])
    save_file({"x": loaded["state"]["a"]}, path)
    assert torch.equal(load_file(path)["x"], weights["a"])


def test_an_unknown_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dormouse.client_shim import torch_private

    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    with pytest.raises(torch_private.UnsupportedTorch, match=r"2\.11, 2\.12, 2\.13.*2\.5\.1"):
        torch_private.check_version()


def test_a_torch_that_refuses_to_exchange_tensors_with_weak_references_is_refused(
    loopback: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dormouse.client_shim import torch_private

    def make() -> torch.Tensor:
        return torch.empty_strided((2, 3), (1, 2), device=CUDA)

    torch_private.self_test(make, type(make()))
    monkeypatch.setattr(torch.utils, "weakref", weakref)
    with pytest.raises(torch_private.UnsupportedTorch, match=r"needs: tensors with weak references are exchanged$"):
        torch_private.self_test(make, type(make()))


def test_leaving_puts_everything_back(loopback: Any) -> None:
    assert torch.cuda.is_available()
    loopback.close()
    assert not torch.cuda.is_available()
    assert isinstance(torch.zeros(1).data, torch.Tensor)


def test_preparing_starts_no_thread_and_does_not_import_the_compiler() -> None:
    code = (
        "import threading, sys, os; from dormouse.client_shim.torch_face.install import prepare; prepare(); "
        "print(threading.active_count(), 'torch._dynamo' in sys.modules, len(os.listdir('/proc/self/task')))"
    )
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    output = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert output.split() == ["1", "False", "1"]


def test_a_jiterator_kernel_may_be_made_but_not_called(loopback: Any) -> None:
    kernel = torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")
    with pytest.raises(RuntimeError, match="no GPU"):
        kernel(torch.ones(1, device="cuda"))


def test_the_accelerator_says_what_cuda_says(loopback: Any) -> None:
    cuda: Any = torch.cuda
    accelerator: Any = torch.accelerator
    assert accelerator.is_available()
    assert accelerator.current_accelerator() == accelerator.current_accelerator(check_available=True)
    assert accelerator.current_accelerator() == torch.device("cuda")
    assert torch.get_device_module() is torch.cuda
    assert (accelerator.device_count(), accelerator.current_device_index()) == (1, 0)
    for place in (0, "cuda:0", torch.device("cuda", 0)):
        accelerator.set_device_index(place)
        accelerator.synchronize(place)
    assert accelerator.current_stream() == accelerator.current_stream(0) == cuda.current_stream()
    accelerator.set_stream(cuda.Stream())
    with accelerator.device_index(0), accelerator.device_index(None):
        assert torch.ones(1, device=accelerator.current_accelerator()).device == torch.device("cuda", 0)
    assert torch.float16 in accelerator.get_device_capability()["supported_dtypes"]
    fail: Any
    for fail in (lambda: accelerator.set_device_index(1), lambda: accelerator.device_index(3).__enter__()):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            fail()
    with pytest.raises(ValueError, match="doesn't match the current accelerator"):
        accelerator.synchronize("cpu")
    with pytest.raises(RuntimeError, match="CUDA graphs"):
        accelerator.Graph()


@pytest.mark.parametrize("leased", [False, True])
def test_the_accelerator_has_the_same_memory(loopback: Any, leased: bool) -> None:
    cuda: Any = torch.cuda
    accelerator: Any = torch.accelerator
    loopback.begin_lease()
    ones = torch.ones(1000, device=CUDA)
    if not leased:
        loopback.end_lease()
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        assert getattr(accelerator, name)() == getattr(cuda, name)(), name
        assert getattr(accelerator, name)(0) == ones.nbytes, name
    assert accelerator.memory_stats() == cuda.memory_stats()
    assert accelerator.get_memory_info() == cuda.mem_get_info()
    for name in ("empty_cache", "empty_host_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        getattr(accelerator, name)()


def test_old_tensor_types(loopback: Any) -> None:
    cuda: Any = torch.cuda
    host = torch.tensor([1.5, 2.0])
    for to in ("torch.cuda.FloatTensor", cuda.FloatTensor):
        moved = host.type(to)
        assert (moved.is_cuda, moved.tolist()) == (True, [1.5, 2.0])
        assert moved.type(to) is moved
        assert isinstance(moved, cuda.FloatTensor)
        assert not isinstance(host, cuda.FloatTensor)
        assert moved.type() == "torch.cuda.FloatTensor"
        assert moved.type("torch.FloatTensor").device.type == "cpu"
    assert host.type("torch.cuda.LongTensor").tolist() == [1, 2]
    assert host.type(moved.half().type()).dtype == torch.float16
    assert host.type(torch.float64).dtype == torch.float64
    assert host.type() == "torch.FloatTensor"
    made = cuda.FloatTensor([1.0, 2.0])
    assert (made.is_cuda, made.dtype, made.tolist()) == (True, torch.float32, [1.0, 2.0])
    assert cuda.LongTensor(2, 3).shape == (2, 3)
    assert cuda.ByteTensor(torch.Size([4])).shape == (4,)
    assert cuda.BoolTensor().shape == (0,)
    assert cuda.FloatTensor(made).data_ptr() == made.data_ptr()
    assert (cuda.HalfTensor.dtype, cuda.HalfTensor.is_cuda) == (torch.float16, True)
    with pytest.raises(TypeError, match="FloatTensor"):
        cuda.FloatTensor(host)
    with pytest.raises(RuntimeError, match="set_default_device"):
        torch.set_default_tensor_type("torch.cuda.FloatTensor")


def test_data_parallel_on_one_device_calls_the_module(loopback: Any) -> None:
    layer = torch.nn.Linear(3, 2)
    x, weight = torch.randn(4, 3), layer.weight.detach().clone()
    expected = layer(x)
    for model in (torch.nn.DataParallel(layer), torch.nn.DataParallel(layer.to(CUDA), device_ids=[0])):
        for inputs in (x, x.to(CUDA)):
            result = model(inputs)
            assert result.is_cuda
            torch.testing.assert_close(result.cpu(), expected)
    assert torch.equal(layer.weight.cpu(), weight)
    gathered = torch.nn.parallel.gather([x.to(CUDA)], 0)
    assert torch.equal(gathered.cpu(), x)
    comm: Any = importlib.import_module("torch.cuda.comm")
    moved = x.to(CUDA)
    assert torch.equal(comm.gather([moved, moved], destination="cpu"), torch.cat([x, x]))
    assert [torch.equal(part.cpu(), x) for part in comm.scatter(moved, [0], chunk_sizes=[4])] == [True]
    with pytest.raises(RuntimeError, match=r"sum of chunk_sizes .* 4, .* but got \[3\]"):
        comm.scatter(moved, [0], chunk_sizes=[3])
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        comm.gather([moved, moved], destination=1)
    for name, args in (("broadcast", (moved,)), ("gather", ([moved],)), ("scatter", (moved,))):
        with pytest.raises(RuntimeError, match="with out cannot work in a Dormouse function"):
            getattr(comm, name)(*args, out=moved if name == "gather" else [moved])
    with pytest.raises(RuntimeError, match=r"(?i)device"):
        torch.nn.DataParallel(layer, device_ids=[0, 1])(x)


def test_marks_and_switches_do_nothing(loopback: Any) -> None:
    cuda: Any = torch.cuda
    nvtx = cuda.nvtx
    assert (nvtx.range_push("a"), nvtx.range_push("b")) == (0, 1)
    assert (nvtx.range_pop(), nvtx.range_pop()) == (1, 0)
    with nvtx.range("step {}", 1):
        nvtx.mark("x")
    first, second = nvtx.range_start("a"), nvtx.range_start("b")
    assert first != second
    nvtx.range_end(first)
    with torch_.autograd.profiler.emit_nvtx(enabled=False), cuda.profiler.profile():
        cuda.profiler.start()
    assert cuda.get_sync_debug_mode() == 0
    cuda.set_sync_debug_mode("warn")
    assert cuda.get_sync_debug_mode() == 1
    cuda.set_sync_debug_mode(0)
    assert cuda.get_sync_debug_mode() == 0
    with pytest.raises(RuntimeError, match="debug_mode"):
        cuda.set_sync_debug_mode("loud")
    cuda.tunable.enable(True)
    assert not cuda.tunable.is_enabled()


def test_the_default_generator(loopback: Any) -> None:
    (generator,) = torch.cuda.default_generators
    generator.manual_seed(5)
    assert torch.cuda.initial_seed() == generator.initial_seed() == 5
    one = torch.randn(3, device=CUDA).tolist()
    torch.cuda.manual_seed(5)
    assert torch.randn(3, device=CUDA, generator=generator).tolist() == one
    torch.cuda.seed()
    assert torch.cuda.initial_seed() != 5
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch_.Generator("cuda:1")
    own = torch_.Generator(CUDA).manual_seed(5)
    makers: list[Any] = [
        lambda: torch.randn(3, generator=own),
        lambda: torch.randint(9, (3,), generator=own, device="cpu"),
    ]
    for made in makers:
        with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"):
            made()
    assert torch.randn(3, generator=own, device=CUDA).tolist() == one
    assert torch.randn(3, device=CUDA).tolist() != one


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch_.cuda.nccl.all_reduce([torch.ones(2, device=CUDA)]),
        lambda: torch_.cuda.nccl.unique_id(),
        lambda: torch_.cuda.gds.GdsFile("file", 0),
        lambda: torch_.cuda.caching_allocator_alloc(8),
        lambda: torch_.cuda.memory.CUDAPluggableAllocator("library", "a", "b"),
        lambda: torch_.cuda.use_mem_pool(None),
        lambda: torch_.cuda.GreenContext.create(num_sms=4),
        lambda: torch_.cuda.get_stream_from_external(1),
        lambda: torch_.cuda.tunable.read_file("file"),
        lambda: torch_.cuda.current_blas_handle(),
        lambda: torch_.cuda.temperature(),
        lambda: torch_.cuda.utilization(),
        lambda: torch_.cuda.memory_usage(),
        lambda: torch_.cuda.list_gpu_processes(),
        lambda: torch_.cuda.memory_snapshot(),
        lambda: torch_.cuda.host_memory_stats(),
        lambda: torch_.cuda.caching_allocator_disabled(),
        lambda: torch_.cuda.profiler.cudart(),
    ],
)
def test_what_needs_the_driver_says_so(loopback: Any, call: Any) -> None:
    with pytest.raises(RuntimeError, match=r"a Dormouse function('s|: its) process"):
        call()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:Use `(current|set)_device_index`")
@pytest.mark.parametrize("name", ["cuda", "cuda.memory", "cuda.nccl", "cuda.tunable", "cuda.gds", "accelerator"])
def test_every_public_name_works_or_says_why_not(loopback: Any, name: str) -> None:
    """Called without arguments: what fails misses an argument, or says that Dormouse cannot do it."""
    module = importlib.import_module(f"torch.{name}")
    unclear: list[Any] = []
    for public in module.__all__:
        value = getattr(module, public)
        if not callable(value) or (isinstance(value, type) and issubclass(value, Exception)):
            continue
        try:
            value()
        except TypeError as error:
            if "missing" not in str(error):
                unclear.append((public, error))
        except RuntimeError as error:
            if "Dormouse" not in str(error):
                unclear.append((public, error))
        except Exception as error:
            unclear.append((public, error))
    assert unclear == []
