"""Composite operations that are not taken apart on the client.

The client cannot choose CUDA kernels: without this module, attention would arrive as sixteen operations of the slow
path, and an LSTM as hundreds. A kernel on the CUDA key keeps PyTorch from decomposing an operation above us, under
`no_grad` as well as in inference mode; it is never called, because the wrapper's Python key comes first.

Under autocast the casts happen inside: an operation that autocast does not list, but that turns into listed ones, has
to be taken apart while autocast is on. A kernel on the autocast key does that, and costs nothing while it is off.
"""

from functools import partial
from typing import Any, Final

import torch

from dormouse.client_shim import torch_dispatcher, torch_private
from dormouse.client_shim.patches import raising

UPSAMPLING: Final = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
"""The operations that `interpolate` calls."""

WHOLE: Final = frozenset([
    "linear", "bilinear", "matmul", "einsum", "tensordot", "chain_matmul", "linalg_multi_dot", "inner", "kron", "outer",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc",
    "scaled_dot_product_attention", "embedding_bag",
    "layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm", "local_response_norm",
    "softmax", "log_softmax", "softmin", "gelu", "silu", "mish", "selu", "relu6", "hardswish", "elu", "prelu", "celu",
    "rrelu", "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout",
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "max_pool1d_with_indices",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
    "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "cosine_similarity", "pairwise_distance", "pdist", "cdist",
    "cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd", "binary_cross_entropy_with_logits", "ctc_loss",
    *UPSAMPLING, "grid_sampler", "affine_grid_generator", "pixel_shuffle", "stft", "istft",
    "one_hot", "linalg_svdvals", "linalg_eigvalsh",
])  # fmt: skip
"""Names without overload. An operation here that PyTorch implements with a kernel of its own anyway is listed for the
reader's sake. The last three are not the same for a tensor subclass: `one_hot` does not check its classes, and values
come with vectors that nobody wants."""

LISTED_INSIDE: Final = frozenset(
    ["conv1d", "conv2d", "conv3d", "cross_entropy_loss", "inner", "nll_loss_nd", "pairwise_distance", *UPSAMPLING]
)
"""Of the above, those with an overload that autocast does not list and that turns into operations that it lists."""

RECURRENT: Final = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])
"""Kept whole under autocast too, on arguments cast as each of their steps would cast them."""

_NOT_OURS: Final = ("backward", "batch_dim", "fbgemm", "nested", "quant", "sparse", "_test_", "to_dense", "to_mkldnn")
"""Words in names of operations that are not run here at all, or that vmap is made of."""

_REFUSED: Final = {
    "QuantizedCUDA": ("quantized", "dequantize() them first"),
    "SparseCUDA": ("sparse", "call to_dense() first"),
    "SparseCsrCUDA": ("compressed sparse", "call to_dense() first"),
    "NestedTensorCUDA": ("nested", "pad them, and mask what was added"),
}
"""Kinds of tensors that cuda:0 does not have, and the alternatives, by the dispatch key that their operations would
have.
"""

_COMPRESSING: Final = tuple(f"sparse_{kind}_tensor" for kind in ("compressed", "csr", "csc", "bsr", "bsc"))

LOCAL: Final = frozenset(["reshape", "contiguous", "flatten", "reshape_as", "view_as"])
"""Composites that are nearly always a view: asked of a meta tensor as one step where inference mode delivers them
whole."""


_never = raising("a composite operation reached the CUDA key without a remote tensor among its arguments")


def install() -> None:
    whole: dict[str, Any] = {}
    cast: dict[str, Any] = {}
    schemas = torch_dispatcher.aten_schemas()
    for name, schema in schemas.items():
        full, base = f"aten::{name}", name.partition(".")[0]
        if not torch_dispatcher.has_kernel(full, "CompositeImplicitAutograd"):
            continue
        if base in WHOLE and not torch_dispatcher.has_kernel(full, "CUDA"):
            whole[name] = _never
        if not torch_dispatcher.has_kernel(full, "AutocastCUDA") and (kernel := _under_autocast(base, schema)):
            cast[name] = partial(kernel, name)
    torch_dispatcher.register_kernels(whole)
    torch_dispatcher.register_kernels(cast, "AutocastCUDA")
    for key, kind in _REFUSED.items():
        torch_dispatcher.register_fallback(partial(_refuse, *kind), key)
        # PyTorch's own kernels come before our fallback: those that make such a tensor, and all in a build for CUDA.
        own = [name for name in schemas if key == "SparseCsrCUDA" and name.startswith(_COMPRESSING)]
        if torch_private.BUILT_FOR_CUDA:
            own = [name for name in schemas if torch_dispatcher.has_kernel(f"aten::{name}", key)]
        refusals = {name: partial(_refuse, *kind, torch_dispatcher.operation(name)) for name in own}
        torch_dispatcher.register_kernels(refusals, key)


def _refuse(kind: str, way: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"{op._schema.name}: {kind} tensors are not supported on cuda:0 of a Dormouse function, only dense ones: {way}"
    )


def _under_autocast(base: str, schema: Any) -> Any:
    if base in RECURRENT:
        return _recur
    if any(word in base for word in _NOT_OURS):
        return None
    # Views and queries do not compute; a tensor written in place keeps its dtype.
    computes = any(str(result.type) in ("Tensor", "List[Tensor]") for result in schema.returns) and not any(
        value.alias_info is not None for value in (*schema.returns, *schema.arguments)
    )
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return _take_apart if computes and takes and (base in LISTED_INSIDE or base not in WHOLE) else None


def _take_apart(name: str, *args: Any, **kwargs: Any) -> Any:
    return torch_dispatcher.call_implicit(torch_dispatcher.operation(name), args, kwargs)


def _recur(name: str, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype("cuda")

    def cast(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [cast(item) for item in value]
        if isinstance(value, torch.Tensor) and value.is_cuda and value.is_floating_point():
            return value if value.dtype is torch.float64 else value.to(dtype)
        return value

    with torch_dispatcher.without_autocast():
        return torch_dispatcher.operation(name)(*cast(args), **{key: cast(value) for key, value in kwargs.items()})
