"""The main loop of an instance: makes the function, runs its ``load()``, then ``handle()`` once per request.

Owns the conversation with the router. User code runs in the main thread; its exceptions become answers, and the
instance goes on. The shim is installed before the function's first line runs.
"""

import faulthandler
import gc
import importlib
import os
import site
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from typing import Any, Final, NoReturn, TextIO

import torch

from dormouse.client import inside
from dormouse.client_shim.instance import advice, context, publicly, report
from dormouse.client_shim.instance.answer_parts import PartSender
from dormouse.client_shim.instance.batches import FailedRequest
from dormouse.client_shim.instance.calls import CallWay
from dormouse.client_shim.instance.cancel import Cancellation, RequestCancelled
from dormouse.client_shim.instance.codec import BadResponse
from dormouse.client_shim.instance.coroutines import Coroutines
from dormouse.client_shim.instance.handler import Handler
from dormouse.client_shim.instance.hints import EncodedAnswer, Hints
from dormouse.client_shim.instance.user_function import LoadFailure, UserFunction, function_of, hinted
from dormouse.client_shim.node.node_backend import NodeBackend
from dormouse.client_shim.stream.stream import Stream
from dormouse.client_shim.torch_face.install import install
from dormouse.core.answers import Response
from dormouse.core.errortext import HINT
from dormouse.core.sandbox.confinement import ENVIRONMENT
from dormouse.core.sandbox.forkserver import ChildSetting
from dormouse.core.shm import SharedMemory
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost
from dormouse.schemas.open_inference import InferenceKind

LOST: Final = ("executor_lost", "seat_lost")
"""Codes of errors with which the lease is over."""


def _of_host_model(state: Any) -> str:
    """A warning for the deployer of a module whose parameters are not on the GPU; "" for any other state."""
    if not isinstance(state, torch.nn.Module):
        return ""
    first = next(state.parameters(), None)
    if first is None or first.is_cuda:
        return ""
    return 'the model that load() returns is on the CPU, and computes there: return model.to("cuda")'


class Runner:
    """One function in one instance."""

    def __init__(
        self,
        backend: NodeBackend,
        stream: Stream,
        memory: SharedMemory,
        layout: m.Arena,
        cancel: Cancellation,
        coroutines: Coroutines,
        limits: dict[str, str],
        network: bool,
    ) -> None:
        self.backend = backend
        self.stream = stream
        self._request_area = memory.view[: layout.request_nbytes]
        self._response_area = memory.view[layout.request_nbytes : layout.stream_offset]
        self._cancel = cancel
        self._limits, self._network = limits, network
        self._handler = Handler(coroutines)
        self.state: Any = None
        self.function: UserFunction
        self.hints: Hints

    def load(self, make: Callable[[], UserFunction], check: str = "", whole: bool = False) -> bool:
        """Make the function and load it; the outcome is reported to the router. False if the instance is of no use.
        ``check``: a request in JSON which it answers before it counts as loaded; "": none. ``whole``: no answer of it
        may be in parts.
        """
        try:
            function = self._handler.call(make)
            self.hints = self._handler.call(Hints, *hinted(function), function.signature)
            self.state = self._handler.call(function.load)
            if check:
                self._check(function, check.encode(), whole)
            self.backend.may_acquire = False  # also for threads of load() that still run
            self.stream.commit()
            self.stream.loading = False
        except LoadFailure as failure:
            return self._load_failed(failure.code, str(failure))
        except BaseException as error:
            return self._load_failed(*self.verdict(error, "load()", "load_raised"))
        gc.collect()
        gc.freeze()  # the model's objects live as long as the instance: no collection needs to look at them again
        self.function = function
        version, nbytes = self.backend.version, self.backend.nbytes
        warning = self.hints.warning or _of_host_model(self.state)
        said = m.Loaded(version=version, nbytes=nbytes, warning=warning, schema=self.hints.schema)
        self.backend.router.send(said)
        return True

    def _check(self, function: UserFunction, body: bytes, whole: bool) -> None:
        """With the leases that load() has. The answer is dropped. Raises LoadFailure."""
        try:
            asked = self.hints.asked(body, "", "")
            result = self._handler.call(function.handle, self.state, asked.value)
            if parts := None if whole else self._parts(result):
                head = publicly.head_of(result) if isinstance(result, Response) else None
                _put(parts, PartSender(0, lambda message: None, lambda number: m.STREAM_WINDOW_NBYTES, head))
            else:
                head = asked.answer(result, len(self._response_area)).head
        except BaseException as error:
            code, text = self.verdict(error, "handle()", "check_failed")
            said = f"{text}\n{HINT}the check was not answered"  # the exception is the text's gist, and comes first
            raise LoadFailure(code if code in LOST else "check_failed", said) from None
        finally:
            self._handler.finish()
        if head is not None and head.status >= 400:
            raise LoadFailure("check_failed", f"the check was answered with the status {head.status}")

    def serve_many(self) -> None:
        """The same, so many at once."""
        from dormouse.client_shim.instance.concurrent import Concurrent  # imports modules that others do not need

        Concurrent(self).serve()

    def serve_batches(self) -> None:
        """The same, in batches."""
        from dormouse.client_shim.instance.batches import Batches

        Batches(self).serve()

    def unload(self) -> None:
        """The function's last word, before the process ends: the router waits for it a while, and then no more."""
        if self.function.unload is None:
            return
        try:
            self._handler.call(self.function.unload, self.state)
        except BaseException as error:
            print(report.describe(error, "unload()"), file=sys.stderr)

    def _load_failed(self, code: str, text: str) -> bool:
        print(text, file=sys.stderr, flush=True)
        self.backend.router.send(m.LoadFailed(code=code, text=text))
        return False

    def serve(self) -> None:
        """Answer requests until the router says Exit. Raises PeerLost."""
        while isinstance(run := self.backend.router.next_run(), m.Run):
            try:
                with self._cancel.window(run.request):
                    answer = self._answer(run)
            except RequestCancelled:
                self.stream.lose_lease("was cancelled")
                answer = m.Raised(request=run.request, code="cancelled", text="the request was cancelled")
            self._handler.finish()
            if remains := self.stream.remains():
                print(f"dormouse: this instance is replaced: {remains}", file=sys.stderr, flush=True)
                self.backend.router.send(m.Spoiled(text=remains))
            sys.stdout.flush()
            sys.stderr.flush()
            self.backend.router.send(answer)

    def _answer(self, run: m.Run) -> m.Returned | m.Raised:
        """One request, its write-back included."""
        stream = self.stream
        asked = result = parts = answer = None
        failed: FailedRequest | None = None
        try:
            assert run.lease is not None
            context.begin(run)
            stream.begin_lease(run.lease)
            body = run.body if run.body is not None else self._request_area[: run.nbytes]
            asked = self.hints.asked(body, run.kind, run.accept)
            result = self._handler.call(self.function.handle, self.state, asked.value)
            parts = self._parts(result)
            if parts and InferenceKind.of(run.kind) is not None:
                raise BadResponse("handle() answers in parts, which /v2 cannot: POST /functions/NAME/invoke")
            if parts:
                head = publicly.head_of(result) if isinstance(result, Response) else None
                answer = self._send_parts(run, parts, head)
            else:
                answer = asked.answer(result, len(self._response_area))
            self._handler.finish()
            asked = result = parts = None  # they may hold tensors that would join the model
            stream.end_lease()
        except RequestCancelled:
            raise
        except BaseException as error:
            failed = self.failure(error, "handle()")
        if failed is not None:  # out of the handler: the exception and with it the frames of user code are gone
            asked = result = parts = answer = None
            return self._raised(run, failed)
        assert answer is not None
        data, kind, head = answer
        inline = len(data) <= m.INLINE_BODY_NBYTES
        if not inline:
            self._response_area[: len(data)] = data
        said = bytes(data) if inline else None
        used = stream.last_used
        return m.Returned(request=run.request, body=said, nbytes=len(data), used=used, kind=kind, head=head)

    def _send_parts(self, run: m.Run, parts: Generator[Any, None, None], head: m.AnswerHead | None) -> EncodedAnswer:
        """Each as soon as it is there. Returns the remaining answer: none."""
        router = self.backend.router
        _put(parts, PartSender(run.request, router.send, router.wait_taken, head))
        return EncodedAnswer(b"")

    def _parts(self, result: Any) -> Generator[Any, None, None] | None:
        """To be closed; None if it is no answer in parts."""
        return self._handler.parts(result.body if isinstance(result, Response) else result)

    def call(self, code: Callable[..., Any], *arguments: Any) -> Any:
        """Code of the function, whatever kind it is."""
        try:
            return self._handler.call(code, *arguments)
        finally:
            self._handler.finish()

    def failure(self, error: BaseException, where: str) -> FailedRequest:
        """Of a request."""
        try:
            word = publicly.word_of(error, self.function.folder)
        except Exception as other:  # user code: exceptions make their own text
            error, word = other, None
        if word is not None:
            return FailedRequest("function_refused", word.text, head=word.head)
        return FailedRequest(*self.verdict(error, where, "function_raised"), report.param(error))

    def verdict(self, error: BaseException, where: str, otherwise: str) -> tuple[str, str]:
        """Code and text of user code's exception."""
        code, text, name = report.code(error, otherwise), report.describe(error, where), report.limit(error)
        if name == "processes" and not _cannot_fork():  # threads may lack memory; EAGAIN has other reasons too
            name = "memory" if isinstance(error, RuntimeError) else ""
        if code in (otherwise, "out_of_memory") and name in self._limits:
            return "limit_exceeded", f"{text}\n{HINT}the function's instance met its {self._limits[name]}"
        if code == otherwise and (said := advice.hint(error, self._network)):
            text = f"{text}\n{HINT}{said}"
        return code, text

    def _raised(self, run: m.Run, failed: FailedRequest) -> m.Raised:
        """Give the lease back. Storages that the request made and Python still holds stay, as they do natively."""
        code, text, param, head = failed
        if code in LOST:
            self.stream.lose_lease()
        elif self.stream.leased:
            try:
                self.stream.end_lease()
            except RequestCancelled:
                raise
            except Exception as error:  # other failures: another command, growth beyond the quota, the executor
                if code == "bad_response":  # natively its operands would not have been there
                    code, text = self.verdict(error, "handle()", "function_raised")
                elif code not in report.CLIENTS and (lost := report.code(error, code)) in LOST:
                    code = lost
                print(f"dormouse: at the end of this request: {error}", file=sys.stderr)
        if code not in report.CLIENTS:  # those are none of the function's mistakes
            print(report.record(context.of(run), text), file=sys.stderr, flush=True)
        head = head if code == "function_refused" else None
        return m.Raised(request=run.request, code=code, text=text, param=param, used=self.stream.last_used, head=head)


def _put(parts: Generator[Any, None, None], sender: PartSender) -> None:
    with closing(parts):
        for part in parts:
            sender.put(part)
    sender.finish()


def _cannot_fork() -> bool:
    try:
        pid = os.fork()
    except OSError:
        return True
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return False


def _log_file(fd: int) -> TextIO:
    """A text file over the log: the zygote's own objects remember that theirs was seekable, and a pipe is not."""
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _use(environment: str) -> None:
    """Libraries of the function's own, before all others; also in the programs that it starts."""
    sys.path.insert(0, environment)
    site.addsitedir(environment)  # its .pth files
    importlib.invalidate_caches()
    os.environ["PYTHONPATH"] = os.pathsep.join([environment, *filter(None, [os.environ.get("PYTHONPATH")])])


def run_instance(fork: m.Fork, source: bytes, folder: str, arena_fd: int, setting: ChildSetting) -> NoReturn:
    """The life of an instance after its confinement; ``folder`` is its path of the function's folder."""
    faulthandler.enable()
    sys.stdout, sys.stderr = _log_file(1), _log_file(2)
    if fork.build is not None:
        from dormouse.core.sandbox.builder import build  # imports modules that instances do not need

        build(fork.build, source, arena_fd)
    if own := os.environ.get(ENVIRONMENT):
        _use(own)
    context.label_log_records()
    context.carry_into_threads()
    if fork.llm is None and fork.batch + fork.concurrency > 1:
        from dormouse.client_shim.instance import labelled_output  # imports modules that others do not need

        labelled_output.install()
    gc.enable()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else every fork of the zygote would draw the same numbers
    if setting.threads > 1:
        torch.set_num_threads(setting.threads)
    torch.set_grad_enabled(False)
    memory = SharedMemory.adopt(arena_fd, fork.arena.nbytes)
    control = fork.arena.control_offset
    coroutines = Coroutines()
    cancel = Cancellation(memory.view[control : control + m.CONTROL_NBYTES], coroutines)
    cancel.install()
    backend = NodeBackend(fork.directory, memory.view[fork.arena.stream_offset : control], cancel.checkpoint)
    stream = install(backend, fork.device)
    inside.connect(CallWay(backend.router))
    backend.router.send(m.Importing(confinement=setting.confinement))
    runner = Runner(backend, stream, memory, fork.arena, cancel, coroutines, setting.limits, fork.network)
    status = 1
    try:
        if fork.llm is not None:
            from dormouse.client_shim.llm.instance import serve_llm  # imports modules that functions do not need

            status = serve_llm(fork, fork.llm, folder, backend, stream)
        elif runner.load(partial(function_of, fork, source, folder), fork.check, fork.batch + fork.concurrency > 1):
            if fork.batch:
                runner.serve_batches()
            elif fork.concurrency > 1:
                runner.serve_many()
            else:
                runner.serve()
            runner.unload()
            status = 0
        else:
            backend.router.next_run()  # the router has read why, and ends us
    except PeerLost as error:
        print(f"dormouse: {error}", file=sys.stderr)
    sys.stdout.close()
    sys.stderr.close()
    os._exit(status)  # threads of the function may never end
