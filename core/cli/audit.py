"""`dormouse audit`: the log of administrative acts, with their authors."""

import json
from contextlib import suppress
from typing import Any, Final

import click

from dormouse.core.cli.frame import CommandContext, as_json, pass_context
from dormouse.core.node.refusals import Unreachable
from dormouse.core.output import show_json, table

COLUMNS: Final = ["at", "who", "from", "act", "name", "outcome", "details"]
_OWN_COLUMNS: Final = {*COLUMNS, "uid", "tenant"}


@click.command()
@click.argument("name", required=False)
@click.option("--since", default="7d", show_default=True, help="How long ago (30m, 2h, 7d), or a time (ISO 8601).")
@click.option("--lines", "-n", type=click.IntRange(1, 100_000), default=200, show_default=True, help="The last ones.")
@click.option("--config", metavar="NODE.toml", help="The node's file, if it does not run.")
@as_json
@pass_context
def audit(context: CommandContext, name: str | None, since: str, lines: int, config: str | None, json_: bool) -> None:
    """Show who has administered the node, the newest last: deploys with their versions, contents and options, keys,
    secrets, settings, starts with the settings that they have changed, and what was refused.

    With NAME, the acts on that function, key or secret. It reads STATE/logs/audit.log, which the node's user may.
    """
    from dormouse.core.audit import read
    from dormouse.core.cli.keyscommand import Target
    from dormouse.core.paths import StatePaths
    from dormouse.core.prices import parse_since

    since_s, target = parse_since(since), Target(context.run, context.node, config)
    state = None
    with suppress(Unreachable):
        state = StatePaths(target.client.status()["node"]["state"])
    found = [row for row in read((state or target.state).audit, since_s) if name in (None, row.get("name"))][-lines:]
    if json_:
        show_json(found)
    elif found:
        table([row | {"details": _details(row)} for row in found], COLUMNS)
    else:
        click.echo("nothing since then", err=True)


def _details(row: dict[str, Any]) -> str:
    """The fields of a line beyond those that all have."""
    more = {key: value for key, value in row.items() if key not in _OWN_COLUMNS and value not in ({}, [], "", None)}
    told = {key: value if isinstance(value, str | int) else json.dumps(value) for key, value in more.items()}
    return " ".join(f"{key}={value}" for key, value in told.items())
