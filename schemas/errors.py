"""Every error of Dormouse, ordered by how much of the system it takes with it.

::

    DormouseError
    ├─ CallError            one call fails, all else goes on
    │  ├─ CallRefused         nothing was run: unknown function, queue full, body too large, model too large
    │  ├─ CallTimedOut        the time limit passed; the instance was replaced
    │  ├─ CallCancelled       the client went away
    │  ├─ FunctionRaised      the user's code raised; carries its traceback as text
    │  ├─ SandboxDied         the instance died in the middle of the request
    │  └─ ExecutorLost        the GPU's process died in the middle of the request
    ├─ PeerLost             another process is gone; the calls it held fail, the system goes on
    ├─ ProcessFailed        this process must exit: an invariant is broken or a device can no longer be trusted
    └─ ProtocolError        a message that must not be
       ├─ LocalProtocolError  we were about to send it: our bug
       └─ RemoteProtocolError they sent it: the peer is dropped
    ConfigError             at start-up only

A user's exception crosses processes as its type's name and text, never as an object.
"""

from typing import ClassVar


class DormouseError(Exception):
    """Base of all errors below. Safe to retry: see the subclass."""


class CallError(DormouseError):
    """One call failed. ``code`` is stable and is what clients should test.

    Attributes:
        code: machine-readable name of the failure.
        status: HTTP status.
        retryable: whether the same call may succeed if it is sent again unchanged.
    """

    code: ClassVar[str] = "call_failed"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False


class CallRefused(CallError):
    """Nothing was run. Retry only after doing what the message says."""

    code = "refused"
    status = 400


class CallTimedOut(CallError):
    """The function did not answer within its time limit; its instance was replaced. A retry may run it twice."""

    code = "timed_out"
    status = 504


class CallCancelled(CallError):
    """The client went away. Nobody is left to retry."""

    code = "cancelled"
    status = 499


class FunctionRaised(CallError):
    """The user's ``handle`` raised. A retry runs the same code again."""

    code = "function_raised"
    status = 500


class SandboxDied(CallError):
    """The instance died in the middle of the request; a new one is loading. Retry if the function has no outside
    effects.
    """

    code = "sandbox_died"
    status = 502
    retryable = True


class ExecutorLost(CallError):
    """The GPU's process died in the middle of the request. Retry if the function has no outside effects."""

    code = "executor_lost"
    status = 503
    retryable = True


class PeerLost(DormouseError):
    """Another process of the node is gone. A retry is safe once it is back."""


class ProcessFailed(DormouseError):
    """This process must exit and be replaced; carries the story of its last events. Never retried in place."""


class ProtocolError(DormouseError):
    """A message that must not be. Never retried."""


class LocalProtocolError(ProtocolError):
    """We were about to send it."""


class RemoteProtocolError(ProtocolError):
    """A peer sent it; the peer is dropped."""


class ConfigError(DormouseError):
    """The configuration cannot be used; the message names the key and its line. Never retried."""
