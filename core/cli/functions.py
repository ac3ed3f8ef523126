"""`dormouse ls`, `logs`, `rm`, `restart` and `run`: functions, and programs on the node's GPUs."""

import json
import sys
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final

import click

from dormouse.core.cli.completion import function_argument
from dormouse.core.cli.frame import CommandContext, as_json, ended_as_it_likes, failure, pass_context
from dormouse.core.cli.loadsview import LOADS, load_row
from dormouse.core.cli.parts import part
from dormouse.core.node.refusals import CallRefused, Unreachable
from dormouse.core.output import show_json, table
from dormouse.core.terminal import own

ALL_LINES: Final = 1 << 30
"""More than a log has."""

FUNCTION_COLUMNS: Final = [
    "name", "version", "state", "tenant", "deadline_ms", "percentile", "requests", "errors", "p50_ms", "error",
]  # fmt: skip


@click.command()
@as_json
@pass_context
def ls(context: CommandContext, json_: bool) -> None:
    """List the functions."""
    listed = context.client.listed()
    rows, loads = listed["functions"], listed.get("loads", [])
    if json_:
        show_json(rows)
    elif rows or loads:
        table([_listed(row) for row in rows], FUNCTION_COLUMNS)
        table([load_row(row) for row in loads], LOADS)
    else:
        click.echo("no function is deployed; begin with:  dormouse deploy NAME FILE.py", err=True)


def _listed(row: dict[str, Any]) -> dict[str, Any]:
    """A language model has a deadline for its first token, and one for each further one."""
    if (share := row.get("traffic")) not in (None, 100):
        row = row | {"state": f"{row['state']} ({share} %)"}
    if (llm := row.get("llm")) is None:
        return row
    return row | {"deadline_ms": f"{llm['wanted_ttft_ms']} + {llm['wanted_tpot_ms']}/token"}


@click.command()
@function_argument()
@click.option("-f", "--follow", is_flag=True, help="Go on as more is printed.")
@click.option("-n", "--lines", type=int, help="Lines to begin with.  [default: 100; all with --since or --search]")
@click.option("--since", help="What was printed since then: how long ago (30m, 2h, 7d), or a time (ISO 8601).")
@click.option("--search", metavar="TEXT", help="Lines that have this text, or are of this request or instance.")
@click.option("-l", "--long", is_flag=True, help="Before each line, its time, instance and request.")
@as_json
@pass_context
def logs(
    context: CommandContext,
    name: str,
    follow: bool,
    lines: int | None,
    since: str | None,
    search: str | None,
    long: bool,
    json_: bool,
) -> None:
    """Print what a function's instances have printed.

    A line that is found is printed with all that it belongs to: indented lines below it, and a traceback. So a
    request's id finds what it has printed, why it failed, and the instance that ended with it. With --search, -n
    counts these. Text is found in small or capital letters.

    When a line was printed is known to a second, and for --since to some seconds in a log that is written slowly for
    days. Its request is known if its instance had no other one at that time.
    """
    from dormouse.core.logrecords import LogLine, having, lines_of, searched
    from dormouse.core.prices import parse_since

    since_s = parse_since(since) if since is not None else 0.0
    few = 100 if since is None and search is None else ALL_LINES
    wanted = few if lines is None else lines
    asked = wanted if search is None else ALL_LINES
    if search is None and not long and not json_:  # as it comes: also half a line
        _show_pieces(context.client.logs(name, asked, follow, since_s))
        return
    pieces = context.client.logs(name, asked, follow, since_s, marks=True)
    if search is None:
        printed: Iterable[LogLine] = lines_of(pieces)
    elif follow:
        printed = searched(pieces, search)
    else:
        found = having(b"".join(pieces), search)
        printed = chain(*found[max(0, len(found) - wanted) :])
        if not found:
            click.echo("no such lines", err=True)
    if json_ and not follow:
        entries = [line.told() for line in printed]
        show_json({"name": name, "lines": [entry["text"] for entry in entries], "entries": entries})
    elif json_:
        _show_pieces(json.dumps(line.told()).encode() + b"\n" for line in printed)
    else:
        _show_pieces(line.long() if long else line.text for line in printed)


def _show_pieces(pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


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
        said: dict[str, Any] = {"removed": removed, "failed": {name: str(error) for name, error in failed.items()}}
        first = next(iter(failed.values()), None)
        show_json(said | ({} if first is None else {"error": failure(first.code, str(first))}))
    for refused in failed.values():
        raise refused


def _remove(context: CommandContext, name: str, file: str | None) -> None:
    """By the node, or from its state directory if it does not run. Raises CallRefused, Unreachable, DormouseError."""
    from dormouse.core.node import nodeprocess
    from dormouse.core.node.adminclient import AdminClient

    client = AdminClient(nodeprocess.config_of(file, None, context.run).run_directory) if file else context.client
    try:
        client.remove(name)
    except Unreachable as error:
        if context.run is not None and file is None:
            raise Unreachable(
                f"{error}; to remove functions without a node, give its file: --config NODE.toml"
            ) from None
        config = nodeprocess.config_of(file, None if file else context.node)
        if not part("offline").remove(config.state_directory, [name]):
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
@click.option("--restart", "again", is_flag=True, help="Run it again when its node was replaced or has come back.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT.py [ARGS]...]")
@pass_context
def run(context: CommandContext, again: bool, arguments: tuple[str, ...]) -> None:
    """Run a Python program whose `cuda` is the node's pool.

    Without SCRIPT.py, an interpreter.

    What a program has on the GPU ends with the node that it was started on. A program that goes on all the same is
    interrupted, as with Ctrl-C, and ends with status 75; with --restart it is run again.
    """
    if again:
        from dormouse.core.cli.runagain import run_again

        sys.exit(run_again(["--run", str(context.directory), "run", *arguments]))
    if not (context.directory / "t" / "attach").exists():
        raise Unreachable(f"no node runs in {context.directory}; start one with `dormouse up`")
    ended_as_it_likes()
    sys.stdout, sys.stderr = own(sys.stdout), own(sys.stderr)  # the program's, which prints what it likes
    sys.exit(part("session").main(list(arguments), str(context.directory)))
