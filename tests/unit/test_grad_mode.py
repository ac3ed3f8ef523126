"""With gradients enabled, as in a plain program and in a function's own threads: inference works, backward says no."""

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

from dormouse.schemas import stream as wire


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


@pytest.fixture
def grad(loopback: Any) -> Any:
    with torch.enable_grad():
        yield loopback


def test_a_forward_pass_records_a_graph_and_is_right(grad: Any) -> None:
    plain, x = model(), torch.randn(3, 16)
    remote = model().cuda()
    got = remote(x.cuda())
    assert got.requires_grad
    assert got.grad_fn is not None
    assert torch.allclose(got.detach().cpu(), plain(x).detach(), atol=1e-5)
    assert not torch.no_grad()(remote)(x.cuda()).requires_grad


def test_the_graph_lives_as_long_as_its_result(grad: Any) -> None:
    remote, x = model().cuda(), torch.randn(3, 16).cuda()

    def storages() -> int:
        grad.stream.wait(wire.SYNC)
        return len(grad.node.executors[0].interpreter.table.by_id)

    remote(x)
    gc.collect()
    before = storages()
    for _ in range(20):
        result = remote(x)
    with_graph = storages()
    del result
    assert storages() <= before < with_graph < before + 20


def test_backward_is_refused_wherever_it_begins(grad: Any) -> None:
    remote, x = model().cuda(), torch.randn(3, 16)
    weight = next(remote.parameters())
    loss = remote(x.cuda()).sum()
    attempts = (
        loss.backward,
        lambda: torch.autograd.grad(loss, weight),
        loss.cpu().backward,
        lambda: torch.autograd.backward([torch.ones((), requires_grad=True) * 2, loss.cpu()]),
        lambda: torch.autograd.grad(loss.cpu(), weight),
    )
    for attempt in attempts:
        with pytest.raises(RuntimeError, match=r"backward.. is not available on Dormouse"):
            attempt()
    assert weight.grad is None


def test_backward_on_the_cpu_works(grad: Any) -> None:
    plain = model()
    loss: Any = plain(torch.randn(3, 16)).sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in plain.parameters())
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.backward(torch.ones(2).sum())


def test_a_thread_has_gradients_and_computes_the_same(loopback: Any) -> None:
    """Grad mode belongs to a thread: a function's main thread has it off, its own threads have it on."""
    remote, x = model().cuda(), torch.randn(3, 16).cuda()
    results = [remote(x)]
    thread = threading.Thread(target=lambda: results.append(remote(x)))
    thread.start()
    thread.join()
    main, other = results
    assert (main.requires_grad, other.requires_grad) == (False, True)
    assert main.tolist() == other.tolist()
