"""What C++ records on the client: calls that were seen before, and what a signature does not tell."""

import copy
import gc
import math
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch

from dormouse.client_shim.commands import recorder
from dormouse.client_shim.commands.handles import cpp
from dormouse.client_shim.torch_face.remote_tensor import use
from dormouse.core.native import RECORDER

CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]

LIBRARY: Any = torch.library.Library

BY_CPP = pytest.mark.parametrize("loopback", ["cpp"], indirect=True)


@BY_CPP
def test_a_call_that_was_seen_before_does_not_reach_python(loopback: Any) -> None:
    x = torch.ones(3, device=CUDA)
    values = []
    for number in (1, 2.0, 3, 4.0):
        before = loopback.hits()
        values.append((x + number).sum())
        followed = loopback.hits() - before
    assert followed == 2
    assert [value.item() for value in values] == [6.0, 9.0, 12.0, 15.0]
    assert type(x) is torch.Tensor
    assert type(torch.nn.Parameter(x)) is torch.nn.Parameter


@BY_CPP
def test_a_view_that_one_storage_has_room_for_and_another_has_not(loopback: Any) -> None:
    """Both tensors have the same sizes and strides, so the calls have one signature."""
    large, small = torch.arange(12.0).to(CUDA), torch.arange(4.0).to(CUDA)
    for _ in range(2):
        assert large[:4].as_strided((2, 3), (3, 1)).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 16"):
        small.as_strided((2, 3), (3, 1))


@BY_CPP
def test_numbers_that_are_left_out_are_no_operands(loopback: Any) -> None:
    x = torch.linspace(-2, 2, 5)
    there = x.to(CUDA)
    before = loopback.hits()
    for low, high in ((None, 1), (0, 1), (0, None), (-1, 0), (None, 0), (0, 0)):
        for _ in range(2):
            assert torch.equal(there.clamp(low, high).cpu(), x.clamp(low, high))
    for alpha in (1, 2, 1.0, 1, 3):
        assert torch.equal(torch.add(there, there, alpha=alpha).cpu(), torch.add(x, x, alpha=alpha))
    assert loopback.hits() - before == 10, "of 17 calls there were seven for the first time"


@BY_CPP
def test_what_makes_a_tensor_from_nothing_does_not_reach_python(loopback: Any) -> None:
    """Numbers that decide a size belong to the signature, of whatever type they are."""
    made = []
    for round_ in range(3):
        before = cpp.module.counts()[1]
        for end in (3, 4.0, 3.0, 2.5, 3):
            made.append((torch.arange(end, device=CUDA), torch.arange(end)))
        made.append((torch.full((2,), 1.5, device=CUDA), torch.full((2,), 1.5)))
        made.append((torch.cat([torch.tensor([], device=CUDA), made[0][0]]), torch.cat([torch.tensor([]), made[0][1]])))
        assert round_ < 2 or cpp.module.counts()[1] == before
    for mine, real in made:
        assert mine.dtype == real.dtype
        assert torch.equal(mine.cpu(), real)


@BY_CPP
def test_an_empty_tensor_exists_when_a_command_names_it(loopback: Any) -> None:
    """Its bytes are zero if they are few, and it dies as any."""
    loopback.begin_lease()
    table = loopback.node.executors[0].interpreter.table.by_id
    large = torch.empty(recorder.BLANK_NBYTES // 4 + 1, device=CUDA)
    for _ in range(4):
        small = torch.empty(5, device=CUDA)
        assert (small + 1).tolist() == [1.0] * 5
        assert (small + 2).tolist() == [2.0] * 5
    small = torch.empty(5, device=CUDA)
    torch.cuda.synchronize()
    before = len(table)
    assert small.tolist() == [0.0] * 5
    assert large.fill_(2).sum().item() == 2 * large.numel()
    torch.cuda.synchronize()
    assert len(table) == before + 2
    with pytest.raises(NotImplementedError, match="dense"):
        torch.empty(3, device=CUDA, layout=torch.sparse_coo)
    for sizes, strides in (((-1,), (1,)), ((1 << 62, 1 << 62), (1, 1))):
        with pytest.raises(RuntimeError):
            torch.empty_strided(sizes, strides, device=CUDA)
    del small, large
    torch.cuda.synchronize()
    assert len(table) == before


@BY_CPP
def test_a_number_that_a_dtype_has_not_is_told_at_the_call_each_time(loopback: Any) -> None:
    x = torch.ones(3, dtype=torch.int8, device=CUDA)
    for number in (1, 100, 27):
        assert x.fill_(number).tolist() == [number] * 3
    for _ in range(2):
        with pytest.raises(RuntimeError, match="overflow"):
            x.fill_(300)


@BY_CPP
def test_results_that_python_never_saw_die_once(loopback: Any) -> None:
    """Composites make tensors in C++ that no object of Python stands for."""
    loopback.begin_lease()
    x = torch.ones(64, 64, device=CUDA)
    held = loopback.stream.held_nbytes
    for _ in range(50):
        y = torch.nn.functional.normalize(x.reshape(32, 128), dim=1).t().contiguous()
    gc.collect()
    torch.cuda.synchronize()
    assert loopback.stream.held_nbytes == held + y.nbytes
    del y
    torch.cuda.synchronize()
    assert loopback.stream.held_nbytes == held
    assert loopback.end_lease() is not None


def test_a_kernel_that_a_library_brings_for_cuda_is_not_run_here(loopback: Any) -> None:
    """It would be given tensors without bytes. Its library is imported when cuda:0 is there already."""
    ran: list[torch.Tensor] = []

    def kernel(x: torch.Tensor) -> torch.Tensor:
        ran.append(x)
        return x

    name = f"dormouse_late_{'cpp' if loopback.by_cpp else 'python'}"
    library: Any = LIBRARY(name, "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", kernel, "CUDA")
    with pytest.raises(NotImplementedError, match=f"{name}::twice"):
        getattr(torch.ops, name).twice(torch.ones(2, device=CUDA)).cpu()
    assert ran == []
    library._destroy()
    again: Any = LIBRARY(name, "DEF")
    again.define("twice(Tensor x, Tensor y, float scale=1.0) -> Tensor")
    again.impl("twice", lambda x, y, scale=1.0: kernel(x), "CUDA")
    with pytest.raises(NotImplementedError, match=f"{name}::twice"):
        getattr(torch.ops, name).twice(torch.ones(2, device=CUDA), torch.ones(2, device=CUDA), 2.0).cpu()
    assert ran == []
    again._destroy()


def test_an_out_that_is_an_operand_and_one_that_is_none(loopback: Any) -> None:
    """The calls have operands of the same shapes; which of them are one tensor differs."""
    a, b, c = (torch.full((3,), value, device=CUDA) for value in (1.0, 2.0, 0.0))
    for wanted in (9.0, 9.0):
        torch.add(c, b, out=c)
        torch.add(a, b, out=c)
        torch.add(c, b, out=c)
        torch.add(b, c, out=c)
        torch.add(c, b, out=c)
        assert c.tolist() == [wanted] * 3
    torch.maximum(a, b, out=b)
    torch.maximum(a, a, out=a)
    assert (a.tolist(), b.tolist()) == ([1.0] * 3, [2.0] * 3)


def test_the_sign_of_a_large_exponent_and_of_nothing(loopback: Any) -> None:
    whole, nan = torch.ones(2, dtype=torch.int64, device=CUDA), torch.full((2,), float("nan"), device=CUDA)
    for _ in range(2):
        assert whole.pow(200).tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="negative integer powers"):
        whole.pow(-200)
    for zero in (0.0, -0.0, 0.0, -0.0):
        found = torch.nan_to_num(nan, nan=zero)
        assert [math.copysign(1, value) for value in found.tolist()] == [math.copysign(1, zero)] * 2


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_a_default_dtype_by_its_old_name(loopback: Any) -> None:
    whole = torch.ones(2, dtype=torch.int64, device=CUDA)
    kinds = [(whole / 2).dtype, (whole / 2).dtype]
    torch.set_default_tensor_type(torch.DoubleTensor)
    try:
        kinds.append((whole / 2).dtype)
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert kinds == [torch.float32, torch.float32, torch.float64]


class Named(torch.Tensor):
    pass


@BY_CPP
def test_copies_of_a_class_of_the_program_are_of_that_class(loopback: Any) -> None:
    named = torch.ones(2, device=CUDA).as_subclass(Named)
    for restored in (copy.deepcopy(named), copy.copy(named), pickle.loads(pickle.dumps(named)), named + 1, named[:1]):
        assert type(restored) is Named
        assert restored.is_cuda
    assert copy.deepcopy(named).tolist() == [1.0, 1.0]


@BY_CPP
def test_a_mode_of_the_program_sees_its_own_calls_only(loopback: Any) -> None:
    overrides: Any = torch.overrides
    seen: list[str] = []

    class Log(overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    found: list[list[str]] = []
    for x in (torch.ones(2), torch.ones(2, device=CUDA)):
        seen.clear()
        with Log():
            y = x + 1
            y.tolist()
            y.data_ptr()
            y.is_set_to(x)
        found.append(list(seen))
    assert found[0] == found[1]


def test_a_capsule_of_dlpack_is_refused_by_name(loopback: Any) -> None:
    x: Any = torch.ones(2, device=CUDA)
    dlpack: Any = torch.utils.dlpack
    for take in (x.__dlpack__, lambda: dlpack.to_dlpack(x)):
        with pytest.raises(NotImplementedError, match="DLPack"):
            take()


@BY_CPP
def test_a_finalizer_that_records_while_an_operand_is_packed(loopback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complex number is packed by Python, where the collector may run."""
    total, z = torch.zeros(1, device=CUDA), torch.ones(2, dtype=torch.complex64, device=CUDA)
    for _ in range(2):
        total.add_(1)

    class Counting:
        def __del__(self) -> None:
            total.add_(1)

    def packb(value: Any) -> bytes:
        Counting()
        packed: bytes = msgpack.packb(value)
        return packed

    monkeypatch.setattr(recorder, "msgpack", SimpleNamespace(packb=packb))
    use(cpp.module)
    try:
        for _ in range(3):
            z = z * (1 + 2j)
    finally:
        monkeypatch.undo()
        use(cpp.module)
    assert z.tolist() == [(1 + 2j) ** 3] * 2
    assert total.item() >= 5.0


def test_tensors_may_outlive_the_interpreter() -> None:
    RECORDER.build()
    program = """
import sys, torch
from tests.loopback import LoopbackWorld
world = LoopbackWorld()
assert world.by_cpp
world.begin_lease()
leaf = torch.ones(3, device="cuda", requires_grad=True)
made = (leaf * 2).sin()  # its graph holds tensors without an object of Python
sys.modules["kept"] = [made, leaf]
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_cache_that_begins_with_nothing_is_not_waited_for(loopback: Any) -> None:
    keys = torch.ones(2, 3).to(CUDA)
    torch.cuda.synchronize()
    waits = loopback.stream.answers.round_trips
    cache = torch.cat([torch.tensor([], device=CUDA), keys], dim=-2)
    cache = torch.cat([cache, keys], dim=-2)
    assert loopback.stream.answers.round_trips == waits
    assert cache.tolist() == [[1.0] * 3] * 4
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([torch.ones(0, 2, device=CUDA), keys])
