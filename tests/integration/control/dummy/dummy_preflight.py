"""Describes the dummy job: pure data parallelism over all ranks."""

from __future__ import annotations

from typing import Any

from deadpool_ext.protocol.types import UsageError


def inspect(argv: list[str], nodes: int, ranks_per_node: int) -> dict[str, Any]:
    """The layout; ``--bad-argument`` is refused as the trainer refuses its own."""
    if "--bad-argument" in argv:
        raise UsageError("the dummy does not take --bad-argument")
    world_size = nodes * ranks_per_node
    return {
        "layout": {"tp": 1, "pp": 1, "dp": world_size, "dp_groups": [list(range(world_size))]},
        "train_iters": int(argv[argv.index("--steps") + 1]) if "--steps" in argv else None,
        "warnings": ["this is a dummy"],
    }
