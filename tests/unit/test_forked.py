"""A process forked by user code: cuda refuses in PyTorch's words, all else works, and the parent notices nothing."""

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

cuda: Any = torch.cuda

WORDS = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn'"

USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "download": lambda x: x.cpu(),
    "item": lambda x: x.sum().item(),
    "print": lambda x: repr(x),
    "record": lambda x: x + 1,
    "upload": lambda x: torch.ones(3).cuda(),
    # Below the size at which PyTorch computes with several threads, which no forked process has.
    "large upload": lambda x: torch.ones(1 << 14).cuda(),
    "copy": lambda x: x.copy_(torch.zeros(8)),
    "factory": lambda x: torch.zeros(3, device="cuda"),
    "empty": lambda x: torch.empty(3, device="cuda").shape,
    "strided": lambda x: torch.empty_strided((2, 3), (1, 2), device="cuda").shape,
    "random": lambda x: torch.randn(3, device="cuda"),
    "synchronize": lambda x: cuda.synchronize(),
    "event": lambda x: cuda.Event().synchronize(),
    "memory": lambda x: cuda.memory_allocated(),
    "init": lambda x: cuda.init(),
    "rng state": lambda x: cuda.get_rng_state(),
}


def in_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a forked child. A child that hangs ends with the alarm, and the test fails."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        import signal

        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 200)  # the test itself has 300 s
        try:
            os.write(write, pickle.dumps(work()))
        except BaseException as error:
            os.write(write, pickle.dumps(repr(error)))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        data = answer.read()
    assert os.waitpid(pid, 0)[1] == 0, "the child hung or crashed"
    return pickle.loads(data)


def said(use: Callable[[torch.Tensor], Any], x: torch.Tensor) -> str:
    try:
        return repr(use(x))
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("leased", [True, False])
def test_any_use_of_cuda_is_refused(loopback: Any, leased: bool) -> None:
    x = torch.arange(8.0).cuda()
    assert (x + 1).sum().item() == 36.0
    if not leased:
        loopback.end_lease()
    frames = loopback.stream.connections.sent_nbytes
    arena = bytes(loopback.node.memory)
    answers = in_child(lambda: {name: said(use, x) for name, use in USES.items()})
    assert {name: answer for name, answer in answers.items() if not answer.startswith(WORDS)} == {}
    assert bytes(loopback.node.memory) == arena
    assert loopback.stream.connections.sent_nbytes == frames
    assert (x + 1).sum().item() == 36.0
    assert cuda.is_initialized()


def test_a_fork_while_another_thread_computes(loopback: Any) -> None:
    """The child inherits the stream's lock, held by a thread that it does not have."""
    x = torch.arange(8.0).cuda()
    locked, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with loopback.stream.lock:
            locked.set()
            forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait()
    try:
        answer = in_child(lambda: said(USES["item"], x))
    finally:
        forked.set()
        thread.join()
    assert answer.startswith(WORDS)


def test_what_is_not_cuda_works(loopback: Any) -> None:
    x = torch.arange(8.0).cuda()
    kept = (x + 1).sum()

    def work() -> Any:
        nonlocal x, kept
        del x, kept  # finalizers run here; the parent still has these
        torch.manual_seed(0)
        cuda.manual_seed(0)
        assert not cuda.is_initialized()
        assert cuda._is_in_bad_fork()
        return torch.ones(3).sum().item()

    assert in_child(work) == 3.0
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
    assert kept.item() == 36.0
    assert x.tolist() == list(range(8))


def test_a_process_without_a_stream_is_not_meant(loopback: Any) -> None:
    """The zygote's forks: they get a stream later."""
    from dormouse.client_shim.torch_face.remote_tensor import world

    stream, world.stream = world.stream, None
    try:
        assert in_child(lambda: cuda.is_initialized()) is True
    finally:
        world.stream = stream
