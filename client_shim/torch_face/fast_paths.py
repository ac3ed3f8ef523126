"""Replaces fast paths of PyTorch and of libraries that cannot work here: the ordinary path is taken, with the same
values; or it is refused by name, with an alternative.
"""

import threading
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from dormouse.client_shim.commands.handles import storage_of
from dormouse.client_shim.commands.operations import Operation, handler, refuse
from dormouse.client_shim.patches import patch
from dormouse.client_shim.torch_face.import_hooks import when_imported
from dormouse.client_shim.torch_face.remote_tensor import is_remote

NESTED: Final = "nested tensors are not supported"
FUSED: Final = ("_fused_adam", "_fused_sgd", "_fused_adagrad")


class _Encoding(threading.local):
    left_aligned = False
    """Whether the padding of the encoder that runs is at the end of each row, as far as it has asked."""


_encoding = _Encoding()


def install() -> None:
    refuse("nested", "jagged", text=NESTED, way="pad them, and mask what was added")
    refuse("_nested_tensor_from_mask", text=NESTED, way="pass enable_nested_tensor=False to TransformerEncoder")
    refuse(*FUSED, text="fused optimizers are not supported", way="leave out fused=True")
    patch(nn.TransformerEncoder, "forward", _padded(nn.TransformerEncoder.forward))
    patch(torch.cuda, "make_graphed_callables", lambda callables, *args, **kwargs: callables)
    for name in ("preferred_linalg_library", "preferred_blas_library"):
        patch(torch.backends.cuda, name, _preferring(getattr(torch.backends.cuda, name)))
    when_imported("transformers.modeling_utils", _without_warmup)


@handler("_nested_tensor_from_mask_left_aligned")
def _left_aligned(operation: Operation, args: Any, kwargs: dict[str, Any]) -> bool:
    """Always no, so that the encoder goes the ordinary way."""
    kept = args[1]
    _encoding.left_aligned = bool((kept[:, 1:] <= kept[:, :-1]).all().item())
    return False


def _padded(real: Callable[..., Any]) -> Callable[..., Any]:
    """Padding of a nested tensor is 0 when the encoder has made it a dense one."""

    def forward(
        self: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None
    ) -> Any:
        _encoding.left_aligned = False
        output = real(self, src, mask, src_key_padding_mask, is_causal)
        if not _encoding.left_aligned or mask is not None or torch.is_autocast_enabled():
            return output
        if torch.is_grad_enabled() and any(each.requires_grad for each in (src, *self.layers[0].parameters())):
            return output
        nothing = torch.zeros_like(output)
        padding = src_key_padding_mask if src_key_padding_mask.dtype is torch.bool else src_key_padding_mask != 0
        return torch.where(padding.unsqueeze(-1), nothing if self.norm is None else self.norm(nothing), output)

    return forward


@handler("_has_same_storage_numel")
def _has_same_storage_numel(operation: Operation, args: Any, kwargs: dict[str, Any]) -> bool:
    one, other = (
        storage_of(each).nbytes // each.dtype.itemsize if is_remote(each) else each.untyped_storage().nbytes()
        for each in args
    )
    return bool(one == other)


def _preferring(real: Callable[..., Any]) -> Callable[..., Any]:
    """A library that this process was built without is the executor's to have."""

    def prefer(*args: Any) -> Any:
        try:
            return real(*args)
        except RuntimeError as error:
            if "has not been compiled with" not in str(error):
                raise
            return real()

    return prefer


def _without_warmup(module: Any) -> None:
    """Memory that is allocated and given back before a model is loaded: here that costs and gives nothing, and of a
    small GPU it takes a negative size.
    """
    if hasattr(module, "caching_allocator_warmup"):
        patch(module, "caching_allocator_warmup", lambda *args, **kwargs: None)
