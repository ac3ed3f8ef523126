"""`dormouse history`, `rollback`, `traffic`, `pin` and `unpin`: the versions of a function that are served, and the
place of its model.
"""

import re
from typing import Any

import click

from dormouse.core.cli.completion import function_argument
from dormouse.core.cli.deploy import show_changes
from dormouse.core.cli.frame import CommandContext, as_json, going_on, pass_context
from dormouse.core.output import show_json, table
from dormouse.core.times import utc


@click.command()
@function_argument()
@as_json
@pass_context
def history(context: CommandContext, name: str, json_: bool) -> None:
    """Show a function's versions that are kept: first the one that has its name, then the newest."""
    rows = [row | {"at": row["at"] and utc(row["at"])} for row in context.client.versions(name)]
    if json_:
        show_json(rows)
        return
    shown = [row | {"deployed": row["at"], "state": _state(row, number == 0)} for number, row in enumerate(rows)]
    table(shown, ["version", "deployed", "state", "file", "deadline_ms", "tenant", "note"])


def _state(row: dict[str, Any], named: bool) -> str:
    share = row.get("traffic")
    shown = f" ({share} %)" if share not in (None, 100) else ""
    return f"served{shown}" if named else "earlier" if share is None else f"beside{shown}"


@click.command()
@function_argument()
@click.argument("version", type=click.IntRange(min=1), required=False)
@as_json
@pass_context
def rollback(context: CommandContext, name: str, version: int | None, json_: bool) -> None:
    """Deploy an earlier version of a function again, its files and its settings, and wait until it has loaded.

    Without VERSION, the one before. It becomes a new version; if it does not load, what is served stays. While two
    versions share the function's requests, that of its name has all of them again.
    """
    with going_on("the rollback goes on: `dormouse history` says what comes of it"):
        answer = context.client.roll_back(name, version or 0)
    if json_:
        show_json(answer)
    elif "ended" in answer:
        click.echo(
            f"{name} version {answer['version']} has all requests again: version {answer['ended']} is not served"
        )
    else:
        click.echo(f"{name} version {answer['version']} is deployed, a copy of version {answer['copy_of']}")
        show_changes(answer)


@click.command()
@function_argument()
@click.argument("shares", nargs=-1, metavar="[VERSION=PERCENT]...")
@as_json
@pass_context
def traffic(context: CommandContext, name: str, shares: tuple[str, ...], json_: bool) -> None:
    """Show how many per cent of a function's requests each of its versions gets, or say so.

    \b
    dormouse traffic mood 4=10    version 4 gets 10 %, the version with the name the rest
    dormouse traffic mood 4=0     only requests to mood@4
    dormouse traffic mood 4=100   version 4 has the name, and the other one is not served

    Two versions are served at most: what is not named is not served, but for the version with the name. It waits until
    what is to be served has loaded. `dormouse deploy --traffic 10` begins with a new version.
    """
    said: dict[int, int] = {}
    for each in shares:
        found = re.fullmatch("([1-9][0-9]{0,8})=([0-9]{1,3})%?", each)
        if found is None or int(found[1]) in said:
            why = "is there twice" if found else "is no share; write a version and per cent, such as 4=10"
            raise click.BadParameter(f"{each!r} {why}", param_hint="VERSION=PERCENT")
        said[int(found[1])] = int(found[2])
    if said:
        with going_on("it goes on: `dormouse history` says what comes of it"):
            answer = context.client.traffic(name, said)
    else:
        rows = [row for row in context.client.versions(name) if row["traffic"] is not None]
        served = {str(row["version"]): row["traffic"] for row in rows}
        answer = {"name": name, "version": rows[0]["version"], "traffic": served}
    if json_:
        show_json(answer)
        return
    for version, share in answer["traffic"].items():
        click.echo(f"{name} version {version} gets {share} %")
    show_changes(answer)


@click.command()
@function_argument()
@as_json
@pass_context
def pin(context: CommandContext, name: str, json_: bool) -> None:
    """Keep a function's model on a GPU once it is there: others leave before it, whatever they are worth.

    It comes with its next request. It leaves when a model that runs has no room otherwise, and with all idle models
    when a request has run out of memory. It stays pinned when it is deployed anew. A tenant's `gpu_memory`
    counts first.
    """
    _pin(context, name, True, json_)


@click.command()
@function_argument()
@as_json
@pass_context
def unpin(context: CommandContext, name: str, json_: bool) -> None:
    """Let a function's model leave GPUs as others do."""
    _pin(context, name, False, json_)


def _pin(context: CommandContext, name: str, pinned: bool, json_: bool) -> None:
    context.client.pin(name, pinned)
    if json_:
        show_json({"name": name, "pinned": pinned})
    else:
        click.echo(f"{name} is pinned" if pinned else f"{name} is not pinned")
