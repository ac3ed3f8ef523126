"""Threads of a function: cuda:0 is the same in all of them, and they share one stream of commands."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = "cuda"
cuda: Any = torch.cuda

MAKERS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.tensor([1.0, 2.0], device=CUDA),
    "a number": lambda: torch.tensor(3, device=CUDA),
    "nested": lambda: torch.tensor([[1, 2], [3, 4]], dtype=torch.float16, device=CUDA),
    "complex": lambda: torch.tensor([1j], device=CUDA),
    "nothing": lambda: torch.tensor([], device=CUDA),
    "of tensors": lambda: torch.tensor([torch.ones((), device=CUDA), 2.0], device=CUDA),
    "as_tensor": lambda: torch.as_tensor([1, 2], device=CUDA),
    "of numpy": lambda: torch.as_tensor(np.arange(3), device=CUDA),
    "asarray": lambda: torch.asarray([1, 2], device=CUDA),
    "new_tensor": lambda: torch.ones(2, device=CUDA).new_tensor([1, 2]),
    "new": lambda: torch.ones(2, device=CUDA).new([1, 2]),
    "typed": lambda: cuda.FloatTensor([1, 2]),
    "a gradient's": lambda: torch.tensor([1.0], requires_grad=True, device=CUDA),
    "to": lambda: torch.ones(3).to(CUDA),
    "a list as index": lambda: torch.arange(6, device=CUDA)[[1, 2]],
    "a mask": lambda: torch.arange(6, device=CUDA)[torch.arange(6, device=CUDA) > 3],
    "factories": lambda: torch.full((2,), 3, device=CUDA) + torch.eye(2, device=CUDA) + torch.arange(2.0, device=CUDA),
}


def in_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(timeout=60)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MAKERS)
def test_n2_tensors_are_made_in_any_thread(
    name: str, mode: Callable[[], AbstractContextManager[None]], loopback: Any
) -> None:
    loopback.begin_lease()

    def make() -> Any:
        with mode():
            made = MAKERS[name]()
            return made.tolist(), made.dtype, made.device, made.is_inference(), made.requires_grad

    here = make()
    assert in_thread(make) == here
    assert here[2] == torch.device(CUDA, 0)
    assert here[3] == (mode is torch.inference_mode)


class Passing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of the function's own, as those that count operations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MAKERS)
def test_n2_tensors_are_made_under_a_mode(name: str, loopback: Any) -> None:
    loopback.begin_lease()
    expected = MAKERS[name]().tolist()
    with Passing():  # type: ignore[no-untyped-call]
        made = MAKERS[name]()
        assert (made.tolist(), made.device) == (expected, torch.device(CUDA, 0))


def test_n2_many_threads_compute_at_once(loopback: Any) -> None:
    """Each thread's answers are what the CPU gives, whatever the others do to the stream meanwhile."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(16, 16, generator=generator)
    wide = [torch.randn(2, generator=generator) for _ in range(500)]  # a command that needs a frame of its own

    def work(number: int, device: str) -> list[Any]:
        torch.set_grad_enabled(False)
        answers: list[Any] = []
        matrix, parts = weight.to(device), [part.to(device) for part in wide]
        for step in range(8):
            x = torch.tensor([[number, step]] * 8, dtype=torch.float32, device=device).reshape(1, 16) / 16
            y = torch.nn.functional.linear(x, matrix).softmax(-1) + torch.ones(16, device=device)
            y[0, step] = number
            answers += [y.cpu(), y[y > 1.05].cpu(), float(y.sum()), torch.cat(parts)[step::97].cpu(), (y * 2).tolist()]
        return answers

    loopback.begin_lease()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # else they would take turns of 5 ms, in which most commands are whole
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda number: work(number, CUDA), range(8), timeout=60))
    finally:
        sys.setswitchinterval(interval_s)
    for number, answers in enumerate(found):
        for actual, expected in zip(answers, work(number, "cpu"), strict=True):
            torch.testing.assert_close(actual, expected)
    assert loopback.end_lease() is None, "nothing is left behind"


def test_n2_a_thread_that_outlives_its_lease(loopback: Any) -> None:
    """What it asks for after the end of the lease is refused there and then, and the next lease serves it again."""
    ended, computed = threading.Event(), threading.Event()
    refused = RuntimeError("no lease here")

    def refuse() -> Any:
        raise refused

    loopback.node.acquire, acquire = refuse, loopback.node.acquire
    loopback.begin_lease()

    def work() -> list[Any]:
        x = torch.ones(3, device=CUDA)
        found: list[Any] = [x.sum().item()]
        computed.set()
        assert ended.wait(60)
        try:
            x.sum().item()
        except RuntimeError as error:
            found.append(error)
        return found

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        assert computed.wait(60)
        loopback.end_lease()
        ended.set()
        assert future.result(timeout=60) == [3.0, refused]
    loopback.node.acquire = acquire
    loopback.begin_lease()
    assert in_thread(lambda: torch.ones(3, device=CUDA).sum().item()) == 3.0


def test_n2_a_lease_that_a_thread_took_ends_with_the_load(loopback: Any) -> None:
    """A thread of load() may take a lease at any moment, also when load() has just returned."""
    in_thread(lambda: torch.ones(3, device=CUDA).sum().item())
    assert loopback.stream.leased
    loopback.stream.commit()
    assert not loopback.stream.leased
    loopback.begin_lease()


def test_n2_text_is_streamed_from_a_thread_that_generates(loopback: Any) -> None:
    """The recipe for `TextIteratorStreamer` in the documentation of transformers."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: make setup")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, eos_token_id=39)
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt = torch.tensor([[1, 2, 3]])

    class Letters:
        def decode(self, ids: Any, **options: Any) -> str:
            return "".join(f"{int(number)} " for number in ids)

    def stream(device: str) -> str:
        streamer = transformers.TextIteratorStreamer(Letters(), skip_prompt=True, timeout=60)
        inputs = {"input_ids": prompt.to(device), "attention_mask": torch.ones(1, 3, dtype=torch.long, device=device)}
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "streamer": streamer}
        thread = threading.Thread(target=model.to(device).generate, kwargs=inputs | options)
        thread.start()
        text = "".join(streamer)
        thread.join()
        return text

    expected = stream("cpu")
    loopback.begin_lease()
    assert len(expected.split()) >= 1
    assert stream(CUDA) == expected
