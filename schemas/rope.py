"""Rotary position embeddings that are served, and the faults of others. Pure; without torch and transformers.

The meaning of a value is known to `transformers`, which computes with it. It ignores values that it does not know,
warns of numbers that it cannot use and fails later; and where it looks at the longest sequence of a batch, an answer
would depend on other requests. These are refused here.
"""

import math
from collections.abc import Container
from typing import Any, Final

KINDS: Final = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings",),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
"""By `rope_type`: what must be there, and a number, or a list of them."""

_POSITIVE: Final = ("rope_theta", "factor", "original_max_position_embeddings")
"""The frequencies are divided by these, or are powers of them."""

GIVEN: Final = ("rope_theta", "original_max_position_embeddings")
"""Keys that files may have elsewhere, or leave to the family."""

_LISTS: Final = ("short_factor", "long_factor")
_NAMES: Final = ("rope_type", "type")
_MOST: Final = 1024
"""Keys, and numbers in a list: twice the rotated numbers of a head of any model."""

PARTIAL: Final = ("phi", "gpt_neox")
"""Families whose attention rotates a part of each head, where that is wanted. Others would fail, or ignore it."""


def why_odd(value: Any, given: Container[str] = ()) -> str:
    """The fault of one as files have it; "" if it can be read. ``given``: keys that come from elsewhere if they are
    missing.
    """
    if not isinstance(value, dict) or not 0 < len(value) <= _MOST:
        return f"it cannot be {value!r:.80}"
    kind = _kind(value)
    if not isinstance(kind, str) or kind not in KINDS:
        return f"the rope_type {kind!r:.80} is not served; these are: {', '.join(KINDS)}"
    for name, each in value.items():
        if name not in _NAMES and not _is_known(name, each):
            return f"{name!s:.80} cannot be {each!r:.80}"
    for name in ("rope_theta", *KINDS[kind]):
        if value.get(name) is None and (name in value or name not in given):
            return f"{name} is missing, which a rope of type {kind} wants"
    return ""


def why_not(value: Any, family: str, head_dim: int, context: int) -> str:
    """The fault of one that is whole; "" if it is served, to sequences of up to so many tokens."""
    if why := why_odd(value):
        return why
    part = value.get("partial_rotary_factor", 1.0)
    if part is None or not 0 < part <= 1 or (part != 1 and family not in PARTIAL):
        what = "a part of each head" if family in PARTIAL else "all of each head"
        return f"partial_rotary_factor cannot be {part}: {family} rotates {what}"
    rotated = int(head_dim * part)
    if rotated < 2 or rotated % 2:
        return f"{rotated} of the {head_dim} numbers of a head are rotated, which have to be pairs"
    return _longrope(value, rotated, context) if _kind(value) == "longrope" else ""


def _kind(value: dict[str, Any]) -> Any:
    return value.get("rope_type", value.get("type", "default"))  # beside the newer name, the older does not matter


def _is_known(name: str, value: Any) -> bool:
    if name in _LISTS:
        return isinstance(value, list) and 0 < len(value) <= _MOST and all(_is_number(each) and each for each in value)
    if isinstance(value, list):  # what is known of no type is not read
        return len(value) <= _MOST and all(map(_is_number, value))
    if name in _POSITIVE and value is not None:
        return _is_number(value) and value > 0
    return value is None or type(value) is bool or _is_number(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _longrope(value: dict[str, Any], rotated: int, context: int) -> str:
    for name in _LISTS:
        if len(value[name]) != rotated // 2:
            return f"{name} has {len(value[name])} numbers, and {rotated // 2} are wanted"
    trained = value["original_max_position_embeddings"]
    if context > trained:
        return (
            f"a longrope computes sequences longer than {trained} tokens with other frequencies, from their first "
            f"token on, and which ones these are is known too late; deploy with --context {trained}"
        )
    return ""
