"""Administration: deploy, list, remove, logs, status. What is done, whoever asks and over whichever transport.

:meth:`Admin.call`, :meth:`Admin.deploying`, :meth:`Admin.invoke` and :meth:`Admin.logs` are the only ways in; each
asks router/access/ first, and changes leave a line in the audit log. Nothing here is on a request's path.
adminsocket.py and adminhttp.py are the transports.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Protocol, assert_never

import orjson
from msgspec import structs

from dormouse.core import tenants
from dormouse.core.audit import Audit
from dormouse.core.keys import KeyFile, shown
from dormouse.core.modelfolder import ADAPTER
from dormouse.router.access import access, tenancy
from dormouse.router.access.access import Caller
from dormouse.router.access.passes import Passes
from dormouse.router.admin import overview
from dormouse.router.admin.asks import Asks
from dormouse.router.admin.deploying import NAME, Deploying, spec_of
from dormouse.router.admin.environments import Environments
from dormouse.router.admin.history import History, Version
from dormouse.router.admin.keeper import Keeper
from dormouse.router.admin.vault import Vault
from dormouse.router.decisions import events as e
from dormouse.router.decisions import failures, queueing
from dormouse.router.front.bodies import TYPE_NBYTES, Body
from dormouse.router.front.exchange import HttpError, refuse, refused
from dormouse.router.front.requests import Labels, Requests
from dormouse.router.front.streams import AnswerStream
from dormouse.router.front.tracing import traced
from dormouse.router.instances.functionlog import FunctionLogs
from dormouse.router.jobs.book import Job, JobState
from dormouse.router.jobs.jobs import Jobs, KeptRequest
from dormouse.router.jobs.prefer import MOST_WAIT_S
from dormouse.schemas import admin as a
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import Failure, FunctionSpec

Called = (
    a.Remove
    | a.Restart
    | a.Functions
    | a.Status
    | a.Usage
    | a.RecentRequests
    | a.Versions
    | a.Rollback
    | a.Pin
    | a.MoveModel
    | a.ListJobs
    | a.AskJob
    | a.CancelJob
    | a.Policy
    | a.Drain
    | a.Keys
    | a.CreateKey
    | a.RevokeKey
    | a.Secrets
    | a.SetSecret
    | a.RemoveSecret
    | a.OpenDashboard
)

AGAIN_S: Final = 2.0
"""After which who follows a log is asked for a right to it, though nothing was printed."""


class Node(overview.Node, Protocol):
    """What is asked of the router."""

    log: Any
    epoch: int
    requests: Requests


@dataclass
class _Audited:
    """What is known of an act when its line is written."""

    name: str


def _version(version: Version) -> dict[str, Any]:
    """For people."""
    spec = version.spec
    return {
        "version": spec.version,
        "at": round(version.at, 3) or None,
        "file": spec.entry,
        "tenant": spec.tenant,
        "deadline_ms": spec.deadline_ms,
        "stateless": spec.stateless,
        "idempotent": spec.idempotent,
        "content": spec.content,
        "env": [name for name, _ in spec.env],
        "secrets": list(spec.secrets),
        "environment": spec.environment,
        "network": spec.network,
    }


@contextmanager
def _told() -> Iterator[None]:
    """What goes wrong with the file of keys, as an answer."""
    try:
        yield
    except ConfigError as error:
        raise refuse(400, "bad_request", str(error)) from None
    except OSError as error:
        text = f"the file of keys cannot be written: {error.strerror}; nothing was changed; free space on its disk"
        raise refuse(507, "not_kept", text) from None


class Admin:
    """The acts."""

    def __init__(
        self,
        node: Node,
        keys: KeyFile,
        audit: Audit,
        keeper: Keeper,
        asks: Asks,
        logs: FunctionLogs,
        history: History,
        jobs: Jobs,
        vault: Vault,
        passes: Passes,
        environments: Environments,
    ) -> None:
        self._passes, self._environments = passes, environments
        self._jobs = jobs
        self._vault = vault
        self._numbers = count(1)
        self._history = history
        self._node = node
        self._requests, self._picture = node.requests, node.policy.picture
        self._keys, self._audit, self._keeper, self._asks, self._logs = keys, audit, keeper, asks, logs

    async def call(self, caller: Caller, act: Called) -> Any:
        """Do it; the answer is what JSON can say. Raises HttpError."""
        match act:
            case a.Remove(name=name):
                with self._audited(caller, act, name):
                    await self._permit_seen(caller, act, name)
                    await self._asks.change(lambda ask: e.RemoveAsked(ask, name))
                    self._requests.stats.pop(name, None)
                    self._logs.remove(name)
                return {"removed": name}
            case a.Restart(name=name):
                with self._audited(caller, act, name):
                    await self._permit_seen(caller, act, name)
                    await self._asks.change(lambda ask: e.RestartAsked(ask, name))
                return {"restarted": name}
            case a.Functions():
                await self._permit_informed(caller, act)
                rows = self._rows()
                return {"functions": [row for row in rows if caller.sees(row["name"], row["tenant"])]}
            case a.Status():
                self._permit(caller, act)
                rows, controllers = self._rows(), await self._asks.controller_status()
                return overview.bounded(tenancy.part_of(caller, overview.status(self._node, rows, controllers)))
            case a.Usage():
                await self._permit_informed(caller, act)
                return await self._usage(caller, act)
            case a.Versions(name=name):
                await self._permit_seen(caller, act, name)
                return {"versions": [_version(each) for each in reversed(self._versions(caller, name))]}
            case a.Rollback(name=name):
                with self._audited(caller, act, name):
                    await self._permit_seen(caller, act, name)
                    return await self._roll_back(caller, act)
            case a.Pin(name=name, pinned=pinned):
                with self._audited(caller, act, name):
                    await self._permit_seen(caller, act, name)
                    bounded = tenants.gpu_nbytes(self._node.config.tenants)
                    if pinned and (failure := tenancy.pin_refusal(caller, self._picture, name, bounded)) is not None:
                        raise HttpError(failure)
                    answer = await self._asks.pin(name, pinned)
                    if answer is None:
                        raise HttpError(failures.starting())
                    if answer.failure is not None:
                        raise HttpError(answer.failure)
                return {"name": name, "pinned": pinned}
            case a.MoveModel(name=name, to=to):
                with self._audited(caller, act, f"{name} {to}"):
                    await self._permit_seen(caller, act, name)
                    answer = await self._asks.move(name, to)
                    if answer is None:
                        text = f"{name!r} was not moved in time: all GPUs compute, or the node is starting"
                        raise HttpError(Failure(code="busy", status=503, text=text, retryable=True))
                    if answer.failure is not None:
                        raise HttpError(answer.failure)
                return {"name": name, "to": to}
            case a.ListJobs(name=name):
                await self._permit_informed(caller, act)
                await self._jobs.kept.knows_jobs()
                return orjson.loads(self._jobs.kept.listed(caller, name))
            case a.AskJob(wait_s=wait_s):
                job = await self._job(caller, act)
                if wait_s and job.state is not JobState.ENDED:
                    await self._jobs.kept.ended(job, min(wait_s, MOST_WAIT_S))
                return orjson.loads(self._jobs.kept.told(job))
            case a.CancelJob():
                job = await self._job(caller, act)
                await self._jobs.cancel(job)
                return orjson.loads(self._jobs.kept.told(job))
            case a.RecentRequests(name=name):
                await (self._permit_seen(caller, act, name) if name else self._permit_informed(caller, act))
                return {"requests": self._last(caller, act)}
            case a.Policy(changes=changes):
                words = " ".join(f"{name}={orjson.dumps(value).decode()}" for name, value in changes.items())
                with self._audited(caller, act, words) if changes else nullcontext():
                    self._permit(caller, act)
                    answer = await self._asks.policy(changes)
                    if answer is None:
                        raise HttpError(failures.starting())
                    if answer.failure is not None:
                        raise HttpError(answer.failure)
                return orjson.loads(answer.json)
            case a.Drain(undo=undo):
                with self._audited(caller, act, "--undo" if undo else ""):
                    self._permit(caller, act)
                    drain = self._requests.drain
                    if undo:
                        drain.undo()
                        self._jobs.runs.resume()
                    else:
                        drain.begin()
                    self._node.log.info("drain", undone=undo, left=self._requests.left + self._jobs.runs.begun)
                return {"drained": False if undo else await drain.ended()}
            case a.OpenDashboard():
                with self._audited(caller, act, ""):
                    self._permit(caller, act)
                    return {"url": f"{overview.url(self._node)}/#ticket={self._passes.ticket(caller.name)}"}
            case a.Keys():
                self._permit(caller, act)
                return [shown(key) for key in self._keys.all()]
            case a.CreateKey(wish=wish):
                with self._audited(caller, act, wish.note) as audited:
                    self._permit(caller, act)
                    with _told():  # on the disk before it is shown: a few milliseconds, in which nothing else is done
                        key, token = self._keys.create(wish, caller.name, time.time())
                    audited.name = key.id
                return {"key": token, **shown(key)}
            case a.RevokeKey(id=name):
                with self._audited(caller, act, name):
                    self._permit(caller, act)
                    with _told():
                        revoked = self._keys.revoke(name, time.time())
                    if revoked is None:
                        raise refuse(404, "unknown_key", f"there is no key {name!r}; `dormouse keys ls` shows them")
                return shown(revoked)
            case a.Secrets():
                self._permit(caller, act)
                return self._vault.call(caller, act)
            case a.SetSecret(name=name) | a.RemoveSecret(name=name):
                with self._audited(caller, act, name):
                    await self._permit_informed(caller, act)
                    return self._vault.call(caller, act)
            case _:
                assert_never(act)

    async def _roll_back(self, caller: Caller, act: a.Rollback) -> dict[str, Any]:
        """Raises HttpError."""
        earlier = self._versions(caller, act.name)[:-1]
        found = [each for each in earlier if act.version in (0, each.spec.version)]
        if not found:
            kept = ", ".join(str(each.spec.version) for each in earlier) or "none"
            what = f"version {act.version}" if act.version else "earlier version"
            text = f"no {what} of {act.name!r} is kept; there are: {kept} ([limits] versions says how many are kept)"
            raise refuse(404, "unknown_version", text)
        spec = found[-1].spec
        self._may_deploy(caller, spec)
        self._vault.has(spec)
        settled = await self._asks.change(lambda ask: e.DeployAsked(ask, spec))
        assert settled.spec is not None
        answer = {"name": act.name, "version": settled.spec.version, "as": spec.version}
        return answer | ({"warning": settled.warning} if settled.warning else {})

    def _versions(self, caller: Caller, name: str) -> list[Version]:
        """Oldest first, without those of another tenant that has had the name."""
        return [each for each in self._history.of(name) if caller.sees(name, each.spec.tenant)]

    def _last(self, caller: Caller, act: a.RecentRequests) -> list[dict[str, Any]]:
        """Of the caller's functions, the newest first; of slow ones, the slowest."""
        found = [
            (name, past)
            for name, stats in self._requests.stats.items()
            if act.name in ("", name) and caller.sees(name, stats.tenant)
            for past in stats.last.of(act.kind)
        ]
        found.sort(key=lambda each: each[1].took_s if act.kind == "slow" else each[1].at, reverse=True)
        return [past.told(name) for name, past in found[: max(0, act.most)]]

    async def status(self) -> dict[str, Any]:
        """All of the node, for those who watch it: whose part each of them sees is decided by dashboard/watch.py."""
        await self._requests.knows_catalogue()
        controllers = await self._asks.controller_status()
        return overview.status(self._node, self._rows(), controllers)

    def session(self, ticket: bytes) -> dict[str, str]:
        """The key that a browser has for a link's ticket. Raises HttpError."""
        key = self._passes.redeem(ticket)
        if key is None:
            text = "this link was used, or is older than a minute; `dormouse dashboard` on the node makes another"
            raise refuse(403, "ticket_used", text)
        return {"key": key}

    async def errors(self, caller: Caller, name: str) -> dict[str, Any]:
        """The last failures of a function's requests. Raises HttpError."""
        await self._requests.knows_catalogue()
        if not tenancy.sees(caller, self._picture, name):
            raise HttpError(queueing.absent(self._picture, name))
        function = self._picture.functions.get(name)
        stats = None if function is None else overview.own(self._requests.stats, function.spec)
        return {"errors": [] if stats is None else [error._asdict() for error in reversed(stats.last_errors)]}

    async def _usage(self, caller: Caller, act: a.Usage) -> dict[str, Any]:
        """Of the caller's functions, those that were removed included. Raises HttpError."""
        answer = await self._asks.usage(act.since_s)
        if answer is None:
            raise HttpError(failures.starting())
        if answer.failure is not None:
            raise HttpError(answer.failure)
        value: dict[str, Any] = orjson.loads(answer.json)
        rows = [row for row in value["functions"] if caller.sees(row["function"], row["tenant"])]
        if act.name:
            rows = [row for row in rows if row["function"] == act.name]
            if not rows and not tenancy.sees(caller, self._picture, act.name):
                raise HttpError(queueing.absent(self._picture, act.name))
        return value | {"functions": rows}

    def _permit(self, caller: Caller, act: a.Act) -> None:
        if (refusal := access.permit(caller, act)) is not None:
            raise refused(refusal)

    async def _permit_informed(self, caller: Caller, act: a.Act) -> None:
        """For acts whose answer the catalogue decides. Raises HttpError."""
        self._permit(caller, act)
        if not await self._requests.knows_catalogue():  # what lies there may be a function's, or nobody's
            raise HttpError(failures.starting())

    async def _permit_seen(self, caller: Caller, act: a.Act, name: str) -> None:
        """For acts on a function. Of what it may not know of, a caller is told what it would be told if there were no
        such thing. Raises HttpError.
        """
        await self._permit_informed(caller, act)
        if not tenancy.sees(caller, self._picture, name):
            raise HttpError(queueing.absent(self._picture, name))

    @contextmanager
    def _audited(self, caller: Caller, act: a.Act, name: str) -> Iterator["_Audited"]:
        """Writes the act's line when it has ended, however."""
        audited = _Audited(name)
        outcome = "unknown"  # the node was stopped meanwhile
        try:
            yield audited
            outcome = "ok"
        except HttpError as error:
            outcome = error.failure.code
            raise
        finally:
            word = access.OF_SOCKET[type(act)].value
            whose: dict[str, Any] = {"uid": caller.uid} if caller.uid is not None else {"tenant": caller.tenant}
            self._audit.write(caller.name, caller.origin, word, audited.name, outcome, **whose)
            if (trouble := self._audit.trouble) is not None:
                self._node.log.error("audit_log_lost_a_line", trouble=trouble)

    @asynccontextmanager
    async def deploying(self, caller: Caller, act: a.Deploy) -> AsyncGenerator[Deploying, None]:
        """A deploy that may be, for its files. Given up, it leaves nothing. Raises HttpError."""
        with self._audited(caller, act, act.name):
            await self._permit_informed(caller, act)
            base = self._base(caller, act.settings.base)
            spec = self._spec(caller, act, base)
            below = ADAPTER if base is not None else ""
            begun = await self._keeper.keeping(self._keeper.snapshots.begin, act.name, below)
            deploying = Deploying(
                self._keeper,
                self._asks,
                spec,
                begun,
                lambda: self._may_deploy(caller, spec),
                act.settings,
                base,
                self._environments,
                lambda data: self._logs.of(act.name).write(data),
            )
            try:
                yield deploying
            finally:
                if not deploying.handed:
                    await asyncio.shield(self._keeper.keeping(begun.give_up))

    @property
    def adapters(self) -> str:
        """Below which folder of this machine a caller may name adapters; "": nowhere."""
        return self._node.config.node.adapters

    async def models(self, caller: Caller) -> dict[str, str]:
        """The language models that make text which the caller may see, with the base of each that is an adapter."""
        await self._requests.knows_catalogue()
        specs = (function.spec for function in self._picture.functions.values())
        return {
            spec.name: spec.llm.base for spec in specs if spec.llm is not None and caller.sees(spec.name, spec.tenant)
        }

    def has(self, caller: Caller, name: str) -> bool:
        """Whether there is a function of this name that the caller may see, deployed or on its way."""
        return tenancy.sees(caller, self._picture, name)

    def _base(self, caller: Caller, name: str) -> FunctionSpec | None:
        """Over which an adapter is deployed; None with no name. Raises HttpError."""
        if not name:
            return None
        if not tenancy.serves(caller, self._picture, name):
            text = f"there is no function {name[:100]!r} to be the adapter's base; `dormouse ls` says which there are"
            raise refuse(404, "unknown_base", text)
        return self._picture.functions[name].spec

    def _spec(self, caller: Caller, act: a.Deploy, base: FunctionSpec | None) -> FunctionSpec:
        """Before its files are sent: whether it may be, and what it will be. Raises HttpError."""
        try:
            spec = spec_of(act, self._node.config.node.isolation, base)
        except ConfigError as error:
            raise refuse(400, "bad_request", str(error)) from None
        if caller.tenant is not None and spec.tenant == a.Settings().tenant:  # it was not said
            spec = structs.replace(spec, tenant=caller.tenant)
        self._may_deploy(caller, spec)
        self._vault.may_use(caller, spec)
        if spec.network and not self._node.config.sandbox.network:
            text = "functions of this node have no network; whoever runs it can allow it: [sandbox] network = true"
            raise refuse(403, "network_refused", text)
        return spec

    def _may_deploy(self, caller: Caller, spec: FunctionSpec) -> None:
        if (failure := tenancy.deploy_refusal(caller, self._picture, spec)) is not None:
            raise HttpError(failure)

    async def invoke(self, caller: Caller, act: a.Invoke, body: Body) -> AsyncGenerator[a.Said, None]:
        """One request, answered in pieces; left when it is closed. Raises HttpError. The body is its own."""
        try:
            await self._permit_informed(caller, act)
            if not tenancy.serves(caller, self._picture, act.name):
                raise HttpError(queueing.absent(self._picture, act.name))
            if (refusal := self._requests.refusal(act.name)) is not None:
                raise refused(refusal)
        except BaseException:  # cancelled, too: the caller has left
            body.close()
            raise
        body.kind = act.kind[:TYPE_NBYTES]
        trace = traced(None, (), self._requests.trace_share)
        labels = Labels(f"c{self._node.epoch}-{next(self._numbers)}", trace)  # of a command
        if act.detach:
            job, _ = await self._jobs.take(KeptRequest(act.name, "", labels, "", True), body)
            yield a.Said(data=self._jobs.kept.told(job))
            return
        request, future = self._requests.submit(act.name, body, labels=labels)
        try:
            answer = await future
            if isinstance(answer, AnswerStream):
                async for part in answer.parts():
                    yield a.Said(data=part, kind=answer.kind)
                outcome = answer.outcome
            else:
                outcome, data = answer
                if data:
                    yield a.Said(data=data, kind=outcome.kind if isinstance(outcome, e.Answer) else "")
        finally:
            self._requests.leave(request)  # nothing, if it was answered
        if not isinstance(outcome, e.Answer):
            assert isinstance(outcome, e.Fail)
            raise HttpError(outcome.failure)

    async def _job(self, caller: Caller, act: a.AskJob | a.JobResult | a.CancelJob) -> Job:
        """Raises HttpError."""
        await self._permit_informed(caller, act)
        await self._jobs.kept.knows_jobs()
        return self._jobs.kept.find(caller, act.id)

    async def result(self, caller: Caller, act: a.JobResult) -> AsyncGenerator[a.Said, None]:
        """A job's answer. Raises HttpError, also with what the job failed with."""
        job = await self._job(caller, act)
        if job.state is not JobState.ENDED:
            raise refuse(409, "not_ended", f"job {job.id} has not ended: wait for it, or cancel it")
        result = await self._jobs.kept.answer(job)
        if result.status >= 400:
            text = str(orjson.loads(result.body)["error"]["message"])
            raise HttpError(Failure(code=result.code, status=result.status, text=text))
        yield a.Said(data=result.body, kind="" if result.kind == "application/json" else result.kind)

    def _rows(self) -> list[dict[str, Any]]:
        return overview.functions(self._picture, self._requests.stats, self._jobs.kept.book.words)

    @contextmanager
    def printed(self, name: str) -> Iterator[asyncio.Queue[bytes]]:
        """What is printed under this name meanwhile; of who may deploy it."""
        log = self._logs.of(name)
        news = log.follow()
        try:
            yield news
        finally:
            log.unfollow(news)

    async def logs(self, caller: Caller, act: a.Logs) -> AsyncGenerator[bytes, None]:
        """The log in pieces; if ``follow``, until the function is removed, or is not the caller's to read any more.
        Raises HttpError.
        """
        self._permit(caller, act)
        picture = self._picture
        known = tenancy.sees(caller, picture, act.name)
        left = tenancy.sees_all(caller)  # of a function that was removed, or of none: nobody can say whose it is
        if not known and not (left and NAME.fullmatch(act.name) and self._logs.path(act.name).exists()):
            raise HttpError(queueing.absent(picture, act.name))
        log = self._logs.of(act.name)
        if not act.follow:
            yield log.tail(act.lines, act.since_s)
            return
        news = log.follow()
        try:
            yield log.tail(act.lines, act.since_s)
            while log.open:
                piece = b""
                with suppress(TimeoutError):
                    async with asyncio.timeout(AGAIN_S):
                        piece = await news.get()
                if caller.key and not self._keys.holds(caller.key):
                    return
                if not left and not tenancy.sees(caller, picture, act.name):
                    return
                if piece:
                    yield piece
        finally:
            log.unfollow(news)
