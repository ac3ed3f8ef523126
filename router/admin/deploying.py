"""One deploy: the meaning of its settings, its files as they come in, and its end. deploys.py decides whether it may
begin.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from dormouse.core.config import parse_duration_ms, parse_nbytes
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import failures
from dormouse.core.decisions.requests.state import MAX_OPEN
from dormouse.core.modelfolder import ADAPTER_CONFIG, CONFIG, GGUF
from dormouse.core.names import NAME, base_of
from dormouse.core.quantities import size, sizes
from dormouse.core.secretfile import MAX_NBYTES, checked_variable
from dormouse.router.admin import archive, options
from dormouse.router.admin.asks import Asks
from dormouse.router.admin.environments import Environments
from dormouse.router.admin.keeper import Keeper
from dormouse.router.admin.snapshots import Upload, disk_full
from dormouse.router.admin.traffic import Sharing
from dormouse.router.front import openapi
from dormouse.router.front.exchange import HttpError, refuse
from dormouse.schemas import admin as a
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.llm import GENERATION_CONFIGS, ISOLATIONS
from dormouse.schemas.messages import EmbeddingSettings, FunctionSpec, LlmSettings
from dormouse.schemas.options import FILE, FILE_NBYTES

MAX: Final = 1_000_000
"""Requests that wait for a function, or its instances: beyond any machine, and well within a message's integers."""

MAX_CALLED: Final = 64
"""Functions that one may call: each is looked at for a way back at each call."""


@dataclass(frozen=True)
class DeployPlan:
    """The result of a deploy, as far as it is known without its files. ``says``: more for its answer."""

    spec: FunctionSpec
    base: FunctionSpec | None
    settings: a.Settings
    says: dict[str, Any]
    check: str = ""
    share: int | None = None  # of its function's requests, beside the version that has the name


def spec_of(
    name: str, entry: str, settings: a.Settings, isolation: str = "tenant", base: FunctionSpec | None = None
) -> FunctionSpec:
    """``isolation``: of language models that do not say; ``base``: what ``settings.base`` names. Raises ConfigError
    naming what is wrong.
    """
    is_llm = (settings.llm or base is not None) and not settings.embedding
    if settings.isolation and not is_llm:
        raise ConfigError("isolation is of language models that make text (--llm): others have no runtime")
    if settings.generation_config != "auto" and not is_llm:
        raise ConfigError("generation_config is of language models that make text (--llm): leave it out")
    if settings.isolation not in ("", *ISOLATIONS):
        raise ConfigError(f"isolation is {settings.isolation!r}; write {' or '.join(ISOLATIONS)}")
    if settings.generation_config not in GENERATION_CONFIGS:
        text = f"generation_config is {settings.generation_config!r}; write {' or '.join(GENERATION_CONFIGS)}"
        raise ConfigError(text)
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be a function's name; use up to 63 letters, digits, '.', '_', '-', not '.' first"
        )
    if not NAME.fullmatch(settings.tenant):
        raise ConfigError(
            f"{settings.tenant!r} cannot be a tenant's name; use 1 to 63 letters, digits, '.', '_' and '-'"
        )
    if not 1 <= settings.percentile <= 100:  # 0.98 is a slip
        raise ConfigError(f"percentile is {settings.percentile:g}; write per cent, a number from 1 to 100, such as 98")
    if not 1 <= settings.max_queue <= MAX:
        raise ConfigError(f"max_queue is {settings.max_queue}; write a number from 1 to {MAX:,}")
    if not 0 <= settings.max_instances <= MAX:
        raise ConfigError(
            f"max_instances is {settings.max_instances}; write a number from 1 to {MAX:,}, or 0 for one per GPU"
        )
    if settings.max_instances > 1 and not (settings.stateless or settings.llm or is_llm):
        raise ConfigError(
            f"max_instances is {settings.max_instances}, but only a stateless function can have more than one: deploy "
            "it with stateless (--stateless) if no request changes what later ones see"
        )
    if not 1 <= settings.concurrency <= MAX_OPEN:
        raise ConfigError(f"concurrency is {settings.concurrency}; write a number from 1 to {MAX_OPEN}")
    if not 0 <= settings.batch <= MAX_OPEN // 2:
        raise ConfigError(f"batch is {settings.batch}; write a number from 1 to {MAX_OPEN // 2}, or 0 for none")
    batch_wait_ms = _ms("batch_wait", settings.batch_wait) if settings.batch_wait not in (0, "0", "0ms", "0s") else 0
    if batch_wait_ms and not settings.batch:
        raise ConfigError("batch_wait is of functions with batch: how many requests at most (--batch 8)")
    if settings.batch and settings.concurrency > 1:
        raise ConfigError("batch and concurrency are two ways to have many requests: leave one of the two out")
    if (settings.concurrency > 1 or settings.batch) and (settings.llm or is_llm):
        what = "batch" if settings.batch else "concurrency"
        why = "a language model has many requests at once anyway"
        raise ConfigError(f"{what} is {getattr(settings, what)}, but {why}: leave one of the two out")
    if settings.llm or is_llm:
        _check_no_variables(settings)
    if settings.batch and settings.call:
        raise ConfigError("a call is of one request, and handle_batch() has several: leave out batch, or call")
    return FunctionSpec(
        name=name,
        version=0,
        entry=entry if base is None else base.entry,
        snapshot="",
        tenant=settings.tenant,
        deadline_ms=_ms("deadline", settings.deadline),
        percentile=settings.percentile,
        timeout_ms=_ms("timeout", settings.timeout),
        load_timeout_ms=_ms("load_timeout", settings.load_timeout),
        idempotent=settings.idempotent,
        max_queue=settings.max_queue,
        quota_nbytes=parse_nbytes(settings.quota),
        stateless=settings.stateless or settings.llm or is_llm,
        max_instances=settings.max_instances,
        llm=_llm_of(name, entry, settings, isolation, base) if is_llm else None,
        embedding=_embedding_of(entry, settings) if settings.embedding else None,
        concurrency=settings.concurrency,
        batch=settings.batch,
        batch_wait_ms=batch_wait_ms,
        eager=settings.eager,
        env=_env_of(settings),
        network=settings.network,
        secrets=tuple(checked_variable(name, "a secret's name") for name in dict.fromkeys(settings.secrets)),
        calls=_calls_of(name, settings),
    )


def within_quota(spec: FunctionSpec, most_nbytes: int) -> FunctionSpec:
    """Lowers a default quota to the tenant's limit. Raises ConfigError if another one is above it."""
    if spec.quota_nbytes <= most_nbytes:
        return spec
    if spec.quota_nbytes != a.Settings().quota:
        asked, most = sizes(spec.quota_nbytes, most_nbytes)
        raise ConfigError(f"quota is {asked}; this node grants tenant {spec.tenant!r} at most {most} (limits.quota)")
    return structs.replace(spec, quota_nbytes=most_nbytes)


def _calls_of(caller: str, settings: a.Settings) -> tuple[str, ...]:
    """Raises ConfigError."""
    names = tuple(dict.fromkeys(settings.call))
    if wrong := next((each for each in names if not NAME.fullmatch(each)), None):
        raise ConfigError(f"call names {wrong[:80]!r}, which is no function's name; versions are left out")
    if base_of(caller) in names:
        raise ConfigError(f"call names {caller!r} itself: its requests would wait for their own instance")
    if len(names) > MAX_CALLED:
        raise ConfigError(f"call has {len(names)} names; write at most {MAX_CALLED}")
    return names


def _env_of(settings: a.Settings) -> tuple[tuple[str, str], ...]:
    """Raises ConfigError."""
    for name, value in settings.env.items():
        checked_variable(name, "the name of an environment variable")
        if "\0" in value:
            raise ConfigError(f"the variable {name} has a NUL character, which no variable can have")
        if name in settings.secrets:
            raise ConfigError(f"{name} is a variable and a secret; leave one of the two out")
    if sum(len(part.encode()) for pair in settings.env.items() for part in pair) > MAX_NBYTES:
        raise ConfigError(f"the variables have more than {MAX_NBYTES:,} bytes; put what is larger into a file")
    return tuple(settings.env.items())


def _check_no_variables(settings: a.Settings) -> None:
    """Raises ConfigError."""
    for name in ("env", "secrets", "call", "requirements", "network"):
        if getattr(settings, name):
            raise ConfigError(f"{name} is of functions: no code of yours runs in a language model's instance")


def _ms(name: str, text: str | int) -> int:
    """Raises ConfigError."""
    try:
        return parse_duration_ms(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _check_model(entry: str, settings: a.Settings) -> None:
    """Raises ConfigError."""
    if entry != CONFIG and not entry.endswith(GGUF):
        raise ConfigError(f"the entry of a language model is {entry!r}; name its {CONFIG}, or its {GGUF} file")
    if not 0 <= settings.context <= MAX:
        raise ConfigError(f"context is {settings.context}; write a number of tokens, or 0 for the model's own")
    if settings.dtype not in ("auto", "bfloat16", "float32"):
        raise ConfigError(f"dtype is {settings.dtype!r}; write auto, bfloat16 or float32")


def _llm_of(name: str, entry: str, settings: a.Settings, isolation: str, base: FunctionSpec | None) -> LlmSettings:
    """Raises ConfigError."""
    if base is not None:
        return _adapted(name, entry, settings, isolation, base)
    _check_model(entry, settings)
    return LlmSettings(
        context=settings.context,
        dtype=settings.dtype,
        ttft_ms=_ms("ttft", settings.ttft),
        tpot_ms=_ms("tpot", settings.tpot),
        convert=settings.convert,
        isolation=settings.isolation or isolation,
        generation_config=settings.generation_config,
    )


def _adapted(name: str, entry: str, settings: a.Settings, isolation: str, base: FunctionSpec) -> LlmSettings:
    """Raises ConfigError."""
    if entry != ADAPTER_CONFIG:
        raise ConfigError(f"the entry of an adapter is {entry!r}; name its {ADAPTER_CONFIG}")
    for each in ("llm", "convert", "context", "dtype", "generation_config"):
        if getattr(settings, each) != getattr(a.Settings(), each):
            raise ConfigError(f"an adapter has no {each} of its own: it is computed as {base.name!r} is; leave it out")
    if base.llm is None:
        raise ConfigError(f"{base.name!r} is no language model that makes text: an adapter needs one as its base")
    if base.name == name:
        raise ConfigError(f"{name!r} cannot be its own base; give the adapter another name")
    if base.llm.base:
        raise ConfigError(f"{base.name!r} is an adapter itself; name its base, {base.llm.base!r}")
    if not base.content:
        raise ConfigError(f"{base.name!r} was deployed by an older version; deploy it again first")
    return structs.replace(
        base.llm,
        ttft_ms=_ms("ttft", settings.ttft),
        tpot_ms=_ms("tpot", settings.tpot),
        isolation=settings.isolation or isolation,
        base=base.name,
        backbone=base.content,
    )


def _embedding_of(entry: str, settings: a.Settings) -> EmbeddingSettings:
    """Raises ConfigError."""
    if not settings.llm:
        raise ConfigError("embedding is set without llm: the folder must be a model's (--llm FOLDER --embedding)")
    _check_model(entry, settings)
    if entry != CONFIG:
        raise ConfigError(f"a {GGUF} file makes no embeddings here; deploy the model's folder")
    return EmbeddingSettings(context=settings.context, dtype=settings.dtype, convert=settings.convert)


class Deploying:
    """A deploy whose files are coming in. ``planned`` says what it comes to with that ``dormouse.toml``, and raises
    HttpError if it is not allowed any more.

    ``handed``: others decide about the snapshot from now on. If the node ends before they have, the catalogue decides
    at the next start.
    """

    def __init__(
        self,
        keeper: Keeper,
        asks: Asks,
        upload: Upload,
        planned: Callable[[str], DeployPlan],
        file: str = "",
        environments: Environments | None = None,
        printed: Callable[[bytes], None] = lambda _: None,
        audited: dict[str, Any] | None = None,
        traffic: Sharing | None = None,
    ) -> None:
        self._traffic = traffic
        self._audited = audited if audited is not None else {}
        self._environments, self._printed = environments, printed
        self.upload = upload
        self.handed = False
        self._keeper, self._asks = keeper, asks
        self._planned, self._file = planned, file

    async def take(self, names: list[str], fds: list[int]) -> None:
        """Some files. Raises HttpError."""
        await self._keeper.copying(self.upload.tenant, self.upload.take, names, fds)

    async def unpack(self, nbytes: int, pieces: AsyncIterator[bytes]) -> None:
        """The files of an archive of so many bytes, which waits until it is whole. Raises HttpError."""
        snapshots, tenant = self._keeper.snapshots, self.upload.tenant
        if nbytes > snapshots.most_nbytes:
            raise refuse(413, "folder_too_large", f"an archive of {size(nbytes)} (limits.folder); send less")
        snapshots.refuse_if_full(2 * nbytes)  # and once more as a snapshot
        half = snapshots.half()
        file = await self._keeper.keeping(open, half, "wb")
        try:
            try:
                async for piece in pieces:
                    await self._keeper.keeping(self.upload.spool, file, piece)
                await self._keeper.keeping(file.flush)
            except OSError as error:
                raise disk_full() from error
            await self._keeper.copying(tenant, archive.unpack, half, self.upload, 2 * snapshots.most_files)
            self._file = await self._keeper.keeping(_read, self.upload.own(FILE))
        finally:
            half.unlink(missing_ok=True)
            self.upload.spooled()
            with suppress(OSError):  # it still has what the disk did not take
                file.close()

    async def finish(self) -> Any:
        """All files are here: load it. Raises HttpError."""
        plan, tenant = self._planned(self._file), self.upload.tenant
        if (base := plan.base) is not None:
            tree = self._keeper.snapshots.tree(base.name, base.snapshot)
            await self._keeper.copying(tenant, self.upload.beside, tree)
        entry = plan.spec.entry if base is None else ADAPTER_CONFIG
        await self._keeper.copying(tenant, self.upload.finish, entry)
        async with self._environment(plan) as key:
            plan = self._planned(self._file)  # while they came, the name may have been taken, or deployed anew
            if base is not None and base != plan.base:
                raise HttpError(failures.base_changed(base.name))
            own = self.upload
            spec = structs.replace(plan.spec, snapshot=own.snapshot, content=own.content, environment=key)
            return await self._change(spec, plan) | plan.says

    @asynccontextmanager
    async def _environment(self, plan: DeployPlan) -> AsyncGenerator[str, None]:
        """The key of the function's own libraries, built if need be; "" if it needs none. Raises HttpError."""
        wanted, settings = "", plan.settings
        if self._environments is not None and plan.spec.llm is None and plan.spec.embedding is None:
            said = await self._keeper.keeping(_named_in, self.upload.tree, settings.requirements)
            wanted = await self._keeper.keeping(self._environments.requirements, said, self.upload.tree)
        if self._environments is None or not wanted:
            yield ""
            return
        having = self._environments.having(wanted, settings.allow_build, plan.spec.tenant, self._printed)
        async with having as key:
            yield key

    async def _change(self, spec: FunctionSpec, plan: DeployPlan) -> dict[str, Any]:
        """Raises HttpError."""
        self.handed = True
        name, version = base_of(spec.name), 0 if self._traffic is None else self._traffic.next_version(spec.name)
        try:
            settled = await self._asks.change(lambda ask: e.DeployAsked(ask, spec, plan.check, version))
        except HttpError:
            self.handed = False
            raise
        assert settled.spec is not None
        self._audited |= options.told_in_audit(settled.spec)
        answer: dict[str, Any] = {"name": name, "version": settled.spec.version}
        if self._traffic is not None and plan.share is not None:
            self._audited["traffic"] = plan.share
            await self._traffic.share(spec.name, plan.share)
            answer["traffic"] = self._traffic.told(name)
        return answer | noted(settled)


def noted(settled: e.Settled) -> dict[str, Any]:
    """Notes for the deployer: a warning, and a language model's sampling as its files have it."""
    said = {"warning": settled.warning, "sampling": openapi.said_in(settled.schema).get("sampling")}
    return {key: value for key, value in said.items() if value}


def _read(path: Path) -> str:
    """The text of a ``dormouse.toml``; "" if there is none. Raises HttpError."""
    try:
        with open(path, "rb") as file:
            return file.read(FILE_NBYTES + 1).decode()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise refuse(400, "bad_request", f"{FILE} is not UTF-8 text: {error}") from None


def _named_in(tree: Path, requirements: str) -> str:
    """The text of the file that ``requirements`` names, if the folder has it; else itself. Raises OSError."""
    if not re.fullmatch(r"[\w.-]+\.(txt|in)", requirements) or not (tree / requirements).is_file():
        return requirements
    return (tree / requirements).read_text(errors="replace")
