"""Where seats are: the seats of a node index, failure domains, and the groups of Megatron's plain rank order."""

from __future__ import annotations

import re

from deadpool_ext.protocol.types import Layout, NodeId, Rank, UsageError


def plain_dp_groups(
    *, tensor_parallel: int, data_parallel: int, pipeline_parallel: int
) -> tuple[tuple[Rank, ...], ...]:
    """Data-parallel groups of the order tp-dp-pp (tp changes fastest): ``rank = tp + TP * (dp + DP * pp)``."""
    return tuple(
        tuple(tp + tensor_parallel * (dp + data_parallel * pp) for dp in range(data_parallel))
        for pp in range(pipeline_parallel)
        for tp in range(tensor_parallel)
    )


def plain_layout(
    *, ranks_per_node: int, tensor_parallel: int = 1, data_parallel: int = 1, pipeline_parallel: int = 1
) -> Layout:
    """Layout of the order tp-dp-pp; Raises UsageError where the ranks do not fill whole nodes."""
    world_size = tensor_parallel * data_parallel * pipeline_parallel
    if ranks_per_node < 1 or world_size % ranks_per_node:
        raise UsageError(f"{world_size} ranks do not fill nodes of {ranks_per_node} ranks")
    return Layout(
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        data_parallel=data_parallel,
        dp_groups=plain_dp_groups(
            tensor_parallel=tensor_parallel, data_parallel=data_parallel, pipeline_parallel=pipeline_parallel
        ),
    )


def seats_of_node(layout: Layout, node_index: int) -> tuple[Rank, ...]:
    """Seats that the ``node_index``-th active node fills at the start, ascending."""
    first = node_index * layout.ranks_per_node
    return tuple(range(first, first + layout.ranks_per_node))


def node_domains(layout: Layout) -> tuple[str, ...]:
    """The node as failure domain: index rank -> index of the node that fills it at the start, as text."""
    return tuple(str(rank // layout.ranks_per_node) for rank in range(layout.world_size))


def node_key(node: NodeId) -> tuple[tuple[int, int, str], ...]:
    """Sort key of node names in natural order: n2 before n10."""
    parts = re.findall(r"\d+|\D+", node)
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts)
