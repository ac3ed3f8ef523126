"""Messages between an executor and the runtime of a language model, and the process that forks runtimes.

The executor passes messages between a runtime and the instance that it computes for on without looking at them:
`ForRuntime`, `FromRuntime` (llm.py). A packet holds 64 KiB, so long lists come in several messages.
"""

from dormouse.schemas.messages.shared import EngineLoad, JoinRule, Message, StepsDue


class GranuleAt(Message, frozen=True, kw_only=True):
    """``nbytes`` of the pool's memory from ``physical`` on appear at ``offset`` of its address space."""

    offset: int
    physical: int
    nbytes: int


class StorageAt(Message, frozen=True, kw_only=True):
    """A storage of the instance lies at ``offset`` of the pool's address space, in a segment."""

    storage: int
    segment: int
    offset: int
    nbytes: int


# --- executor -> runtime


class SeatGiven(Message, frozen=True, kw_only=True, tag=1):
    """The place of this lease's model, in granules that came before. Others' may lie there already. ``missing``:
    segments that are on their way. With ``refused``, there is none. ``joins`` is the lease's, as in Wake.
    """

    serial: int
    storages: list[StorageAt]
    missing: list[int]
    refused: str = ""
    joins: JoinRule | None = None


class SegmentsCame(Message, frozen=True, kw_only=True, tag=2):
    """Segments that were missing are there; or will not come, with ``lost``."""

    segments: list[int]
    lost: bool = False


class SeatEnds(Message, frozen=True, kw_only=True, tag=3):
    """Unmap everything, KV included, and send SeatLeft. Sequences go on with the next seat."""


class TurnBegins(Message, frozen=True, kw_only=True, tag=4):
    """Compute steps. For so long others wait for the GPU, or are likely to: these are to be brief."""

    brief_ms: int = 0
    lent: bool = False  # one step in another's turn: for KV that there is no room for, it waits for its own


class TurnEnds(Message, frozen=True, kw_only=True, tag=5):
    """Compute no further step, but the first of this turn, and say TurnGivenBack."""


class KvGiven(Message, frozen=True, kw_only=True, tag=6):
    """The answer to KvWanted: extents ``(number, offset)``, in granules that came before; none if there is no room."""

    extents: list[tuple[int, int]]


class GranulesGiven(Message, frozen=True, kw_only=True, tag=8):
    """With a descriptor for each: map them."""

    granules: list[GranuleAt]
    writable: bool


class ForRuntime(Message, frozen=True, kw_only=True, tag=7):
    """From the instance that has this lease, an `InstanceToRuntime`. Its numbers are its own."""

    data: bytes
    serial: int = 0


class KvReclaim(Message, frozen=True, kw_only=True, tag=9):
    """Others need room: give back extents that no running sequence has a part of, about so many bytes, and say
    KvReturned.
    """

    nbytes: int


class MemberLeaves(Message, frozen=True, kw_only=True, tag=10):
    """This lease is over: nothing more is computed for it. With offsets of ``granules``, which no other lease of the
    runtime has: unmap them, and say MemberLeft. If it ``stays``, it is only to have no seat: its sequences wait, and
    MemberLeft says that no step has them.
    """

    serial: int
    granules: list[int] = []
    stays: bool = False


ExecutorToRuntime = (
    SeatGiven
    | SegmentsCame
    | SeatEnds
    | TurnBegins
    | TurnEnds
    | KvGiven
    | GranulesGiven
    | ForRuntime
    | KvReclaim
    | MemberLeaves
)


# --- runtime -> executor


class IdleKv(Message, frozen=True, kw_only=True):
    """KV in extents that no running sequence has a part of. ``recompute_us``: what giving it up is expected to cost,
    the time to compute it again by how likely it is asked for.
    """

    nbytes: int
    recompute_us: int


class SeatLeft(Message, frozen=True, kw_only=True, tag=1):
    """Nothing of the pool is mapped any more."""


class StepShare(Message, frozen=True, kw_only=True):
    """A lease's share of a step: ``tokens`` that were computed, and of its sequences, those of ``prompt`` that have
    their KV now for the first time, and tokens ``made``. ``kv_blocks``: that its sequences have now.
    """

    serial: int
    tokens: int
    prompt: int = 0
    made: int = 0
    kv_blocks: int = 0


class Stepped(Message, frozen=True, kw_only=True, tag=3):
    """A step is over, or there is nothing to do: from now on the turn may be another's. ``idle`` as in KvReturned."""

    busy_us: int
    idle: IdleKv | None = None
    shares: list[StepShare] = []


class TurnGivenBack(Message, frozen=True, kw_only=True, tag=2):
    """``wants``: there is more to compute: ``due``. ``stepped``: the turn's last step, if that was not told."""

    wants: bool
    due: StepsDue | None = None
    stepped: Stepped | None = None


class StepsWanted(Message, frozen=True, kw_only=True, tag=4):
    """There is something to compute, and no turn. Said again when a first prompt has come to what is due."""

    due: StepsDue | None = None


class KvWanted(Message, frozen=True, kw_only=True, tag=5):
    """Room for so many extents of KV: without them somebody's sequence stands still. ``wish``: for as many more if
    nobody has to do without anything for them.
    """

    extents: int
    nbytes: int
    wish: int = 0


class KvReturned(Message, frozen=True, kw_only=True, tag=6):
    """These are unmapped. ``idle``: what could be given back, if that has changed; also the answer to KvReclaim."""

    extents: list[int]
    idle: IdleKv | None = None


class FromRuntime(Message, frozen=True, kw_only=True, tag=7):
    """For the instance that has this lease, a `RuntimeToInstance`."""

    data: bytes
    serial: int = 0


class LoadChanged(Message, frozen=True, kw_only=True, tag=8):
    """At most a few times a second while it computes, and when it has nothing to do. ``busy``: leases that have
    sequences.
    """

    load: EngineLoad
    busy: list[int] = []


class MemberLeft(Message, frozen=True, kw_only=True, tag=9):
    """All that this lease alone had is unmapped."""

    serial: int


class StepWaits(Message, frozen=True, kw_only=True, tag=10):
    """In the middle of a step, and for a while already: for weights that are on their way. Until some have come."""


RuntimeToExecutor = (
    SeatLeft
    | TurnGivenBack
    | Stepped
    | StepsWanted
    | KvWanted
    | KvReturned
    | FromRuntime
    | LoadChanged
    | MemberLeft
    | StepWaits
)


# --- executor -> the process that forks its runtimes, and back


class Batching(Message, frozen=True, kw_only=True):
    """For how long streams wait for others of their function, as in schemas/policy.py."""

    kind: str = "now"
    size: int = 1
    delay_ms: int = 0


class SpawnRuntime(Message, frozen=True, kw_only=True, tag=1):
    """With one descriptor: the runtime's end of its connection."""

    number: int
    uid: int
    address_nbytes: int
    threads: int
    gpu: int = -1  # the CUDA device with this number; -1: emulated
    activation_nbytes: int = 0  # on that device, at most
    batching: Batching = Batching()


ToRuntimeZygote = SpawnRuntime


class RuntimesWarm(Message, frozen=True, kw_only=True, tag=1):
    """It can fork."""


class RuntimeSpawned(Message, frozen=True, kw_only=True, tag=2):
    """With one descriptor, of the process: it can be read when that is gone."""

    number: int


FromRuntimeZygote = RuntimesWarm | RuntimeSpawned
