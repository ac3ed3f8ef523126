"""Messages between the instance of a language model and its executor and, through that, the runtime that computes for
it.

Tokens are numbers of the model's vocabulary.
"""

from dormouse.schemas.llm import AdapterSpec, DecoderSpec
from dormouse.schemas.messages.shared import Message

# --- instance -> executor, on the endpoint of an instance that serves a language model


class ToRuntime(Message, frozen=True, kw_only=True, tag=1):
    """An `InstanceToRuntime`, under this lease."""

    serial: int
    data: bytes


LlmToExecutor = ToRuntime  # 2 was LeaveSeat


# --- executor -> instance


class OfRuntime(Message, frozen=True, kw_only=True, tag=1):
    """A `RuntimeToInstance`, under this lease."""

    serial: int
    data: bytes


class SeatOver(Message, frozen=True, kw_only=True, tag=2):
    """The lease is over, and with it all that its runtime had: it is to be asked for anew. ``text``: why, if that would
    not help. ``unneeded``: because its runtime had no sequence.
    """

    serial: int
    text: str = ""
    unneeded: bool = False


ExecutorToLlm = OfRuntime | SeatOver


# --- instance -> runtime


class WeightAt(Message, frozen=True, kw_only=True):
    """A parameter by its name in the model's files: ``offset`` bytes into a storage, contiguous."""

    name: str
    storage: int
    offset: int
    shape: list[int]


class OpenModel(Message, frozen=True, kw_only=True, tag=1):
    """The model that is served; its parameters follow, so many. With an ``adapter``, whose tensors are among them:
    schemas/llm.py says how they are called, and how they lie. Of a large one so many ``parts`` follow, too.
    """

    spec: DecoderSpec
    weights: int
    adapter: AdapterSpec | None = None
    parts: int = 0


class AdapterPart(Message, frozen=True, kw_only=True, tag=6):
    """Further parts of an adapter."""

    adapter: AdapterSpec


class Weights(Message, frozen=True, kw_only=True, tag=2):
    weights: list[WeightAt]


class Submit(Message, frozen=True, kw_only=True, tag=3):
    """A sequence. ``tokens`` are its next ones; ``more`` if others follow in another Submit of the same number. The
    last one counts for all else: ``prompt`` tokens are no output, ``limit`` tokens are the most in all, ``stops`` end
    it. With ``masked``, each of its tokens is chosen from those of a Mask, and not before that is there. It has waited
    so long already (a runtime believes no more than the time in which its first token is wanted).
    """

    number: int
    tokens: list[int]
    more: bool
    prompt: int
    limit: int
    stops: list[int]
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: list[tuple[int, float]] = []
    seed: int = 0
    logprobs: int = -1
    masked: bool = False
    waited_us: int = 0


class Abort(Message, frozen=True, kw_only=True, tag=4):
    """Its client has left, or has what it wants."""

    number: int


class Mask(Message, frozen=True, kw_only=True, tag=5):
    """Tokens that may come at ``position`` of a sequence: a bit for each of the vocabulary, the first one's the lowest
    of the first byte.
    """

    number: int
    position: int
    bits: bytes


InstanceToRuntime = OpenModel | Weights | Submit | Abort | Mask | AdapterPart


# --- runtime -> instance


class ChosenToken(Message, frozen=True, kw_only=True):
    """``finish``: "stop" or "length" with the last one; "refused", "no_room", "bad_logits" or "bad_mask" if there will
    be none, and then this is none either.
    """

    number: int
    token: int
    finish: str = ""
    logprob: float | None = None
    top: list[tuple[int, float]] = []


class FirstToken(Message, frozen=True, kw_only=True):
    """The parts of a sequence's time since its Submit was received: until its first step, in steps until weights had
    come, in all else of its steps.
    """

    number: int
    queue_us: int
    wake_us: int
    prefill_us: int


class Tokens(Message, frozen=True, kw_only=True, tag=1):
    """The tokens that one step has made. ``reused``: by sequence that begins, prompt tokens whose KV was there.
    ``firsts``: of sequences whose first token is among these.
    """

    tokens: list[ChosenToken]
    reused: list[tuple[int, int]] = []
    firsts: list[FirstToken] = []


class ModelRefused(Message, frozen=True, kw_only=True, tag=2):
    """It cannot be computed; no token will come."""

    text: str


RuntimeToInstance = Tokens | ModelRefused
