"""Properties of operations for recording, from their schemas: value arguments, written operands, and whether they are
kept whole.

One `Operation` per overload, made at first use and kept for ever. Holds the operation's interned plans, which
`plans.py` makes.
"""

from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch

from dormouse.client_shim import torch_dispatcher
from dormouse.client_shim.commands import composites
from dormouse.schemas import stream as wire

Handler = Callable[["Operation", tuple[Any, ...], dict[str, Any]], Any]

# Scalars of these decide the result's shape, or whether to wait for it, so their values belong in the key.
DECIDED_BY_SCALARS: Final = {
    f"aten::{name}" for name in ("arange", "range", "histc", "renorm", "renorm_", "softshrink")
}

# Results depend on data though no tag says so, or the meta kernel answers without looking.
ALWAYS_ASK: Final = {"aten::equal", "aten::is_nonzero", "aten::_local_scalar_dense", "aten::allclose"}

# Asked once for each signature and then believed (and checked by the executor on each run): the strides of these
# depend on the kernel that the device chooses, which no meta kernel knows.
ASK_ONCE: Final = {
    "aten::nansum",  # of integers, its dimensions
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_native_multi_head_attention",
    "aten::_transformer_encoder_layer_fwd",
    # The set of their empty results differs between kernels too.
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_batch_norm_with_update",
    # The dtype of the norms.
    "aten::_weight_norm_interface",
    # The results have one of several dtypes.
    *(f"aten::{name}" for name in ("addr", "soft_margin_loss", "native_layer_norm", "native_group_norm")),
    "aten::embedding_bag",
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
}


# Asked where operands differ in dtype: the kernel decides the result's.
MIXED: Final = {f"aten::{name}" for name in ("normal", "ldexp", "huber_loss", "binary_cross_entropy")}


# The same where an operand is not laid out row by row: the kernel decides whether the result is "channels last".
LAID_OUT_BY_KERNEL: Final = {
    f"aten::{name}"
    for name in (
        *("convolution", "_convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *(f"conv{n}d" for n in (1, 2, 3)),
        *(f"{kind}_pool{n}d" for kind in ("avg", "max", "adaptive_avg", "_adaptive_avg") for n in (1, 2, 3)),
        *(f"{kind}_pool{n}d_with_indices" for kind in ("max", "fractional_max") for n in (2, 3)),
        *(f"adaptive_max_pool{n}d" for n in (1, 2, 3)),
    )
}


# Tagged as dynamic because a mask may be among the indices, or no number of classes be given; the meta kernel refuses
# exactly then.
MOSTLY_STATIC: Final = {"aten::index", "aten::_unsafe_index", "aten::one_hot"}


class Operation:
    __slots__ = (
        "ask_always", "ask_once", "decompose", "flag", "handler", "laid_out_by_kernel", "local", "mixed",
        "name", "op", "plans", "pure", "scalar_names", "scalars", "scalars_in_key", "statistics", "taken", "wire_name",
        "writes",
    )  # fmt: skip

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.op = op
        self.name = torch_dispatcher.full_name(schema)
        self.wire_name = self.name
        self.plans: dict[tuple[Any, ...], Any] = {}
        self.taken: set[tuple[Any, ...]] = set()  # the ways in which it has succeeded
        self.handler: Handler | None = None
        self.pure = False  # its handler's behaviour depends on the call's signature alone
        places = [(index, argument.name) for index, argument in enumerate(schema.arguments)]
        scalars = [place for place in places if _is_scalar(str(schema.arguments[place[0]].real_type))]
        self.scalars_in_key = schema.name in DECIDED_BY_SCALARS
        self.scalars = frozenset(index for index, _ in scalars)
        self.scalar_names = frozenset(name for _, name in scalars)
        self.writes = frozenset(
            key
            for place, argument in zip(places, schema.arguments, strict=True)
            if argument.alias_info is not None and argument.alias_info.is_write
            for key in place
        )
        # Operands written without the schema saying so, and the argument on which that depends.
        hidden = wire.UPDATES_STATISTICS.get(schema.name)
        self.statistics = frozenset(
            key for place in places if hidden is not None and place[1] in wire.RUNNING_STATISTICS for key in place
        )
        self.flag = next((place for place in places if place[1] == hidden), None)
        dynamic = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(op.tags))
        self.ask_always = schema.name in ALWAYS_ASK or (dynamic and schema.name not in MOSTLY_STATIC)
        self.ask_once = schema.name in ASK_ONCE
        self.mixed = schema.name in MIXED
        self.laid_out_by_kernel = schema.name in LAID_OUT_BY_KERNEL
        base = schema.name.removeprefix("aten::")
        foreign = not schema.name.startswith("aten::")
        # A custom operator written in Python runs here; its steps arrive as operations of their own.
        self.local = foreign and torch_dispatcher.has_kernel(self.name, "CompositeExplicitAutograd")
        if foreign and not self.local:
            self.wire_name = f"{self.name}@{wire.digest(str(schema))}"
        self.decompose = (
            base not in composites.WHOLE
            and base not in composites.LOCAL
            and torch_dispatcher.has_kernel(self.name, "CompositeImplicitAutograd")
        )


def _is_scalar(kind: str) -> bool:
    """Whether a Python number may stand there whose value decides no shape. PyTorch passes `x * 2` as a number for a
    tensor."""
    return "number" in kind or "Tensor" in kind or ("Scalar" in kind and "ScalarType" not in kind)


_operations: dict[int, Operation] = {}  # by id of the overload, which lives for ever and whose own hash is slow
_handlers: dict[str, Handler] = {}  # by schema name
_of_all_overloads: dict[str, Handler] = {}
_pure: set[Handler] = set()
_refused: dict[str, Handler] = {}  # by a word in the name; the last that fits


def handler(*names: str, pure: bool = False, overloads: bool = True) -> Callable[[Handler], Handler]:
    """Declare a function that takes these operations over from the general path. ``pure``: where it records the call,
    that depends on nothing but the call's signature. ``overloads``: names without one stand for all that they have.
    """

    def declare(function: Handler) -> Handler:
        if pure:
            _pure.add(function)
        for name in names:
            _handlers[f"aten::{name}"] = function
            if overloads and "." not in name:
                _of_all_overloads[f"aten::{name}"] = function
        return function

    return declare


def refuse(*words: str, text: str, way: str) -> None:
    """Refuse operations of PyTorch's that have one of these words in their names and no handler; ``way`` is the advice
    for the program.
    """

    def refusal(operation: Operation, args: Any, kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{operation.name}: {text} on cuda:0 of a Dormouse function: {way}")

    _refused.update(dict.fromkeys(words, refusal))


def describe(op: Any) -> Operation:
    operation = Operation(op)
    operation.handler = _handlers.get(operation.name) or _of_all_overloads.get(operation.name.split(".")[0])
    operation.pure = operation.handler in _pure
    if operation.handler is None and operation.name.startswith("aten::"):
        operation.handler = next((_refused[word] for word in reversed(_refused) if word in operation.name), None)
    return _operations.setdefault(id(op), operation)


def known() -> dict[int, Operation]:
    return _operations


def forget_plans() -> None:
    """Something that every prediction depends on has changed (the default dtype), or there are too many of them."""
    for operation in _operations.values():
        operation.plans.clear()
        operation.taken.clear()
