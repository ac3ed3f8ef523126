"""Settings of the scheduling core: one structure, checked once. Each is described where it is used."""

from collections.abc import Mapping
from typing import Final

import msgspec
import msgspec.structs

from dormouse.schemas.errors import ConfigError

ORDERS: Final = ("fifo", "edf", "feasible", "rrc", "rrc-latency", "rrc-deadline", "effort")
PLACEMENTS: Final = ("completion", "torpor", "tangram", "random", "bound")
MAX: Final = 1 << 40
"""Of a window, and of milliseconds: thirty years."""

MAX_TURNS: Final = 16
"""Streams of commands that one compute thread can still serve side by side."""

OFFLOADS: Final = ("ahead", "asked", "never")

EVICTIONS: Final = ("cost", "lru", "torpor", "tangram")

TURN_ORDERS: Final = ("margin", "fifo")

BATCHINGS: Final = ("now", "fill-or-expire", "fixed")


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for the order and placement of requests, and for making room. Durations in milliseconds.

    ``passed_over_ms``: a request that has waited so long is overdue; 0: none ever is.
    ``passed_over_share``: part of the GPUs' time, in (0, 1], that overdue requests get first, oldest first; at 1 nobody
    overtakes them.
    ``window``: number of its last requests over which a function's compliance is counted (Torpor §5.2).
    ``await_resident``: whether a request may wait for a busy GPU that has its model although another GPU is free.
    ``half_life_ms``: age at which an arrival counts half in a function's rate.
    ``turns``: how many leases may compute on a GPU side by side.
    ``turn_ms``: a lease whose instance has given the GPU nothing for so long loses its turn to one that waits, and
    keeps its memory.
    ``offload``: when others make room for a language model's KV: "ahead" of its growth, when it is "asked" for, or
    "never" for more than one sequence of a runtime.
    ``preload``: whether idle GPUs are given models that are likely to be asked for.
    ``turn_order``: which runtime of a language model computes the next step on a GPU, and which sequence joins a batch
    next: that with the least margin to a deadline; or they do so in turn.
    ``affinity``: with placement ``completion``, a language model goes where its first token is expected soonest, by
    what is there of base, adapter and runtime.
    ``batching``: whether streams of a language model wait for others of their function before a batch takes them
    (rules/batching.py): "now", they do not; "fill-or-expire", ServerlessLoRA's Eq. 3 as it stands; "fixed", for
    ``batch_size`` of them, and for ``batch_delay_ms`` at most.
    """

    order: str = "effort"
    placement: str = "completion"
    eviction: str = "cost"
    passed_over_ms: int = 30_000
    passed_over_share: float = 0.1
    window: int = 1000
    await_resident: bool = True
    half_life_ms: int = 120_000
    turns: int = 1
    turn_ms: int = 20
    offload: str = "ahead"
    preload: bool = False
    turn_order: str = "margin"
    affinity: bool = True
    batching: str = "now"
    batch_size: int = 1
    batch_delay_ms: int = 0


DEFAULT: Final = Policy()

FIXED: Final = frozenset(
    {"window", "half_life_ms", "turns", "turn_ms", "offload", "batching", "batch_size", "batch_delay_ms"}
)
"""Settings fixed at a node's start: executors have them too, or past use of functions is counted by them."""


def changed(policy: Policy, changes: Mapping[str, object]) -> Policy:
    """The policy of a running node with other settings. Raises ConfigError naming the setting and what it may be."""
    for name in changes:
        if name not in Policy.__struct_fields__:
            raise ConfigError(f"there is no setting {name!r}; write one of {', '.join(Policy.__struct_fields__)}")
        if name in FIXED:
            raise ConfigError(
                f"{name} cannot be changed while the node runs: write it into [schedule] of the node file, then "
                "`dormouse up NODE.toml --replace`"
            )
    try:
        return checked(msgspec.convert({**msgspec.structs.asdict(policy), **changes}, Policy))
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None


def checked(policy: Policy, origin: str = "policy") -> Policy:
    """The same, or ConfigError naming the setting and what it may be."""
    for label, value, choices in (
        ("order", policy.order, ORDERS),
        ("placement", policy.placement, PLACEMENTS),
        ("eviction", policy.eviction, EVICTIONS),
        ("turn_order", policy.turn_order, TURN_ORDERS),
        ("offload", policy.offload, OFFLOADS),
        ("batching", policy.batching, BATCHINGS),
    ):
        if value not in choices:
            raise ConfigError(f"{origin}: {label} is {value!r}; write one of {', '.join(choices)}")
    if not 0.0 < policy.passed_over_share <= 1.0:
        raise ConfigError(
            f"{origin}: passed_over_share is {policy.passed_over_share:g}; write a number above 0 and at most 1"
        )
    for label, number, least in (
        ("passed_over_ms", policy.passed_over_ms, 0),
        ("window", policy.window, 1),
        ("half_life_ms", policy.half_life_ms, 1),
        ("turn_ms", policy.turn_ms, 1),
        ("batch_size", policy.batch_size, 1),
        ("batch_delay_ms", policy.batch_delay_ms, 0),
    ):
        if not least <= number <= MAX:
            raise ConfigError(f"{origin}: {label} is {number}; write a number from {least} to {MAX}")
    if not 1 <= policy.turns <= MAX_TURNS:
        raise ConfigError(f"{origin}: turns is {policy.turns}; write a number from 1 to {MAX_TURNS}")
    for label, number, least in (("batch_size", policy.batch_size, 1), ("batch_delay_ms", policy.batch_delay_ms, 0)):
        if number != least and policy.batching != "fixed":
            raise ConfigError(f'{origin}: {label} is {number}; write batching = "fixed", or leave it out')
    if policy.batching == "fixed" and policy.batch_size > 1 and not policy.batch_delay_ms:
        raise ConfigError(
            f"{origin}: batch_size is {policy.batch_size}; write how long one waits for the others, too, "
            "as batch_delay_ms = 500"
        )
    return policy
