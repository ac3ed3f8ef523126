"""`dormouse bench`: measures a function under a load."""

import json
import sys
from typing import Any, Final

import click

from dormouse.core.cli.completion import function_argument
from dormouse.core.cli.frame import CommandContext, json_option, pass_context
from dormouse.core.cli.statusview import told
from dormouse.core.node.refusals import CallRefused
from dormouse.core.output import over, show_json, table
from dormouse.core.quantities import duration

MAX_RATE: Final = 2000.0
BAR: Final = 40
"""Characters of the longest bar."""

SLICE: Final = ["from", "sent", "late", "p50", "p99", ""]


@click.command()
@function_argument()
@click.argument("request", default="null", metavar="[JSON|TEXT|@FILE]")
@click.option("--rate", type=click.FloatRange(0, MAX_RATE, min_open=True), default=10.0, show_default=True,
              help="Requests per second; they arrive at random.")  # fmt: skip
@click.option("--duration", default="30s", show_default=True, metavar="TIME", help="For so long, e.g. 60s or 5m.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the arrivals.")
@json_option("Print JSON: outcomes, and times in milliseconds.")
@pass_context
def bench(context: CommandContext, name: str, request: str, rate: float, duration: str, seed: int, json_: bool) -> None:
    """Send a function requests at a rate, and show its latencies against its deadline.

    Requests do not wait for the answers to earlier ones, and their times count from when they were due. A language
    model streams its answers, and its deadline is for the first part. The exit status is 1 if a request was not
    answered.
    """
    from dormouse.core.cli import load
    from dormouse.core.cli.invoke import body_of
    from dormouse.core.config import parse_duration_ms

    client = context.client
    row = next((row for row in client.functions() if row["name"] == name), None)
    if row is None:
        raise CallRefused(404, "unknown_function", f"there is no function {name!r}; `dormouse ls` says which there are")
    body = body_of(context, name, request)
    if streamed := row.get("llm") is not None:
        body = _streamed(body)
    deadline_s = (row["llm"]["wanted_ttft_ms"] if streamed else row["deadline_ms"]) / 1000
    due = load.arrivals(rate, parse_duration_ms(duration) / 1000, seed)

    def told(number: int) -> None:
        over(f"{number} of {len(due)} sent")

    sent = load.run(lambda: (data for _, data in client.stream(name, body)), due, told)
    over("")
    found = load.summary(sent, deadline_s, streamed)
    if json_:
        show_json({"function": name, "rate_s": rate, **found})
    else:
        _show(name, rate, found, row)
    if found["outcomes"] != {load.OK: len(sent)}:
        sys.exit(1)


def _streamed(body: bytes) -> bytes:
    """The same request of a language model, for an answer in parts."""
    try:
        value = json.loads(body)
    except ValueError:
        return body  # the node says what is wrong with it
    return json.dumps(value | {"stream": True}).encode() if isinstance(value, dict) else body


def _show(name: str, rate: float, found: dict[str, Any], row: dict[str, Any]) -> None:
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in found["outcomes"].items()) or "nothing was sent"
    click.echo(f"{name}: {found['sent']} requests at {rate:g} per second: {outcomes}")
    for outcome, why in found["errors"].items():
        click.echo(f"{outcome}: {why}")
    for what, times in (("first part", found["first_ms"]), ("answer", found["latency_ms"])):
        if times is not None:
            click.echo(f"{what}: " + ", ".join(f"{key} {duration(value)}" for key, value in times.items()))
    if found["in_time"] is not None:
        kept = "kept" if found["in_time"] * 100 >= row["percentile"] else "missed"
        wanted = f"{row['percentile']:g}% in {duration(found['deadline_ms'])}"
        click.echo(f"in time: {found['in_time']:.1%}; {wanted} wanted: {kept}")
    slowest = max((part["p99_ms"] or 0.0 for part in found["slices"]), default=0.0) or 1.0
    rows = [
        {
            "from": duration(1000 * part["from_s"]),
            "sent": part["sent"],
            "late": part["late"],
            "p50": told(part["p50_ms"]),
            "p99": told(part["p99_ms"]),
            "": "#" * round(BAR * (part["p99_ms"] or 0.0) / slowest),
        }
        for part in found["slices"]
    ]
    table(rows, SLICE)
