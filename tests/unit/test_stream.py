"""The command stream: leases, frees, errors and where they point, moving between GPUs, and what a frame costs."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch

from dormouse.client_shim.stream.failures import ExecutorLost, LeaseLost
from dormouse.schemas import stream as wire

CUDA = "cuda"


def _frames(loopback: Any, gpu: int = 0) -> list[Any]:
    return [msgpack.unpackb(frame) for frame in loopback.node.executors[gpu].frames]


def test_loading_needs_no_lease(loopback: Any) -> None:
    layer = torch.nn.Linear(300, 200).to(CUDA)
    temporary = torch.ones(10).to(CUDA)
    del temporary
    assert loopback.end_lease() == 1
    assert loopback.node.acquired == 0
    assert sorted(map(len, loopback.node.store.values())) == [800, 240000]
    assert layer.weight.is_cuda


def test_what_load_computes_joins_the_model_and_what_it_drops_does_not(loopback: Any) -> None:
    weight = torch.ones(4).to(CUDA)
    doubled = weight * 2
    dropped = weight * 3
    del dropped
    assert loopback.node.acquired == 1
    version = loopback.end_lease()
    assert version == loopback.node.version
    assert len(loopback.node.store) == 2
    loopback.begin_lease(gpu=1)
    assert doubled.tolist() == [2.0] * 4
    assert loopback.end_lease() is None


def test_a_request_that_keeps_nothing_does_not_wait(loopback: Any) -> None:
    weight = torch.ones(4).to(CUDA)
    loopback.end_lease()
    loopback.begin_lease()
    answer = (weight + 1).tolist()
    trips = loopback.stream.answers.round_trips
    assert loopback.end_lease() is None
    assert loopback.stream.answers.round_trips == trips
    assert answer == [2.0] * 4


def test_a_write_to_the_model_is_seen_on_another_gpu(loopback: Any) -> None:
    counter = torch.zeros(3).to(CUDA)
    loopback.end_lease()
    for gpu in (0, 1, 0):
        loopback.begin_lease(gpu)
        counter[1:].add_(1)
        loopback.end_lease()
    loopback.begin_lease(1)
    assert counter.tolist() == [0.0, 3.0, 3.0]


def test_frees_travel_in_the_stream_and_cycles_are_collected_at_the_end(loopback: Any) -> None:
    weight = torch.ones(4).to(CUDA)
    loopback.end_lease()
    loopback.begin_lease()
    cycle: list[Any] = [weight + 1]
    cycle.append(cycle)
    weight.sum()
    (weight * 2).cpu()
    table = loopback.node.executors[0].interpreter.table.by_id
    del cycle
    gc.disable()
    try:
        loopback.end_lease()
    finally:
        gc.enable()
    loopback.begin_lease()
    assert loopback.node.reports[-1].created == []
    weight.sum().item()
    assert len(table) == 2


def test_dead_weights_leave_the_model(loopback: Any) -> None:
    kept, dead = torch.ones(4).to(CUDA), torch.ones(5).to(CUDA)
    loopback.end_lease()
    assert len(loopback.node.store) == 2
    del dead
    loopback.begin_lease()
    kept.add_(1)
    loopback.end_lease()
    assert [len(content) for content in loopback.node.store.values()] == [16]


def test_errors_name_the_operation_and_the_line(loopback: Any) -> None:
    table = torch.ones(4, 2).to(CUDA)
    ids = torch.tensor([1, 9]).to(CUDA)
    rows = torch.nn.functional.embedding(ids, table)  # the line that is to be blamed
    total = rows.sum() + 1
    with pytest.raises(IndexError, match="index out of range") as raised:
        total.item()
    text = str(raised.value)
    assert "aten::embedding" in text
    assert __file__ in text
    assert f"line {test_errors_name_the_operation_and_the_line.__code__.co_firstlineno + 3}," in text
    assert table.sum().item() == 8, "one error, told once"
    with pytest.raises(IndexError):
        total.cpu()


def test_a_line_in_code_that_has_no_hash(loopback: Any) -> None:
    """Such code is written by torch.compile: a dict is one of its constants."""

    def blamed(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, table)

    code = blamed.__code__
    blamed.__code__ = code.replace(co_consts=(*code.co_consts, {}))
    with pytest.raises(TypeError, match="unhashable"):
        hash(blamed.__code__)
    with pytest.raises(IndexError, match=rf"line {code.co_firstlineno + 1}, in blamed"):
        blamed(torch.ones(4, 2).to(CUDA), torch.tensor([9]).to(CUDA)).cpu()


def test_shape_errors_are_raised_where_they_happen(loopback: Any) -> None:
    x = torch.ones(2, 3).to(CUDA)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.mm(x, x)
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.sum(5)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        x.view(4)


def test_a_failed_write_poisons_its_target(loopback: Any) -> None:
    x, ids = torch.zeros(3).to(CUDA), torch.tensor([7]).to(CUDA)
    loopback.end_lease()
    loopback.begin_lease()
    x.index_fill_(0, ids, 1)
    with pytest.raises(IndexError):
        torch.cuda.synchronize()
    with pytest.raises(IndexError):
        x.cpu()
    loopback.end_lease()
    for gpu in (0, 1):
        loopback.begin_lease(gpu)
        with pytest.raises(IndexError, match="aten::index_fill_"):
            (x + 1).tolist()
        loopback.end_lease()


def test_a_model_moves_between_gpus(loopback: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    x = torch.randn(3, 8)
    expected = model(x)
    model.to(CUDA)
    loopback.end_lease()
    for gpu in (0, 1, 1, 0):
        loopback.begin_lease(gpu)
        torch.testing.assert_close(model(x.to(CUDA)).cpu(), expected)
        loopback.end_lease()


def test_a_steady_request_waits_only_for_its_downloads(loopback: Any) -> None:
    model = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval().to(CUDA)
    x = torch.randn(2, 5, 16)
    loopback.end_lease()
    stream, observed = loopback.stream, []
    for _ in range(3):
        loopback.begin_lease()
        trips, misses = stream.answers.round_trips, stream.shape_misses
        y = model(x.to(CUDA))
        y.cpu()
        y[0].sum().item()
        observed.append((stream.answers.round_trips - trips, stream.shape_misses - misses))
        del y
        loopback.end_lease()
    assert observed[1:] == [(2, 0), (2, 0)]


def test_definitions_are_sent_once_per_connection(loopback: Any) -> None:
    x = torch.ones(3).to(CUDA)
    loopback.end_lease()
    for gpu in (0, 1, 0, 1):
        loopback.node.executors[gpu].keep_frames = True
        loopback.begin_lease(gpu)
        (x + 1).cpu()
        loopback.end_lease()
    for gpu in (0, 1):
        keys = [key for frame in _frames(loopback, gpu) for key in frame[3][1][::2]]
        assert len(keys) == len(set(keys)) > 0


def test_definitions_are_forgotten_before_the_table_is_full(loopback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_DEFS", 12)
    x = torch.ones(40).to(CUDA)
    for length in range(1, 30):
        assert (x[:length] + 1).sum().item() == 2 * length


def test_frames_are_bounded_and_credit_is_kept(loopback: Any) -> None:
    x = torch.ones(3).to(CUDA)
    loopback.end_lease()
    executor = loopback.node.executors[0]
    executor.keep_frames = True
    loopback.begin_lease()
    for _ in range(2000):
        x = x + 1
    assert x[0].item() == 2001
    sizes = [frame[4].count(wire.FREE) for frame in _frames(loopback)]
    assert max(sizes) <= wire.FRAME_COMMANDS + 2


def test_an_idle_executor_is_sent_a_frame_that_is_worth_it_or_waited_for(loopback: Any) -> None:
    """Four commands, one with a result of 64 KiB, or what somebody waits for: fewer would only cost it a wake-up."""
    executor = loopback.node.executors[0]
    x, small, large = torch.ones(8).to(CUDA), torch.ones(16383).to(CUDA), torch.ones(16384).to(CUDA)
    loopback.end_lease()
    executor.keep_frames = True
    made: list[object] = []

    def sent(work: Callable[[], object]) -> list[int]:
        """Frames after each of four commands, or until there is one, in a lease of its own."""
        executor.frames.clear()
        loopback.begin_lease()
        counts: list[int] = []
        while len(counts) < 4 and not executor.frames:
            made.append(work())
            counts.append(len(executor.frames))
        loopback.end_lease()
        return counts

    assert sent(lambda: x + 1) == [0, 0, 0, 1]
    assert sent(lambda: small + 1) == [0, 0, 0, 1]
    assert sent(lambda: large + 1) == [1]
    assert sent(lambda: (x + 1).sum().item()) == [1]
    assert made[-1] == 16.0


def test_many_small_uploads_do_not_make_a_frame_too_large(loopback: Any) -> None:
    loopback.begin_lease()
    parts = [torch.full((1000,), float(k)).to(CUDA) for k in range(600)]
    assert [part[0].item() for part in parts[::100]] == [0.0, 100.0, 200.0, 300.0, 400.0, 500.0]


def test_threads_may_compute(loopback: Any) -> None:
    weight = torch.randn(8, 8)
    remote = weight.to(CUDA)
    loopback.end_lease()
    loopback.begin_lease()
    wrong = []

    def work(seed: int) -> None:
        x = torch.full((8, 8), float(seed))
        with torch.no_grad():
            for _ in range(20):
                if not torch.allclose((x.to(CUDA) @ remote).cpu(), x @ weight):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_lost_executor_is_an_error_not_a_hang(loopback: Any) -> None:
    x = torch.ones(3).to(CUDA)
    loopback.begin_lease()
    executor = loopback.node.executors[0]
    executor.failure = RuntimeError("killed")
    executor.send = lambda frame: None  # else it may have answered by the time that we look
    with pytest.raises(ExecutorLost):
        (x + 1).cpu()
    loopback.stream.lose_lease()


def test_a_stale_lease_is_refused(loopback: Any) -> None:
    x = torch.ones(3).to(CUDA)
    loopback.end_lease()
    loopback.begin_lease()
    loopback.node.executors[0].interpreter.abort()
    with pytest.raises(LeaseLost):
        (x + 1).cpu()
    assert not loopback.stream.leased
    loopback.begin_lease()
    assert (x + 1).tolist() == [2.0] * 3, "and definitions thrown away with the refused frame are told again"


def test_random_numbers(loopback: Any) -> None:
    torch.manual_seed(5)
    a = torch.rand(4, device=CUDA).tolist()
    b = torch.rand(4, device=CUDA).tolist()
    state = torch.cuda.get_rng_state()
    c = torch.rand(4, device=CUDA).tolist()
    torch.cuda.set_rng_state(state)
    assert torch.rand(4, device=CUDA).tolist() == c
    torch.cuda.manual_seed(5)
    assert torch.rand(4, device=CUDA).tolist() == a != b
    host = torch.default_generator.get_state()
    dropped = torch.nn.functional.dropout(torch.ones(100, device=CUDA))
    assert set(dropped.tolist()) == {0.0, 2.0}
    assert torch.equal(torch.default_generator.get_state(), host), "the CPU's generator is not touched"
    generator = torch.Generator(device=CUDA).manual_seed(1)
    first = torch.randn(3, generator=generator, device=CUDA).tolist()
    assert torch.randn(3, generator=generator, device=CUDA).tolist() != first
    generator.manual_seed(1)
    assert torch.randn(3, generator=generator, device=CUDA).tolist() == first
    assert isinstance(generator, torch.Generator)
    assert generator.device == torch.device("cuda", 0)


def test_a_setting_that_was_not_sent_before_its_lease_was_lost_is_sent_in_the_next(loopback: Any) -> None:
    """Else the executor would go on with another precision than the function asked for."""
    (torch.ones(2).to(CUDA) + 1).tolist()  # both ends know each other
    control = loopback.node.executors[0].interpreter._control
    before = dict(control.settings)  # what other tests of this process have set
    assert before.get("cudnn_benchmark", [False]) == [False]
    torch.backends.cudnn.benchmark = True
    try:
        loopback.stream.lose_lease()
        loopback.begin_lease()
        (torch.ones(2).to(CUDA) + 1).tolist()
        assert control.settings == before | {"cudnn_benchmark": [True]}
    finally:
        torch.backends.cudnn.benchmark = False
