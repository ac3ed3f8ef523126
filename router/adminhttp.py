"""The transport of administration over HTTP, below /admin. Decides nothing: who may what is router/access.py's."""

import asyncio
import re
from contextlib import aclosing
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from dormouse.router.access import Act, Caller
from dormouse.router.gate import Entered
from dormouse.router.http import Exchange, refuse
from dormouse.schemas import admin as a

if TYPE_CHECKING:
    from dormouse.router.admin import Admin


async def route(admin: "Admin", x: Exchange, entered: Entered) -> None:
    """One request that the gate has let in. Raises HttpError."""
    caller, name = entered.caller, entered.name
    match entered.route.act:
        case Act.LIST:
            await x.answer_json(200, await admin.call(caller, a.Functions()))
        case Act.REMOVE:
            await x.answer_json(200, await admin.call(caller, a.Remove(name=name)))
        case Act.RESTART:
            await x.answer_json(200, await admin.call(caller, a.Restart(name=name)))
        case Act.LOGS:
            await _logs(admin, caller, x, name)
        case Act.STATUS:
            await x.answer_json(200, await admin.call(caller, a.Status()))
        case act:
            raise AssertionError(f"{act} is not served over HTTP")


async def _logs(admin: "Admin", caller: Caller, x: Exchange, name: str) -> None:
    query = parse_qs(x.scope.get("query_string", b"").decode("latin-1"))
    lines, follow = query.get("tail", ["200"])[0], query.get("follow", ["0"])[0] == "1"
    if not re.fullmatch("[0-9]{1,9}", lines):
        raise refuse(400, "bad_request", f"tail is {lines!r}; write a number of lines")
    async with aclosing(admin.logs(caller, a.Logs(name=name, lines=int(lines), follow=follow))) as pieces:
        first = await anext(pieces)  # what is refused is refused before the answer begins
        if not follow:
            await x.answer(200, first, kind=b"text/plain; charset=utf-8")
            return
        gone = asyncio.ensure_future(x.gone())
        try:
            await x.begin(200, [], b"text/plain; charset=utf-8")
            await x.chunk(first)
            while not gone.done():
                piece = asyncio.ensure_future(anext(pieces))
                await asyncio.wait((piece, gone), return_when=asyncio.FIRST_COMPLETED)
                if piece.done():
                    await x.chunk(piece.result())
                else:
                    piece.cancel()
                    await asyncio.wait((piece,))
        finally:
            gone.cancel()
