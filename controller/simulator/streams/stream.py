"""A sequence of a simulated runtime, and its progress in steps: plain data. batch.py advances it."""

import msgspec

WAITING, PREFILL, DECODING, OVER = range(4)


class Stream:
    """A sequence. ``tokens`` are those that are known, of prompt and output, ``limit`` is how many there will be, and
    ``computed`` of them have their KV; of one that is decoding, both are those when it began to. Its first token is
    wanted by ``first_s``. ``owner``: its function.
    """

    __slots__ = (
        "computed",
        "end",
        "first_s",
        "limit",
        "number",
        "owner",
        "preempted",
        "prompt",
        "resumed",
        "since",
        "state",
        "tokens",
    )

    def __init__(self, number: int, prompt: int, output: int, first_s: float = 0.0, owner: int = 0) -> None:
        self.number, self.owner = number, owner
        self.first_s = first_s
        self.prompt = self.tokens = prompt
        self.limit = prompt + output
        self.computed = 0
        self.state = WAITING
        self.since = self.end = 0  # the batch's steps in which it began to decode, and has its last token
        self.preempted = 0  # how often
        self.resumed = 0  # how often its runtime was lost

    @property
    def left(self) -> int:
        """Tokens that can be computed before the next one is known."""
        return self.tokens - self.computed


class Advanced(msgspec.Struct, frozen=True, gc=False):
    """``first``: streams that have their first token; ``over``: that have their last."""

    first: list[Stream]
    over: list[Stream]
