"""The transport of administration over HTTP: below /admin, at /metrics, at / (the dashboard), and at vLLM's routes for
adapters (lorahttp.py).

Decides nothing: rights are router/access/'s.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final, cast, get_args
from urllib.parse import parse_qs

from dormouse.core.folder import ENTRY
from dormouse.core.modelfolder import ADAPTER_CONFIG, CONFIG
from dormouse.core.secretfile import MAX_NBYTES
from dormouse.router.access.access import Act, Caller
from dormouse.router.access.gate import Entered
from dormouse.router.admin import lorahttp
from dormouse.router.admin.admin import Admin
from dormouse.router.admin.scrapes import Scrapes
from dormouse.router.dashboard import pages
from dormouse.router.dashboard.watch import Sampler
from dormouse.router.front import openinference
from dormouse.router.front.exchange import STREAM_HEADERS, Exchange, foreign_coding, refuse, too_large
from dormouse.router.front.recent import Kind
from dormouse.schemas import admin as a
from dormouse.schemas import messages as m

METRICS: Final = b"text/plain; version=0.0.4; charset=utf-8"
"""Prometheus's text format."""


async def route(
    admin: Admin, scrapes: Scrapes, watch: Sampler, files: pages.PageFiles, x: Exchange, entered: Entered
) -> None:
    """One request that the gate has let in. Raises HttpError."""
    caller, name = entered.caller, entered.name
    match entered.route.act:
        case Act.LIST:
            await x.answer_json(200, await admin.call(caller, a.Functions()))
        case Act.REMOVE:
            await x.answer_json(200, await admin.call(caller, a.Remove(name=name)))
        case Act.RESTART:
            await x.answer_json(200, await admin.call(caller, a.Restart(name=name)))
        case Act.VERSIONS:
            await x.answer_json(200, await admin.call(caller, a.Versions(name=name)))
        case Act.ROLLBACK:
            version = _asked(x, "version").get("version", "0")
            if not re.fullmatch("[0-9]{1,9}", version):
                raise refuse(400, "bad_request", f"version is {version!r}; write a number")
            await x.answer_json(200, await admin.call(caller, a.Rollback(name=name, version=int(version))))
        case Act.TRAFFIC:
            await x.answer_json(200, await admin.call(caller, a.Traffic(name=name, shares=_shares(x))))
        case Act.PIN | Act.UNPIN:
            pinned = entered.route.act is Act.PIN
            await x.answer_json(200, await admin.call(caller, a.Pin(name=name, pinned=pinned)))
        case Act.MOVE:
            await admin.call(caller, a.MoveModel(name=name, to=await openinference.wished(x)))
            await x.answer_json(200, {})
        case Act.DEPLOY:
            await _deploy(admin, caller, x)
        case Act.LOGS:
            await _logs(admin, caller, x, name)
        case Act.LOAD_ADAPTER:
            await lorahttp.load(admin, caller, x)
        case Act.UNLOAD_ADAPTER:
            await lorahttp.unload(admin, caller, x)
        case Act.SECRETS:
            tenant = _asked(x, "tenant").get("tenant", "")
            await x.answer_json(200, await admin.call(caller, a.Secrets(tenant=tenant)))
        case Act.SET_SECRET:
            await _set_secret(admin, caller, x, name)
        case Act.REMOVE_SECRET:
            tenant = _asked(x, "tenant").get("tenant", "")
            await x.answer_json(200, await admin.call(caller, a.RemoveSecret(tenant=tenant, name=name)))
        case Act.STATUS:
            await x.answer_json(200, await admin.call(caller, a.Status()))
        case Act.METRICS:
            gzip = b"gzip" in (x.header(b"accept-encoding") or b"")
            text = await scrapes.text(caller, gzip)
            await x.answer(200, text, [(b"content-encoding", b"gzip")] if gzip else (), METRICS)
        case Act.USAGE:
            await x.answer_json(200, await admin.call(caller, _usage(x)))
        case Act.REQUESTS:
            await x.answer_json(200, await admin.call(caller, _requests(x)))
        case Act.WATCH:
            if name:
                await x.answer_json(200, await admin.minutes(caller, name))
            else:
                await _watch(watch, caller, x)
        case Act.ERRORS:
            await x.answer_json(200, await admin.errors(caller, name))
        case Act.SESSION:
            await x.answer_json(200, admin.session(caller, x.header(b"x-dormouse-ticket") or b""))
        case Act.DASHBOARD:
            data, kind = files.file(name)
            await x.answer(200, data, pages.HEADERS, kind)
        case act:
            raise AssertionError(f"{act} is not served over HTTP")


async def _watch(watch: Sampler, caller: Caller, x: Exchange) -> None:
    """Until its reader leaves, or the node ends."""
    if x.scope["method"] == "HEAD":
        return x.answer_empty(200, m.SSE.encode())
    watcher = watch.enter(caller, x.chunk_now)
    try:
        x.never_ends()
        x.begin(200, m.SSE.encode(), STREAM_HEADERS)
        x.when_left(watcher.leave)
        await watcher.left
        x.when_left(None)
        x.end()
    finally:
        watch.leave(watcher)


async def _deploy(admin: Admin, caller: Caller, x: Exchange) -> None:
    """``POST /admin/functions?name=mood&entry=mood.py&deadline=80ms``: the body is a tar archive of the folder."""
    if (coding := x.header(b"content-encoding") or b"identity").lower() != b"identity":
        raise foreign_coding(
            coding, "send the archive as `tar -c` writes it: room for its length is made before it comes"
        )
    query = {key: values[-1] for key, values in parse_qs(_query(x), keep_blank_values=True).items()}
    try:
        name, entry = query.pop("name"), query.pop("entry", "")
        note, check, traffic = query.pop("note", ""), query.pop("check", ""), query.pop("traffic", None)
        if traffic is not None and not re.fullmatch("[0-9]{1,3}", traffic):
            raise refuse(400, "bad_request", f"traffic is {traffic[:40]!r}; write per cent, from 0 to 99", close=True)
        several = {key: parse_qs(_query(x)).get(key, []) for key in ("env", "secret", "call", "reset")}
        said: dict[str, Any] = {key: value for key, value in query.items() if key not in several}
        said |= {"env": _variables(x), "secrets": several["secret"], "call": several["call"]}
        is_model = query.get("llm", "") not in ("", "0", "false")
        usual = ADAPTER_CONFIG if query.get("base") else CONFIG if is_model else ENTRY
        act = a.Deploy(
            name=name,
            entry=entry or usual,
            options=said,
            reset=several["reset"],
            note=note,
            check=check,
            traffic=None if traffic is None else int(traffic),
        )
        nbytes = int(x.header(b"content-length") or b"")
    except KeyError:
        raise refuse(400, "bad_request", "the function's name is missing: ?name=NAME", close=True) from None
    except ValueError:
        raise refuse(411, "bad_request", "say the archive's length: Content-Length", close=True) from None
    async with admin.deploys.deploying(caller, act) as deploying:
        await deploying.unpack(nbytes, _pieces(x))
        answer = await deploying.finish()
    await x.answer_json(200, answer)


def _shares(x: Exchange) -> dict[int, int]:
    """``PUT /admin/functions/mood/traffic?3=90&4=10``. Raises HttpError."""
    query = parse_qs(_query(x), keep_blank_values=True)
    for version, shares in query.items():
        if len(shares) > 1 or not re.fullmatch("[1-9][0-9]{0,8}=[0-9]{1,3}", f"{version}={shares[0]}"):
            said = f"{version}={','.join(shares)}"
            raise refuse(400, "bad_request", f"{said[:80]!r} is no share; write a version and per cent, such as ?4=10")
    return {int(version): int(share) for version, (share,) in query.items()}


def _variables(x: Exchange) -> dict[str, str]:
    """``&env=NAME=VALUE`` any number of times. Raises HttpError."""
    pairs = [pair.partition("=") for pair in parse_qs(_query(x)).get("env", [])]
    if odd := [name for name, is_pair, _ in pairs if not is_pair]:
        raise refuse(400, "bad_request", f"env is {odd[0][:80]!r}; write NAME=VALUE, encoded for a URL", close=True)
    return {name: value for name, _, value in pairs}


async def _set_secret(admin: Admin, caller: Caller, x: Exchange, name: str) -> None:
    """``PUT /admin/secrets/TOKEN``: the body is the value, as it is."""
    tenant = _asked(x, "tenant").get("tenant", "")
    data = b""
    async for piece in _pieces(x):
        data += piece
        if len(data) > MAX_NBYTES:
            raise too_large(MAX_NBYTES, "a secret's value")
    try:
        act = a.SetSecret(tenant=tenant, name=name, value=data.decode())
    except UnicodeDecodeError:
        raise refuse(400, "bad_request", "a secret is UTF-8 text: it becomes an environment variable") from None
    await x.answer_json(200, await admin.call(caller, act))


async def _pieces(x: Exchange) -> AsyncIterator[bytes]:
    while pieces := await x.read():
        for piece in pieces:
            yield piece


def _asked(x: Exchange, *names: str) -> dict[str, str]:
    """The query, which may have these names. Raises HttpError."""
    query = {key: values[-1] for key, values in parse_qs(_query(x)).items()}
    if unknown := sorted(query.keys() - {*names}):
        raise refuse(400, "bad_request", f"{unknown[0]} is not known here; write some of {', '.join(names)}")
    return query


def _usage(x: Exchange) -> a.Usage:
    """``GET /admin/usage?since=1764061200&name=mood``"""
    query = _asked(x, "since", "name")
    return a.Usage(since_s=_since(query.get("since", "")), name=query.get("name", ""))


def _since(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", text):
        raise refuse(400, "bad_request", f"since is {text!r}; write seconds of the Unix clock")
    return float(text)


def _requests(x: Exchange) -> a.RecentRequests:
    """``GET /admin/requests?name=mood&kind=slow&most=20``"""
    query = _asked(x, "name", "kind", "most")
    kind, most = query.get("kind", ""), query.get("most", "50")
    if kind not in get_args(Kind) or not re.fullmatch("[0-9]{1,9}", most):
        text = f"kind is {kind!r} and most {most!r}; write slow, failed, cold or nothing, and a number"
        raise refuse(400, "bad_request", text)
    return a.RecentRequests(name=query.get("name", ""), kind=cast(Kind, kind), most=int(most))


def _query(x: Exchange) -> str:
    return str(x.scope.get("query_string", b"").decode("latin-1"))


async def _logs(admin: Admin, caller: Caller, x: Exchange, name: str) -> None:
    query = parse_qs(_query(x))
    lines, follow = query.get("tail", ["200"])[0], query.get("follow", ["0"])[0] == "1"
    if not re.fullmatch("[0-9]{1,9}", lines):
        raise refuse(400, "bad_request", f"tail is {lines!r}; write a number of lines")
    since_s = _since(query.get("since", ["0"])[0])
    act = a.Logs(name=name, lines=int(lines), follow=follow, since_s=since_s)
    async with aclosing(admin.logs.pieces(caller, act)) as pieces:
        first = await anext(pieces)  # a refusal comes before the answer begins
        if not follow or x.scope["method"] == "HEAD":
            await x.answer(200, first, kind=b"text/plain; charset=utf-8")
            return
        x.never_ends()
        x.begin(200, b"text/plain; charset=utf-8")
        await x.chunk(first)
        own = asyncio.current_task()
        assert own is not None
        x.when_left(own.cancel)
        async for piece in pieces:
            await x.chunk(piece)
        x.when_left(None)
        x.end()
