"""Entry point of ``deadpool``: a table of subcommands, loaded lazily, and one place where errors become one line.

Loading lazily matters: ``deadpool status`` must not wait for torch, and a subcommand whose module is not there yet is
simply not listed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence

import click

from deadpool_ext import __version__
from deadpool_ext.protocol.types import DeadpoolError, UsageError

EXIT_SCRIPT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNRECOVERABLE = 3
EXIT_INTERRUPTED = 130

#: Name on the command line -> ``module:click command``, in the order of ``deadpool --help``.
COMMANDS: Mapping[str, str] = {
    "local": "deadpool_ext.cli.local:local",
    "launch": "deadpool_ext.cli.launch:launch",
    "status": "deadpool_ext.cli.status:status",
    "inject": "deadpool_ext.cli.inject:inject",
    "swap": "deadpool_ext.cli.swap:swap",
    "drain": "deadpool_ext.cli.drain:drain",
    "compare": "deadpool_ext.cli.compare:compare",
    "report": "deadpool_ext.cli.report:report",
    "plan": "deadpool_ext.cli.plan:plan",
    "simulate": "deadpool_ext.cli.simulate:simulate",
    "bench": "deadpool_ext.cli.bench:bench",
    "data": "deadpool_ext.cli.data:data",
}


class LazyGroup(click.Group):
    """A click group whose commands are imported when they are looked up."""

    def __init__(self, *, table: Mapping[str, str], **attributes: object) -> None:
        super().__init__(**attributes)  # type: ignore[arg-type]
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names whose module exists, in the table's order."""
        return [name for name, target in self._table.items() if _module_exists(target)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now; None when the name or its module does not exist."""
        target = self._table.get(cmd_name)
        if target is None or not _module_exists(target):
            return None
        module, _, attribute = target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{target} is not a click command")
        return command


def _module_exists(target: str) -> bool:
    return importlib.util.find_spec(target.partition(":")[0]) is not None


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="deadpool")
def cli() -> None:
    """Megatron-LM training that survives the loss of nodes without restarting.

    Start with 'deadpool data --help' (make training data) and 'deadpool local --help' (train on this machine). On a
    cluster, 'deadpool launch' is started once on each node. With DEADPOOL_DEBUG=1 in the environment, errors that are
    otherwise one line come with their traceback.
    """


def exit_code_of(error: DeadpoolError) -> int:
    """The code to exit with: the error's own ``exit_code`` where it has one, 2 for usage, else 1."""
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return own
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_SCRIPT_FAILED


def run(arguments: Sequence[str], command: click.Command = cli, name: str = "deadpool") -> int:
    """Run one command line (without the program's ``name``) and return its exit code; prints errors as one line.

    With ``DEADPOOL_DEBUG=1`` a :class:`DeadpoolError` propagates with its traceback instead.
    """
    debug = os.environ.get("DEADPOOL_DEBUG", "") not in ("", "0")
    try:
        result = command.main(args=list(arguments), prog_name=name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return EXIT_USAGE
    except click.ClickException as error:
        where = f" (see '{error.ctx.command_path} --help')" if isinstance(error, click.UsageError) and error.ctx else ""
        _complain(f"{error.format_message()}{where}")
        return EXIT_USAGE
    except click.exceptions.Abort:
        _complain("interrupted")
        return EXIT_INTERRUPTED
    except DeadpoolError as error:
        if debug:
            raise
        _complain(str(error))
        return exit_code_of(error)
    # Outside standalone mode click hands back the code of ctx.exit(), or what the command returned.
    return result if isinstance(result, int) else 0


def _complain(message: str) -> None:
    line = " ".join(message.split())
    print(f"deadpool: {line}", file=sys.stderr)


def main() -> None:
    """Console script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
