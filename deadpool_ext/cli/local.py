"""``deadpool local``: a whole job on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from deadpool_ext.protocol.faults import AVAILABLE, PHASES
from deadpool_ext.protocol.types import UsageError


def parse_deadlines(pairs: tuple[str, ...]) -> dict[str, float]:
    """``name=seconds`` pairs. Raises UsageError."""
    values: dict[str, float] = {}
    for pair in pairs:
        name, equals, seconds = pair.partition("=")
        try:
            values[name] = float(seconds)
        except ValueError as error:
            raise UsageError(f"--deadline {pair}: give NAME=SECONDS") from error
        if not equals:
            raise UsageError(f"--deadline {pair}: give NAME=SECONDS")
    return values


@click.command(
    short_help="Run a whole job on this machine; nodes are process trees.",
    epilog="Example: deadpool local --nodes 4 --ranks-per-node 2 --spares 1 "
    "--fault kill-node:node=n2,step=5,phase=backward -- pretrain_gpt.py --deadpool ARGS...",
)
@click.option("--nodes", type=int, required=True, help="Nodes that train.")
@click.option(
    "--ranks-per-node", type=int, default=1, show_default=True, help="Ranks (processes that train) on each node."
)
@click.option("--spares", type=int, default=0, show_default=True, help="Nodes more, warm and idle, that take over.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="New or empty directory for events, steps, logs and the result.  [default: runs/TIME]",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="SPEC",
    help="Break something on purpose, e.g. kill-node:node=n2,step=5,phase=backward or kill-node:node=n2,after=10 "
    f"(seconds). Kinds: {', '.join(AVAILABLE)}; phases of a step: {', '.join(PHASES)}. May be repeated.",
)
@click.option("--seed", type=int, help="Passed to the script as --seed, unless it is given one.")
@click.option(
    "--deadline",
    "deadlines",
    multiple=True,
    metavar="NAME=SECONDS",
    help="Change a deadline, e.g. node_timeout_s=20 (an unknown name lists all). May be repeated.",
)
@click.option("--preload", multiple=True, hidden=True, help="Import these instead of the trainer.")
@click.option("--preflight", hidden=True, help="module:function that describes the job.")
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGS]...")
@click.pass_context
def local(
    context: click.Context,
    nodes: int,
    ranks_per_node: int,
    spares: int,
    run_dir: Path | None,
    faults: tuple[str, ...],
    seed: int | None,
    deadlines: tuple[str, ...],
    preload: tuple[str, ...],
    preflight: str | None,
    script: tuple[str, ...],
) -> None:
    """Run SCRIPT, normally pretrain_gpt.py, on nodes that are process trees of this machine.

    With --deadpool among ARGS the job is protected: when a node dies a spare takes over and training goes on. Without
    it SCRIPT runs as under torchrun. ARGS are the script's own: 'python pretrain_gpt.py --help' lists them.

    Prints a line per step and per event; everything in full is in the run directory ('deadpool status DIR').
    Exit codes: 0 done, 1 the script failed, 2 usage, 3 no recovery was possible, 4 restarts made no progress.
    """
    from deadpool_ext.control import launcher

    options = launcher.LocalOptions(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        spares=spares,
        argv=script,
        run_dir=run_dir,
        faults=faults,
        seed=seed,
        preload=preload or launcher.preload_for(script),
        preflight=preflight or launcher.PREFLIGHT,
        deadlines=parse_deadlines(deadlines),
    )
    context.exit(launcher.run_local(options))
