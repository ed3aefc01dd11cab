"""``deadpool compare``: the verdict over two run directories, for scripts and people."""

from __future__ import annotations

from pathlib import Path

import click

from deadpool_ext.control.operator_client import is_running
from deadpool_ext.control.rundir import EVENTS, FINAL
from deadpool_ext.protocol.types import UsageError
from deadpool_ext.rundir.compare import first_difference, read_run, summary


@click.command(short_help="Are two runs bit-identical?")
@click.argument("dir_a", type=click.Path(path_type=Path))
@click.argument("dir_b", type=click.Path(path_type=Path))
@click.pass_context
def compare(ctx: click.Context, dir_a: Path, dir_b: Path) -> None:
    """Compare the runs recorded in DIR_A and DIR_B, bit for bit.

    Compared: loss and gradient norm of every iteration (of a replayed iteration the last computation counts, and all
    its computations must agree), the digest of its samples where both runs have it, and the digests of every seat's
    final weights and optimizer state.

    \b
    Exit code 0: identical.  1: not; the first difference is printed.  2: a file is missing or unreadable.
    """
    for directory in (dir_a, dir_b):
        if (directory / EVENTS).exists() and not (directory / FINAL).exists():
            running = is_running(directory)
            why = (
                "the job is still running"
                if running
                else "the job was killed before its end"
                if running is False
                else ""
            )
            if why:
                raise UsageError(f"{directory}: {why}; there is no final state to compare")
    a, b = read_run(dir_a), read_run(dir_b)
    difference = first_difference(a, b)
    if difference is not None:
        click.echo(f"different: {difference}")
        ctx.exit(1)
    click.echo(summary(a, b))
