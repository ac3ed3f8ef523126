"""`dormouse requests`, `jobs` and `job`: recent requests, and jobs, which are requests that nobody waits for."""

from typing import Any, Final, Literal

import click

from dormouse.core.cli.completion import function_argument
from dormouse.core.cli.frame import CommandContext, as_json, pass_context
from dormouse.core.output import show_answer, show_bytes, show_json, table
from dormouse.core.times import utc

PAST_COLUMNS: Final = ["at", "function", "outcome", "ms", "queue", "wait", "run", "copy", "model", "id"]

JOB_COLUMNS: Final = ["id", "function", "state", "code", "created", "ended", "expires"]

WAIT_S: Final = 30
"""In one question to the node."""


@click.command()
@function_argument(required=False)
@click.option("--slow", "kind", flag_value="slow", help="Those that missed their deadline, the slowest first.")
@click.option("--failed", "kind", flag_value="failed", help="Those that failed.")
@click.option("--cold", "kind", flag_value="cold", help="Those whose model was not on the GPU.")
@click.option("-n", "--most", default=30, show_default=True, help="How many.")
@as_json
@pass_context
def requests(
    context: CommandContext, name: str | None, kind: Literal["slow", "failed", "cold"] | None, most: int, json_: bool
) -> None:
    """Show the last requests of a function, or of all, and where their time went, in milliseconds.

    `copy` is the part of `run` until the model was on the GPU; `model` is where it was before: gpu, peer (another GPU),
    host or disk; `by` is the function that has called it, with the id of its request. The node knows the last 64 of
    each kind of each function, since its router's start.
    """
    rows = context.client.requests(name or "", kind or "", most)
    if json_:
        show_json([row | {"at": utc(row["at"])} for row in rows])
    elif rows:
        more = ["by"] if any(row.get("by") for row in rows) else []
        table([_past(row) for row in rows], [*PAST_COLUMNS, *more, *(["error"] if kind == "failed" else [])])
    else:
        click.echo("no such requests" if kind else "no requests yet", err=True)


def _past(row: dict[str, Any]) -> dict[str, Any]:
    """As a person reads it."""
    times = {name: row[f"{name}_ms"] for name in ("queue", "wait", "run", "copy")}
    shown = {name: None if ms is None else f"{ms:.1f}" for name, ms in times.items()}
    late = " (late)" if row["late"] and row["outcome"] == "ok" else ""
    return (
        row
        | shown
        | {"at": utc(row["at"]), "id": row["id"] or None, "ms": f"{row['ms']:.1f}", "outcome": row["outcome"] + late}
    )


@click.command()
@function_argument(required=False)
@as_json
@pass_context
def jobs(context: CommandContext, name: str | None, json_: bool) -> None:
    """Show the jobs of a function, or of all, the newest first: requests that nobody waits for."""
    rows = context.client.jobs(name or "")
    if json_:
        show_json([as_told(row) for row in rows])
    elif rows:
        table([as_told(row) for row in rows], JOB_COLUMNS)
    else:
        click.echo("no jobs; make one with:  dormouse invoke NAME JSON --detach", err=True)


def as_told(row: dict[str, Any]) -> dict[str, Any]:
    """A job with its times as commands tell them."""
    return row | {name: utc(row[name]) for name in ("created", "ended", "expires") if name in row}


@click.command()
@click.argument("id")
@click.option("--wait", is_flag=True, help="Wait until it has ended, and print its answer.")
@click.option("--result", is_flag=True, help="Print its answer, if it has ended.")
@click.option("--cancel", is_flag=True, help="Cancel it, if it has not ended.")
@click.option("--forget", is_flag=True, help="Forget it and its answer, if it has ended.")
@as_json
@pass_context
def job(context: CommandContext, id: str, wait: bool, result: bool, cancel: bool, forget: bool, json_: bool) -> None:
    """Show how a job is, wait for it, or cancel it. What it failed with is how this command fails, with status 1."""
    if (cancel or forget) + wait + result > 1 or (cancel and forget):
        raise click.UsageError("--cancel and --forget go alone")
    client = context.client
    if cancel or forget:
        row = client.cancel(id, forget)
    else:
        row = client.job(id)
        while wait and "ended" not in row:
            row = client.job(id, WAIT_S)
        if wait or result:
            kind, answer = client.result(id)
            show_bytes(kind, (answer,)) if kind else show_answer(answer.removesuffix(b"\n"))
            return
    if json_:
        show_json(as_told(row))
    elif forget:
        click.echo(f"job {id} is forgotten, and its answer")
    else:
        table([as_told(row)], JOB_COLUMNS)
