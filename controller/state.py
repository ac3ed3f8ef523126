"""The scheduler's picture of GPUs, leases and models, and its counts for people; plain data that only it changes. No
I/O.
"""

from dataclasses import dataclass, field

from dormouse.schemas.messages import Lease, PoolStats


@dataclass(slots=True)
class Running:
    """A lease that an executor has been told of and has not yet given back."""

    request: int
    instance: str
    lease: Lease
    wake_us: int | None = None
    revoked_until_s: float | None = None


@dataclass(slots=True)
class Gpu:
    """What its executor has told. ``capacity_nbytes`` is the most that models can have of it."""

    epoch: int
    stats: PoolStats
    capacity_nbytes: int
    resident: dict[str, int] = field(default_factory=dict)  # nbytes by instance; shared ones count for each
    running: Running | None = None


@dataclass(slots=True)
class Model:
    """What is known of an instance's model."""

    function: str
    used_s: float
    version: int = 0
    nbytes: int = 0
    peak_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class LastWake:
    """Where the bytes of a function's last wake came from. ``wake_us`` is None if it did not end before its lease."""

    gpu: int
    copied_nbytes: int
    peer_nbytes: int
    file_nbytes: int
    wake_us: int | None


@dataclass(slots=True)
class FunctionCounts:
    """For people: never read by a decision."""

    leases: int = 0
    wakes: int = 0
    copied_nbytes: int = 0
    peer_nbytes: int = 0  # of those copied: from another GPU
    file_nbytes: int = 0  # of those copied: read from a file first
    gpu_us: int = 0
    evictions: int = 0  # times that an instance lost bytes on a GPU to others
    gpus: dict[int, int] = field(default_factory=dict)  # leases by GPU
    last_wake: LastWake | None = None
