"""The main loop of an instance that serves a language model: requests from the router, tokens from a runtime.

It has many requests at once (answering.py). With the first one it asks for a lease; while it has one, a runtime
computes for it. When the runtime dies, every open answer goes on from where it was, with the next one; the second time
it ends with an error.
"""

import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final, NamedTuple

import msgspec

from dormouse.client_shim.llm.answering import Answering
from dormouse.client_shim.llm.model import Words
from dormouse.client_shim.llm.open_requests import OpenChoice, OpenRequest, batches
from dormouse.client_shim.llm.requests import RefusedRequest
from dormouse.client_shim.llm.understanding import Understanding
from dormouse.client_shim.llm.workers import MOMENT_S
from dormouse.client_shim.node.node_backend import NodeBackend
from dormouse.core.links.blocking_link import BlockingLink, wait_readable
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost
from dormouse.schemas.llm import AdapterSpec, DecoderSpec

MEET_S: Final = 10.0

TICK_S: Final = 0.2
"""The interval at which late grammars are checked for their time limit."""

WEIGHTS: Final = 128
MODULES: Final = 64
"""In one message: it fits a packet, with names of any length."""


class ServedModel(NamedTuple):
    """The description of a model that a runtime receives. ``weights`` are its adapter's, too."""

    spec: DecoderSpec
    weights: list[m.WeightAt]
    adapter: AdapterSpec | None


class LlmServer:
    """See the module."""

    def __init__(
        self,
        backend: NodeBackend,
        directory: str,
        name: str,
        model: ServedModel,
        words: Words,
    ) -> None:
        self._backend, self._directory, self._name = backend, directory, name
        self._model, self._words = model, words
        self._router = backend.router
        numbers = count(1)
        self._understanding = Understanding(name, model.spec, words, numbers)
        self._answering = Answering(backend.router, words, self._tell, numbers)
        self._of_executor: msgspec.msgpack.Decoder[m.ExecutorToLlm] = msgspec.msgpack.Decoder(m.ExecutorToLlm)
        self._of_runtime: msgspec.msgpack.Decoder[m.RuntimeToInstance] = msgspec.msgpack.Decoder(m.RuntimeToInstance)
        self._parked: list[OpenRequest] = []  # their grammars are being compiled
        self._lease: m.Lease | None = None
        self._asked = False  # for a lease
        self._executor: BlockingLink | None = None

    # --- the loop

    def serve(self) -> None:
        """Until the router says Exit. Raises PeerLost."""
        while True:
            links = [self._router.link]
            if self._executor is not None:
                links.append(self._executor)
            grammars, late = self._words.grammars, bool(self._parked) or self._answering.late
            ready = wait_readable(links, TICK_S if late else 3600.0, (grammars.compilers.bell, grammars.maskers.bell))
            if self._router.link in ready or self._router.link.waiting:
                while (message := self._router.hear()) is not None:
                    if isinstance(message, m.Exit):
                        return
                    self._from_router(message)
            if self._executor is not None and self._executor in ready:
                self._hear_executor()
            grammars.compilers.settle([])
            self._unpark()
            self._answering.go_on()

    def _from_router(self, message: m.RouterToInstance) -> None:
        match message:
            case m.Run():
                self._run(message)
            case m.Abandon(request=number):
                self._abandon(number)
            case m.PartsTaken(request=number, nbytes=nbytes):
                self._go_on(self._answering.taken(number, nbytes))
            case m.LeaseGranted(lease=lease):
                self._granted(lease)
            case m.LeaseRefused(code=code, text=text):
                held, self._asked, self._lease = self._lease, False, None
                self._hang_up()
                if held is None:
                    self._answering.fail_all(code, text)
                else:
                    self._resume(text)

    def _run(self, run: m.Run) -> None:
        came_s = time.monotonic()
        with self._refusing(run.request):
            try:
                request = self._understanding.opened(run)
            except RecursionError:  # JSON that could just be read may be too deep for later code
                raise RefusedRequest("the request is nested too deeply; send a simpler one") from None
            request.came_s = came_s
            if request.wanted is not None:
                moment_s = 0.0 if self._parked else MOMENT_S  # many that come at once have one moment together
                self._words.grammars.compilers.settle([request.wanted.work], moment_s)
            self._parked.append(request)
        self._unpark()

    def _unpark(self) -> None:
        parked, self._parked = self._parked, []
        for request in parked:
            begun = False
            with self._refusing(request.number):
                begun = self._understanding.begun(request, time.monotonic())
                if not begun:
                    self._parked.append(request)
            if begun:
                self._answering.add(request)
                self._go_on(request.generations)

    @contextmanager
    def _refusing(self, number: int) -> Iterator[None]:
        """The outermost frame of one request: others of the same instance are well."""
        try:
            yield
        except RefusedRequest as error:
            self._router.send(m.Raised(request=number, code=error.code, text=str(error), param=error.param))
        except Exception as error:
            traceback.print_exc()
            text = f"the request could not be understood: {type(error).__name__}; see `dormouse logs {self._name}`"
            self._router.send(m.Raised(request=number, code="internal_error", text=text))

    def _abandon(self, number: int) -> None:
        if number in [request.number for request in self._parked]:
            self._parked = [request for request in self._parked if request.number != number]
            self._router.send(m.Raised(request=number, code="cancelled", text="the request was cancelled"))
        self._answering.abandon(number)

    def _go_on(self, generations: list[OpenChoice]) -> None:
        for generation in generations:
            self._submit(generation)
        self._want_lease()

    # --- the lease

    def _want_lease(self) -> None:
        if self._lease is None and not self._asked and not self._answering.idle:
            self._asked = True
            self._router.send(m.NeedLease(version=self._backend.version))

    def _granted(self, lease: m.Lease) -> None:
        self._asked, self._lease = False, lease
        self._answering.timings.leased(time.monotonic())
        self._executor = BlockingLink(os.path.join(self._directory, f"gpu{lease.gpu}.{lease.epoch}"))
        try:
            if not self._executor.meet(MEET_S):
                raise PeerLost("nobody has answered")
        except PeerLost:
            self._hang_up()  # its router will say that it is lost
            return
        model = self._model
        first, *parts = [None] if model.adapter is None else model.adapter.parts(MODULES)
        self._tell(m.OpenModel(spec=model.spec, weights=len(model.weights), adapter=first, parts=len(parts)))
        for part in parts:
            assert part is not None
            self._tell(m.AdapterPart(adapter=part))
        for weights in batches(model.weights, WEIGHTS):
            self._tell(m.Weights(weights=weights))
        for generation in self._answering.unfinished():
            self._submit(generation)

    def _submit(self, generation: OpenChoice) -> None:
        """Nothing without a lease: with the next one, all are submitted."""
        for part in generation.submits(self._words.ends, time.monotonic()):
            self._tell(part)

    def _seat_over(self, lease: m.Lease, text: str, unneeded: bool) -> None:
        self._lease = None
        self._hang_up()
        self._router.send(m.LeaseEnded(serial=lease.serial, version=self._backend.version))
        if text:
            self._answering.fail_all("out_of_memory", text)
        elif unneeded:  # what has crossed with that was not begun
            self._want_lease()
        else:
            self._resume("the process that computed it has died twice")

    def _resume(self, text: str) -> None:
        """Unfinished requests go on with the next lease, once."""
        self._answering.resume(text)
        self._want_lease()

    # --- the executor, and the runtime behind it

    def _tell(self, message: m.InstanceToRuntime) -> None:
        if self._lease is not None:
            self._say(m.ToRuntime(serial=self._lease.serial, data=msgspec.msgpack.encode(message)))

    def _say(self, message: m.LlmToExecutor) -> None:
        if self._executor is not None:
            try:
                self._executor.send(msgspec.msgpack.encode(message))
            except PeerLost:
                self._hang_up()  # the router will report the lease's end

    def _hang_up(self) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def _hear_executor(self) -> None:
        assert self._executor is not None
        try:
            while self._executor is not None and (data := self._executor.recv(0)) is not None:
                message = self._of_executor.decode(data)
                lease = self._lease
                if lease is None or message.serial != lease.serial:
                    continue
                match message:
                    case m.OfRuntime(data=inner):
                        self._from_runtime(self._of_runtime.decode(inner))
                    case m.SeatOver(text=text, unneeded=unneeded):
                        self._seat_over(lease, text, unneeded)
        except PeerLost:
            self._hang_up()

    def _from_runtime(self, message: m.RuntimeToInstance) -> None:
        match message:
            case m.ModelRefused(text=text):
                self._answering.fail_all("model_refused", text)
            case m.Tokens():
                self._answering.tokens(message)
