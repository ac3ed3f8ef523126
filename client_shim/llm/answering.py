"""All requests that are open, and how tokens become their answers: text, parts of streams, ends.

It sends to the router and to nobody else. Where tokens come from is serving.py's to know; how an answer is worded is in
answers.py.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from dormouse.client_shim.llm.answers import DONE
from dormouse.client_shim.llm.model import Words
from dormouse.client_shim.llm.open_requests import OpenChoice, OpenRequest
from dormouse.client_shim.node.router_port import RouterPort
from dormouse.schemas import messages as m

ANSWER_NBYTES: Final = 960 << 10
"""Of a whole answer: it travels in one message."""


class Answering:
    """See the module. ``abort(number)`` is called when tokens of a sequence are not needed any more."""

    def __init__(self, router: RouterPort, words: Words, abort: Callable[[int], None]) -> None:
        self._router, self._words, self._abort = router, words, abort
        self._requests: dict[int, OpenRequest] = {}
        self._generations: dict[int, OpenChoice] = {}
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
        """What was under way goes on once; a second time it fails with ``text``."""
        for generation in self._generations.values():
            generation.resumed += 1
        for request in list(self._requests.values()):
            if any(each.resumed > 1 for each in request.generations):
                self._fail(request, "executor_lost", text)

    def _over(self, request: OpenRequest) -> None:
        """It is answered, or has failed."""
        del self._requests[request.number]
        for generation in request.generations:
            if self._generations.pop(generation.number, None) is not None:
                self._abort(generation.number)

    def _fail(self, request: OpenRequest, code: str, text: str) -> None:
        self._over(request)
        self._send(m.Raised(request=request.number, code=code, text=text))

    # --- tokens

    def tokens(self, made: m.Tokens) -> None:
        """What a step has made."""
        for number, nbytes in made.reused:
            if (generation := self._generations.get(number)) is not None and not generation.made:
                generation.reused = nbytes
        touched: dict[int, OpenRequest] = {}
        for token in made.tokens:
            if (generation := self._generations.get(token.number)) is not None:
                touched[generation.request.number] = generation.request
                self._chosen(generation, token)
        for request in touched.values():
            self._flush(request)
            if request.number in self._requests and request.done:
                self._finish(request)
        self._send_parts()

    def _chosen(self, generation: OpenChoice, token: m.ChosenToken) -> None:
        request, choice = generation.request, generation.choice
        if token.finish in ("refused", "no_room"):
            text = "the model cannot hold one request of this length in the memory of a GPU"
            self._fail(request, "out_of_memory", text)
            return
        generation.made.append(token.token)
        if not request.told:
            request.told = True
            self._router.send(m.AnswerBegun(request=request.number))
        ended = token.finish == "stop"  # its token is no text
        text = generation.text.put([] if ended else [token.token], last=bool(token.finish))
        told = [] if token.logprob is None or ended else [self._logprob(token)]
        choice.logprobs += told
        if not request.streams:
            choice.text.append(text)
        elif text or told:
            self._begin(request)
            request.unsent += request.answer.part(choice.index, text, told)
        if generation.text.stopped or token.finish:
            choice.finish = "stop" if generation.text.stopped else token.finish
            del self._generations[generation.number]
            if not token.finish:
                self._abort(generation.number)
            if request.streams:
                self._begin(request)
                request.unsent += request.answer.last(choice.index, choice.finish)

    def _logprob(self, token: m.ChosenToken) -> dict[str, Any]:
        def entry(number: int, logprob: float) -> dict[str, Any]:
            text = self._words.token_text(number)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        top = [entry(number, logprob) for number, logprob in token.top]
        return {**entry(token.token, token.logprob or 0.0), "top_logprobs": top}

    def _finish(self, request: OpenRequest) -> None:
        if request.streams:
            options = request.asked.stream_options
            if options is not None and options.include_usage:
                request.unsent += request.answer.usage(request.usage)
            request.unsent += DONE
            request.ended = True
            self._flush(request)
            return
        body = request.answer.whole([each.choice for each in request.generations], request.usage)
        if len(body) > ANSWER_NBYTES:
            self._fail(request, "bad_response", f"the answer has {len(body):,} bytes: ask for it with stream")
            return
        self._over(request)
        self._send(m.Returned(request=request.number, body=body, nbytes=len(body)))

    # --- parts

    def taken(self, number: int, nbytes: int) -> None:
        """The client of a request has so much more of its parts."""
        if (request := self._requests.get(number)) is not None:
            request.room_nbytes += nbytes
            self._flush(request)
            self._send_parts()

    def _begin(self, request: OpenRequest) -> None:
        if not request.began:
            request.began = True
            for generation in request.generations:
                request.unsent += request.answer.first(generation.choice.index)

    def _flush(self, request: OpenRequest) -> None:
        """Send what the client has room for; the end, when all is sent."""
        while request.unsent and request.room_nbytes > 0:
            size = min(len(request.unsent), request.room_nbytes, m.CHUNK_NBYTES)
            self._part(request, bytes(request.unsent[:size]))
            del request.unsent[:size]
        if request.ended and not request.unsent:
            self._over(request)
            self._send(m.Returned(request=request.number, body=b"", nbytes=0))

    def _part(self, request: OpenRequest, data: bytes) -> None:
        if self._parts_nbytes + len(data) > m.BATCH_NBYTES:
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
