"""``deadpool swap`` and ``deadpool drain``: replace a node of a running job on purpose, with nothing computed twice."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(
    short_help="Let a spare take the seats of a node, which becomes a spare.",
    epilog="Example: deadpool swap runs/a --node n2 --to n4",
)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--node", required=True, metavar="NODE", help="The node whose seats move.")
@click.option("--to", default="", metavar="NODE", help="The spare that takes them.  [default: the first warm one]")
@click.option("--no-wait", is_flag=True, help="Return as soon as the job has agreed, not when it is done.")
def swap(directory: Path, node: str, to: str, no_wait: bool) -> None:
    """Move the seats of a node of the running job whose run directory is DIR to a warm spare.

    The spare sets itself up while training goes on. Then all ranks stand still between two steps, the seats change
    hands, and training goes on: no step is computed twice. The node is a spare afterwards.
    """
    request(directory, "swap", {"node": node, "to": to}, wait=not no_wait)


def request(directory: Path, command: str, arguments: dict[str, str], *, wait: bool) -> None:
    """Ask, print the answers, and wait for the last one if ``wait``. Raises UsageError with a refusal."""
    from deadpool_ext.control.operator_client import OperatorError, ask
    from deadpool_ext.protocol.types import UsageError

    agreed = False
    for told in ask(directory, command, {name: value for name, value in arguments.items() if value}):
        if not told.ok:
            raise OperatorError(told.text) if agreed else UsageError(told.text)
        click.echo(told.text)
        agreed = True
        if not wait:
            return
