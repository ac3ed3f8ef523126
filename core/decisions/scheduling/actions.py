"""Actions of the scheduler: a closed union of frozen data. No behaviour."""

import msgspec

from dormouse.schemas.messages import Failure, Lease


class _Action(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


class WakeOn(_Action, frozen=True):
    """Begin a lease: tell the executor, and at the same time the router.

    ``peers``, ``activation_nbytes`` and ``over`` as in Wake. ``wake_nbytes`` are the missing bytes by the executor's
    last report. ``expected_s``: until the first token of a language model, if that has chosen the GPU. ``requests``:
    the number of requests of a batch that it serves, the first ones.
    """

    request: int
    lease: Lease
    instance: str
    version: int
    peers: tuple[int, ...]
    activation_nbytes: int
    wake_nbytes: int
    over: tuple[int, ...] = ()
    expected_s: float = 0.0
    requests: int = 0


class PauseOn(_Action, frozen=True):
    """Take this lease's turn; it keeps its seat."""

    gpu: int
    serial: int


class TurnOn(_Action, frozen=True):
    """Give this lease its turn again. ``why``, of language models, is margins.py's."""

    gpu: int
    serial: int
    why: str = ""
    margin_s: float = 0.0


class OverOn(_Action, frozen=True):
    """These leases were ended by their instances without a command."""

    gpu: int
    serials: tuple[int, ...]


class RefuseAsk(_Action, frozen=True):
    request: int
    failure: Failure


class LoseLease(_Action, frozen=True):
    """The executor of a granted lease died."""

    request: int


class FinishLease(_Action, frozen=True):
    """A lease has ended that was not taken away. ``wrote``: a request has changed its instance's model, as in Done."""

    request: int
    instance: str
    gpu_us: int
    copied_nbytes: int
    wrote: bool = False


class RevokeOn(_Action, frozen=True):
    gpu: int
    serial: int


class ForgetInstance(_Action, frozen=True):
    """Notify every executor and the store."""

    instance: str


class KillExecutor(_Action, frozen=True):
    gpu: int
    epoch: int
    text: str


class RetireExecutor(_Action, frozen=True):
    """Its leases are over, or have had long enough: let it end by itself."""

    gpu: int
    epoch: int


class DismissExecutor(_Action, frozen=True):
    """Its GPU is drained, and no lease is there: its executor, if any, is to end, and none is to be started."""

    gpu: int


class WantExecutor(_Action, frozen=True):
    """Its GPU is not drained any more: it is to have one, if it has none."""

    gpu: int


class DrainOn(_Action, frozen=True):
    """Seats of language models end there as soon as they rest, or not any more."""

    gpu: int
    on: bool


class PreloadOn(_Action, frozen=True):
    """Copy this model, of which ``nbytes`` are missing by the executor's last report, without a lease. The reason: it
    is asked for ``rate_s`` times a second, and each request would wait ``saved_s`` for it.
    """

    gpu: int
    instance: str
    version: int
    peers: tuple[int, ...]
    nbytes: int
    rate_s: float
    saved_s: float


class StopPreloadOn(_Action, frozen=True):
    """Other copies need the link."""

    gpu: int


Action = (
    WakeOn
    | PauseOn
    | TurnOn
    | OverOn
    | RefuseAsk
    | LoseLease
    | FinishLease
    | RevokeOn
    | ForgetInstance
    | KillExecutor
    | RetireExecutor
    | PreloadOn
    | StopPreloadOn
    | DismissExecutor
    | WantExecutor
    | DrainOn
)
