"""Rules for one more instance of a function: when its queue or a language model's tokens call for one, and which
requests that one gets. Pure. Routers decide by them (core/decisions/requests/replicas.py has the reasons), and so do
simulated ones (controller/simulator/extras.py).
"""

from collections.abc import Collection, Sequence
from typing import Final

SMOOTHING: Final = 0.2
"""Weight of the newest request in the recent time of one: a burst shows after a handful."""

LATE: Final = 0.5
"""Of the time in which a request of a language model is to have its first token: one that has none by then is expected
to be late."""

BEGUN: Final = float("inf")
"""When a request that has its first token is to have it."""


def mean(old: float | None, new: float) -> float:
    return new if old is None else old + (new - old) * SMOOTHING


def most_instances(wanted: int, gpus: int) -> int:
    """Never more than could run at once. ``wanted``: as deployed; 0: as many as there are GPUs."""
    return max(1, min(wanted or gpus, gpus))


def token_due_s(arrived_s: float, ttft_s: float) -> float:
    """From then on a request without a token is expected to miss its time to the first one."""
    return arrived_s + LATE * ttft_s


def wait_for_others(due_s: Collection[float], slow: bool, now_s: float) -> bool:
    """Whether the requests of an instance wait for one another for too long: some for their first tokens, which are
    due then, or all for further ones, which are ``slow``.
    """
    return len(due_s) > 1 and (slow or min(due_s) <= now_s)


def queue_is_late(queued: int, instances: int, at_once: int, run_s: float | None, deadline_s: float) -> bool:
    """Whether the last request of a function's queue is expected to be late, where each instance has so many
    ``at_once``; nobody knows before one was answered.
    """
    return run_s is not None and (queued / instances / max(1, at_once) + 1.0) * run_s > deadline_s


def has_room(*, extras: int, most: int, loading: int, loads: int, coming: int, wanted: int, gpus: int) -> bool:
    """Whether a node that has so many ``extras`` has room for one more, and a GPU that nobody else wants. It has at
    ``most`` so many, and so many ``loads`` at the same time. Each of the ``wanted`` leases, and each extra that is
    ``coming``, takes a GPU.
    """
    return extras < most and loading < loads and gpus > coming + wanted


def beyond_share(instances: Sequence[tuple[int, Sequence[int]]]) -> list[Sequence[int]]:
    """Another instance serves, and is one of these: how many requests each has, and which of them have no token yet,
    oldest first. Each gives up the newest of those, as many as it has beyond its share.
    """
    share = -(-sum(count for count, _ in instances) // len(instances))
    return [waiting[max(0, len(waiting) - max(0, count - share)) :] for count, waiting in instances]
