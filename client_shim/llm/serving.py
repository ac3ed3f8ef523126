"""The main loop of an instance that serves a language model: requests from the router, tokens from a runtime.

It has many requests at once. With the first one it asks for a lease; while it has one, a runtime computes for it. When
the runtime dies, every open answer goes on from where it was, with the next one; the second time it ends with an error.
"""

import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Final

import msgspec

from dormouse.client_shim.llm import requests as r
from dormouse.client_shim.llm.answers import DONE, Choice, OpenAiAnswer, usage
from dormouse.client_shim.llm.model import Words
from dormouse.client_shim.llm.text import TextStream
from dormouse.client_shim.node.node_backend import NodeBackend
from dormouse.core.links.blocking_link import BlockingLink, wait_readable
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost
from dormouse.schemas.llm import DecoderSpec

IDLE_S: Final = 2.0
"""A seat that nobody needs is left after this."""

MEET_S: Final = 10.0
SUBMIT_TOKENS: Final = 8192
WEIGHTS: Final = 128
"""Tokens, and weights, in one message: it fits a packet."""

ANSWER_NBYTES: Final = 960 << 10
"""Of a whole answer: it travels in one message."""


@dataclass(eq=False)
class OpenChoice:
    """One choice of a request."""

    number: int
    request: "OpenRequest"
    choice: Choice
    seed: int
    text: TextStream
    made: list[int] = field(default_factory=list)
    resumed: int = 0
    reused: int = 0


@dataclass(eq=False)
class OpenRequest:
    """A request that is being answered."""

    number: int
    asked: r.ChatRequest | r.CompletionRequest
    answer: OpenAiAnswer
    prompt: list[int]
    limit: int  # tokens of prompt and answer at most
    logprobs: int
    generations: list[OpenChoice] = field(default_factory=list)
    began: bool = False  # some of it was sent
    ended: bool = False  # nothing is added to it any more
    room_nbytes: int = m.STREAM_WINDOW_NBYTES
    unsent: bytearray = field(default_factory=bytearray)

    @property
    def streams(self) -> bool:
        return bool(self.asked.stream)

    @property
    def done(self) -> bool:
        return all(each.choice.finish is not None for each in self.generations)


class LlmServer:
    """See the module."""

    def __init__(
        self,
        backend: NodeBackend,
        directory: str,
        name: str,
        spec: DecoderSpec,
        words: Words,
        weights: list[m.WeightAt],
    ) -> None:
        self._backend, self._directory, self._name = backend, directory, name
        self._spec, self._words, self._weights = spec, words, weights
        self._router = backend.router
        self._requests: dict[int, OpenRequest] = {}
        self._generations: dict[int, OpenChoice] = {}
        self._numbers = count(1)
        self._lease: m.Lease | None = None
        self._asked = False  # for a lease
        self._leaving = False  # that was said to the executor
        self._executor: BlockingLink | None = None
        self._idle_s = 0.0

    # --- the loop

    def serve(self) -> None:
        """Until the router says Exit. Raises PeerLost."""
        while True:
            links = [self._router.link]
            if self._executor is not None:
                links.append(self._executor)
            ready = wait_readable(links, self._patience_s())
            if self._router.link in ready or self._router.link.waiting:
                while (message := self._router.hear()) is not None:
                    if isinstance(message, m.Exit):
                        return
                    self._from_router(message)
            if self._executor is not None and self._executor in ready:
                self._hear_executor()
            self._leave_if_idle()

    def _patience_s(self) -> float:
        if self._lease is None or self._generations or self._leaving:
            return 3600.0
        return max(0.0, self._idle_s + IDLE_S - time.monotonic())

    def _leave_if_idle(self) -> None:
        if self._patience_s() == 0.0 and self._lease is not None:
            self._leaving = True
            self._say(m.LeaveSeat(serial=self._lease.serial))

    def _from_router(self, message: m.RouterToInstance) -> None:
        match message:
            case m.Run():
                self._run(message)
            case m.Abandon(request=number):
                if (request := self._requests.get(number)) is not None:
                    self._fail(request, "cancelled", "the request was cancelled")
            case m.PartsTaken(request=number, nbytes=nbytes):
                if (request := self._requests.get(number)) is not None:
                    request.room_nbytes += nbytes
                    self._flush(request)
            case m.LeaseGranted(lease=lease):
                self._granted(lease)
            case m.LeaseRefused(code=code, text=text):
                held, self._asked, self._lease = self._lease, False, None
                self._hang_up()
                if held is None:
                    for request in list(self._requests.values()):
                        self._fail(request, code, text)
                else:
                    self._resume(text)

    # --- requests

    def _run(self, run: m.Run) -> None:
        try:
            request = self._understood(run)
        except r.RefusedRequest as error:
            self._router.send(m.Raised(request=run.request, code=error.code, text=str(error), param=error.param))
            return
        except Exception as error:  # the outermost frame of one request: others of the same instance are well
            traceback.print_exc()
            text = f"the request could not be understood: {type(error).__name__}; see `dormouse logs {self._name}`"
            self._router.send(m.Raised(request=run.request, code="internal_error", text=text))
            return
        self._requests[request.number] = request
        for generation in request.generations:
            self._generations[generation.number] = generation
            if self._lease is not None and not self._leaving:
                self._submit(generation)
        self._want_lease()

    def _understood(self, run: m.Run) -> OpenRequest:
        """Raises RefusedRequest."""
        body = bytes(run.body or b"")
        kind: r.Kind = "chat" if run.route == "chat" or (not run.route and b'"messages"' in body) else "completions"
        asked = r.parse(kind, body)
        if isinstance(asked, r.ChatRequest):
            prompt, field_ = self._words.chat(asked.messages, asked.add_generation_prompt), "messages"
        else:
            prompt, field_ = self._prompt(asked), "prompt"
        most = r.most_new(asked)
        context = self._spec.context
        if not prompt:
            raise r.RefusedRequest("the prompt has no tokens", field_)
        if len(prompt) >= context or (most is not None and len(prompt) + most > context):
            wanted = f"{len(prompt)} tokens" + (f" and {most} to be made" if most is not None else "")
            raise r.RefusedRequest(
                f"the model's context is {context} tokens; the prompt has {wanted}", field_, "context_length_exceeded"
            )
        limit = context if most is None else len(prompt) + most
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        logprobs = r.logprobs_of(asked)
        answer = OpenAiAnswer(
            kind=kind,
            id=f"{prefix}-{os.urandom(12).hex()}",
            model=asked.model or self._name,
            wants_logprobs=logprobs >= 0,
        )
        request = OpenRequest(run.request, asked, answer, prompt, limit, logprobs)
        seed, stops = r.seed_of(asked), r.stops_of(asked)
        for index in range(asked.n or 1):
            text = TextStream(self._words.decode, stops)
            generation = OpenChoice(next(self._numbers), request, Choice(index), seed + index, text)
            request.generations.append(generation)
        return request

    def _prompt(self, asked: r.CompletionRequest) -> list[int]:
        prompt = asked.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise r.RefusedRequest("one prompt at a time", "prompt", "unsupported_parameter")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._words.encode(prompt)
        if any(type(token) is not int or not 0 <= token < self._spec.vocabulary for token in prompt):
            text = f"a prompt is text, or tokens from 0 to {self._spec.vocabulary - 1}"
            raise r.RefusedRequest(text, "prompt")
        return list(prompt)

    def _over(self, request: OpenRequest) -> None:
        """It is answered, or has failed."""
        del self._requests[request.number]
        for generation in request.generations:
            if self._generations.pop(generation.number, None) is not None:
                self._tell(m.Abort(number=generation.number))
        self._idle_s = time.monotonic()

    def _fail(self, request: OpenRequest, code: str, text: str) -> None:
        self._over(request)
        self._router.send(m.Raised(request=request.number, code=code, text=text))

    # --- the lease

    def _want_lease(self) -> None:
        if self._lease is None and not self._asked and self._generations:
            self._asked = True
            self._router.send(m.NeedLease(version=self._backend.version))

    def _granted(self, lease: m.Lease) -> None:
        self._asked, self._leaving, self._lease = False, False, lease
        self._executor = BlockingLink(os.path.join(self._directory, f"gpu{lease.gpu}.{lease.epoch}"))
        try:
            if not self._executor.meet(MEET_S):
                raise PeerLost("nobody has answered")
        except PeerLost:
            self._hang_up()  # its router will say that it is lost
            return
        self._tell(m.OpenModel(spec=self._spec, weights=len(self._weights)))
        for weights in _batches(self._weights, WEIGHTS):
            self._tell(m.Weights(weights=weights))
        for generation in self._generations.values():
            self._submit(generation)
        self._idle_s = time.monotonic()

    def _submit(self, generation: OpenChoice) -> None:
        request, asked = generation.request, generation.request.asked
        tokens = request.prompt + generation.made
        parts = list(_batches(tokens, SUBMIT_TOKENS))
        ends = [] if asked.ignore_eos else self._words.ends
        for index, part in enumerate(parts):
            self._tell(
                m.Submit(
                    number=generation.number,
                    tokens=part,
                    more=index < len(parts) - 1,
                    prompt=len(request.prompt),
                    limit=request.limit,
                    stops=[*ends, *(asked.stop_token_ids or ())],
                    temperature=_number(asked.temperature, 1.0),
                    top_p=_number(asked.top_p, 1.0),
                    top_k=max(0, asked.top_k or 0),
                    min_p=_number(asked.min_p, 0.0),
                    presence_penalty=_number(asked.presence_penalty, 0.0),
                    frequency_penalty=_number(asked.frequency_penalty, 0.0),
                    repetition_penalty=_number(asked.repetition_penalty, 1.0),
                    bias=[(int(token), bias) for token, bias in (asked.logit_bias or {}).items()],
                    seed=generation.seed,
                    logprobs=request.logprobs,
                )
            )

    def _tell(self, message: m.InstanceToRuntime) -> None:
        if self._lease is not None and not self._leaving:
            self._say(m.ToRuntime(serial=self._lease.serial, data=msgspec.msgpack.encode(message)))

    def _say(self, message: m.LlmToExecutor) -> None:
        if self._executor is not None:
            try:
                self._executor.send(msgspec.msgpack.encode(message))
            except PeerLost:
                self._hang_up()  # the router will say what has become of the lease

    def _hang_up(self) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def _hear_executor(self) -> None:
        assert self._executor is not None
        try:
            while self._executor is not None and (data := self._executor.recv(0)) is not None:
                message = msgspec.msgpack.decode(data, type=m.ExecutorToLlm)
                lease = self._lease
                if lease is None or message.serial != lease.serial:
                    continue
                match message:
                    case m.OfRuntime(data=inner):
                        self._from_runtime(msgspec.msgpack.decode(inner, type=m.RuntimeToInstance))
                    case m.SeatOver(text=text):
                        self._seat_over(lease, text)
        except PeerLost:
            self._hang_up()

    def _seat_over(self, lease: m.Lease, text: str) -> None:
        wanted, self._leaving, self._lease = self._leaving, False, None
        self._hang_up()
        self._router.send(m.LeaseEnded(serial=lease.serial, version=self._backend.version))
        if text:
            for request in list(self._requests.values()):
                self._fail(request, "out_of_memory", text)
        elif wanted:
            self._want_lease()
        else:
            self._resume("the process that computed it has died twice")

    def _resume(self, text: str) -> None:
        """What was under way goes on with the next lease, once."""
        for generation in list(self._generations.values()):
            generation.resumed += 1
        for request in list(self._requests.values()):
            if any(each.resumed > 1 for each in request.generations):
                self._fail(request, "executor_lost", text)
        self._want_lease()

    # --- tokens

    def _from_runtime(self, message: m.RuntimeToInstance) -> None:
        match message:
            case m.ModelRefused(text=text):
                for request in list(self._requests.values()):
                    self._fail(request, "model_refused", text)
            case m.Tokens(tokens=tokens, reused=reused):
                for number, nbytes in reused:
                    if (generation := self._generations.get(number)) is not None and not generation.made:
                        generation.reused = nbytes
                touched: dict[int, OpenRequest] = {}
                for token in tokens:
                    if (generation := self._generations.get(token.number)) is not None:
                        touched[generation.request.number] = generation.request
                        self._chosen(generation, token)
                for request in touched.values():
                    self._flush(request)
                    if request.number in self._requests and request.done:
                        self._finish(request)

    def _chosen(self, generation: OpenChoice, token: m.ChosenToken) -> None:
        request, choice = generation.request, generation.choice
        if token.finish in ("refused", "no_room"):
            text = "the model cannot hold one request of this length in the memory of a GPU"
            self._fail(request, "out_of_memory", text)
            return
        generation.made.append(token.token)
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
                self._tell(m.Abort(number=generation.number))
            if request.streams:
                self._begin(request)
                request.unsent += request.answer.last(choice.index, choice.finish)

    def _logprob(self, token: m.ChosenToken) -> dict[str, Any]:
        def entry(number: int, logprob: float) -> dict[str, Any]:
            text = self._words.token_text(number)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        top = [entry(number, logprob) for number, logprob in token.top]
        return {**entry(token.token, token.logprob or 0.0), "top_logprobs": top}

    def _usage(self, request: OpenRequest) -> dict[str, Any]:
        made = sum(len(each.made) for each in request.generations)
        return usage(len(request.prompt), made, max(each.reused for each in request.generations))

    def _finish(self, request: OpenRequest) -> None:
        if request.streams:
            options = request.asked.stream_options
            if options is not None and options.include_usage:
                request.unsent += request.answer.usage(self._usage(request))
            request.unsent += DONE
            request.ended = True
            self._flush(request)
            return
        body = request.answer.whole([each.choice for each in request.generations], self._usage(request))
        if len(body) > ANSWER_NBYTES:
            self._fail(request, "bad_response", f"the answer has {len(body):,} bytes: ask for it with stream")
            return
        self._over(request)
        self._router.send(m.Returned(request=request.number, body=body, nbytes=len(body)))

    # --- parts

    def _begin(self, request: OpenRequest) -> None:
        if not request.began:
            request.began = True
            for generation in request.generations:
                request.unsent += request.answer.first(generation.choice.index)
            self._part(request, bytes(request.unsent), m.SSE)
            request.unsent.clear()

    def _flush(self, request: OpenRequest) -> None:
        """Send what the client has room for; the end, when all is sent."""
        while request.unsent and request.room_nbytes > 0:
            size = min(len(request.unsent), request.room_nbytes, m.CHUNK_NBYTES)
            self._part(request, bytes(request.unsent[:size]), None)
            del request.unsent[:size]
        if request.ended and not request.unsent:
            self._over(request)
            self._router.send(m.Returned(request=request.number, body=b"", nbytes=0))

    def _part(self, request: OpenRequest, data: bytes, kind: m.StreamKind | None) -> None:
        request.room_nbytes -= len(data)
        self._router.send(m.AnswerPart(request=request.number, body=data, kind=kind))


def _number(value: float | None, default: float) -> float:
    return default if value is None else value


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part
