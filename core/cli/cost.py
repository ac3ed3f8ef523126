"""`dormouse cost`: the use of functions, and its cost."""

from typing import Any, Final

import click

from dormouse.core.cli.completion import function_argument
from dormouse.core.cli.frame import CommandContext, as_json, pass_context
from dormouse.core.output import show_json, table
from dormouse.core.times import utc

COLUMNS: Final = [
    "tenant", "function", "requests", "prompt", "completion", "gpu_s", "gpu_GiB_s", "host_GiB_s", "cost",
]  # fmt: skip


@click.command()
@function_argument(required=False)
@click.option("--since", default="24h", show_default=True, help="How long ago (30m, 2h, 7d), or a time (ISO 8601).")
@click.option(
    "--prices", "path", metavar="FILE", help="Prices, as TOML or JSON.  [default: none, so only use is shown]"
)
@as_json
@pass_context
def cost(context: CommandContext, name: str | None, since: str, path: str | None, json_: bool) -> None:
    """Show what functions have used, by function and tenant, and what it costs.

    Seconds of GPUs; GiB of GPU memory over seconds (weights, adapters, keys and values, activations) and of host
    memory; tokens and requests. What several functions share is split among them by how long each has used it.

    A file of prices has some of these, all for one unit; what is missing is free:

    \b
      currency = "EUR"
      gpu_s = 0.0006              # a second of a GPU
      gpu_gib_s = 0.00001         # a GiB of GPU memory for a second
      host_gib_s = 0.000001       # a GiB of host memory for a second
      prompt_tokens_1m = 0.1      # a million tokens of prompts
      completion_tokens_1m = 0.4  # a million tokens that were made

    Use is known by minutes for two hours, by hours for two days, by days for a month: since when the numbers are is
    shown.
    """
    from dormouse.core.prices import Prices, bill, load_prices, parse_since

    since_s = parse_since(since)
    prices = load_prices(path) if path is not None else Prices()
    used = context.client.usage(since_s, name or "")
    billed = bill(used["functions"], prices)
    if json_:
        show_json({key: used[key] for key in ("since_s", "until_s")} | {"currency": prices.currency} | billed)
        return
    if not billed["functions"]:
        click.echo(f"nothing was used since {utc(used['since_s'])}")
        return
    click.echo(f"from {utc(used['since_s'])} to {utc(used['until_s'])}")
    rows = [_row(row, row["tenant"], row["function"], prices) for row in billed["functions"]]
    if len(billed["tenants"]) > 1:
        rows += [_row(row, row["tenant"], "(all)", prices) for row in billed["tenants"]]
    rows.append(_row(billed["total"], "", "total", prices))
    table(rows, COLUMNS if path is not None else COLUMNS[:-1])


def _row(row: dict[str, Any], tenant: str, function: str, prices: Any) -> dict[str, str]:
    from dormouse.core.prices import GIB, ON_GPU

    nobodys = not tenant and not function
    return {
        "tenant": tenant,
        "function": "(nobody's)" if nobodys else function,
        "requests": f"{row['requests']}",
        "prompt": f"{row['prompt_tokens']}",
        "completion": f"{row['made_tokens']}",
        "gpu_s": f"{row['gpu_s']:.3f}",
        "gpu_GiB_s": f"{sum(row[name] for name in ON_GPU) / GIB:.3f}",
        "host_GiB_s": f"{row['host_nbyte_s'] / GIB:.3f}",
        "cost": f"{row['cost']['total']:.6f} {prices.currency}".rstrip(),
    }
