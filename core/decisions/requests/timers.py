"""The timers of the router's policy: frozen values, no behaviour, no I/O.

A timer is never taken back. If its subject is gone when it is due, nothing happens.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WaitEnds:
    """A request that does not run by then has waited too long."""

    request: int


@dataclass(frozen=True, slots=True)
class RunEnds:
    """The time of the request that runs with this ticket is over."""

    ticket: int


@dataclass(frozen=True, slots=True)
class LoadEnds:
    """A loading instance that has shown no progress for its time limit by then has used it up."""

    instance: str


@dataclass(frozen=True, slots=True)
class AbandonedGoesOn:
    """Look again at a request without a client: does it keep a GPU from others?"""

    instance: str
    ticket: int


@dataclass(frozen=True, slots=True)
class StopEnds:
    """An instance that still has this ticket did not give it up when it was told to."""

    instance: str
    ticket: int


@dataclass(frozen=True, slots=True)
class ExtraIdles:
    """Look again at an extra instance: it may have had nothing to do for long enough."""

    instance: str


@dataclass(frozen=True, slots=True)
class ExitEnds:
    """An instance that was let go should be gone by now."""

    instance: str


@dataclass(frozen=True, slots=True)
class RetryDue:
    """The pause before another attempt to start an instance is over; those are looked at after every event."""


@dataclass(frozen=True, slots=True)
class FirstTokenDue:
    """A language model's request with this ticket that has no token yet may be late: is another instance called for?"""

    ticket: int


Timer = WaitEnds | RunEnds | LoadEnds | AbandonedGoesOn | StopEnds | ExtraIdles | ExitEnds | RetryDue | FirstTokenDue
