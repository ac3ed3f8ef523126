"""`dormouse deploy`: a function, a language model or an adapter."""

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from dormouse.core.node.cli_completion import function_argument
from dormouse.core.node.cli_frame import CommandContext, as_json, going_on, pass_context
from dormouse.core.node.cli_secrets import variables
from dormouse.core.node.refusals import CallRefused, Unreachable
from dormouse.core.output import show_json
from dormouse.schemas.errors import DormouseError

if TYPE_CHECKING:
    from dormouse.core.node.adminclient import AdminClient

OF_MODELS: Final = ("embedding", "convert", "context", "dtype", "ttft", "tpot", "isolation")
"""Options that mean nothing to a function."""

OF_ADAPTERS: Final = ("ttft", "tpot", "isolation")
"""Those of them that an adapter has for itself."""


REPORT_NBYTES: Final = 64 << 10
"""More than the report of an exception has."""

_OPTIONS: Final = (
    click.option("--deadline", default="1s", show_default=True, help="Wanted latency, e.g. 80ms."),
    click.option("--percentile", default=98.0, show_default=True, help="Per cent of requests that shall meet it."),
    click.option("--timeout", default="60s", show_default=True, help="After which a request fails and is stopped."),
    click.option("--load-timeout", default="5m", show_default=True, help="After which load() fails without progress."),
    click.option("--tenant", default="default", show_default=True, help="Whose function it is."),
    click.option("--max-queue", default=256, show_default=True, help="Requests that may wait."),
    click.option("--quota", default="1GiB", show_default=True, help="How much the model may grow after load()."),
    click.option("--idempotent", is_flag=True, help="A request may be run again when a GPU's process dies under it."),
    click.option("--stateless", is_flag=True, help="No request changes what later ones see: several may run at once."),
    click.option(
        "--max-instances", default=0, help="How many of a stateless function at once.  [default: one per GPU]"
    ),
    click.option("--concurrency", default=1, show_default=True, help="Requests in one instance, of an async handle()."),
    click.option("--batch", default=0, help="Requests of one handle_batch(), at most.  [default: one by one]"),
    click.option("--batch-wait", default="0ms", show_default=True, help="How long a batch may wait for more."),
    click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable that it sees. Several may be given."),
    click.option("--env-file", multiple=True, metavar="FILE", help="A file of such lines."),
    click.option(
        "--requirements",
        type=click.Path(exists=True, dir_okay=False),
        help="Libraries of its own.  [default: requirements.txt beside it]",
    ),
    click.option("--allow-build", is_flag=True, help="Build those that have no wheel, where the node allows it."),
    click.option("--network", is_flag=True, help="It has the machine's network, where the node allows it."),
    click.option("--secret", "secrets", multiple=True, metavar="NAME", help="A secret that it sees as a variable."),
)
"""What a function is deployed with."""

Command = TypeVar("Command", bound=Callable[..., Any])


def of_functions(command: Command) -> Command:
    """The options of a command that deploys functions."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Of these options, with what the files have that they name. Raises click.BadParameter."""
    pairs, files, requirements = (settings[name] for name in ("env", "env_file", "requirements"))
    try:
        text = "" if requirements is None else Path(requirements).read_text(errors="replace")
    except OSError as error:
        text = f"{requirements} cannot be read: {error.strerror}"
        raise click.BadParameter(text, param_hint="--requirements") from error
    kept = {name: value for name, value in settings.items() if name != "env_file"}
    return kept | {"env": variables(pairs, files), "requirements": text}


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
@of_functions
@as_json
@pass_context
def deploy(
    command: CommandContext,
    /,
    name: str,
    file: str | None,
    llm: str | None,
    lora: str | None,
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
        settings = read_settings(settings) | {"llm": llm is not None}
        printed = bytearray()
        try:
            with going_on("if the node has all files, the deploy goes on: `dormouse ls` says what comes of it"):
                answer = command.client.deploy(name, found, settings, partial(_show_printed, printed))
        except CallRefused as error:
            raise _not_deployed(command.client, name, error, bytes(printed)) from error
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


def show_printed(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()


def _show_printed(printed: bytearray, data: bytes) -> None:
    """``printed`` has the end of what was shown before."""
    show_printed(data)
    printed += data
    del printed[:-REPORT_NBYTES]


def _not_deployed(client: "AdminClient", name: str, error: CallRefused, printed: bytes) -> CallRefused:
    """What is left to say: of a traceback that was just shown its last line; what helps; and what is served now."""
    text = str(error).strip()
    if text.encode() in printed:
        text = text.splitlines()[-1]
    if re.match(r"ModuleNotFoundError: No module named '\w", text):
        text += "; a requirements.txt beside the file brings libraries (docs/dependencies.md)"
    with suppress(CallRefused, Unreachable, DormouseError):
        served = next((row["version"] for row in client.functions() if row["name"] == name), None)
        text += "\nnothing is deployed" if served is None else f"\nversion {served} goes on"
    return CallRefused(error.status, error.code, text)


def _given(name: str) -> bool:
    """Whether the caller has said this option."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE
