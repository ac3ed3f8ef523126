"""The `dormouse` command: each command is one or two calls to a node, printed.

Exit status: 0 ok, 1 failed, 2 usage, 3 not found, 4 no node answers, 5 refused or over a limit, 130 interrupted. rich
and everything heavy is imported inside the command that needs it, so that `--help` is fast.
"""

import errno
import os
import re
import sys
from typing import Any, Final, NoReturn

import click
from click.core import ParameterSource

from dormouse.core.cli import (
    audit,
    backup,
    bench,
    completion,
    cost,
    deploy,
    dev,
    functions,
    gpu,
    invoke,
    keys,
    node,
    offline,
    requests,
    secrets,
    service,
    versions,
)
from dormouse.core.cli.frame import (
    FAILED,
    INTERRUPTED,
    NOT_FOUND,
    REFUSED,
    USAGE,
    CommandContext,
    advice,
    begin,
    ended_in_order,
    json_wanted,
    show_failure,
)
from dormouse.core.exits import UNREACHABLE
from dormouse.core.node.refusals import CallRefused, Unreachable
from dormouse.core.terminal import harmless_streams
from dormouse.schemas.errors import ConfigError, DormouseError, Unsafe

ELSEWHERE: Final = {
    "list": "ls", "ps": "ls", "functions": "ls", "remove": "rm", "delete": "rm", "undeploy": "rm", "start": "up",
    "serve": "up", "stop": "down", "call": "invoke", "predict": "invoke", "log": "logs", "info": "status",
    "versions": "history", "alias": "traffic", "key": "keys", "secrets": "secret", "undrain": "gpu",
}  # fmt: skip
"""Names of commands in other programs."""


class Commands(click.Group):
    """Says which command or function may have been meant, where there is none of the name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from difflib import get_close_matches

        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            names = [ELSEWHERE[args[0]]] if args[0] in ELSEWHERE else get_close_matches(args[0], self.commands, 2)
            if not names or args[0].startswith("-"):
                raise
            raise click.UsageError(f"{error.message} (Did you mean {' or '.join(names)}?)", ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CallRefused as error:
            if error.code == "unknown_function" and not error.of_function and (names := meant(ctx.obj, str(error))):
                text = f"{error} (did you mean {' or '.join(names)}?)"
                raise CallRefused(error.status, error.code, text) from error
            raise


def meant(context: CommandContext, refusal: str) -> list[str]:
    """Names of functions like the one that a refusal names; none if the node does not say."""
    from difflib import get_close_matches

    found = re.search(r"no function '([^']+)'", refusal)
    try:
        names = [row["name"] for row in context.client.functions()] if found is not None else []
    except (CallRefused, Unreachable, DormouseError):
        return []
    return [] if found is None else get_close_matches(found[1], names)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "color": True})
@click.option("--run", envvar="DORMOUSE_RUN", metavar="DIR", help="The node's run directory (or DORMOUSE_RUN).")
@click.option("--node", metavar="NAME", help="The node's name, if it has the default run directory.")
@click.version_option(package_name="dormouse")
@click.pass_context
def cli(context: click.Context, run: str | None, node: str | None) -> None:
    """More PyTorch models on a machine than its GPUs can hold."""
    written = run is not None and context.get_parameter_source("run") is not ParameterSource.ENVIRONMENT
    if node is not None and run is not None:
        if written:
            raise click.UsageError("give --run or --node, not both: each names a node")
        run = None  # what was written beats what the shell happens to have
    context.obj = CommandContext(run, node, written)


for command in (
    *(node.up, node.down, node.drain, node.status, node.policy, node.doctor),
    *(
        deploy.deploy,
        functions.ls,
        invoke.invoke,
        functions.logs,
        functions.rm,
        functions.restart,
        functions.run,
    ),
    gpu.gpu,
    *(requests.requests, requests.jobs, requests.job),
    *(versions.history, versions.rollback, versions.traffic, versions.pin, versions.unpin),
    audit.audit,
    *(
        cost.cost,
        keys.keys,
        secrets.secret,
        completion.completion,
        service.install_service,
    ),
    *(backup.backup, backup.restore),
    *(bench.bench, dev.dev, dev.top, dev.dashboard, offline.simulate, offline.replay),
):
    cli.add_command(command)


def leave(status_: int, message: str, code: str = "", text: str = "", hint: str | None = None) -> NoReturn:
    """``code``: of JSON, in which ``text`` stands for the message; "": nothing can be printed any more."""
    if code and json_wanted():
        show_failure(code, text or message, hint)
    click.echo(f"dormouse: {message}", err=True)
    sys.exit(status_)


def print_no_more() -> None:
    """Else Python complains at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """The console script."""
    with harmless_streams(), ended_in_order():
        _carried_out()


def _carried_out() -> None:
    """Errors become one line and an exit status; with --json, JSON on the standard output beside that."""
    begin()
    try:
        cli.main(prog_name="dormouse", standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as error:
        leave(INTERRUPTED, "; ".join(["interrupted", *map(str, (error.__cause__ or error).args)]), "interrupted")
    except click.ClickException as error:
        if json_wanted(error if isinstance(error, click.UsageError) else None):
            context = getattr(error, "ctx", None)
            hint = f"see {context.command_path} --help" if context is not None else ""
            show_failure("usage", error.format_message(), hint)
        error.show()
        sys.exit(USAGE)
    except Unreachable as error:
        leave(UNREACHABLE, str(error), "unreachable")
    except CallRefused as error:
        by_status = {404: NOT_FOUND, 400: REFUSED, 403: REFUSED, 409: REFUSED, 413: REFUSED, 429: REFUSED}
        by_status |= {415: REFUSED} | ({422: REFUSED} if error.code == "invalid_request" else {})
        status = FAILED if error.of_function else by_status.get(error.status, FAILED)
        leave(status, f"{error.code}: {error}", error.code, str(error), advice(error))
    except Unsafe as error:
        leave(REFUSED, " ".join(str(error).splitlines()), "unsafe")
    except ConfigError as error:
        leave(USAGE, " ".join(str(error).splitlines()), "config")  # names from files may contain anything
    except DormouseError as error:
        leave(FAILED, str(error), "failed")
    except BrokenPipeError:
        print_no_more()
        sys.exit(FAILED)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        print_no_more()
        leave(FAILED, f"cannot print: {error.strerror}; make room, or print elsewhere")


if __name__ == "__main__":
    main()
