"""Every deadline of the job in one validated value (all in seconds)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from deadpool_ext.protocol.types import UsageError

# (shorter, longer, why): what must hold between deadlines for each to mean what its name says.
_ORDERED: tuple[tuple[str, str, str], ...] = (
    ("heartbeat_s", "node_timeout_s", "several heartbeats must fit into the time after which a silent node is lost"),
    ("collective_grace_s", "node_timeout_s", "the grace waits for evidence; silence becomes evidence by then"),
    ("node_timeout_s", "fence_s", "a silent node must be found silent before it is blamed for not acknowledging"),
    ("node_timeout_s", "construct_s", "a silent newcomer must be found silent before it is blamed for being slow"),
    ("node_timeout_s", "rebuild_s", "a silent node must be found silent before a rebuild is given up"),
    ("construct_s", "setup_s", "a newcomer's set-up is part of what the job's set-up does"),
    ("rebuild_s", "stall_s", "a rebuild must have its time before the job counts as stalled"),
    ("restore_s", "stall_s", "a restore must have its time before the job counts as stalled"),
    ("redundancy_s", "gate_s", "the coordinator must act before workers give up at the gate"),
    ("node_timeout_s", "collective_fence_s", "a silent node must be found before workers give up waiting for a fence"),
    ("fence_s", "recover_s", "workers must wait for the plan at least as long as the slowest may take to unwind"),
    ("construct_s", "recover_s", "workers must wait at least as long as a newcomer may take"),
    ("fetch_s", "recover_s", "workers must wait at least as long as a fetch may take"),
    ("spare_wait_s", "recover_s", "workers must wait at least as long as a spare may take to warm up"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Deadlines of coordinator, agents and workers, checked against each other.

    Raises :class:`UsageError` naming the field, or the pair of fields, that cannot be.
    """

    heartbeat_s: float = 0.5  # an agent's heartbeat period
    node_timeout_s: float = 10.0  # silence after which a node is lost
    collective_grace_s: float = 0.5  # after a failed collective (in set-up: or script error): for what explains it
    health_period_s: float = 60.0  # between two runs of a node's health checks
    fence_s: float = 20.0  # Fence -> FenceAck, else the node is lost
    construct_s: float = 120.0  # Assign -> Constructed of a newcomer, else its node is lost
    store_s: float = 30.0  # HostStore -> StoreReady, else the hosting node is lost
    fetch_s: float = 120.0  # Recover -> Fetched of every replica, else another generation
    rebuild_s: float = 60.0  # Rendezvous -> Rebuilt of every rank, else another generation
    restore_s: float = 120.0  # last Rebuilt -> Restored of every rank, else another generation
    redundancy_s: float = 300.0  # resume -> the target committed again, else another generation
    stall_s: float = 1800.0  # no finished step and no commit while running, else another generation
    join_s: float = 600.0  # job start -> enough nodes ready, else the job stops
    spare_wait_s: float = 60.0  # enough nodes ready -> start without the missing spares; also for a spare to warm up
    setup_s: float = 600.0  # Assign -> initial version committed, else the job stops
    finish_s: float = 86400.0  # first rank at the end of the script -> every rank, else the job stops
    exit_s: float = 60.0  # Finish -> every worker exited, else it is left behind
    fault_group_s: float = 2.0  # first of several faults meant to happen together reached -> all are struck
    # Patience of a worker: it gives up by itself only long after the coordinator should have acted.
    gate_s: float = 600.0  # at the gate before an optimizer step
    collective_fence_s: float = 120.0  # after a failed collective, for a fence
    recover_s: float = 600.0  # unwound, for the plan and the rendezvous

    def __post_init__(self) -> None:
        for name, value in self.to_options().items():
            if not math.isfinite(value) or value <= 0:
                raise UsageError(f"deadline {name}={value:g} must be a positive number of seconds")
        if self.node_timeout_s < 3 * self.heartbeat_s:
            raise UsageError(
                f"deadlines heartbeat_s={self.heartbeat_s:g} and node_timeout_s={self.node_timeout_s:g}: "
                "three heartbeats must fit into the timeout"
            )
        for shorter, longer, why in _ORDERED:
            low, high = float(getattr(self, shorter)), float(getattr(self, longer))
            if low > high:
                raise UsageError(f"deadlines {shorter}={low:g} and {longer}={high:g} are in the wrong order: {why}")

    def to_options(self) -> dict[str, float]:
        """All deadlines by name, as ``JobSpec.options`` carries them."""
        return {item.name: float(getattr(self, item.name)) for item in dataclasses.fields(self)}

    @classmethod
    def from_options(cls, options: Mapping[str, float]) -> Deadlines:
        """Inverse of :meth:`to_options`; names left out keep their defaults, unknown ones raise UsageError."""
        known = {item.name for item in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                raise UsageError(f"unknown deadline {name!r}; known: {', '.join(sorted(known))}")
        return cls(**{name: float(value) for name, value in options.items()})
