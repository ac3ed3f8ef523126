"""The controller's process: links on one side, the scheduler and the catalogue on the other. Decides nothing itself."""

import secrets
import signal
from typing import ClassVar, assert_never

import msgspec
import orjson

from dormouse.controller import orders, pools, service
from dormouse.controller.catalogue import CatalogueFile
from dormouse.controller.deployed import DeployedFunctions
from dormouse.controller.draining import DrainedGpus
from dormouse.controller.learned import RuntimeNews
from dormouse.controller.measures import measures
from dormouse.controller.moving import Moving
from dormouse.controller.news import News
from dormouse.controller.noderecord import NodeRecord
from dormouse.controller.overshares import OverShares
from dormouse.controller.peers import ControllerPeers
from dormouse.controller.queries import Queries
from dormouse.controller.recording import RecordingHeader
from dormouse.controller.status import NO_STORE, status
from dormouse.controller.supervisor_watch import SupervisorWatch
from dormouse.controller.usage import NodeUsage
from dormouse.core import tenants
from dormouse.core.actor import Actor, run_actor
from dormouse.core.config import NodeConfig
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.topology import discovered
from dormouse.core.directories import RunDirectory
from dormouse.core.due_timer import DueTimer
from dormouse.core.startup import keep_node_config
from dormouse.schemas import messages as m


class Controller(Actor):
    """See the module."""

    parent_death_signal: ClassVar[int] = signal.SIGTERM  # it is the one that cleans up after a killed supervisor

    def __init__(self, role: str, epoch: int, config: NodeConfig) -> None:
        super().__init__(role, epoch, config)
        header = RecordingHeader.new(
            seed=secrets.randbits(128),
            revoke_s=config.limits.lease_ms / 1000,
            keep_s=config.limits.compute_ms / 1000,
            max_waiting=config.limits.queue,
            policy=config.schedule,
            topology=service.topology_of(config),
        )
        self._record = NodeRecord(header, self.log)
        self.scheduler = header.scheduler()
        self._catalogue: CatalogueFile | None = None
        self._links = ControllerPeers(self.paths, self.log)
        self._say = self._links.to_router
        self._hellos: dict[int, m.Hello] = {}  # by GPU
        self._news = News()
        self._runtimes = RuntimeNews(self.scheduler, self.log)
        self._usage = NodeUsage(self.log, tenants.limited(config.tenants), self._say)
        self._over_share = OverShares(self._say)
        self._places: dict[int, m.GpuPlace] = {}  # by GPU, also while its executor is being replaced
        self._queries = Queries()
        self._moving = Moving(self.scheduler, self._links, self._perform, self.loop.time)
        self._drained = DrainedGpus(config, self.scheduler, self._perform, self._say)
        self._store_status = NO_STORE
        self._timer = DueTimer(self._tick)
        self._supervisor_watch = SupervisorWatch()

    @property
    def catalogue(self) -> CatalogueFile:
        """From `start` on."""
        assert self._catalogue is not None
        return self._catalogue

    async def start(self) -> None:
        self._catalogue = CatalogueFile(self.state.catalogue)
        if self.epoch == 1:  # before others learn what is deployed: the store removes the rest
            self.catalogue.expect_whole(self.config.start, self.state.store_segments)
        if self.config.record.path:
            self._record.begin(self.state.state / self.config.record.path, self.config, self.epoch == 1)
        self._deployed = DeployedFunctions(
            self.catalogue,
            self.scheduler,
            self.config.start.without,
            self._perform,
            self._say,
            self._functions_changed,
            self.log,
        )
        self._deployed.restore()
        if shares := tenants.shares(self.config.tenants):
            self._perform(ev.SharesKnown(shares))
        for gpu in self._drained.restore():  # the process before may not have reported it
            self.supervisor.send(m.WantRole(role=f"gpu{gpu}"))
        self._choose_pool()
        self._usage.open(self.state.usage)

    async def stop(self) -> None:
        self._timer.close()
        self._record.close()
        self._usage.close()
        self._links.close()
        if self._catalogue is not None:
            self._runtimes.keep(self._catalogue, self.loop.time(), last=True)
            self._catalogue.close()
        if not self.orderly and self._supervisor_watch.died():
            RunDirectory.clean_up(self.paths.run)

    # --- peers

    def peers_changed(self, before: dict[str, int]) -> None:
        for role in before:
            if role.startswith("gpu") and self.peers.get(role) != before[role]:
                gpu = int(role[3:])
                self._links.close_gpu(gpu)
                self._hellos.pop(gpu, None)
                self._perform(ev.ExecutorDown(gpu))
                self._moving.gpu_gone(gpu)
        for role, epoch in self.peers.items():
            if before.get(role) == epoch:
                continue
            if role.startswith("gpu"):
                self._links.open_gpu(int(role[3:]), epoch, self._on_executor)
            elif role == "router":
                self._links.open_router(epoch, self._on_router)
                self._say(self._deployed.all())
                self._say(self._drained.told())
                self._tell_device()
            elif role == "store":
                self._links.open_store(epoch, self._on_store)
                self._tell_kept()

    def _know_topology(self) -> None:
        gpu = self.config.gpu
        topology = discovered(service.topology_of(self.config), self._places, bool(gpu.switch), bool(gpu.peer))
        if topology != self.scheduler.topology:
            self._perform(ev.TopologyKnown(topology))

    def _functions_changed(self) -> None:
        self._choose_pool()
        self._tell_kept()

    def _choose_pool(self) -> None:
        """The functions have changed, or the executors."""
        functions = self.catalogue.functions()
        self._usage.deployed(functions)
        self.config = pools.chosen(self.config, functions, self.state.language_models, self.log)
        for gpu in pools.outdated(self.config, self._hellos):
            self._perform(ev.ExecutorLeaves(gpu, self.scheduler.gpus[gpu].epoch))

    def _tell_device(self) -> None:
        infos = [hello.info for hello in self._hellos.values()]
        if infos:
            self._say(m.Device(info=min(infos, key=lambda info: info.total_nbytes)))

    def _tell_kept(self) -> None:
        self._links.to_store(m.Keep(functions=self.catalogue.versions()))

    # --- messages

    def _on_router(self, message: m.RouterToController) -> None:
        self._usage.heard(message)
        match message:
            case m.Acquire():
                deadline_s = self.loop.time() + message.deadline_ms / 1000
                version, counts = message.version or 0, not message.own
                batch = service.wanted_batch(message.batch, self.loop.time())
                beyond_s = message.beyond_ms / 1000
                asked = ev.Asked(message.request, message.instance, deadline_s, version, counts, batch, beyond_s)
                self._perform(asked)
            case m.Met(function=function, latency_ms=latency_ms):
                self._perform(ev.RequestAnswered(function, latency_ms / 1000))
            case m.BatchWaits(request=request, came=came, left=left):
                self._perform(ev.BatchChanged(request, service.deadlines(came, self.loop.time()), tuple(left)))
            case m.Release():
                self._perform(ev.Released(message.request))
            case m.InstanceUp():
                self._perform(service.known_instance(message))
                if message.loaded:
                    self._deployed.loaded(message.function, message.instance)
            case m.InstanceGone():
                self._perform(ev.InstanceLost(message.instance))
                self._links.to_store(m.StoreForget(instance=message.instance))
            case m.Deployed():
                self._deployed.deploy(message.spec)
            case m.Removed():
                if self._deployed.remove(message.name):
                    self._moving.removed(message.name)
            case m.Quarantined() | m.Lifted():
                self._deployed.quarantine(message)
            case m.Answered():
                self._perform(ev.Answered(message.request, message.used, message.taken, message.together))
            case m.CallWaits(gpu=gpu, epoch=epoch, serial=serial):
                self._perform(ev.TurnIdle(gpu, epoch, serial))
            case m.Missed():
                self._perform(ev.RequestFailed(message.function, message.request))
            case m.AskPolicy():
                self._asked_policy(message)
            case m.AskPin():
                self._deployed.pin(message)
            case m.AskTraffic():
                self._deployed.share(message)
            case m.AskMove():
                self._moving.asked(message)
            case m.AskDrainGpu():
                self._drained.asked(message)
            case m.AskUsage():
                self._say(self._usage.answer(message))
            case m.Served():
                pass
            case m.AskStatus(query=query):
                self._asked_status(query)
            case m.AskMeasures(query=query):
                found = measures(self.scheduler, self._usage.totals(), self._hellos, self._store_status)
                self._say(m.Measures(query=query, measures=m.packed(found)))
            case _:
                assert_never(message)

    def _on_executor(self, gpu: int, epoch: int, message: m.ExecutorToController) -> None:
        match message:
            case m.Hello():
                self._hellos[gpu] = message
                self._news.came_up(gpu)
                if message.place is not None:
                    self._places[gpu] = message.place
                    self._know_topology()
                up = ev.ExecutorUp(gpu, epoch, message.stats, message.context_nbytes, message.beside_nbytes)
                self._perform(up)
                self._choose_pool()
                self._tell_device()
            case m.Done() | m.Pressed() | m.Awake() | m.Idle() | m.Busy() | m.WantsTurn() | m.Preloaded():
                if isinstance(message, m.Awake) and (woken := orders.awoken(gpu, epoch, message, self.scheduler)):
                    self._say(woken)
                self._perform(orders.event(gpu, epoch, message))
                if isinstance(message, m.Done):
                    self._runtimes.keep(self.catalogue, self.loop.time())
                if isinstance(message, m.Preloaded):
                    self._moving.preloaded(message)
            case m.Unloaded(query=query, left_nbytes=left_nbytes):
                self._perform(orders.event(gpu, epoch, message))
                self._moving.left_gpu(query, gpu, left_nbytes)
            case m.Violation():
                self.log.error("protocol_violation", instance=message.instance, gpu=gpu, reason=message.text)
                self._say(m.InstanceViolated(instance=message.instance, text=message.text))
            case m.Metered():
                self._usage.metered(gpu, message, self.loop.time())
            case m.RuntimeLoad() | m.Trouble():
                self._news.heard(gpu, message)
                for event in self._runtimes.heard(gpu, message, self._news.runtimes[gpu].values()):
                    self._perform(event)
                self._runtimes.keep(self.catalogue, self.loop.time())
            case _:
                assert_never(message)

    def _on_store(self, message: m.StoreToController) -> None:
        match message:
            case m.ModelSize():
                self._perform(ev.ModelSized(message.instance, message.version, message.nbytes))
            case m.HostMetered():
                self._usage.heard(message)
            case m.StoreStatus():
                self._store_status = message
                self.catalogue.settle()
            case m.StoreReport():
                if (query := self._queries.reported(message.query)) is not None:
                    self._say_status(query, message)
            case m.MovedDown(query=query, left_nbytes=left_nbytes):
                self._moving.left_host(query, left_nbytes)
            case m.ModelDamaged():
                self.log.error("model_damaged", instances=message.instances, reason=message.text)
                for instance in message.instances:
                    self._say(m.EndInstance(instance=instance, failure=service.damaged(message.text)))
            case m.LoadDisplaced(instance=instance):
                self._say(m.EndInstance(instance=instance, failure=service.displaced()))
            case _:
                assert_never(message)

    # --- status

    def _asked_status(self, query: int) -> None:
        """The store's part takes a message there and back; without a store, or in time, the rest is sent alone."""
        self._over_share.look(self.scheduler.shares, self.loop.time())
        number = self._queries.asked(query, self.loop.time()) if self._links.has_store else None
        if number is None:
            self._say_status(query, None)
            return
        self._links.to_store(m.AskStore(query=number))
        self._set_timer()

    def _say_status(self, query: int, report: m.StoreReport | None) -> None:
        names = [name for name, _ in self.catalogue.versions()]
        now_s = self.loop.time()
        value = status(
            self.scheduler, self._hellos, names, self._store_status, report, now_s, self._news, self._usage.busy
        )
        self._say(m.Status(query=query, json=orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)))

    def _asked_policy(self, asked: m.AskPolicy) -> None:
        """It holds while the node runs: a controller that is started again reads it from where it was kept."""
        policy, failure = service.asked_policy(self.scheduler.policy, asked)
        if policy != self.scheduler.policy:
            self.config = msgspec.structs.replace(self.config, schedule=policy)
            keep_node_config(self.config)
            self._perform(ev.PolicyChosen(policy))
            self.log.info("policy_changed", **asked.changes)
        self._say(m.Status(query=asked.query, json=msgspec.json.encode(self.scheduler.policy), failure=failure))

    # --- actions

    def _perform(self, event: ev.Event) -> None:
        now_s = self.loop.time()
        actions = self.scheduler.handle(event, now_s)
        for action in actions:
            self._act(action)
        self._moving.look()
        self._drained.look()
        self._over_share.look(self.scheduler.shares, now_s)
        self._set_timer()
        self._record.add(now_s, event, actions)

    def _set_timer(self) -> None:
        self._timer.set(self.scheduler.next_deadline_s)
        self._timer.set(self._queries.next_deadline_s)

    def _tick(self) -> None:
        now_s = self.loop.time()
        for query in self._queries.overdue(now_s):
            self._say_status(query, None)
        due_s = self.scheduler.next_deadline_s
        if due_s is not None and due_s <= now_s:
            self._perform(ev.Tick())
        else:
            self._set_timer()

    def _act(self, action: ev.Action) -> None:
        match action:
            case ev.WakeOn():
                gpu = action.lease.gpu
                self._links.to_gpu(gpu, orders.wake(action, self.scheduler))
                self._say(orders.granted(action, self.scheduler))
            case ev.RefuseAsk():
                self._say(m.Refused(request=action.request, failure=action.failure))
            case ev.LoseLease():
                self._say(m.LeaseLost(request=action.request))
            case ev.FinishLease():
                if action.wrote:
                    self._say(m.Wrote(instance=action.instance))
            case ev.PreloadOn(gpu=gpu, instance=instance):
                self._links.to_gpu(gpu, orders.preload(action, self.scheduler.preload_worth(gpu, instance)))
            case ev.PauseOn() | ev.TurnOn() | ev.OverOn() | ev.RevokeOn() | ev.RetireExecutor() | ev.StopPreloadOn():
                self._links.to_gpu(action.gpu, orders.order(action))
            case ev.DrainOn():
                self._links.to_gpu(action.gpu, orders.order(action))
            case ev.ForgetInstance():
                for gpu in self._links.gpus:
                    self._links.to_gpu(gpu, m.Forget(instance=action.instance))
            case ev.DismissExecutor(gpu=gpu):
                self.supervisor.send(m.DismissRole(role=f"gpu{gpu}", epoch=0))
            case ev.WantExecutor(gpu=gpu):
                self.supervisor.send(m.WantRole(role=f"gpu{gpu}"))
            case ev.KillExecutor():
                self.supervisor.send(m.KillRole(role=f"gpu{action.gpu}", epoch=action.epoch, text=action.text))
            case _:
                assert_never(action)


if __name__ == "__main__":
    run_actor(Controller)
