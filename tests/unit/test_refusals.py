"""What a program may innocently ask of cuda:0 and the wire cannot say is refused in the shim, or works: nothing of it
looks like an attack to the executor, and what was recorded before it is not lost."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from dormouse.client_shim.commands import metas
from dormouse.client_shim.stream.remote_storage import freed
from dormouse.gpuserver.commands import definitions
from dormouse.schemas import stream as wire

CUDA = "cuda"
MODES: list[Any] = [torch.no_grad, torch.inference_mode]

ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
STRANGE = [dtype for dtype in ALL_DTYPES if dtype not in metas.DTYPES.values()]

WITH_A_DTYPE: dict[str, Callable[[torch.dtype], Any]] = {
    "empty": lambda dtype: torch.empty(4, dtype=dtype, device=CUDA).clone(),
    "zeros": lambda dtype: torch.zeros(4, dtype=dtype, device=CUDA),
    "to": lambda dtype: torch.ones(4, device=CUDA).to(dtype),
    "upload": lambda dtype: torch.empty(4, dtype=dtype).cuda(),
    "view": lambda dtype: torch.ones(16, dtype=torch.uint8, device=CUDA).view(dtype).clone(),
    "operand": lambda dtype: torch.ones(4, device=CUDA) * torch.empty((), dtype=dtype),
    "sum": lambda dtype: torch.ones(4, device=CUDA).sum(dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.ones(4, device=CUDA), dtype=dtype).clone(),
}


def _still_well(loopback: Any, before: torch.Tensor) -> None:
    assert before.tolist() == [2.0] * 3, "what was recorded before it is not lost"
    assert (torch.ones(3, device=CUDA) * 3).tolist() == [3.0] * 3
    assert [executor.failure for executor in loopback.node.executors] == [None, None]


def test_client_and_executor_agree_on_dtypes_and_dimensions() -> None:
    assert metas.DTYPES == definitions.DTYPES
    assert metas.MAX_DIMS == definitions.MAX_DIMS
    assert {torch.qint8, torch.quint4x2, torch.bits8} <= set(STRANGE)


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:torch.quantize")
@pytest.mark.parametrize("mode", MODES)
def test_dtypes_are_refused_by_name_or_work(loopback: Any, mode: Any) -> None:
    for dtype in ALL_DTYPES:
        for name, call in WITH_A_DTYPE.items():
            before = torch.ones(3, device=CUDA) * 2
            with mode():
                if dtype in STRANGE:
                    recorded = loopback.stream.commands_recorded
                    with pytest.raises(RuntimeError, match="Dormouse function") as info:
                        call(dtype)
                    assert isinstance(info.value, NotImplementedError), (dtype, name)
                    assert loopback.stream.commands_recorded <= recorded + 1, "only the tensor that it was asked of"
                else:
                    with suppress(RuntimeError):  # a kernel that does not know the dtype says so itself
                        call(dtype)
                        torch.cuda.synchronize()
            _still_well(loopback, before)


def _quantized() -> Any:
    return torch.quantize_per_tensor(torch.ones(3, device=CUDA), 0.1, 0, torch.qint8)


def _eye() -> torch.Tensor:
    return torch.eye(2, device=CUDA)


REFUSED: dict[str, Callable[[], Any]] = {
    "quantize_per_tensor": _quantized,
    "quantize_dynamic": lambda: torch.quantize_per_tensor_dynamic(torch.ones(3, device=CUDA), torch.qint8, False),
    "a sparse upload": lambda: torch.eye(2).to_sparse().cuda(),
    "a sparse operand": lambda: _eye() * torch.tensor(1.0).to_sparse(),
    "sparse": lambda: _eye().to_sparse(),
    "compressed": lambda: _eye().to_sparse_csr(),
    "zeros_like sparse": lambda: torch.zeros_like(_eye(), layout=torch.sparse_coo),
    "mkldnn": lambda: _eye().to_mkldnn(),
    "nested": lambda: torch.nested.as_nested_tensor([_eye(), _eye()]),
    "65 dimensions": lambda: torch.empty([1] * 65, device=CUDA).add(1),
    "65 dimensions of a view": lambda: torch.ones(1, device=CUDA).view([1] * 65).add(1),
    "65 dimensions uploaded": lambda: torch.zeros([1] * 65).cuda(),
    "a long string": lambda: torch.nn.functional.gelu(_eye(), approximate="x" * 3_000_000),
    "more operands than a frame holds": lambda: torch.cat([_eye()] * 100_000),
    "generators": lambda: [torch.Generator(device=CUDA) for _ in range(wire.MAX_GENERATORS)],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
def test_what_cannot_be_said_is_refused(loopback: Any, mode: Any) -> None:
    before = torch.ones(3, device=CUDA) * 2
    for name, call in REFUSED.items():
        with mode(), pytest.raises(NotImplementedError) as info:
            call()
        assert len(str(info.value)) > 20, name
    _still_well(loopback, before)


REFUSED_AS_BY_PYTORCH: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "an integer beyond 64 bits": (lambda: _eye() + 2**70, OverflowError, "too big"),
    "half of a surrogate pair": (lambda: torch.einsum("i\ud800,i->i", _eye(), _eye()), RuntimeError, "utf-8"),
    "more than any GPU has": (
        lambda: torch.empty(2**41, dtype=torch.uint8, device=CUDA).add(1),
        torch.OutOfMemoryError,
        "out of memory",
    ),
    "a generator's state of another device": (
        lambda: torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8)),
        RuntimeError,
        "wrong size",
    ),
    "no generator's state": (
        lambda: torch.cuda.set_rng_state(torch.full_like(torch.cuda.get_rng_state(), 255)),
        RuntimeError,
        "(?i)state",
    ),
    "a state of floats": (lambda: torch.cuda.set_rng_state(torch.zeros(16)), TypeError, "ByteTensor"),
    "a state of three megabytes": (
        lambda: torch.cuda.set_rng_state(torch.zeros(3_000_000, dtype=torch.uint8)),
        RuntimeError,
        "wrong size",
    ),
}


@pytest.mark.parametrize("name", REFUSED_AS_BY_PYTORCH)
def test_what_pytorch_refuses_is_refused_as_there(loopback: Any, name: str) -> None:
    call, kind, text = REFUSED_AS_BY_PYTORCH[name]
    before = torch.ones(3, device=CUDA) * 2
    with pytest.raises(kind, match=text):
        call()
    _still_well(loopback, before)


def test_long_lists_of_tensors_work(loopback: Any) -> None:
    before = torch.ones(3, device=CUDA) * 2
    numbers = [torch.full((1,), float(i), device=CUDA) for i in range(3000)]
    assert torch.cat(numbers).tolist() == [float(i) for i in range(3000)]
    assert [x.item() for x in torch._foreach_add(numbers, 1.0)[::1000]] == [1.0, 1001.0, 2001.0]
    torch._foreach_mul_(numbers, [2.0] * 3000)
    assert torch.stack(numbers).sum().item() == sum(range(3000)) * 2
    _still_well(loopback, before)


@contextmanager
def _held(loopback: Any) -> Iterator[None]:
    """Keep the executor busy until somebody waits for it: meanwhile frames leave only when they are full."""
    executor, gate = loopback.node.executors[0], threading.Event()
    receive = executor.recv

    def recv(timeout_s: float) -> bytes | None:
        if timeout_s:
            gate.set()
        return receive(timeout_s)  # type: ignore[no-any-return]

    executor.recv = recv
    executor._inbox.put(gate.wait)
    try:
        yield
    finally:
        gate.set()


def test_many_long_commands_share_no_frame(loopback: Any) -> None:
    """Seventy commands are one frame as a rule; of these, one is more than a twentieth of what a frame may have, so
    that thirty need two.
    """
    x = torch.ones(1, device=CUDA)
    with _held(loopback):
        sizes = [torch.cat([x] * (5000 + i)).shape for i in range(30)]
        assert sizes[-1] == (5029,)
        small = [torch.cat([x] * (250 + i)) for i in range(200)]
        assert sum(small[-1].tolist()) == 449
    _still_well(loopback, x.expand(3) + 1)


def test_ends_of_many_tensors_at_once(loopback: Any) -> None:
    before = torch.ones(3, device=CUDA) * 2
    # As their finalizers do; the executor passes over what it never had.
    freed.extend((number, 0) for number in range(10**8, 10**8 + 250_000))
    _still_well(loopback, before)


def test_many_seeds_without_an_operation(loopback: Any) -> None:
    before = torch.ones(3, device=CUDA) * 2
    for seed in range(200_000):
        torch.cuda.manual_seed(seed)
    _still_well(loopback, before)


def test_generators_can_be_made_again(loopback: Any) -> None:
    for _ in range(3):
        generators = [torch.Generator(device=CUDA) for _ in range(wire.MAX_GENERATORS - 1)]
        assert torch.rand(2, device=CUDA, generator=generators[-1]).shape == (2,)
        del generators
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device=CUDA).tolist()
    torch.cuda.set_rng_state(state)
    assert torch.rand(3, device=CUDA).tolist() == first
