"""Owns the open requests and turns tokens into their answers: text, parts of streams, ends.

It sends only to the router. serving.py receives the tokens; answers.py words the answers.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from dormouse.client_shim.llm.answers import Choice, ToolCall, logprob_entry
from dormouse.client_shim.llm.decoding import UnreadableTokens
from dormouse.client_shim.llm.grammar import BrokenGrammar
from dormouse.client_shim.llm.model import Words
from dormouse.client_shim.llm.open_requests import OpenChoice, OpenRequest
from dormouse.client_shim.llm.text import TextStream
from dormouse.client_shim.llm.timings import Timings, counts
from dormouse.client_shim.llm.tool_calls import CallBegun, CallEnded, CallPart, Piece
from dormouse.client_shim.node.router_port import RouterPort
from dormouse.core.quantities import sizes
from dormouse.schemas import messages as m

ANSWER_NBYTES: Final = 960 << 10
"""Of a whole answer: it travels in one message."""

ENTRY_NBYTES: Final = 40
"""A logprob has more, as JSON."""

HELD_NBYTES: Final = 256 << 10
"""Of a stream, made and not sent because its client does not read: then its sequences pause."""

_FAILED: Final = {
    "refused": ("out_of_memory", "the model cannot hold one request of this length in the memory of a GPU"),
    "no_room": ("out_of_memory", "the model cannot hold one request of this length in the memory of a GPU"),
    "bad_logits": ("model_refused", "the model computed NaN or infinity"),
    "bad_mask": ("bad_response", "no token of the model keeps to the schema"),
}


class Answering:
    """See the module. ``tell(message)`` is for the runtime: the tokens that may come, and that none are needed any
    more. ``numbers`` are those of sequences.
    """

    def __init__(
        self, router: RouterPort, words: Words, tell: Callable[[m.Abort | m.Mask], None], numbers: Iterator[int]
    ) -> None:
        self._router, self._words, self._tell, self._numbers = router, words, tell, numbers
        self.timings = Timings()
        self._requests: dict[int, OpenRequest] = {}
        self._generations: dict[int, OpenChoice] = {}
        self._taking: list[tuple[OpenChoice, m.ChosenToken]] = []  # their grammars
        self._parts: list[m.AnswerPart] = []  # of this step, not sent yet
        self._parts_nbytes = 0

    def add(self, request: OpenRequest) -> None:
        self._requests[request.number] = request
        for generation in request.generations:
            self._generations[generation.number] = generation

    def unfinished(self) -> Iterator[OpenChoice]:
        """Choices that need further tokens."""
        return iter(list(self._generations.values()))

    @property
    def idle(self) -> bool:
        return not self._generations

    # --- how they end

    def abandon(self, number: int) -> None:
        if (request := self._requests.get(number)) is not None:
            self._fail(request, "cancelled", "the request was cancelled")

    def fail_all(self, code: str, text: str) -> None:
        for request in list(self._requests.values()):
            self._fail(request, code, text)

    def resume(self, text: str) -> None:
        """Unfinished requests go on once; a second time they fail with ``text``."""
        for generation in self._generations.values():
            generation.resumed += 1
        for request in list(self._requests.values()):
            if any(each.resumed > 1 for each in request.generations):
                self._fail(request, "executor_lost", text)

    def _broken(self, generation: OpenChoice, error: BrokenGrammar) -> None:
        wanted = generation.request.wanted
        assert wanted is not None
        self._words.grammars.drop(wanted)
        self._fail(generation.request, "invalid_value", f"the schema cannot be used: {error}", wanted.param)

    def _over(self, request: OpenRequest) -> None:
        """It is answered, or has failed."""
        del self._requests[request.number]
        for generation in request.generations:
            if generation.taking is not None:
                generation.taking.given_up = True
            if self._generations.pop(generation.number, None) is not None:
                self._tell(m.Abort(number=generation.number))

    def _fail(self, request: OpenRequest, code: str, text: str, param: str = "") -> None:
        self._over(request)
        self._send(m.Raised(request=request.number, code=code, text=text, param=param))

    # --- tokens

    def tokens(self, made: m.Tokens) -> None:
        """The tokens that a step has made."""
        now_s = time.monotonic()
        self.timings.heard(now_s)
        for number, nbytes in made.reused:
            if (generation := self._generations.get(number)) is not None and not generation.made:
                generation.reused = nbytes
        firsts = {first.number: first for first in made.firsts}
        touched: dict[int, OpenRequest] = {}
        late = len(self._taking)
        for token in made.tokens:
            if (generation := self._generations.get(token.number)) is not None:
                request = touched[generation.request.number] = generation.request
                if request.first_s is None and token.finish not in _FAILED:
                    begun = self.timings.first_token(request, firsts.get(token.number), now_s)
                    self._router.send(begun)
                self._chosen(generation, token)
        if len(self._taking) > late:  # it has waited for the others already
            new = [generation.taking for generation, _ in self._taking[late:]]
            self._words.grammars.maskers.settle([work for work in new if work is not None])
        self._told(touched | self._taken(now_s))

    @property
    def late(self) -> bool:
        """Whether some grammars have not taken their last tokens yet."""
        return bool(self._taking)

    def go_on(self) -> None:
        """With those that have."""
        self._words.grammars.maskers.settle([])
        self._told(self._taken(time.monotonic()))

    def _taken(self, now_s: float) -> dict[int, OpenRequest]:
        """Go on where grammars have taken the last token. Returns requests, by number."""
        touched: dict[int, OpenRequest] = {}
        taking, self._taking = self._taking, []
        for generation, token in taking:
            request, grammar = generation.request, generation.grammar
            if request.number not in self._requests:
                continue  # it has failed
            try:
                if not generation.taken(now_s):
                    self._taking.append((generation, token))
                    continue
            except BrokenGrammar as error:
                self._broken(generation, error)
                continue
            touched[request.number] = request
            assert grammar is not None
            mask = None if grammar.complete else generation.mask()
            if mask is not None and generation.number in self._generations:
                self._tell(mask)  # else with its next lease, or after its pause
            self._heard(generation, token, "stop" if grammar.complete else "")
        return touched

    def _told(self, touched: dict[int, OpenRequest]) -> None:
        """Requests that have something new."""
        for request in touched.values():
            if request.number not in self._requests:
                continue  # it has failed
            self._flush(request)
            if request.done:
                self._finish(request)
            elif len(request.unsent) > HELD_NBYTES:
                self._hold(request)
        self._send_parts()

    def _chosen(self, generation: OpenChoice, token: m.ChosenToken) -> None:
        if token.finish in _FAILED:
            self._fail(generation.request, *_FAILED[token.finish])
            return
        generation.made.append(token.token)
        if generation.grammar is None or token.finish:
            self._heard(generation, token, token.finish)
            return
        generation.taking = self._words.grammars.maskers.give(partial(generation.grammar.take, token.token))
        self._taking.append((generation, token))

    def _heard(self, generation: OpenChoice, token: m.ChosenToken, finish: str) -> None:
        """A token, after which it ends if there is a ``finish``."""
        request, choice = generation.request, generation.choice
        ended = token.finish == "stop"  # its token is no text
        try:
            told = [] if token.logprob is None or ended else [self._logprob(generation.text, token)]
            text = generation.text.put([] if ended else [token.token], last=bool(finish))
        except UnreadableTokens as error:
            self._fail(request, "bad_response", str(error))
            return
        if generation.text.stopped:
            finish = "stop"
        if not request.streams:
            request.made_nbytes += len(text) + ENTRY_NBYTES * len(told) * (1 + len(token.top))
            if request.made_nbytes > ANSWER_NBYTES:
                self._too_long(request, request.made_nbytes)
                return
        if generation.calls is None:
            self._wrote(request, choice, text, told)
        elif self._said(request, choice, generation.calls.put(text, bool(finish)), told):
            finish = finish or "stop"
        if not finish:
            return
        choice.finish = "tool_calls" if choice.calls and finish == "stop" else finish
        if self._generations.pop(generation.number, None) is not None and not token.finish:
            self._tell(m.Abort(number=generation.number))
        if request.streams:
            self._begin(request)
            request.unsent += request.answer.last(choice.index, choice.finish)

    def _wrote(self, request: OpenRequest, choice: Choice, text: str, told: list[dict[str, Any]]) -> None:
        """``told``: log probabilities."""
        if not request.streams:
            choice.text.append(text)
            choice.logprobs += told
        elif text or told:
            self._begin(request)
            request.unsent += request.answer.part(choice.index, text, told)

    def _said(self, request: OpenRequest, choice: Choice, pieces: list[Piece], told: list[dict[str, Any]]) -> bool:
        """Whether it ends with this, because it may call no other tool."""
        self._wrote(request, choice, "".join(piece for piece in pieces if isinstance(piece, str)), told)
        for piece in pieces:
            if isinstance(piece, CallEnded) and not request.parallel_calls:
                return True
            if isinstance(piece, CallBegun | CallPart):
                part = self._called(request, choice, piece)
                if request.streams:
                    self._begin(request)
                    request.unsent += part
        return False

    def _called(self, request: OpenRequest, choice: Choice, piece: CallBegun | CallPart) -> bytes:
        """Report it in a stream."""
        if isinstance(piece, CallBegun):
            choice.calls.append(ToolCall(piece.id, piece.name))
            if not request.streams:
                return b""
            return request.answer.call(choice.index, len(choice.calls) - 1, choice.calls[-1])
        if not request.streams:
            choice.calls[-1].arguments.append(piece.text)
            return b""
        return request.answer.arguments(choice.index, len(choice.calls) - 1, piece.text)

    def _logprob(self, before: TextStream, token: m.ChosenToken) -> dict[str, Any]:
        top = [logprob_entry(*before.told(number), logprob) for number, logprob in token.top]
        return {**logprob_entry(*before.told(token.token), token.logprob or 0.0), "top_logprobs": top}

    def _finish(self, request: OpenRequest) -> None:
        request.counts = counts(request, time.monotonic())
        if request.streams:
            options = request.asked.stream_options
            wanted = options is not None and options.include_usage
            request.unsent += request.answer.end(request.usage, wanted)
            request.ended = True
            self._flush(request)
            return
        body = request.answer.whole([each.choice for each in request.generations], request.usage)
        if len(body) > ANSWER_NBYTES:
            self._too_long(request, len(body))
            return
        self._over(request)
        self._send(m.Returned(request=request.number, body=body, nbytes=len(body), tokens=request.counts))

    def _too_long(self, request: OpenRequest, nbytes: int) -> None:
        has, most = sizes(nbytes, ANSWER_NBYTES)
        text = f"the answer has {has} and more than {most}: ask for it with stream"
        self._fail(request, "bad_response", text)

    # --- parts

    def taken(self, number: int, nbytes: int) -> list[OpenChoice]:
        """The client of a request has so much more of its parts. Returns the choices that go on after a pause: they are
        to be submitted.
        """
        request = self._requests.get(number)
        if request is None:
            return []
        request.room_nbytes += nbytes
        self._flush(request)
        self._send_parts()
        if not request.held or request.unsent:
            return []
        request.held = False
        unfinished = [each for each in request.generations if each.choice.finish is None]
        for generation in unfinished:
            self._generations[generation.number] = generation
        return unfinished

    def _hold(self, request: OpenRequest) -> None:
        """Its client does not read: its sequences stop and release their KV. They go on under other numbers, because
        tokens of these may be on their way.
        """
        request.held = True
        for generation in request.generations:
            if self._generations.pop(generation.number, None) is not None:
                self._tell(m.Abort(number=generation.number))
                generation.number = next(self._numbers)

    def _begin(self, request: OpenRequest) -> None:
        if not request.began:
            request.began = True
            for generation in request.generations:
                request.unsent += request.answer.first(generation.choice.index)

    def _flush(self, request: OpenRequest) -> None:
        """Send as much as the client has room for, and the end once all is sent."""
        while request.unsent and request.room_nbytes > 0:
            size = min(len(request.unsent), request.room_nbytes, m.CHUNK_NBYTES)
            self._part(request, bytes(request.unsent[:size]))
            del request.unsent[:size]
        if request.ended and not request.unsent:
            self._over(request)
            self._send(m.Returned(request=request.number, body=b"", nbytes=0, tokens=request.counts))

    def _part(self, request: OpenRequest, data: bytes) -> None:
        if self._parts_nbytes + len(data) > m.BATCH_NBYTES or len(self._parts) == m.BATCH_PARTS:
            self._send_parts()
        request.room_nbytes -= len(data)
        self._parts.append(m.AnswerPart(request=request.number, body=data, kind=None if request.sent else m.SSE))
        request.sent = True
        self._parts_nbytes += len(data)

    def _send_parts(self) -> None:
        """Those of all requests in one message: sixteen streams make sixteen parts in each step."""
        parts, self._parts, self._parts_nbytes = self._parts, [], 0
        if parts:
            self._router.send(m.AnswerParts(parts=parts))

    def _send(self, message: m.Returned | m.Raised) -> None:
        """After the parts that came before."""
        self._send_parts()
        self._router.send(message)
