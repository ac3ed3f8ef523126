"""`dormouse gpu drain` and `undrain`: one GPU is taken out of service, and put into it again, while the node runs."""

from typing import Any

import click

from dormouse.core.cli.frame import CommandContext, as_json, going_on, pass_context
from dormouse.core.output import show_json


@click.group()
def gpu() -> None:
    """Take a GPU out of service while the node runs, or put it into service again."""


number = click.argument("number", type=click.IntRange(min=0), metavar="N")


@gpu.command()
@number
@click.option("--wait/--no-wait", default=True, help="Until nothing of the node is there any more (default), or not.")
@as_json
@pass_context
def drain(context: CommandContext, number: int, wait: bool, json_: bool) -> None:
    """Begin nothing more on GPU N, and give it up when what runs there is over. `dormouse status` has the numbers.

    Requests go to the other GPUs; without one, they wait until their time limit, as they do while no GPU is up. Of a
    language model, what has begun is finished, and what comes meanwhile waits for that and goes elsewhere. Then the
    process that has the GPU ends, and with it all memory that the node has there. It stays so until `dormouse gpu
    undrain N` or `dormouse down`, also after `up --replace`. Ctrl-C ends the waiting, and not the drain.
    """
    with going_on(f"the drain goes on; `dormouse gpu undrain {number}` ends it"):
        told = context.client.drain_gpu(number, waits=wait)
    said = {
        "drained": "is drained: nothing of the node is there",
        "drains": f"drains: leases that are to end: {told['leases']}",
    }
    _show(told, said.get(told["state"], "was undrained meanwhile"), json_)


@gpu.command()
@number
@as_json
@pass_context
def undrain(context: CommandContext, number: int, json_: bool) -> None:
    """Have GPU N serve again. Where it has been given up, its process is started, which takes some seconds."""
    _show(context.client.drain_gpu(number, undo=True), "serves again", json_)


def _show(told: dict[str, Any], said: str, json_: bool) -> None:
    if json_:
        show_json(told)
    else:
        click.echo(f"GPU {told['gpu']} {said}")
