"""`dormouse deploy`, `ls`, `invoke`, `logs`, `rm`, `restart` and `run`: functions, and programs on the node's GPUs."""

import json
import mimetypes
import os
import sys
import time
from collections.abc import Generator, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from dormouse.core.node.cli_completion import function_argument
from dormouse.core.node.cli_frame import CommandContext, as_json, pass_context
from dormouse.core.node.cli_secrets import variables
from dormouse.core.node.cli_streams import show_stream
from dormouse.core.node.refusals import CallRefused, Unreachable
from dormouse.core.output import show_json, table
from dormouse.schemas.errors import DormouseError

ODD_NBYTES: Final = 80
"""Shown of an answer that is none."""

OF_MODELS: Final = ("embedding", "convert", "context", "dtype", "ttft", "tpot", "isolation")
"""Options that mean nothing to a function."""

OF_ADAPTERS: Final = ("ttft", "tpot", "isolation")
"""Those of them that an adapter has for itself."""

ALL_LINES: Final = 1 << 30
"""More than a log has."""

FUNCTION_COLUMNS: Final = [
    "name", "version", "state", "tenant", "deadline_ms", "percentile", "requests", "errors", "p50_ms", "error",
]  # fmt: skip


@click.command()
@function_argument()
@click.argument("file", type=click.Path(exists=True), metavar="[FILE.py|FOLDER]", required=False)
@click.option("--llm", metavar="MODEL", help="A language model, instead: FOLDER, FILE.gguf or hf:ORG/NAME[@REVISION].")
@click.option("--lora", metavar="ADAPTER", help="A LoRA adapter, over a model: FOLDER or hf:ORG/NAME[@REVISION].")
@click.option("--base", default="", metavar="NAME", help="The deployed language model that the adapter is for.")
@click.option("--embedding", is_flag=True, help="It makes embeddings of texts (/v1/embeddings), not text.")
@click.option("--convert", is_flag=True, help="Also take weights that are pickled: a sandbox reads them.")
@click.option("--context", default=0, help="Its longest sequence, in tokens.  [default: the model's own]")
@click.option("--dtype", default="auto", show_default=True, help="Its numbers: auto, bfloat16 or float32.")
@click.option("--ttft", default="500ms", show_default=True, help="Wanted time to its first token.")
@click.option("--tpot", default="60ms", show_default=True, help="Wanted time of each further token.")
@click.option(
    "--isolation",
    default="",
    help="Equal models of a tenant share a process on a GPU (tenant), or not (function).  [default: the node's]",
)
@click.option("--deadline", default="1s", show_default=True, help="Wanted latency, e.g. 80ms.")
@click.option("--percentile", default=98.0, show_default=True, help="Per cent of requests that shall meet it.")
@click.option("--timeout", default="60s", show_default=True, help="After which a request fails and is stopped.")
@click.option("--load-timeout", default="5m", show_default=True, help="After which load() fails without progress.")
@click.option("--tenant", default="default", show_default=True, help="Whose function it is.")
@click.option("--max-queue", default=256, show_default=True, help="Requests that may wait.")
@click.option("--quota", default="1GiB", show_default=True, help="How much the model may grow after load().")
@click.option("--idempotent", is_flag=True, help="A request may be run again when a GPU's process dies under it.")
@click.option("--stateless", is_flag=True, help="No request changes what later ones see: several may run at once.")
@click.option("--max-instances", default=0, help="How many of a stateless function at once.  [default: one per GPU]")
@click.option("--concurrency", default=1, show_default=True, help="Requests in one instance, of an async handle().")
@click.option("--batch", default=0, help="Requests of one handle_batch(), at most.  [default: one by one]")
@click.option("--batch-wait", default="0ms", show_default=True, help="How long a batch may wait for more.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable that it sees. Several may be given.")
@click.option("--env-file", multiple=True, metavar="FILE", help="A file of such lines.")
@click.option(
    "--requirements",
    type=click.Path(exists=True, dir_okay=False),
    help="Libraries of its own.  [default: requirements.txt beside it]",
)
@click.option("--allow-build", is_flag=True, help="Build those that have no wheel, where the node allows it.")
@click.option("--network", is_flag=True, help="It has the machine's network, where the node allows it.")
@click.option("--secret", "secrets", multiple=True, metavar="NAME", help="A secret that it sees as a variable.")
@as_json
@pass_context
def deploy(
    command: CommandContext,
    /,
    name: str,
    file: str | None,
    llm: str | None,
    lora: str | None,
    env: tuple[str, ...],
    env_file: tuple[str, ...],
    requirements: str | None,
    json_: bool,
    **settings: Any,
) -> None:
    """Deploy a Python function under NAME, and wait until it has loaded.

    FILE.py travels with the folder that it lies in, FOLDER with its function.py or the only file that defines handle:
    what functions see is a copy, as it is now. Left out are hidden files and directories (.env, .git), __pycache__,
    virtual environments, and what .dormouseignore in the folder names, written like a .gitignore; the line !.env in it
    takes .env along.

    --llm deploys a language model: its folder, its file in the format GGUF, or what the Hugging Face cache of who calls
    has of it. Nothing is downloaded.

    --lora deploys a language model with an adapter, as PEFT writes it, over --base, a language model that is deployed:
    the two share its memory on hosts and GPUs, and a tenant's share a batch. It keeps the base that it was deployed
    over when that is deployed anew.
    """
    from dormouse.core import folder, modelfolder

    if [file, llm, lora].count(None) != 2:
        what = "a function's file or folder, or --llm and a language model, or --lora and an adapter"
        if file is None and Path(name).exists():
            stem = Path(name).resolve().stem
            raise click.UsageError(f"a name comes first, for example:  dormouse deploy {stem} {name}")
        raise click.UsageError(f"name one of these: {what}")
    if (lora is None) != (not settings["base"]):
        raise click.UsageError("--lora and --base come together: an adapter, and the deployed model that it is for")
    allowed = OF_MODELS if llm is not None else OF_ADAPTERS if lora is not None else ()
    if meant := [name for name in OF_MODELS if _given(name) and name not in allowed]:
        why = "is what its base has" if lora is not None else "is for language models: it needs --llm"
        raise click.UsageError(f"--{meant[0]} {why}")
    hint = "FILE.py|FOLDER" if file is not None else "--llm" if llm is not None else "--lora"
    try:
        if lora is not None:
            found = modelfolder.find_adapter(lora)
        elif llm is not None:
            found = modelfolder.find(llm, settings["convert"])
        else:
            found = folder.find(Path(str(file)).absolute())
        if found.alone:
            click.echo(f"{found.entry} goes alone: {found.folder} is not its own folder", err=True)
        if hidden := folder.left_out(found):
            more = f" and {len(hidden) - 5} more" if len(hidden) > 5 else ""
            click.echo(
                f"left out, being hidden: {', '.join(hidden[:5])}{more}; to take one along, write a line such as "
                f"!{os.path.basename(hidden[0])} into {found.folder / folder.IGNORE}",
                err=True,
            )
        settings["requirements"] = "" if requirements is None else Path(requirements).read_text(errors="replace")
        settings |= {"llm": llm is not None, "env": variables(env, env_file)}
        answer = command.client.deploy(name, found, settings, _show_printed)
    except folder.NoFunction as error:
        raise click.BadParameter(str(error), param_hint=hint) from error
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        raise click.BadParameter(f"cannot be read: {why}", param_hint=hint) from error
    if json_:
        show_json(answer)
    else:
        click.echo(f"{answer['name']} version {answer['version']} is deployed")
        if warning := answer.get("warning"):
            click.echo(f"warning: {warning}", err=True)


def _show_printed(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()


def _given(name: str) -> bool:
    """Whether the caller has said this option."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


@click.command()
@as_json
@pass_context
def ls(context: CommandContext, json_: bool) -> None:
    """List the functions."""
    rows = context.client.functions()
    if json_:
        show_json(rows)
    elif rows:
        table([_listed(row) for row in rows], FUNCTION_COLUMNS)
    else:
        click.echo("no function is deployed; begin with:  dormouse deploy NAME FILE.py", err=True)


def _listed(row: dict[str, Any]) -> dict[str, Any]:
    """A language model has a deadline for its first token, and one for each further one."""
    if (llm := row.get("llm")) is None:
        return row
    return row | {"deadline_ms": f"{llm['wanted_ttft_ms']} + {llm['wanted_tpot_ms']}/token"}


@click.command()
@function_argument()
@click.argument("request", default="null", metavar="[JSON|TEXT|@FILE|-]")
@click.option("--type", "kind", help="Content type of the request.  [default: by FILE's name, else JSON]")
@click.option("--detach", is_flag=True, help="Do not wait: print a job's id, for `dormouse job`.")
@click.option("--json", "json_", is_flag=True, help="Print JSON: the function, its answer and the milliseconds.")
@pass_context
def invoke(context: CommandContext, name: str, request: str, kind: str | None, detach: bool, json_: bool) -> None:
    """Send a request to a function and print its answer, which is JSON; or its parts as they come, if it streams; or
    bytes, to a file: > FILE.

    TEXT that is no JSON is said to a language model, as a user says it in a chat.
    """
    body = body_of(context, name, request)
    kind = _kind_of(request) if kind is None else kind
    if detach:
        job = context.client.detach(name, body, kind)
        show_json(job) if json_ else click.echo(job["id"])
        return
    began = time.perf_counter()
    pieces = context.client.stream(name, body, kind)
    kind, first = next(pieces, ("", b""))
    if kind:
        show_stream(name, kind, chain((first,), (piece for _, piece in pieces)), json_, began)
        return
    answer = first + b"".join(piece for _, piece in pieces)
    ms = round((time.perf_counter() - began) * 1000, 3)
    try:
        value = json.loads(answer)
    except ValueError as error:  # whoever wrote the function chose these bytes, and a terminal obeys some
        text = f"the function's answer is not JSON ({error}); it begins {answer[:ODD_NBYTES]!r}"
        raise DormouseError(text) from error
    if json_:
        show_json({"function": name, "answer": value, "ms": ms})
    else:
        click.echo(answer)


def _kind_of(request: str) -> str:
    """The content type of a file, by its name. Text may be JSON."""
    if not request.startswith("@"):
        return ""
    if request.endswith(".npy"):
        return "application/x-npy"
    kind = mimetypes.guess_type(request)[0] or ""
    return "" if kind.startswith("text/") or kind == "application/json" else kind


def body_of(context: CommandContext, name: str, request: str) -> bytes:
    """The body of a request that was written on the command line, or is in a file that was."""
    if request == "-":
        return sys.stdin.buffer.read()
    if request.startswith("@"):
        try:
            return Path(request[1:]).read_bytes()
        except OSError as error:
            raise click.BadParameter(f"{request[1:]}: {error.strerror}", param_hint="@FILE") from error
    try:
        json.loads(request)
    except ValueError:
        if any(row["name"] == name and row.get("llm") is not None for row in context.client.functions()):
            return json.dumps({"messages": [{"role": "user", "content": request}], "stream": True}).encode()
    return request.encode()


@click.command()
@function_argument()
@click.option("-f", "--follow", is_flag=True, help="Go on as more is printed.")
@click.option("-n", "--lines", type=int, help="Lines to begin with.  [default: 100; all with --since or --search]")
@click.option("--since", help="What was printed since then: how long ago (30m, 2h, 7d), or a time (ISO 8601).")
@click.option("--search", metavar="TEXT", help="Lines that have this text, in small or capital letters.")
@as_json
@pass_context
def logs(
    context: CommandContext,
    name: str,
    follow: bool,
    lines: int | None,
    since: str | None,
    search: str | None,
    json_: bool,
) -> None:
    """Print what a function's instances have printed.

    When a line was printed is known to a second, and to some seconds in a log that is written slowly for days.
    """
    from dormouse.core.prices import parse_since

    since_s = parse_since(since) if since is not None else 0.0
    few = 100 if since is None and search is None else ALL_LINES
    wanted = few if lines is None else lines
    asked = wanted if search is None else ALL_LINES
    pieces: Generator[bytes, None, None] = context.client.logs(name, asked, follow, since_s)
    if search is not None:
        pieces = found(pieces, search)
        if not follow:
            whole = b"".join(pieces).splitlines(keepends=True)
            pieces = (line for line in whole[max(0, len(whole) - wanted) :])
    if json_ and not follow:
        show_json({"name": name, "lines": b"".join(pieces).decode(errors="replace").splitlines()})
        return
    for piece in pieces:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def found(pieces: Iterable[bytes], text: str) -> Generator[bytes, None, None]:
    """Of a log in pieces, the lines that have this text."""
    wanted, rest = text.casefold(), b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        if lines := [line + b"\n" for line in whole if wanted in line.decode(errors="replace").casefold()]:
            yield b"".join(lines)
    if rest and wanted in rest.decode(errors="replace").casefold():
        yield rest


@click.command()
@function_argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--config", metavar="NODE.toml", help="Of a node that does not run: the file that it is started with.")
@as_json
@pass_context
def rm(context: CommandContext, names: tuple[str, ...], yes: bool, config: str | None, json_: bool) -> None:
    """Remove functions, their models and their logs.

    Needs no running node, so that one that cannot start can be helped.
    """
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("nobody can be asked here; add -y to remove without a question")
        click.confirm(f"Remove {', '.join(names)}?", abort=True, err=True)
    removed: list[str] = []
    failed: dict[str, CallRefused] = {}
    for name in names:
        try:
            _remove(context, name, config)
        except CallRefused as error:
            failed[name] = error
        else:
            removed.append(name)
            if not json_:
                click.echo(f"{name} is removed")
    if json_:
        show_json({"removed": removed, "failed": {name: str(error) for name, error in failed.items()}})
    for refused in failed.values():
        raise refused


def _remove(context: CommandContext, name: str, file: str | None) -> None:
    """By the node, or from its state directory if it does not run. Raises CallRefused, Unreachable, DormouseError."""
    from dormouse.core.node import nodeprocess
    from dormouse.core.node.adminclient import AdminClient

    client = AdminClient(nodeprocess.config_of(file, None).run_directory) if file else context.client
    try:
        client.remove(name)
    except Unreachable as error:
        if context.run is not None and file is None:
            raise Unreachable(
                f"{error}; to remove functions without a node, give its file: --config NODE.toml"
            ) from None
        config = nodeprocess.config_of(file, None if file else context.node)
        from dormouse.controller import offline

        if not offline.remove(config.state_directory, [name]):
            text = f"no node runs, and there is no function {name!r} in {config.state_directory}"
            raise CallRefused(404, "unknown_function", text) from None


@click.command()
@function_argument()
@as_json
@pass_context
def restart(context: CommandContext, name: str, json_: bool) -> None:
    """Replace a function's instances; ends a quarantine, too.

    A function of whose commands a GPU's process has died twice within ten minutes is in quarantine: it is not started,
    and its requests get 503 `quarantined`. `dormouse ls` and its log say why.
    """
    context.client.restart(name)
    if json_:
        show_json({"restarted": name})
    else:
        click.echo(f"{name} restarts")


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT.py [ARGS]...]")
@pass_context
def run(context: CommandContext, arguments: tuple[str, ...]) -> None:
    """Run a Python program whose `cuda` is the node's pool.

    Without SCRIPT.py, an interpreter.
    """
    if not (context.directory / "t" / "attach").exists():
        raise Unreachable(f"no node runs in {context.directory}; start one with `dormouse up`")
    from dormouse.client_shim.instance import session

    sys.exit(session.main(list(arguments), str(context.directory)))
