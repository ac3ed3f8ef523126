"""`dormouse simulate` and `replay`, which need no node."""

from typing import Any

import click

from dormouse.core.cli.frame import as_json
from dormouse.core.cli.parts import part


def _capacity(_context: click.Context, _option: click.Parameter, found: str | None) -> str | None:
    """An option whose value may be left out takes the word after it, even if that is the scenario."""
    if found not in (None, "gpus", "functions"):
        raise click.BadParameter(f"{found!r} is neither gpus nor functions; write one of them, or this option last")
    return found


@click.command()
@click.argument("file", metavar="SCENARIO.toml")
@click.option("--policy", metavar="NAME,...", help="Compare named policies instead of the scenario's own.")
@click.option("--seed", type=click.IntRange(min=0), help="Instead of the scenario's.")
@click.option(
    "--seeds", type=click.IntRange(1, 1000), default=1, metavar="N", help="Run each with N seeds: mean and spread."
)
@click.option(
    "--pools",
    type=click.Choice(["ideal", "exact"]),
    default="ideal",
    help="Memory whose bytes need not lie together (the default), or planned to the address as executors do.",
)
@click.option("--by-model", is_flag=True, help="Also what came out for each model: who misses.")
@click.option("--functions", metavar="N,...", help="Other numbers of functions than the scenario's, in turn.")
@click.option(
    "--find-capacity",
    "find",
    is_flag=False,
    flag_value="gpus",
    metavar="[gpus|functions]",
    callback=_capacity,
    help="How many GPUs are enough (the default), or for how many functions the GPUs are.",
)
@click.option("--target", type=float, metavar="SHARE", help="Of functions that must comply for that; default 1.")
@click.option("--limit", type=int, metavar="N", help="The most that is tried for that; default 64 or 10000.")
@click.option("--plot", metavar="DIR", help="Write figures (PNG) into it; needs matplotlib.")
@as_json
def simulate(file: str, json_: bool, **options: Any) -> None:
    """Run the scheduler on GPUs, models and requests that SCENARIO.toml describes. Needs no node and no GPU.

    \b
    Policies:
      scenario       [policy] of the file, which is what runs without --policy
      default        what a node runs
      fifo edf feasible
                     the same with another order of requests
      torpor torpor-edf torpor-drop torpor-fifo torpor-random torpor-lru torpor-block
                     the paper's, and without one of its parts each
      simple-swap nonswap native infless-ka infless-oracle sllm
                     what papers compare with
    Keys of --json, in which the table has its columns:
      functions requests
                     that were asked; one more to warm each function is not counted
      compliant      share of functions of whose requests enough met the deadline
      p50_ms p98_ms  latency
      late           share of requests that missed their deadline or had no answer
      wakes_per_request
                     share of requests that had to copy some of their model
      gpu_busy       share of the time that GPUs were leased
      host_gbps      10^9 bytes per second copied from the host, all GPUs together
      links          share of the time in which each link carried bytes; the table has the busiest
      models         the same for the functions of each model (--by-model prints it)
      each_seed      with --seeds: the output of each run; all else is the mean

    With --functions, these for each number; with --find-capacity, for each number that was tried, and the answer; if
    no number is enough, the exit status is 2. --plot writes latency.png, load.png (GPUs) and, where there are several
    numbers, compliance.png; with --functions, the first two once for each.

    docs/simulator.md describes SCENARIO.toml.
    """
    part("simulator").main(file, json_=json_, **options)


@click.command()
@click.argument("file", metavar="RECORDING")
@as_json
def replay(file: str, json_: bool) -> None:
    """Feed a controller's recording to the scheduler again and compare what it decides.

    A node records with `[record] path = "FILE"` in its node file. Prints the number of events and actions, and
    "identical" or the first difference with both sides; then the exit status is 1.

    \b
    Keys of --json:
      dormouse       version that recorded
      identical      whether all actions are the same
      events actions seconds
                     whole events, their actions, time between first and last
      cut_nbytes     of a last frame that was not written to its end
      difference     null, or: number at_s event recorded replayed
    """
    part("replay").main(file, json_)
