"""`dormouse secret set`, `ls` and `rm`, and the variables of `dormouse deploy`: options and printing."""

import sys
from collections.abc import Iterable
from pathlib import Path

import click

from dormouse.core.cli.frame import CommandContext, as_json, pass_context
from dormouse.core.output import show_json, table

whose = click.option("--tenant", default="", help="Whose it is.  [default: default]")


@click.group()
def secret() -> None:
    """Keep secrets on the node: functions that are deployed with `--secret NAME` have them as variables.

    They are encrypted on the disk. What a function prints is shown without them.
    """


@secret.command("set")
@click.argument("name")
@click.option("--file", type=click.Path(exists=True, dir_okay=False), help="Its value is what this file has.")
@whose
@as_json
@pass_context
def secret_set(context: CommandContext, name: str, file: str | None, tenant: str, json_: bool) -> None:
    """Set a secret, or change it. Its value is asked for, or is what comes in: dormouse secret set TOKEN < FILE

    It is never an argument, which others of this machine could read.
    """
    try:
        if file is not None:
            value = Path(file).read_text(encoding="utf-8")
        elif sys.stdin.isatty():
            value = click.prompt("Value", hide_input=True, err=True)
        else:
            value = sys.stdin.buffer.read().decode()
    except OSError as error:
        raise click.BadParameter(f"{file}: {error.strerror}", param_hint="--file") from error
    except UnicodeDecodeError as error:
        raise click.UsageError("a secret is UTF-8 text: it becomes an environment variable") from error
    if not value.removesuffix("\n"):
        where = file or "the standard input"
        raise click.UsageError(
            f"{where} is empty; give the value, such as: printf %s VALUE | dormouse secret set {name}"
        )
    answer = context.client.set_secret(tenant, name, value.removesuffix("\n"))  # which echo and editors add
    if json_:
        show_json(answer)
        return
    click.echo(f"{name} is set for tenant {answer['tenant']}")
    for function in answer["functions"]:
        click.echo(f"{function} has the value of before until:  dormouse restart {function}", err=True)


@secret.command("ls")
@whose
@as_json
@pass_context
def secret_ls(context: CommandContext, tenant: str, json_: bool) -> None:
    """List the names of secrets, and the functions that have them."""
    rows = context.client.secrets(tenant)
    if json_:
        show_json(rows)
    else:
        table(
            [row | {"functions": ", ".join(row["functions"])} for row in rows],
            ["name", "tenant", "set", "set_by", "functions"],
        )


@secret.command("rm")
@click.argument("name")
@whose
@as_json
@pass_context
def secret_rm(context: CommandContext, name: str, tenant: str, json_: bool) -> None:
    """Remove a secret that no function has."""
    answer = context.client.remove_secret(tenant, name)
    if json_:
        show_json(answer)
    else:
        click.echo(f"{name} of tenant {answer['tenant']} is removed")


def variables(pairs: Iterable[str], files: Iterable[str]) -> dict[str, str]:
    """Of `--env-file` and `--env`, which comes last. Raises click.BadParameter."""
    found: dict[str, str] = {}
    for file in files:
        try:
            lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise click.BadParameter(f"{file} cannot be read: {error}", param_hint="--env-file") from error
        for number, line in enumerate(map(str.strip, lines), 1):
            if line and not line.startswith("#"):
                found |= [_pair(line.removeprefix("export "), f"{file}:{number}", "--env-file")]
    for pair in pairs:
        found |= [_pair(pair, pair, "--env")]
    return found


def _pair(text: str, where: str, hint: str) -> tuple[str, str]:
    name, is_pair, value = text.partition("=")
    if not is_pair:
        raise click.BadParameter(f"{where}: write NAME=VALUE", param_hint=hint)
    value = value.strip() if hint == "--env-file" else value
    if hint == "--env-file" and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    return name.strip(), value
