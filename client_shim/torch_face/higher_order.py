"""Runs PyTorch's operators on functions, `cond`, `while_loop`, `scan`, `map`, `flex_attention`, of tensors on cuda:0.

They run as in PyTorch without compiling: the functions are called here, and their steps arrive as operations.
"""

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree

from dormouse.client_shim import torch_dispatcher
from dormouse.client_shim.torch_face.remote_tensor import is_remote


def install(patch: Callable[[Any, str, Any], None]) -> None:
    torch_dispatcher.watch_higher_order(patch, _taken, _refusal)


def _taken(args: Any, kwargs: Any) -> bool:
    return any(is_remote(leaf) for leaf in _pytree.tree_leaves((args, kwargs)))


def _refusal(name: str) -> Exception:
    return NotImplementedError(
        f"torch.ops.higher_order.{name} is not supported on cuda:0 of a Dormouse function: write what it does with "
        "ordinary operations and Python's own `if` and `for`, or call it on the CPU, with x.cpu()"
    )
