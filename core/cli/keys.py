"""`dormouse keys create`, `ls` and `revoke`: options and printing; the rest is core/cli/keyscommand.py."""

import sys
from typing import Any, Final

import click

from dormouse.core.cli.frame import CommandContext, as_json, pass_context
from dormouse.core.node.refusals import CallRefused
from dormouse.core.output import show_json, table

FIRST_KEY: Final = (
    "this is the node's first key: from now on nobody invokes, reads /metrics or watches the dashboard without a key, "
    "also after the key is revoked; `[node] open_loopback = true` in the node file, and `dormouse up --replace`, keep "
    "that open for this machine"
)


@click.group()
def keys() -> None:
    """Make and revoke API keys: who sends `Authorization: Bearer KEY` may do over HTTP what the key is for.

    Without a node that runs, these commands work on the state directory of the node file.
    """


node_file = click.option("--config", metavar="NODE.toml", help="The node's file, if it does not run.")


@keys.command("create")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(["invoke", "deploy", "admin", "metrics"]),
    help="invoke: send requests. deploy: deploy, list and remove functions and read their logs. admin: all that, and "
    "status. metrics: read /metrics. Several may be given.  [default: invoke]",
)
@click.option("--function", "functions", multiple=True, metavar="NAME|PATTERN", help="Only these, e.g. 'chat-*'.")
@click.option(
    "--tenant", help="Whose functions it sees and deploys.  [default: default; with admin, or only metrics: all]"
)
@click.option("--rate", "rate_s", type=float, default=0.0, metavar="PER_S", help="Requests per second, at most.")
@click.option("--burst", type=int, default=0, help="How many of them at once.  [default: as many as in a second]")
@click.option("--note", default="", help="For people: whose it is.")
@click.option("-y", "--yes", is_flag=True, help="Also if it is the first key, which ends requests without one.")
@node_file
@as_json
@pass_context
def keys_create(context: CommandContext, /, yes: bool, config: str | None, json_: bool, **wish: Any) -> None:
    """Make a key and print it. It is shown this once: the node keeps only a hash.

    The first key changes who may invoke: from then on nobody does without one, also after it is revoked. So it is
    asked for, or wants -y where nobody can be asked.
    """
    from dormouse.core.cli import keyscommand

    target = keyscommand.Target(context.run, context.node, config)
    if keyscommand.closes(target):
        if not yes and not sys.stdin.isatty():
            raise CallRefused(409, "first_key", f"{FIRST_KEY}. If that is meant, say -y; nothing was changed")
        click.echo(FIRST_KEY, err=True)
        if not yes:
            click.confirm("Make it?", abort=True, err=True)
    made = keyscommand.create(target, wish)
    if json_:
        show_json(made)
    else:
        click.echo(made["key"])
        click.echo(f"keep it: it is not shown again; `dormouse keys revoke {made['id']}` ends it", err=True)


@keys.command("ls")
@node_file
@as_json
@pass_context
def keys_ls(context: CommandContext, config: str | None, json_: bool) -> None:
    """List the keys, also revoked ones."""
    from dormouse.core.cli import keyscommand

    rows = keyscommand.ls(keyscommand.Target(context.run, context.node, config))
    if json_:
        show_json(rows)
    else:
        lines = [row | {name: ", ".join(row[name]) for name in ("scopes", "functions")} for row in rows]
        table(lines, ["id", "scopes", "functions", "tenant", "rate_s", "made", "revoked", "note"])


@keys.command("revoke")
@click.argument("name", metavar="ID")
@node_file
@as_json
@pass_context
def keys_revoke(context: CommandContext, name: str, config: str | None, json_: bool) -> None:
    """End a key at once: requests with it are refused from now on."""
    from dormouse.core.cli import keyscommand

    revoked = keyscommand.revoke(keyscommand.Target(context.run, context.node, config), name)
    if json_:
        show_json(revoked)
    else:
        click.echo(f"{revoked['id']} is revoked")
