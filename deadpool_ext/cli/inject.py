"""``deadpool inject``: break something in a running job on purpose."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(
    short_help="Break something in a running job on purpose.",
    epilog="Examples: deadpool inject runs/a kill-node:node=n2 (now); "
    "deadpool inject runs/a raise-rank:rank=3,step=40,phase=backward",
)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("spec")
def inject(directory: Path, spec: str) -> None:
    """Inject the fault SPEC into the running job whose run directory is DIR.

    SPEC is KIND:key=value,... as for --fault of 'deadpool local'; without step= and after= it happens now.
    """
    from deadpool_ext.control.operator_client import ask
    from deadpool_ext.protocol.types import UsageError

    for told in ask(directory, "inject", {"spec": spec}):
        if not told.ok:
            raise UsageError(told.text)
        click.echo(told.text)
