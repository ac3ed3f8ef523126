"""Programs on `cuda:0` that are run more than once, so that what they record was seen before."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CUDA = torch.device("cuda", 0)


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


def _from_nothing(x: torch.Tensor) -> torch.Tensor:
    there: dict[str, Any] = {"device": CUDA}
    made = [torch.zeros(3, **there), torch.ones(2, 2, dtype=torch.int64, **there), torch.full((3,), 2.5, **there)]
    made += [torch.arange(5, **there), torch.arange(2, 9, 3, **there), torch.arange(0, 1, 0.25, **there)]
    made += [torch.arange(3, -2, -1.5, **there), torch.linspace(0, 1, 4, **there), torch.eye(3, **there)]
    made += [torch.scalar_tensor(-7, **there), torch.tensor([1, 2], **there), torch.tril_indices(3, 3, **there)]
    made += [torch.cat([torch.tensor([], **there), x.flatten()]), torch.empty(0, 3, **there) @ x[:3]]
    made += [torch.empty(4, **there).copy_(x[0, :4]), torch.empty_strided((2, 3), (1, 2), **there).fill_(2)]
    made += [torch.add(x, 1, out=torch.empty(6, 5, **there)), torch.empty(3, dtype=torch.int32, **there).add_(1)]
    made += [torch.empty(2, 3, 4, 5, memory_format=torch.channels_last, **there).zero_(), torch.empty_like(x) * 0]
    return _sums(made)


X = torch.linspace(-2, 2, 30).reshape(6, 5)
PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[..., Any], torch.Tensor]] = {
    "bert": (_bert, lambda model, ids: model(ids)[0], torch.arange(8).reshape(1, 8)),
    "gpt2": (_gpt2, _generated, torch.arange(5).reshape(1, 5)),
    "convolutions": (_convolutions, lambda model, image: model(image), torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)),
    "lstm": (lambda: nn.LSTM(5, 7, 2).eval(), lambda model, x: model(x)[0], X),
    "arithmetic": (lambda: None, lambda _, x: _arithmetic(x), X),
    "in place": (lambda: None, lambda _, x: _in_place(x), X),
    "shapes": (lambda: None, lambda _, x: _shapes(x), X),
    "from nothing": (lambda: None, lambda _, x: _from_nothing(x), X),
    "conversions": (lambda: None, lambda _, x: _conversions(x), X),
}
