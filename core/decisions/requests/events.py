"""Events and actions of the router's policy: frozen values, no behaviour, no I/O.

A *request* here is a client's call, numbered by the shell. A *ticket* numbers one wish for a lease; it crosses to the
controller and to the instance as ``request``, and is never used twice, so that an answer to a withdrawn wish cannot be
taken for a later one's.
"""

from dataclasses import dataclass

from dormouse.schemas import messages as m

# --- events


@dataclass(frozen=True, slots=True)
class Arrived:
    """A whole request for a function; ``route``: the OpenAI route that it came by, if any."""

    request: int
    function: str
    route: str = ""
    call: tuple[str, int] | None = None  # of this instance's, by this number of its own


@dataclass(frozen=True, slots=True)
class CallOver:
    """It has its answer, or will have none."""

    instance: str
    number: int


@dataclass(frozen=True, slots=True)
class RequesterLeft:
    """The client has disconnected."""

    request: int


@dataclass(frozen=True, slots=True)
class ChunkTaken:
    """The client has taken so much more of a streamed answer: reported in steps of TAKEN_NBYTES or more."""

    request: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeployAsked:
    """Load this and serve it if it loads. ``version`` is its new version; 0: one more than the version served."""

    ask: int
    spec: m.FunctionSpec
    check: str = ""  # JSON: a request that it answers before it is served
    version: int = 0


@dataclass(frozen=True, slots=True)
class Shared:
    """So many per cent of a function's requests go to this version, which is served beside: that is stored durably."""

    name: str
    share: int


@dataclass(frozen=True, slots=True)
class RemoveAsked:
    ask: int
    name: str


@dataclass(frozen=True, slots=True)
class FromController:
    message: m.ControllerToRouter


@dataclass(frozen=True, slots=True)
class FromInstance:
    instance: str
    message: m.InstanceToRouter


@dataclass(frozen=True, slots=True)
class RestartAsked:
    ask: int
    name: str


@dataclass(frozen=True, slots=True)
class Blamed:
    """An executor has died of this instance's commands."""

    instance: str
    text: str


@dataclass(frozen=True, slots=True)
class Garbage:
    """An instance sent an invalid message, or does not read its messages."""

    instance: str
    text: str


@dataclass(frozen=True, slots=True)
class InstanceExited:
    """An instance or a session has exited. ``text`` describes it, for people; ``failure`` is the failure of its request
    or load, if there is a more exact one.
    """

    instance: str
    text: str
    failure: m.Failure | None = None


@dataclass(frozen=True, slots=True)
class ForkingChanged:
    """Whether instances can be forked: a warm zygote, a device and a store. ``gpu_nbytes`` is of the smallest GPU.
    ``models_exposed``: why language models of several tenants cannot be kept apart; "" if they can.
    """

    possible: bool
    gpu_nbytes: int = 0
    gpus: int = 1
    models_exposed: str = ""


@dataclass(frozen=True, slots=True)
class ZygoteLost:
    """All forked instances have died with it; no Exited will come."""


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A `dormouse run` process has an instance's identity and no function."""

    instance: str
    name: str


@dataclass(frozen=True, slots=True)
class Printed:
    """A loading instance has printed something."""

    instance: str


@dataclass(frozen=True, slots=True)
class Tick:
    """``next_deadline_s`` has come."""


Event = (
    Arrived
    | CallOver
    | RequesterLeft
    | ChunkTaken
    | DeployAsked
    | RemoveAsked
    | Shared
    | RestartAsked
    | Blamed
    | FromController
    | FromInstance
    | Garbage
    | InstanceExited
    | ForkingChanged
    | ZygoteLost
    | SessionOpened
    | Printed
    | Tick
)

# --- actions


@dataclass(frozen=True, slots=True)
class Timing:
    """A request's times, in seconds: in its function's queue, waiting for a GPU, in the instance. ``first``: for a
    language model, the part of the last that it took to the first token. ``source`` is the place of the model; until
    all of it had come to the GPU, ``copy_s`` of ``run_s`` passed, if that is known.
    """

    queue_s: float = 0.0
    wait_s: float = 0.0
    run_s: float = 0.0
    wake_nbytes: int = 0
    first: m.AnswerBegun | None = None
    source: m.WokenFrom = ""
    copy_s: float | None = None
    began: bool = False  # it was handed to an instance
    version: int = 0  # of the function that this instance has
    gpu: int = -1  # of its lease, or of its language model's seat


@dataclass(frozen=True, slots=True)
class BeginStream:
    """An answer comes in parts; the first one follows. ``timing``: the request's waits until then."""

    request: int
    kind: m.StreamKind
    timing: Timing
    head: m.AnswerHead | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """The next parts of streamed answers, by request: a separate action for each would cost more."""

    parts: list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class Answer:
    """The request's fate: this body, or ``nbytes`` of the instance's response area; after parts, the end of the stream.
    Copy before the next action. ``kind`` is its content type, "" for JSON.
    """

    request: int
    instance: str
    body: bytes | None
    nbytes: int
    timing: Timing
    tokens: m.TokenCounts | None = None  # of a language model's
    kind: str = ""
    head: m.AnswerHead | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """The request's fate: an error."""

    request: int
    failure: m.Failure
    timing: Timing


@dataclass(frozen=True, slots=True)
class Drop:
    """The request's fate: it has no client any more."""

    request: int
    timing: Timing = Timing()


@dataclass(frozen=True, slots=True)
class Handover:
    """Give the request to the instance with its lease; a language model's has none."""

    request: int
    instance: str
    ticket: int
    lease: m.Lease | None
    route: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """Make the instance's directory and arena, notify everyone, fork."""

    instance: str
    spec: m.FunctionSpec
    check: str = ""


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to a forked instance (an Exited follows); a session's socket is closed, after a message with a reason."""

    instance: str
    why: str = ""  # completes "the instance ..."


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Ask the instance to give up the request of this ticket (SIGUSR1)."""

    instance: str
    ticket: int


@dataclass(frozen=True, slots=True)
class Clean:
    """The process is gone: remove everything that was its own. ``how`` completes "the instance ..."."""

    instance: str
    how: str


@dataclass(frozen=True, slots=True)
class Send:
    instance: str
    message: m.RouterToInstance


@dataclass(frozen=True, slots=True)
class Tell:
    """A message to the controller."""

    message: m.RouterToController


@dataclass(frozen=True, slots=True)
class BeginCall:
    """Submit the call of this instance's request to another function, and send it the answer. CallOver follows."""

    instance: str
    number: int
    caller: int
    spec: m.FunctionSpec  # of the caller
    call: m.CallFunction


@dataclass(frozen=True, slots=True)
class RefuseCall:
    """Notify an instance that its call is not permitted."""

    instance: str
    number: int
    failure: m.Failure


@dataclass(frozen=True, slots=True)
class Settled:
    """Answer to DeployAsked, RemoveAsked or RestartAsked."""

    ask: int
    spec: m.FunctionSpec | None
    failure: m.Failure | None
    warning: str = ""  # of a deploy that went well
    schema: bytes = b""  # likewise: its instance's description of its requests


@dataclass(frozen=True, slots=True)
class Discard:
    """This version will not be served, nor will its function if it was: its snapshot is not needed again, once no
    instance has it. A version that another one replaces is kept for a while.
    """

    spec: m.FunctionSpec


@dataclass(frozen=True, slots=True)
class NewVersion:
    """This is served from now on, under its name."""

    spec: m.FunctionSpec


@dataclass(frozen=True, slots=True)
class LogNote:
    """Something of a function that its author should read in its log."""

    name: str
    text: str


Action = (
    BeginStream
    | Pass
    | Answer
    | Fail
    | Drop
    | Handover
    | Start
    | Kill
    | Interrupt
    | Clean
    | Send
    | Tell
    | Settled
    | Discard
    | NewVersion
    | LogNote
    | BeginCall
    | RefuseCall
)
