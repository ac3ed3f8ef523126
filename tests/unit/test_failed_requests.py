"""What a failed request leaves is what native PyTorch leaves; and what it cannot leave is said by name.

Each sequence of requests runs twice, on the CPU and through the shim on two emulated GPUs in turn: equal outcomes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loopback import LoopbackWorld

CUDA = "cuda"
Step = Callable[[dict[str, Any], str], Any]


@pytest.fixture
def loopback() -> Iterator[LoopbackWorld]:
    world = LoopbackWorld(gpus=2)
    yield world
    world.close()


class Bad(Exception):
    """Raised by user code when all commands were good."""


def make_cache(state: dict[str, Any], device: str) -> Any:
    if "cache" not in state:
        state["cache"] = torch.arange(6, dtype=torch.float32).to(device) * 2
    return state["cache"].sum().item()


def make_cache_and_raise(state: dict[str, Any], device: str) -> Any:
    make_cache(state, device)
    raise Bad


def make_cache_unread_and_raise(state: dict[str, Any], device: str) -> Any:
    state["mask"] = torch.ones(3, 3).to(device).tril()
    raise Bad


def write_and_raise(state: dict[str, Any], device: str) -> Any:
    state["weight"][0] = 7
    state["weight"].mul_(2)
    raise Bad


def bad_index(state: dict[str, Any], device: str) -> Any:
    state["before"] = state["weight"] + 1
    picked = state["weight"][torch.tensor([99]).to(device)]
    return picked.tolist()


def bad_index_caught(state: dict[str, Any], device: str) -> Any:
    try:
        return bad_index(state, device)
    except IndexError:
        return (state["weight"] * 3).tolist()


def keeps_the_exception(state: dict[str, Any], device: str) -> Any:
    try:
        return bad_index(state, device)
    except IndexError as error:
        state["error"] = str(error).splitlines()[0]
        raise Bad from None


def read(state: dict[str, Any], device: str) -> Any:
    names = ("weight", "cache", "mask", "before")
    return {name: state[name].tolist() for name in names if name in state}


def drop(state: dict[str, Any], device: str) -> Any:
    state.pop("cache", None)
    return sorted(state)


SEQUENCES: dict[str, list[Step]] = {
    "a cache made by a request that raises": [make_cache_and_raise, make_cache, read, make_cache_and_raise, read],
    "never read before it raises": [make_cache_unread_and_raise, read, read],
    "a write": [write_and_raise, read, write_and_raise, make_cache, read],
    "a bad index": [bad_index, read, bad_index, make_cache_and_raise, read],
    "a bad index, caught": [bad_index_caught, read, bad_index_caught, read],
    "a bad index, kept as text": [keeps_the_exception, read],
    "made, dropped, made again": [make_cache_and_raise, drop, read, make_cache_and_raise, make_cache, read],
}


def outcome(step: Step, state: dict[str, Any], device: str) -> Any:
    try:
        return step(state, device)
    except (Bad, IndexError) as error:
        return type(error).__name__


@pytest.mark.parametrize("name", SEQUENCES)
def test_n1_a_sequence_of_requests_has_the_same_outcomes_as_natively(loopback: LoopbackWorld, name: str) -> None:
    native: dict[str, Any] = {"weight": torch.ones(4)}
    ours: dict[str, Any] = {"weight": torch.ones(4).to(CUDA)}
    loopback.end_lease()
    for turn, step in enumerate(SEQUENCES[name]):
        expected = outcome(step, native, "cpu")
        loopback.begin_lease(turn % 2)
        assert outcome(step, ours, CUDA) == expected, (turn, step.__name__)
        loopback.end_lease()
        assert loopback.stream.remains() == ""


def test_n1_a_kept_result_of_a_failed_command_raises_that_error_on_every_gpu(loopback: LoopbackWorld) -> None:
    weight = torch.ones(4).to(CUDA)
    loopback.end_lease()
    loopback.begin_lease()
    kept = weight[torch.tensor([99]).to(CUDA)]
    good = weight * 2
    with pytest.raises(IndexError):
        kept.tolist()
    assert loopback.end_lease() is not None, "what else it made has joined the model"
    for gpu in (1, 0):
        loopback.begin_lease(gpu)
        assert good.tolist() == [2.0] * 4
        with pytest.raises(IndexError, match=r"(?s)index 99 .*aten::index.Tensor.*_on_every_gpu$"):
            (kept + 1).tolist()
        loopback.end_lease()
    remains = loopback.stream.remains()
    assert remains.startswith("it keeps a tensor that can never be used, the command that made or wrote it failed: ind")
    assert "aten::index.Tensor" in remains
    assert "test_failed_requests.py" in remains
    del kept
    assert loopback.stream.remains() == ""


def test_n1_a_failed_write_of_a_kept_tensor_is_not_undone_in_silence(loopback: LoopbackWorld) -> None:
    weight, other = torch.ones(4).to(CUDA), torch.ones(4).to(CUDA)
    loopback.end_lease()
    loopback.begin_lease()
    other.add_(1)
    weight.index_fill_(0, torch.tensor([7]).to(CUDA), 1)
    with pytest.raises(IndexError, match="aten::index_fill_"):
        loopback.end_lease()
    assert "aten::index_fill_" in loopback.stream.remains()
    loopback.begin_lease(1)
    assert other.tolist() == [2.0] * 4
    with pytest.raises(IndexError, match="aten::index_fill_"):
        weight.tolist()
    weight.copy_(torch.full((4,), 5.0))  # all of it is made anew
    assert weight.tolist() == [5.0] * 4
    loopback.end_lease()
    assert loopback.stream.remains() == ""
    loopback.begin_lease(0)
    assert weight.tolist() == [5.0] * 4


def test_n5_a_request_that_reads_nothing_fails_when_a_command_did(loopback: LoopbackWorld) -> None:
    weight = torch.ones(4).to(CUDA)
    loopback.end_lease()
    loopback.begin_lease()
    weight[torch.tensor([99]).to(CUDA)]  # dropped at once
    with pytest.raises(IndexError, match=r"(?s)aten::index.*when_a_command_did$"):
        loopback.end_lease()
    assert not loopback.stream.leased
    assert loopback.stream.remains() == ""
    loopback.begin_lease()
    loopback.end_lease()


def test_a_good_request_waits_for_its_downloads_only(loopback: LoopbackWorld) -> None:
    """Its END costs no round trip, unless nothing was read after the last command."""
    weight = torch.ones(4).to(CUDA)
    loopback.end_lease()
    for read_last, trips in ((True, 1), (False, 2)):
        loopback.begin_lease()
        before = loopback.stream.answers.round_trips
        (weight.to(CUDA) * torch.ones(4).to(CUDA)).tolist()
        if not read_last:
            weight * 2
        loopback.end_lease()
        assert loopback.stream.answers.round_trips - before == trips


def test_n1_what_is_lost_with_a_lease_says_so(loopback: LoopbackWorld) -> None:
    weight = torch.ones(4).to(CUDA)
    loopback.end_lease()
    loopback.begin_lease()
    made, dropped = weight + 1, weight + 2
    (made * dropped).tolist()
    loopback.stream.lose_lease("was cancelled")
    del dropped
    assert loopback.stream.remains() == (
        "it keeps a tensor that can never be used, made by a request that was cancelled: what it had made on the GPU "
        "is gone"
    )
    loopback.begin_lease(1)
    assert weight.tolist() == [1.0] * 4
    with pytest.raises(RuntimeError, match="made by a request that was cancelled"):
        made.tolist()
    loopback.end_lease()
    del made
    assert loopback.stream.remains() == ""
