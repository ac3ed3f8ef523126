"""Checks for operations that are allowed but whose kernels read operands without looking at their sizes.

Each was found by calling it with operands that its schema accepts and that lie beside other memory; each check names
the operands that it refuses.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import torch

Check = Callable[[dict[str, Any]], str | None]
"""From the arguments by name, however they were passed, to the reason for a refusal."""


def _per_channel(*names: str, data: str = "input") -> Check:
    """One value per channel (dimension 1) of the data."""

    def check(values: dict[str, Any]) -> str | None:
        tensor = values.get(data, values.get("self"))
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
            if isinstance(tensor, torch.Tensor) and tensor.numel() == 0:
                return None  # PyTorch's empty batch; nothing is read
            return "the input needs at least 2 dimensions"
        channels = tensor.size(1)
        for name in names:
            value = values.get(name)
            if isinstance(value, torch.Tensor) and value.numel() != channels:
                return f"{name} should contain {channels} elements not {value.numel()}"
        return None

    return check


def _fft(values: dict[str, Any]) -> str | None:
    """`torch.fft` wraps and checks its dimensions before it calls these; they do not."""
    data, dims = values.get("self"), values.get("dim")
    if not isinstance(data, torch.Tensor) or not isinstance(dims, list) or not dims:
        return "a transform needs a tensor and at least one dimension"
    if any(type(dim) is not int or not 0 <= dim < data.dim() for dim in dims) or len(set(dims)) != len(dims):
        return f"dimensions {dims} of a tensor that has {data.dim()}"
    if any(data.shape[dim] < 1 for dim in dims):
        return "a transform over an empty dimension"
    return None


def _fft_to_real(values: dict[str, Any]) -> str | None:
    problem = _fft(values)
    if problem is None:
        data, dims, last = values["self"], values["dim"], values.get("last_dim_size")
        if not data.is_complex() or type(last) is not int or not last >= 1 or last // 2 + 1 != data.size(dims[-1]):
            return f"a real result of {last!r} from {tuple(data.shape)}"
    return problem


def _weight_norm(values: dict[str, Any]) -> str | None:
    direction, magnitude, dim = values.get("v"), values.get("g"), values.get("dim")
    if not isinstance(direction, torch.Tensor) or not isinstance(magnitude, torch.Tensor) or type(dim) is not int:
        return "weight_norm needs two tensors and a dimension"
    if direction.numel() == 0:
        return "weight_norm of nothing"
    if not -1 <= dim < direction.dim() or direction.dim() == 0:
        return f"dimension {dim} of a tensor that has {direction.dim()}"
    expected = 1 if dim == -1 else direction.size(dim)
    if magnitude.numel() != expected or magnitude.dtype != direction.dtype:
        return f"a magnitude of {magnitude.numel()} {magnitude.dtype} for {expected} {direction.dtype} directions"
    return _own_places("v", "g")(values)


_norm_sizes = _per_channel("weight", "bias", "running_mean", "running_var")


def _norm(values: dict[str, Any]) -> str | None:
    """Sizes, and that there are statistics where none are computed: the kernel would follow a null pointer."""
    computed = values.get("training", values.get("use_input_stats", False))
    if computed is not True and (values.get("running_mean") is None or values.get("running_var") is None):
        return "a norm in evaluation mode needs running_mean and running_var"
    return _norm_sizes(values)


MAX_DEGREE: Final = 10_000
"""Of a polynomial: kernels take a step for each degree, and some 10^18 of them would be years."""


def _degree(values: dict[str, Any]) -> str | None:
    degree = values.get("n")
    if isinstance(degree, torch.Tensor) and degree.numel() and not degree.is_complex():
        degree = degree.double().abs().max().item()
    if isinstance(degree, int | float) and not abs(degree) <= MAX_DEGREE:
        return f"a polynomial of degree {degree}: at most {MAX_DEGREE} can be computed here"
    return None


MAX_SAMPLES: Final = 4096  # along one side of a region's bin; their number is an `int` in the kernels
MAX_PIXELS: Final = 1e6  # from a region's corner to the origin
MAX_STEP: Final = 1 << 15


def _region(divided: bool = False) -> Check:
    """torchvision's pooling of regions: the kernels read the image that a region names, whichever it is, and make as
    many samples as its size asks for.
    """

    def check(values: dict[str, Any]) -> str | None:
        data, rois, scale = values.get("input"), values.get("rois"), values.get("spatial_scale")
        height, width = values.get("pooled_height"), values.get("pooled_width")
        samples = values.get("sampling_ratio", 1)
        if not (isinstance(data, torch.Tensor) and isinstance(rois, torch.Tensor)):
            return "regions are pooled from tensors"
        if data.dim() != 4 or rois.dim() != 2 or rois.size(1) != 5 or rois.dtype != data.dtype:
            return "the input needs 4 dimensions, and regions the shape (number, 5) and the input's dtype"
        if type(height) is not int or type(width) is not int or type(samples) is not int:
            return "a size and a number of samples are integers"
        if type(scale) is not int and type(scale) is not float:
            return "a scale is a number"
        if not (1 <= height <= MAX_SAMPLES and 1 <= width <= MAX_SAMPLES and samples <= MAX_SAMPLES):
            return f"a size of {height} x {width} with {samples} samples"
        if divided and (data.size(1) % (height * width) or data.size(1) == 0):
            return "the input's channels should be a multiple of the pooled height * pooled width"
        if rois.size(0) == 0:
            return None
        if data.numel() == 0:
            return "regions of an empty input"
        first, last = rois[:, 0].double().aminmax()
        if not (first.item() >= 0 and last.item() < data.size(0)):
            return f"a region of image {first.item()} or {last.item()} of {data.size(0)}"
        reach = (rois[:, 1:].double() * scale).abs().amax().item()
        if not reach <= MAX_PIXELS or (samples <= 0 and reach > MAX_SAMPLES * min(height, width) / 2):
            return f"a region that reaches {reach} pixels far"
        return None

    return check


def _deformed(values: dict[str, Any]) -> str | None:
    """torchvision's deform_conv2d: it divides by groups and steps, and finds offsets by them."""
    tensors: list[Any] = [values.get(name) for name in ("input", "weight", "offset", "mask", "bias")]
    steps: list[Any] = [values.get(name) for name in ("stride_h", "stride_w", "dilation_h", "dilation_w")]
    padding: list[Any] = [values.get(name) for name in ("pad_h", "pad_w")]
    groups: list[Any] = [values.get(name) for name in ("groups", "offset_groups")]
    if not all(isinstance(value, torch.Tensor) for value in tensors):
        return "deform_conv2d needs five tensors"
    data, weight, offset, mask, bias = tensors
    if data.dim() != 4 or weight.dim() != 4 or offset.dim() != 4 or (values.get("use_mask") and mask.dim() != 4):
        return "input, weight, offset and mask need 4 dimensions"
    if not all(type(value) is int for value in (*steps, *padding, *groups)):
        return "steps, padding and groups are integers"
    if not all(1 <= value <= MAX_STEP for value in (*steps, *groups)) or not all(
        0 <= value <= MAX_STEP for value in padding
    ):
        return f"steps of {steps}, padding of {padding} and groups of {groups}"
    if any(data.size(1) % group for group in groups) or weight.size(0) % groups[0] or bias.numel() != weight.size(0):
        return "channels should be a multiple of the groups, and there is one bias for each output channel"
    if any(value.dtype != data.dtype for value in tensors) or 0 in (*weight.shape, *data.shape[1:]):
        return "all tensors need one dtype, and none may be empty"
    return None


def _power(values: dict[str, Any]) -> str | None:
    """The least of all integers has no opposite: the kernel goes on for ever."""
    exponent = values.get("n")
    return f"a power of {exponent}" if type(exponent) is int and abs(exponent) > 1 << 31 else None


def _heads(values: dict[str, Any]) -> str | None:
    """The kernel divides by their number before it looks at it."""
    heads = values.get("num_heads", values.get("num_head"))
    return None if type(heads) is int and heads >= 1 else f"attention with {heads} heads"


def _own_places(*names: str) -> Check:
    """The kernel takes an expanded tensor for contiguous, and reads past its end."""

    def check(values: dict[str, Any]) -> str | None:
        for data in map(values.get, names):
            if isinstance(data, torch.Tensor) and data.numel() > 1:
                last = sum((length - 1) * step for length, step in zip(data.shape, data.stride(), strict=True))
                if data.numel() > last + 1:
                    return "elements of this tensor share their memory: call contiguous() first"
        return None

    return check


MODES: Final = (0, 1, 2)  # sum, mean, max
BAG_WEIGHTS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _bags(values: dict[str, Any]) -> str | None:
    """The kernel finds a bag's rows by an assumed list of offsets, and its weights beside the indices."""
    operands: list[Any] = [values.get(name) for name in ("weight", "indices", "offsets")]
    weights, mode = values.get("per_sample_weights"), values.get("mode", 0)
    weight, indices, offsets = operands
    if not all(isinstance(each, torch.Tensor) for each in operands):
        return "embedding_bag needs a weight, indices and offsets"
    if weight.dim() != 2 or indices.dim() != 1 or offsets.dim() != 1 or weight.dtype not in BAG_WEIGHTS:
        return "embedding_bag needs a weight of two dimensions, and indices and offsets of one"
    if mode not in MODES:
        return f"embedding_bag has no mode {mode}"
    if isinstance(weights, torch.Tensor) and (weights.shape != indices.shape or weights.dtype != weight.dtype):
        return "per_sample_weights have the shape of the indices and the dtype of the weight"
    return None


def _recurrent(values: dict[str, Any]) -> str | None:
    """The kernel walks through as many weights and states as there should be."""
    params, states, layers = values.get("params"), values.get("hx"), values.get("num_layers")
    if not isinstance(params, list) or type(layers) is not int or layers < 1:
        return "a recurrent network has a list of weights and a number of layers"
    lstm = isinstance(states, list)
    both: list[Any] = states if isinstance(states, list) else [states]
    ways = layers * (2 if values.get("bidirectional") else 1)
    if len(both) != (2 if lstm else 1) or not all(isinstance(each, torch.Tensor) and each.dim() == 3 for each in both):
        return "a recurrent network has one state of three dimensions, an LSTM two"
    if any(each.size(0) != ways for each in both):
        return f"a state of {both[0].size(0)} layers and directions for {ways}"
    projected = lstm and both[0].size(2) != both[1].size(2)
    expected = ways * ((4 if values.get("has_biases") else 2) + projected)
    if len(params) != expected:
        return f"{len(params)} weights of {layers} layers, which have {expected}"
    return _packed(values)


def _packed(values: dict[str, Any]) -> str | None:
    """A packed sequence's batch sizes are the number of rows that each step reads; the kernel trusts them."""
    if "batch_sizes" not in values:
        return None
    data, sizes, states = values["data"], values["batch_sizes"], values["hx"]
    first: Any = states[0] if isinstance(states, list) and states else states
    tensors = (data, sizes, first)
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors) or data.dim() != 2 or first.dim() != 3:
        return "a packed sequence has data of two dimensions and states of three"
    if sizes.dtype is not torch.int64 or sizes.device.type != "cpu" or sizes.dim() != 1 or not sizes.numel():
        return "batch_sizes is a list of integers on the CPU"
    steps = sizes.tolist()
    if steps[-1] < 1 or any(one < after for one, after in pairwise(steps)) or sum(steps) != data.size(0):
        return f"batch_sizes of {len(steps)} steps that are not those of {data.size(0)} rows"
    return None if first.size(1) == steps[0] else f"states of {first.size(1)} sequences for {steps[0]}"


def _labels(values: dict[str, Any]) -> str | None:
    """The kernel reads each label's probability, whichever label it is."""
    probabilities, targets = values["log_probs"], values["targets"]
    if not isinstance(probabilities, torch.Tensor) or not isinstance(targets, torch.Tensor) or not targets.numel():
        return None  # it looks at the rest itself
    least, most = (int(each) for each in targets.aminmax())
    classes = probabilities.size(-1) if probabilities.dim() else 0
    return None if least >= 0 and most < classes else f"targets from {least} to {most} of {classes} classes"


def _pivots(values: dict[str, Any]) -> str | None:
    """Kernels exchange the rows that pivots name, counted from 1, wherever those lie. Below 0: of a block of two."""
    factors = next((values[name] for name in ("LU_data", "LU", "LD") if name in values), None)
    pivots = next((values[name] for name in ("LU_pivots", "pivots") if name in values), None)
    if not isinstance(factors, torch.Tensor) or not isinstance(pivots, torch.Tensor) or factors.dim() < 2:
        return "factors of matrices and their pivots are tensors"
    rows, columns = factors.shape[-2:]
    if pivots.dtype is not torch.int32 or pivots.shape != (*factors.shape[:-2], min(rows, columns)):
        return f"pivots of shape {tuple(pivots.shape)} and {pivots.dtype} for factors of {tuple(factors.shape)}"
    if not pivots.numel():
        return None
    least, most = (int(each) for each in (pivots.abs() if "LD" in values else pivots).aminmax())
    return None if least >= 1 and most <= rows else f"pivots from {least} to {most} of {rows} rows"


def _whole_result(values: dict[str, Any]) -> str | None:
    """The kernel assumes that the matrices of a batch follow one another in its output."""
    out = values.get("out")
    if isinstance(out, torch.Tensor) and out.dim() > 2 and not out.is_contiguous():
        return "the result's memory is not in order: give a contiguous one"
    return None


def _rows_in_order(values: dict[str, Any]) -> str | None:
    """The kernel reads each head's row as if its elements followed one another; attention itself sees to it."""
    for name in ("query", "key", "value"):
        data = values.get(name)
        if not isinstance(data, torch.Tensor) or data.dim() != 4:
            return f"{name} needs 4 dimensions"
        if data.size(3) > 1 and data.stride(3) != 1:
            return f"the last dimension of {name} is not contiguous"
    return None


MAX_BINS: Final = 1 << 20


def _bins(values: dict[str, Any]) -> str | None:
    """The kernel goes through all of one side, though another is empty."""
    size = values.get("output_size")
    sides = size if isinstance(size, list) else [size]
    return f"an output of {size}" if any(type(side) is int and side > MAX_BINS for side in sides) else None


def _numbers(values: dict[str, Any]) -> str | None:
    """LAPACK ends the process over a NaN; `linalg_eig` looks itself, as this says it."""
    data = values.get("self")
    if isinstance(data, torch.Tensor) and data.numel() and data.isnan().any().item():
        return "torch.linalg.eigvals: input tensor should not contain NaNs."
    return None


def _for(names: str, check: Check) -> dict[str, Check]:
    return dict.fromkeys(names.split(), check)


CHECKS: Final[dict[str, Check]] = {
    **_for(
        """
        native_batch_norm batch_norm instance_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
        _native_batch_norm_legit_functional _batch_norm_no_update _batch_norm_with_update
        _batch_norm_with_update_functional _batch_norm_impl_index cudnn_batch_norm
        """,
        _norm,
    ),
    "batch_norm_update_stats": _per_channel("running_mean", "running_var"),
    **{
        f"special_{family}": _degree
        for family in (
            *(f"{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw"),
            *("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"),
        )
    },
    **_for("lstm gru rnn_tanh rnn_relu", _recurrent),
    **_for("embedding_bag _embedding_bag _embedding_bag_forward_only", _bags),
    **_for("_transformer_encoder_layer_fwd _native_multi_head_attention", _heads),
    **_for("lu_unpack lu_solve linalg_lu_solve linalg_ldl_solve", _pivots),
    **_for("ctc_loss _ctc_loss", _labels),
    **_for("tril triu", _whole_result),
    **_for("linalg_eigvals _linalg_eigvals", _numbers),
    "_scaled_dot_product_flash_attention_for_cpu": _rows_in_order,
    **{f"adaptive_{kind}_pool{sides}d": _bins for kind in ("max", "avg") for sides in (1, 2, 3)},
    **{f"_adaptive_avg_pool{sides}d": _bins for sides in (2, 3)},
    **_for("matrix_power linalg_matrix_power", _power),
    **_for("nanmedian median", _own_places("self")),
    **_for("_fft_c2c _fft_r2c", _fft),
    "_fft_c2r": _fft_to_real,
    **_for("_weight_norm _weight_norm_interface", _weight_norm),
    "batch_norm_elemt": _per_channel("weight", "bias", "mean", "invstd"),
    **_for("torchvision::roi_align torchvision::roi_pool", _region()),
    **_for("torchvision::ps_roi_align torchvision::ps_roi_pool", _region(divided=True)),
    "torchvision::deform_conv2d": _deformed,
}
"""By operation name without overload."""
