"""Messages to and from the process that writes `/metrics`, and the controller's counts for it.

Counts begin with the start of the process that counts, and only grow. Readers can tell that it was started anew.
"""

from typing import Final

import msgspec

from dormouse.schemas.messages.executor_to_controller import PoolStats
from dormouse.schemas.messages.shared import Message
from dormouse.schemas.messages.store_to_controller import StoreStatus

BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
"""Buckets of times, by their upper ends; one more has all that is longer. From a warm function to a cold model."""


class Spread(Message, frozen=True, kw_only=True):
    """A histogram: how many times fell into each bucket of BOUNDS_S, and their sum."""

    counts: list[int]
    sum_s: float


class TokensCounted(Message, frozen=True, kw_only=True):
    """Of a language model's answers: times to the first token, times of each further one in the mean, tokens."""

    first: Spread
    further: Spread
    prompt: int
    made: int
    reused: int


class FunctionCounted(Message, frozen=True, kw_only=True):
    """The router's counts of a function. ``outcomes`` by "ok" or an error's code; ``in_time`` and ``late`` are by its
    own deadline, or its times for tokens; failed requests are late; ``spent_s`` is where answered requests' time went;
    ``idle_s`` how long it has had no request; ``jobs`` are there, by state; ``broken``: it is not started.
    """

    name: str
    tenant: str
    running: int
    waiting: int
    outcomes: dict[str, int]
    in_time: int
    late: int
    latency: Spread
    spent_s: dict[str, float]
    idle_s: float
    tokens: TokensCounted | None = None
    jobs: dict[str, int] = {}
    broken: bool = False
    pids: list[int] = []  # of its instances
    failing: bool = False  # nearly all that is asked of it


class WakesCounted(Message, frozen=True, kw_only=True):
    """``source`` is the slowest place from which bytes came: "file", "host" or "gpu". ``spent_us``: until all were
    there, of the wakes that were ``timed``, as those are which end before their lease.
    """

    source: str
    count: int
    timed: int
    spent_us: int
    nbytes: int


class FunctionMeasures(Message, frozen=True, kw_only=True):
    """The controller's counts of a function. ``evictions`` by reason, ``resident`` bytes by GPU; what it has ``used``
    since this node has been keeping account: GPU microseconds, and byte-milliseconds by kind. ``batches`` have served
    so many requests, of as many as they had places for; if one of them failed, its requests were tried alone.
    """

    name: str
    wakes: list[WakesCounted]
    evictions: dict[str, int]
    resident: list[tuple[int, int]]
    leases: int
    used: dict[str, int]
    batches: int = 0
    batch_requests: int = 0
    batch_places: int = 0
    batches_failed: int = 0


class GpuMeasures(Message, frozen=True, kw_only=True):
    number: int
    name: str
    capacity_nbytes: int
    stats: PoolStats
    seats: int
    turns: int


class NodeMeasures(Message, frozen=True, kw_only=True):
    """All that the controller has counted. ``waiting``: requests without a GPU. ``drained``: GPUs."""

    gpus: list[GpuMeasures]
    functions: list[FunctionMeasures]
    store: StoreStatus
    waiting: int
    drained: list[int] = []


class KeptCounted(Message, frozen=True, kw_only=True):
    """The router's holdings of tenants: environments, and their ``builds`` by "ok" or an error's code; secrets by
    tenant; and room on the disk for more, -1 if that cannot be found out.
    """

    builds: dict[str, int] = {}
    environments: int = 0
    environments_nbytes: int = 0
    secrets: dict[str, int] = {}
    disk_free_nbytes: int = -1


class Scrape(Message, frozen=True, kw_only=True, tag=1):
    """Router to metrics: write all this down. ``measures``: an encoded NodeMeasures, or nothing if the controller has
    not said it in time. ``whole``: who asks may see the node; else these functions are all that is there. ``up`` and
    ``down``: the node's processes. ``gzip``: the answer may be packed so. ``spans``: what has become of those
    that the node exports. ``kept`` is of those who see the node. ``deaths``: how often processes have died.
    ``refused``: by code, errors that were answered where no function is known.
    """

    query: int
    functions: list[FunctionCounted]
    measures: bytes
    whole: bool
    up: dict[str, int]
    down: list[str]
    gzip: bool
    spans: dict[str, int] = {}
    kept: KeptCounted = KeptCounted()
    deaths: dict[str, int] = {}
    refused: dict[str, int] = {}


class Exposition(Message, frozen=True, kw_only=True, tag=1):
    """The answer: Prometheus's text format, as it goes to the client."""

    query: int
    text: bytes


RouterToMetrics = Scrape
MetricsToRouter = Exposition

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(NodeMeasures)


def packed(measures: NodeMeasures) -> bytes:
    """As it travels through the router, which does not look at it."""
    return _encoder.encode(measures)


def unpacked(data: bytes) -> NodeMeasures:
    return _decoder.decode(data)
