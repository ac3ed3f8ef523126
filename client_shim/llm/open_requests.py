"""The state of open requests: the request, the answer so far, and the part that the client has not taken yet."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeVar

from dormouse.client_shim.llm import requests as r
from dormouse.client_shim.llm.answers import Choice, OpenAiAnswer, usage
from dormouse.client_shim.llm.grammar import MASKS_S, SLOW_S, BrokenGrammar, Grammar, Wanted
from dormouse.client_shim.llm.responses import ResponsesAnswer
from dormouse.client_shim.llm.text import TextStream
from dormouse.client_shim.llm.tool_calls import Piece, ToolCallStream
from dormouse.client_shim.llm.workers import Work
from dormouse.schemas import messages as m
from dormouse.schemas.llm import DefaultSampling

T = TypeVar("T")

SUBMIT_TOKENS: Final = 8192
"""Tokens in one message: it fits a packet."""


@dataclass(eq=False)
class OpenChoice:
    """One choice of a request."""

    number: int
    request: "OpenRequest"
    choice: Choice
    seed: int
    text: TextStream
    grammar: Grammar | None = None
    calls: ToolCallStream | None = None
    made: list[int] = field(default_factory=list)
    resumed: int = 0
    reused: int = 0
    taking: Work[None] | None = None  # its grammar takes the last token, and finds the tokens that may follow
    slow_s: float = 0.0  # time that slow masks took

    def mask(self) -> m.Mask | None:
        """The tokens that may come next, if not all may and they are known."""
        if self.grammar is None or self.taking is not None:
            return None
        return m.Mask(number=self.number, position=len(self.request.prompt) + len(self.made), bits=self.grammar.bits)

    def taken(self, now_s: float) -> bool:
        """Whether its grammar has taken the last token. Raises BrokenGrammar."""
        work = self.taking
        if work is None:
            return True
        slow_s = work.cpu_s
        if not work.done:
            slow_s = now_s - work.begun_s if work.begun_s else 0.0
        if slow_s > SLOW_S and self.slow_s + slow_s > MASKS_S:
            work.given_up = True
            text = f"to find out which tokens may come took more than {MASKS_S:g} s: make it simpler"
            raise BrokenGrammar(text)
        if work.done:
            self.taking = None
            self.slow_s += slow_s if slow_s > SLOW_S else 0.0
            return work.result is None
        return False

    def pieces(self, text: str, last: bool) -> list[Piece]:
        """Text and calls in it, as far as they are known."""
        if self.calls is not None:
            return self.calls.put(text, last)
        return [text] if text else []

    def submits(self, ends: list[int], now_s: float) -> Iterator[m.Submit | m.Mask]:
        """The messages with which a runtime begins it or goes on with it. ``ends``: tokens that end an answer."""
        request, asked, sampling = self.request, self.request.asked, self.request.sampling
        parts = list(batches(request.prompt + self.made, SUBMIT_TOKENS))
        stops = [*([] if asked.ignore_eos else ends), *(asked.stop_token_ids or ())]
        for index, part in enumerate(parts):
            yield m.Submit(
                number=self.number,
                tokens=part,
                more=index < len(parts) - 1,
                prompt=len(request.prompt),
                limit=request.limit,
                stops=stops,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=max(0, sampling.top_k),
                min_p=sampling.min_p,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                repetition_penalty=sampling.repetition_penalty,
                bias=[(int(token), bias) for token, bias in (asked.logit_bias or {}).items()],
                seed=self.seed,
                logprobs=request.logprobs,
                masked=self.grammar is not None,
                waited_us=0 if self.made else max(0, int((now_s - request.came_s) * 1e6)),
            )
        if (mask := self.mask()) is not None:
            yield mask


@dataclass(eq=False)
class OpenRequest:
    """A request that is being answered."""

    number: int
    asked: r.Request
    answer: OpenAiAnswer | ResponsesAnswer
    prompt: list[int]
    limit: int  # tokens of prompt and answer at most
    logprobs: int
    sampling: DefaultSampling
    wanted: Wanted | None = None  # the grammar of its answers
    parallel_calls: bool = True  # else it ends with its first call
    generations: list[OpenChoice] = field(default_factory=list)
    began: bool = False  # there is some of it
    sent: bool = False  # and it was sent
    ended: bool = False  # nothing is added to it any more
    room_nbytes: int = m.STREAM_WINDOW_NBYTES
    unsent: bytearray = field(default_factory=bytearray)
    held: bool = False  # its sequences pause until that is sent
    came_s: float = 0.0
    first_s: float | None = None  # when it had its first token
    counts: m.TokenCounts | None = None  # once it has its last one
    made_nbytes: int = 0  # of an answer that does not stream, at least

    @property
    def streams(self) -> bool:
        return bool(self.asked.stream)

    @property
    def done(self) -> bool:
        return None not in [each.choice.finish for each in self.generations]

    @property
    def usage(self) -> dict[str, Any]:
        made = sum(len(each.made) for each in self.generations)
        return usage(len(self.prompt), made, max(each.reused for each in self.generations))


def batches(items: list[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part
