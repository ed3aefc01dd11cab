"""``deadpool drain``: take a node out of a running job on purpose, with nothing computed twice."""

from __future__ import annotations

from pathlib import Path

import click

from deadpool_ext.cli.swap import request


@click.command(
    short_help="Let a spare take the seats of a node, which leaves the job.",
    epilog="Example, before maintenance: deadpool drain runs/a --node n2",
)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--node", required=True, metavar="NODE", help="The node that leaves, with seats or a spare.")
@click.option("--to", default="", metavar="NODE", help="The spare that takes its seats.  [default: the first warm one]")
@click.option("--no-wait", is_flag=True, help="Return as soon as the job has agreed, not when it is done.")
def drain(directory: Path, node: str, to: str, no_wait: bool) -> None:
    """Move the seats of a node of the running job whose run directory is DIR to a warm spare, and let the node go.

    As 'deadpool swap', but the node's processes end (its agent with exit code 0), so that it can be serviced. A spare
    just leaves.
    """
    request(directory, "drain", {"node": node, "to": to}, wait=not no_wait)
