"""`dormouse deploy`: a function, a language model or an adapter."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dormouse.core.cli.completion import function_argument
from dormouse.core.cli.frame import CommandContext, as_json, going_on, pass_context
from dormouse.core.cli.secrets import variables
from dormouse.core.errortext import gist, hints
from dormouse.core.node.refusals import CallRefused, Unreachable
from dormouse.core.output import show_json
from dormouse.schemas.errors import DormouseError
from dormouse.schemas.options import OPTIONS, standing

if TYPE_CHECKING:
    from dormouse.core.node.adminclient import AdminClient

OF_MODELS: Final = tuple(name for name, each in OPTIONS.items() if each.metadata["of"] == "models")
"""Options that mean nothing to a function."""

OF_ADAPTERS: Final = ("ttft", "tpot", "isolation")
"""Those of them that an adapter has for itself."""


REPORT_NBYTES: Final = 64 << 10
"""More than the report of an exception has."""

Command = TypeVar("Command", bound=Callable[..., Any])


def _option(name: str) -> Callable[[Any], Any]:
    """Of the command line. A missing one is None."""
    metadata, default = OPTIONS[name].metadata, OPTIONS[name].default
    is_flag, several = default is False, metadata["kind"] in ("variables", "secrets", "names")
    shown = "" if is_flag or several else f"  [default: {standing(name)}]"
    word = "--secret" if metadata["kind"] == "secrets" else "--" + name.replace("_", "-")
    kind: Any = str if metadata["kind"] or isinstance(default, str) else type(default)
    how: dict[str, Any] = {"is_flag": True, "default": None} if is_flag else {"type": kind, "multiple": several}
    if name == "requirements":
        how = {"type": click.Path(exists=True, dir_okay=False)}
    return click.option(word, name, help=metadata["help"] + shown, metavar=metadata["metavar"], **how)


def _options(of: str) -> list[Callable[[Any], Any]]:
    return [_option(name) for name, each in OPTIONS.items() if each.metadata["of"] == of]


_FILES: Final = click.option("--env-file", multiple=True, metavar="FILE", help="A file of lines as --env has them.")


def of_models(command: Command) -> Command:
    """The options of a command that deploys language models, too."""
    for option in reversed(_options("models")):
        command = option(command)
    return command


def of_functions(command: Command) -> Command:
    """The options of a command that deploys functions."""
    for option in reversed([*_options("functions"), _FILES]):
        command = option(command)
    return command


def read_options(given: dict[str, Any]) -> dict[str, Any]:
    """Those that were given, with what the files have that they name. Raises click.BadParameter."""
    pairs, files, requirements = (given[name] for name in ("env", "env_file", "requirements"))
    try:
        text = None if requirements is None else Path(requirements).read_text(errors="replace")
    except OSError as error:
        reason = f"{requirements} cannot be read: {error.strerror}"
        raise click.BadParameter(reason, param_hint="--requirements") from error
    read = {name: value for name, value in given.items() if name != "env_file"}
    read |= {"env": variables(pairs, files), "requirements": text}
    return {name: value for name, value in read.items() if value is not None and value not in ((), {})}


@click.command()
@function_argument()
@click.argument("file", type=click.Path(exists=True), metavar="[FILE.py|FOLDER]", required=False)
@click.option("--llm", metavar="MODEL", help="A language model, instead: FOLDER, FILE.gguf or hf:ORG/NAME[@REVISION].")
@click.option("--lora", metavar="ADAPTER", help="A LoRA adapter, over a model: FOLDER or hf:ORG/NAME[@REVISION].")
@click.option("--base", default="", metavar="NAME", help="The deployed language model that the adapter is for.")
@click.option(
    "--reset",
    multiple=True,
    metavar="OPTION",
    help="Do not keep what the version before had: an option (deadline), a variable (env.NAME), a secret "
    "(secret.NAME), a function to call (call.NAME), or all.",
)
@click.option("--note", default="", help="For people, shown by `dormouse history`: a commit, for example.")
@click.option(
    "--check", default="", metavar="JSON", help="A request that the new version answers before it takes over, or not."
)
@click.option(
    "--traffic",
    type=click.IntRange(0, 99),
    metavar="PERCENT",
    help="So many per cent of the requests go to the new version; the version before keeps the rest.",
)
@of_models
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
    base: str,
    reset: tuple[str, ...],
    note: str,
    check: str,
    traffic: int | None,
    json_: bool,
    **given: Any,
) -> None:
    """Deploy a Python function under NAME, and wait until it has loaded.

    FILE.py travels with the folder that it lies in, FOLDER with its function.py or the only file that defines handle:
    what functions see is a copy, as it is now. Left out are hidden files and directories (.env, .git), __pycache__,
    virtual environments, and what .dormouseignore in the folder names, written like a .gitignore; the line !.env in it
    takes .env along.

    A function that is deployed keeps the options that it had; this says which, and what has changed. --reset NAME ends
    that. Options may also stand in dormouse.toml beside the function: what is said here comes before the file, and the
    file before what is kept. An option that is taken out of the file has its default again.

    --llm deploys a language model: its folder, its file in the format GGUF, or what the Hugging Face cache of who calls
    has of it. Nothing is downloaded.

    --lora deploys a language model with an adapter, as PEFT writes it, over --base, a language model that is deployed:
    the two share its memory on hosts and GPUs, and a tenant's share a batch. It keeps the base that it was deployed
    over when that is deployed anew.
    """
    from dormouse.core import folder, modelfolder
    from dormouse.core.cli import functionfile

    if [file, llm, lora].count(None) < 2:
        raise click.UsageError("a deploy has one of these alone: a function's file or folder, --llm, --lora")
    if [file, llm, lora].count(None) == 3:
        what = "a function's file or folder, or --llm and a language model, or --lora and an adapter"
        if file is None and (name.endswith(".py") or Path(name).exists()):
            stem = Path(name).resolve().stem
            raise click.UsageError(f"a name comes first, for example:  dormouse deploy {stem} {name}")
        raise click.UsageError(f"name one of these: {what}")
    if (lora is None) != (not base):
        raise click.UsageError("--lora and --base come together: an adapter, and the deployed model that it is for")
    allowed = OF_MODELS if llm is not None else OF_ADAPTERS if lora is not None else ()
    if meant := [each for each in OF_MODELS if given[each] is not None and each not in allowed]:
        why = "is what its base has" if lora is not None else "is for language models: it needs --llm"
        raise click.UsageError(f"--{meant[0]} {why}")
    hint = "FILE.py|FOLDER" if file is not None else "--llm" if llm is not None else "--lora"
    try:
        if lora is not None:
            found = modelfolder.find_adapter(lora)
        elif llm is not None:
            found = modelfolder.find(llm, bool(given["convert"]))
        else:
            found = functionfile.find(Path(str(file)).absolute())
        if found.alone:
            click.echo(f"{found.entry} goes alone: {found.folder} is not its own folder", err=True)
        if hidden := folder.left_out(found):
            more = f" and {len(hidden) - 5} more" if len(hidden) > 5 else ""
            click.echo(
                f"left out, being hidden: {', '.join(hidden[:5])}{more}; to take one along, write a line such as "
                f"!{os.path.basename(hidden[0])} into {found.folder / folder.IGNORE}",
                err=True,
            )
        options = read_options(given) | ({"llm": True} if llm is not None else {"base": base} if base else {})
        printed = bytearray()
        try:
            with going_on("if the node has all files, the deploy goes on: `dormouse ls` says what comes of it"):
                show = partial(show_and_keep, printed)
                says: dict[str, Any] = {"reset": list(reset), "note": note, "check": check, "traffic": traffic}
                answer = command.client.deploy(name, found, options, show, **says)
        except CallRefused as error:
            raise not_deployed(command.client, name, error, bytes(printed)) from error
    except folder.NoFunction as error:
        raise click.BadParameter(str(error), param_hint=hint) from error
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        raise click.BadParameter(f"cannot be read: {why}", param_hint=hint) from error
    if json_:
        show_json(answer)
    else:
        click.echo(f"{answer['name']} version {answer['version']} is deployed")
        if served := answer.get("traffic"):
            click.echo("  " + ", ".join(f"version {each} gets {share} %" for each, share in served.items()))
        show_changes(answer)


def change(option: str, old: str | None, new: str | None) -> str:
    """Of a variable or a secret no value is known here."""
    if "." in option:
        how = "is new" if old is None else "is not there any more" if new is None else "has another value"
        return f"{option}: {how}"
    return f"{option}: {old or 'none'} -> {new or 'none'}"


def show_changes(answer: dict[str, Any], err: bool = False) -> None:
    """Prints the options that differ from the version before, those that are kept of it, and warnings."""
    for row in answer.get("changes", ()):
        click.echo(f"  {change(**row)}", err=err)
    if kept := answer.get("kept"):
        names = ", ".join(each if "." in each else each.replace("_", "-") for each in kept)
        click.echo(f"  as before: {names} (--reset OPTION ends that)", err=err)
    if sampling := answer.get("sampling"):
        from dormouse.core.cli.statusview import sampling_text

        click.echo(f"  sampling, unless a request says otherwise: {sampling_text(sampling)}", err=err)
    if warning := answer.get("warning"):
        click.echo(f"warning: {warning}", err=True)


def show_and_keep(printed: bytearray, data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()
    keep(printed, data)


def keep(printed: bytearray, data: bytes) -> None:
    """``printed`` has the end of what was shown before."""
    printed += data
    del printed[:-REPORT_NBYTES]


def not_deployed(client: "AdminClient", name: str, error: CallRefused, printed: bytes) -> CallRefused:
    """The error without the parts that were just shown: of a traceback, the exception alone; hints; and the version
    served now.
    """
    text = str(error).strip()
    if text.encode() in printed:
        text = "; ".join([gist(text), *hints(text)])
    with suppress(CallRefused, Unreachable, DormouseError):
        served = next((row["version"] for row in client.functions() if row["name"] == name), None)
        text += "\nnothing is deployed" if served is None else f"\nversion {served} goes on"
    return CallRefused(error.status, error.code, text)
