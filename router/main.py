"""The router process: carries out what the policy of requests decides, between clients, the controller, the zygote
and the instances.

Makes all parts of the router. Decides nothing about a request.
"""

import asyncio
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import assert_never

from dormouse.core import tenants
from dormouse.core.actor import Actor, run_actor
from dormouse.core.audit import Audit
from dormouse.core.config import NodeConfig, parse_nbytes
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import failures
from dormouse.core.decisions.requests.policy import RequestPolicy
from dormouse.core.decisions.requests.state import RouterState
from dormouse.core.keys import KeyFile
from dormouse.core.links.link import Link
from dormouse.core.names import base_of
from dormouse.core.secretfile import SecretFile
from dormouse.router.access.gate import HttpGate
from dormouse.router.access.limits import TenantLimits
from dormouse.router.admin import adminhttp, overview
from dormouse.router.admin.admin import Admin
from dormouse.router.admin.adminsocket import AdminSocket
from dormouse.router.admin.asks import Asks
from dormouse.router.admin.environments import Environments
from dormouse.router.admin.filechanges import FileChanges
from dormouse.router.admin.history import History
from dormouse.router.admin.keeper import Keeper
from dormouse.router.admin.scrapes import Scrapes
from dormouse.router.admin.snapshots import Snapshots
from dormouse.router.admin.vault import Vault
from dormouse.router.admin.versions import KeptVersions
from dormouse.router.dashboard.pages import PageFiles
from dormouse.router.dashboard.watch import Sampler
from dormouse.router.front.calls import FunctionCalls
from dormouse.router.front.counts import ServedCounts
from dormouse.router.front.drain import Draining
from dormouse.router.front.http import Application
from dormouse.router.front.requests import Requests
from dormouse.router.front.server import LEAVE_LOOK_S, HttpServer
from dormouse.router.instances.functionlog import FunctionLogs
from dormouse.router.instances.instances import Instances
from dormouse.router.instances.plain import PlainZygote
from dormouse.router.instances.sessions import Sessions
from dormouse.router.instances.zygote import ZygoteLink
from dormouse.router.jobs.jobs import Jobs
from dormouse.router.jobs.jobshttp import JobsHttp
from dormouse.router.shell import Shell
from dormouse.router.starts import InstanceStarts
from dormouse.router.traces.outbox import Outbox
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, RemoteProtocolError


class Router(Actor):
    """See the module."""

    def __init__(self, role: str, epoch: int, config: NodeConfig) -> None:
        super().__init__(role, epoch, config)
        limits = config.limits
        picture = RouterState(
            limits.loads,
            limits.queue,
            f"{epoch}-",
            one_tenant=config.node.tenants == "one",
            extra_instances=limits.extra_instances,
            extra_idle_s=limits.extra_idle_ms / 1000,
            longest_s=limits.timeout_ms / 1000,
            longest_load_s=limits.load_timeout_ms / 1000,
            shares=dict(tenants.shares(config.tenants)),
        )
        self.policy = RequestPolicy(picture)
        self.device: m.DeviceInfo | None = None
        self._shell = Shell(self.policy, self._perform)
        counts, limits_of_tenants = ServedCounts(self._tell), TenantLimits(config.tenants)
        drain = Draining(self.paths.drained, lambda: self.requests.left + self.jobs.runs.left)
        self.requests = Requests(limits, picture, self.dispatch, counts, limits_of_tenants, drain)
        self._calls = FunctionCalls(self, self._send)
        self.jobs = Jobs(self)
        self._asks = Asks(self.dispatch, self._tell)
        self.scrapes = Scrapes(self, self._tell, self._kept)
        self.traces = Outbox(self, config.tracing)
        self.requests.export, self.requests.trace_share = self.traces.add, self.traces.share
        folder_nbytes, most_of = parse_nbytes(limits.folder), partial(tenants.folder_nbytes, config)
        many = most_of if config.node.tenants == "many" else None
        snapshots = Snapshots(self.state.functions, folder_nbytes, limits.folder_files, many)
        self._keeper = Keeper(snapshots, shared=many is not None)
        self._history = History(limits.versions, self._keeper.snapshots.tree, self.log)
        self._logs = FunctionLogs(self.state.function_log, parse_nbytes(limits.log), picture.functions, picture.changes)
        self.instances = Instances(config, self.paths, self._from_instance, self._from_broken, self.log)
        self._zygote = ZygoteLink(
            config.sandbox,
            self.paths,
            self.instances,
            self.dispatch,
            self._forking_changed,
            self._zygote_lost,
            self.log,
        )
        self._environments = Environments(self, self.state.environments)
        self.plain = PlainZygote(self, self._environments.ended)
        secrets_key = Path(config.node.secrets_key) if config.node.secrets_key else self.state.secrets_key
        self._changes = FileChanges()
        self._vault = Vault(SecretFile(self.state.secrets, secrets_key), picture, self._changes)
        self._versions = KeptVersions(
            self._history, self._keeper, self._environments, picture, self.instances.snapshots
        )
        self._starts = InstanceStarts(
            picture,
            self.instances,
            self._logs,
            self._vault,
            self._keeper.snapshots,
            self._environments,
            self._zygote,
            self.plain,
            self.dispatch,
            self.log,
        )
        self.sessions = Sessions(self)
        self._watch: Sampler | None = None
        self._http: HttpServer | None = None
        self._admin_socket: AdminSocket | None = None
        self._controller: Link[m.ControllerToRouter, m.RouterToController] | None = None

    def _kept(self) -> m.KeptCounted:
        """For `/metrics`."""
        environments = self._environments
        return m.KeptCounted(
            builds=environments.builds,
            environments=environments.count,
            environments_nbytes=environments.nbytes,
            secrets=self._vault.counts(),
            disk_free_nbytes=-1 if (free_nbytes := self.disk_free_nbytes) is None else free_nbytes,
        )

    # --- life

    async def start(self) -> None:
        self.state.make()
        keys, audit = KeyFile(self.state.keys), Audit(self.state.audit)
        self._controller = Link(
            self.paths.link("controller", "router", self.epoch),
            bind=False,
            incoming=m.ControllerToRouter,
            on_message=self._from_controller,
        )
        gate = HttpGate(self.config.node, keys, audit)
        admin = Admin(
            self,
            keys,
            audit,
            self._keeper,
            self._asks,
            self._logs,
            self._history,
            self.jobs,
            self._vault,
            gate.passes,
            gate.admits,
            self._environments,
            self._changes,
        )
        self._admin_socket = AdminSocket(self, admin, audit, self.config.node.admins)
        self._environments.open()
        self.jobs.open()
        self.traces.open()
        self._watch = Sampler(self, admin.status, gate.admits)
        administer = partial(adminhttp.route, admin, self.scrapes, self._watch, PageFiles())
        application = Application(self, gate, administer, JobsHttp(self.jobs))
        self._http = HttpServer(self, application, self.requests.bodies.unread, self.requests.turned_away)
        await self._http.listens()
        self.sessions.open(self.paths.attach)
        self._admin_socket.open(self.paths.admin)

    async def stop(self) -> None:
        self._shell.close()
        self.sessions.close()  # first: they wait for a word, and HTTP may take seconds to end
        await self.jobs.stop()
        self.requests.stop()
        if self._watch is not None:
            self._watch.close()
        if self._admin_socket is not None:
            self._admin_socket.close()
        if self._http is not None:
            await self._http.close()
        self._zygote.close()
        self.plain.close()
        self._environments.close()
        self._changes.close()
        self.instances.close_all()
        self.scrapes.close()
        self.traces.close()
        self.requests.counts.flush()
        if self._controller is not None:
            self._controller.close()
        self._logs.close()

    def leave(self, within_s: float) -> None:
        self.spawn(self._leave(within_s))

    async def _leave(self, within_s: float) -> None:
        """All that was asked here is answered, as far as that does not take too long."""
        assert self._http is not None, "nobody is told before the start"
        self.jobs.runs.pause()
        try:
            async with asyncio.timeout(within_s):
                await self._http.leave()
                while self.requests.left or self.jobs.runs.left:  # noqa: ASYNC110  # what is asked at the node
                    await asyncio.sleep(LEAVE_LOOK_S)
        except TimeoutError:
            self.log.warning("requests_left_behind", requests=self.requests.left)
        self.supervisor.send(m.Left())

    def dispatch(self, event: e.Event) -> None:
        self._shell.dispatch(event)

    @property
    def ending(self) -> bool:
        """Whether no answer can be had any more but that the node ends or starts anew."""
        return self._stopping.done()

    @property
    def seen(self) -> set[str]:
        """Processes that have been up."""
        return self.scrapes.seen

    @property
    def watchers(self) -> int:
        """Readers of the dashboard's stream."""
        return 0 if self._watch is None else self._watch.watchers

    @property
    def disk_free_nbytes(self) -> int | None:
        """Of the state directory's disk."""
        try:
            return shutil.disk_usage(self.state.state).free
        except OSError:
            return None

    @property
    def picture(self) -> RouterState:
        return self.policy.picture

    @property
    def address(self) -> tuple[str, int]:
        assert self._http is not None, "nobody asks before the start"
        return self._http.address

    @property
    def confinement(self) -> str:
        return self._zygote.confinement

    @property
    def torch(self) -> tuple[str, str]:
        """Versions of Python and torch that functions have; "" before they are known."""
        return self._zygote.versions

    # --- messages of others

    def blamed(self, blame: m.Blame) -> None:
        self.dispatch(e.Blamed(blame.instance, blame.text))

    def peers_changed(self, before: dict[str, int]) -> None:
        self.instances.peers_changed(self.peers)
        self._zygote.connect(self.peers.get("zygote", 0))
        self.plain.peers_changed(self.peers, self.down)
        self.scrapes.peers_changed(self.peers)
        self.traces.peers_changed(self.peers)
        self._forking_changed()
        if self._watch is not None:
            self._watch.processes(self.peers, overview.gone(self))

    def _zygote_lost(self) -> None:
        """All forked instances are forgotten, so all of them end."""
        self.plain.reset()
        self.dispatch(e.ZygoteLost())

    def _signal(self, name: str, number: int) -> None:
        if self.plain.has(name):
            self.plain.signal(name, number)
        else:
            self._zygote.post(m.Signal(instance=name, signal=number))

    def _forking_changed(self) -> None:
        possible = self._zygote.warm and self.device is not None and self.instances.store_attached
        nbytes = self.device.total_nbytes if self.device is not None else 0
        gpus = sum(role.startswith("gpu") for role in self.peers)
        exposed = self.config.models_exposed(self.instances.apart)
        picture = self.policy.picture
        known = picture.forking, picture.gpu_nbytes, picture.gpus, picture.models_exposed
        if (possible, nbytes, gpus, exposed) != known:
            self.dispatch(e.ForkingChanged(possible, nbytes, gpus, exposed))

    def _from_controller(self, message: m.ControllerToRouter) -> None:
        match message:
            case m.Device(info=info):
                self.device = info
                self._forking_changed()
            case m.Status():
                self._asks.status_came(message)
            case m.Measures():
                self.scrapes.measured(message)
            case m.TokensUsed(tenants=tenants):
                self.requests.tenants.used(tenants, self.loop.time())
            case _:
                self.dispatch(e.FromController(message))
                if isinstance(message, m.Catalogue):
                    self.requests.catalogue_known.set()
                    self._versions.restore(message.functions)
                    self._logs.restore({base_of(spec.name) for spec in message.functions})

    def _from_instance(self, name: str, message: m.InstanceToRouter) -> None:
        self.dispatch(e.FromInstance(name, message))

    def _from_broken(self, name: str, text: str) -> None:
        self.dispatch(e.Garbage(name, text))

    # --- actions

    def _perform(self, action: e.Action) -> None:
        match action:
            case e.Pass(parts=parts):
                self.requests.passed(parts)
            case e.BeginStream():
                self.requests.begun(action)
            case e.Answer():
                self._answer(action)
            case e.Fail() | e.Drop():
                self.requests.settle(action)
            case e.Handover(request=request, instance=name, ticket=ticket, lease=lease, route=route):
                said, labels = self.requests.body(request), self.requests.labels(request)
                self.instances.hosts[name].runs(ticket, labels.id)
                body, nbytes = self.instances.hosts[name].put_request(said.data)
                run = m.Run(
                    request=ticket,
                    lease=lease,
                    body=body,
                    nbytes=nbytes,
                    route=route,
                    id=labels.id,
                    trace=labels.trace.parent,
                    tracestate=labels.trace.state,
                    kind=said.kind,
                    accept=said.accept,
                )
                self._send(name, run)
                if self._watch is not None:
                    self._watch.handed(request)
            case e.Start(instance=name, spec=spec, check=check):
                assert self.device is not None
                self._starts.start(name, spec, self.device, check)
            case e.Kill(instance=name, why=why):
                if not self.sessions.end(name, why):
                    self._signal(name, signal.SIGKILL)
            case e.Interrupt(instance=name, ticket=ticket):
                self.instances.hosts[name].give_up(ticket)
                self._signal(name, signal.SIGUSR1)
            case e.Clean(instance=name, how=how):
                self.sessions.end(name, "was given up")
                self.instances.close(name, how)
                self._versions.remove_unused()
            case e.Send(instance=name, message=message):
                self._send(name, message)
            case e.BeginCall():
                self._calls.begin(action)
            case e.RefuseCall(instance=name, number=number, failure=failure):
                self._calls.refuse(name, number, failure)
            case e.Tell(message=told):
                self._tell(told)
            case e.Settled():
                self._asks.settled(action)
                if self._watch is not None:
                    self._watch.poke()
            case e.NewVersion(spec=spec):
                if self._versions.tenant_of(spec.name) not in (None, spec.tenant):
                    self._starts.begin_log(spec)
                self._versions.deployed(spec)
            case e.Discard(spec=spec):
                self._versions.discarded(spec)
            case e.LogNote(name=name, text=text):
                self._logs.of(name).write(f"--- {text}\n".encode())
                self.log.warning("function_note", function=name, text=text)
            case _:
                assert_never(action)

    def _tell(self, message: m.RouterToController) -> None:
        assert self._controller is not None, "nothing is decided before the start"
        if isinstance(message, m.Answered) and message.used:
            self._controller.send_late(message)  # the executor reports the end of the lease
        else:
            self._controller.send(message)

    def _send(self, name: str, message: m.RouterToInstance) -> None:
        try:
            self.instances.send(name, message)
        except PeerLost as error:
            self._from_broken(name, str(error))

    def _answer(self, action: e.Answer) -> None:
        try:
            body = self.instances.hosts[action.instance].take_response(action.body, action.nbytes, action.kind)
        except RemoteProtocolError as error:
            failure = failures.sandbox_died(f"broke the protocol ({error})")
            self._from_broken(action.instance, str(error))
            self.requests.settle(e.Fail(action.request, failure, action.timing))
        else:
            self.requests.settle(action, body)


if __name__ == "__main__":
    os.umask(0o077)
    run_actor(Router)
