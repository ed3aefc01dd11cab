"""``deadpool launch``: one node of a job, started once per node."""

from __future__ import annotations

from pathlib import Path

import click

from deadpool_ext.cli.local import parse_deadlines
from deadpool_ext.protocol.types import UsageError


def parse_address(text: str) -> tuple[str, int]:
    """``HOST:PORT``. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"--coordinator {text}: give HOST:PORT")
    return host.strip("[]"), int(port)


@click.command(
    short_help="Be one node of a job; started once on each node of a cluster.",
    epilog="Example, on every node I: deadpool launch --nodes 4 --ranks-per-node 8 --spares 1 --coordinator head:29400 "
    "--node-id I --secret-file ~/.deadpool-secret -- pretrain_gpt.py --deadpool ARGS...",
)
@click.option("--nodes", type=int, help="Nodes that train. Without it this node joins a running job, as a spare.")
@click.option("--ranks-per-node", type=int, help="Ranks (processes that train) on each node.  [default: 1]")
@click.option("--spares", type=int, default=0, show_default=True, help="Nodes more, warm and idle, that take over.")
@click.option("--coordinator", metavar="HOST:PORT", help="Where node 0 can be reached by all nodes.")
@click.option(
    "--join",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Join, as a spare, the running job whose run directory is DIR: its address, secret and size are found there.",
)
@click.option(
    "--node-id",
    required=True,
    metavar="I|NAME",
    help="Number or name, different on every node; node 0 runs the coordinator, those from --nodes on are spares.",
)
@click.option(
    "--secret-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with random content, the same on every node, readable by you alone.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="On node 0: new or empty directory for events, steps and the result.  [default: runs/TIME]",
)
@click.option("--host", help="Address of this node for the others.  [default: the one on the route to the coordinator]")
@click.option("--deadline", "deadlines", multiple=True, metavar="NAME=SECONDS", help="On node 0: change a deadline.")
@click.option("--preload", multiple=True, hidden=True, help="Import these instead of the trainer.")
@click.option("--preflight", hidden=True, help="module:function that describes the job.")
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGS]...")
@click.pass_context
def launch(
    context: click.Context,
    nodes: int | None,
    ranks_per_node: int | None,
    spares: int,
    coordinator: str | None,
    join: Path | None,
    node_id: str,
    secret_file: Path | None,
    run_dir: Path | None,
    host: str | None,
    deadlines: tuple[str, ...],
    preload: tuple[str, ...],
    preflight: str | None,
    script: tuple[str, ...],
) -> None:
    """Be node I of a protected job; start the same command, with its own --node-id, on every node and spare.

    More spares may come at any time: with the same command and another --node-id, without --nodes and SCRIPT, or
    with --join DIR. A spare may leave at any time (Ctrl-C); a node that trains is replaced when it does.
    """
    from deadpool_ext.control import cluster, launcher

    if join is not None and (nodes is not None or coordinator is not None or secret_file is not None or script):
        raise UsageError("--join DIR takes the place of --nodes, --coordinator, --secret-file and the script")
    if join is None and coordinator is None:
        raise UsageError("--coordinator HOST:PORT is needed (or, to join a running job as a spare, --join DIR)")
    found = cluster.find_job(join) if join is not None else None
    address = found.coordinator if found is not None else parse_address(coordinator or "")

    options = cluster.NodeOptions(
        nodes=nodes,
        ranks_per_node=ranks_per_node or (found.ranks_per_node if found is not None else 1),
        spares=spares,
        node=cluster.node_name(node_id),
        coordinator=address,
        argv=script,
        secret_file=secret_file,
        secret=found.secret if found is not None else None,
        run_dir=run_dir,
        host=host,
        deadlines=parse_deadlines(deadlines),
        preload=preload or (launcher.preload_for(script) if script else launcher.PRELOAD_PROTECTED),
        preflight=preflight or launcher.PREFLIGHT,
    )
    context.exit(cluster.run_node(options))
