"""vLLM's routes for adapters, ``POST /v1/load_lora_adapter`` and ``unload_lora_adapter``, for tools that speak them.

They name a path of the node's machine, so they are there only if the node file names a folder below which such paths
lie (``[node] adapters``). A key with the scope ``deploy`` is needed, as for every deploy. Decides nothing else.
"""

import os
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from dormouse.core import folder, modelfolder
from dormouse.core.folder import FunctionFolder, NoFunction
from dormouse.router.access.access import Caller
from dormouse.router.admin.admin import Admin
from dormouse.router.front.exchange import Exchange, refuse, too_large
from dormouse.schemas import admin as a

T = TypeVar("T")

MAX_BODY_NBYTES: Final = 16 << 10


class Load(msgspec.Struct, forbid_unknown_fields=True):
    """As vLLM has it. ``base_model_name`` may be left out where only one model can be meant."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False


class Unload(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None


async def load(admin: Admin, caller: Caller, x: Exchange) -> None:
    """Raises HttpError."""
    asked = await _body(x, Load)
    if not admin.deploys.adapters:
        text = 'paths of adapters are not taken; name a folder for them in the node file: [node] adapters = "/FOLDER"'
        raise refuse(403, "adapters_off", text)
    models = await admin.deploys.models(caller)
    if admin.deploys.has(caller, asked.lora_name) and not (asked.load_inplace and models.get(asked.lora_name)):
        text = f"{asked.lora_name!r} is deployed already; unload it first, or say load_inplace if it is an adapter"
        raise refuse(400, "name_taken", text)
    bases = [name for name, base in models.items() if not base]
    if asked.base_model_name is None and len(bases) != 1:
        text = f"name the adapter's base in base_model_name, one of {', '.join(bases[:10]) or 'none that is deployed'}"
        raise refuse(400, "invalid_value", text)
    base = asked.base_model_name or bases[0]
    act = a.Deploy(name=asked.lora_name, entry=modelfolder.ADAPTER_CONFIG, options={"base": base})
    async with admin.deploys.deploying(caller, act) as deploying:
        try:
            found = _find(admin.deploys.adapters, asked.lora_path)
            travelling = folder.files(found)
            while batch := list(islice(travelling, a.MAX_FILES)):
                try:
                    await deploying.take([name for name, _ in batch], [fd for _, fd in batch])
                finally:
                    for _, fd in batch:
                        os.close(fd)
        except (NoFunction, OSError) as error:
            raise refuse(404, "unknown_adapter", f"no adapter is at {asked.lora_path!r}: {error}") from None
        await deploying.finish()
    await x.answer(200, f"LoRA adapter {asked.lora_name!r} is loaded".encode(), kind=b"text/plain; charset=utf-8")


async def unload(admin: Admin, caller: Caller, x: Exchange) -> None:
    """Raises HttpError."""
    asked = await _body(x, Unload)
    if not (await admin.deploys.models(caller)).get(asked.lora_name):
        raise refuse(404, "unknown_adapter", f"there is no adapter {asked.lora_name[:100]!r} to unload")
    await admin.call(caller, a.Remove(name=asked.lora_name))
    await x.answer(200, f"LoRA adapter {asked.lora_name!r} is unloaded".encode(), kind=b"text/plain; charset=utf-8")


async def _body(x: Exchange, kind: type[T]) -> T:
    """Raises HttpError."""
    data = b""
    while pieces := await x.read():
        data += b"".join(pieces)
        if len(data) > MAX_BODY_NBYTES:
            raise too_large(MAX_BODY_NBYTES)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refuse(400, "invalid_value", f"the body is not what this route takes: {error}") from None


def _find(allowed: str, path: str) -> FunctionFolder:
    """Raises NoFunction, OSError."""
    if "\0" in path:
        raise NoFunction("its path has a null byte")
    inside = Path(allowed).resolve()
    place = (inside / path).resolve()  # links are followed: only their target counts
    if not place.is_relative_to(inside):
        raise NoFunction(f"it lies outside of {inside}, the folder of adapters")
    return modelfolder.find_adapter(str(place))._replace(inside=inside)
