"""Messages to the router: from the controller, instances, zygotes and processes that want to be a session."""

from dormouse.schemas.messages.shared import DeviceInfo, FunctionSpec, Lease, Message, StreamKind, WokenFrom


class Failure(Message, frozen=True, kw_only=True):
    """An error as it crosses processes: ``code`` and ``status`` as in schemas/errors.py, ``text`` for a person."""

    code: str
    status: int
    text: str
    retryable: bool = False
    param: str = ""  # the field of the request that is wrong
    whole: str = ""  # what the function's log has of it, if that is more: for who may read that
    own: str = ""  # the function's own code
    headers: dict[str, str] = {}  # and headers


class Catalogue(Message, frozen=True, kw_only=True, tag=1):
    """All functions; sent once per router start. ``held``: why some of them are not to be started, by name.
    ``traffic``: the share of each that is a version beside another, in per cent.
    """

    functions: list[FunctionSpec]
    held: dict[str, str] = {}
    traffic: dict[str, int] = {}


class Kept(Message, frozen=True, kw_only=True, tag=2):
    """The deploy or removal of this name is durable. ``warning``: advice for the caller who deploys."""

    name: str
    warning: str = ""


class Granted(Message, frozen=True, kw_only=True, tag=3):
    """``wake_nbytes`` is what must be copied first; 0 if the model was already there. ``source`` is where that is, as
    far as the scheduler knows, which does not know of files: Awoken says more. ``requests``: of a batch that waits,
    the first so many are to be in it.
    """

    request: int
    lease: Lease
    wake_nbytes: int
    source: WokenFrom = ""
    requests: int = 0


class Refused(Message, frozen=True, kw_only=True, tag=4):
    request: int
    failure: Failure


class LeaseLost(Message, frozen=True, kw_only=True, tag=5):
    """The executor of a granted lease died."""

    request: int


class Wrote(Message, frozen=True, kw_only=True, tag=12):
    """A lease of this instance has changed its model, and that was kept: ``wrote`` of Done."""

    instance: str


class Status(Message, frozen=True, kw_only=True, tag=7):
    """Answer to AskStatus and AskPolicy: JSON for people."""

    query: int
    json: bytes
    failure: Failure | None = None  # why nothing was changed


class Device(Message, frozen=True, kw_only=True, tag=8):
    """The device that functions shall see as ``cuda:0``: the smallest of the node's GPUs. Sent when the first executor
    is up, and on change.
    """

    info: DeviceInfo


class InstanceViolated(Message, frozen=True, kw_only=True, tag=9):
    """The instance broke the command stream's protocol: end it; its request fails with ``violation``."""

    instance: str
    text: str


class EndInstance(Message, frozen=True, kw_only=True, tag=10):
    """This instance cannot go on: end it; its request, or what it was loaded for, fails with this.

    ``unkept`` names the function if this is the answer to its Deployed: nothing was kept and no Kept follows.
    """

    instance: str
    failure: Failure
    unkept: str = ""


class NotRemoved(Message, frozen=True, kw_only=True, tag=11):
    """The answer to Removed when the catalogue cannot be written: the function stays."""

    name: str
    text: str


class Measures(Message, frozen=True, kw_only=True, tag=15):
    """Answer to AskMeasures: an encoded NodeMeasures, which the router hands on as it is."""

    query: int
    measures: bytes


class TokensUsed(Message, frozen=True, kw_only=True, tag=13):
    """Tokens that language models have computed since this was last said, by tenant; of those that have a limit."""

    tenants: list[tuple[str, int]]


class OverShare(Message, frozen=True, kw_only=True, tag=14):
    """Tenants that are over their share of the GPUs' time: while others wait, theirs come last. All there are now."""

    tenants: list[str]


class Awoken(Message, frozen=True, kw_only=True, tag=16):
    """All that a granted lease missed has come, so long after the lease began. The request may have been answered."""

    request: int
    wake_us: int
    source: WokenFrom


class GpusDrained(Message, frozen=True, kw_only=True, tag=17):
    """GPUs that are drained, or will be when what runs there is over: all there are now. ``left``: how many others the
    node has.
    """

    gpus: list[int]
    left: int


ControllerToRouter = (
    InstanceViolated
    | Catalogue
    | Kept
    | Granted
    | Refused
    | LeaseLost
    | Wrote
    | Status
    | Device
    | EndInstance
    | NotRemoved
    | TokensUsed
    | OverShare
    | Measures
    | Awoken
    | GpusDrained
)


class Importing(Message, frozen=True, kw_only=True, tag=1):
    """Confinement is done; the function's module starts importing."""

    confinement: str


class NeedLease(Message, frozen=True, kw_only=True, tag=2):
    """The instance wants to compute outside a request (``load()``, `dormouse run`)."""

    version: int


class Loaded(Message, frozen=True, kw_only=True, tag=3):
    """``warning`` is for who deploys it. ``schema``: what it says of its requests and answers, a JSON object of at most
    SCHEMA_NBYTES; b"" if it says nothing.
    """

    version: int
    nbytes: int
    warning: str = ""
    schema: bytes = b""


class LoadFailed(Message, frozen=True, kw_only=True, tag=4):
    code: str
    text: str


class TokenCounts(Message, frozen=True, kw_only=True):
    """Of an answer of a language model. ``reused``: tokens of the prompt whose KV was there. ``tpot_us``: time of each
    token after the first; 0 if there is none.
    """

    prompt: int
    made: int
    reused: int
    tpot_us: int


class AnswerHead(Message, frozen=True, kw_only=True):
    """The status and headers that a function sets for its answer (core/answerhead.py); ``code`` of an error."""

    status: int
    headers: dict[str, str] = {}
    code: str = ""


class Returned(Message, frozen=True, kw_only=True, tag=5):
    """The answer: ``body`` if it is small, else ``nbytes`` of the response area; after chunks, that they were all.
    ``used`` as in Answered. ``kind`` is its content type, "" for JSON.
    """

    request: int
    body: bytes | None
    nbytes: int
    used: bool = True
    tokens: TokenCounts | None = None
    kind: str = ""
    head: AnswerHead | None = None


class Raised(Message, frozen=True, kw_only=True, tag=6):
    """The user's code raised. ``code`` is "function_raised", "out_of_memory", "executor_lost", "bad_response",
    "cancelled", "model_damaged", "wake_failed", "seat_lost". ``used`` as in Answered. Of "function_refused", an error
    that is meant for who has asked, there is a ``head``.
    """

    request: int
    code: str
    text: str
    used: bool = True
    param: str = ""
    head: AnswerHead | None = None


class AnswerPart(Message, frozen=True, kw_only=True, tag=9):
    """The next part of an answer, at most CHUNK_NBYTES; Returned or Raised ends it. The first one says its ``kind``
    and ``head``.
    """

    request: int
    body: bytes
    kind: StreamKind | None = None
    head: AnswerHead | None = None


class AnswerParts(Message, frozen=True, kw_only=True, tag=10):
    """Of several answers of one instance, as a step of a language model makes them: together at most BATCH_NBYTES, and
    BATCH_PARTS of them.
    """

    parts: list[AnswerPart]


class LeaseEnded(Message, frozen=True, kw_only=True, tag=7):
    """A lease taken with NeedLease was given back; ``version`` is the newest manifest version it knows. Of a batch:
    how many requests it was for in the end (``taken``), and how many handle_batch() had in its only call (``together``;
    0: in none, or they were tried again).
    """

    serial: int
    version: int
    taken: int = 0
    together: int = 0


class Spoiled(Message, frozen=True, kw_only=True, tag=8):
    """The instance keeps something that can never be used again, in these words: it is to be replaced once it has
    answered, which it does next.
    """

    text: str


class LoadProgress(Message, frozen=True, kw_only=True, tag=12):
    """``load()`` has brought something to the node since this was last said; at most once a second."""


class CallFunction(Message, frozen=True, kw_only=True, tag=13):
    """The code that answers ``request`` asks another function: CallAnswered follows, by this ``number``, unless that
    request is over. The instance numbers its calls. ``kind`` and ``accept`` as in Run; ``body`` has at most
    MESSAGE_BODY_NBYTES.
    """

    number: int
    request: int
    function: str
    body: bytes
    kind: str = ""
    accept: str = ""


class LeaveCall(Message, frozen=True, kw_only=True, tag=14):
    """Nobody waits for the answer to this call any more; it may have been sent."""

    number: int


class AnswerBegun(Message, frozen=True, kw_only=True, tag=11):
    """The first token of this answer of a language model has been made; it may not be sent for a while. The time since
    Run is split in parts: waiting for others (a GPU, a step), until a runtime was ready, in its steps until weights had
    come, and in all else of them.
    """

    request: int
    queue_us: int = 0
    runtime_us: int = 0
    wake_us: int = 0
    prefill_us: int = 0


InstanceToRouter = (
    Importing
    | NeedLease
    | Loaded
    | LoadFailed
    | Returned
    | Raised
    | AnswerPart
    | AnswerParts
    | LeaseEnded
    | Spoiled
    | AnswerBegun
    | LoadProgress
    | CallFunction
    | LeaveCall
)


class Forked(Message, frozen=True, kw_only=True, tag=1):
    instance: str
    pid: int


class Exited(Message, frozen=True, kw_only=True, tag=2):
    """``status`` as in os.waitstatus_to_exitcode: negative is a signal. ``limit`` is that of the sandbox for which
    the kernel ended it ("memory"), or "".
    """

    instance: str
    pid: int
    status: int
    limit: str = ""


class ForkFailed(Message, frozen=True, kw_only=True, tag=3):
    instance: str
    text: str


class ZygoteReady(Message, frozen=True, kw_only=True, tag=4):
    """The interpreter is warm. ``confinement`` is the level that instances get on this host, for `doctor`.
    ``modules``: what it has imported, without what is below packages and without Python's own.
    """

    confinement: str
    python: str
    torch: str
    modules: list[str] = []


FromZygote = Forked | Exited | ForkFailed | ZygoteReady


class AttachSession(Message, frozen=True, kw_only=True, tag=1):
    """`dormouse run` to router: give me an instance's identity. The socket's end of file is the session's end."""

    name: str
    pid: int
