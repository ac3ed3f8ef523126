"""Administration: carries out deploy, list, remove, logs and status, for every caller and over every transport.

:meth:`Admin.call` has all acts with a single answer. deploys.py receives files, invoking.py sends answers in pieces,
logtails.py sends logs; each asks permits.py first, and changes leave a line in the audit log. Nothing here is on a
request's path. adminsocket.py and adminhttp.py are the transports.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol, assert_never

import orjson

from dormouse.core import exposure, tenants
from dormouse.core.audit import Audit
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import failures, queueing
from dormouse.core.errortext import gist
from dormouse.core.keys import KeyFile, shown
from dormouse.core.names import base_of
from dormouse.router.access import tenancy
from dormouse.router.access.access import Act, Caller
from dormouse.router.access.passes import Passes
from dormouse.router.admin import overview
from dormouse.router.admin.asks import Asks
from dormouse.router.admin.deploys import Deploys
from dormouse.router.admin.environments import Environments
from dormouse.router.admin.filechanges import FileChanges
from dormouse.router.admin.history import History
from dormouse.router.admin.invoking import Invoking
from dormouse.router.admin.keeper import Keeper
from dormouse.router.admin.logtails import LogTails
from dormouse.router.admin.permits import Permits
from dormouse.router.admin.vault import Vault
from dormouse.router.front import openapi
from dormouse.router.front.exchange import HttpError, refuse
from dormouse.router.front.requests import Requests
from dormouse.router.instances.functionlog import FunctionLogs
from dormouse.router.jobs import answers
from dormouse.router.jobs.book import JobState
from dormouse.router.jobs.jobs import Jobs
from dormouse.router.jobs.prefer import MAX_WAIT_S
from dormouse.schemas import admin as a
from dormouse.schemas.messages import Failure, Status

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
    | a.Traffic
    | a.MoveModel
    | a.ListJobs
    | a.AskJob
    | a.CancelJob
    | a.Schema
    | a.Policy
    | a.Drain
    | a.DrainGpu
    | a.Keys
    | a.CreateKey
    | a.RevokeKey
    | a.Secrets
    | a.SetSecret
    | a.RemoveSecret
    | a.OpenDashboard
)


class Node(overview.Node, Protocol):
    """The part of the router that this module uses."""

    log: Any
    epoch: int
    requests: Requests

    def dispatch(self, event: e.Event) -> None: ...


def _answered(answer: Status | None, late: Failure | None = None) -> Status:
    """The controller's reply; ``late``: the failure if it is not there in time. Raises HttpError."""
    if answer is None:
        raise HttpError(late or failures.starting())
    if answer.failure is not None:
        raise HttpError(answer.failure)
    return answer


class Admin:
    """The acts: those with one answer here, the others in ``deploys``, ``invoking`` and ``logs``."""

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
        admits: Callable[[Caller], bool],
        environments: Environments,
        changes: FileChanges,
    ) -> None:
        self._node, self._jobs, self._vault, self._passes = node, jobs, vault, passes
        self._changes = changes
        self._requests, self._picture = node.requests, node.policy.picture
        self._keys, self._asks, self._function_logs = keys, asks, logs
        self._permits = Permits(self._requests, self._picture, audit, node.log)
        self.deploys = Deploys(node, self._permits, keeper, asks, logs, history, vault, environments)
        self.invoking = Invoking(node.epoch, self._permits, self._requests, self._picture, jobs)
        self.logs = LogTails(self._permits, logs, self._picture, admits)

    async def call(self, caller: Caller, act: Called) -> Any:
        """Do it; the answer can be written as JSON. Raises HttpError."""
        match act:
            case a.Remove(name=name):
                with self._permits.audited(caller, act, name):
                    await self._permits.may_on(caller, act, name)
                    await self.deploys.traffic.end(name)
                    await self._asks.change(lambda ask: e.RemoveAsked(ask, name))
                    self._requests.forget(name)
                    if base_of(name) == name:
                        self._function_logs.remove(name)
                return {"removed": name}
            case a.Restart(name=name):
                with self._permits.audited(caller, act, name):
                    await self._permits.may_on(caller, act, name)
                    await self._asks.change(lambda ask: e.RestartAsked(ask, name))
                return {"restarted": name}
            case a.Functions():
                await self._permits.may_informed(caller, act)
                rows = self._rows()
                coming = overview.loads(self._picture, self._node.loop.time())
                return {
                    "functions": [row for row in rows if caller.sees(row["name"], row["tenant"])],
                    "loads": [row for row in coming if caller.sees(row["function"], row["tenant"])][: overview.NAMES],
                }
            case a.Status():
                self._permits.may(caller, act)
                return overview.bounded(tenancy.part_of(caller, await self._status()))
            case a.Usage():
                await self._permits.may_informed(caller, act)
                return await self._usage(caller, act)
            case a.Versions(name=name):
                await self._permits.may_on(caller, act, name)
                return {"versions": self.deploys.versions(caller, name)}
            case a.Rollback(name=name):
                with self._permits.audited(caller, act, name) as audited:
                    await self._permits.may_on(caller, act, name)
                    return await self.deploys.roll_back(caller, act, audited.more)
            case a.Traffic(name=name):
                with self._permits.audited(caller, act, name) as audited:
                    await self._permits.may_on(caller, act, name)
                    return await self.deploys.traffic.set(caller, act, audited.more)
            case a.Pin(name=name, pinned=pinned):
                with self._permits.audited(caller, act, name):
                    await self._permits.may_on(caller, act, name)
                    bounded = tenants.gpu_nbytes(self._node.config.tenants)
                    if pinned and (failure := tenancy.pin_refusal(caller, self._picture, name, bounded)) is not None:
                        raise HttpError(failure)
                    _answered(await self._asks.pin(name, pinned))
                return {"name": name, "pinned": pinned}
            case a.MoveModel(name=name, to=to):
                with self._permits.audited(caller, act, f"{name} {to}"):
                    await self._permits.may_on(caller, act, name)
                    text = f"{name!r} was not moved in time: all GPUs compute, or the node is starting"
                    late = Failure(code="busy", status=503, text=text, retryable=True)
                    _answered(await self._asks.move(name, to), late)
                return {"name": name, "to": to}
            case a.RecentRequests(name=name):
                await (self._permits.may_on(caller, act, name) if name else self._permits.may_informed(caller, act))
                return {"requests": self._last(caller, act)}
            case a.Schema(name=name):
                await self._permits.may_informed(caller, act)
                return openapi.schema_of(self._picture, caller, name)
            case a.ListJobs() | a.AskJob() | a.CancelJob():
                return await self._act_on_jobs(caller, act)
            case a.Policy() | a.Drain() | a.DrainGpu() | a.OpenDashboard():
                return await self._act_on_node(caller, act)
            case a.Keys() | a.CreateKey() | a.RevokeKey():
                return await self._act_on_keys(caller, act)
            case a.Secrets():
                self._permits.may(caller, act)
                return await self._vault.call(caller, act)
            case a.SetSecret(name=name) | a.RemoveSecret(name=name):
                with self._permits.audited(caller, act, name):
                    await self._permits.may_informed(caller, act)
                    return await self._vault.call(caller, act)
            case _:
                assert_never(act)

    async def _act_on_jobs(self, caller: Caller, act: a.ListJobs | a.AskJob | a.CancelJob) -> Any:
        match act:
            case a.ListJobs(name=name):
                await self._permits.may_informed(caller, act)
                await self._jobs.kept.knows_jobs()
                found = orjson.loads(self._jobs.kept.listed(caller, name))
                if name and not found["jobs"]:  # of a function that was removed there may be some
                    await self._permits.may_on(caller, act, name)
                return found
            case a.AskJob(wait_s=wait_s):
                job = await self.invoking.job(caller, act)
                if wait_s and job.state is not JobState.ENDED:
                    await self._jobs.kept.ended(job, min(wait_s, MAX_WAIT_S))
                return orjson.loads(self._jobs.kept.told(job))
            case a.CancelJob():
                job = await self.invoking.job(caller, act)
                if (job.state is JobState.ENDED) is not act.forget:
                    raise HttpError(answers.not_so(job))
                await self._jobs.cancel(job)
                return orjson.loads(self._jobs.kept.told(job))
            case _:
                assert_never(act)

    async def _act_on_node(self, caller: Caller, act: a.Policy | a.Drain | a.DrainGpu | a.OpenDashboard) -> Any:
        match act:
            case a.Policy(changes=changes):
                words = " ".join(f"{name}={orjson.dumps(value).decode()}" for name, value in changes.items())
                with self._permits.audited(caller, act, words) if changes else nullcontext():
                    self._permits.may(caller, act)
                    answer = _answered(await self._asks.policy(changes))
                return orjson.loads(answer.json)
            case a.Drain(undo=undo):
                with self._permits.audited(caller, act, "--undo" if undo else ""):
                    self._permits.may(caller, act)
                    drain = self._requests.drain
                    if undo:
                        drain.undo()
                        self._jobs.runs.resume()
                    else:
                        drain.begin()
                    self._node.log.info("drain", undone=undo, left=self._requests.left + self._jobs.runs.left)
                return {"drained": False if undo else await drain.ended()}
            case a.DrainGpu(gpu=gpu, undo=undo, waits=waits):
                with self._permits.audited(caller, act, f"{gpu} --undo" if undo else str(gpu)):
                    self._permits.may(caller, act)
                    answer = _answered(await self._asks.drain_gpu(gpu, undo, False))
                if waits and not undo:
                    answer = _answered(await self._asks.drain_gpu(gpu, False, True))
                return orjson.loads(answer.json)
            case a.OpenDashboard(end=end):
                with self._permits.audited(caller, act, "--end" if end else ""):
                    self._permits.may(caller, act)
                    if end:
                        return {"ended": self._passes.end()}
                    return {"url": f"{overview.url(self._node)}/#ticket={self._passes.ticket(caller.name)}"}
            case _:
                assert_never(act)

    async def _act_on_keys(self, caller: Caller, act: a.Keys | a.CreateKey | a.RevokeKey) -> Any:
        match act:
            case a.Keys():
                self._permits.may(caller, act)
                return [shown(key) for key in self._keys.all()]
            case a.CreateKey(wish=wish):
                with self._permits.audited(caller, act, wish.note) as audited:
                    self._permits.may(caller, act)
                    # on the disk before it is shown
                    key, token = await self._changes.make("keys", self._keys.create, wish, caller.name, time.time())
                    audited.name = key.id
                return {"key": token, **shown(key)}
            case a.RevokeKey(id=name):
                with self._permits.audited(caller, act, name):
                    self._permits.may(caller, act)
                    revoked = await self._changes.make("keys", self._keys.revoke, name, time.time())
                    if revoked is None:
                        raise refuse(404, "unknown_key", f"there is no key {name!r}; `dormouse keys ls` shows them")
                return shown(revoked)
            case _:
                assert_never(act)

    def _last(self, caller: Caller, act: a.RecentRequests) -> list[dict[str, Any]]:
        """Of the caller's functions, the newest first; of slow ones, the slowest."""
        found = [
            (name, past)
            for name, stats in self._requests.stats.items()
            if act.name in ("", name) and caller.sees(name, stats.tenant)
            for past in stats.last.of(act.kind)
        ]
        found.sort(key=lambda each: each[1].took_s if act.kind == "slow" else each[1].at, reverse=True)
        reads = "deploy" in caller.rights  # an error has what the function has
        return [past.told(name, reads) for name, past in found[: max(0, act.most)]]

    async def status(self) -> dict[str, Any]:
        """All of the node, for those who watch it: dashboard/watch.py decides the part that each of them sees."""
        await self._requests.knows_catalogue()
        return await self._status()

    async def _status(self) -> dict[str, Any]:
        used, controllers = await asyncio.gather(overview.processes(self._node), self._asks.controller_status())
        value = overview.status(self._node, self._rows(), controllers, used)
        value["node"]["without_key"] = exposure.without_key(self._node.config.node, self._keys.wanted)
        return value

    def session(self, caller: Caller, ticket: bytes) -> dict[str, str]:
        """The key that a browser has for a link's ticket. Raises HttpError."""
        key = self._passes.redeem(ticket)
        holder = None if key is None else self._passes.find(key.encode())
        if key is None or holder is None:
            self._permits.write(caller, Act.SESSION, "", "ticket_used")
            text = "this link was used, or is older than a minute; `dormouse dashboard` on the node makes another"
            raise refuse(403, "ticket_used", text)
        self._permits.write(replace(holder, origin=caller.origin), Act.SESSION, holder.key, "ok")
        return {"key": key}

    async def errors(self, caller: Caller, name: str) -> dict[str, Any]:
        """The last failures of a function's requests. Raises HttpError."""
        await self._requests.knows_catalogue()
        if not tenancy.sees(caller, self._picture, name):
            raise HttpError(queueing.absent(self._picture, name))
        function = self._picture.functions.get(name)
        stats = None if function is None else overview.own(self._requests.stats, function.spec)
        errors = [] if stats is None else reversed(stats.last_errors)
        return {"errors": [error._asdict() | {"why": gist(error.text)} for error in errors]}

    async def minutes(self, caller: Caller, name: str) -> dict[str, Any]:
        """Outcomes of a function's requests of the last hour. Raises HttpError."""
        await self._requests.knows_catalogue()
        if not tenancy.sees(caller, self._picture, name):
            raise HttpError(queueing.absent(self._picture, name))
        return self._requests.minutes(caller, name)

    async def _usage(self, caller: Caller, act: a.Usage) -> dict[str, Any]:
        """Of the caller's functions, those that were removed included. Raises HttpError."""
        answer = _answered(await self._asks.usage(act.since_s))
        value: dict[str, Any] = orjson.loads(answer.json)
        rows = [row for row in value["functions"] if caller.sees(row["function"], row["tenant"])]
        if act.name:
            rows = [row for row in rows if row["function"] == act.name]
            if not rows and not tenancy.sees(caller, self._picture, act.name):
                raise HttpError(queueing.absent(self._picture, act.name))
        return value | {"functions": rows}

    def _rows(self) -> list[dict[str, Any]]:
        return overview.functions(self._picture, self._requests.stats, self._jobs.kept.book.words, time.monotonic())
