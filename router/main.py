"""The router process: carries out what router/policy.py decides, between clients, the controller, the zygote and the
instances.

Owns sockets, files and time. It does not decide anything about a request.
"""

import asyncio
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, assert_never

import orjson

from dormouse.core.actor import Actor, run_actor
from dormouse.core.audit import Audit
from dormouse.core.config import NodeConfig, parse_nbytes
from dormouse.core.keys import Keys
from dormouse.core.link import Link
from dormouse.core.poster import Poster
from dormouse.router import events as e
from dormouse.router import failures
from dormouse.router.admin import Admin
from dormouse.router.adminsocket import AdminSocket
from dormouse.router.bodies import BadJson, Bodies, Body, check_json
from dormouse.router.functionlog import FunctionLog
from dormouse.router.instances import Instances
from dormouse.router.policy import Policy
from dormouse.router.server import HttpServer
from dormouse.router.sessions import Sessions
from dormouse.router.snapshots import Snapshots
from dormouse.router.stats import FunctionStats
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, RemoteProtocolError

Outcome = e.Answer | e.Fail | e.Drop
CATALOGUE_S = 20.0
"""A request that finds the router just started waits so long for the catalogue: those that came while the router before
it died are among them, and a node's processes say hello within a second or two, on a busy machine ten.
"""

STATUS_TIMEOUT_S = 5.0
KEEPERS = 4  # deploys that copy at the same time; more would only share the disk

P = ParamSpec("P")
T = TypeVar("T")


class Router(Actor):
    """See the module."""

    def __init__(self, role: str, epoch: int, config: NodeConfig) -> None:
        super().__init__(role, epoch, config)
        limits = config.limits
        self.policy = Policy(
            limits.loads,
            limits.queue,
            limits.lease_ms,
            f"{epoch}-",
            one_tenant=config.node.tenants == "one",
            extra_instances=limits.extra_instances,
            extra_idle_ms=limits.extra_idle_ms,
        )
        self.snapshots = Snapshots(self.state.functions, parse_nbytes(limits.folder), limits.folder_files)
        self._keeper = ThreadPoolExecutor(KEEPERS, "snapshots")
        self._discarded: list[m.FunctionSpec] = []  # whose snapshots an instance that ends may still read
        self.stats: dict[str, FunctionStats] = {}  # by function
        self.body_nbytes = parse_nbytes(limits.body)
        self.bodies = Bodies(parse_nbytes(limits.bodies))
        self.confinement = ""
        self._catalogue_known = asyncio.Event()
        self._logs: dict[str, FunctionLog] = {}  # by function
        self._numbers = count(1)
        self._bodies: dict[int, tuple[str, Body]] = {}  # by request: function, body
        self._answers: dict[int, asyncio.Future[tuple[Outcome, bytes]]] = {}  # by request
        self._asks: dict[int, asyncio.Future[e.Settled]] = {}
        self._queries: dict[int, asyncio.Future[bytes]] = {}
        self._events: deque[e.Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s: float | None = None  # when it is due, by time.monotonic
        self._device: m.DeviceInfo | None = None
        self._zygote: Poster[m.FromZygote, m.ToZygote] | None = None
        self._zygote_epoch = 0
        self._zygote_warm = False
        self.instances = Instances(
            config,
            self.paths,
            self._from_instance,
            lambda name, text: self.dispatch(e.Garbage(name, text)),
        )
        self.sessions = Sessions(self)
        self.admin = Admin(self)
        self.http = HttpServer(self)
        self._admin_socket = AdminSocket(self, self.admin)

    # --- life

    async def start(self) -> None:
        self.state.make()
        self.keys = Keys(self.state.keys)
        self.audit = Audit(self.state.audit)
        self._controller: Link[m.ControllerToRouter, m.RouterToController] = Link(
            self.paths.link("controller", "router", self.epoch),
            bind=False,
            incoming=m.ControllerToRouter,
            on_message=self._from_controller,
        )
        await self.http.open()
        self.sessions.open(self.paths.attach)
        self._admin_socket.open(self.paths.admin)

    @property
    def ending(self) -> bool:
        """Whether no answer can be had any more but that the node ends or starts anew."""
        return self._stopping.done()

    async def knows_catalogue(self) -> bool:
        """Wait until it does, as long as a start takes."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._catalogue_known.wait(), CATALOGUE_S)
        return self._catalogue_known.is_set()

    def blamed(self, blame: m.Blame) -> None:
        self.dispatch(e.Blamed(blame.instance, blame.text))

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.sessions.close()  # first: they wait for a word, and HTTP may take seconds to end
        for request, future in self._answers.items():
            if not future.done():
                future.set_result((e.Fail(request, failures.stopping(), e.Timing()), b""))
        self._admin_socket.close()
        await self.http.close()
        if self._zygote is not None:
            self._zygote.close()
        self.instances.close_all()
        if hasattr(self, "_controller"):
            self._controller.close()
        for log in self._logs.values():
            log.close()

    def peers_changed(self, before: dict[str, int]) -> None:
        self.instances.peers_changed(self.peers)
        epoch = self.peers.get("zygote", 0)
        if epoch != self._zygote_epoch:
            self._zygote_lost()
            self._zygote_epoch = epoch
            if epoch:
                self._connect_zygote(epoch)
        self._forking_changed()

    def _connect_zygote(self, epoch: int) -> None:
        try:
            self._zygote = Poster(self.paths.zygote(epoch), m.FromZygote, self._from_zygote, self._zygote_lost)
        except PeerLost as error:
            self.log.warning("zygote_unreachable", error=str(error))  # it died meanwhile; a new epoch will come

    def _zygote_lost(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._zygote, self._zygote_warm = None, False
            self.log.warning("zygote_lost", epoch=self._zygote_epoch)
            self._forking_changed()
            self.dispatch(e.ZygoteLost())

    def _forking_changed(self) -> None:
        possible = self._zygote_warm and self._device is not None and self.instances.store_attached
        nbytes = self._device.total_nbytes if self._device is not None else 0
        gpus = sum(role.startswith("gpu") for role in self.peers)
        picture = self.policy.picture
        if (possible, nbytes, gpus) != (picture.forking, picture.gpu_nbytes, picture.gpus):
            self.dispatch(e.ForkingChanged(possible, nbytes, gpus))

    # --- messages

    def _from_controller(self, message: m.ControllerToRouter) -> None:
        match message:
            case m.Device(info=info):
                self._device = info
                self._forking_changed()
            case m.Status(query=query, json=data):
                if (future := self._queries.pop(query, None)) is not None and not future.done():
                    future.set_result(data)
            case _:
                self.dispatch(e.FromController(message))
                if isinstance(message, m.Catalogue):
                    self._catalogue_known.set()
                    known = [(spec.name, spec.snapshot) for spec in message.functions]
                    self._remove(self.snapshots.strays(known))

    def _from_instance(self, name: str, message: m.InstanceToRouter) -> None:
        try:
            self.dispatch(e.FromInstance(name, message))
        except Exception as error:  # the outermost frame of this instance's session
            self.log.error("instance_raised", instance=name, story=traceback.format_exc())
            self.dispatch(e.Garbage(name, f"what it sent raised {type(error).__name__} in the router"))

    def _from_zygote(self, message: m.FromZygote) -> None:
        match message:
            case m.ZygoteReady(confinement=confinement):
                self._zygote_warm, self.confinement = True, confinement
                self.instances.own_uids = confinement.startswith("own-uid")
                self._forking_changed()
            case m.Forked(instance=name, pid=pid):
                if (host := self.instances.hosts.get(name)) is not None:
                    host.pid = pid
            case m.Exited(instance=name, limit="memory"):
                met = self.config.sandbox.limit("memory")
                self.dispatch(e.Exited(name, f"was ended at its {met}", failures.limit_exceeded(met)))
            case m.Exited(instance=name, status=status):
                how = f"exited with status {status}" if status >= 0 else f"was killed by {_signal_name(-status)}"
                self.dispatch(e.Exited(name, how))
            case m.ForkFailed(instance=name, text=text):
                self.dispatch(e.Exited(name, f"could not be forked: {text}"))
            case _:
                assert_never(message)

    def dispatch(self, event: e.Event) -> None:
        """Let the policy decide and do what it says; events that arise meanwhile wait their turn."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for action in self.policy.handle(self._events.popleft(), time.monotonic()):
                    self._perform(action)
        finally:
            self._handling = False
        self._set_timer()

    def _set_timer(self) -> None:
        """The policy's clock is finer than uvloop's, of milliseconds: a tick that comes early is set again."""
        when_s = self.policy.next_deadline_s()
        if when_s == self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = when_s
        delay_s = 0.0 if when_s is None else max(0.0, when_s - time.monotonic())
        self._timer = None if when_s is None else self.loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_s = None
        self.dispatch(e.Tick())

    # --- actions

    def _perform(self, action: e.Action) -> None:
        match action:
            case e.Answer():
                self._answer(action)
            case e.Fail(request=request) | e.Drop(request=request):
                self._settle(request, action, b"")
            case e.Handover():
                self._hand_over(action)
            case e.Start(instance=name, spec=spec):
                self._start(name, spec)
            case e.Kill(instance=name, why=why):
                if not self.sessions.end(name, why):
                    self._signal(name, signal.SIGKILL)
            case e.Interrupt(instance=name, ticket=ticket):
                self.instances.hosts[name].give_up(ticket)
                self._signal(name, signal.SIGUSR1)
            case e.Clean(instance=name):
                self.sessions.end(name, "was given up")
                self.instances.close(name)
                self._discard()
            case e.Send(instance=name, message=message):
                self._send(name, message)
            case e.Tell(message=message):
                self._controller.send(message)
            case e.Settled(ask=ask):
                if (future := self._asks.pop(ask, None)) is not None and not future.done():
                    future.set_result(action)
            case e.Discard(spec=spec):
                self._discarded.append(spec)
                self._discard()
            case e.Note(name=name, text=text):
                self.function_log(name).write(f"--- {text}\n".encode())
                self.log.warning("function_note", function=name, text=text)
            case _:
                assert_never(action)

    def _send(self, name: str, message: m.RouterToInstance) -> None:
        try:
            self.instances.send(name, message)
        except PeerLost as error:
            self.dispatch(e.Garbage(name, str(error)))

    def _signal(self, name: str, number: int) -> None:
        if self._zygote is not None:
            self._zygote.post(m.Signal(instance=name, signal=number))

    def _hand_over(self, action: e.Handover) -> None:
        host = self.instances.hosts[action.instance]
        body, nbytes = host.put_request(self._bodies[action.request][1].data)
        self._send(action.instance, m.Run(request=action.ticket, lease=action.lease, body=body, nbytes=nbytes))

    def _answer(self, action: e.Answer) -> None:
        outcome: Outcome = action
        body = b""
        try:
            body = self.instances.hosts[action.instance].take_response(action.body, action.nbytes)
            check_json(body)
        except (RemoteProtocolError, BadJson) as error:
            text = f"the function's instance answered with something that is not JSON: {error}"
            failure = m.Failure(code="sandbox_died", status=502, text=text)
            outcome = e.Fail(action.request, failure, action.timing)
            self.dispatch(e.Garbage(action.instance, str(error)))
        self._settle(action.request, outcome, body)

    def _settle(self, request: int, outcome: Outcome, answer: bytes) -> None:
        function, body = self._bodies.pop(request)
        body.close()
        future = self._answers.pop(request)
        if not future.done():
            future.set_result((outcome, answer))
        stats = self.stats.get(function)
        if stats is None:
            return
        match outcome:
            case e.Answer(timing=t):
                stats.add("ok", (t.queue_s + t.wait_s + t.run_s) * 1000)
            case e.Fail(failure=failure):
                stats.add(failure.code)
            case e.Drop():
                stats.add("cancelled")

    def _start(self, name: str, spec: m.FunctionSpec) -> None:
        folder = self.snapshots.tree(spec.name, spec.snapshot)
        try:
            log = self.function_log(spec.name)
        except OSError as error:
            how = f"could not be started ({error.filename}: {error.strerror}; free space on the disk of [node] state)"
            self.dispatch(e.Exited(name, how))
            return
        assert self._device is not None
        host = self.instances.open(name, spec)
        log.write(
            f"--- instance {name} of version {spec.version} starts, {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}\n".encode()
        )
        pipe = self.instances.open_pipe(host, log)
        fork = self.instances.fork_message(host, spec, str(folder), self._device)
        if self._zygote is not None:
            self._zygote.post(fork, (pipe.write_fd, host.arena.fd))
        pipe.handed()
        self.log.info("instance_starts", instance=name, function=spec.name, version=spec.version)

    def _discard(self) -> None:
        """Remove the snapshots that are not needed any more: an instance that ends may still read its own."""
        used = {host.snapshot for host in self.instances.hosts.values()}
        unused = [spec for spec in self._discarded if spec.snapshot not in used]
        self._discarded = [spec for spec in self._discarded if spec.snapshot in used]
        if unused:
            self._remove([self.snapshots.tree(spec.name, spec.snapshot) for spec in unused])

    def _remove(self, paths: list[Path]) -> None:
        self._keeper.submit(self.snapshots.remove, paths)

    def keeping(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
        """Something of the snapshots, in one of their threads: it may wait long for a disk."""
        return self.loop.run_in_executor(self._keeper, partial(work, *args, **kwargs))

    # --- for HTTP and sessions

    @property
    def device(self) -> m.DeviceInfo | None:
        return self._device

    def submit(self, function: str, body: Body) -> tuple[int, "asyncio.Future[tuple[Outcome, bytes]]"]:
        """A request that has been read and checked; its one fate is the future's result. Its body is closed with it."""
        request = next(self._numbers)
        future: asyncio.Future[tuple[Outcome, bytes]] = self.loop.create_future()
        self._bodies[request], self._answers[request] = (function, body), future
        if function in self.policy.picture.functions:
            self.stats.setdefault(function, FunctionStats())
        self.dispatch(e.Arrived(request, function))
        return request, future

    def leave(self, request: int) -> None:
        self.dispatch(e.Left(request))

    async def deploy(self, spec: m.FunctionSpec) -> e.Settled:
        ask = next(self._numbers)
        self._asks[ask] = self.loop.create_future()
        future = self._asks[ask]
        self.dispatch(e.DeployAsked(ask, spec))
        return await future

    async def restart(self, name: str) -> e.Settled:
        ask = next(self._numbers)
        self._asks[ask] = self.loop.create_future()
        future = self._asks[ask]
        self.dispatch(e.RestartAsked(ask, name))
        return await future

    async def remove(self, name: str) -> e.Settled:
        ask = next(self._numbers)
        self._asks[ask] = self.loop.create_future()
        future = self._asks[ask]
        self.dispatch(e.RemoveAsked(ask, name))
        settled = await future
        if settled.failure is None:
            self.stats.pop(name, None)
            if (log := self._logs.pop(name, None)) is not None:
                log.remove()
        return settled

    def function_log(self, name: str) -> FunctionLog:
        if name not in self._logs:
            self._logs[name] = FunctionLog(self.state.function_log(name), parse_nbytes(self.config.limits.log))
        return self._logs[name]

    async def controller_status(self) -> dict[str, Any]:
        """The controller's own status, or nothing if it does not say in time."""
        query = next(self._numbers)
        future: asyncio.Future[bytes] = self.loop.create_future()
        self._queries[query] = future
        self._controller.send(m.AskStatus(query=query))
        try:
            status: dict[str, Any] = orjson.loads(await asyncio.wait_for(future, STATUS_TIMEOUT_S))
            return status
        except TimeoutError:
            return {}
        finally:
            self._queries.pop(query, None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


if __name__ == "__main__":
    os.umask(0o077)
    run_actor(Router)
