"""What a coordinator is told once, at its start."""

from __future__ import annotations

from dataclasses import dataclass, field

from deadpool_ext.protocol.deadlines import Deadlines
from deadpool_ext.protocol.messages import JobSpec
from deadpool_ext.protocol.types import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """The job and its size in nodes.

    ``nodes`` x ``job.layout.ranks_per_node`` must be the world size. ``spares`` is how many nodes more are waited
    for at the start. ``checkpoint`` is named in the reason when the job stops unrecoverably. Raises UsageError.
    """

    job: JobSpec
    nodes: int
    spares: int = 0
    deadlines: Deadlines = field(default_factory=Deadlines)
    replicas: int = 1
    seat_domains: tuple[str, ...] = ()  # index: rank; failure domain (rack, switch); empty: the node
    allow_unprotected: bool = False  # start although some seats have no peer in another domain
    transient_limit: int = 3  # worker deaths on one node within transient_window_s that count as a bad node
    transient_window_s: float = 600.0
    fruitless_limit: int = 4  # generations in a row without a new step, node losses not counted; then exit 4
    checkpoint: str = ""
    train_iters: int | None = None  # the last iteration, where known

    def __post_init__(self) -> None:
        layout = self.job.layout
        if self.nodes < 1 or self.spares < 0:
            raise UsageError(f"nodes={self.nodes} and spares={self.spares}: at least one node, no negative spares")
        if self.nodes * layout.ranks_per_node != layout.world_size:
            raise UsageError(
                f"{self.nodes} nodes of {layout.ranks_per_node} ranks make "
                f"{self.nodes * layout.ranks_per_node} ranks, but the layout has {layout.world_size}"
            )
        if self.seat_domains and len(self.seat_domains) != layout.world_size:
            raise UsageError(f"seat_domains names {len(self.seat_domains)} of {layout.world_size} ranks")
        if self.transient_limit < 1 or self.fruitless_limit < 1 or self.transient_window_s <= 0:
            raise UsageError("transient_limit, fruitless_limit and transient_window_s must be positive")
