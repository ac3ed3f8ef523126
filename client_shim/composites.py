"""Composite operations that are not taken apart on the client.

The client has no chooser of CUDA kernels: left alone, attention would arrive as sixteen operations of the slow path,
and an LSTM as hundreds. A kernel on the CUDA key keeps PyTorch from decomposing an operation above us, under
`no_grad` as well as in inference mode; it is never called, because the wrapper's Python key comes first.
"""

from typing import Any, Final

from dormouse.client_shim import torch_private

WHOLE: Final = frozenset(
    [
        "linear",
        "bilinear",
        "matmul",
        "einsum",
        "tensordot",
        "chain_matmul",
        "linalg_multi_dot",
        "inner",
        "kron",
        "outer",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "conv_tbc",
        "scaled_dot_product_attention",
        "layer_norm",
        "group_norm",
        "batch_norm",
        "instance_norm",
        "rms_norm",
        "local_response_norm",
        "embedding_bag",
        "softmax",
        "log_softmax",
        "softmin",
        "gelu",
        "silu",
        "mish",
        "selu",
        "relu6",
        "hardswish",
        "elu",
        "prelu",
        "celu",
        "rrelu",
        "dropout",
        "feature_dropout",
        "alpha_dropout",
        "feature_alpha_dropout",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "avg_pool1d",
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "adaptive_max_pool1d",
        "max_pool1d_with_indices",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
        "cosine_similarity",
        "pairwise_distance",
        "pdist",
        "cdist",
        "cross_entropy_loss",
        "nll_loss",
        "nll_loss2d",
        "nll_loss_nd",
        "binary_cross_entropy_with_logits",
        "ctc_loss",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "upsample_linear1d",
        "upsample_trilinear3d",
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
        "stft",
        "istft",
        "grid_sampler",
        "affine_grid_generator",
        "pixel_shuffle",
    ]
)
"""Names without overload. An operation here that PyTorch implements with a kernel of its own anyway is listed for the
reader's sake."""

LOCAL: Final = frozenset(["reshape", "contiguous", "flatten", "reshape_as", "view_as"])
"""Composites that are nearly always a view: asked of a meta tensor as one step where inference mode delivers them
whole."""


def _never(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a composite operation reached the CUDA key without a remote tensor among its arguments")


def install() -> None:
    names = [
        schema.name.removeprefix("aten::") + ("." + schema.overload_name if schema.overload_name else "")
        for schema in torch_private.all_schemas()
        if schema.name.removeprefix("aten::") in WHOLE
        and schema.name.startswith("aten::")
        and torch_private.has_kernel(_full(schema), "CompositeImplicitAutograd")
        and not torch_private.has_kernel(_full(schema), "CUDA")
    ]
    torch_private.register_kernels(dict.fromkeys(names, _never))


def _full(schema: Any) -> str:
    return str(schema.name) + ("." + schema.overload_name if schema.overload_name else "")
