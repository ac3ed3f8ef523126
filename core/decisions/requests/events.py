"""What the router's policy is told and what it orders: frozen values, no behaviour, no I/O.

A *request* here is a client's call, numbered by the shell. A *ticket* numbers one wish for a lease; it is what crosses
to the controller and to the instance as ``request``, and is never used twice, so that an answer to a withdrawn wish
cannot be taken for a later one's.
"""

from dataclasses import dataclass

from dormouse.schemas import messages as m

# --- events


@dataclass(frozen=True, slots=True)
class Arrived:
    """A whole request for a function; ``route``: by which of OpenAI's routes, if by one."""

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
    """The client is gone."""

    request: int


@dataclass(frozen=True, slots=True)
class ChunkTaken:
    """The client has taken so much more of a streamed answer: it is told in steps of TAKEN_NBYTES or more."""

    request: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeployAsked:
    """Load this and serve it if it loads. ``version`` is what it becomes; 0: one more than what is served."""

    ask: int
    spec: m.FunctionSpec
    check: str = ""  # JSON: a request that it answers before it is served
    version: int = 0


@dataclass(frozen=True, slots=True)
class Shared:
    """So many per cent of a function's requests go to this version, which is served beside: that is durable."""

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
    """An instance sent what must not be, or does not read what it is sent."""

    instance: str
    text: str


@dataclass(frozen=True, slots=True)
class InstanceExited:
    """Or a session has. ``text`` says how, for people; ``failure`` what its request or load fails with, if there is a
    better word.
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
    """An instance that loads has printed something."""

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
    """Where a request's time went, in seconds: in its function's queue, waiting for a GPU, in the instance. ``first``
    says of a language model's what of the last it took to the first token. ``source`` is where the model was; until it
    had all come to the GPU, ``copy_s`` of ``run_s`` passed, if that is known.
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
    """An answer comes in parts; the first one follows. ``timing``: what the request waited until then."""

    request: int
    kind: m.StreamKind
    timing: Timing
    head: m.AnswerHead | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """The next parts of streamed answers, by request: an action of its own for each would cost more than it does."""

    parts: list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class Answer:
    """The request's fate: this body, or ``nbytes`` of the instance's response area; after parts, that they were all.
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
    """The request's fate: nobody is left to answer."""

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
    """Make the instance's directory and arena, tell everyone, fork."""

    instance: str
    spec: m.FunctionSpec
    check: str = ""


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to a forked instance (an Exited follows); a session's socket is closed, after a word of why."""

    instance: str
    why: str = ""  # completes "the instance ..."


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Ask the instance to give up the request of this ticket (SIGUSR1)."""

    instance: str
    ticket: int


@dataclass(frozen=True, slots=True)
class Clean:
    """The process is gone: remove all that was its own. ``how`` completes "the instance ..."."""

    instance: str
    how: str


@dataclass(frozen=True, slots=True)
class Send:
    instance: str
    message: m.RouterToInstance


@dataclass(frozen=True, slots=True)
class Tell:
    """To the controller."""

    message: m.RouterToController


@dataclass(frozen=True, slots=True)
class BeginCall:
    """Submit what this request of an instance asks of another function, and tell it the answer. CallOver follows."""

    instance: str
    number: int
    caller: int
    spec: m.FunctionSpec  # of who calls
    call: m.CallFunction


@dataclass(frozen=True, slots=True)
class RefuseCall:
    """Tell an instance that what it asks is not to be."""

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
    schema: bytes = b""  # likewise: what its instance says of itself


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
