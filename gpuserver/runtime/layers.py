"""Puts the C++ kernels into a model's module tree, which stays that of ``transformers``.

A decoder layer of the gated families is one call. Elsewhere linear layers, gated MLPs and norms are (leaves.py).
Modules that do not fit stay as they are. Knows no weights before they are bound.
"""

import ctypes
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from dormouse.core.decisions.batches.batch import NO_ADAPTER
from dormouse.gpuserver.runtime import kernels, leaves, recognition
from dormouse.gpuserver.runtime.adapted import Places
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.backends.native import NativeBackend
from dormouse.gpuserver.runtime.backends.protocol import Rotates, Scores
from dormouse.gpuserver.runtime.groups import by_group, concerned

GATED: Final = ("llama", "qwen2", "qwen3", "mistral", "gemma2")


class FusedLayer:
    """``forward`` of a decoder layer, in one call."""

    def __init__(self, layer: nn.Module, family: str, attention: BlockAttention, backend: NativeBackend) -> None:
        self._layer, self._family, self._attention, self._backend = layer, family, attention, backend
        self._bf16 = attention.layout.dtype is torch.bfloat16
        self.places = Places(self._found)

    def _found(self) -> kernels.NativeLayer:
        layer: Any = self._layer
        attend = layer.self_attn
        gemma = self._family == "gemma2"
        owners = {
            "before_attention": layer.input_layernorm,
            "q_norm": getattr(attend, "q_norm", None),
            "k_norm": getattr(attend, "k_norm", None),
            "after_attention": layer.post_attention_layernorm if gemma else None,
            "before_mlp": layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm,
            "after_mlp": layer.post_feedforward_layernorm if gemma else None,
        }
        pointers = {name: None if owner is None else owner.weight.data_ptr() for name, owner in owners.items()}
        linears = {name: getattr(attend, f"{name}_proj") for name in "qkvo"}
        pointers |= leaves.pointers(linears)
        config, norm = attend.config, layer.input_layernorm
        window = config.sliding_window if self._family == "mistral" else getattr(attend, "sliding_window", None)
        cap = getattr(attend, "attn_logit_softcapping", None)
        heads = linears["q"].out_features // attend.head_dim
        scores = Scores(float(attend.scaling), window or 0, cap or 0.0)
        return kernels.NativeLayer(
            **pointers,
            mlp=leaves.gated(layer.mlp, kernels.ACTIVATIONS[activation(config)]),
            shape=self._backend.shape(int(attend.layer_idx), heads, scores),
            epsilon=norm.eps if gemma else norm.variance_epsilon,
            one=1.0 if gemma else 0.0,
        )

    def __call__(
        self, hidden_states: torch.Tensor, *_: Any, position_embeddings: tuple[torch.Tensor, torch.Tensor], **__: Any
    ) -> torch.Tensor:
        if not (own := concerned(self._attention, self.places.own)):
            return self._computed(NO_ADAPTER, hidden_states, *position_embeddings)
        given = hidden_states, *position_embeddings
        return by_group(self._attention, own, False, 1, lambda number, rows: self._computed(number, *map(rows, given)))

    def _computed(self, number: int, given: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        assert self._attention.step is not None, "a step is under way"
        given = given.contiguous()
        out = torch.empty_like(given)
        self._backend.library.dormouse_layer(
            self._bf16, ctypes.addressof(self.places.of(number)), self._backend.tables(self._attention.step),
            given.data_ptr(), out.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        )  # fmt: skip
        return out


WHOLE: Final = (FusedLayer, leaves.NativeMlp)
"""These compute with the weights of the modules inside, which are not called."""


def activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))


def install(model: Any, attention: BlockAttention, fused: bool = True) -> None:
    """Once, when it is built. ``fused``: whole layers too."""
    backend, config = attention.backend, model.config
    if attention.memory.device.type == "cuda":
        install_on_gpu(model, backend.rotate if isinstance(backend, Rotates) else None)
    if not isinstance(backend, NativeBackend):
        return
    inside: set[nn.Module] = set()
    if fused and config.model_type in GATED and activation(config) in kernels.ACTIVATIONS:
        for layer in model.model.layers:
            layer.forward = FusedLayer(layer, config.model_type, attention, backend)
            inside.update(layer.modules())
    head = model.get_output_embeddings()
    for module in model.modules():
        if module in inside:
            continue
        if (leaf := leaves.native(module, backend.library, module is head, attention)) is not None:
            module.forward = leaf
            inside.update(module.modules())
        elif (forward := leaves.rotating(module, partial(leaves.NativeRotary, backend.library))) is not None:
            module.forward = forward


def install_on_gpu(model: nn.Module, rotate: recognition.Rotary | None = None) -> None:
    """Where each operation costs the time to issue it. ``rotate``: in one of them."""
    for module in model.modules():
        if (found := recognition.norm(module)) is not None:
            module.forward = leaves.TorchNorm(module, *found)
        elif rotate is not None:
            rotated = partial(leaves.OwnRotary, rotate)
            if (forward := leaves.rotating(module, rotated)) is not None:
                module.forward = forward


def bound(model: nn.Module) -> None:
    """Whenever its parameters have got their places."""
    for module in model.modules():
        if isinstance(module.forward, WHOLE):
            module.forward.places.bind()


def waiting(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Modules that are called as one, and the parameters that must be there by then."""
    for module in model.modules():
        yield module, list(module.parameters(recurse=isinstance(module.forward, WHOLE)))
