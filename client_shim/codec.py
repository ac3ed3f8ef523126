"""Requests and responses of ``handle``: JSON to Python values and back. Pure."""

from typing import Any

import numpy as np
import orjson
import torch


class BadRequest(ValueError):
    """The body is not JSON."""


class BadResponse(TypeError):
    """What ``handle`` returned cannot be sent; the text says what to do."""


def decode(body: bytes | memoryview) -> Any:
    """Raises BadRequest."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request body is not JSON: {error}") from error


def encode(value: Any, limit_nbytes: int) -> bytes:
    """JSON text of what ``handle`` returned; arrays become lists. Raises BadResponse."""
    try:
        data = orjson.dumps(value, _convert, orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    except (TypeError, RecursionError) as error:
        if isinstance(error.__cause__, BadResponse):
            raise error.__cause__ from None
        raise BadResponse(f"handle() returned something that is not JSON: {error}") from error
    if len(data) > limit_nbytes:
        raise BadResponse(
            f"handle() returned {len(data)} bytes of JSON; at most {limit_nbytes} fit: return less, or raise [limits]"
            " response"
        )
    return data


def _convert(value: Any) -> Any:
    """Called for what is neither JSON nor an array that can be read in place."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, torch.Tensor):
        advice = "call .item() on it" if value.numel() == 1 else "call .tolist() on it"
        raise BadResponse(f"handle() returned a tensor of shape {tuple(value.shape)}, which is not JSON: {advice}")
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise BadResponse(
        f"handle() returned a value of type {kind}, which is not JSON: return dicts, lists, strings and numbers"
    )
