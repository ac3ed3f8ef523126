"""`dormouse history`, `rollback`, `pin` and `unpin`: which version of a function is served, and where its model is."""

import click

from dormouse.core.node.cli_completion import function_argument
from dormouse.core.node.cli_deploy import show_changes
from dormouse.core.node.cli_frame import CommandContext, as_json, going_on, pass_context
from dormouse.core.output import show_json, table
from dormouse.core.times import utc


@click.command()
@function_argument()
@as_json
@pass_context
def history(context: CommandContext, name: str, json_: bool) -> None:
    """Show a function's versions that are kept, the newest first: it is served."""
    rows = [row | {"at": row["at"] and utc(row["at"])} for row in context.client.versions(name)]
    if json_:
        show_json(rows)
        return
    shown = [
        row | {"deployed": row["at"], "state": "earlier" if number else "served"} for number, row in enumerate(rows)
    ]
    table(shown, ["version", "deployed", "state", "file", "deadline_ms", "tenant", "note"])


@click.command()
@function_argument()
@click.argument("version", type=click.IntRange(min=1), required=False)
@as_json
@pass_context
def rollback(context: CommandContext, name: str, version: int | None, json_: bool) -> None:
    """Deploy an earlier version of a function again, its files and its settings, and wait until it has loaded.

    Without VERSION, the one before. It becomes a new version; if it does not load, what is served stays.
    """
    with going_on("the rollback goes on: `dormouse history` says what comes of it"):
        answer = context.client.roll_back(name, version or 0)
    if json_:
        show_json(answer)
    else:
        click.echo(f"{name} version {answer['version']} is deployed, a copy of version {answer['copy_of']}")
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
