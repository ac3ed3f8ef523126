"""Parts that messages of several processes are made of."""

from typing import Final, Literal

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages. Subclasses repeat ``frozen`` for type checkers and ``kw_only``, which is not inherited."""


class Lease(Message, frozen=True, kw_only=True):
    """The right of one instance to use one GPU for one request."""

    gpu: int
    epoch: int
    serial: int
    secret: int


WokenFrom = Literal["", "gpu", "peer", "host", "disk"]
"""The place of a model when a lease began: on the lease's GPU, on another, in host memory, in files. If in several
places, the last of these that had a part of it. "": not known.
"""

CONTROL_NBYTES: Final = 8

SCHEMA_NBYTES: Final = 16 << 10
"""Of what a function says of its requests and answers, in JSON, at most."""

CHUNK_NBYTES: Final = 64 << 10
"""Of a streamed answer in one message, at most."""

STREAM_WINDOW_NBYTES: Final = 256 << 10
"""Of a streamed answer, at most so much is sent before the client has taken what came before."""

TAKEN_NBYTES: Final = 64 << 10
"""Bytes taken by a client are reported in steps of so much, not for each token: the rest of the window is room enough
for a whole chunk.
"""

BATCH_NBYTES: Final = 256 << 10
"""Parts of several answers in one message, together at most."""

BATCH_PARTS: Final = 1024
"""And so many: a few of each request that an instance has at once."""

ENTRIES: Final = 256
"""In one message, at most, where a message has an entry for each function or owner."""

MESSAGE_BODY_NBYTES: Final = 768 << 10
"""Of a request or an answer that has no place in the arena, at most: of instances that have many requests at once, and
of functions' calls.
"""

INLINE_BODY_NBYTES: Final = 64 << 10
"""Of a request or an answer, up to this size, in the message; beyond, a copy through the arena is the cheaper one."""

SSE: Final = "text/event-stream"
RAW: Final = "application/octet-stream"
StreamKind = Literal["text/event-stream", "application/octet-stream"]
"""Content type of a streamed answer."""


class Arena(Message, frozen=True, kw_only=True):
    """Layout of an instance's arena, in bytes: ``[request | response | stream | control]``.

    The control area holds one little-endian word of 8 bytes, written by the router only: the last ``Run.request`` that
    it asked the instance to give up. A signal carries no number, so without it one could meet the next request.
    """

    request_nbytes: int
    response_nbytes: int
    stream_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.control_offset + CONTROL_NBYTES

    @property
    def control_offset(self) -> int:
        return self.request_nbytes + self.response_nbytes + self.stream_nbytes

    @property
    def stream_offset(self) -> int:
        return self.request_nbytes + self.response_nbytes


class StepTimes(Message, frozen=True, kw_only=True):
    """The time of a language model's step, as measured: any step, and more for each token of prompts in it, and for
    each sequence that gets a token. A step has ``step_tokens`` of prompts at most.
    """

    step_us: float
    prompt_token_us: float
    sequence_us: float
    step_tokens: int = 256  # of a runtime whose times were kept before it said so


class PromptsDue(Message, frozen=True, kw_only=True):
    """Sequences of one lease that have no token yet: ``tokens`` of their prompts are to be computed. The oldest has
    waited so long since the runtime received it.
    """

    serial: int
    tokens: int
    waited_us: int


class StepsDue(Message, frozen=True, kw_only=True):
    """The work of a runtime. ``decoding``: sequences that have had their first token."""

    prompts: list[PromptsDue]
    decoding: int


class JoinRule(Message, frozen=True, kw_only=True):
    """The rule by which a runtime decides which sequences of a lease join its batch, and when: their first tokens are
    wanted within so long. ``in_turn``: they join in turn with those of others, whatever is wanted.
    """

    ttft_us: int
    in_turn: bool = False


class EngineLoad(Message, frozen=True, kw_only=True):
    """The load of a language model's engine, and its KV memory in blocks: those that sequences ``used``, those that
    only hold beginnings of prompts (``idle``). ``preempted`` and ``reused_nbytes`` count since it started. So do
    ``gathered``: sequences that waited for others of their function, by why they began (rules/batching.py).
    """

    running: int
    waiting: int
    preempted: int
    blocks: int
    used: int
    idle: int
    block_nbytes: int
    reused_nbytes: int
    times: StepTimes | None = None  # as far as is known
    gathered: dict[str, int] = {}


class LlmSettings(Message, frozen=True, kw_only=True):
    """Of a function that is a language model. ``context``: the longest sequence in tokens, 0 for the model's own.
    ``ttft_ms`` and ``tpot_ms`` are wanted of the first token, and of each further one. ``convert``: its weights may be
    pickled. ``isolation``: whose functions its runtime may compute for. With a LoRA adapter, ``base`` is the function
    over which it was deployed, and ``backbone`` the ``content`` of the files that it has of that.
    ``generation_config``: whether its files say how it is sampled by default.
    """

    context: int = 0
    dtype: str = "auto"
    ttft_ms: int = 500
    tpot_ms: int = 60
    convert: bool = False
    isolation: str = "tenant"  # "tenant" | "function"
    base: str = ""
    backbone: str = ""
    generation_config: str = "auto"  # "auto" | "none"


class EmbeddingSettings(Message, frozen=True, kw_only=True):
    """Of a function that makes vectors of texts with a model. As in LlmSettings."""

    context: int = 0
    dtype: str = "auto"
    convert: bool = False


class FunctionSpec(Message, frozen=True, kw_only=True):
    """A deployed function, as the catalogue keeps it.

    Durations are in milliseconds. ``version`` counts successful deploys; ``snapshot`` names what was deployed, and
    ``entry`` the file in it that has ``load`` and ``handle``. ``content`` is equal where all files are.
    """

    name: str
    version: int
    entry: str
    snapshot: str
    tenant: str = "default"
    deadline_ms: int = 1000
    percentile: float = 98.0
    timeout_ms: int = 60_000
    load_timeout_ms: int = 300_000
    idempotent: bool = False
    max_queue: int = 256
    quota_nbytes: int = 1 << 30  # growth of the persistent set after load()
    stateless: bool = False  # any instance may answer any request: none changes what load() has made
    max_instances: int = 0  # of a stateless one, at the same time; 0: as many as there are GPUs
    llm: LlmSettings | None = None  # it is a language model: ``entry`` is its configuration
    embedding: EmbeddingSettings | None = None  # the same of one that makes embeddings; never both
    content: str = ""
    concurrency: int = 1  # requests that an instance has at once: with more, ``handle`` is a coroutine function
    batch: int = 0  # requests of one ``handle_batch``, at most; 0: one by one. Never both
    batch_wait_ms: int = 0
    env: tuple[tuple[str, str], ...] = ()  # variables of its instances; not secret
    secrets: tuple[str, ...] = ()  # names of its tenant's secrets, which its instances have as variables
    environment: str = ""  # the key of its own libraries
    network: bool = False  # its instances see the machine's
    options: dict[str, str | int | float | bool] | None = None  # what it was deployed with, flat; None: not known
    of_file: tuple[str, ...] = ()  # which of these are what ``dormouse.toml`` says
    note: str = ""  # of who has deployed it, for people
    calls: tuple[str, ...] = ()  # names of functions, of its tenant, that its requests may call
    eager: bool = False  # GPUs are given its operations one by one


class DeviceInfo(Message, frozen=True, kw_only=True):
    """The properties of a GPU that functions see through ``torch.cuda``."""

    name: str
    total_nbytes: int
    capability: tuple[int, int]
    multiprocessors: int
    cuda: str = ""  # version that the executor's PyTorch was built for; "": none, the GPU is emulated
    compiles: bool = False  # executors compile the graphs of `torch.compile`


class HeldBytes(Message, frozen=True, kw_only=True):
    """Bytes of one kind over time, which these owners have together had, in byte-milliseconds. ``parts``: how much each
    of them has used them; if none has, all the same.
    """

    kind: str
    owners: list[str]
    nbyte_ms: int
    parts: list[int] = []
