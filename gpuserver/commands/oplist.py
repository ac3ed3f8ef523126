"""The allow-list of operations that an instance may ask for: decided by schema, computed once from the declarations of
this torch.

A name from the wire is only ever a key into the table made here; it never reaches `getattr`. The rules below state the
exclusions and their reasons. `operand_checks.py` guards operations that are allowed and whose kernels do not check
everything they read.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, Final

import torch

from dormouse.schemas import stream as wire


def _words(text: str, prefix: str = "") -> frozenset[str]:
    return frozenset(prefix + word for word in text.split())


# Words in an operation's name: backward kernels trust saved tensors; constructors of sparse, quantised and nested
# tensors can skip their invariants, and those layouts are not moved; segment_reduce(unsafe=True) reads past the end;
# the rest leaves the device or the process, or is meant for tools.
_REFUSED_WORDS: Final = _words("""
    backward sparse _coo csr csc bsr bsc coalesce to_mkldnn mkldnn quantize quantized q_per q_scale q_zero
    fbgemm fake_quant choose_qparams int_repr qint dequantize nested jagged padded_dense from_file record_stream
    pin_memory pinned _share shm set_ storage resize_output _cudnn_init segment_reduce _validate _debug _test_
    _print _assert_async is_vulkan vulkan xnnpack _foobar _dummy symint sym_ _version retain_grad
    _has_compatible _cufft rename align_ refine_names _nnpack _autocast _transform_bias _make_dep_token _triton _cslt
    _convert_weight _weight_int _dyn_quant _mixed_dtypes miopen _wrapped_ _copy_from _use_cudnn data_ptr
    _neg_view_copy unsafe_set _spsolve lift _is_zerotensor _efficientzerotensor _fw_primal _make_dual
    _unpack_dual _reshape_from_tensor _backward _fused_ _amp_ _jagged _flash_attention_forward
    _efficient_attention_forward _fill_mem_eff _cudnn_attention_forward _paged
""")

# Operations whose names contain a refused word and that are harmless.
_KEPT: Final = {
    "aten::index_put_",
    "aten::_fused_sdp_choice",
}

# Whole operations without a word of their own: questions that the client answers, other layouts, and views in place,
# which are the client's business and would change the executor's cached views.
_REFUSED: Final = _words(
    """
    range data item _local_scalar_dense cuda cpu to numpy_T output_nr is_leaf requires_grad_ _unsafe_index
    _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate _thnn_fused_lstm_cell
    _cummax_helper _cummin_helper _pad_packed_sequence_unchecked _nnpack_available __init__ set
    _thnn_fused_gru_cell get_gradients qscheme hspmm smm sspaddmm to_dense to_padded_tensor values values_copy
    indices indices_copy row_indices row_indices_copy col_indices col_indices_copy crow_indices crow_indices_copy
    ccol_indices ccol_indices_copy dense_dim size stride dim numel get_device is_distributed is_inference
    retains_grad t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ detach_ nonzero_numpy
    flatten_dense_tensors unflatten_dense_tensors
""",
    "aten::",
)

# Internal operations (with a leading underscore) trust their callers: of 40 random calls each, seventeen of them read
# or wrote out of bounds. Only those may run that PyTorch's public functions turn into before they reach the client.
_INTERNAL: Final = _words("""
    _softmax _log_softmax _safe_softmax _to_copy _unsafe_view _conj _conj_copy _conj_physical _neg_view _fft_c2c
    _fft_c2r _fft_r2c _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd
    _linalg_check_errors _native_multi_head_attention _transformer_encoder_layer_fwd _unique _unique2
    _cdist_forward _euclidean_dist _pdist_forward _embedding_bag _embedding_bag_forward_only _ctc_loss
    _pack_padded_sequence _pad_packed_sequence _prelu_kernel _trilinear _weight_norm _weight_norm_interface
    _adaptive_avg_pool2d _adaptive_avg_pool3d _index_put_impl_ _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _addmm_activation
    _standard_gamma _sample_dirichlet _grouped_mm _scaled_mm _int_mm _logcumsumexp _fused_sdp_choice
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_attention_math _is_all_true _is_any_true _native_batch_norm_legit
    _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_impl_index
    _histogramdd_from_bin_cts _histogramdd_from_bin_tensors _histogramdd_bin_edges _convolution
    _convolution_mode _aminmax _dirichlet_grad _lu_with_info _shape_as_tensor _upsample_lanczos2d_aa _add_relu
    _add_relu_
""")

# Found to crash with operands that the schema accepts; see `tests/unit/test_oplist.py`.
_CRASHED: Final = _words(
    """
    _foreach_copy.out _foreach_copy _chunk_cat.out _stack.out _sobol_engine_initialize_state_ _remove_batch_dim
    _reshape_alias_copy _logcumsumexp.out
""",
    "aten::",
)

_ARGUMENTS: Final = _words("""
    Tensor number Scalar int SymInt float SymFloat bool SymBool str Device Generator MemoryFormat Layout
    ScalarType
""")


_ENUMERATIONS: Final = ("ScalarType", "Layout", "MemoryFormat", "Device", "Generator")


class Misfit(Exception):
    """An operator cannot take the arguments of a key: the text says why."""


class Allowed:
    """An operation, with the facts of its schema that execution needs."""

    def __init__(self, op: Any) -> None:
        self.schema = schema = op._schema
        arguments = list(schema.arguments)
        self._names = tuple(argument.name for argument in arguments)
        self._defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
        self.name: str = schema.name + ("." + schema.overload_name if schema.overload_name else "")
        self.base: str = schema.name.removeprefix("aten::")
        self.custom = not schema.name.startswith("aten::")
        self.call = op._op  # the bound C++ callable: half the cost of calling through the overload object
        self.has_generator = "generator" in self._names
        # Its position, if it is not keyword-only.
        positions = (at for at, each in enumerate(arguments) if each.name == "generator" and not each.kwarg_only)
        self.generator_at = next(positions, None)
        self.random = (
            torch.Tag.nondeterministic_seeded in op.tags or "dropout" in schema.name or "scaled_dot" in schema.name
        )
        self._chance = next((name for name in self._names if name in ("dropout", "dropout_p")), "")
        self._training = "train" if "train" in self._names else ""
        if not self._chance and self._training and "p" in self._names:
            self._chance = "p"
        written = [each.alias_info is not None and each.alias_info.is_write for each in arguments]
        self.writes = self._keys(written)
        # Arguments written although the schema does not say so, and the argument on which that depends.
        hidden = wire.UPDATES_STATISTICS.get(schema.name)
        self.statistics = self._keys(hidden is not None and name in wire.RUNNING_STATISTICS for name in self._names)
        self.flag = next((place for place in enumerate(self._names) if place[1] == hidden), None)
        # Arguments that are numbers to PyTorch, which it does not check, or that choose a device.
        kinds = [str(each.real_type).removeprefix("Optional[").rstrip("]?") for each in arguments]
        self.enumerations = {
            key: kind for at, kind in enumerate(kinds) if kind in _ENUMERATIONS for key in (at, self._names[at])
        }
        # PyTorch takes None for any of these, and its kernels follow the pointer.
        self.tensors = self._keys(str(each.real_type) in ("Tensor", "List[Tensor]") for each in arguments)
        self.resizes = any(each.is_out for each in arguments) or "resize" in schema.name

    def fitted(self, kernel: Any) -> "Allowed":
        """The operation as called with the arguments of this key. Raises Misfit."""
        return self

    def _keys(self, chosen: Iterable[bool]) -> frozenset[int | str]:
        """Positions and names of the chosen arguments: a call may give them either way."""
        places = zip(enumerate(self._names), chosen, strict=True)
        return frozenset(key for place, is_chosen in places if is_chosen for key in place)

    def draws(self, args: list[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a random operation takes random numbers at all: with no dropout, one that could does not."""
        if not self._chance:
            return True
        values = self.bound(args, kwargs)
        chance = values.get(self._chance)
        return values.get(self._training, True) is not False and not (isinstance(chance, int | float) and chance <= 0)

    def bound(self, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, however they came."""
        return {**self._defaults, **dict(zip(self._names, args, strict=False)), **kwargs}


@cache
def allowed() -> dict[str, Allowed]:
    """The allowed operations of the torch that is installed, by the schema's name."""
    table = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::") and is_allowed(schema):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
            op = getattr(packet, schema.overload_name or "default", None)
            if op is not None and hasattr(op, "_op"):
                operation = Allowed(op)
                table[operation.name] = operation
    return table


def is_allowed(schema: Any) -> bool:
    if schema.name in _KEPT:
        return True
    base = schema.name.removeprefix("aten::")
    full = schema.name + ("." + schema.overload_name if schema.overload_name else "")
    if full in _CRASHED:
        return False
    if base.startswith("_") and base not in _INTERNAL and not base.startswith(("_foreach_", "__")):
        return False
    if schema.name in _REFUSED or any(word in full for word in _REFUSED_WORDS):
        return False
    if not torch._C._dispatch_has_kernel(full):
        return False  # TorchScript's own operations on lists and strings
    if not all(plain(str(argument.real_type)) for argument in schema.arguments):
        return False
    return any("Tensor" in str(value.real_type) for value in (*schema.arguments, *schema.returns))


def plain(kind: str) -> bool:
    """Whether an argument's type is made of tensors and numbers only (no Storage, Stream, Dimname, Any, class)."""
    bare = kind.replace("Optional[", "").replace("List[", "").replace("]", "").replace("[", "").replace("?", "")
    return bare in _ARGUMENTS
