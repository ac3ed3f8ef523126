"""C++ and Python record the same commands, with the same operands, and free the same storages: each program runs in two
worlds, more than once, so that what is recorded was seen before.
"""

import copy
import gc
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dormouse.schemas import stream as wire

CUDA = torch.device("cuda", 0)


class _Log:
    """What an executor was told, with storages by the order of their first mention."""

    def __init__(self, interpreter: Any) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self._names: dict[int, int] = {}
        operation, freed = interpreter._operation, interpreter._handlers[wire.FREE]

        def told(kernel: Any, commands: list[Any], position: int) -> int:
            middle = position + kernel.n_operands
            operands = commands[position:middle]
            storages = [self._name(operands[place]) for place in kernel.tensors]
            numbers = [value for place, value in enumerate(operands) if place not in kernel.tensors]
            fresh = [self._name(number) for number in commands[middle : middle + kernel.n_fresh]]
            shapes = [(meta.dtype, meta.size, meta.stride, meta.offset) for meta in kernel.metas]
            self.lines.append((kernel.name, shapes, storages, [(type(n), n) for n in numbers], fresh))
            return int(operation(kernel, commands, position))

        def free(commands: list[Any], position: int) -> int:
            count = commands[position]
            dead = sorted(self._name(number) for number in commands[position + 1 : position + 1 + count])
            self.lines.append(("free", dead))
            return int(freed(commands, position))

        interpreter._operation, interpreter._handlers[wire.FREE] = told, free

    def _name(self, storage: int) -> int:
        return self._names.setdefault(storage, len(self._names))


def _bert() -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model: nn.Module = transformers.BertModel(config).eval()
    return model


def _gpt2() -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    model: nn.Module = transformers.GPT2LMHeadModel(config).eval()
    return model


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.5),
        nn.Conv2d(8, 4, 1, bias=False), nn.GroupNorm(2, 4), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    ).eval()  # fmt: skip


def _sums(values: Any) -> torch.Tensor:
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    return torch.stack([each.double().sum() for each in tensors])


def _generated(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return found


def _arithmetic(x: torch.Tensor) -> torch.Tensor:
    results = [x + 1, x + 1.5, x * 200, x * -3, x * True, 2 - x, x / 3, x // 0.7, x**2, x**-1.0, 1 / (x + 9)]
    results += [torch.add(x, x, alpha=a) for a in (1, 2, 0.5, 300)]
    results += [x.clamp(-1, 1), x.clamp(min=0), x.clamp(max=0.25), torch.where(x > 0, x, -x), x.eq(0), x != x]
    results += [torch.full_like(x, 7), torch.zeros_like(x), x.new_ones(3), torch.arange(4, device=CUDA) * 1.0]
    return _sums(results)


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.add_(1).mul_(0.5).relu_()
    y[1:].zero_()
    y[:, 0] = 3
    y.t()[1].copy_(x[:, 0])
    torch.mul(x, 2, out=y)
    cache = torch.zeros(2, 6, 4, device=x.device)
    for step in range(3):
        cache[:, step] += y[step, :4]
        cache.index_copy_(1, torch.tensor([step], device=x.device), cache[:, step : step + 1] * 2)
    return _sums([y, cache, y.half(), y.to(torch.int32), y.bool()])


def _shapes(x: Any) -> torch.Tensor:
    several = [*x.split(2), *x.chunk(3, 1), *x.unbind(0), *torch.topk(x, 2), *x.max(1), *torch.sort(x, 0)]
    several += [torch.cat([x, x.t()[:6, :6].reshape(6, -1)[:, :5]]), torch.stack([x[0], x[1]]), x[None, ..., None]]
    several += [x[x.argmax(0)], x.index_select(0, torch.tensor([2, 0], device=x.device)), x.expand(2, -1, -1)]
    several += [x.view(-1)[3:9:2], x.permute(1, 0).contiguous(), x.flatten(), x.unfold(0, 2, 1), x.diagonal()]
    several += [torch.einsum("ij,kj->ik", x, x), x @ x.t(), torch.nn.functional.pad(x, (1, 2)), x.roll(1, 0)]
    return _sums(several)


def _conversions(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        mixed = x @ x.t()
    rotated = torch.view_as_complex(x[:, :4].reshape(-1, 2).contiguous())
    return _sums([mixed.float(), (rotated * rotated.conj()).real, x.to(torch.float64), x.type_as(mixed).float()])


X = torch.linspace(-2, 2, 30).reshape(6, 5)
PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[..., Any], torch.Tensor]] = {
    "bert": (_bert, lambda model, ids: model(ids)[0], torch.arange(8).reshape(1, 8)),
    "gpt2": (_gpt2, _generated, torch.arange(5).reshape(1, 5)),
    "convolutions": (_convolutions, lambda model, image: model(image), torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)),
    "lstm": (lambda: nn.LSTM(5, 7, 2).eval(), lambda model, x: model(x)[0], X),
    "arithmetic": (lambda: None, lambda _, x: _arithmetic(x), X),
    "in place": (lambda: None, lambda _, x: _in_place(x), X),
    "shapes": (lambda: None, lambda _, x: _shapes(x), X),
    "conversions": (lambda: None, lambda _, x: _conversions(x), X),
}


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize("loopback", ["cpp"], indirect=True)
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_record_the_same(loopback: Any, name: str) -> None:
    make, run, given = PROGRAMS[name]
    torch.manual_seed(0)
    model = make()
    kind = type(loopback)
    found, answers, followed = [], [], []
    loopback.close()
    for by_cpp in (True, False):
        world = kind(by_cpp=by_cpp)
        try:
            there = copy.deepcopy(model).to(CUDA) if model is not None else None
            world.end_lease()
            world.begin_lease()
            executor = world.node.executors[0]
            executor.interpreter._plans.clear()  # all is run by Python, which tells us
            executor.interpreter._plan = lambda *_: None
            gc.collect()
            x = given.to(CUDA)
            torch.cuda.synchronize()  # what earlier worlds have left is told of
            log = _Log(executor.interpreter)
            for _ in range(3):
                answer = run(there, x).cpu()
            world.end_lease()
            found.append(log.lines)
            answers.append(answer)
            followed.append(world.by_cpp and world.hits())
        finally:
            world.close()
    cpp, python = found
    assert len(cpp) > 3
    for place, (one, other) in enumerate(zip(cpp, python, strict=False)):
        assert one == other, (cpp[max(0, place - 3) : place + 4], python[max(0, place - 3) : place + 4])
    assert len(cpp) == len(python), (cpp[-3:], python[-3:])
    assert followed[0] > len(cpp) // 3, "most of it was recorded by C++"
    assert torch.equal(*answers)
