"""Packed sequences and recurrent layers over them, against the CPU: batch sizes stay on the CPU, as CUDA has it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

pytestmark = pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")

CUDA = "cuda"
MODES: list[Any] = [torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("features", [(), (5,), (2, 3)])
def test_packing_and_padding(loopback: Any, mode: Any, batch_first: bool, features: tuple[int, ...]) -> None:
    x = torch.randn(*((4, 6) if batch_first else (6, 4)), *features)
    lengths = torch.tensor([6, 4, 4, 1])
    with mode():
        host = pack_padded_sequence(x, lengths, batch_first=batch_first)
        remote = pack_padded_sequence(x.to(CUDA), lengths, batch_first=batch_first)
        assert remote.data.is_cuda
        assert remote.is_cuda
        assert not remote.batch_sizes.is_cuda
        assert torch.equal(remote.batch_sizes, host.batch_sizes)
        assert torch.equal(remote.data.cpu(), host.data)
        padded, counts = pad_packed_sequence(remote, batch_first, padding_value=-1.0, total_length=8)
        expected, _ = pad_packed_sequence(host, batch_first, padding_value=-1.0, total_length=8)
        assert torch.equal(padded.cpu(), expected)
        assert torch.equal(counts, lengths)


def test_a_view_is_packed_without_the_rest(loopback: Any) -> None:
    x = torch.randn(3, 8, 4)
    for batch_first in (True, False):
        host, remote = (
            pack_padded_sequence(y.transpose(0, 1)[1:, :2], [3, 2], batch_first=batch_first, enforce_sorted=False)
            if not batch_first
            else pack_padded_sequence(y[1:, ::2], [4, 2], batch_first=batch_first)
            for y in (x, x.to(CUDA))
        )
        assert torch.equal(remote.data.cpu(), host.data)


def test_lists_of_sequences(loopback: Any) -> None:
    sequences = [torch.randn(length, 3) for length in (2, 5, 3)]
    host = pack_sequence(sequences, enforce_sorted=False)
    remote = pack_sequence([sequence.to(CUDA) for sequence in sequences], enforce_sorted=False)
    assert torch.equal(remote.data.cpu(), host.data)
    assert remote.unsorted_indices is not None
    assert remote.unsorted_indices.is_cuda
    padded, lengths = pad_packed_sequence(remote)
    assert torch.equal(padded.cpu(), pad_packed_sequence(host)[0])
    assert lengths.tolist() == [2, 5, 3]


@pytest.mark.parametrize("lengths", [[2, 3], [3, 0], [3], []])
def test_bad_lengths_are_refused_as_on_the_cpu(loopback: Any, lengths: list[int]) -> None:
    x = torch.randn(2, 3, 1)
    messages = []
    for y in (x, x.to(CUDA)):
        with pytest.raises(RuntimeError) as info:
            pack_padded_sequence(y, torch.tensor(lengths, dtype=torch.int64), batch_first=True)
        messages.append(str(info.value))
    assert messages[0] == messages[1]
    with pytest.raises(RuntimeError, match="empty"):
        pack_padded_sequence(torch.empty(2, 3, 0, device=CUDA), [3, 2], batch_first=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(("layers", "both_ways", "is_sorted"), [(1, False, True), (2, True, False), (3, True, True)])
def test_recurrent_layers(loopback: Any, mode: Any, kind: Any, layers: int, both_ways: bool, is_sorted: bool) -> None:
    host = kind(5, 7, layers, bidirectional=both_ways, batch_first=True).eval()
    remote = copy.deepcopy(host).to(CUDA)
    x = torch.randn(4, 6, 5)
    lengths = torch.tensor([6, 4, 4, 1] if is_sorted else [2, 6, 1, 4])
    with mode():
        packed = pack_padded_sequence(x.to(CUDA), lengths, batch_first=True, enforce_sorted=is_sorted)
        before = loopback.stream.commands_recorded
        output, state = remote(packed)
        assert loopback.stream.commands_recorded < before + 10, "the layer is kept whole"
        expected, wanted = host(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=is_sorted))
        torch.testing.assert_close(output.data.cpu(), expected.data)
        torch.testing.assert_close(pad_packed_sequence(output)[0].cpu(), pad_packed_sequence(expected)[0])
        for one, other in zip(_states(state), _states(wanted), strict=True):
            torch.testing.assert_close(one.cpu(), other)


def _states(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def test_a_sequence_of_a_thousand_steps(loopback: Any) -> None:
    host = nn.GRU(1, 2).eval()
    remote = copy.deepcopy(host).to(CUDA)
    x = torch.randn(1100, 2, 1)
    output, _ = remote(pack_padded_sequence(x.to(CUDA), [1100, 1]))
    expected, _ = host(pack_padded_sequence(x, [1100, 1]))
    torch.testing.assert_close(output.data.cpu(), expected.data, rtol=1e-4, atol=1e-5)
